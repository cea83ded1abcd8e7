"""Gluon kernels on a CPU: their Python is executed with tensors of torch in the place of Triton's language.

What is emulated is what can go wrong without a GPU noticing: values, addresses, what lies in shared memory when it is read, barriers and
their phases, copies that are still in flight. Layouts are not: they say where a value lies, not what it is.

Warps that divide the work are threads of which one runs at a time; they take turns where one waits for a barrier. A copy into shared
memory leaves NaN there until somebody has waited for its barrier; a copy out of it reads when it is waited for; a product reads its
operands when it is waited for. So a missing wait gives a wrong result, and a barrier that is never completed an error.
"""

from __future__ import annotations

import random
import threading
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

F32 = torch.float32


class Value:
    """A tensor in registers."""

    def __init__(self, data):
        self.data = data if isinstance(data, torch.Tensor) else torch.tensor(data)

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = property(lambda self: SimpleNamespace(shape=list(self.data.shape), layout=None))

    def to(self, dtype, bitcast=False):
        if bitcast:
            return Value(self.data.contiguous().view(dtype))
        if self.data.is_floating_point() and not dtype.is_floating_point:
            return Value(self.data.trunc().to(dtype))
        return Value(self.data.to(dtype))

    def broadcast_to(self, shape):
        return Value(self.data.expand(shape))

    def __getitem__(self, index):
        return Value(self.data[index])

    def __index__(self):
        return int(self.data)

    def __bool__(self):
        return bool(self.data)

    def __int__(self):
        return int(self.data)

    def reshape(self, shape):
        return Value(self.data.reshape(shape))


def raw(x):
    return x.data if isinstance(x, (Value, Shared)) else x


def _binary(function):
    def operator(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(function(*_promoted(self, other)))

    def reflected(self, other):
        return Value(function(*reversed(_promoted(self, other))))

    return operator, reflected


def _promoted(a, b):
    a, b = raw(a), raw(b)
    if not isinstance(b, torch.Tensor):
        if isinstance(b, float) and not a.is_floating_point():
            a = a.to(F32)
        b = torch.tensor(
            b, dtype=a.dtype if not (isinstance(b, int) and not isinstance(b, bool) and a.dtype == torch.bool) else torch.int32
        )
        if isinstance(b, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) and b.dtype != a.dtype:
            b = b.to(a.dtype)
    elif not (a.is_floating_point() or b.is_floating_point()):  # torch ignores the width of a tensor without axes, Triton does not
        kind = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(kind), b.to(kind)
    return a, b


def _div(a, b):
    return torch.div(a, b, rounding_mode="trunc")


def _rem(a, b):
    return torch.fmod(a, b)


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide, "floordiv": _div, "mod": _rem,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}.items():  # fmt: skip
    _one, _other = _binary(_function)
    setattr(Value, f"__{_name}__", _one)
    setattr(Value, f"__r{_name}__", _other)
for _name, _function in {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne}.items():
    setattr(Value, f"__{_name}__", _binary(_function)[0])
Value.__neg__ = lambda self: Value(-self.data)
Value.__invert__ = lambda self: Value(~self.data)
Value.__hash__ = None


class Pointer:
    """Addresses in a tensor's memory, in elements."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other):
        return Pointer(self.memory, raw(self.at) + raw(other) if not isinstance(other, int) else raw(self.at) + other)

    __radd__ = __add__

    def to(self, dtype):
        """The addresses, in bytes from the first element."""
        return Value(torch.as_tensor(raw(self.at)).long() * self.memory.element_size())


def flat(x):
    """All memory of a tensor from its first element on."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole[x.storage_offset() :]


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
        return Value(self.data.clone())

    def use(self):
        """Note that its allocation is in use until now."""
        machine().use(self.data)

    _keep_alive = use

    def store(self, value):
        self.use()
        assert list(raw(value).shape) == list(self.data.shape), (raw(value).shape, self.data.shape)
        assert raw(value).dtype == self.data.dtype, (raw(value).dtype, self.data.dtype)
        self.data.copy_(raw(value))

    def reinterpret(self, dtype, shape, layout):
        flat_ = self.data.reshape(-1)
        assert flat_.data_ptr() == self.data.data_ptr()
        count = int(np.prod(shape))
        return Shared(flat_.view(torch.uint8)[: count * torch.empty(0, dtype=dtype).element_size()].view(dtype).view(shape))


