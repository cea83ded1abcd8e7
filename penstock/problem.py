"""One validated, canonical call. The only place that validates.

``Problem`` is a call over whole sequences, ``Step`` a decode step. Both are built by ``checked``, which looks at every
argument, lists every broken rule and changes nothing. Shapes, dtypes and devices are always checked. Values (signs of
decays, contents of cu_seqlens, slots) are checked where reading them is free of waiting, on a CPU; on another device
only inside ``checks()``, because there the host would have to wait for the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from .errors import Complaints, DeviceError, DtypeError, RangeError, ShapeError
from .variants import VARIANTS, Variant

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STEP_TOKENS = 16
"""A decode step takes at most this many tokens of a sequence; more is a prefill, for the functions over sequences."""

_checking_values: ContextVar[bool] = ContextVar("penstock_checks", default=False)


@contextmanager
def checks() -> Iterator[None]:
    """Check values too, on every device, within this block.

    On a CPU values are always checked. On a GPU, decays that are positive, ``cu_seqlens`` that do not fit and slots out
    of range are only seen in here, because looking at them makes the host wait for the device.

    >>> with checks():
    ...     pass
    """
    token = _checking_values.set(True)
    try:
        yield
    finally:
        _checking_values.reset(token)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of final states and of sums over time: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def signature(*values: object) -> Hashable:
    """All that a call can depend on but the values in its tensors: sizes, strides, dtypes, devices, alignment; other arguments whole."""
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) if isinstance(x, Tensor) else x if x is None else (type(x), x)
            for x in values
        ]
    )


@dataclass(frozen=True, eq=False)
class Problem:
    """A call over whole sequences. B, T, H, K, V as in ``recurrence.md``; N sequences, N = B unless packed."""

    variant: Variant
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None  # log decay, natural logarithm, axes as variant.decay says
    u: Tensor | None  # [H, K]
    initial_state: Tensor | None  # [N, H, K, V]
    cu_seqlens: Tensor | None  # [N + 1], packed with B = 1
    scale: float
    reverse: bool
    flipped: bool = False  # by forward_in_time

    @property
    def sizes(self) -> dict[str, int]:
        """B, T, H, K, V and N by name."""
        (B, T, H, K), V = self.q.shape, self.v.shape[3]
        N = B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return {"B": B, "T": T, "H": H, "K": K, "V": V, "N": N}

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, H, K, V]"""
        sizes = self.sizes
        return sizes["N"], sizes["H"], sizes["K"], sizes["V"]

    @property
    def gate(self) -> Tensor | None:
        """The decay seen as [B or 1, T or 1, H, K or 1]."""
        if self.g is None:
            return None
        axes = self.variant.decay
        if axes == "BTHK":
            return self.g
        return self.g[tuple(slice(None) if axis in axes else None for axis in "BTHK")]

    @cached_property
    def signature(self) -> Hashable:
        """The same for all problems that differ in values only."""
        tensors = self.q, self.k, self.v, self.g, self.u, self.initial_state, self.cu_seqlens
        return signature(*tensors, self.variant.name, self.scale, self.reverse)

    @classmethod
    def known(cls, signature: Hashable, *values: object) -> Problem:
        """A problem of a signature that was found valid before, with these values for the fields."""
        problem = object.__new__(cls)
        problem.__dict__.update(zip(cls.__dataclass_fields__, values), signature=signature)
        return problem

    def with_tensors(self, tensors: dict[str, Tensor]) -> Problem:
        """The same problem with other tensors of the same kind in the places named."""
        return replace(self, **tensors)  # type: ignore[arg-type]

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each sequence on the token axis, on the host. Waits for the device if packed."""
        if self.cu_seqlens is None:
            return [(0, self.q.shape[1])] * self.q.shape[0]
        ends = self.cu_seqlens.tolist()
        return list(pairwise(ends))

    def forward_in_time(self) -> Problem:
        """The same problem with ``reverse`` undone by flipping the token axis (and, if packed, the order of sequences)."""
        if not self.reverse:
            return self
        packed = self.cu_seqlens is not None
        return replace(
            self,
            q=self.q.flip(1),
            k=self.k.flip(1),
            v=self.v.flip(1),
            g=self.g.flip(1) if self.g is not None and "T" in self.variant.decay else self.g,
            initial_state=self.initial_state.flip(0) if packed and self.initial_state is not None else self.initial_state,
            cu_seqlens=self.q.shape[1] - self.cu_seqlens.flip(0) if self.cu_seqlens is not None else None,
            reverse=False,
            flipped=True,
        )

    def back_in_time(self, output: Tensor, final_state: Tensor) -> tuple[Tensor, Tensor]:
        """Undo ``forward_in_time`` on the results."""
        if not self.flipped:
            return output, final_state
        return output.flip(1), final_state.flip(0) if self.cu_seqlens is not None else final_state

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        u: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        variant: str,
        scale: float | None,
        reverse: bool,
    ) -> Problem:
        """Validate a call; raises the exceptions of ``errors.py`` with every broken rule."""
        row = VARIANTS[variant]
        complaints = Complaints(variant)
        sizes = _check_tokens(complaints, row, q, k, v, g, u)
        if sizes is not None:
            if cu_seqlens is not None:
                N = check_packing(complaints, "cu_seqlens", cu_seqlens, sizes, q.device)
            else:
                N = sizes["B"]
            if initial_state is not None and N is not None:
                sizes["N"] = N
                check_tensor(complaints, "initial_state", initial_state, "NHKV", sizes, q.device, FLOATS)
        complaints.raise_any()
        assert sizes is not None
        return cls(row, q, k, v, g, u, initial_state, cu_seqlens, _scale(row, sizes["K"], scale), reverse)


@dataclass(frozen=True, eq=False)
class Step:
    """A decode step: a few tokens for each of N sequences, whose states are rows of a pool, updated in place."""

    variant: Variant
    q: Tensor  # [N, T, H, K]
    k: Tensor  # [N, T, H, K]
    v: Tensor  # [N, T, H, V]
    g: Tensor | None
    u: Tensor | None
    state: Tensor  # [slots, H, K, V]
    slots: Tensor | None  # [N]; None: sequence n is slot n
    scale: float

    @cached_property
    def signature(self) -> Hashable:
        """The same for all steps that differ in values only."""
        return signature(self.q, self.k, self.v, self.g, self.u, self.state, self.slots, self.variant.name, self.scale)

    @classmethod
    def known(cls, signature: Hashable, *values: object) -> Step:
        """A step of a signature that was found valid before, with these values for the fields."""
        step = object.__new__(cls)
        step.__dict__.update(zip(cls.__dataclass_fields__, values), signature=signature)
        return step

    def problem(self, initial_state: Tensor) -> Problem:
        """The same tokens as a call over whole sequences that begins with ``initial_state`` [N,H,K,V]."""
        return Problem(self.variant, self.q, self.k, self.v, self.g, self.u, initial_state, None, self.scale, False)

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        u: Tensor | None,
        state: Tensor,
        slots: Tensor | None,
        variant: str,
        scale: float | None,
    ) -> Step:
        """Validate a decode step; raises the exceptions of ``errors.py`` with every broken rule."""
        row = VARIANTS[variant]
        complaints = Complaints(f"decode_step({variant!r})")
        own_names = replace(row, query="q", gate="g" if row.gate else "")  # whatever the variant's literature calls them
        sizes = _check_tokens(complaints, own_names, q, k, v, g, u)
        if sizes is not None:
            if sizes["T"] > STEP_TOKENS:
                complaints.add(
                    ShapeError, "T", f"at most {STEP_TOKENS} tokens a sequence", sizes["T"], f"Use {variant}() for longer stretches."
                )
            sizes["N"] = sizes["B"]
            if slots is None:
                check_tensor(complaints, "state", state, "NHKV", sizes, q.device, FLOATS, "Pass slots= to address rows of a larger pool.")
            else:
                check_tensor(complaints, "state", state, "*HKV", sizes, q.device, FLOATS)
                check_tensor(complaints, "slots", slots, "N", sizes, q.device, (torch.int32, torch.int64))
            check_no_overlap(complaints, "state", state)
            if torch.is_grad_enabled():
                _check_no_gradients(complaints, variant, {"q": q, "k": k, "v": v, "g": g, "u": u, "state": state})
            if not complaints.found and slots is not None and reads_values(slots):
                _check_slots(complaints, slots, state.shape[0])
        complaints.raise_any()
        assert sizes is not None
        return cls(row, q, k, v, g, u, state, slots, _scale(row, sizes["K"], scale))


def check_types(
    function: str, tensors: dict[str, object], numbers: dict[str, object], flags: dict[str, object], optional: frozenset[str]
) -> None:
    """Check Python types before anything is handed to torch: tensors, numbers and bools where they belong."""
    complaints = Complaints(function)
    for name, value in tensors.items():
        if not (isinstance(value, Tensor) or (value is None and name in optional)):
            complaints.add(DtypeError, name, "a torch.Tensor" + (" or None" if name in optional else ""), kind(value))
        elif isinstance(value, Tensor) and value.layout != torch.strided:
            complaints.add(DtypeError, name, "a dense tensor", value.layout, f"Convert it with {name}.to_dense().")
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat))):
            complaints.add(DtypeError, name, "a number or None", kind(value))
    for name, value in flags.items():
        if not isinstance(value, bool):
            complaints.add(DtypeError, name, "True or False", kind(value))
    complaints.raise_any()


def kind(value: object) -> str:
    """A value of the wrong Python type, for messages."""
    return "None" if value is None else f"{value!r} of type {type(value).__name__}"


def _scale(row: Variant, K: int, scale: float | None) -> float:
    if scale is not None:
        return float(scale) if isinstance(scale, int) else scale
    return row.scale if row.scale is not None else max(K, 1) ** -0.5


def reads_values(tensor: Tensor) -> bool:
    """Whether the values of this tensor are checked: never those of tensors without data."""
    if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return tensor.device.type == "cpu" or _checking_values.get()


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(
    complaints: Complaints,
    name: str,
    tensor: Tensor,
    axes: str,
    sizes: dict[str, int],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    remedy: str = "",
    beside: str = "the query",
) -> None:
    """Shape by axis letters ("*" is any size), dtype and device of one argument; ``beside`` says what else is on that device."""
    wanted = [sizes.get(axis, -1) for axis in axes]
    if list(tensor.shape) == wanted and tensor.dtype in dtypes and tensor.device == device:
        return
    if tensor.dim() != len(axes) or any(size != want for size, want in zip(tensor.shape, wanted) if want != -1):
        shape = "[" + ", ".join("*" if want == -1 else str(want) for want in wanted) + "]"
        rule = f"of shape [{','.join(axes)}] = {shape}" if axes != "*" else "of one axis, [N+1]"
        complaints.add(ShapeError, name, rule, list(tensor.shape), remedy)
    if tensor.dtype not in dtypes:
        complaints.add(DtypeError, name, _dtypes(dtypes), tensor.dtype, f"Convert it with {name}.to(...).")
    if tensor.device != device:
        complaints.add(DeviceError, name, f"on {device}, where {beside} is", tensor.device, f"Move it with {name}.to({str(device)!r}).")


def _check_tokens(
    complaints: Complaints, row: Variant, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, u: Tensor | None
) -> dict[str, int] | None:
    """The arguments that both kinds of call share. Returns the sizes B, T, H, K, V, or None if q or v has no four axes."""
    if q.dim() != 4 or v.dim() != 4:
        for name, tensor, axes in ((row.query, q, "[B,T,H,K]"), ("v", v, "[B,T,H,V]")):
            if tensor.dim() != 4:
                complaints.add(ShapeError, name, f"of shape {axes}", list(tensor.shape), "Tokens come before heads.")
        return None
    sizes = dict(zip("BTHK", q.shape)) | {"V": v.shape[3]}
    if q.dtype not in FLOATS:
        complaints.add(DtypeError, row.query, _dtypes(FLOATS), q.dtype, f"Convert it with {row.query}.to(...).")
    for name in "HKV":
        if sizes[name] == 0:
            complaints.add(ShapeError, name, "at least 1", 0)
    same = (q.dtype,) if q.dtype in FLOATS else FLOATS
    check_tensor(complaints, "k", k, "BTHK", sizes, q.device, same)
    check_tensor(complaints, "v", v, "BTHV", sizes, q.device, same)
    if (g is not None) != bool(row.decay):
        rule = f"given, of shape [{','.join(row.decay)}]" if row.decay else "left out (this variant has no decay)"
        complaints.add(ShapeError, row.gate or "g", rule, "None" if g is None else list(g.shape))
    elif g is not None:
        found = len(complaints.found)
        check_tensor(complaints, row.gate, g, row.decay, sizes, q.device, FLOATS, _other_variants(row, g.dim()))
        if len(complaints.found) == found and reads_values(g) and g.numel() and float(g.detach().amax()) > 0:
            complaints.add(
                RangeError,
                row.gate,
                "a log decay, natural logarithm, nowhere above 0",
                f"a largest value of {float(g.detach().amax()):g}",
                "Pass log(decay): for RWKV checkpoints -exp(w), for GLA logsigmoid(x) / 16.",
            )
    if (u is not None) != row.bonus:
        rule = "given, of shape [H,K]" if row.bonus else "left out (this variant has no bonus)"
        complaints.add(ShapeError, "u", rule, "None" if u is None else list(u.shape))
    elif u is not None:
        check_tensor(complaints, "u", u, "HK", sizes, q.device, FLOATS)
    return sizes


def _other_variants(row: Variant, axes: int) -> str:
    """A hint for a decay with the right axes of another variant."""
    others = [other.name for other in VARIANTS.values() if other.read == row.read and len(other.decay) == axes and other is not row]
    return f"A decay of {axes} axes belongs to {' or '.join(others)}." if others and axes != len(row.decay) else ""


def check_packing(complaints: Complaints, name: str, cu_seqlens: Tensor, sizes: dict[str, int], device: torch.device) -> int | None:
    """Offsets of packed sequences over an axis of sizes["T"] tokens. Returns how many sequences there are, if all is right with them."""
    found = len(complaints.found)
    check_tensor(complaints, name, cu_seqlens, "*", sizes, device, (torch.int32, torch.int64))
    if cu_seqlens.dim() == 1 and cu_seqlens.shape[0] == 0:
        complaints.add(ShapeError, name, "of at least one element (the first offset, 0)", [0])
    if sizes["B"] != 1:
        complaints.add(ShapeError, "B", f"1 with {name}", sizes["B"], "Pack all sequences along the token axis.")
    if len(complaints.found) > found:
        return None
    if reads_values(cu_seqlens):
        ends, T = cu_seqlens.tolist(), sizes["T"]
        if ends[0] != 0 or ends[-1] != T or any(b < a for a, b in pairwise(ends)):
            shown = ends if len(ends) <= 16 else f"[{', '.join(map(str, ends[:6]))}, ..., {', '.join(map(str, ends[-6:]))}]"
            rule = f"offsets that begin at 0, never fall and end at T = {T}"
            complaints.add(RangeError, name, rule, shown, "It is the cumulative sum of the sequence lengths with a 0 in front.")
    return cu_seqlens.shape[0] - 1


def check_no_overlap(complaints: Complaints, name: str, state: Tensor) -> None:
    """Every axis must step over all that the axes with smaller strides reach."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(state.stride(), state.shape) if size > 1):
        if stride < reach:
            value = f"strides {list(state.stride())} over shape {list(state.shape)}"
            complaints.add(RangeError, name, "free of overlap, since it is written in place", value, "Clone it first.")
            return
        reach += stride * (size - 1)


def _check_no_gradients(complaints: Complaints, variant: str, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            remedy = f"A decode step updates the state in place and has no backward: use torch.no_grad(), or {variant}()."
            complaints.add(RangeError, name, "free of gradients", "requires_grad=True with gradients enabled", remedy)


def _check_slots(complaints: Complaints, slots: Tensor, rows: int) -> None:
    taken = [slot for slot in slots.tolist() if slot >= 0]
    if any(slot >= rows for slot in taken):
        complaints.add(RangeError, "slots", f"below the {rows} rows of state", max(taken), "A negative slot skips a sequence.")
    if len(set(taken)) != len(taken):
        twice = sorted({slot for slot in taken if taken.count(slot) > 1})
        complaints.add(
            RangeError, "slots", "different for every sequence", f"{twice} more than once", "Two sequences cannot share a state."
        )
