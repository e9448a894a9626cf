"""The notebook's entry point: AnnData enters, results under documented keys leave."""

from alphastomics.api.model import AlphaSTomics

__all__ = ["AlphaSTomics"]
