"""The functions of flash_rwkv (github.com/BBuf/flash-rwkv) on our operators: RWKV-5 and RWKV-6 on flat channels, with raw decays.

Functions return the output in receptance's dtype, [B,T,H*n] in RWKV-5 and [B,T,H,n] in RWKV-6 as there, and the new state, float32 (float64
for float64 inputs). Differences from flash_rwkv: any head size and device; every sequence of a batch has its own state (there, all use the
first one); gradients flow to every input, the raw decay and the state included (there, RWKV-6 has none, and no state has one).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..documentation import described as described_by
from ..errors import Complaints, DtypeError, InvalidArgument, ShapeError, described
from ..recurrence.functional import rwkv5, rwkv6
from ..tokens.results import Result

CHANNELS = "Tensor [B,T,H*n]\nIn one dtype."
RAW = "Raw, as checkpoints store it and models compute it: the decay is ``exp(-exp(time_decay))``, in float32."
ARGUMENTS = {
    **dict.fromkeys(("receptance", "key", "value"), CHANNELS),
    "time_decay": f"Tensor [H,n] or [H*n]\n{RAW}",
    "time_first": 'Tensor [H,n] or [H*n]\nThe bonus u ("time_faaaa").',
    "state": "Tensor [B,H,n,n]\nThe state before the first token. It is not written.",
    "state_v_first": (
        "bool\nThe layout of the state in and out. True, flash_rwkv's own: value channels before key channels.\n"
        "False: [B,H,K,V], as in Penstock, fla and the Python code of Hugging Face's models."
    ),
}

NAMES = {"r": "receptance", "k": "key", "v": "value", "w": "time_decay", "u": "time_first", "initial_state": "state"}
"""Names of arguments of the operators here."""


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
    if not isinstance(state, Tensor) or state.dim() != 4 or state.shape[1] == 0:
        complaints = Complaints(function)
        found = list(state.shape) if isinstance(state, Tensor) else described(state)
        complaints.add(ShapeError, "state", "of shape [B,H,n,n]", found, "Without a state, pass zeros: they tell the number of heads.")
        complaints.raise_any()
    initial = state.transpose(-1, -2) if state_v_first else state
    result = raw_decay(function, variant, receptance, key, value, time_decay, time_first, initial, state.shape[1])
    assert result.final_state is not None
    return result.output, result.final_state.transpose(-1, -2) if state_v_first else result.final_state


def raw_decay(
    function: str, variant: Literal["rwkv5", "rwkv6"], receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor,
    time_first: Tensor, state: Tensor | None, heads: int,
) -> Result:  # fmt: skip
    """RWKV on channels [B,T,H*n] with the decay exp(-exp(time_decay)); output [B,T,H,n], states [B,H,K,V]. Views, but for the decay."""
    complaints = Complaints(function)
    tensors = {"receptance": receptance, "key": key, "value": value, "time_decay": time_decay, "time_first": time_first}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            complaints.add(DtypeError, name, "a torch.Tensor", described(x))
        elif name == "time_first" or (name == "time_decay" and variant == "rwkv5"):
            if x.numel() % heads:
                complaints.add(ShapeError, name, f"of shape [H,n] or [H*n] with H = {heads}", list(x.shape))
        elif x.dim() != 3 or x.shape[2] % heads:
            complaints.add(ShapeError, name, f"of shape [B,T,H*n] with H = {heads}", list(x.shape))
    complaints.raise_any()
    if variant == "rwkv5" and time_decay.numel() not in (heads, key.shape[2]):
        complaints.add(ShapeError, "time_decay", f"of {heads} or {key.shape[2]} elements, as H or H*n", list(time_decay.shape))
        complaints.raise_any()
    r, k, v = (x.unflatten(2, (heads, -1)) for x in (receptance, key, value))
    w = -torch.exp(time_decay if time_decay.dtype == torch.float64 else time_decay.float())
    u = time_first.reshape(heads, -1)
    try:
        if variant == "rwkv5":
            w = w.reshape(heads, -1).expand(heads, k.shape[3])  # RWKV-5.0 and 5.1 have one decay per head
            return rwkv5(r, k, v, w, u, initial_state=state, output_final_state=True)
        return rwkv6(r, k, v, w.unflatten(2, (heads, -1)), u, initial_state=state, output_final_state=True)
    except InvalidArgument as error:
        raise error.of(function, NAMES) from None
