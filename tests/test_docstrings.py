"""``help()`` of every public function says what each argument is, without another text."""

import inspect
import re

import pytest

import penstock
from penstock import models
from penstock.compat import fla, flash_rwkv, transformers

PUBLIC = {
    **{f"penstock.{name}": getattr(penstock, name) for name in penstock.__all__},
    **{f"penstock.models.{name}": getattr(models, name) for name in models.__all__},
    **{f"penstock.compat.fla.{name}": one for name, one in fla.FUNCTIONS.items()},
    "penstock.compat.fla.patch": fla.patch,
    "penstock.compat.flash_rwkv.rwkv5": flash_rwkv.rwkv5_cuda_linear_attention,
    "penstock.compat.flash_rwkv.rwkv6": flash_rwkv.rwkv6_cuda_linear_attention,
    "penstock.compat.transformers.accelerate": transformers.accelerate,
}
FUNCTIONS = {name: one for name, one in PUBLIC.items() if inspect.isfunction(one)}


def test_the_functions_are_found():
    assert {"penstock.gla", "penstock.decode_step", "penstock.models.load", "penstock.compat.fla.chunk_gla"} <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name):
    text = inspect.getdoc(FUNCTIONS[name])
    assert re.search(r"<\w+>", text) is None, "a part was not put in"
    assert not re.search(r"docstring|as for the variant|other arguments", text, re.IGNORECASE)
    for argument in inspect.signature(FUNCTIONS[name]).parameters:
        assert re.search(rf"^(?:[*\w]+, )*\**{argument}(?:, [*\w]+)* : ?\S*", text, re.MULTILINE), argument


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lines_fit(name):
    assert max(map(len, inspect.getdoc(FUNCTIONS[name]).splitlines())) <= 140
