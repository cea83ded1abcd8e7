"""What only the Triton kernels do, under the interpreter (on a GPU: compiled): segments, halves, kept states."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Case, call, check_near_underflow, draw, problem_of
from contract import check_contract, measured

import penstock as ps
from penstock.gpu.launch import trying
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.triton import launch, plan, table
from penstock.recurrence.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, of values in the interpreter that masks discard."""


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


SEGMENTED = {name: Case(name, B=1, H=1, T=300) for name in VARIANTS}


@pytest.mark.parametrize("case", [SEGMENTED["retention"], *slow(*(SEGMENTED[name] for name in VARIANTS if name != "retention"))], ids=str)
def test_segments_equal_the_oracle(case):
    """Few heads, many tokens: states are carried from segment to segment."""
    check_contract(case, "triton_chunkwise")


GATED = [name for name, row in VARIANTS.items() if row.decay]
SAMPLED = ["rwkv6", *slow(*(name for name in GATED if name != "rwkv6"))]


@pytest.mark.parametrize("variant", SAMPLED)
def test_weak_decays_over_many_tokens_equal_the_oracle(variant):
    check_contract(Case(variant, B=1, H=1, K=16, V=8, T=200, gate="weak", still=True), "triton_recurrent")


@pytest.mark.parametrize("variant", SAMPLED)
def test_decay_gradients_near_underflow(variant):
    check_near_underflow(Case(variant, T=5, B=1, H=1), partial(measured, impl="triton_recurrent"))


HALVED = (
    Case("gla", B=1, H=1, T=130, gate="uneven"),
    Case("rwkv5", H=1, lengths=(33, 0, 130), gate="uneven"),
    *slow(
        Case("gla", B=1, H=1, T=200, gate="uneven"),
        Case("gla", B=1, H=1, T=90, gate="mixture", reverse=True),
        Case("rwkv6", B=1, H=1, T=520, gate="uneven", reverse=True),  # two segments
        Case("rwkv6", H=1, lengths=(5, 0, 97, 64), gate="mixture", state=False),
        Case("rwkv6", H=2, lengths=(0, 192, 1, 100), gate="uneven", strided=True),
        Case("gla", B=1, H=1, T=200, K=100, V=70, gate="uneven", state=False),
    ),
)


@pytest.mark.parametrize("case", HALVED, ids=str)
def test_chunks_with_strong_decays_are_computed_by_halves(case):
    """And halves that do not suit by the kernel for any decay."""
    c = plan.Call.of(problem_of(case, draw(case)), table.target(torch.device("cpu")))
    with trying({c.key(kernel): table.KernelConfig(4, C=64, programs_per_sm=2) for kernel in ("forward", "backward")}):
        check_contract(case, "triton_chunkwise")


KEEPING = (
    Case("gla", B=2, H=1, T=40),
    Case("rwkv6", H=1, lengths=(0, 40, 33)),
    Case("retention", B=1, H=1, T=70, state=False),
    *slow(
        Case("gla", B=2, H=2, T=70),
        Case("rwkv6", lengths=(5, 0, 97, 64)),
        Case("simple_gla", B=1, H=1, T=300, reverse=True),
        Case("gla", B=1, T=70, gate="mixture"),
    ),
)


@pytest.mark.parametrize("case", KEEPING, ids=str)
def test_saved_states_equal_recomputed_states(case):
    problem = problem_of(case, draw(case))
    output, final_state, states = launch.chunk_forward(problem, keep=True)
    alone = launch.chunk_forward(problem)
    assert states is not None
    assert torch.equal(output, alone[0])
    assert torch.equal(final_state, alone[1])
    assert alone[2] is None
    upstream, d_final = torch.randn_like(output), torch.randn_like(final_state)
    given = launch.chunk_backward(problem, upstream, d_final, states)
    for found, wanted in zip(given, launch.chunk_backward(problem, upstream, d_final)):
        assert found is wanted is None or torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    without = launch.chunk_backward(problem, upstream, d_final, states, dg=False)
    assert without.g is None
    for name, found in without._asdict().items():
        assert name == "g" or found is None or torch.equal(found, getattr(given, name))


