"""A small training: a text that every Python has, and the loop that learns it."""
