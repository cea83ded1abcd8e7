"""Training of language models: data, the Trainer wiring and evaluation."""