@pytest.mark.parametrize("shared", ["", "overlap"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_steps_run_in_the_pool(variant, shared):
    """Slots out of order, one skipped: its row and all other rows keep their bits."""
    case = Case(variant, B=3, T=2, K=20, V=12, shared=shared)
    t = draw(case)
    pool = torch.randn(5, case.H, case.K, case.V)
    wanted = pool.clone()
    slots = torch.tensor([4, 9, -1, 9, 0, 9])[::2]
    arguments = [t[name] for name in ("q", "k", "v", "g", "u")]
    found = ps.decode_step(variant, *arguments, state=pool, slots=slots, impl="triton_recurrent")
    expected = ps.decode_step(variant, *arguments, state=wanted, slots=slots, impl="reference")
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(pool, wanted, rtol=1e-5, atol=1e-5)
    assert (found[1] == 0).all()


def test_auto_does_not_choose_the_interpreter():
    problem = problem_of(Case("gla"), draw(Case("gla")))
    assert FAMILY.pick(problem, "forward", "auto").name in ("cpu", "chunkwise")


def test_chunked_kernels_refuse_updates_in_place_and_large_states():
    case = Case("gla", B=1, T=1, H=1, K=300, V=4)
    with pytest.raises(ps.ImplementationRefused, match="at most K = 256"):
        call(case, draw(case), "triton_chunkwise")
    t = draw(replace(case, K=30))
    arguments = [t[name] for name in ("q", "k", "v", "g", "u")]
    with pytest.raises(ps.ImplementationRefused, match="no form that works in place"):
        ps.decode_step("gla", *arguments, state=t["initial_state"], impl="triton_chunkwise")


@pytest.mark.parametrize("slots", [torch.tensor([4, -1, 0]), *slow(None)], ids=["slots", "rows in order"])
@pytest.mark.parametrize("variant", ["rwkv6", *slow("simple_gla")])
def test_updates_by_views_equal_those_by_copies(variant, slots):
    """Slices of rows in time, and tensors with other strides, are copied for the chunk kernel: bit for bit the same."""
    case = Case(variant, B=3, T=68, H=1, K=16, V=16, state=False)
    t, pool = draw(case), torch.randn(3 if slots is None else 5, 1, 16, 16)
    constant = {name: t.pop(name) for name in ("u", "initial_state")}
    found = []
    for view in (lambda x: x[:, 3:].clone(), lambda x: x[:, 3:], lambda x: x[:, 3:].transpose(1, -2).contiguous().transpose(1, -2)):
        state, given = pool.clone(), {name: None if x is None else view(x) for name, x in t.items()}
        output = ps.advance(variant, **given, u=constant["u"], state=state, slots=slots, impl="triton_recurrent")
        found.append((output, state))
    assert all(torch.equal(one, other) for pair in found[1:] for one, other in zip(pair, found[0]))


@pytest.mark.parametrize("variant", ["gla", *slow("retention")])
def test_states_of_more_than_256_key_channels_are_updated_token_by_token(variant):
    """Decays stay pending within pieces of 64 tokens only: cuts between them change no bit."""
    case = Case(variant, B=1, T=130, H=1, K=300, V=4, state=False)
    t, pool = draw(case), torch.randn(1, 1, 300, 4)
    wanted, exact = pool.clone(), pool.double()
    given = {name: t[name] for name in ("q", "k", "v", "g")}
    whole = ps.advance(variant, **given, state=wanted, impl="triton_recurrent")
    doubles = {name: x.double() for name, x in given.items()}
    assert torch.allclose(whole.double(), ps.advance(variant, **doubles, state=exact, impl="reference"), rtol=1e-5, atol=1e-5)
    parts = []
    for begin, end in ((0, 64), (64, 129), (129, 130)):
        part = {name: x if variant == "retention" and name == "g" else x[:, begin:end] for name, x in given.items()}
        parts.append(ps.advance(variant, **part, state=pool, impl="triton_recurrent"))
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(pool, wanted)
