"""The delta rule written out token by token, in float64."""

import torch
from torch import Tensor


def delta_loop(
    q: Tensor, k: Tensor, v: Tensor, *, a: Tensor | None = None, b: Tensor | None = None, beta: Tensor | None = None,
    g: Tensor | None = None, scale: float | None = None, state: Tensor | None = None, before: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k [B,T,G,K], v [B,T,H,V], beta [B,T,H], g [B,T,H] or [B,T,H,K], a state [B,H,K,V]: the output and the last state.

    Without a and b there is one stream, of a = -k and b = k. ``before``: the removal reads the state before its decay.
    """
    H, K = v.shape[2], q.shape[-1]
    q, k, v = (x.double().repeat_interleave(H // x.shape[2], 2) for x in (q, k, v))
    one = a is None
    a, b = (-k, k) if one else (a.double(), b.double())
    S = v.new_zeros(len(v), H, K, v.shape[-1]) if state is None else state.double()
    g = v.new_zeros(v.shape[:3]) if g is None else g.double()
    decay = (g[..., None] if g.dim() == 3 else g).exp()
    rows = []
    for t in range(v.shape[1]):
        kept = decay[:, t, :, :, None] * S
        removed = (a[:, t, :, :, None] * (S if before else kept)).sum(2)
        if one:
            written = (v[:, t] + removed) * (1 if beta is None else beta[:, t, :, None].double())
            S = kept + b[:, t, :, :, None] * written[:, :, None]
        else:
            S = kept + b[:, t, :, :, None] * removed[:, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append((q[:, t, :, :, None] * S).sum(2))
    return (K**-0.5 if scale is None else scale) * torch.stack(rows, 1), S
