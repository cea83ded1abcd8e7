"""The Gluon kernels for Hopper, emulated on the CPU: results and gradients against the oracle."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Case, arithmetic, draw, offsets, oracle, problem_of, upstream
from closing import DECAYS, MOST, closed, error
from emulated import gluon
from pools import check_untouched, pool_of
from sampling import every

import penstock as ps
from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target, interpreting
from penstock.recurrence.operators import ADVANCE
from penstock.recurrence.triton import in_place, plan, states
from penstock.recurrence.triton.calls import Call
from penstock.recurrence.triton.forms import scalars_sm90, sm90, weights_sm90
from penstock.recurrence.triton.portable import recurrent
from penstock.tokens.shape import Shape
from penstock.tokens.sharing import summed
from penstock.tune.passes import without_memory

pytestmark = [
    pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]
H200, A100 = Target("sm_90", 132, 232448), Target("sm_80", 108, 163 << 10)
ROUNDINGS = 4
"""Of the inputs' dtype in a result: two operands of every product, what lies between two products, and the result."""

OF = Case("rwkv6", B=1, H=2, T=100, K=64, V=64, dtype=torch.bfloat16, others=torch.float32)
CASES = [
    *(replace(OF, variant=variant, gate=gate) for variant in ("gla", "rwkv6") for gate in ("logsigmoid", "mixture", "zero")),
    replace(OF, gate="gone", B=2, T=70),
    replace(OF, variant="gla", T=300, H=1),  # segments
    replace(OF, T=128, H=1, K=128, V=128, gate="mixture"),
    replace(OF, variant="gla", T=70, H=1, K=128, V=128),
    replace(OF, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(OF, variant="gla", lengths=(130, 0, 3), state=False, scale=0.3),
    replace(OF, variant="rwkv5", T=70, H=1),
    replace(OF, variant="rwkv5", T=140, H=2, K=128, V=128, gate="mixture"),
    replace(OF, variant="rwkv5", H=1, gate="zero", lengths=(0, 5, 64, 1, 81, 0)),
    replace(OF, variant="rwkv5", H=1, K=256, V=256, gate="gone", lengths=(65, 0, 3)),
    replace(OF, variant="rwkv5", H=1, K=128, lengths=(0, 1, 0)),  # empty sequences after the only token load within g
    replace(OF, T=70, H=2, K=256, V=128, gate="mixture"),
    replace(OF, variant="gla", H=1, K=256, V=256, lengths=(65, 0, 3)),
    replace(OF, T=70, H=2, V=192),
    replace(OF, T=70, H=1, V=128),
    replace(OF, variant="gla", T=130, H=1, K=256, V=192, gate="zero"),
    replace(OF, T=66, H=1, K=256, V=128, gate="gone"),
]
HALF = replace(OF, T=70, H=1, dtype=torch.float16)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(-5,1))", "-exp(N(2,1))", "channels", "spikes", "gone")
LARGE_V = {"v_factor": 30.0, "upstream_factor": 16.0, "state_factor": 7e4, "scale": 1e-3}
LARGE_D = {"v_factor": 0.02, "upstream_factor": 1024.0, "state_factor": 7e4, "scale": 1e-5}
"""Operands beyond the range of float16 whose results are within it."""
CASES += [
    *(replace(HALF, variant=variant, gate=gate) for variant in ("gla", "rwkv6") for gate in GATES),
    *(replace(HALF, gate=gate, **large) for large in (LARGE_V, LARGE_D) for gate in ("logsigmoid/16", "-exp(N(0,1))")),
    replace(HALF, variant="gla", T=300),
    replace(HALF, T=128, K=128, V=128, gate="mixture"),
    replace(HALF, variant="gla", K=128, V=128, gate="logsigmoid/16", **LARGE_V),
    replace(HALF, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    *(replace(HALF, variant="rwkv5", gate=gate) for gate in GATES),
    replace(HALF, variant="rwkv5", gate="logsigmoid/16", **LARGE_D),
    replace(HALF, K=256, V=128, gate="mixture"),
    replace(HALF, variant="gla", K=256, V=256, lengths=(65, 0, 3), **LARGE_D),
    replace(HALF, V=128, **LARGE_V),
    *(replace(HALF, T=140, K=256, V=128, gate=gate, **large) for large in (LARGE_V, LARGE_D) for gate in ("logsigmoid/16", "-exp(N(0,1))")),
    *(replace(HALF, variant="gla", K=256, V=128, gate=gate) for gate in GATES),
    replace(HALF, variant="gla", T=140, K=256, V=128, **LARGE_V, state=False),
    replace(HALF, T=130, K=256, lengths=(0, 5, 64, 1, 60), gate="mixture"),
    replace(HALF, variant="rwkv5", K=256),
    replace(HALF, K=256, V=128, scale=-0.3),
]
FLOAT = replace(OF, T=70, H=1, dtype=torch.float32)
LARGE = {"v_factor": 1e12, "upstream_factor": 1e9, "state_factor": 1e15, "scale": 1e-20}
SMALL = {"v_factor": 1e-12, "upstream_factor": 1e-12, "state_factor": 1e-12}
FLOATS = [
    *(replace(FLOAT, variant=variant, gate=gate) for variant in ("gla", "rwkv6") for gate in (*GATES, "mixture")),
    *(replace(FLOAT, gate=gate, **large) for large in (LARGE_V, LARGE_D, LARGE, SMALL) for gate in ("logsigmoid/16", "-exp(N(0,1))")),
    replace(FLOAT, variant="gla", T=300),  # segments
    replace(FLOAT, lengths=(0, 5, 64, 1, 81, 0), gate="mixture"),
    replace(FLOAT, variant="gla", lengths=(130, 0, 3), state=False, scale=-0.3),
    *(replace(FLOAT, variant="rwkv5", gate=gate) for gate in GATES),
    replace(FLOAT, variant="rwkv5", lengths=(0, 5, 64, 1, 81, 0), gate="zero", K=128),
    replace(FLOAT, T=128, K=128, V=128, gate="mixture"),
    replace(FLOAT, variant="gla", H=2, K=256, V=64, gate="spikes"),
    replace(FLOAT, H=2, K=64, V=192, gate="mixture"),
    replace(FLOAT, variant="gla", K=192, V=128, lengths=(65, 0, 3)),
]
"""Inputs of float32, also as their products round where torch allows TF32."""


def budget(dtype):
    """The allowed relative error of a result."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return arithmetic(dtype)
    return ROUNDINGS * torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps / 4


def check(found, case):
    wanted = oracle(case)
    for name, x in found.items():
        x, exact = x.double(), wanted[name]
        if x.ndim > exact.value.ndim:  # sums over the tokens of each chunk
            x = x.sum(0)
        off = float((x - exact.value).norm())
        assert off <= budget(case.dtype) * exact.size, (name, off / exact.size)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    compare(case, H200)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_float32_equals_the_oracle(case, precision):
    """As exact as float32 arithmetic; with less precise products as operands of 11 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        compare(case, H200)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_walks_of_128_value_channels(dtype):
    """They are planned where programs of 64 are more than multiprocessors."""
    case = replace(OF, variant="gla", B=2, T=130, H=1, K=256, V=128, gate="mixture", dtype=dtype)
    made = compare(case, H200._replace(multiprocessors=1))
    assert made.launches[-1].grid({"B": 2, "T": 130, "N": 2}) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [None, (200, 0, 5)])
