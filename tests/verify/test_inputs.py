"""Shapes as text, and random inputs."""

import pytest
import torch
from measurements import SMALL

from penstock import RangeError
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs


def test_shapes_are_parsed_and_printed():
    assert Shape.parse("1,54,32,64") == Shape(1, 54, 32, 64, 64)
    assert Shape.parse("1, 54,4,256,512").text == "1,54,4,256,512"
    for text in ("", "1,2,3", "1,2,3,4,5,6", "1,2,3,x", "1,0,3,4", "1,-2,3,4"):
        with pytest.raises(RangeError, match="B,T,H,K"):
            Shape.parse(text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_are_valid_and_follow_from_the_seed(variant):
    one, again, other = (inputs(variant, SMALL, torch.bfloat16, seed=seed) for seed in (3, 3, 4))
    assert one.run("reference").shape == one.v.shape
    assert one.q.dtype == torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip(one.tensors.values(), again.tensors.values()))
    assert not torch.equal(one.q, other.q)
