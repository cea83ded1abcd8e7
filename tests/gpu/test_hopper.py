"""Descriptions of the tiles that Hopper copies. They need no GPU."""

import pytest
import torch

from penstock.gpu.hopper import Tile, described, description

pytest.importorskip("triton.experimental.gluon")


def test_tiles_describe_matrices():
    tokens, states = torch.empty(2, 100, 3, 64, dtype=torch.bfloat16), torch.empty(4, 3, 64, 64, dtype=torch.bfloat16)
    tiles = (tokens, Tile(64, 64)), (states, Tile(64, 64, 3))
    one, other = (described(x, description(x, tile)) for x, tile in tiles)
    assert (one.shape, one.strides, one.block_shape) == ([200, 192], [192, 1], [64, 64])
    assert (other.shape, other.strides, other.block_shape) == ([768, 64], [64, 1], [64, 64])
