"""Work over several devices: context parallelism of operators, see docs/scaling.md."""

from .tokens.context import ContextParallel

__all__ = ["ContextParallel"]
