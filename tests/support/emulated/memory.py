"""Shared memory, tensors that are copied in tiles, and the copies."""

from types import SimpleNamespace

import numpy as np
import torch

from .machine import barrier_of, machine, proxies, stores_under_way
from .values import Value, raw


class Descriptor:
    """A tensor as a matrix that is copied in tiles. It and its rows begin at multiples of 16 bytes."""

    def __init__(self, matrix, block):
        assert matrix.stride(1) == 1
        assert matrix.data_ptr() % 16 == 0 == matrix.stride(0) * matrix.element_size() % 16
        self.matrix, self.block = matrix, block
        bytes_ = block[0] * block[1] * matrix.element_size()
        self.block_type = SimpleNamespace(nbytes=bytes_, shape=list(block))
        self.layout, self.dtype, self.block_shape = None, matrix.dtype, block


class Shared:
    """Shared memory: a view of bytes."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    layout = None
    type = property(lambda self: SimpleNamespace(shape=list(self.data.shape), layout=None))

    def index(self, i):
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def load(self, layout=None):
        self.use()
        proxies().load(self.data)
        return Value(self.data.clone())

    def use(self):
        """Note that its allocation is in use until now."""
        machine().use(self.data)

    _keep_alive = use

    def store(self, value):
        self.use()
        proxies().store(self.data)
        assert list(raw(value).shape) == list(self.data.shape), (raw(value).shape, self.data.shape)
        assert raw(value).dtype == self.data.dtype, (raw(value).dtype, self.data.dtype)
        self.data.copy_(raw(value))

    def reinterpret(self, dtype, shape, layout):
        flat_ = self.data.reshape(-1)
        assert flat_.data_ptr() == self.data.data_ptr()
        count = int(np.prod(shape))
        return Shared(flat_.view(torch.uint8)[: count * torch.empty(0, dtype=dtype).element_size()].view(dtype).view(shape))


class Panels(Shared):
    """A matrix in shared memory, in panels of as many columns as a swizzled line has: [rows,panels,columns]."""

    def permute(self, order):
        return Shared(self.data.flatten(1).permute(order))


def panels(tile, shape, layout):
    """Memory as a tile in panels."""
    rows, columns = shape
    width = min(columns, layout.swizzle_byte_width // tile.data.element_size())
    whole = tile.data.view(-1)
    assert whole.numel() == rows * columns
    return Panels(whole.view(columns // width, rows, width).transpose(0, 1))


def part_of(parts, first, row, column, across):
    """Of ``sm90/channel_backward.py``. Here, rows of a tile are not cut into parts."""
    tile = parts.data[first : first + across * across].view(64 * across, 64 * across)
    return Shared(tile[64 * row : 64 * row + 64, 64 * column : 64 * column + 64])


def copy_in(descriptor, at, bar, target, pred=True):
    if not bool(raw(pred)):
        return
    row, column = (int(raw(x)) for x in at)
    target.use()
    proxies().overwrite(target.data)
    target.data.fill_(float("nan"))
    R, C = descriptor.block
    one = barrier_of(bar)

    def land():
        tile = torch.zeros(R, C, dtype=descriptor.matrix.dtype)
        height, width = descriptor.matrix.shape
        r, c = max(min(R, height - row), 0), max(min(C, width - column), 0)
        assert row >= 0
        assert column >= 0
        tile[:r, :c] = descriptor.matrix[row : row + r, column : column + c]
        target.data.copy_(tile.view(target.data.shape))
        one.bytes -= descriptor.block_type.nbytes
        assert one.bytes >= 0, "a copy that no barrier expects"

    one.copies.append(land)


def copy_out(descriptor, at, source):
    row, column = (int(raw(x)) for x in at)
    source.use()
    proxies().take(source.data, "a copy")

    def land():
        R, C = descriptor.block
        height, width = descriptor.matrix.shape
        r, c = max(min(R, height - row), 0), max(min(C, width - column), 0)
        descriptor.matrix[row : row + r, column : column + c] = source.data.reshape(R, C)[:r, :c]

    stores_under_way().append((land, source.data))


def store_wait(pendings=0):
    stores = stores_under_way()
    while len(stores) > pendings:
        stores.pop(0)[0]()
