"""What only the Triton kernels do, under the interpreter (on a GPU: compiled): segments, any decay, kept states."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import TRITON, Case, call, check_near_underflow, draw, problem_of
from contract import check_contract, measured
from sampling import every, slow

import penstock as ps
from penstock.gpu.launch import trying
from penstock.recurrence.operators import FAMILY, SUMMARY
from penstock.recurrence.triton import launch, plan, states, table_file
from penstock.recurrence.triton.calls import Call
from penstock.recurrence.triton.table import KernelConfig
from penstock.recurrence.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, of values in the interpreter that masks discard."""


SEGMENTED = {name: Case(name, B=1, H=1, T=300) for name in VARIANTS}


@pytest.mark.parametrize("case", [SEGMENTED["retention"], *slow(*(SEGMENTED[name] for name in VARIANTS if name != "retention"))], ids=str)
def test_segments_equal_the_oracle(case):
    """Few heads, many tokens: states are carried from segment to segment."""
    check_contract(case, "triton_chunkwise")


CUT = [
    Case("retention", B=1, H=1, T=300, state=False),
    *slow(
        Case("rwkv6", H=1, lengths=(0, 130, 0, 64, 5, 101, 0), gate="mixture"),
        Case("gla", B=1, H=2, T=300, gate="-inf", reverse=True),
        Case("linear_attention", B=2, H=1, T=200, reverse=True, scale=-0.3),
        Case("simple_gla", H=1, lengths=(0, 130, 0, 64, 5, 101, 0), gate="-inf"),
        Case("rwkv5", B=1, H=1, T=300, gate="mixture"),
        Case("gla", B=1, H=1, T=300, K=100, V=70, gate="-1e4", strided=True),
        Case("rwkv6", H=1, lengths=(256, 0, 300), gate="spikes", reverse=True),
    ),
]


@pytest.mark.parametrize("case", CUT, ids=str)
def test_all_ways_to_states_equal_the_oracle(case, monkeypatch):
    """Of a backward pass: from sums of all chunks, by walks over segments, and by one walk. Segments have two chunks."""
    for segment, most in ((2, states.SUMS), (2, 0), (0, 0)):
        cut = lambda self, C, *_, n=segment, **__: (lambda sizes: n * C) if n else None  # noqa: E731
        monkeypatch.setattr(Call, "segment", cut)
        monkeypatch.setattr(states, "SUMS", most)
        with trying({}):  # plans of its own
            check_contract(case, "triton_chunkwise")


GATED = [name for name, row in VARIANTS.items() if row.decay]
SAMPLED = ["rwkv6", *slow(*(name for name in GATED if name != "rwkv6"))]


@pytest.mark.parametrize("T", [70, *slow(200)])
@pytest.mark.parametrize("variant", SAMPLED)
def test_weak_decays_over_many_tokens_equal_the_oracle(variant, T):
    check_contract(Case(variant, B=1, H=1, K=16, V=8, T=T, gate="weak", still=True), "triton_recurrent")


@pytest.mark.parametrize("variant", SAMPLED)
def test_decay_gradients_near_underflow(variant):
    check_near_underflow(Case(variant, T=5, B=1, H=1), partial(measured, impl="triton_recurrent"))


DECAYS = (-1e-8, "zero", "logsigmoid/16", "logsigmoid/0.1", *(f"-exp(N({mu},1))" for mu in range(-5, 3)), "channels", "spikes", "-inf")
ANY = [
    *(Case(("gla", "rwkv6")[n % 2], B=1, H=1, T=70, gate=gate) for n, gate in enumerate(DECAYS)),
    Case("rwkv5", H=1, lengths=(33, 0, 70), gate="-exp(N(1,1))"),
    Case("gla", B=1, H=1, T=33, K=100, V=70, gate="spikes"),
    Case("rwkv6", B=1, H=1, T=70, gate="mixture", reverse=True),
]
MORE = [
    *(Case(("rwkv6", "gla")[n % 2], B=1, H=1, T=70, gate=gate) for n, gate in enumerate(DECAYS)),
    Case("rwkv6", H=2, lengths=(0, 192, 1, 100), gate="uneven", strided=True),
    Case("rwkv6", B=1, H=1, T=520, gate="uneven", reverse=True),  # two segments
]


