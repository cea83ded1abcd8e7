"""The emulator of Gluon kernels refuses what a GPU does not notice: waits and ends that are missing."""

import pytest
import torch

from penstock.gpu.hopper import without_gluon

if without_gluon() is not None:
    pytest.skip("the Gluon of this Triton does not fit the kernels", allow_module_level=True)

from emulated import gluon as emulated
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from penstock.gpu.hopper_tiles import async_load, async_store, meet
from penstock.gpu.ring import barriers, invalidate

SIZE = 16


@gluon.jit
def copy(x_tiles, y_tiles, WAIT: gl.constexpr, INVALIDATE: gl.constexpr, USE: gl.constexpr, STORED: gl.constexpr, KEEP: gl.constexpr):
    """y = x by way of shared memory, with or without what makes it right."""
    tile = gl.allocate_shared_memory(x_tiles.dtype, [16, 16], x_tiles.layout)
    bars = barriers(1, 1)
    mbarrier.expect(bars.index(0), x_tiles.block_type.nbytes)
    async_load(x_tiles, [0, 0], bars.index(0), tile)
    if WAIT:
        mbarrier.wait(bars.index(0), 0)
    if INVALIDATE:
        invalidate((bars,))
    if USE:
        mbarrier.wait(bars.index(0), 0)
    async_store(y_tiles, [0, 0], tile)
    if not KEEP:
        gl.allocate_shared_memory(x_tiles.dtype, [16, 16], x_tiles.layout)
    if STORED:
        tma.store_wait(0)


@gluon.jit
def doubled(x_tiles, y_tiles, FENCE: gl.constexpr, MEET: gl.constexpr):
    """y = 2 x by way of shared memory, with or without what makes it right."""
    tile = gl.allocate_shared_memory(x_tiles.dtype, [16, 16], x_tiles.layout)
    bars = barriers(1, 1)
    mbarrier.expect(bars.index(0), x_tiles.block_type.nbytes)
    async_load(x_tiles, [0, 0], bars.index(0), tile)
    mbarrier.wait(bars.index(0), 0)
    x = tile.load(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
    tile.store(x + x)
    if FENCE:
        fence_async_shared()
    if MEET:
        meet()
    async_store(y_tiles, [0, 0], tile)
    tma.store_wait(0)
    invalidate((bars,))


@gluon.jit
def loaded_twice(x_tiles, y_tiles, MEET: gl.constexpr):
    """y = x, which is copied to memory that threads have read before."""
    tile = gl.allocate_shared_memory(x_tiles.dtype, [16, 16], x_tiles.layout)
    bars = barriers(1, 1)
    for n in gl.static_range(2):
        mbarrier.expect(bars.index(0), x_tiles.block_type.nbytes)
        async_load(x_tiles, [0, 0], bars.index(0), tile)
        mbarrier.wait(bars.index(0), n)
        tile.load(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
        if MEET:
            meet()
    async_store(y_tiles, [0, 0], tile)
    tma.store_wait(0)
    invalidate((bars,))


def copied(**changed):
    """x and y after a copy in which ``changed`` differs from what is right."""
    return launched(copy, {"WAIT": True, "INVALIDATE": True, "USE": False, "STORED": True, "KEEP": True} | changed)


def launched(kernel, constants):
    x, y = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    emulated.launch(kernel, 1, [emulated.Descriptor(one, (SIZE, SIZE)) for one in (x, y)], constants)
    return x, y


def test_a_copy():
    x, y = copied()
    assert torch.equal(x, y)


def test_a_tile_that_nobody_waits_for_is_refused():
    with pytest.raises(AssertionError, match="a copy is in flight whose barrier is invalidated"):
        copied(WAIT=False)


def test_a_barrier_that_is_not_invalidated_is_refused():
    with pytest.raises(AssertionError, match="a barrier that is not invalidated"):
        copied(INVALIDATE=False)


def test_a_barrier_that_is_used_after_it_was_invalidated_is_refused():
    with pytest.raises(AssertionError, match="after it is invalidated"):
        copied(USE=True)


def test_a_store_that_nobody_waits_for_writes_nothing():
    _, y = copied(STORED=False)
    assert not y.any()


def test_memory_that_is_free_while_a_store_reads_it_is_refused():
    with pytest.raises(AssertionError, match="free for a later allocation while a store or a product reads it"):
        copied(KEEP=False)


def test_a_copy_of_what_threads_have_stored():
    x, y = launched(doubled, {"FENCE": True, "MEET": True})
    assert torch.equal(2 * x, y)


@pytest.mark.parametrize(("fence", "meet", "reason"), [(False, True, "without a fence"), (True, False, "before all warps meet")])
def test_a_copy_of_what_threads_have_stored_needs_a_fence_and_a_barrier(fence, meet, reason):
    with pytest.raises(AssertionError, match=reason):
        launched(doubled, {"FENCE": fence, "MEET": meet})


def test_a_copy_to_what_threads_have_read_needs_a_barrier():
    x, y = launched(loaded_twice, {"MEET": True})
    assert torch.equal(x, y)
    with pytest.raises(AssertionError, match="other warps have read"):
        launched(loaded_twice, {"MEET": False})
