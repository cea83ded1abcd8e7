"""The Gluon kernels of KDA in float32 for Hopper, emulated on a CPU: tiles of chunks, and results against the oracle."""

from dataclasses import replace

import pytest
import torch
from cases import arithmetic
from deltas import Delta
from emulated import gluon
from hopper_deltas import EMULATED, H200, given, problem_of

from penstock.delta.triton.calls import C, Forward
from penstock.delta.triton.forms import channels_float32_sm90
from penstock.gpu.plan import Plan

pytestmark = EMULATED
OF = Delta("kda", B=1, H=1, T=70, K=128, V=128, dtype=torch.float32, others=torch.float32)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "channels", "uneven", "spikes", "gone", "mixture")


def chunk_tiles(q, k, g, beta, scale):
    """The tiles of one chunk by their definitions, in float64: of tokens [L,K], beta [L]."""
    q, k, beta, L = q.double() * scale, k.double(), beta.double(), len(q)
    G = g.double().clamp(min=-1e4).cumsum(0)
    D = (G[:, None] - G[None]).where(torch.ones(L, L).tril().bool()[..., None], -torch.inf).exp()
    A_q, A_k = torch.einsum("tk,sk,tsk->ts", q, k, D), torch.einsum("tk,sk,tsk->ts", k, k, D).tril(-1)
    T = torch.linalg.inv(torch.eye(L, dtype=torch.float64) + beta[:, None] * A_k)
    return {
        "k_read": k * G.exp(), "q_read": q * G.exp(), "solved_keys": T.T @ (k * (G[-1] - G).exp()), "weights": A_q @ T,
        "removals": A_k @ T, "totals": G[-1].exp(),
    }  # fmt: skip


def sums_of_parts(x, rows):
    """The tiles [slots,H,rows,columns] whose three parts are rows of x."""
    return x.double().unflatten(2, (3, rows)).sum(2) if x.dtype == torch.bfloat16 else x.double()


@pytest.mark.parametrize(
    "case",
    [
        *(replace(OF, gate=gate) for gate in GATES),
        replace(OF, K=64, gate="mixture", H=2, G=1),
        replace(OF, T=130, lengths=(3, 127), gate="logsigmoid/16", scale=-0.3),
        *(replace(OF, key=key, beta=2.0, gate="weak", T=64) for key in ("near", "equal")),
    ],
    ids=str,
)
def test_tiles_equal_their_definitions(case):
    problem = problem_of(case, repeated=True)
    plan, call = Plan(), Forward.of(problem, H200)
    channels_float32_sm90.add_prepare(plan, call, removals=True)
    found = gluon.run(plan, given(problem), problem.sizes)
    p, worst = problem, {}
    spans = problem.spans() if case.lengths else [(0, case.T)]
    for n, (first, last) in enumerate(spans):
        for number, begin in enumerate(range(first, last, C)):
            end, slot = min(begin + C, last), (first // C + n if case.lengths else 0) + number
            for h in range(case.H):
                wanted = chunk_tiles(*(x[0, begin:end, h] for x in (p.q, p.k, p.g, p.beta)), p.scale)
                for name, x in wanted.items():
                    y = sums_of_parts(found[name], C)[slot, h]
                    y = y[: end - begin, : x.shape[1]] if x.dim() > 1 else y
                    worst[name] = max(worst.get(name, 0.0), float((x - y).norm() / (x.norm() + 1e-30)))
    large = 20 if case.beta == 2.0 else 1  # entries of T are large
    print(case, {name: f"{x:.1e}" for name, x in worst.items()})
    assert max(worst.values()) <= large * arithmetic(case.dtype), worst