@pytest.mark.parametrize("case", [*every(5, ANY), Case("gla", B=1, H=1, T=200, gate="uneven"), *slow(*MORE)], ids=str)
def test_any_decay_per_channel_equals_the_oracle(case):
    """Chunks of 16 and of 64. In "uneven" chunks that suit one anchor come before and after others."""
    c = Call.of(problem_of(case, draw(case)), table_file.target(torch.device("cpu")))
    for C in (16, 64):
        with trying({c.key(kernel): KernelConfig(4, C=C, programs_per_sm=2) for kernel in ("forward", "backward")}):
            check_contract(case, "triton_chunkwise")


@pytest.mark.parametrize("gate", ["spikes", *slow("uneven", "logsigmoid")])
def test_a_sequence_does_not_change_the_bits_of_another(gate):
    """Strong decays in one of two sequences."""
    problem = problem_of(case := Case("rwkv6", B=2, H=1, T=100, gate="logsigmoid"), draw(case))
    strong = draw(replace(case, gate=gate))["g"]
    assert problem.g is not None
    assert strong is not None
    other = problem.with_tensors({"g": torch.cat((strong[:1], problem.g[1:]))})
    results = []
    for one in (problem, other):
        output, state, _ = launch.chunk_forward(one)
        grads = launch.chunk_backward(one, torch.ones_like(output), torch.ones_like(state))
        results.append([x[1] for x in (output, state, *grads) if x is not None and x.shape[0] == 2])
    assert all(torch.equal(x, y) for x, y in zip(*results))


@pytest.mark.parametrize("gate", ["logsigmoid/0.1", -16.0, "gone"])
@pytest.mark.parametrize("variant", ["simple_gla", "retention"])
def test_decay_gradients_of_strong_scalar_decays_do_not_cancel(variant, gate):
    """The gradient of the final state is large, the gradient of the decay small."""
    check_contract(Case(variant, B=1, H=1, T=70, gate=gate, upstream_factor=1024.0), "triton_chunkwise")


def test_the_second_launch_alone_gives_the_same_bits():
    """As after another kernel's launch, at K = 256 on Hopper: ``resume`` and the state in memory are 0 here."""
    case = Case("gla", B=2, H=1, T=100, K=20, V=12, gate="uneven", state=False)
    problem = problem_of(case, draw(case))
    made = plan.chunk_forward_plan(problem, table_file.target(torch.device("cpu"))).at(problem.sizes)
    _, one = made.launches
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in made.memory.items()}
    tensors |= {name: function(*rest, torch.device("cpu")) for name, (function, *rest) in made.constants.items()}
    given = {name: getattr(problem, name) for name in "qkvg"} | tensors
    one.kernel[(one.grid, 1, 1)](*[given.get(name, problem.q) for name in one.tensors], *one.numbers, *one.constants)
    output, final_state, _ = launch.chunk_forward(problem)
    assert torch.equal(tensors["output"], output)
    assert torch.equal(tensors["final_state"], final_state)


LARGE = (
    {"upstream_factor": 1024.0, "state_factor": 7e4},
    {"dtype": torch.float16, "others": torch.float32, "upstream_factor": 64.0, "state_factor": 7e4, "scale": 2.0**-16},  # results fit
)


@pytest.mark.parametrize("gate", ["-exp(N(-2,1))", "-exp(N(2,1))"])
@pytest.mark.parametrize("options", LARGE, ids=["float32", "float16"])
@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_large_values_equal_the_oracle(variant, options, gate):
    """Values, upstream gradients and states whose products no float16 operand can hold."""
    check_contract(Case(variant, B=1, H=1, T=40, gate=gate, v_factor=30.0, **options), "triton_chunkwise")


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
    assert None not in states
    assert torch.equal(output, alone[0])
    assert torch.equal(final_state, alone[1])
    assert not any(alone[2])
    upstream, d_final = torch.randn_like(output), torch.randn_like(final_state)
    given = launch.chunk_backward(problem, upstream, d_final, states)
    for found, wanted in zip(given, launch.chunk_backward(problem, upstream, d_final)):
        assert found is wanted is None or torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    without = launch.chunk_backward(problem, upstream, d_final, states, dg=False)
    assert without.g is None
    for name, found in without._asdict().items():
        assert name == "g" or found is None or torch.equal(found, getattr(given, name))