class Machine:
    """One program: its barriers, copies in flight, and the threads that take turns."""

    def __init__(self, pid, seed):
        self.pid, self.random = pid, random.Random(seed)
        self.copies, self.stores = {}, []
        self.time, self.used, self.reused = 0, {}, []
        self.turn = threading.Condition()
        self.running, self.alive, self.blocked, self.failure = None, [], set(), None

    def use(self, data):
        """Note that an allocation is in use until now."""
        self.time += 1
        self.used[data.untyped_storage().data_ptr()] = self.time

    def reuse(self):
        """Note an allocation, which may get the memory of those that are not used after it."""
        self.time += 1
        read = [data for _, data in _stores()] + _operands()
        self.reused += [(self.time, data.untyped_storage().data_ptr(), list(data.shape)) for data in read]

    def check_reads(self):
        """A compiler does not know that a store or a product is under way: what it reads must be used after later allocations."""
        for time, block, shape in self.reused:
            assert self.used[block] > time, f"shared memory {shape} is free for a later allocation while a store or a product reads it"

    def switch(self, may_go):
        """Let others run until ``may_go``."""
        me = threading.get_ident()
        if len(self.alive) <= 1:
            if not may_go():
                raise RuntimeError("deadlock: a barrier that is never completed")
            return
        with self.turn:
            self.waiting[me] = may_go
            self._next()
            while self.running != me:
                self.turn.wait()
                if self.failure is not None:
                    raise RuntimeError("another warp failed")
            self.waiting.pop(me, None)

    def _next(self):
        ready = [one for one in self.alive if one not in self.waiting or self.waiting[one]()]
        if not ready:
            if self.alive:
                self.failure = RuntimeError("deadlock: every group of warps waits")
            self.running = None
        else:
            self.running = self.random.choice(ready)
        self.turn.notify_all()

    def run(self, jobs):
        """All jobs to their end."""
        self.waiting = {}
        started = threading.Barrier(len(jobs) + 1)

        def body(function, arguments, place):
            _local.machine, _local.warps = self, place[1]
            me = threading.get_ident()
            with self.turn:
                self.alive.append(me)
            started.wait()
            try:
                with self.turn:
                    while self.running != me:
                        self.turn.wait()
                        if self.failure is not None:
                            raise RuntimeError("another warp failed")
                function(*arguments)
            except BaseException as error:
                with self.turn:
                    if self.failure is None:
                        self.failure = error
            finally:
                with self.turn:
                    self.alive.remove(me)
                    self.waiting.pop(me, None)
                    self._next()

        threads = [threading.Thread(target=body, args=(*job[:2], job[2:])) for job in [(f, a, i, w) for i, ((f, a), w) in enumerate(jobs)]]
        for one in threads:
            one.start()
        started.wait()
        with self.turn:
            self._next()
        for one in threads:
            one.join()
        if self.failure is not None:
            raise self.failure


_local = threading.local()


def machine():
    return _local.machine


# barriers and copies


