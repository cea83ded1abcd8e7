"""The declaration of the delta rule for the frame (``penstock.call``): two operators, over sequences and in place, a signature per variant.

Axes are those of ``tokens/problem.py``; J are the heads of a and b, those of q and k (G) or of v (H).

A call may have raw inputs: q and k that are divided by their norms (``use_qk_l2norm``), logits of beta (``beta_logits``), and a raw gate
(``raw``, ``A_log``, ``dt_bias``) in place of the log decay g. A *canonical* problem has none. ``inputs.py`` makes it. Its ``lower_bound``
is that of g, if the raw gate has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from ..call.declaration import Argument, Option, Options, Signature, Sizes, Wrong
from ..call.validation import finite
from ..errors import Complaints, ShapeError, shortened
from ..tokens import declaration as tokens
from ..tokens.decays import distinct, log_decay
from ..tokens.packing import cu_seqlens, one_row
from ..tokens.pools import POOL, SLOTS, own_row
from ..tokens.problem import InPlace, OverSequences, TokenProblem
from ..tokens.sharing import groups
from .variants import Variant


class DeltaTokens(TokenProblem):
    """The problem that both operators share. ``whole`` is the problem itself: ``inputs.py`` repeats the heads that groups share."""

    beta: Tensor | None  # [B, T, H], its logits with beta_logits; None with two streams
    a: Tensor | None  # [B, T, J, K]; None with one stream
    b: Tensor | None  # as a
    raw: Tensor | None  # raw gate, axes of g, in place of g
    A_log: Tensor | None  # [H]
    dt_bias: Tensor | None  # [H] or [H, K]
    use_qk_l2norm: bool
    beta_logits: bool
    allow_neg_eigval: bool
    lower_bound: float | None  # of the log decay that a raw gate gives; of g in a canonical problem

    @property
    def variant(self) -> Variant:
        """The row of the table."""
        return self.signature.about  # type: ignore[no-any-return]

    @property
    def whole(self) -> Self:
        """The problem itself."""
        return self

    def shared(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients themselves."""
        return gradients


class Delta(DeltaTokens, OverSequences):
    """A call over whole sequences."""

    reverse = False


class Advance(DeltaTokens, InPlace):
    """A call that updates states in place. ``operators.py`` sets ``sequences``."""


def unit(x: Tensor) -> Tensor:
    """X divided by its norm over the last axis."""
    return F.normalize(x, dim=-1)


REMEDY = {
    "": "Pass log(decay).",
    "softplus": "Pass log(decay), or a raw gate together with A_log.",
    "sigmoid": "Pass log(decay), which is -exp(x) of the argument x of RWKV's kernels, or a raw gate with raw_decay=True.",
}
"""What to pass in place of a log decay above 0, by ``Variant.raw``."""
BIAS = {"BTH": "It has one number per head of v.", "BTHK": "It has the heads of v: dt_bias.view(H, K) of a flat parameter [H*K]."}
"""The remedy for other shapes of dt_bias, by ``Variant.decay``."""
UNRAW = {"A_log": "It turns a raw gate into a log decay.", "dt_bias": "It is added to a raw gate: pass A_log, too."}
"""What to do about parameters of a raw gate in a call without one."""


def _tokens(row: Variant, query: str, gate: str) -> tuple[Argument, ...]:
    """The arguments that both operators share. ``query``, ``gate``: the names of q and g in messages."""
    q, k, v = tokens.queries_keys_values(query)
    two = row.streams == 2
    one, other = "this variant has one stream: a = -k, b = k", "this variant has two streams, without beta"
    bias, raw = " ".join(row.bias), " ".join(row.decay) if row.raw else ""
    unbiased = "this variant has no A_log and dt_bias"
    removed = Argument(
        "a", "B T J K" if two else "", like="q", required=two, gradient=True, absent="" if two else one, draw=lambda x: 0.5 * unit(x),
        hint="a and b have the same heads, those of k or of v.",
    )  # fmt: skip
    g = tokens.decay(" ".join(row.decay), gate, False, False, "A decay has the heads of v.", partial(_bounded, remedy=REMEDY[row.raw]))
    return (
        q,
        replace(k, draw=unit),
        v,
        replace(g, required=False, nullable=bool(row.decay)),
        Argument(
            "beta", "" if two else "B T H", required=not two, gradient=True, absent=other if two else "", draw=torch.sigmoid,
            hint="beta has the heads of v.",
        ),
        removed,
        replace(removed, name="b"),
        Argument(
            "raw", raw, label=gate, required=False, nullable=bool(raw), gradient=True, absent="" if raw else "this variant has no raw gates"
        ),
        Argument(
            "A_log", "H" if bias else "", required=False, gradient=True, absent="" if bias else unbiased,
            hint="It has one number per head of v: A_log.flatten() of a parameter [1,1,H,1].",
        ),
        Argument("dt_bias", bias, required=False, gradient=True, absent="" if bias else unbiased, hint=BIAS.get(row.decay, "")),
        cu_seqlens("T", "N sequences have N + 1 offsets."),
    )  # fmt: skip


