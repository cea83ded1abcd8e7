"""The frame: declares operators, validates calls, chooses implementations, registers torch operators, and runs the fast path."""
