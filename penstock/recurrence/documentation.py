"""The parts that docstrings of the public functions share, so that each docstring is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..documentation import filled

Function = TypeVar("Function", bound=Callable[..., Any])

INPUTS = """\
{q}, k : Tensor [B,T,G,K]
    float16, bfloat16, float32 or float64, any strides, any sizes. Tokens come before heads. G is H or a divisor of it: head h of v has
    head ``h // (H / G)`` of {q} and k, as in Mamba-2, whose G is usually 1.
v : Tensor [B,T,H,V]
    In the dtype of {q}."""
OPTIONS = """\
scale : float, optional
    Multiplies the output. Default: {scale}.
initial_state : Tensor [N,H,K,V], optional
    The state before the first token of each of the N sequences (N = B unless packed). Default: zeros.
output_final_state : bool
    Whether to return the state after the last token.
cu_seqlens : int32 or int64 Tensor [N+1], optional
    Packed sequences: B is 1 and sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]`` of the token axis. Begins at 0, never falls,
    ends at T; empty sequences are allowed.
reverse : bool
    Run time backwards: token T-1 comes first.
context : penstock.distributed.ContextParallel, optional
    The tokens are one rank's slice of a longer token axis; see there. States are those of all sequences, on every rank.
impl : str
    "auto", or a name from ``penstock.implementations()``, which then runs or raises. All implementations take this function.

Returns ``Result(output, final_state)``: output [B,T,H,V] in v's dtype; final_state [N,H,K,V] in float32 (float64 for float64 inputs), None
unless asked for. Gradients flow from both to every floating-point input.

Raises ``ShapeError``, ``DtypeError``, ``DeviceError`` or ``RangeError`` (all ``InvalidArgument``), which list every broken rule, and
``ImplementationRefused`` where a named implementation cannot take the call. Values (decays, offsets) are checked on a CPU, elsewhere inside
``penstock.checks()``. Under autocast {q}, k and v are cast to its dtype, as for a matrix product; decays, u and states are not."""
DECAYS = """\
g : Tensor, optional
    Log decay, natural logarithm, at most 0: [H] for retention (default RetNet's), {tokens},H] for simple_gla, {tokens},H,K] for gla and
    rwkv6, [H,K] for rwkv5.
u : Tensor [H,K], optional
    Bonus, for rwkv5 and rwkv6."""
SLOTS = """\
slots : int32 or int64 Tensor [N], optional
    The row of each sequence, all different. A negative slot skips its sequence: its output is 0, no row changes. Default: sequence n is row
    n, and the pool has N rows."""
LAST = """\
scale : float, optional
    Multiplies the output. Default: ``K ** -0.5``; 1 for rwkv5 and rwkv6.
impl : str
    "auto", or a name from ``penstock.implementations()``, which then runs or raises."""
VARIANT = """\
variant : str
    linear_attention, retention, simple_gla, gla, rwkv5 or rwkv6: the formula is that of this function, begun at each sequence's row of the
    pool."""


def over_sequences(query: str, scale: str) -> Callable[[Function], Function]:
    """Complete the docstring of a function over sequences."""
    return filled(inputs=INPUTS.format(q=query), options=OPTIONS.format(q=query, scale=scale))


def in_place(tokens: str) -> Callable[[Function], Function]:
    """Complete the docstring of a function that updates a pool. ``tokens`` are the first axes of decays."""
    return filled(variant=VARIANT, decays=DECAYS.format(tokens=tokens), slots=SLOTS, last=LAST)