def test_walks_of_segments(lengths, dtype, monkeypatch):
    """In both passes: states and gradients of states at the ends of segments come from other launches."""
    monkeypatch.setattr(weights_sm90, "segment", lambda call: lambda sizes: 128)
    compare(replace(OF, variant="gla", T=200, H=1, K=256, V=128, gate="mixture", lengths=lengths, dtype=dtype), H200)


WAYS = {
    "chunks": ["sm90.segments", "segments"],
    "segments": ["sm90.segments", "segments", "sm90.segments"],
    "whole": ["sm90.segments"],
}
CUT = [
    *(replace(OF, variant="gla", T=200, H=1, gate=gate) for gate in ("mixture", "gone", "logsigmoid")),
    replace(OF, T=200, H=2, B=2, gate="mixture", scale=-0.3),
    replace(OF, H=1, lengths=(0, 130, 0, 64, 5, 256, 0), gate="mixture"),
    replace(OF, variant="gla", H=2, lengths=(256, 0, 200), gate="-inf", state=False),
    replace(OF, variant="rwkv5", T=200, H=1, gate="mixture"),
    replace(OF, T=264, H=1, K=128, V=128, gate="mixture"),
    replace(OF, variant="gla", H=2, K=128, V=128, lengths=(0, 256, 70, 128)),
    replace(OF, T=200, H=2, V=128, gate="mixture"),
    replace(OF, variant="gla", T=200, H=1, V=192, gate="zero"),
    replace(OF, T=200, H=1, dtype=torch.float16, gate="mixture", **LARGE_V),
    replace(OF, variant="gla", H=1, K=128, V=128, lengths=(0, 200, 65), dtype=torch.float16, gate="logsigmoid", **LARGE_D),
    replace(OF, variant="gla", T=200, H=1, others=torch.bfloat16),
    replace(OF, T=200, H=2, strided=True, gate="mixture"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", every(5, CUT), ids=str)
def test_states_of_cut_sequences(case, way, monkeypatch):
    """Segments of two chunks. States before chunks: from sums of all chunks, by walks over segments, and by one walk; kept or not."""
    if way == "whole":
        monkeypatch.setattr(Call, "segment", lambda self, *_, **__: None)
    else:
        monkeypatch.setattr(Call, "segment", lambda self, *_, **__: lambda sizes: 128)
        monkeypatch.setattr(states, "SUMS", states.SUMS if way == "chunks" else 0)
    drawn = draw(case)
    if case.strided:  # decays that no hardware copies
        drawn |= {name: drawn[name].contiguous() for name in "qkv"}
    for keep in (True, False):
        results, made = passes(case, drawn, keep=keep)
        check(results, case)
        assert kernels_of(made)[:-1] == ([] if way == "whole" else ["sm90.segments", "segments"])
    problem = problem_of(case, drawn)
    made = plan.chunk_backward_plan(problem, upstream(case)[0], None, H200)
    assert kernels_of(made)[: 2 * len(WAYS[way]) + 1] == [*WAYS[way] * 2, "sm90.channel_backward"]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("variant", ["gla", "rwkv6", "rwkv5"])
def test_what_a_last_token_leaves_of_a_state_is_exact(variant, K, decay):
    """bfloat16 has the range of float32."""
    case = replace(OF, variant=variant, H=1, T=128, K=K, V=K, gate="weak", state=False)
    tensors = closed(case, decay)
    results, _ = passes(case, tensors)
    assert error(case, tensors, results["final_state"]) <= MOST[case.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_segments_that_only_decay_are_exact(dtype, monkeypatch):
    """Keys of the first chunk only. Decays over the rest of its segment, 2^-46, are no part of an operand of 16 bits."""
    monkeypatch.setattr(Call, "segment", lambda self, *_, **__: lambda sizes: 192)
    case = replace(OF, variant="gla", T=192, H=1, gate=-0.25, state=False, dtype=dtype)
    drawn = draw(case)
    drawn["k"][:, sm90.C :] = 0
    results, _ = passes(case, drawn)
    doubles = {name: x.double() for name, x in drawn.items() if x is not None}
    wanted = ps.gla(**doubles, output_final_state=True, impl="reference").final_state
    assert float(wanted.abs().max()) < 2.0**-40
    assert float((results["final_state"] - wanted).norm() / wanted.norm()) <= budget(dtype)


def kernels_of(made):
    return [one.kernel.fn.__module__.partition(".triton.")[2].removeprefix("portable.") for one in made.launches]


def compare(case, target):
    """Compare results and gradients with the oracle; returns the plan of the forward pass."""
    results, made = passes(case, draw(case), target)
    check(results, case)
    return made


def passes(case, drawn, target=H200, keep=True):
    """Output, final state and gradients of these tensors, and the plan of the forward pass.

    Without gradients if the plain kernel computes them. ``keep``: the forward pass stores states for the backward pass.
    """
    problem = problem_of(case, drawn)
    forward = made = plan.chunk_forward_plan(problem, target, keep)
    assert made.forms[0] in ("chunk_scalar_fwd_sm90", "channel_fwd_sm90")
    tensors = {name: problem.q if x is None else x for name, x in zip(problem.operator.names, problem.tensors)}
    tensors["ones"] = torch.ones(sm90.C + 1, sm90.C, dtype=torch.bfloat16).tril(-1)
    found = gluon.run(made, dict(tensors), problem.sizes)
    results = {name: found[name] for name in ("output", "final_state")}
    if problem.sizes["V"] % (64 if case.dtype == torch.float32 else min(problem.sizes["K"], 128)):
        return results, forward
    d_output, d_final_state = upstream(case)
    states = found.get("chunk_states")
    made = plan.chunk_backward_plan(problem, d_output, d_final_state, target, states)
    assert {"penstock_channel_bwd_sm90", "penstock_channel_bwd_float32_sm90"} & {*names_of(made)}
    tensors |= {"d_output": d_output, "d_final_state": d_final_state, "states": states}
    found = gluon.run(made, tensors, problem.sizes)
    names = ["dq", "dk", "dv", "dg", *(["du"] if case.row.bonus else []), *(["d_initial_state"] if case.state else [])]
    return results | {name.replace("d_initial", "dinitial"): found[name] for name in names}, forward


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 6e4])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(("dtype", "K"), [(torch.float16, 64), (torch.float16, 256), (torch.float32, 64), (torch.float32, 128)], ids=str)
def test_scales_do_not_depend_on_packed_neighbours(dtype, K, name, value):
    """A tile reaches past the end of its sequence. Powers of two for operands must not."""
    case = replace(HALF, variant="gla", K=K, lengths=(70, 90), dtype=dtype)
    drawn = draw(case)
    changed = drawn | {name: drawn[name].clone()}
    changed[name][:, 70:] = value
    for before, after in zip(passes(case, drawn)[0].items(), passes(case, changed)[0].items()):
        first = 1 if before[0].endswith("state") else 70
        x, y = (one[1].unsqueeze(0) if one[0].endswith("state") else one[1] for one in (before, after))
        assert torch.equal(x[:, :first], y[:, :first]), before[0]


BESIDE = [
    (64, 128, H200, True),
    (128, 64, H200, True),
    (64, 63, H200, True),  # shares its plan with 64 tokens: the kernel waits
    (64, 32, H200, False),
    (256, 128, H200, False),
    (64, 128, A100, False),
    (100, 128, H200, False),
]
SCALAR = [
    replace(OF, variant="linear_attention", T=150),
    replace(OF, variant="linear_attention", H=1, state=False, scale=-0.3),
    replace(OF, variant="linear_attention", H=1, lengths=(0, 70, 1, 0, 64)),
    replace(OF, variant="retention", B=2, T=67, state=False),
    replace(OF, variant="retention", lengths=(0, 70, 1, 0, 128)),
    *(replace(OF, variant="simple_gla", H=1, T=193, gate=gate) for gate in ("zero", "logsigmoid/0.1", "mixture", "gone", "spikes")),
    replace(OF, variant="simple_gla", T=66, gate=-30.0),
    replace(OF, variant="simple_gla", lengths=(0, 70, 1, 0, 130), gate="uneven"),
]
SCALAR += [replace(case, K=128) for case in SCALAR]
SCALAR += [replace(OF, variant="simple_gla", B=2, T=150, H=3, K=K, shared="group", gate="mixture") for K in (64, 128)]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("case", SCALAR, ids=str)
def test_walks_without_decays_per_channel(case, keep, monkeypatch):
    """With kept states; and without, and without dg. Heads may share q and k."""
    monkeypatch.setattr(scalars_sm90, "WALKS", 1)
    problem, target = problem_of(case, draw(case)), H200._replace(multiprocessors=1)
    given = {name: problem.q if x is None else x for name, x in zip(problem.operator.names, problem.tensors)}
    made = plan.chunk_forward_plan(problem, target, keep)
    assert names_of(made) == ["penstock_scalar_fwd_sm90"]
    found = gluon.run(made, dict(given), problem.sizes)
    check({name: found[name] for name in ("output", "final_state")}, case)
    states = found.get("chunk_states")
    d_output, d_final_state = upstream(case)
    made = plan.chunk_backward_plan(problem, d_output, d_final_state, target, states, dg=keep)
    name = "penstock_scalar_bwd_sm90"
    assert names_of(made) == [*["penstock_chunk_states"] * (states is None), name]
    found = gluon.run(made, given | {"d_output": d_output, "d_final_state": d_final_state, "states": states}, problem.sizes)
    assert ("dg" in found) is (keep and problem.g is not None)
    results = {name: found[name] for name in ("dq", "dk", "dv")}
    if case.state:
        results["dinitial_state"] = found["d_initial_state"]
    if "dg" in found:
        results["dg"] = summed(found["dg"], problem.g)
    check(results, case)


def names_of(made):
    return [one.kernel.fn.__name__ for one in made.launches]


UPDATES = [
    ("rwkv6", (70, 3, 128, 0, 64), (4, 0, -1, 2, 5), torch.float32, "gaps", "mixture"),
    ("gla", (64, 130, 63), (1, 3, 0), torch.bfloat16, "contiguous", "logsigmoid"),
    ("rwkv5", None, None, torch.float16, "contiguous", "logsigmoid"),
]
"""Variant, lengths of packed sequences, slots, dtype and layout of the pool, gate."""


@pytest.mark.parametrize(("K", "T", "target", "early"), BESIDE)
def test_launch_of_tokens_begins_beside_the_launch_of_pieces(K, T, target, early):
    """Only after a Hopper kernel, which lets it begin: any other kernel may write what it reads."""
    x = without_memory("gla", Shape(2, T, 2, K, K), torch.bfloat16)
    made = in_place.advance_plan(x.in_place(torch.empty(2, 2, K, K, device="meta")), target)
    last = made.launches[-1]
    assert last.kernel is recurrent.penstock_recurrent_fwd
    assert [("launch_pdl", True) in one.options for one in made.launches] == [False] * (len(made.launches) - 1) + [early]
    assert last.constants[-1] is early
    assert not early or made.forms[0] == "channel_pieces_sm90"


def launch_tokens(problem, tensors, wait, monkeypatch):
    """The output of the launch of tokens alone, under the interpreter, as on Hopper. ``wait`` is called where programs wait."""
    made = in_place.advance_plan(problem, H200).at(problem.sizes)
    last = made.launches[-1]
    names = recurrent.penstock_recurrent_fwd.arg_names[len(last.tensors) + len(last.numbers) :]
    constants = dict(zip(names, last.constants)) | {"CUDA": False}
    assert constants["EARLY"]
    monkeypatch.setattr(recurrent, "cuda", SimpleNamespace(gdc_wait=wait))
    output = torch.full(made.memory["output"][0], torch.nan, dtype=made.memory["output"][1])
    given = [output if name == "output" else tensors.get(name) for name in last.tensors]
    last.kernel[last.grid, 1, 1](*[problem.q if x is None else x for x in given], *last.numbers, **constants)
    return output


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("lengths", [(2, 31, 0), (66, 1, 0, 3)], ids=str)
def test_launch_of_tokens_reads_what_other_kernels_write_after_its_wait(lengths, monkeypatch):
    """Until a program waits, that is NaN or wrong: of 64 tokens and more, the states of sequences with a piece; of fewer, all inputs."""
    case = replace(OF, dtype=torch.bfloat16, variant="gla", lengths=lengths, H=1, gate="mixture", state=False)
    whole, slots = torch.tensor(lengths) >= 64, torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1))
    state, _ = pool_of(len(lengths), case, torch.float32)
    true = draw(case) | {"cu_seqlens": offsets(case), "slots": slots, "state": state}
    problem = ADVANCE.checked("advance('gla')", [true.get(name) for name in ADVANCE.names], (None,))
    true = {name: x.clone() for name, x in true.items() if isinstance(x, torch.Tensor)}
    wanted_state = true["state"].clone()
    wanted = launch_tokens(problem, true | {"state": wanted_state}, lambda: None, monkeypatch)
    early, waited = {name: x.clone() for name, x in true.items()}, []
    if sum(lengths) >= 64:
        written = {"state": slots[whole]}
    else:
        written = {name: slice(None) for name in true}
    for name, rows in written.items():
        if name == "slots":
            early[name][rows] = true[name].flip(0)
        else:
            early[name][rows] = 0 if name == "cu_seqlens" else torch.nan

    def wait():
        for name, rows in written.items() if not waited else ():
            early[name][rows] = true[name][rows]
        waited.append(1)

    found = launch_tokens(problem, early, wait, monkeypatch)
    assert len(waited) >= sum(length > 0 for length in lengths)
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
    assert torch.equal(early["state"], wanted_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("variant", "lengths", "slots", "pool", "layout", "gate"), UPDATES)