class _Bar:
    def __init__(self, count):
        self.count, self.pending, self.bytes, self.phase, self.copies = count, count, 0, 0, []

    def check(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


def _bar(bar):
    return machine().bars[bar.data.data_ptr()]


def bar_init(bar, count):
    machine().bars[bar.data.data_ptr()] = _Bar(count)


def bar_expect(bar, bytes_, pred=True):
    if bool(raw(pred)):
        one = _bar(bar)
        one.pending -= 1
        one.bytes += int(bytes_)
        assert one.pending >= 0, "more arrivals than a barrier counts"
        one.check()


def bar_arrive(bar, count=1, pred=True):
    if bool(raw(pred)):
        one = _bar(bar)
        one.pending -= count
        assert one.pending >= 0, "more arrivals than a barrier counts"
        one.check()
        machine().switch(lambda: True)


def bar_wait(bar, phase, pred=True):
    if not bool(raw(pred)):
        return
    one, phase = _bar(bar), int(phase)

    def complete():
        for land in one.copies:
            land()
        one.copies = []
        one.check()
        return one.phase != phase

    machine().switch(complete)


def bar_invalidate(bar):
    assert not _bar(bar).copies, "a barrier of a copy that nobody has waited for"
    del machine().bars[bar.data.data_ptr()]


def copy_in(descriptor, at, bar, target, pred=True):
    if not bool(raw(pred)):
        return
    row, column = (int(raw(x)) for x in at)
    target.use()
    target.data.fill_(float("nan"))
    R, C = descriptor.block
    one = _bar(bar)

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


def part_of(parts, first, row, column, across):
    """Of ``sm90/channel_backward.py``. Here, rows of a tile are not cut into parts."""
    tile = parts.data[first : first + across * across].view(64 * across, 64 * across)
    return Shared(tile[64 * row : 64 * row + 64, 64 * column : 64 * column + 64])


def copy_out(descriptor, at, source):
    row, column = (int(raw(x)) for x in at)
    source.use()

    def land():
        R, C = descriptor.block
        height, width = descriptor.matrix.shape
        r, c = max(min(R, height - row), 0), max(min(C, width - column), 0)
        descriptor.matrix[row : row + r, column : column + c] = source.data.reshape(R, C)[:r, :c]

    _stores().append((land, source.data))


def _stores():
    """Stores of this thread that are under way, and what they read."""
    return _under_way()[0]


def _operands():
    """What the products of this thread that are under way read."""
    return _under_way()[1]


def _under_way():
    if not hasattr(_local, "under_way") or _local.owner is not machine():
        _local.under_way, _local.owner = ([], []), machine()
    return _local.under_way


def store_wait(pendings=0):
    stores = _stores()
    while len(stores) > pendings:
        stores.pop(0)[0]()


# products


class Product:
    """A product that is under way."""

    def __init__(self, compute):
        self.compute, self.result = compute, None

    def value(self):
        if self.result is None:
            self.result = self.compute()
        return self.result


def mma(a, b, acc, use_acc=True, is_async=False, **_):
    def compute():
        x, y = raw(a).float(), raw(b).float()
        c = acc.value() if isinstance(acc, Product) else acc
        product = x @ y
        return Value(product + c.data if use_acc else product)

    assert raw(a).dtype == raw(b).dtype, (raw(a).dtype, raw(b).dtype)
    for x in (a, b):
        if isinstance(x, Shared):
            x.use()
            _operands().extend([x.data] * is_async)
    one = Product(compute)
    return one if is_async else one.value()


def mma_wait(num_outstanding=0, deps=None):
    found = [x.value() if isinstance(x, Product) and num_outstanding == 0 else x for x in deps]
    if num_outstanding == 0:
        _operands().clear()
    else:
        found = [x.value() if isinstance(x, Product) and i < len(deps) else x for i, x in enumerate(deps)]
    return found[0] if len(found) == 1 else tuple(found)


# the language


def load(pointer, mask=None, other=None, **_):
    at = torch.as_tensor(raw(pointer.at))
    if mask is None:
        return Value(pointer.memory[at.long()])
    keep = raw(mask).expand(torch.broadcast_shapes(raw(mask).shape, at.shape))
    at = at.expand(keep.shape)
    found = torch.zeros(at.shape, dtype=pointer.memory.dtype)
    if other is not None:
        found.fill_(other if not isinstance(other, Value) else float(other.data))
    found[keep] = pointer.memory[at[keep].long()]
    return Value(found)


def store(pointer, value, mask=None, **_):
    at = torch.as_tensor(raw(pointer.at))
    data = torch.as_tensor(raw(value)).to(pointer.memory.dtype).expand(torch.broadcast_shapes(at.shape, torch.as_tensor(raw(value)).shape))
    at = at.expand(data.shape)
    if mask is None:
        pointer.memory[at.long()] = data
    else:
        keep = raw(mask).expand(data.shape) if isinstance(raw(mask), torch.Tensor) else torch.full(data.shape, bool(mask))
        pointer.memory[at[keep].long()] = data[keep]


def atomic_add(pointer, value):
    at = int(raw(pointer.at))
    before = pointer.memory[at].clone()
    pointer.memory[at] += value
    return Value(before)


def where(c, a, b):
    if isinstance(c, bool):
        return a if c else b
    a, b = raw(a), raw(b)
    if not isinstance(a, torch.Tensor):
        a = torch.tensor(a, dtype=b.dtype if isinstance(b, torch.Tensor) else F32)
    if not isinstance(b, torch.Tensor):
        b = torch.tensor(b, dtype=a.dtype)
    return Value(torch.where(raw(c), a, b))


def _pair(function):
    def call(a, b):
        if not isinstance(a, Value) and not isinstance(b, Value):
            return function(torch.tensor(a), torch.tensor(b)).item()
        a = a if isinstance(a, Value) else Value(torch.tensor(a, dtype=b.data.dtype))
        x, y = _promoted(a, b)
        return Value(function(x, y))

    return call


def associative_scan(x, axis, fn, reverse=False):
    many = isinstance(x, tuple)
    data = [one.data.flip(axis) if reverse else one.data for one in (x if many else (x,))]
    parts = [list(one.unbind(axis)) for one in data]
    for i in range(1, len(parts[0])):
        made = fn(*(Value(one[i - 1]) for one in parts), *(Value(one[i]) for one in parts))
        for one, new in zip(parts, made if isinstance(made, tuple) else (made,)):
            one[i] = raw(new)
    found = [torch.stack(one, axis) for one in parts]
    found = [Value(one.flip(axis) if reverse else one) for one in found]
    return tuple(found) if many else found[0]


def inline_asm(asm, constraints, args, dtype, is_pure, pack):
    if asm.startswith("ex2.approx"):
        x = torch.exp2(raw(args[0]))
        return Value(torch.where(x.abs() < torch.finfo(F32).tiny, torch.zeros_like(x), x))
    if asm.startswith(("mov", "griddepcontrol.launch_dependents; mov")):
        return args[0]
    if asm.startswith(("cvt.rn.bf16x2", "cvt.rn.f16x2")):
        return Value(raw(args[0]).to(dtype))
    if asm.startswith("shl.b32"):
        return Value(raw(args[0]).float().view(torch.int32))
    if asm.startswith("and.b32"):
        return Value((raw(args[0]).view(torch.int16) & raw(args[1])).view(dtype))
    if asm.startswith("shfl.sync.bfly"):  # in ``delta/triton/sm90/layouts.py`` lane 4 is row 1, in ``columns.py`` lane 1 is pair 1
        x, lane = raw(args[0]), int(asm.split(",")[2])
        return Value(x[torch.arange(len(x)) ^ lane // 4] if lane > 3 else x[:, torch.arange(x.shape[1]) ^ lane])
    if asm.startswith("cp.async.bulk.prefetch.L2"):
        assert not (raw(args[0]) % 16).any()
        assert not (raw(args[1]) % 16).any()
        return args[1]
    raise NotImplementedError(asm)


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


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    warps = [machine().warps, *worker_num_warps]
    machine().run([((f, a), w) for (f, a), w in zip(functions_and_args, warps)])


class _Layout:
    def __init__(self, *args, swizzle_byte_width=128, **kwargs):
        self.args, self.swizzle_byte_width = args, swizzle_byte_width


def _sum(x, axis=None):
    return Value(x.data.sum() if axis is None else x.data.sum(axis))


def _fold(values, axis, function):
    """Reduce tensors of 2^n elements along an axis together, by halves."""
    while (size := values[0].data.shape[axis]) > 1:
        halves = [value.data.split(size // 2, axis) for value in values]
        values = function(*[Value(half[0]) for half in halves], *[Value(half[1]) for half in halves])
    return tuple(Value(value.data.squeeze(axis)) for value in values)


def _reduce(function):
    def call(x, axis=None):
        return Value(function(x.data) if axis is None else function(x.data, axis))

    return call


def asserted(condition, message=""):
    """A kernel's assertion about its constants."""
    assert condition, message


def language():
    """The names of gl and tl."""
    names = SimpleNamespace(
        float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, int32=torch.int32, int64=torch.int64, int1=torch.bool,
        int16=torch.int16,
        constexpr=lambda x: x, static_assert=asserted, static_range=range, range=lambda *a, **k: range(*map(int, a)),
        program_id=lambda axis: Value(torch.tensor(machine().pid[axis], dtype=torch.int32)), num_warps=lambda: _local.warps,
        num_programs=lambda axis: machine().programs[axis],
        arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
        zeros=lambda shape, dtype=F32, layout=None: Value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype=F32, layout=None: Value(torch.full(shape, value, dtype=dtype)),
        zeros_like=lambda x: Value(torch.zeros_like(x.data)), load=load, store=store, atomic_add=atomic_add, where=where, sum=_sum,
        full_like=lambda x, value: Value(torch.full_like(x.data, value)),
        min=_reduce(lambda x, a=None: x.min() if a is None else x.amin(a)),
        max=_reduce(lambda x, a=None: x.max() if a is None else x.amax(a)),
        maximum=_pair(torch.maximum), minimum=_pair(torch.minimum),
        reduce=_fold, floor=lambda x: Value(x.data.floor()), abs=lambda x: Value(x.data.abs()),
        rsqrt=lambda x: Value(torch.rsqrt(x.data)), exp=lambda x: Value(torch.exp(x.data)), exp2=lambda x: Value(torch.exp2(x.data)),
        fma=lambda a, b, c: Value((raw(a).double() * raw(b).double() + raw(c).double()).float()),
        convert_layout=lambda x, layout, assert_trivial=False: x, reshape=lambda x, shape: Value(x.data.reshape(shape)),
        permute=lambda x, order: Value(x.data.permute(order)), expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
        broadcast=lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.data, b.data))), associative_scan=associative_scan,
        inline_asm_elementwise=inline_asm, multiple_of=lambda x, y: x, max_contiguous=lambda x, y: x,
        allocate_shared_memory=lambda dtype, shape, layout=None: Shared(machine().allocate(dtype, shape)), warp_specialize=warp_specialize,
        cdiv=lambda a, b: Value((raw(a) + raw(b) - 1) // raw(b)) if isinstance(a, Value) or isinstance(b, Value) else -(-a // b),
        split=lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])), join=lambda a, b: Value(torch.stack([a.data, b.data], -1)),
        barrier=lambda: None, thread_barrier=lambda: None,
        **{name: _Layout for name in ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout",
                                      "SwizzledSharedLayout", "DistributedLinearLayout", "AutoLayout")},
    )  # fmt: skip
    return names


