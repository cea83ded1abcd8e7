"""The Triton kernels under the interpreter (on a GPU: compiled), on sizes it takes in a second."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import TRITON, Case, call, draw, measured, problem_of
from test_contract import check_contract, check_near_underflow

import penstock as ps
from penstock.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, about chunks whose decays do not suit one anchor: what they give is thrown away and computed another way."""

BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64
LENGTHS = (0, 5, 40, 0, 1, 33, 0)


def cases(variant: str) -> list[Case]:
    """What the chunked and the token-serial kernels have to get right, once each."""
    of = Case(variant, B=1, H=2)
    gated = bool(VARIANTS[variant].decay)
    found = [replace(of, T=T) for T in (0, 1, 16, 33, 70)] + [replace(of, B=2, T=5), replace(of, B=0, T=5)]
    found += [replace(of, T=20, K=K, V=V) for K, V in ((20, 36), (8, 3), (100, 70), (1, 1))]
    found += [replace(of, T=33, dtype=BFLOAT16, others=torch.float32), replace(of, T=20, dtype=FLOAT16), replace(of, T=5, dtype=FLOAT64)]
    found += [replace(of, T=40, state=False, scale=-0.3), replace(of, T=40, reverse=True), replace(of, T=20, strided=True)]
    found += [replace(of, lengths=LENGTHS), replace(of, lengths=LENGTHS, reverse=True, strided=True, state=False), replace(of, lengths=())]
    found += [replace(of, B=2, T=7, shared=axes) for axes in ("BNH", "TKV", "overlap")]
    found += [replace(of, T=70, gate=gate) for gate in ("zero", "gone", "mixture") if gated]
    found += [replace(of, T=20, gate=-30.0, still=True)] * gated
    found += [replace(of, lengths=LENGTHS, gate="mixture", reverse=True)] * gated
    return found


@pytest.mark.parametrize("impl", TRITON)
@pytest.mark.parametrize("case", [case for variant in VARIANTS for case in cases(variant)], ids=str)
def test_equals_the_oracle(case, impl):
    check_contract(case, impl)


GATED = [name for name, row in VARIANTS.items() if row.decay]


@pytest.mark.parametrize("variant", GATED)
def test_weak_decays_over_many_tokens_equal_the_oracle(variant):
    check_contract(Case(variant, B=1, H=1, K=16, V=8, T=200, gate="weak", still=True), "triton_recurrent")


@pytest.mark.parametrize("variant", GATED)
def test_decay_gradients_near_underflow(variant):
    check_near_underflow(Case(variant, T=5, B=1, H=1), partial(measured, impl="triton_recurrent"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_side_by_side_equal_the_oracle(variant):
    """Few heads, many tokens: states are carried from segment to segment."""
    check_contract(Case(variant, B=1, H=1, T=300, K=16, V=16), "triton_chunkwise")


HALVED = (
    Case("gla", B=1, H=1, T=200, gate="uneven"),
    Case("gla", B=1, H=1, T=90, gate="mixture", reverse=True),
    Case("rwkv6", B=1, H=1, T=520, gate="uneven", reverse=True),  # two segments
    Case("rwkv6", H=1, lengths=(5, 0, 97, 64), gate="mixture", state=False),
    Case("rwkv6", H=2, lengths=(0, 192, 1, 100), gate="uneven", strided=True),
    Case("rwkv5", H=1, lengths=(33, 0, 130), gate="uneven"),
    Case("gla", B=1, H=1, T=200, K=100, V=70, gate="uneven", state=False),
)


@pytest.mark.parametrize("case", HALVED, ids=str)
def test_chunks_that_do_not_suit_one_anchor_are_done_again_by_halves(case):
    """And halves that do not suit either by the kernel for any decay."""
    from penstock.kernels.triton import launch, plan, table

    c = plan.Call.of(problem_of(case, draw(case)), table.Target.of(torch.device("cpu")))
    with launch.trying({c.key(kernel): table.Blocks(4, C=64, fill=2) for kernel in ("forward", "backward")}):
        check_contract(case, "triton_chunkwise")


KEEPING = (Case("gla", B=2, H=2, T=70), Case("rwkv6", lengths=LENGTHS), Case("simple_gla", B=1, H=1, T=300, K=16, V=16, reverse=True))


@pytest.mark.parametrize("case", [*KEEPING, Case("gla", B=1, T=70, gate="mixture"), Case("retention", B=1, T=70, state=False)], ids=str)
def test_states_that_the_forward_pass_kept_are_those_that_the_backward_pass_would_make(case):
    from penstock.kernels.triton import launch

    problem = problem_of(case, draw(case))
    output, final_state, states = launch.chunk_forward_pass(problem, keep=True)
    alone = launch.chunk_forward_pass(problem)
    assert torch.equal(output, alone[0])
    assert torch.equal(final_state, alone[1])
    assert alone[2] is None
    upstream, d_final = torch.randn_like(output), torch.randn_like(final_state)
    given = launch.chunk_backward_pass(problem, upstream, d_final, states)
    for found, wanted in zip(given, launch.chunk_backward_pass(problem, upstream, d_final)):
        assert found is wanted is None or torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    without = launch.chunk_backward_pass(problem, upstream, d_final, states, dg=False)
    assert without.g is None
    for name, found in without._asdict().items():
        assert name == "g" or found is None or torch.equal(found, getattr(given, name))


@pytest.mark.parametrize("impl", TRITON)
@pytest.mark.parametrize("variant", GATED)
def test_a_decay_of_minus_infinity_is_one_of_minus_ten_thousand(variant, impl):
    tensors = draw(Case(variant, B=1, T=40, gate="-inf"))
    finite = tensors | {"g": tensors["g"].clamp(min=-1e4)}
    for found, wanted in zip(*(call(Case(variant, B=1, T=40, gate="-inf"), given, impl) for given in (tensors, finite))):
        assert found.isfinite().all()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("shared", ["", "overlap"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decode_step_is_a_forward_pass_in_the_pool(variant, shared):
    """Slots out of order, one skipped: its row and the rows of nobody stay as they are."""
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


def test_the_interpreter_is_never_chosen_by_itself():
    """On CPU tensors auto passes the Triton kernels over."""
    problem = problem_of(Case("gla"), draw(Case("gla")))
    from penstock.dispatch import explain

    assert explain(problem).forward in ("cpu", "chunkwise")


def test_the_chunked_kernels_refuse_decode_steps_and_large_states():
    t = draw(Case("gla", B=1, T=1, H=1, K=300, V=4))
    arguments = [t[name] for name in ("q", "k", "v", "g", "u")]
    with pytest.raises(ps.ImplementationRefused, match="no decode step"):
        ps.decode_step("gla", *arguments, state=t["initial_state"], impl="triton_chunkwise")
    with pytest.raises(ps.ImplementationRefused, match="at most K = 256"):
        call(Case("gla", B=1, T=1, H=1, K=300, V=4), t, "triton_chunkwise")
