"""The demos: each part of the model is shown at work, and what it does is checked."""
