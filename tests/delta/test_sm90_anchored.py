"""The Gluon kernels of RWKV-7 with one anchor in a chunk, for Hopper, emulated on a CPU, against the oracle."""

from dataclasses import replace

import contract
import pytest
import torch
from cases import arithmetic, upstream
from deltas import Delta, oracle, rounding_errors
from emulated import gluon
from hopper_deltas import A100, BUDGET, EMULATED, H200, budget, check_state_alone, given
from sampling import every, slow

from penstock.call.implementation import Upstream
from penstock.delta import inputs, triton
from penstock.delta.triton import answers, launch
from penstock.delta.triton.calls import Backward, Forward
from penstock.delta.triton.forms import anchored_sm90, chunks, segments
from penstock.gpu.launch import tried, trying
from penstock.gpu.target import standing_in
from penstock.gpu.targets import TARGETS

pytestmark = EMULATED
NAMES = ("q", "k", "v", "a", "b", "raw", "initial_state")

OF = Delta("rwkv7", B=1, H=1, T=70, K=64, V=64, dtype=torch.bfloat16, raw=True)
CASES = [
    *(replace(OF, centre=centre) for centre in (0.0, -9.0, 9.0)),
    replace(OF, key="equal", centre=-5.0),
    replace(OF, centre=60.0),
    replace(OF, lengths=(0, 5, 64, 1, 81, 0), scale=-0.3),
    replace(OF, T=1),
    replace(OF, B=2, T=64, H=2, state=False),
    replace(OF, T=150, others=torch.float32, centre=2.0),
]
LARGE_INVERSES = [replace(OF, key="equal", written=1.9, centre=-60.0), replace(OF, key="near", written=1.9, centre=-5.0)]
"""Entries of T and what it multiplies need both bfloat16 parts."""
NEIGHBOURS = replace(OF, lengths=(3, 130, 70), centre=-9.0)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORWARD, BACKWARD = anchored_sm90.FORWARD, anchored_sm90.BACKWARD
NAMED = (FORWARD.name, BACKWARD.name)
FORMS = pytest.mark.parametrize("form", [FORWARD, BACKWARD], ids=lambda form: form.name)


def run(form, case, drawn=None, d_output=None, d_final=None, seed=0, raw=True):
    """The results of a form, or all gradients, by the emulated kernels. ``raw``: whether they compute log decays from raw gates."""
    drawn_gradients = upstream(case)
    d_output = drawn_gradients[0] if d_output is None else d_output
    d_final = drawn_gradients[1] if d_final is None else d_final
    problem = contract.problem_of(case, case.tensors() if drawn is None else drawn)
    computed, pull = inputs.differentiable(problem, False)
    p = problem if raw else inputs.canonical(problem, {name: x.detach() for name, x in computed.items()})
    call = Forward.of(p, H200) if form is FORWARD else Backward.of(p, H200, d_output=d_output, d_final_state=d_final)
    assert form.refusal(call) is None
    found = gluon.run(form.plan(call), given(p) | {"d_output": d_output, "d_final_state": d_final}, p.sizes, seed)
    if form is FORWARD:
        return {name: found[name] for name in ("output", "final_state")}
    if not raw:
        found["draw"] = pull({"g": found["dg"]})["raw"]
    return {f"d{name}": found["d_" + name if name == "initial_state" else "d" + name] for name in NAMES}


RAW = pytest.mark.parametrize("raw", [True, False], ids=["raw gates", "log decays"])
EVERY = pytest.mark.parametrize("case", [*every(8, CASES), NEIGHBOURS, *LARGE_INVERSES, *slow(*CASES)], ids=str)


@FORMS
@RAW
@EVERY
def test_equal_the_oracle(form, case, raw):
    """Sums over all channels may cancel: then twice the error of the formula with rounded operands is allowed, too."""
    wanted = oracle(case)
    for name, x in run(form, case, raw=raw).items():
        if name not in wanted:
            continue
        off = float((x.double() - wanted[name].value).norm())
        allowed = BUDGET * wanted[name].size + 1e-30
        if off > allowed:
            allowed += 2 * rounding_errors(case, 8)[name]
        assert off <= allowed, (name, off / wanted[name].size)


@RAW
@EVERY
def test_equal_the_oracle_in_float16(case, raw):
    """Rounding the output to float16 leaves less than eps / 4 of its norm.

    A state is the result of four products in a row: pairs, T, X or Bt, then W or M. Of each, the operands lack 2^-16, and the product of
    both low parts, which is left out, is as much on average.
    """
    case = replace(case, dtype=torch.float16)
    found, wanted = run(FORWARD, case, raw=raw), oracle(case)
    for name, allowed in (("output", budget(case) / 3), ("final_state", 4 * 2 * 2.0**-16)):
        assert float((found[name].double() - wanted[name].value).norm()) <= allowed * wanted[name].size + 1e-30, name


