"""Embeddings: a trained model and cells enter, a vector per cell leaves."""
