"""Scratch: the dyadic forward kernel, checked and timed."""
import json, os, sys, math
import torch, triton
import penstock as ps
from penstock.gpu.hopper import described, description, Tile
dy = None
from penstock.recurrence.triton import hopper
dev = "cuda"
def desc(x, t): return described(x, description(x, t))
def call(q, k, v, g, u, blocks, stages, slots, warps, regs, maxnreg, state=None, final=True):
    B, T, H, K = q.shape; V = v.shape[3]
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=dev); f = torch.empty(B, H, K, V, device=dev)
    tiles = hopper.forward_tiles(K)
    d = [desc(x, t) for x, t in zip((q, k, v, o, g), (*tiles, Tile(64, K)))]
    prev = u is not None
    uu = u if prev else q
    st = state.stride() if state is not None else (0, 0, 0, 0)
    grid = (B * H * V // (64 * blocks),)
    scale = float(K) ** -0.5 if not prev else 1.0
    def go():
        dy.penstock_chunk_fwd_hopper[grid](*d, g, uu, state if state is not None else f, o, f, f, f, scale, B, T, 0, H, *g.stride(), *((uu.stride()) if prev else (0, 0)), *st,
            K, V, False, prev, state is not None, final, 0, False, blocks, stages, slots, warps, regs, True, num_warps=4, maxnreg=maxnreg)
    return go, o, f, scale
def oracle(q, k, v, g, u, scale, state=None):
    B, T, H, K = q.shape
    S = torch.zeros(B, H, K, v.shape[3], dtype=torch.float64, device=dev) if state is None else state.double()
    q, k, v, g = (x.double() for x in (q, k, v, g)); o = []
    w = g.exp()
    for t in range(T):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        if u is None:
            S = w[:, t, :, :, None] * S + kv
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        else:
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S + u.double()[None, :, :, None] * kv))
            S = w[:, t, :, :, None] * S + kv
    return torch.stack(o, 1) * scale, S
def made(B, T, H, D, mu, dt=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, D, device=dev, dtype=dt) for _ in range(3))
    if mu == "soft": g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, D, device=dev))
    elif mu == "inf": g = torch.where(torch.rand(B, T, H, D, device=dev) < .02, -torch.inf, -1e-3)
    else: g = -torch.exp(torch.randn(B, T, H, D, device=dev) + mu)
    u = torch.randn(H, D, device=dev)
    return q, k, v, g, u
