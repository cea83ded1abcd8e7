"""Clocks of tests whose results must not depend on the load of the machine."""


class Simulated:
    """In place of the module ``time``: time passes in ``sleep``, and ``step`` seconds before each reading."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