@pytest.mark.parametrize("case", [Case("gla", B=1, H=1, T=70), *slow(Case("rwkv6", H=1, lengths=(0, 40, 33)))], ids=str)
def test_states_of_other_chunks_are_recomputed(case):
    """Between the passes the precision of products, or strides by hooks of saved tensors, may change, and with them the chunks."""
    problem = problem_of(case, draw(case))
    key = Call.of(problem, table_file.target(torch.device("cpu"))).key("backward")
    states = []
    for C in (16, 32):
        with trying({key: KernelConfig(4, C=C)}):
            output, final_state, (kept,) = launch.chunk_forward(problem, keep=True)
            states.append(kept)
    assert len(states[0]) != len(states[1])
    with trying({key: KernelConfig(4, C=32)}):
        wanted = launch.chunk_backward(problem, torch.ones_like(output), torch.ones_like(final_state))
        for kept in (*states, *states[::-1]):
            for found, one in zip(launch.chunk_backward(problem, torch.ones_like(output), torch.ones_like(final_state), (kept,)), wanted):
                assert found is one is None or torch.allclose(found, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


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
    case = Case("gla", B=1, T=1, H=1, K=2049, V=4)
    with pytest.raises(ps.ImplementationRefused, match="at most K = 2048 and V = 2048"):
        call(case, draw(case), "triton_chunkwise")
    t = draw(replace(case, K=30))
    arguments = [t[name] for name in ("q", "k", "v", "g", "u")]
    with pytest.raises(ps.ImplementationRefused, match="no form that works in place"):
        ps.decode_step("gla", *arguments, state=t["initial_state"], impl="triton_chunkwise")


WIDE = (
    Case("gla", B=1, H=2, T=20, K=300, V=12),
    Case("rwkv6", H=1, lengths=(0, 19, 3), K=260, V=12, dtype=torch.bfloat16, others=torch.float32),
    Case("simple_gla", B=1, H=1, T=20, K=260, V=520, dtype=torch.float16),
    *slow(
        Case("rwkv5", B=1, H=1, T=20, K=513, V=20),
        Case("retention", H=1, lengths=(20, 3), K=1024, V=20),
        Case("linear_attention", B=1, H=1, T=20, K=300, V=20, reverse=True, strided=True),
    ),
)
"""Key channels in blocks of 256."""


@pytest.mark.parametrize("impl", TRITON)
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_heads_equal_the_oracle(case, impl):
    check_contract(case, impl)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("sizes", [(600, 24), *slow((24, 600))], ids=str)
def test_summaries_of_wide_heads_equal_the_oracle(sizes, adjoint):
    """As wide as the heads of functions over sequences."""
    K, V = sizes
    random = torch.Generator().manual_seed(3)
    k, v, g = (torch.randn(1, 20, 1, size, generator=random) for size in (K, V, K))
    given = [(k.to(dtype), v.to(dtype), -g.abs().to(dtype), None) for dtype in (torch.float32, torch.float64)]
    found, exact = (SUMMARY("summary('gla')", x, (1.0, False, adjoint), impl) for x, impl in zip(given, ("triton", "reference")))
    for one, other in zip(found, exact):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["rwkv6", *slow("simple_gla")])
def test_wide_heads_advance_in_place(variant):
    case = Case(variant, B=1, T=67, H=1, K=300, V=12, state=False)
    t, pool = draw(case), torch.randn(3, 1, 300, 12)
    found, wanted = pool.clone(), pool.double()
    slots, arguments = torch.tensor([2]), [t[name] for name in ("q", "k", "v", "g", "u")]
    doubles = [None if x is None else x.double() for x in arguments]
    o = ps.advance(variant, *arguments, state=found, slots=slots, impl="triton_recurrent")
    exact = ps.advance(variant, *doubles, state=wanted, slots=slots, impl="reference")
    assert (o - exact).norm() <= 2e-6 * exact.norm()
    assert (found - wanted).norm() <= 2e-6 * wanted.norm()
    assert torch.equal(found[:2], pool[:2])


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
