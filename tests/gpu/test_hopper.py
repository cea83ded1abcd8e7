"""Descriptions of the tiles that Hopper copies. They need no GPU."""

import pytest
import torch

from penstock.call import versions
from penstock.gpu import hopper
from penstock.gpu.hopper import Tile, described, description

triton = pytest.importorskip("triton")


needs_gluon = pytest.mark.skipif(versions.version("triton") < hopper.GLUON, reason="Gluon of this Triton has no descriptors for Hopper")


@pytest.fixture
def another_triton(monkeypatch):
    """A function that sets the version of Triton that is found."""

    def forget():
        versions.checked.cache_clear()
        hopper.modules.cache_clear()
        hopper.without_gluon.cache_clear()

    def pretend(text):
        monkeypatch.setattr(triton, "__version__", text)
        forget()

    yield pretend
    monkeypatch.undo()
    forget()


PACKAGES = {"penstock.recurrence.triton.sm90": "channel_forward", "penstock.softmax.triton.sm90": "forward"}
"""Packages, and a module of each."""


@needs_gluon
def test_kernels_in_gluon_follow_the_version(another_triton):
    for text, used in (("3.5.1", False), ("3.6.0", True), ("3.7.1+git1", True), ("3.9.0", True)):
        another_triton(text)
        assert [hopper.modules(*one) is not None for one in PACKAGES.items()] == [used, used]


def test_a_newer_triton_warns_once_and_plain_kernels_run(another_triton):
    another_triton("3.10.0")
    with pytest.warns(UserWarning, match="penstock: triton 3.10 is newer than 3.9") as warned:
        assert [hopper.modules(*one) for one in PACKAGES.items()] == [None, None]
    assert len(warned) == 1


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_modules_that_fail_to_import_raise(another_triton, monkeypatch, error):
    def fails(name, package):
        raise error(name)

    another_triton("3.7.1")
    monkeypatch.setattr(hopper, "import_module", fails)
    with pytest.raises(error, match="channel_forward"):
        hopper.modules("penstock.recurrence.triton.sm90", "channel_forward")


@needs_gluon
def test_tiles_describe_matrices():
    tokens, states = torch.empty(2, 100, 3, 64, dtype=torch.bfloat16), torch.empty(4, 3, 64, 64, dtype=torch.bfloat16)
    tiles = (tokens, Tile(64, 64)), (states, Tile(64, 64, 3))
    one, other = (described(x, description(x, tile)) for x, tile in tiles)
    assert (one.shape, one.strides, one.block_shape) == ([200, 192], [192, 1], [64, 64])
    assert (other.shape, other.strides, other.block_shape) == ([768, 64], [64, 1], [64, 64])


@pytest.mark.parametrize(("rows", "why"), [((1, 2**31 - 1), None), ((2, 2**31), "fewer than 2**31"), ((0, 5), "one row at least")])
def test_rows_are_numbered_by_32_bits(rows, why):
    found = hopper.other_rows(*rows)
    assert found is None if why is None else why in found
