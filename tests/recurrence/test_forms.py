"""The forms of the Triton implementations: the contract of each, what ``penstock check`` draws, and reasons of those that do not run."""

from dataclasses import replace

import pytest
import torch
from emulated import gluon

import penstock as ps
from penstock.call.declaration import FLOATS
from penstock.call.families import trials
from penstock.gpu import forms as gpu_forms
from penstock.gpu import launch as gpu_launch
from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target, interpreting
from penstock.recurrence import triton
from penstock.recurrence.declaration import in_place, over_sequences
from penstock.recurrence.operators import ADVANCE, FAMILY, RECURRENCE, SUMMARY
from penstock.recurrence.triton import answers, launch, plan
from penstock.recurrence.triton.calls import Backward, InPlace, Whole
from penstock.recurrence.triton.forms import groups, lists, states
from penstock.recurrence.triton.in_place import advance_plan
from penstock.recurrence.variants import VARIANTS, Variant
from penstock.softmax.operators import ATTENTION
from penstock.softmax.operators import FAMILY as SOFTMAX
from penstock.softmax.triton import plan as attention
from penstock.tokens.shape import Shape
from penstock.tune.passes import without_memory
from penstock.tune.resources import RecordedResources
from penstock.verify import forms

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="forms run under Triton's interpreter and an emulator of Hopper"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]
H200, A100, MI300X = Target("sm_90", 132, 227 << 10), Target("sm_80", 108, 163 << 10), Target("gfx942", 304, 64 << 10)
OF = {one.name: (RECURRENCE, one) for one in (*gpu_forms.every(lists.CHUNK_FORWARD), *gpu_forms.every(lists.CHUNK_BACKWARD))}
OF |= {one.name: (RECURRENCE, one) for one in (*lists.TOKEN_FORWARD, *lists.TOKEN_BACKWARD)}
OF |= {one.name: (ADVANCE, one) for one in (*lists.PIECES, *lists.TOKENS_IN_PLACE)}
OF |= {one.name: (ATTENTION, one) for one in (*attention.FORWARD, *attention.BACKWARD)}
"""All forms, and the operator of each."""
HERE = [name for name, (_, one) in OF.items() if one.absent(Target("interpreter", 4, 1 << 20)) is None]
HOPPER = [name for name in OF if name not in HERE]
"""Forms for Hopper, which the emulator runs; those of softmax attention run on a GPU alone (``tests/gpu_device/test_forms.py``)."""


@pytest.fixture
def hopper(monkeypatch):
    """A device, named cpu, that plans for an H200 and runs kernels in the emulator."""
    if without_gluon() is not None:
        pytest.skip(without_gluon())

    def run(name, p, target, planned, tensors, *more, later=None):
        trial = gpu_launch._trial
        made = planned(H200 if trial is None else trial.on(H200))
        if trial is not None:
            trial.planned.update(made.forms)
        if p.operator is ADVANCE:  # no token is after the last piece of the examples
            del made.launches[-1:]
        return gluon.run(made, {name: p.first if x is None else x for name, x in tensors.items()}, p.sizes)

    monkeypatch.setattr(gpu_launch, "run", run)
    monkeypatch.setattr(answers, "target", lambda device: H200)
    monkeypatch.setattr(Target, "of", lambda device: H200)
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    for module, name in ((triton, "gpu_refuses"), (gpu_forms, "refuses")):
        monkeypatch.setattr(module, name, lambda x: "it computes in float32" if x.dtype == torch.float64 else None)
    assert launch.launch.run is run


def compared(name, operator=None):
    """What ``penstock check`` finds for a form, and whether the form ran."""
    operator = operator or OF[name][0]
    trial = next(trial for trial in trials() if trial.operator is operator)
    return list(forms.findings(trial, FLOATS, "cpu", only=name))


@pytest.mark.parametrize("name", HERE)
def test_examples_equal_the_oracle(name):
    """Each form runs on an example, and what it computes is right."""
    found = compared(name)
    assert found
    assert not [(one.result, one.reason, one.error, one.budget) for one in found if one.failed]


@pytest.mark.parametrize("name", [name for name in HOPPER if OF[name][0] is not ATTENTION])
def test_examples_equal_the_oracle_on_hopper(name, hopper):
    found = compared(name)
    assert found
    assert not [(one.result, one.reason, one.error, one.budget) for one in found if one.failed]