def test_pieces_are_updated_in_place(variant, lengths, slots, pool, layout, gate, dtype):
    """The first launch of an update: whole pieces of 64 tokens. Other rows of the pool and tokens after the pieces are not touched."""
    case = replace(OF, dtype=dtype, variant=variant, lengths=lengths, B=2, T=64, H=1, gate=gate, state=False)
    tensors, rows = draw(case), 6 if slots else 2
    state, memory = pool_of(rows, case, pool, layout)
    slots = None if slots is None else torch.tensor(slots)
    given = tensors | {"cu_seqlens": offsets(case), "slots": slots, "state": state}
    problem = ADVANCE.checked(f"advance({variant!r})", [given.get(name) for name in ADVANCE.names], (None,))
    made = in_place.advance_plan(problem, H200)
    assert made.forms[0] == "channel_pieces_sm90"
    del made.launches[1:]
    wanted, before = state.double(), memory.clone()
    least = budget(max(dtype, pool, key=lambda x: torch.finfo(x).eps))  # the state is rounded to the pool's dtype between pieces
    touched = torch.zeros(rows, dtype=torch.bool)
    output = gluon.run(made, {name: problem.q if x is None else x for name, x in given.items()}, problem.sizes)["output"]
    spans = [(n, 0, 64) for n in range(2)] if lengths is None else [(0, *span) for span in problem.spans()]
    for n, (row, begin, end) in enumerate(spans):
        slot, end = n if slots is None else int(slots[n]), begin + (end - begin) // 64 * 64
        if slot < 0 or begin == end:
            continue
        touched[slot] = True
        part = {name: x if x is None or x.dim() < 4 else x[row : row + 1, begin:end].double() for name, x in tensors.items()}
        part |= {name: None if part[name] is None else part[name].double() for name in ("g", "u")}
        one = wanted[slot : slot + 1].clone()
        expected = ps.advance(variant, *(part[name] for name in ("q", "k", "v", "g", "u")), state=one, impl="reference")
        wanted[slot] = one[0]
        assert (output[row, begin:end].double() - expected[0]).norm() <= least * expected.norm()
    assert (state.double() - wanted)[touched].norm() <= least * wanted[touched].norm()
    check_untouched(state, memory, before, touched)
