"""Comparison of implementations with the oracle, for ``penstock check`` and for benchmarks before they time."""
