"""Values in registers and addresses of tensors, in the place of Triton's."""

from types import SimpleNamespace

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
    """The tensor of a value or of shared memory."""
    return getattr(x, "data", x) if not isinstance(x, torch.Tensor) else x


def _binary(function):
    def operator(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(function(*promoted(self, other)))

    def reflected(self, other):
        return Value(function(*reversed(promoted(self, other))))

    return operator, reflected


def promoted(a, b):
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
