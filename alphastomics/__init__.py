"""AlphaSTomics: one diffusion transformer for expression and position of cells in tissue.

Importing the package is instant: torch, anndata and their kin are imported where they are used.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["AlphaSTomics", "__version__", "pl"]


def __getattr__(name: str) -> Any:
    """Import the notebook's class, or the pictures, when they are first asked for."""
    if name not in ("AlphaSTomics", "pl"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "pl":
        return import_module("alphastomics.pl")
    from alphastomics.io.threads import wait_briefly

    wait_briefly()  # before torch is imported
    return import_module("alphastomics.api").AlphaSTomics


def __dir__() -> list[str]:
    """List these beside what is here already."""
    return sorted({*globals(), *__all__})
