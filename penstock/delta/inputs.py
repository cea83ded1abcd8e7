"""From a call to the problem that an implementation computes: raw inputs, and heads that groups share.

The stage of raw inputs is differentiable PyTorch in float32 (float64 for float64 inputs)::

    q, k      x / sqrt(sum x^2 + 1e-6)                    over K, with use_qk_l2norm
    beta      sigmoid(x), 2 sigmoid(x)                    with beta_logits; with allow_neg_eigval
    g         -exp(A_log) softplus(x + dt_bias)           gated_delta_rule, kda
              lower_bound sigmoid(exp(A_log) (x + dt_bias))     kda with a lower bound
              -exp(-1/2) sigmoid(x)                       rwkv7

``prepared`` declares an implementation: it runs the stage before it, and takes gradients back through the stage. Kernels that read raw
inputs (``raw``), or q and k of groups (``groups``), say so there. ``explain`` shows where the stage runs.

On a GPU, implementations in Triton have kernels for it (``triton/portable/raw.py``): one launch, and one or two for its gradients.

Sums over K have one order, by halves, so no result depends on the number of tokens. Gradients of A_log and dt_bias are sums over tokens in
float32, without atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call.derivatives import Tensors
from ..call.implementation import FormVerdict, Implementation, Mode, Upstream
from ..gpu.sharing import once
from ..tokens.decays import FASTEST, LARGEST, SMALLEST
from ..tokens.dtypes import state_dtype
from ..tokens.sharing import over_groups, repeated
from ..tokens.sums import by_halves
from .declaration import DeltaTokens
from .gradients import Gradients

P = TypeVar("P", bound=DeltaTokens)
EPSILON = 1e-6
"""Added to the sum of squares of q and k, as flash-linear-attention and transformers do."""
OF_DECAY = ("g", "raw", "A_log", "dt_bias")
STRONGEST = 1e4
"""exp(-STRONGEST) is 0, in float64, too."""
SHARED = ("q", "k", "a", "b")
"""Arguments whose heads groups may share."""


def is_raw(p: DeltaTokens) -> bool:
    """Whether a call has raw inputs."""
    return p.use_qk_l2norm or p.beta_logits or p.raw is not None


def refuses_options(p: DeltaTokens) -> str | None:
    """Why no implementation computes a call whose options are not those of its row, or None."""
    if p.variant.streams == 2 and (p.use_qk_l2norm or p.beta_logits):
        return f"{p.variant.name} has no beta, and no use_qk_l2norm"
    if p.allow_neg_eigval and not p.beta_logits:
        return "allow_neg_eigval scales beta computed from beta_logits"
    if p.lower_bound is not None and not (p.variant.bounded if p.raw is not None else p.variant.streams == 2):
        return "lower_bound belongs to a raw gate of kda, or to log decays of two streams"
    return None


def normalized(x: Tensor) -> Tensor:
    """X divided by the square root of its sum of squares and ``EPSILON``, over the last axis."""
    return x / (by_halves(x * x) + EPSILON).sqrt()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). Its derivative has no difference 1 - y, which loses digits for large x."""
    return F.logsigmoid(x).exp()


def log_decay(p: DeltaTokens, dtype: torch.dtype) -> Tensor:
    """The log decay of a call with a raw gate."""
    assert p.raw is not None
    x = p.raw.contiguous().to(dtype)
    if p.variant.raw == "sigmoid":
        return FASTEST * sigmoid(x)
    assert p.A_log is not None
    rate = p.A_log.to(dtype).clamp(SMALLEST, LARGEST).exp()
    if "K" in p.variant.decay:
        rate = rate[:, None]
    if p.dt_bias is not None:
        x = x + p.dt_bias.to(dtype)
    return scaled(rate, F.logsigmoid(-x)) if p.lower_bound is None else p.lower_bound * sigmoid(scaled(rate, x))


def scaled(rate: Tensor, x: Tensor) -> Tensor:
    """Rate times x between ``-STRONGEST`` and ``STRONGEST``: products of larger numbers and derivatives of 0 would give NaN."""
    limit = STRONGEST / rate.detach()
    return rate * x.clamp(-limit, limit)


def computed(p: DeltaTokens, wide: bool, follows: Follows | None = None) -> dict[str, Tensor]:
    """The canonical tensors that raw inputs give. ``wide``: normalised q and k stay float32; else they have the dtype of q.

    ``follows``: the forward pass that follows, if any. Plain PyTorch does not prepare for it.
    """
    dtype, found = state_dtype(p.q.dtype), dict[str, Tensor]()
    if p.use_qk_l2norm:
        for name in ("q", "k"):
            x = normalized(getattr(p, name).contiguous().to(dtype))
            found[name] = x if wide else x.to(p.q.dtype)
    if p.beta_logits:
        assert p.beta is not None
        found["beta"] = sigmoid(p.beta.contiguous().to(dtype)) * (2 if p.allow_neg_eigval else 1)
    if p.raw is not None:
        found["g"] = log_decay(p, dtype)
    return found