@pytest.mark.parametrize("name", [one.name for _, among in states.BESIDE_HOPPER for one in among])
def test_summaries_by_each_form_equal_the_oracle(name, request):
    if name not in HERE:
        request.getfixturevalue("hopper")
    found = compared(name, SUMMARY)
    assert found
    assert not [(one.result, one.reason, one.error, one.budget) for one in found if one.failed]


def test_every_kernel_belongs_to_a_form():
    """A form's name is that of its kernel, or of one of the kernels of its group."""
    names = [one.name for _, one in OF.values()]
    assert len(names) == len(set(names)) == len(HERE) + len(HOPPER)
    for implementation in (triton.RECURRENT, triton.CHUNKWISE, triton.SUMMARY, SOFTMAX.named("triton")):
        for one in implementation.forms():
            assert OF[one.name][1].examples == one.examples


def plans(operator, example, target):
    """The plans of all passes of an example, without memory."""
    size = example.sizes
    if operator is ATTENTION:
        q, k = (torch.empty(1, size[T], size[H], size["D"], dtype=example.dtype, device="meta") for T, H in (("Tq", "H"), ("Tk", "G")))
        call = ATTENTION.checked("softmax_attention", (q, k, k, None, None), (True, None, None, False))
        return attention.forward_plan(call, target), attention.backward_plan(call, q, None, target)
    x = without_memory(example.variant, Shape(*(size[axis] for axis in "BTHKV")), example.dtype, size["G"])
    if operator is ADVANCE:
        return (advance_plan(x.in_place(torch.empty(size["N"], size["H"], size["K"], size["V"], device="meta")), target),)
    problem = x.problem().whole
    d_output = torch.empty_like(problem.v)
    return (
        plan.chunk_forward_plan(problem, target),
        plan.chunk_backward_plan(problem, d_output, None, target),
        plan.recurrent_forward_plan(problem, target),
        plan.recurrent_backward_plan(problem, d_output, None, target),
    )


@pytest.mark.parametrize("name", OF)
def test_kernels_are_recorded(name):
    """Their registers, spills and shared memory on Hopper, where every form has code, are in the record of the package."""
    operator, one = OF[name]
    every = [made for x in one.examples for made in plans(operator, x, H200._replace(forms=frozenset([name]))) if name in made.forms]
    assert every
    kernels = {launch.kernel.fn.__name__ for made in every for launch in made.launches}
    recorded = {launch.rpartition(": ")[2].split()[0] for launch in RecordedResources.read().launches["sm_90"]}
    assert kernels <= recorded


@pytest.mark.parametrize("examples", [(), (groups.BACKWARD.examples[1]._replace(sizes={**groups.SIZES, "T": 5}),)], ids=["none", "outside"])
def test_a_form_that_check_does_not_run_is_a_failure(examples, monkeypatch):
    """Without examples, or with examples outside of its domain."""
    without = (replace(groups.BACKWARD, examples=examples, parts=()),)
    monkeypatch.setitem(answers.CHUNKWISE, "forward", ())
    monkeypatch.setitem(answers.CHUNKWISE, "backward", (("backward", without),))
    failed = [one for one in forms.findings(trials()[0], (torch.float16,), "cpu") if one.failed]
    assert [(one.implementation, one.form) for one in failed] == [("triton_chunkwise", groups.BACKWARD.name)]
    assert ("no examples" if not examples else "did not run on any") in failed[0].reason


def test_states_that_are_kept_for_the_backward_pass_are_compared(monkeypatch):
    """A forward pass that keeps something else than its states has right results."""
    right = FAMILY.named("triton_chunkwise")

    def wrong(problem):
        results, residuals = right.forward_with_residuals(problem)
        return results, tuple(None if x is None else x + 1 for x in residuals)

    others = tuple(replace(one, forward_with_residuals=wrong) if one is right else one for one in FAMILY.implementations)
    monkeypatch.setattr(FAMILY, "implementations", others)
    failed = {one.result for one in compared("chunk_fwd") if one.failed}
    assert failed
    assert all(name.startswith("gradient of") for name in failed)


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=lambda target: target.arch)
def test_the_first_form_that_takes_a_call_runs(target):
    for variant in VARIANTS:
        problem = without_memory(variant, Shape(8, 2048, 32, 64, 64), torch.bfloat16).problem()
        for among, call, made in (
            (lists.CHUNK_FORWARD, Whole.of(problem, target), plan.chunk_forward_plan(problem, target)),
            (lists.CHUNK_BACKWARD, Backward.of(problem, target), plan.chunk_backward_plan(problem, problem.v, None, target)),
        ):
            reasons = [gpu_forms.reason(one, call) for one in among]
            assert made.forms[0] == among[reasons.index(None)].name


