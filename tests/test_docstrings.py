"""``help()`` of every public function says what each argument is, without another text."""

import ast
import inspect
import re
from pathlib import Path

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


def jitted(function):
    """Whether a function is Triton's or Gluon's code."""
    return any(ast.unparse(one).partition("(")[0] in ("triton.jit", "gluon.jit") for one in function.decorator_list)


def kernels():
    """The docstrings of all kernels that are launched, by name."""
    for path in sorted(Path(penstock.__file__).parent.rglob("*.py")):
        for one in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(one, ast.FunctionDef) and one.name.startswith("penstock_") and jitted(one):
                yield pytest.param(ast.get_docstring(one), id=one.name)


def lacks(text):
    """What the docstring of a kernel lacks: a formula first, then the shapes of its tensors, and what one program computes."""
    formula = re.search(r"\S = \S|\S <- \S", (text or "").partition("\n\n")[0])
    rest = (text or "").partition("\n\n")[2]
    parts = {"formula": formula, "shapes": re.search(r"\[[^\[\]]+\]", rest), "program": re.search(r"\bprograms?\b", rest, re.IGNORECASE)}
    return [name for name, found in parts.items() if found is None]


@pytest.mark.parametrize("text", list(kernels()))
def test_kernels_say_their_formula_shapes_and_programs(text):
    assert not lacks(text)


def test_what_a_docstring_lacks_is_found():
    assert lacks(None) == ["formula", "shapes", "program"]
    assert lacks("Adds x [R].\n\nReads x [R]. A program has one row.") == ["formula"]
    assert lacks("y = x.\n\nReads x [R], writes y [R].") == ["program"]
    assert lacks("y = x.\n\nA program copies one row.") == ["shapes"]
    assert len(list(kernels())) > 60
