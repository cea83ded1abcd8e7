"""Whole language models: a configuration and a causal model for each architecture."""
