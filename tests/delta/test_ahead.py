"""The calls of the delta rule that are compiled ahead of time. Nothing is compiled here."""

import pytest

from penstock.delta.triton import ahead
from penstock.delta.triton.forms import lists
from penstock.delta.variants import VARIANTS
from penstock.gpu.targets import SMALL, TARGETS
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
