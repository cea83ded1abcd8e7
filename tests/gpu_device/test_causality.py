"""On a GPU, outputs before a cut have equal bits whatever q, k, v and decays follow. ``tests/test_causality.py`` asks it of every form."""

from dataclasses import replace

import pytest
import torch

from penstock.recurrence import cuda
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

CUTS = (5, 37, 64, 83, 250)
HEADS = {"triton_chunkwise": [(64, 64), (128, 128), (256, 512)], "triton_recurrent": [(64, 64), (100, 36)], "cuda": [(64, 64)]}
CALLS = [
    (impl, sizes, variant)
    for impl, heads in HEADS.items()
    for sizes in heads
    for variant, row in VARIANTS.items()
    if impl != "cuda" or row.bonus
]


def followed(x: Inputs, cut: int) -> list[Inputs]:
    """The same tokens before a cut, followed by large ones, small ones, zeros, large values, strong and weak decays, and decays to 0."""

    def after(factor: float, names: str = "qkv", g: float | None = None) -> Inputs:
        new = {name: torch.cat((t[:, :cut], t[:, cut:] * factor), 1) for name, t in x.tensors.items() if name in names}
        if g is not None:
            new["g"] = torch.cat((x.g[:, :cut], torch.full_like(x.g[:, cut:], g)), 1)
        return replace(x, **new)

    found = [after(1000.0), after(1e-3), after(0.0), after(1000.0, "v")]
    if "T" in VARIANTS[x.variant].decay:
        found += [after(1.0, g=-30.0), after(1.0, g=-1e-5), after(100.0, g=-torch.inf)]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("impl", "sizes", "variant"), CALLS, ids=str)
def test_outputs_before_a_cut_have_equal_bits(impl, sizes, variant, dtype):
    if impl == "cuda" and cuda.available() is not None:
        pytest.skip("cuda-core is not installed")
    if impl == "triton_chunkwise" and "K" in VARIANTS[variant].decay and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("an exception that docs/recurrence.md declares")
    x = inputs(variant, Shape(2, 300, 2, *sizes), dtype, "cuda")
    whole = x.run(impl)
    for cut in CUTS:
        for number, other in enumerate(followed(x, cut)):
            assert torch.equal(other.run(impl)[:, :cut], whole[:, :cut]), (cut, number)
