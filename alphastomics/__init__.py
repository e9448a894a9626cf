"""AlphaSTomics: one diffusion transformer for expression and position of cells in tissue.

Importing the package is instant: torch, anndata and their kin are imported where they are used.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["AlphaSTomics", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the notebook's class when it is first asked for."""
    if name != "AlphaSTomics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from alphastomics.io.threads import wait_briefly

    wait_briefly()  # before torch is imported
    return import_module("alphastomics.api").AlphaSTomics


def __dir__() -> list[str]:
    """List the class beside what is here already."""
    return sorted({*globals(), *__all__})
