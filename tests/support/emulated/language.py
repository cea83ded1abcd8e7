"""The names of gl and tl, as functions of values."""

from types import SimpleNamespace

import torch

from .machine import machine, warp_specialize, warps
from .memory import Shared
from .values import F32, Value, promoted, raw


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


def pair(function):
    def call(a, b, propagate_nan=None):
        if not isinstance(a, Value) and not isinstance(b, Value):
            return function(torch.tensor(a), torch.tensor(b)).item()
        a = a if isinstance(a, Value) else Value(torch.tensor(a, dtype=b.data.dtype))
        x, y = promoted(a, b)
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


class Layout:
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
        program_id=lambda axis: Value(torch.tensor(machine().pid[axis], dtype=torch.int32)), num_warps=warps,
        num_programs=lambda axis: machine().programs[axis],
        arange=lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
        zeros=lambda shape, dtype=F32, layout=None: Value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype=F32, layout=None: Value(torch.full(shape, value, dtype=dtype)),
        zeros_like=lambda x: Value(torch.zeros_like(x.data)), load=load, store=store, atomic_add=atomic_add, where=where, sum=_sum,
        full_like=lambda x, value: Value(torch.full_like(x.data, value)),
        min=_reduce(lambda x, a=None: x.min() if a is None else x.amin(a)),
        max=_reduce(lambda x, a=None: x.max() if a is None else x.amax(a)),
        maximum=pair(torch.maximum), minimum=pair(torch.minimum),
        reduce=_fold, floor=lambda x: Value(x.data.floor()), abs=lambda x: Value(x.data.abs()),
        rsqrt=lambda x: Value(torch.rsqrt(x.data)), log2=lambda x: Value(torch.log2(x.data)),
        exp=lambda x: Value(torch.exp(x.data)), exp2=lambda x: Value(torch.exp2(x.data)),
        fma=lambda a, b, c: Value((raw(a).double() * raw(b).double() + raw(c).double()).float()),
        convert_layout=lambda x, layout, assert_trivial=False: x, reshape=lambda x, shape: Value(x.data.reshape(shape)),
        permute=lambda x, order: Value(x.data.permute(order)), expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
        broadcast=lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.data, b.data))), associative_scan=associative_scan,
        inline_asm_elementwise=inline_asm, multiple_of=lambda x, y: x, max_contiguous=lambda x, y: x,
        allocate_shared_memory=lambda dtype, shape, layout=None: Shared(machine().allocate(dtype, shape)), warp_specialize=warp_specialize,
        cdiv=lambda a, b: Value((raw(a) + raw(b) - 1) // raw(b)) if isinstance(a, Value) or isinstance(b, Value) else -(-a // b),
        split=lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])), join=lambda a, b: Value(torch.stack([a.data, b.data], -1)),
        barrier=lambda: None, thread_barrier=lambda: None,
        **{name: Layout for name in ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout",
                                      "SwizzledSharedLayout", "DistributedLinearLayout", "AutoLayout")},
    )  # fmt: skip
    return names


LANGUAGE = language()
LANGUAGE.to_linear_layout = lambda layout, shape: None
LANGUAGE.PropagateNan = SimpleNamespace(ALL=0, NONE=1)
LANGUAGE.dot = lambda a, b, acc=0.0, **_: Value(raw(a).float() @ raw(b).float() + raw(acc))
LANGUAGE.range = lambda *bounds, **_: range(*map(int, bounds))
LANGUAGE.trans = lambda x: Value(raw(x).mT)
LANGUAGE.cumsum = lambda x, axis, reverse=False: Value(raw(x).flip(axis).cumsum(axis).flip(axis) if reverse else raw(x).cumsum(axis))