_LANGUAGE = language()
_LANGUAGE.to_linear_layout = lambda layout, shape: None
_LANGUAGE.dot = lambda a, b, acc=0.0, **_: Value(raw(a).float() @ raw(b).float() + raw(acc))
_LANGUAGE.range = lambda *bounds, **_: range(*map(int, bounds))
_LANGUAGE.trans = lambda x: Value(raw(x).mT)
_LANGUAGE.cumsum = lambda x, axis, reverse=False: Value(raw(x).flip(axis).cumsum(axis).flip(axis) if reverse else raw(x).cumsum(axis))
_SPECIAL = {
    "gl": _LANGUAGE, "tl": _LANGUAGE, "gluon": None, "triton": None, "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait,
    "folded": lambda *layout: None, "in_blocks": lambda layout: None, "by_token": lambda W: None, "by_group": lambda W: None,
    "diagonal_layout": lambda: None, "fence_async_shared": lambda: None, "meet": lambda: None,
    "reinterpret": Shared.reinterpret, "async_load": copy_in, "async_store": copy_out, "panels": panels,
    "cuda": SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=lambda: machine().kernel_ahead()),
    "mma_v2": lambda a, b, acc: mma(a, b, acc), "part_of": part_of,
    "mbarrier": SimpleNamespace(
        init=bar_init, expect=bar_expect, wait=bar_wait, arrive=bar_arrive, invalidate=bar_invalidate, MBarrierLayout=_Layout
    ),
    "tma": SimpleNamespace(store_wait=store_wait),
}  # fmt: skip
_made: dict[int, Any] = {}