def test_forms_that_are_wanted_run_where_they_can():
    """``Target.forms`` overrides what is faster, not what is possible."""
    few = without_memory("simple_gla", Shape(1, 200, 2, 64, 64), torch.bfloat16).problem()
    wanted = H200._replace(forms=frozenset(["scalar_fwd_sm90", "scalar_bwd_sm90"]))
    assert plan.chunk_forward_plan(few, H200).forms[0] == "chunk_fwd"
    assert plan.chunk_forward_plan(few, wanted).forms == ["scalar_fwd_sm90"]
    assert plan.chunk_backward_plan(few, few.v, None, wanted).forms[0] == "scalar_bwd_sm90"
    other = without_memory("gla", Shape(1, 200, 2, 64, 64), torch.bfloat16).problem()
    assert plan.chunk_forward_plan(other, wanted).forms == plan.chunk_forward_plan(other, H200).forms == ["channel_fwd_sm90"]


EXPLAINED = {
    "channel_fwd_sm90": ("gla", Shape(8, 2048, 32, 64, 64), "K of a block must be", {"K": 96}),
    "chunk_scalar_fwd_sm90": ("gla", Shape(8, 2048, 4, 256, 512), "V must be a multiple of 64, this is 80", {"V": 80}),
    "scalar_fwd_sm90": ("simple_gla", Shape(8, 2048, 32, 64, 64), "slower with fewer than 132 programs", {"B": 1}),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_reasons(name):
    variant, shape, reason, changed = EXPLAINED[name]
    one = OF[name][1]
    for sizes, wanted in ((shape, None), (shape._replace(**changed), reason)):
        call = Whole.of(without_memory(variant, sizes, torch.bfloat16).problem(), H200)
        found = gpu_forms.reason(one, call)
        assert found is None if wanted is None else wanted in found
    assert "its code is for sm_90 (Hopper), this is sm_80" in gpu_forms.reason(one, Whole.of(call.p, A100))


def test_explain_names_the_forms_that_run():
    q = torch.randn(1, 70, 4, 16, dtype=torch.float16, requires_grad=True)
    walk = ps.explain("simple_gla", q[:, :, :2], q[:, :, :2], q, -q[..., 0].detach().abs().float(), impl="triton_chunkwise")
    runs = {mode: [one.name for one in found if one.reason is None] for mode, found in walk.forms.items()}
    assert runs == {"forward": ["chunk_fwd"], "backward": ["chunk_bwd_groups", "segment_sums"]}
    assert "backward: chunk_bwd_groups: runs" in str(walk)
    assert "forward: scalar_fwd_sm90, chunk_scalar_fwd_sm90, channel_fwd_sm90: refuses: its code is for sm_90" in str(walk)
    wide = torch.randn(1, 3, 1, 300)
    walk = ps.explain("linear_attention", wide, wide, wide, impl="triton_chunkwise")
    assert {one.part for one in walk.forms["forward"]} == {"forward of 256 key channels", "forward of 44 key channels"}
    g, state = -q.detach().abs().float(), torch.zeros(1, 4, 16, 16)
    walk = ps.explain("advance", "gla", q.detach(), q.detach(), q.detach(), g, state=state, impl="triton_recurrent")
    assert [one.name for one in walk.forms["advance"] if one.reason is None] == ["chunk_pieces", "recurrent_in_place"]
    assert not ps.explain("linear_attention", wide[:, :0], wide[:, :0], wide[:, :0], impl="triton_chunkwise").forms


def test_implementations_list_their_forms():
    listed = {one.name: one.forms for one in ps.implementations()}
    (of_softmax,) = (one.forms for one in ps.implementations("softmax_attention") if one.forms)
    assert {*listed["triton_chunkwise"], *listed["triton_recurrent"], *of_softmax} == set(OF)
    assert listed["chunkwise"] == ()


TOYS = [Variant("toy", decay, "previous", True, None, "q", "g", "none") for decay in ("", "H", "BTH")]
"""Variants that read the previous state without decays per channel. No kernel of the chunked implementation computes them."""


def problems_of(toy, monkeypatch):
    """A call of a toy variant over sequences and one in place, with values."""
    function = f"advance({toy.name!r})"
    monkeypatch.setitem(RECURRENCE.signatures, toy.name, over_sequences(toy))
    monkeypatch.setitem(ADVANCE.signatures, function, in_place(toy, "advance"))
    sizes = {"B": 1, "T": 70, "H": 2}
    q, k, v = (torch.randn(1, 70, 2, 64) for _ in range(3))
    g = -torch.rand([sizes[axis] for axis in toy.decay]) if toy.decay else None
    whole = RECURRENCE.checked(toy.name, (q, k, v, g, torch.randn(2, 64), None, None), (None, False, True))
    given = (q, k, v, g, whole.u, None, None, torch.randn(1, 2, 64, 64))
    return whole, ADVANCE.checked(function, given, (None,))


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.decay or "none")
@pytest.mark.parametrize("target", [H200, A100, MI300X, Target("interpreter", 4, 1 << 20)], ids=lambda target: target.arch)
def test_forms_refuse_reads_of_the_previous_state_that_they_do_not_compute(toy, target, monkeypatch):
    """``chunk_fwd`` would read the updated state."""
    whole, pooled = problems_of(toy, monkeypatch)
    for among, call in ((lists.CHUNK_FORWARD, Whole), (lists.CHUNK_BACKWARD, Backward)):
        reasons = [one.refusal(call.of(whole, target)) for one in among]
        assert None not in reasons
        assert reasons[-1] == "it reads the previous state only with decays per channel"
    assert None not in [one.refusal(InPlace.of(pooled, target)) for one in lists.PIECES]
    for made, among in (
        (lambda: plan.chunk_forward_plan(whole, target), lists.CHUNK_FORWARD),
        (lambda: plan.chunk_backward_plan(whole, whole.v, None, target), lists.CHUNK_BACKWARD),
    ):
        with pytest.raises(ps.ImplementationRefused, match="reads the previous state only with decays per channel") as found:
            made()
        assert [reason.split()[0] for reason in str(found.value).split("; ")] == [one.name for one in among]


