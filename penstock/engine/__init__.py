"""The continuous-batching engine: one packed forward pass a step over a pool of states."""
