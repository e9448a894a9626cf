"""Worked examples, run by the scripts at the root of the clone."""