Pull = Callable[[dict[str, Tensor]], dict[str, Tensor | None]]
"""From gradients of the tensors of ``computed``, by name, to those of raw inputs."""


class Follows(NamedTuple):
    """The forward pass that follows a stage of raw inputs."""

    problem: Callable[[], Any]
    """Makes its problem, whose tensors may have no values."""
    gradients: bool
    """Whether they will be wanted."""


class Stage(NamedTuple):
    """What computes the canonical tensors of a call with raw inputs, and their gradients."""

    name: str
    """What ``explain`` says of it."""
    forward: Callable[[Any, bool, Follows | None], dict[str, Tensor]]
    """As ``computed``."""
    differentiable: Callable[[Any, bool], tuple[dict[str, Tensor], Pull]]
    """The same tensors, and a function that takes gradients back through the stage."""


def differentiable(p: DeltaTokens, wide: bool) -> tuple[dict[str, Tensor], Pull]:
    """The tensors of ``computed``, and their gradients by autograd."""
    raw = [*(("q", "k") if p.use_qk_l2norm else ()), *(("beta",) if p.beta_logits else ()), *OF_DECAY[1:]]
    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name in raw if (x := getattr(p, name)) is not None}
        made = computed(p.with_tensors(leaves), wide)

    def pull(given: dict[str, Tensor]) -> dict[str, Tensor | None]:
        outputs, d_outputs = [made[name] for name in given], [d.to(made[name].dtype) for name, d in given.items()]
        return dict(zip(leaves, torch.autograd.grad(outputs, [*leaves.values()], d_outputs, allow_unused=True)))

    return {name: x.detach() for name, x in made.items()}, pull


PLAIN = Stage("plain PyTorch before it", computed, differentiable)


def uncomputed(p: DeltaTokens, wide: bool) -> dict[str, Tensor]:
    """Tensors like those of ``computed``, without values."""
    dtype, found = state_dtype(p.q.dtype), dict[str, Tensor]()
    if p.use_qk_l2norm:
        found |= {name: p.q.new_empty(p.q.shape, dtype=dtype if wide else p.q.dtype) for name in ("q", "k")}
    for name, given in (("beta", p.beta if p.beta_logits else None), ("g", p.raw)):
        if given is not None:
            found[name] = given.new_empty(given.shape, dtype=dtype)
    return found


def bound(p: DeltaTokens) -> float | None:
    """The lowest log decay that a call can have, or None if no bound is known."""
    return FASTEST if p.raw is not None and p.variant.raw == "sigmoid" else p.lower_bound


def canonical(p: P, found: dict[str, Tensor]) -> P:
    """The problem with computed tensors in place of raw inputs."""
    other = p.with_tensors({**found, "raw": None, "A_log": None, "dt_bias": None})
    other.use_qk_l2norm = other.beta_logits = other.allow_neg_eigval = False
    other.lower_bound = bound(p)
    return other


def of_every_head(p: P) -> P:
    """The problem with q, k, a and b repeated for every head of v."""
    H = p.sizes["H"]
    given = {name: x for name in SHARED if (x := getattr(p, name)) is not None and x.shape[2] != H}
    if not given:
        return p
    whole = p.with_tensors({name: once(("heads", H), (x,), partial(repeated, x, H)) for name, x in given.items()})
    whole.sizes, whole.groups = {**p.sizes, "G": H, "J": H}, p.sizes["G"]
    return whole


def never_raw(p: Any, mode: Mode, d_output: Tensor | None) -> str | None:
    """The default of ``raw``."""
    return "it computes the log decay, beta and normalised q and k from raw inputs before its own pass"


def always_groups(p: Any, mode: Mode, d_output: Tensor | None) -> bool:
    """For ``groups``: an implementation whose every pass takes them."""
    return True


def never_groups(p: Any, mode: Mode, d_output: Tensor | None) -> bool:
    """The default of ``groups``."""
    return False


