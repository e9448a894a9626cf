"""Using a trained model: cells come in, generated cells and their scores go out."""
