"""A NaN in an argument is seen in the output, whatever its bits are. ``tests/gpu_device/test_behaviour.py`` asks it of kernels on a GPU."""

import cases
import deltas
import pytest
import torch
from attention import IMPLEMENTATIONS
from nan_inputs import check_that_it_is_seen

from penstock.recurrence.variants import VARIANTS

CALLS = [(variant, impl) for variant in VARIANTS for impl in cases.NAMES]
CALLS += [(variant, impl) for variant in deltas.VARIANTS for impl in deltas.NAMES]
CALLS += [("softmax_attention", impl) for impl in IMPLEMENTATIONS if impl != "triton"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("variant", "impl"), CALLS)
def test_nan_in_an_argument(variant, impl, dtype):
    check_that_it_is_seen(variant, impl, dtype, "cpu", 16, 24)
