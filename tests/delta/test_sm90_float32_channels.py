"""The Gluon kernels of KDA in float32 for Hopper, emulated on a CPU: tiles of chunks, and results against the oracle."""

from dataclasses import replace

import contract
import pytest
import torch
from cases import arithmetic, check_against, upstream
from deltas import Delta, allowed, oracle
from emulated import gluon
from hopper_deltas import (
    EMULATED,
    H200,
    backward,
    forward,
    given,
    problem_of,
)
from sampling import every, slow

from penstock.call.implementation import Upstream
from penstock.delta import triton
from penstock.delta.triton import launch
from penstock.delta.triton.calls import Backward, C, Forward
from penstock.delta.triton.forms import channels_float32_sm90
from penstock.delta.triton.forms.lists import residuals_of
from penstock.gpu.launch import tried, trying
from penstock.gpu.plan import Plan
from penstock.gpu.target import standing_in

pytestmark = EMULATED
OF = Delta("kda", B=1, H=1, T=70, K=128, V=128, dtype=torch.float32, others=torch.float32)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "channels", "uneven", "spikes", "gone", "mixture")


CASES = [
    *(replace(OF, gate=gate, T=150) for gate in GATES),
    *(replace(OF, key=key, beta=beta, gate="weak") for key in ("positive", "near", "equal") for beta in (1.0, 2.0)),
    replace(OF, B=2, T=70, H=2, G=1, gate="mixture"),
    replace(OF, T=64, V=64, H=2),
    replace(OF, T=1, V=64),
    replace(OF, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
    replace(OF, T=70, scale=0.0),
    replace(OF, v_factor=1e4, state_factor=1e5, gate="mixture"),
    replace(OF, T=1, gate=-18.0, still=True),
    *(replace(OF, K=64, V=64, gate=gate) for gate in ("weak", "logsigmoid/16", "mixture", "gone")),
    replace(OF, K=64, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
]
FORWARD, BACKWARD, PIECES = channels_float32_sm90.FORWARD, channels_float32_sm90.BACKWARD, channels_float32_sm90.PIECES
NAMES = ("output", "final_state")


@pytest.mark.parametrize("case", [*every(6, CASES), *slow(*CASES)], ids=str)
def test_equal_the_oracle(case):
    """Within the budget of kernels that compute in float32."""
    found, wanted = forward(FORWARD, problem_of(case, repeated=True)), oracle(case)
    check_against({n: found[n] for n in NAMES}, {n: wanted[n] for n in NAMES}, case.dtype, allowed(case, "triton_chunkwise"))


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
    assert max(worst.values()) <= large * arithmetic(case.dtype), worst


def exact_walks(problem, d_output, d_final):
    """W, the states before and the gradients of states after chunks, dV / beta, and all gradients, of one sequence by the token loop."""
    p = problem
    q, k, v, g, beta, S = (x.detach().double() for x in (p.q, p.k, p.v, p.g, p.beta, p.initial_state))
    beta = torch.where(beta.abs() < 2.0**-100, 2.0**-100, beta)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta, S)]
    errors, outputs, states = [], [], []
    for t in range(p.sizes["T"]):
        if t % C == 0:
            S = S.clone()  # of which later chunks are functions, not the last output
            S.retain_grad()
            states.append(S)
        S = S * g[:, t].exp()[..., None]
        errors.append(v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], errors[-1])
        outputs.append(p.scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    torch.autograd.backward([torch.stack(outputs, 1), S], [d_output.double(), d_final.double()])
    after = torch.cat([*(x.grad.mT for x in states[1:]), d_final.double().mT])

    def in_chunks(x):
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -p.sizes["T"] % C)).unflatten(0, (-1, C)).transpose(1, 2)

    W, z = in_chunks(torch.cat([x.detach() for x in errors])), in_chunks((v.grad / beta.detach()[..., None])[0])
    made = {"errors": W, "z": z, "chunk_states": torch.cat([x.detach().mT for x in states]), "d_chunk_states": after}
    grads = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "d_initial_state"), (x.grad for x in leaves)))
    return {name: x.float().contiguous() for name, x in made.items()}, grads