def test_a_forward_pass_without_a_backward_pass_keeps_no_states(monkeypatch):
    """It runs, whatever the forms of the backward pass refuse."""
    whole = without_memory("gla", Shape(1, 200, 2, 64, 64), torch.bfloat16).problem()
    assert plan.forward_call(whole, H200, keep=True).keep
    monkeypatch.setattr(plan, "CHUNK_BACKWARD", tuple(replace(one, refuses=lambda call: "none") for one in lists.CHUNK_BACKWARD))
    assert not plan.forward_call(whole, H200, keep=True).keep
    assert plan.chunk_forward_plan(whole, H200).forms[0] == "channel_fwd_sm90"


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.decay or "none")
def test_calls_that_all_forms_refuse_are_refused(toy, monkeypatch):
    """With the reason; other implementations compute them."""
    whole, pooled = problems_of(toy, monkeypatch)
    for mode in ("forward", "backward"):
        assert "reads the previous state only with decays per channel" in triton.CHUNKWISE.refusal(whole, mode)
        assert triton.RECURRENT.refusal(whole, mode) is None
        assert [one.reason for one in triton.RECURRENT.verdicts(whole, mode)] == [None]  # ``explain`` asks no form of the other's
    assert "chunk_pieces: it reads the previous state" in triton.RECURRENT.refusal(pooled, "advance")
    wanted, state = FAMILY.named("reference").forward(whole)
    for one in (FAMILY.named("chunkwise"), triton.RECURRENT):
        for found, exact in zip(one.forward(whole), (wanted, state)):
            torch.testing.assert_close(found, exact.to(found.dtype), rtol=1e-4, atol=1e-4)


def test_kernels_assert_what_forms_refuse(monkeypatch):
    """A plan of a form that refuses does not run."""
    whole, _ = problems_of(TOYS[2], monkeypatch)
    form, target = lists.CHUNK_FORWARD[-1], Target("interpreter", 4, 1 << 20)
    made = form.plan(plan.forward_call(replace_variant(whole), target)).at(whole.sizes)
    (one,) = made.launches
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in made.memory.items()}
    tensors |= {name: x for name, x in zip(RECURRENCE.names, whole.tensors) if x is not None}
    names = one.kernel.arg_names[len(one.tensors) + len(one.numbers) :]
    constants = dict(zip(names, one.constants)) | {"PREVIOUS": True}
    with pytest.raises(Exception, match="previous state"):
        one.kernel[one.grid, 1, 1](*[tensors.get(name, whole.q) for name in one.tensors], *one.numbers, *constants.values())


def replace_variant(problem):
    """The same tensors as a call of simple_gla."""
    return RECURRENCE.checked("simple_gla", (problem.q, problem.k, problem.v, problem.g, None, None, None), (None, False, True))
