"""Benchmarks: every implementation is compared with the oracle, then timed beside the token loop and other projects."""
