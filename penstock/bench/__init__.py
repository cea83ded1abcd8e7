"""Benchmarks: every implementation held to the oracle, then timed beside the token loop and other projects."""