def _bounded(g: Tensor, sizes: Sizes, options: Options, remedy: str) -> Wrong | None:
    """The rule for values of a log decay, which may have a lower bound. That is rounded to their dtype, as they may have been."""
    wrong, bound = log_decay(g, sizes, options, remedy), options["lower_bound"]
    if wrong is not None or bound is None or not g.numel():
        return wrong
    lowest = distinct(g).amin()
    if lowest >= lowest.new_tensor(max(bound, torch.finfo(g.dtype).min)):
        return None
    return Wrong(f"at least lower_bound = {bound}", str(lowest.item()), "Pass a bound of all of them, or none.")


def _gated(row: Variant) -> Callable[[Complaints, Mapping[str, Tensor | None], Sizes], None]:
    """For ``Signature.rules``: a call of a gated row has a log decay or a raw gate, and parameters only with a raw gate."""

    def rule(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
        given = {name for name in ("g", "raw", "A_log", "dt_bias") if name not in tensors or tensors[name] is not None}
        if not row.decay:
            return
        name = row.gate
        if not given & {"g", "raw"}:
            complaints.add(ShapeError, name, f"given, of shape [{','.join(row.decay)}]", "None")
        elif {"g", "raw"} <= given and {"g", "raw"} <= tensors.keys():
            complaints.add(ShapeError, "raw", f"left out with a log decay {name}", list(tensors["raw"].shape))  # type: ignore[union-attr]
        if row.raw == "softplus" and "raw" in given and "A_log" not in given:
            complaints.add(ShapeError, "A_log", "given with a raw gate, of shape [H]", "None")
        for parameter in ("A_log", "dt_bias"):
            if tensors.get(parameter) is not None and "raw" not in given:
                complaints.add(ShapeError, parameter, "left out without a raw gate", list(tensors[parameter].shape), UNRAW[parameter])  # type: ignore[union-attr]

    return rule


def _removed(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
    """For ``Signature.rules``: a and b have the heads of k or of v."""
    a = tensors.get("a")
    if a is not None and "G" in sizes and "H" in sizes and sizes.get("J") not in (sizes["G"], sizes["H"]):
        heads = " or ".join(map(str, dict.fromkeys((sizes["G"], sizes["H"]))))
        complaints.add(ShapeError, "a", f"of {heads} heads, those of k or of v", list(a.shape))


AXES: dict[str, Any] = tokens.AXES | {"nonempty": "G H J K V", "folded": "G H J"}


def over_sequences(row: Variant) -> Signature:
    """The signature of a variant's function over whole sequences."""
    rules = (one_row, groups(row.query), _gated(row), _removed)
    arguments = (*_tokens(row, row.query, row.gate), tokens.INITIAL_STATE)
    return Signature(row.name, arguments, row, rules=rules, layout=("T", "H"), **AXES)


def in_place(row: Variant, function: str) -> Signature:
    """The signature of ``advance`` or ``decode_step`` for a variant."""
    arguments = (*_tokens(row, "", "g" if row.decay else ""), SLOTS, POOL)
    rules = (one_row, groups("q"), own_row, _gated(row), _removed)
    return Signature(f"{function}({row.name!r})", arguments, row, rules=rules, **AXES)


def summed(row: Variant) -> Signature:
    """The arguments of ``summary`` for a variant: those of its function without q and offsets."""
    _, k, v, *others, _ = _tokens(row, "", "g" if row.decay else "")
    alike = [replace(one, like="k") if one.like == "q" else one for one in (v, *others)]
    arguments = (replace(k, like=""), *alike, replace(tokens.INITIAL_STATE, axes="B H K V"))
    axes = AXES | {"counts": "B T"}
    return Signature(f"summary({row.name!r})", arguments, row, rules=(groups("k"), _gated(row), _removed), layout=("T", "H"), **axes)


def default_scale(sizes: Sizes, row: Variant) -> float:
    """The scale of a call that gives none."""
    return row.scale if row.scale is not None else sizes["K"] ** -0.5


def _below_zero(value: Any) -> Wrong | None:
    return None if finite(value) is None and value < 0 else Wrong("finite and below 0", shortened(value))


LOWER_BOUND = Option("lower_bound", "float", optional=True, values=_below_zero)
RAW_OPTIONS = (
    Option("use_qk_l2norm", "bool"),
    Option("beta_logits", "bool"),
    Option("allow_neg_eigval", "bool"),
    LOWER_BOUND,
)
OPTIONS = (tokens.scale(default_scale), tokens.OUTPUT_FINAL_STATE, *RAW_OPTIONS)
ADVANCE_OPTIONS = (OPTIONS[0], *RAW_OPTIONS)
RESULTS = (tokens.OUTPUT, tokens.FINAL_STATE)
