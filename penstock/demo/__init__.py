"""The text and the training loop of ``penstock demo``."""