@pytest.mark.parametrize(
    "case",
    [
        *(replace(OF, gate=gate, T=T) for gate, T in zip(GATES, 5 * (70, 130))),
        replace(OF, T=3),
        replace(OF, K=64, V=64, gate="mixture", H=2),
        replace(OF, K=64, T=130, gate="logsigmoid/16", scale=-0.3),
        replace(OF, V=64, key="equal", beta=1.0, gate="weak"),
    ],
    ids=str,
)
def test_gradients_from_exact_walks(case):
    """The launches after both walks, of one sequence."""
    problem, (d_output, d_final) = problem_of(case, repeated=True), upstream(case)
    walked, wanted = exact_walks(problem, d_output, d_final)
    plan, call = Plan(), Backward.of(problem, H200, d_output=d_output, d_final_state=d_final)
    channels_float32_sm90.add_gradients(plan, call)
    found = gluon.run(plan, given(problem) | walked | {"d_output": d_output}, problem.sizes)
    for name in ("dq", "dk", "dg", "dbeta"):
        off = float((found[name].double() - wanted[name]).norm())
        assert off <= arithmetic(case.dtype) * wanted[name].norm() + 1e-30, (name, off / wanted[name].norm())


BACKWARD_CASES = [
    *(replace(OF, gate=gate, T=130) for gate in GATES),
    *(replace(OF, key=key, beta=beta, gate="weak") for key in ("positive", "near", "equal") for beta in (1.0, 2.0)),
    replace(OF, beta=0.0),
    replace(OF, B=2, T=70, H=2, G=1, gate="mixture"),
    replace(OF, T=1),
    replace(OF, T=64, H=2, V=64),
    replace(OF, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, lengths=(130, 0, 3), state=False, scale=-0.3),
    *(replace(OF, v_factor=1e4, state_factor=1e5, upstream_factor=1e3, gate=gate) for gate in ("weak", "mixture", "gone")),
    *(replace(OF, K=64, V=64, gate=gate) for gate in ("weak", "logsigmoid/16", "mixture", "gone")),
    replace(OF, K=64, H=2, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
]


def summed(x, heads):
    """A gradient of every head of v, summed over the heads of each of ``heads`` groups."""
    return x.unflatten(2, (heads, -1)).double().sum(3).to(x.dtype)


@pytest.mark.parametrize("case", [*every(6, BACKWARD_CASES), *slow(*BACKWARD_CASES)], ids=str)
def test_gradients_equal_the_oracle(case):
    """Within the budget of kernels that compute in float32."""
    found, wanted = backward(BACKWARD, problem_of(case, repeated=True), *upstream(case)), oracle(case)
    found = {f"d{name}": summed(x, case.sizes["G"]) if name in ("q", "k") else x for name, x in found.items()}
    names = [name for name in found if name in wanted]
    assert {"dq", "dk", "dv", "dg", "dbeta"} <= {*names}
    check_against({n: found[n] for n in names}, {n: wanted[n] for n in names}, case.dtype, allowed(case, "triton_chunkwise"))


def test_queries_and_keys_of_different_heads_are_refused():
    """The heads of both are read by those of q."""
    case = replace(OF, H=2, T=70)
    drawn = case.tensors()
    drawn["q"] = drawn["q"][:, :, :1].expand(-1, -1, 2, -1)
    assert "q and k must have the same heads" in str(FORWARD.refusal(Forward.of(problem_of(case, drawn), H200)))


def test_calls_by_named_forms(monkeypatch):
    """From a call to the kernels and back, by what the forward pass keeps."""
    case, ran = replace(OF, H=2, T=130, gate="mixture"), []

    def run(name, p, of, planned, tensors, *more, **options):
        plan = planned(tried(H200)[0])
        ran.extend(plan.forms)
        return gluon.run(plan, {key: p.q if x is None else x for key, x in tensors.items()}, p.sizes)

    monkeypatch.setattr(launch.launch, "run", run)
    monkeypatch.setattr(triton, "gpu_refuses", lambda x: None)
    problem = contract.problem_of(case, case.tensors())
    with standing_in(H200), trying({}, FORWARD.name, BACKWARD.name):
        (output, final_state), residuals = triton.CHUNKWISE.forward_with_residuals(problem)
        gradients = triton.CHUNKWISE.backward(problem, Upstream(upstream(case), (), residuals, ()))
    assert ran == [FORWARD.name, BACKWARD.name]
    assert len(residuals) == len(residuals_of(problem))
    names = [f"d{one.name}" for one in problem.signature.arguments if one.gradient]
    found = {name: x for name, x in zip(names, gradients) if x is not None} | {"output": output, "final_state": final_state}
    case.check(found, "triton_chunkwise")
