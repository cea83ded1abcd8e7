"""Every variant of the recurrence, written out token by token, for the tests of other projects' names."""

import torch


def loop(q, k, v, g=None, u=None, scale=None, state=None, reverse=False):
    """Token by token in float64, over [B,T,H,...]; g [B,T,H] or [B,T,H,K]; returns outputs and the state [B,H,K,V]."""
    q, k, v = (x.double() for x in (q, k, v))
    S = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64) if state is None else state.double()
    outputs = [None] * q.shape[1]
    for t in reversed(range(q.shape[1])) if reverse else range(q.shape[1]):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        decay = 1 if g is None else (g[:, t].double().exp() if g.dim() == 4 else g[:, t, :, None].double().exp())[..., None]
        after = decay * S + kv
        read = after if u is None else S + u.double()[:, :, None] * kv
        outputs[t] = torch.einsum("bhk,bhkv->bhv", q[:, t], read)
        S = after
    return (q.shape[3] ** -0.5 if scale is None else scale) * torch.stack(outputs, 1), S


def close(actual, expected, **options):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-5, **options)
