"""NaN in one argument of a call, with the bits of a NaN that a GPU of NVIDIA computes."""

import torch
from torch import Tensor

import penstock as ps
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs

TOKEN = 20
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def computed_nan(x: Tensor) -> Tensor:
    """All bits 1 but the sign: rounding in integers may carry into the sign, and the NaN is 0."""
    integer = INTEGERS[x.element_size()]
    return torch.tensor(torch.iinfo(integer).max, dtype=integer, device=x.device).view(x.dtype)


def check_that_it_is_seen(variant: str, impl: str, dtype: torch.dtype, device: str, K: int = 64, V: int = 64) -> None:
    """The output of the token is NaN, whichever argument has it, and no output of another sequence. Of decays see docs/recurrence.md."""
    if variant == "softmax_attention":
        tensors = {name: torch.randn(2, 80, 2, K, device=device).to(dtype) for name in ("q", "k", "v")}
    else:
        tensors = inputs(variant, Shape(2, 80, 2, K, V), dtype, device).tensors
    for name, given in tensors.items():
        if name == "g" or given.shape[:2] != (2, 80):
            continue
        changed = given.clone()
        changed[0, TOKEN] = computed_nan(given)
        called = tensors | {name: changed}
        if variant == "softmax_attention":
            output = ps.softmax_attention(**called, impl=impl)
        else:
            output = Inputs.of(variant, called).run(impl)
        assert output[0, TOKEN].isnan().all(), name
        assert not output[1].isnan().any(), name
