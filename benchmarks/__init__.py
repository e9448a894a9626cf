"""Measurements: each script names its command; docs/benchmarks.md has the results."""
