"""`python -m alphastomics` is the same program as `alphastomics`."""

from alphastomics.main import entry

entry()
