"""fla's functions of the delta rule: what runs them, and their rows of the table of ``fla``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.autocast import autocasting
from ..delta import functional
from ..errors import ShapeError
from .fla_call import OLD, STATES, Call, Output

Row = tuple[str, Any, str, str]


def _delta_rule(call: Call) -> Output:
    return call.results(*functional.delta_rule(call["q"], call["k"], call["v"], _beta(call), **_options(call)))


def _gated_delta_rule(call: Call) -> Output:
    g, gk = call["g"], call.get("gk")
    if call.get("gv") is not None:
        call.refuse("gv", "None", "No variant has decays of value channels. Use fla's own function for them.")
    if g is not None and gk is not None:
        call.refuse("gk", "left out where g is given", "Add the two decays and pass the sum as gk.")
    q, k, v, options = call["q"], call["k"], call["v"], _options(call)
    gates = _gates(call, "g")
    if gates and gates["A_log"] is None:
        call.refuse("A_log", "given with use_gate_in_kernel", "Pass A_log [H].")
    if gk is not None:
        return call.results(*functional.kda(q, k, v, gk, _beta(call), **options))
    if g is None:
        return call.results(*functional.delta_rule(q, k, v, _beta(call), **options))
    return call.results(*functional.gated_delta_rule(q, k, v, g, _beta(call), **gates, **options))


def _kda(call: Call) -> Output:
    if call.get("return_intermediate_states"):
        call.refuse("return_intermediate_states", "False", "States inside a sequence are not returned: cut the sequence.")
    if call.get("use_graph"):
        call.refuse("use_graph", "False", "CUDA graphs of torch capture calls as they are.")
    gates, bias = _gates(call, "g"), call.get("dt_bias")
    if gates:
        q, v, bound = call["q"], call["v"], call["lower_bound"]
        heads = v.shape[2] if isinstance(v, Tensor) and v.dim() == 4 else 0
        if gates["A_log"] is None:
            if bound is None:
                call.refuse("A_log", "given with use_gate_in_kernel, unless there is a lower_bound", "Pass A_log [H].")
            gates["A_log"] = torch.zeros(heads, dtype=torch.float32, device=v.device if isinstance(v, Tensor) else None)
        if bound is None and call.get("safe_gate"):
            call.refuse(
                "lower_bound", "given with safe_gate and use_gate_in_kernel, as in fla", "Leave out safe_gate: no gate needs it here."
            )
        if bias is not None and bias.dim() == 1 and heads and isinstance(q, Tensor) and q.dim() == 4:
            if bias.numel() != heads * q.shape[3]:
                rule = f"of shape [H*K] or [H,K] = [{heads}, {q.shape[3]}]"
                call.refuse("dt_bias", rule, "It has the heads of v.", ShapeError, list(bias.shape))
            gates["dt_bias"] = bias.view(heads, -1)
        gates["lower_bound"] = bound
    return call.results(*functional.kda(call["q"], call["k"], call["v"], call["g"], _beta(call), **gates, **_options(call)))


def _rwkv7(call: Call) -> Output:
    return _of_rwkv7(call, call["a"], call["b"])


def _mul_rwkv7(call: Call) -> Output:
    kk, a = call["kk"], call["a"]
    if not _alike(kk, a):
        return _of_rwkv7(call, kk, a)  # the operator refuses at least one of them
    return _of_rwkv7(call, -kk, kk * a)


def _alike(x: object, y: object) -> bool:
    """Whether x and y are dense tensors of one floating dtype, shape and device. Under autocast, dtypes may differ."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or any(one.is_nested or one.layout != torch.strided for one in (x, y)):
        return False
    dtypes = x.is_floating_point() and y.is_floating_point() and (x.dtype == y.dtype or autocasting(x.device.type))
    return dtypes and x.shape == y.shape and x.device == y.device


def _of_rwkv7(call: Call, a: Tensor, b: Tensor) -> Output:
    options, r = _forwards(call), call["r"]
    if options["scale"] is None and isinstance(r, Tensor) and r.dim():
        options["scale"] = r.shape[-1] ** -0.5
    return call.results(*functional.rwkv7(r, call["w"], call["k"], call["v"], a, b, lower_bound=call.get("lower_bound"), **options))


def _dplr(call: Call) -> Output:
    tensors = [call[name] for name in ("q", "k", "v", "a", "b", "gk")]
    return call.results(*functional.dplr(*tensors, lower_bound=call.get("lower_bound"), **_forwards(call)))


def _forwards(call: Call) -> dict[str, Any]:
    """The options of all functions."""
    if call.get("cp_context") is not None:
        call.refuse("cp_context", "None", "The delta rule runs on one rank: give it whole sequences.")
    if call.get("reverse"):
        call.refuse("reverse", "False", "The delta rule runs forwards: reverse the tokens.")
    return call.forwards