@RAW
@EVERY
def test_gradients_equal_the_oracle_in_float16(case, raw):
    """Rounding a gradient to float16 leaves less than eps / 4 of its norm, or what is below float16's range.

    What 16 bits of operands leave is less than the rest of eps / 3, unless T is large: then twice the error of the formula with operands of
    16 bits is allowed, too.
    """
    case = replace(case, dtype=torch.float16)
    wanted = oracle(case)
    for name, x in run(BACKWARD, case, raw=raw).items():
        if name not in wanted:
            continue
        kind = torch.finfo(x.dtype)
        off = float((x.double() - wanted[name].value).norm())
        allowed = budget(case) / 3 * wanted[name].size + kind.smallest_normal * kind.eps / 2 * x.numel() ** 0.5
        if off > allowed:
            allowed += 2 * rounding_errors(case, 16)[name]
        assert off <= allowed, (name, off / wanted[name].size)


@RAW
@EVERY
def test_equal_the_oracle_in_float32(case, raw):
    """Within the budget of kernels that compute in float32."""
    case = replace(case, dtype=torch.float32, others=torch.float32)
    found, wanted = run(FORWARD, case, raw=raw) | run(BACKWARD, case, raw=raw), oracle(case)
    case.check({name: x for name, x in found.items() if name in wanted}, "triton_chunkwise")


