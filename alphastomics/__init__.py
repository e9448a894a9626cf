"""AlphaSTomics: one diffusion transformer for expression and position of cells in tissue.

Importing the package is instant: torch, anndata and their kin are imported where they are used.
"""

__version__ = "0.1.0.dev0"
