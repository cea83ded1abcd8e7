"""The token loop of the RWKV-6 model on Hugging Face, in float32, for every variant: the baseline. A family may have its own.

That model runs ``rwkv6_linear_attention_cpu`` on a CPU, and for a single token on every device. This loop has the same layout and
operations: heads before tokens, keys and decays with tokens last, and for every token an outer product by matmul, the bonus, the
read by matmul, and a new state tensor. Other variants differ as their formulas do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..verify.inputs import Inputs


def token_loop(inputs: Inputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [B,T,H,V] and final state [B,H,K,V], both float32; ``state`` is not changed.

    Two changes make the backward pass linear in T: tokens are split in one operation instead of sliced one by one, and under
    autograd the outputs are stacked instead of written into one tensor. Otherwise each token would write a whole tensor.
    """
    if inputs.family.loop is not None:
        return inputs.family.loop(inputs.variant, inputs.tensors, inputs.scale, state)
    key = inputs.k.float().transpose(1, 2).transpose(-2, -1)  # [B, H, K, T]
    value = inputs.v.float().transpose(1, 2)  # [B, H, T, V]
    query = inputs.q.float().transpose(1, 2)  # [B, H, T, K]
    if inputs.scale != 1:
        query = query * inputs.scale
    decay = _decay(inputs)  # [B or 1, H, K or 1, T or 1]
    bonus = None if inputs.u is None else inputs.u.float()[:, :, None]  # [H, K, 1]
    if state is None:
        state = value.new_zeros(*key.shape[:3], value.shape[3])

    T = key.shape[3]
    decays = [decay] * T if decay is None or decay.shape[3] == 1 else decay.split(1, 3)
    gathered: list[Tensor] = []
    output = value.new_zeros(inputs.v.shape)
    for t, (q_t, k_t, v_t, decay_t) in enumerate(zip(query.split(1, 2), key.split(1, 3), value.split(1, 2), decays)):
        kv = k_t @ v_t
        read = state if bonus is None else bonus * kv + state
        state = kv + (state if decay_t is None else decay_t * state)
        o = (q_t @ (read if bonus is not None else state)).squeeze(2)
        if torch.is_grad_enabled():
            gathered.append(o)
        else:
            output[:, t] = o
    return torch.stack(gathered, 1) if gathered else output, state


def _decay(inputs: Inputs) -> Tensor | None:
    if inputs.g is None:
        return None
    axes = inputs.signature.axes["g"]
    g = inputs.g.float()[tuple(slice(None) if axis in axes else None for axis in "BTHK")]
    return torch.exp(g).permute(0, 2, 3, 1)
