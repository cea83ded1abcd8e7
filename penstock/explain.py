"""Which implementations exist, and which one a call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from .call.dispatch import Available, Explanation
from .call.families import Registered, functions
from .call.operator import explain as explained
from .errors import Complaints, RangeError, shortened
from .in_place import advance, decode_step
from .summary import summary

if TYPE_CHECKING:
    from .models.explain import Mode, ModelExplanation

BY_VARIANT: dict[str, Callable[..., Any]] = {"advance": advance, "decode_step": decode_step, "summary": summary}
"""The public functions that take the name of a variant of any family."""


@overload
def explain(function: str, *args: Any, **kwargs: Any) -> Explanation: ...
@overload
def explain(function: nn.Module, *, tokens: int | None = None, mode: Mode = "training") -> ModelExplanation: ...
def explain(function: str | nn.Module, *args: Any, **kwargs: Any) -> Explanation | ModelExplanation:
    """Which implementation a call runs, and why the others do not run it. Of a model: what each of its layers runs.

    function : str or nn.Module
        The name of a public function: gla, rwkv6, kda, decode_step, softmax_attention, ... Or a model, a layer or a mixer.
    *args, **kwargs :
        The arguments of that function, which are validated as in a call. With ``impl=``, whether that one takes it. For a model
        ``tokens=`` and ``mode="training"``, "prompt" or "decode", see below.

    The answer has both passes. If gradients are enabled and an argument requires them, the forward pass is that of training, which may keep
    residuals. Printing the answer shows the reasons.

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
        from .models import explain as models

        return models.explain(function, *args, **kwargs)
    family = _family("explain", function, " or a model, a layer or a mixer")
    found = BY_VARIANT[function] if function in family.by_variant else family.functions[function]
    _check_keywords(found, kwargs)
    return explained(found, *args, **kwargs)


def implementations(function: str = "gla") -> tuple[Available, ...]:
    """The implementations of a public function in the order of ``impl="auto"``, and whether each can run here.

    function : str
        The name of a public function: gla, rwkv6, kda, decode_step, softmax_attention, ...

    All variants of a family have the same implementations. Those of ``advance``, ``decode_step`` and ``summary`` are the recurrence's; for
    a variant of another family, name its function. Of those that can run here, ``forms`` are the names of their kernels, or fixed groups of
    kernels, of all passes.

    >>> [one.name for one in implementations() if one.reason is None][-1]
    'reference'
    """
    return _family("implementations", function).family.available()


def _check_keywords(function: Callable[..., object], given: Iterable[str]) -> None:
    """Raise RangeError for keywords that a public function does not have."""
    known, complaints = list(signature(function).parameters), Complaints("explain")
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            complaints.add(RangeError, "arguments", f"among {', '.join(known)}", name, f"Did you mean {near[0]}?" if near else "")
    complaints.raise_any()


def _family(caller: str, function: object, other: str = "") -> Registered:
    """The family of a public function. Raises RangeError if there is none of this name. ``other``: what else a caller takes."""
    known = functions()
    if not isinstance(function, str) or function not in known:
        complaints = Complaints(caller)
        name = getattr(function, "__name__", None)
        remedy = f"Pass its name, {name!r}." if name in known else ""
        complaints.add(RangeError, "function", f"one of {', '.join(known)}{other}", shortened(function), remedy)
        complaints.raise_any()
    return known[function]  # type: ignore[index]