def prepared(
    one: Implementation,
    raw: Callable[[Any, Mode, Tensor | None], str | None] = never_raw,
    groups: Callable[[Any, Mode, Tensor | None], bool] = never_groups,
    wide: bool = False,
    stage: Stage = PLAIN,
) -> Implementation:
    """The implementation of all calls, from one of canonical problems with q, k, a and b of every head of v.

    ``raw``: why a pass does not read the raw inputs of a call, or None if it does; ``groups``: whether it takes q, k, a and b of groups.
    Both get the gradient of the output where it is known. ``wide``: whether normalised q and k stay float32 for inputs of 16 bits; else
    they are rounded to the dtype of q. ``stage``: what computes canonical tensors where the implementation does not.

    Its ``backward`` returns ``Gradients``; of its ``Upstream``, ``wanted`` has a flag for each of their fields. ``refuses``, ``avoids`` and
    ``verdicts`` get the problem that would be computed, whose tensors may have no values.
    """

    def ready(p: P, mode: Mode, gradients: bool = False) -> P:
        if is_raw(p) and raw(p, mode, None) is not None:
            follows = Follows(partial(planned, p, mode), gradients) if mode == "forward" else None
            return known(p, canonical(p, once(*_read(p, stage, wide), lambda: stage.forward(p, wide, follows))))
        return p

    def known(p: P, made: P) -> P:
        """Equal calls make equal problems, so these share their plans."""
        seen = p.__dict__.get("seen")
        if seen is not None:
            key = "canonical", wide
            if key not in seen.bound:
                seen.bound[key] = made.seen
            made.__dict__["seen"] = seen.bound[key]
        return made

    def whole(p: P, mode: Mode, d_output: Tensor | None = None) -> P:
        if p.sizes["G"] == p.sizes["H"] or groups(p, mode, d_output):
            return p
        made = of_every_head(p)
        seen = None if made is p else p.__dict__.get("seen")
        if seen is not None:
            if seen.whole is None:
                seen.whole = made.seen
            made.__dict__["seen"] = seen.whole
        return made

    def planned(p: P, mode: Mode) -> P:
        """The problem that would be computed."""
        if is_raw(p) and raw(p, mode, None) is not None:
            p = canonical(p, uncomputed(p, wide))
        return p if groups(p, mode, None) else of_every_head(p)

    def forward(p: Any) -> Tensors:
        return one.forward(whole(ready(p, "forward"), "forward"))

    def forward_with_residuals(p: Any) -> tuple[Tensors, Tensors]:
        assert one.forward_with_residuals is not None
        return one.forward_with_residuals(whole(ready(p, "forward", gradients=True), "forward"))

    def backward(p: Any, upstream: Upstream) -> Tensors:
        assert one.backward is not None
        staged = is_raw(p) and raw(p, "backward", upstream.gradients[0]) is not None
        return _backward(one.backward, p, upstream, staged, stage, wide, known, whole)

    def in_place(p: Any) -> Tensor:
        assert one.advance is not None
        return one.advance(whole(ready(p, "advance"), "advance"))

    def refuses(p: Any, mode: Mode) -> str | None:
        return refuses_options(p) or one.refuses(planned(p, mode), mode)

    def verdicts(p: Any, mode: Mode) -> tuple[FormVerdict, ...]:
        found = one.verdicts(planned(p, mode), mode)
        if not is_raw(p):
            return found
        reason = raw(p, mode, None)
        taken = (FormVerdict("raw inputs", "in its own pass", reason),)
        return *taken, *((FormVerdict("raw inputs", stage.name, None),) if reason is not None else ()), *found

    return replace(
        one,
        forward=forward,
        backward=None if one.backward is None else backward,
        advance=None if one.advance is None else in_place,
        forward_with_residuals=None if one.forward_with_residuals is None else forward_with_residuals,
        refuses=refuses,
        avoids=lambda p, mode: one.avoids(planned(p, mode), mode),
        verdicts=verdicts,
    )


def _read(p: DeltaTokens, stage: Stage, wide: bool) -> tuple[Hashable, list[Tensor]]:
    """What the stage of raw inputs depends on, for ``once``."""
    read = [x for x in (p.q, p.k, p.beta, p.raw, p.A_log, p.dt_bias) if x is not None]
    return (stage.name, wide, p.use_qk_l2norm, p.beta_logits, p.allow_neg_eigval, p.lower_bound, p.variant.raw), read


def _backward(
    backward: Callable[[Any, Upstream], Tensors], p: Any, upstream: Upstream, staged: bool, stage: Stage, wide: bool,
    known: Callable[[Any, Any], Any], whole: Callable[..., Any],
) -> Tensors:  # fmt: skip
    """Gradients of all differentiable arguments, from those of the canonical problem."""
    names = [one.name for one in p.signature.arguments if one.gradient]
    wanted = dict(zip(names, upstream.wanted or [True] * len(names)))
    made: dict[str, Tensor] = {}
    with torch.inference_mode(False):  # a compiled graph runs this below autograd
        if staged:
            wanted["g"] = any(wanted[name] for name in OF_DECAY)
            key, read = _read(p, stage, wide)
            made, pull = once(("gradients", key), read, lambda: stage.differentiable(p, wide))
            p = known(p, canonical(p, made))
        flags = tuple([wanted[name] for name in Gradients._fields])
        computed_by = backward(whole(p, "backward", upstream.gradients[0]), upstream._replace(wanted=flags))
        found = dict(zip(Gradients._fields, _of_groups(p, computed_by)))
        given = {name: d for name in made if (d := found.pop(name)) is not None}
        if given and any(wanted[name] for name in ("q", "k", "beta", *OF_DECAY)):
            found |= pull(given)
    return [found.get(name) for name in names]


def _of_groups(p: DeltaTokens, found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients of q, k, a and b summed over the heads that share them."""
    return Gradients(
        *(
            x if x is None or name not in SHARED else over_groups(x, given.shape[2], given.dtype)
            for name, x in zip(Gradients._fields, found)
            for given in [getattr(p, name)]
        )
    )
