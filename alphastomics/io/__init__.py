"""Files and the Hub: whole-file writing, h5ad, uploads, progress."""
