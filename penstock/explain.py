"""What would run: implementations by function, and the walk through them for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .call.dispatch import Available, Explanation, Family
from .call.operator import explain as explained
from .errors import Complaints, RangeError, shortened
from .recurrence import functional, operators
from .recurrence.variants import VARIANTS
from .softmax import FAMILY as SOFTMAX
from .softmax import softmax_attention

FUNCTIONS: dict[str, tuple[Callable[..., object], Family]] = {
    **{name: (getattr(functional, name), operators.FAMILY) for name in (*VARIANTS, "advance", "decode_step")},
    "softmax_attention": (softmax_attention, SOFTMAX),
}
"""Every public function that runs implementations, and their family."""


def explain(function: str, *args: Any, **kwargs: Any) -> Explanation:
    """What a call would run, and why the other implementations would not.

    Takes the arguments of the public function of that name and validates them as it does. Where gradients are wanted (an argument
    requires them and they are enabled) it names what runs then. Printing the answer shows the walk.

    >>> import torch
    >>> q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    >>> explain("linear_attention", q, q, q).forward
    'chunkwise'
    """
    return explained(_known("explain", function)[0], *args, **kwargs)


def implementations(function: str = "gla") -> tuple[Available, ...]:
    """The implementations of a public function, in the order in which ``impl="auto"`` asks them, and whether each can run here.

    All variants of the recurrence have the same; ``softmax_attention`` has its own.

    >>> [one.name for one in implementations() if one.reason is None][-1]
    'reference'
    """
    return _known("implementations", function)[1].available()


def _known(caller: str, function: object) -> tuple[Callable[..., object], Family]:
    if not isinstance(function, str) or function not in FUNCTIONS:
        complaints = Complaints(caller)
        complaints.add(RangeError, "function", f"one of {', '.join(FUNCTIONS)}", shortened(function))
        complaints.raise_any()
    return FUNCTIONS[function]  # type: ignore[index]