@pytest.mark.parametrize("name", ["k", *slow("q", "v", "a", "b", "raw", "initial_state")])
def test_nan_is_where_it_is_in_bfloat16(name):
    """Of one token, or of one element of the state."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        case = replace(OF, T=130, H=2, dtype=dtype, others=torch.float32)
        drawn = case.tensors()
        drawn[name][:, 1 if name == "initial_state" else 70, 0, 3] = torch.nan
        found.append({n: x.isnan() for form in (FORWARD, BACKWARD) for n, x in run(form, case, drawn).items()})
    for n, x in found[0].items():
        assert torch.equal(x, found[1][n]), n


def test_states_are_more_exact_than_their_tiles():
    """What is written is added to the state in two bfloat16 parts. With the first alone the error is 2e-3."""
    case = replace(OF, T=130)
    wanted = oracle(case)["final_state"]
    assert float((run(FORWARD, case)["final_state"].double() - wanted.value).norm()) < 1.6e-3 * wanted.size


PASSES = pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, dtype) for form in (FORWARD, BACKWARD) for dtype in DTYPES],
    ids=lambda x: x.name if x in (FORWARD, BACKWARD) else str(x),
)


@PASSES
@pytest.mark.parametrize("name", ["b", *slow("q", "k", "v", "a", "raw", "d_output")])
def test_packed_neighbours_change_no_bit(form, dtype, name):
    """Tiles reach past the end of a sequence. Neither a sequence before nor one after changes a bit."""
    case = replace(OF, lengths=(3, 5, 70), dtype=dtype)
    drawn, (d_output, _) = case.tensors(), upstream(case)
    changed = drawn | {"d_output": d_output}
    changed[name] = changed[name].clone()
    for part in (slice(0, 3), slice(8, None)):
        changed[name][:, part] = torch.inf
    before, after = run(form, case), run(form, case, changed, changed["d_output"], seed=1)
    for n, x in before.items():
        of = (1,) if n.endswith("state") else (slice(None), slice(3, 8))
        assert torch.equal(x[of], after[n][of]), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [37, *slow(1, 64, 65)])
def test_later_tokens_change_no_bit(cut, dtype):
    """Outputs before a cut."""
    case = replace(OF, T=130, dtype=dtype)
    drawn, other = case.tensors(), replace(case, centre=9.0, v_factor=1e4 if dtype == torch.float16 else 1e9).tensors()
    changed = dict(drawn)
    for name in ("q", "k", "v", "a", "b", "raw"):
        changed[name] = torch.cat([drawn[name][:, :cut], other[name][:, cut:]], 1)
    assert torch.equal(run(FORWARD, case)["output"][:, :cut], run(FORWARD, case, changed)["output"][:, :cut])


@FORMS
def test_gates_whose_channels_are_far_apart(form):
    """Their addresses have more than 32 bits. Most of the memory is never written."""
    drawn = OF.tensors()
    raw, step = drawn["raw"], 2**26
    far = torch.empty(63 * step + raw.shape[1], dtype=raw.dtype).as_strided(raw.shape, (raw.shape[1], 1, raw.shape[1], step))
    far.copy_(raw)
    for name, x in run(form, OF, drawn | {"raw": far}).items():
        assert torch.equal(x, run(form, OF)[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [True, *slow(False)])
def test_the_gradient_of_the_state_alone(final, dtype):
    case = replace(OF, lengths=(70, 0, 130), dtype=dtype)
    problem, (d_output, d_final) = contract.problem_of(case, case.tensors()), upstream(case)
    computed, _ = inputs.differentiable(problem, False)
    p = inputs.canonical(problem, {name: x.detach() for name, x in computed.items()})
    check_state_alone(BACKWARD, p, d_output, d_final if final else None)


@pytest.mark.parametrize("heads", [{"H": 2}, {"H": 4, "G": 2}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_with_raw_gates(dtype, heads, monkeypatch):
    """From a call to the kernels and back, without the stage of raw inputs where heads of v share no others."""
    case, ran = replace(OF, T=130, others=torch.float32, dtype=dtype, **heads), []

    def run(name, p, of, planned, tensors, *more, **options):
        plan = planned(tried(H200)[0])
        ran.extend(plan.forms)
        return gluon.run(plan, {key: p.q if x is None else x for key, x in tensors.items()}, p.sizes)

    monkeypatch.setattr(launch.launch, "run", run)
    monkeypatch.setattr(triton, "gpu_refuses", lambda x: None)
    problem, wanted = contract.problem_of(case, case.tensors()), oracle(case)
    with standing_in(H200):
        (output, _), residuals = triton.CHUNKWISE.forward_with_residuals(problem)
        gradients = triton.CHUNKWISE.backward(problem, Upstream(upstream(case), (), residuals, ()))
    assert ran == list(NAMED)
    names = [f"d{one.name}" for one in problem.signature.arguments if one.gradient]
    found = {name: x for name, x in zip(names, gradients) if x is not None} | {"output": output}
    assert set(found) == set(wanted) - {"final_state"}
    allowed = arithmetic(dtype) if dtype == torch.float32 else budget(case)
    for name, x in found.items():
        assert float((x.double() - wanted[name].value).norm()) <= allowed * wanted[name].size, name


def test_raw_gates_are_read_where_the_form_of_the_pass_reads_them():
    """Else the stage before the kernels computes log decays."""

    def taken(case, target, mode="forward", d_output=None):
        with standing_in(target):
            return answers.take_raw(answers.CHUNKWISE, contract.problem_of(case, case.tensors()), mode, d_output)

    d_output = torch.zeros(OF.B, OF.T, OF.H, OF.V, dtype=OF.dtype)
    assert taken(OF, H200)
    assert taken(OF, H200, "backward", d_output)
    assert taken(replace(OF, lengths=(3, 5, 70)), H200)
    for dtype in DTYPES:
        assert taken(replace(OF, dtype=dtype), H200)
    assert not taken(OF, H200, "backward", d_output.expand(2, *d_output.shape[1:])[:, :, :, :1].expand(-1, -1, -1, OF.V))
    with standing_in(H200):
        reasons = [(one.name, one.reason) for one in answers.verdicts(answers.CHUNKWISE, contract.problem_of(OF, OF.tensors()), "forward")]
    assert reasons[-2:] == [("rwkv7_sm90", None), ("one anchor in 64 tokens, because decays are at least -0.6065", None)]
    assert not taken(OF, A100)
    with trying({}, "delta_chunks"):
        assert not taken(OF, H200)
    assert taken(OF, H200)
    problem = contract.problem_of(OF, OF.tensors())
    assert {form.refusal(Forward.of(problem, H200)) for form in (chunks.FORWARD, segments.FORWARD)} == {"it takes log decays"}
    assert not taken(OF, H200, "advance")
    assert not taken(OF, TARGETS["sm_100"])  # no form takes it
    for other in (replace(OF, H=2, G=1), replace(OF, V=128), replace(OF, variant="kda")):
        assert not taken(other, H200)


@pytest.mark.parametrize("heads", [{"T": 1}, {"T": 3, "lengths": (1, 1, 1)}, {"T": 4, "lengths": (1, 0, 1, 1, 0)}], ids=str)
def test_sequences_of_one_token_have_other_gradients(heads):
    """A decay multiplies nothing there without a state, so its gradient is exactly 0. Terms of a chunk would cancel to rounding errors."""
    for dtype in DTYPES:
        case = replace(OF, dtype=dtype, **heads)
        problem, (d_output, d_final) = contract.problem_of(case, case.tensors()), upstream(case)
        p = inputs.canonical(problem, inputs.uncomputed(problem, False))
        assert BACKWARD.avoids(Backward.of(p, H200, d_output=d_output, d_final_state=d_final)) is not None
    case = replace(OF, T=2)
    problem = contract.problem_of(case, case.tensors())
    p = inputs.canonical(problem, inputs.uncomputed(problem, False))
    assert BACKWARD.avoids(Backward.of(p, H200, d_output=upstream(case)[0], d_final_state=None)) is None


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (OF, A100, "sm_90"),
        (replace(OF, K=32), H200, "K and V must be 64, these are 32 and 64"),
        (replace(OF, V=128), H200, "K and V must be 64, these are 64 and 128"),
        (replace(OF, dtype=torch.float64), H200, "it takes bfloat16"),
        (replace(OF, raw=False), H200, "one anchor in 64 tokens"),
        (replace(OF, variant="kda", bound=-0.5), H200, "two streams"),
        (replace(OF, H=2, strided=True), H200, "rows at multiples of 16 bytes"),
        (replace(OF, H=4, G=2), H200, "every head of v"),
    ],
    ids=str,
)
def test_reasons(case, target, reason):
    d_output, d_final = upstream(case)
    problem = contract.problem_of(case, case.tensors())
    p = inputs.canonical(problem, inputs.uncomputed(problem, False))
    assert reason in str(BACKWARD.refusal(Backward.of(p, target, d_output=d_output, d_final_state=d_final)))
    assert reason in str(FORWARD.refusal(Forward.of(p, target)))