def emulated(kernel, replaced=None):
    """A kernel's Python function in which the language is this one."""
    if id(kernel) in _made:
        return _made[id(kernel)]
    from triton.language import constexpr

    fn = kernel.fn
    space: dict[str, Any] = {"__builtins__": fn.__globals__["__builtins__"]}
    made = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    _made[id(kernel)] = made
    for name, x in fn.__globals__.items():
        if name in _SPECIAL:
            space[name] = _SPECIAL[name]
        elif hasattr(x, "fn") and callable(getattr(x, "fn", None)) and not isinstance(x, type):
            space[name] = emulated(x)
        elif isinstance(x, constexpr):
            space[name] = x.value
        elif name not in space:
            space[name] = x
    space["max"], space["min"] = max, min
    return made


def launch(kernel, programs, arguments, constants, warps=4, seed=0, late=()):
    """Run all programs of a kernel, a number or one for each axis, one after another in any order.

    Tensors become pointers; descriptors stay.

    ``late``: tensors that the kernel ahead writes. They are NaN, or a large integer, until a program has waited for it, which each must do.
    """
    function = emulated(kernel)
    given = [Pointer(flat(x)) if isinstance(x, torch.Tensor) else x for x in arguments]
    given = [Value(torch.tensor(x, dtype=torch.int32)) if isinstance(x, int) and not isinstance(x, bool) else x for x in given]
    programs = programs if isinstance(programs, tuple) else (programs,)
    count = int(np.prod(programs))
    for number in random.Random(seed).sample(range(count), count):
        pid = tuple(number // int(np.prod(programs[:axis])) % count for axis, count in enumerate(programs))
        one = Machine(pid, seed + number)
        awaited = {name: (x, x.clone()) for name, x in enumerate(late)}
        one.kernel_ahead = lambda awaited=awaited: [x.copy_(values) for x, values in map(awaited.pop, list(awaited))]
        for x in late:
            x.fill_(float("nan") if x.is_floating_point() else 2**40)
        one.bars, one.programs, one.warps, one.memory = {}, programs, warps, []

        def allocate(dtype, shape, one=one):
            one.reuse()
            bytes_ = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
            block = torch.full((bytes_,), 255, dtype=torch.uint8)  # NaN in every float
            one.memory.append(block)
            return block.view(dtype).view(shape)

        one.allocate = allocate
        _local.machine, _local.warps = one, warps
        function(*given, **constants)
        one.check_reads()
        assert not awaited, "a program that does not wait for the kernel ahead"


def run(plan, tensors, sizes, seed=0):
    """All launches of a plan for these sizes. Its memory, NaN at first, is added to the tensors.

    Launches that may begin early do so: until a program has waited, all memory that earlier launches use is NaN.
    """
    plan, used = plan.at(sizes), set()
    for name, (shape, dtype) in plan.memory.items():
        tensors[name] = torch.zeros(shape, dtype=dtype) if dtype == torch.int32 else torch.full(shape, float("nan"), dtype=dtype)
    for one in plan.launches:
        given = [tensors[name] for name in one.tensors]
        tiled = [Descriptor(_matrix(x, tile.axes), (tile.rows, tile.columns)) for x, tile in zip(given, one.tiles)]
        constants = dict(zip(one.kernel.arg_names[-len(one.constants) :], one.constants))
        numbers = [Value(torch.tensor(x)) if place in one.wide else x for place, x in enumerate(one.numbers)]  # 64 bits
        arguments = [*tiled, *given[len(tiled) :], *numbers]
        late = [tensors[name] for name in used if dict(one.options).get("launch_pdl")]
        launch(one.kernel, one.grid, arguments, constants, dict(one.options)["num_warps"], seed, late)
        used |= {name for name in one.tensors if name in plan.memory and tensors[name].is_floating_point()}
    return tensors


def _matrix(x, axes):
    """A tensor as a matrix of its first axes and its last ones, in place. An axis with stride 0 is left out."""
    columns = int(np.prod(x.shape[axes:]))
    return x.as_strided((x.numel() // columns, columns if x.stride(axes) else x.shape[-1]), (x.stride(axes - 1), 1))
