"""The parts that docstrings of the public functions share, so that each docstring is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..documentation import filled

Function = TypeVar("Function", bound=Callable[..., Any])

INPUTS = """\
{q}, k : Tensor [B,T,G,K]
    float16, bfloat16, float32 or float64, any strides, any sizes. Tokens come before heads. G is H or a divisor of it: head h of v has
    head ``h // (H / G)`` of {q} and k.
v : Tensor [B,T,H,V]
    In the dtype of {q}."""
BETA = """\
beta : Tensor [B,T,H]
    Writing strength, any floating dtype. States are bounded if ``0 <= beta |k|^2 <= 2``."""
KEYS = """\
use_qk_l2norm : bool
    Divide q and k by ``sqrt(sum(x^2) + 1e-6)`` over K, before the scale.
beta_logits : bool
    beta is a logit: ``sigmoid(beta)`` is used.
allow_neg_eigval : bool
    With ``beta_logits``: twice that, up to 2. Then a token can turn the sign of what it removes."""
RAW = """\
A_log : Tensor [H], optional
    Then g is a raw gate x, of any sign, with log decay ``-exp(A_log) softplus(x + dt_bias)``{bounded}.
dt_bias : Tensor {bias}, optional
    Bias of the raw gate.{flat}"""
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
context : penstock.distributed.ContextParallel, optional
    The tokens are one rank's slice of a longer token axis; see there. States are those of all sequences, on every rank.
impl : str
    "auto", or a name from ``penstock.implementations({name!r})``, which then runs or raises.

Returns ``Result(output, final_state)``: output [B,T,H,V] in v's dtype; final_state [N,H,K,V] in float32 (float64 for float64 inputs), None
unless asked for. Gradients flow from both to every floating-point input.

Raises ``ShapeError``, ``DtypeError``, ``DeviceError`` or ``RangeError`` (all ``InvalidArgument``), which list every broken rule, and
``ImplementationRefused`` where a named implementation cannot take the call. Values (decays, offsets) are checked on a CPU, elsewhere inside
``penstock.checks()``. Under autocast {q}, k, v, a and b are cast to its dtype, as for a matrix product; the other inputs are not."""


def over_sequences(
    name: str, query: str = "q", scale: str = "``K ** -0.5``", bias: str = "", bounded: str = ""
) -> Callable[[Function], Function]:
    """Complete the docstring of a function over sequences. ``bias``: the shape of dt_bias; ``bounded``: what a lower bound changes."""
    return filled(
        inputs=INPUTS.format(q=query),
        beta=BETA,
        keys=KEYS,
        raw=RAW.format(bias=bias, bounded=bounded, flat=" Of a flat parameter [H*K], ``dt_bias.view(H, K)``." if "K" in bias else ""),
        options=OPTIONS.format(q=query, scale=scale, name=name),
    )