def _options(call: Call) -> dict[str, Any]:
    """The options of functions with one stream."""
    logits, neg = bool(call.get("use_beta_sigmoid_in_kernel")), bool(call.get("allow_neg_eigval"))
    if neg and not logits:
        call.refuse("allow_neg_eigval", "False without use_beta_sigmoid_in_kernel", "It doubles the sigmoid of beta.")
    norm = bool(call.get("use_qk_l2norm_in_kernel"))
    return {**_forwards(call), "use_qk_l2norm": norm, "beta_logits": logits, "allow_neg_eigval": neg}


def _gates(call: Call, name: str) -> dict[str, Any]:
    """The parameters of a raw gate, if the gate is one."""
    if not call.get("use_gate_in_kernel"):
        return {}  # as in fla, A_log and dt_bias have no meaning then
    if call[name] is None:
        call.refuse(name, "given with use_gate_in_kernel", "It is the raw gate.")
    return {"A_log": call.get("A_log"), "dt_bias": call.get("dt_bias")}


def _beta(call: Call) -> Tensor:
    """Beta; without one, ones [B,T,H]."""
    beta, v = call["beta"], call["v"]
    if beta is not None or not isinstance(v, Tensor):
        return beta  # type: ignore[no-any-return]
    if call.get("use_beta_sigmoid_in_kernel"):
        call.refuse("beta", "given with use_beta_sigmoid_in_kernel", "It is the argument of the sigmoid.")
    return v.new_ones(()).expand(v.shape[:3])


_NORMED = f"{STATES} use_qk_l2norm_in_kernel=False"
_LOGITS = "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False"
_PACKED = "cu_seqlens=None cu_seqlens_cpu=None"
_RAW = "use_gate_in_kernel=False A_log=None dt_bias=None"
_UNPACKED = "safe_gate=False chunk_size=None disable_recompute=False cp_context=None lower_bound=None"
_LAYOUT = "transpose_state_layout=None"
_GATED_DELTA_RULE = (
    f"q k v g beta {_NORMED} {_LOGITS} state_v_first=False {_PACKED} chunk_indices=None cp_context=None",
    f"{OLD} {_RAW} {_LAYOUT} chunk_size=None",
)
_RECURRENT_GATED_DELTA_RULE = (
    f"q k v g=None gk=None gv=None beta=None {_NORMED} {_RAW} {_LOGITS} state_v_first=False cu_seqlens=None", f"{OLD} {_LAYOUT}",
)  # fmt: skip
TABLE: tuple[Row, ...] = (
    ("chunk_delta_rule", _delta_rule, f"q k v beta {_NORMED} {_PACKED}", OLD),
    ("fused_recurrent_delta_rule", _delta_rule, f"q k v beta=None {_NORMED} cu_seqlens=None", OLD),
    ("chunk_gated_delta_rule", _gated_delta_rule, *_GATED_DELTA_RULE),
    ("chunk_gdn", _gated_delta_rule, *_GATED_DELTA_RULE),
    ("fused_recurrent_gated_delta_rule", _gated_delta_rule, *_RECURRENT_GATED_DELTA_RULE),
    ("fused_recurrent_gdn", _gated_delta_rule, *_RECURRENT_GATED_DELTA_RULE),
    (
        "chunk_kda", _kda,
        f"q k v g beta {_NORMED} use_gate_in_kernel=False {_LOGITS} safe_gate=False lower_bound=None disable_recompute=False "
        f"return_intermediate_states=False state_v_first=False {_PACKED} cp_context=None use_graph=False max_num_seqs=None",
        f"{OLD} A_log=None dt_bias=None {_LAYOUT} chunk_size=None",
    ),
    (
        "fused_recurrent_kda", _kda,
        f"q k v g beta A_log=None dt_bias=None {_NORMED} use_gate_in_kernel=False {_LOGITS} lower_bound=None state_v_first=False "
        "cu_seqlens=None",
        f"{OLD} {_LAYOUT}",
    ),
    ("chunk_rwkv7", _rwkv7, f"r w k v a b scale=1.0 initial_state=None output_final_state=False {_PACKED} {_UNPACKED}", OLD),
    ("fused_recurrent_rwkv7", _rwkv7, "r w k v a b scale=None initial_state=None output_final_state=True cu_seqlens=None", OLD),
    (
        "fused_mul_recurrent_rwkv7", _mul_rwkv7,
        "r w k v kk a scale=1.0 initial_state=None output_final_state=False reverse=False cu_seqlens=None", OLD,
    ),
    ("chunk_dplr_delta_rule", _dplr, f"q k v a b gk {STATES} {_PACKED} {_UNPACKED}", OLD),
    ("fused_recurrent_dplr_delta_rule", _dplr, f"q k v a b gk {STATES} reverse=False cu_seqlens=None", OLD),
)  # fmt: skip
