"""Which implementations exist, and which one a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from .call.dispatch import Available, Explanation, Family
from .call.operator import explain as explained
from .errors import Complaints, RangeError, shortened
from .recurrence import functional, operators
from .recurrence.variants import VARIANTS
from .softmax import FAMILY as SOFTMAX
from .softmax import softmax_attention

if TYPE_CHECKING:
    from .models.explain import Mode, ModelExplanation

FUNCTIONS: dict[str, tuple[Callable[..., object], Family]] = {
    **{name: (getattr(functional, name), operators.FAMILY) for name in (*VARIANTS, "advance", "decode_step")},
    "softmax_attention": (softmax_attention, SOFTMAX),
}
"""The public functions and their families of implementations."""


@overload
def explain(function: str, *args: Any, **kwargs: Any) -> Explanation: ...
@overload
def explain(function: nn.Module, *, tokens: int | None = None, mode: Mode = "training") -> ModelExplanation: ...
def explain(function: str | nn.Module, *args: Any, **kwargs: Any) -> Explanation | ModelExplanation:
    """Which implementation a call runs, and why the others do not run it. Of a model: what each of its layers runs.

    function : str or nn.Module
        The name of a public function: gla, rwkv6, decode_step, softmax_attention, ... Or a model, a layer or a mixer.
    *args, **kwargs :
        The arguments of that function, which are validated as in a call. With ``impl=``, whether that one takes it. For a model
        ``tokens=`` and ``mode="training"``, "prompt" or "decode", see below.

    If gradients are enabled and an argument requires them, the
    answer includes the backward pass. Printing the answer shows the reasons.

    Implementations in Triton consist of forms: kernels, or fixed groups of kernels, in an ordered list for each pass. The answer names
    the form that runs and says why not those before it; parts of a pass (states before chunks) have lists of their own.

    >>> import torch
    >>> q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    >>> explain("linear_attention", q, q, q).forward
    'chunkwise'

    A model runs chains of operations between its matrix products as fused kernels, and each chain is an ordered list of forms, too. The
    answer names the form that runs in each layer, its kernels, and why not those before it; and the implementations of operators. The
    model runs once for it, on its device. Its parameters and gradients do not change. ``tokens`` are those of a sequence, for "decode" the
    sequences of one token. See ``penstock.models.explain``.

    >>> from penstock.models import CausalLM, gla
    >>> model = CausalLM(gla(vocab_size=11, num_layers=2, hidden_size=16, num_heads=2))
    >>> found = explain(model, tokens=8, mode="prompt")
    >>> {one.chain: one.form for one in found.choices if hasattr(one, "chain")}["log_sigmoid"]
    'formula'
    """
    if isinstance(function, nn.Module):
        from .models.explain import explain_model

        return explain_model(function, *args, **kwargs)
    return explained(_known("explain", function)[0], *args, **kwargs)


def implementations(function: str = "gla") -> tuple[Available, ...]:
    """The implementations of a public function in the order of ``impl="auto"``, and whether each can run here.

    function : str
        The name of a public function: gla, rwkv6, decode_step, softmax_attention, ...

    All variants of the recurrence have the same implementations; ``softmax_attention`` has its own. Of those that can run here,
    ``forms`` are the names of their kernels, or fixed groups of kernels, of all passes.

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
