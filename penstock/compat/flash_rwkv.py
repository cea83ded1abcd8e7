"""The functions of flash_rwkv (github.com/BBuf/flash-rwkv) on our operators: RWKV-5 and RWKV-6 on flat channels, with raw decays.

Functions return the output in receptance's dtype, [B,T,H*n] in RWKV-5 and [B,T,H,n] in RWKV-6 as there, and the new state, float32 (float64
for float64 inputs). Differences from flash_rwkv: any head size and device; every sequence of a batch has its own state (there, all use the
first one); gradients flow to every input, the raw decay and the state included (there, RWKV-6 has none, and no state has one).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..call.declaration import Option
from ..call.validation import check_option
from ..documentation import described as described_by
from ..errors import Complaints, DtypeError, InvalidArgument, RangeError, ShapeError, described
from ..recurrence.functional import rwkv5, rwkv6
from ..tokens.results import Result

CHANNELS = "Tensor [B,T,H*n]\nIn one dtype."
RAW = "Raw, as checkpoints store it and models compute it: the decay is ``exp(-exp(time_decay))``, in float32."
ARGUMENTS = {
    **dict.fromkeys(("receptance", "key", "value"), CHANNELS),
    "time_decay": f"Tensor [H,n] or [H*n], or [H] or [H,1], one of a head\n{RAW}",
    "time_first": 'Tensor [H,n] or [H*n]\nThe bonus u ("time_faaaa").',
    "state": "Tensor [B,H,n,n]\nThe state before the first token. It is not written.",
    "state_v_first": (
        "bool\nThe layout of the state in and out. True, flash_rwkv's own: value channels before key channels.\n"
        "False: [B,H,K,V], as in Penstock, fla and the Python code of Hugging Face's models."
    ),
}

NAMES = {"r": "receptance", "k": "key", "v": "value", "w": "time_decay", "u": "time_first", "initial_state": "state"}
"""Names of arguments of the operators here."""
STATE_V_FIRST = Option("state_v_first", "bool")


@described_by(ARGUMENTS)
def rwkv5_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor, *, state_v_first: bool = True
) -> tuple[Tensor, Tensor]:
    """RWKV-5 on flat channels.

    <arguments>

    Returns the output [B,T,H*n] in receptance's dtype, and the new state, float32 (float64 for float64 inputs).

    >>> x, u, state = torch.randn(1, 5, 16), torch.randn(2, 8), torch.zeros(1, 2, 8, 8)
    >>> output, state = rwkv5_cuda_linear_attention(x, x, x, torch.randn(2, 8), u, state)
    >>> output.shape, state.shape
    (torch.Size([1, 5, 16]), torch.Size([1, 2, 8, 8]))
    """
    output, state = _with_state("rwkv5", receptance, key, value, time_decay, time_first, state, state_v_first)
    return output.flatten(2), state


@described_by(ARGUMENTS | {"time_decay": f"Tensor [B,T,H*n]\n{RAW}"})
def rwkv6_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor, *, state_v_first: bool = True
) -> tuple[Tensor, Tensor]:
    """RWKV-6 on flat channels.

    <arguments>

    Returns the output [B,T,H,n] in receptance's dtype, and the new state, float32 (float64 for float64 inputs).

    >>> x, u, state = torch.randn(1, 5, 16), torch.randn(2, 8), torch.zeros(1, 2, 8, 8)
    >>> output, state = rwkv6_cuda_linear_attention(x, x, x, torch.randn(1, 5, 16), u.flatten(), state)
    >>> output.shape, state.shape
    (torch.Size([1, 5, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    return _with_state("rwkv6", receptance, key, value, time_decay, time_first, state, state_v_first)


def _with_state(
    variant: Literal["rwkv5", "rwkv6"], receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor,
    state: Tensor, state_v_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    function = f"{variant}_cuda_linear_attention"
    complaints = Complaints(function)
    check_option(complaints, STATE_V_FIRST, state_v_first)
    if not isinstance(state, Tensor) or state.dim() != 4 or state.shape[1] == 0:
        found = list(state.shape) if isinstance(state, Tensor) else described(state)
        complaints.add(ShapeError, "state", "of shape [B,H,n,n]", found, "Without a state, pass zeros: they tell the number of heads.")
    complaints.raise_any()
    result = raw_decay(function, variant, receptance, key, value, time_decay, time_first, state, state.shape[1], state_v_first)
    assert result.final_state is not None
    return result.output, result.final_state


def raw_decay(
    function: str, variant: Literal["rwkv5", "rwkv6"], receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor,
    time_first: Tensor, state: Tensor | None, heads: int, state_v_first: bool = False,
) -> Result:  # fmt: skip
    """RWKV on channels [B,T,H*n] with the decay exp(-exp(time_decay)); output [B,T,H,n], states [B,H,n,n]. Views, but for the decay."""
    tensors = {"receptance": receptance, "key": key, "value": value, "time_decay": time_decay, "time_first": time_first, "state": state}
    _check(function, variant, tensors, heads)
    r, k, v = (x.unflatten(2, (heads, -1)) for x in (receptance, key, value))
    w = -torch.exp(time_decay if time_decay.dtype == torch.float64 else time_decay.float())
    u = time_first.reshape(heads, -1)
    initial = state.transpose(-1, -2) if state is not None and state_v_first else state
    try:
        if variant == "rwkv5":
            w = w.reshape(heads, -1).expand(heads, k.shape[3])  # RWKV-5.0 and 5.1 have one decay per head
            output, final = rwkv5(r, k, v, w, u, initial_state=initial, output_final_state=True)
        else:
            output, final = rwkv6(r, k, v, w.unflatten(2, (heads, -1)), u, initial_state=initial, output_final_state=True)
    except InvalidArgument as error:
        raise _of_raw(error.of(function, NAMES), time_decay) from None
    return Result(output, final.transpose(-1, -2) if final is not None and state_v_first else final)


def _check(function: str, variant: str, tensors: dict[str, Tensor | None], heads: int) -> None:
    """Raise for wrong types and shapes, of which receptance is the measure. The operators check the rest."""
    complaints, first = Complaints(function), tensors["receptance"]
    sized = isinstance(first, Tensor) and first.dim() == 3 and first.shape[2] % heads == 0
    B, T, C = first.shape if first is not None and sized else (0, 0, 0)
    tokens, channels = {"[B,T,H*n]": (B, T, C)}, {"[H,n]": (heads, C // heads), "[H*n]": (C,)}
    known = {
        **dict.fromkeys(("key", "value"), tokens),
        "time_decay": tokens if variant == "rwkv6" else {**channels, "[H]": (heads,), "[H,1]": (heads, 1)},
        "time_first": channels,
        "state": {"[B,H,n,n]": (B, heads, C // heads, C // heads)},
    }
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            if x is not None or name != "state":
                remedy = "" if x is None else f"Convert it with torch.as_tensor({name})."
                complaints.add(DtypeError, name, "a torch.Tensor", described(x), remedy)
        elif name == "receptance":
            if not sized:
                complaints.add(ShapeError, name, f"of shape [B,T,H*n] with H = {heads}", list(x.shape), "It has n channels of each head.")
        elif sized and tuple(x.shape) not in known[name].values():
            rule = " or ".join(f"{axes} = {list(shape)}" for axes, shape in known[name].items())
            complaints.add(ShapeError, name, f"of shape {rule}", list(x.shape), "B, T and n are those of receptance.")
    if isinstance(tensors["time_decay"], Tensor) and not tensors["time_decay"].is_floating_point():
        complaints.add(DtypeError, "time_decay", "of a floating dtype", tensors["time_decay"].dtype, "Convert it with time_decay.to(...).")
    complaints.raise_any()


def _of_raw(error: InvalidArgument, time_decay: Tensor) -> InvalidArgument:
    """The error with the rule for raw decays in place of that for log decays: only NaN has no decay."""
    of_decay = [one for one in error.complaints if (one.kind, one.argument) == (RangeError, "time_decay")]
    if not of_decay:
        return error
    complaints = Complaints(of_decay[0].function, [one for one in error.complaints if one not in of_decay])
    complaints.add(RangeError, "time_decay", "nowhere NaN", f"{int(time_decay.isnan().sum())} times NaN", "Every other value has a decay.")
    return complaints.error
