"""The calls of the delta rule that are compiled ahead of time. Nothing is compiled here."""

import pytest
import torch

from penstock.delta import inputs
from penstock.delta.triton import ahead, answers, launch, plan
from penstock.delta.triton.calls import Forward
from penstock.delta.triton.forms import lists, raw
from penstock.delta.variants import VARIANTS
from penstock.gpu.forms import first
from penstock.gpu.plan import Planned
from penstock.gpu.target import standing_in
from penstock.gpu.targets import SMALL, TARGETS
from penstock.layers import GatedDeltaNetConfig
from penstock.tokens.shape import Shape
from penstock.tune.ahead import jobs
from penstock.tune.shipped import launches

EVERY = {
    one.name
    for forms in (lists.CHUNK_FORWARD, lists.CHUNK_BACKWARD, lists.TOKEN_FORWARD, lists.PIECES, lists.TOKENS_IN_PLACE)
    for one in forms
}
RAW = {"penstock_delta_raw_fwd", "penstock_delta_raw_bwd", "penstock_delta_raw_sums"}


def names(arch):
    return {name: job.kernel for one in ahead.configurations(arch) for name, job in launches(one, TARGETS[arch])}


def test_every_variant_form_and_kernel_is_compiled():
    assert {one.variant for one in ahead.CONFIGURATIONS} == set(VARIANTS)
    found = names("sm_90")  # has code of all forms
    assert {name.split(": ")[2] for name in found if ": raw" not in name} >= EVERY
    assert {kernel.rpartition(".")[2] for kernel in found.values()} >= RAW


@pytest.mark.parametrize("arch", SMALL)
def test_small_gpus_have_every_kernel(arch):
    assert set(names(arch).values()) == set(names("sm_80").values())
    assert {one.name for one in ahead.configurations(arch)} == set(ahead.IN_PART)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("one", [one for one in ahead.CONFIGURATIONS if "backward" in one.passes], ids=lambda one: one.name)
def test_the_pass_that_follows_has_the_kernels_of_the_backward_pass(one, arch):
    """And arguments of the same types, for which Triton compiles: while the forward pass runs."""
    target = TARGETS[arch]
    form = first(lists.CHUNK_FORWARD, Forward.of(one.computed("forward"), target))
    p = one.computed("forward", form)
    planned, tensors = launch._backward_to_come(p, target, plan.chunk_forward_plan(p, target))
    given = {name: p.q if x is None else x for name, x in tensors.items()}
    found = jobs(Planned(planned.at(p.sizes), given), arch)
    wanted = {which.partition(": ")[2]: made for which, made in one.planned(target) if which.startswith("backward")}
    assert found == jobs(wanted[planned.forms[0]], arch)


def test_forward_passes_with_residuals_are_compiled():
    """It has the launches of the pass without them, with more results. The backward pass from residuals has no other launches."""
    target = TARGETS["sm_90"]
    found = {name: job for one in ahead.CONFIGURATIONS for name, job in launches(one, target)}
    keeping = {name: job for name, job in found.items() if ": forward with residuals: " in name}
    assert {name.split(" ")[0] for name in keeping} == {"delta_rule", "gated_delta_rule", "kda"}
    for name, job in keeping.items():
        other = found[name.replace("forward with residuals", "forward")]
        assert job.kernel == other.kernel
        assert job.arguments != other.arguments
    one = next(one for one in ahead.CONFIGURATIONS if one.variant == "kda")
    p = one.computed("forward")
    planned, tensors = launch._backward_to_come(p, target, plan.chunk_forward_plan(p, target, keep=True))
    later = jobs(Planned(planned.at(p.sizes), {name: p.q if x is None else x for name, x in tensors.items()}), target.arch)
    assert {*later} < {job for name, job in found.items() if ": backward: kda" in name}


@pytest.mark.parametrize("one", [one for one in ahead.CONFIGURATIONS if "raw backward" in one.passes], ids=lambda one: one.name)
def test_the_stage_that_follows_has_the_kernels_of_its_backward_pass(one):
    p, target = one._problem("forward"), TARGETS["sm_90"]
    planned, tensors = launch._raw_backward_to_come(p, target, raw.forward_plan(p))
    found = Planned(planned.at(p.sizes), {name: p.q if x is None else x for name, x in tensors.items()})
    assert jobs(found, target.arch) == jobs(dict(one.planned(target))["raw backward"], target.arch)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("one", [one for one in ahead.CONFIGURATIONS if one.raw and "raw" in one.passes], ids=lambda one: one.name)
def test_the_stage_compiles_the_passes_that_follow_it(one, gradients, monkeypatch):
    """Those of the canonical problem: the forward pass meanwhile, then both backward passes."""
    told = {}
    monkeypatch.setattr(launch.launch, "run", lambda *given, **more: told.update(more) or {})
    p, target = one._problem("forward"), TARGETS["sm_90"]
    canonical = inputs.of_every_head(inputs.canonical(p, inputs.uncomputed(p, False)))
    launch.raw_forward(p, False, inputs.Follows(lambda: canonical, gradients))

    def compiled(coming):
        planned, tensors = coming
        return jobs(Planned(planned.at(p.sizes), {name: p.q if x is None else x for name, x in tensors.items()}), "sm_90")

    forward = plan.chunk_forward_plan(canonical, target, gradients)
    assert compiled(told["beside"](target)) == compiled((forward.at(canonical.sizes), launch._inputs(canonical)))
    stage, backward = raw.forward_plan(p), launch._backward_to_come(canonical, target, forward)
    wanted = [(backward[0].at(canonical.sizes), backward[1]), launch._raw_backward_to_come(p, target, stage)] if gradients else []
    assert [compiled(later(target, stage)) for later in told["later"]] == list(map(compiled, wanted))


@pytest.mark.parametrize("arch", TARGETS)
def test_layers_of_published_sizes_take_chunk_kernels(arch):
    """Gated DeltaNet 1.3B of fla: 6 heads of 256 key and 512 value channels."""
    with torch.device("meta"):
        G, H, K, V = GatedDeltaNetConfig(num_heads=6, head_dim=256, expand_v=2.0).build(hidden_size=2048).heads
    one = ahead.Configuration("gated_delta_rule", Shape(8, 2048, H, K, V), groups=G, raw=True)
    p = one.computed("forward")
    taken = ["gdn_wide_sm90", "gdn_wide_bwd_sm90"] if arch == "sm_90" else ["delta_chunks", "delta_chunks_bwd"]
    forward = plan.chunk_forward_plan(p, TARGETS[arch], keep=True)
    backward = plan.chunk_backward_plan(p, torch.empty_like(p.v), None, TARGETS[arch])
    assert forward.forms + backward.forms == taken
    if arch == "sm_90":
        with standing_in(TARGETS[arch]):
            for mode in ("forward", "backward"):
                reasons = {one.name: one.reason for one in answers.verdicts(answers.CHUNKWISE, p, mode)}
                found = [reason for form, reason in reasons.items() if form.startswith("gdn_")]
                assert set(found[:-1]) == {"refuses: K must be 64 or 128, this is 256"}
                assert found[-1] is None
