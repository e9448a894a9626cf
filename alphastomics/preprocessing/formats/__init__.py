"""Formats of input files, one module each; registry.py lists them."""
