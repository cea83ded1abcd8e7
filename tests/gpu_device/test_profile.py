"""Profiles of calls on a GPU. Run with ``pytest -m gpu``."""

import pytest
import torch

from penstock.bench.candidates import ours
from penstock.bench.profile import hidden, profiled
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("impl", ["triton_recurrent", "triton_chunkwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_layouts_are_not_converted(variant, impl, tmp_path):
    x = hidden(inputs(variant, Shape(1, 54, 32, 64, 64), torch.float16, "cuda"))
    found = profiled("small", x, "fwd", [ours(impl, x, "fwd")], tmp_path, 0.01, 2).timings[0].profile
    assert found.layout_milliseconds == 0
    assert 1 <= found.launches <= 4
    assert found.kernel_milliseconds > 0
