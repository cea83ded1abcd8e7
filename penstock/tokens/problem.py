"""Calls of operators over tokens that carry states: over whole sequences, and in place on rows of a pool.

B batch, T tokens, H heads, G heads of q and k, K key channels and V value channels of a head, N sequences (N = B unless packed), P rows of
a pool of states. A family adds its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from ..call.memory import Seen
from ..call.operator import Operator
from ..call.problem import Problem
from .dtypes import state_dtype
from .packing import ranges
from .sharing import over_groups, repeated


class TokenProblem(Problem):
    """What calls over sequences and in place share."""

    q: Tensor  # [B, T, G, K], [B, T, H, K] in a whole problem
    k: Tensor  # as q
    v: Tensor  # [B, T, H, V]
    g: Tensor | None  # log decay, natural logarithm, some of the axes B, T, H and K
    cu_seqlens: Tensor | None  # [N + 1], packed with B = 1
    scale: float
    partial: bool = False
    """Whether this is a block of the key channels of a call. Its output, and gradients shared by blocks, are then float32."""
    groups: int = 0
    """The number of heads of q and k in the call, if heads share them. Gradients of q and k may be those of groups."""

    @property
    def whole(self) -> Self:
        """The problem with q and k repeated for every head."""
        G, H = self.sizes["G"], self.sizes["H"]
        if G == H:
            return self
        whole = self.with_tensors({"q": repeated(self.q, H), "k": repeated(self.k, H)})
        whole.sizes, whole.groups = {**self.sizes, "G": H}, G
        seen: Seen | None = self.__dict__.get("seen")
        if seen is not None:
            if seen.whole is None:
                seen.whole = whole.seen
            whole.__dict__["seen"] = seen.whole
        return whole

    def shared(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of q and k summed over the heads of each group. The given ones may be per head, per part of a group, or per group."""
        G, H = self.sizes["G"], self.sizes["H"]
        if G == H:
            return gradients
        return *(None if x is None else over_groups(x, G, self.q.dtype) for x in gradients[:2]), *gradients[2:]

    def of_heads(self, x: Tensor) -> torch.dtype:
        """The dtype of a gradient that is like x, an input that heads may share: it is summed over groups before it is rounded."""
        return state_dtype(x.dtype) if self.groups else x.dtype

    def summand(self, x: Tensor) -> torch.dtype:
        """The dtype of a result that is like x and a sum over key channels."""
        return torch.float32 if self.partial else x.dtype

    @property
    def shown(self) -> Mapping[str, int]:
        """The sizes in messages: G only where heads share q and k."""
        sizes = self.sizes
        return {axis: sizes[axis] for axis in "BTGHKVNP" if axis in sizes and (axis != "G" or sizes["G"] != sizes["H"])}

    @property
    def gate(self) -> Tensor | None:
        """The decay as a view [B or 1, T or 1, H, K or 1]."""
        if self.g is None:
            return None
        axes = self.signature.axes["g"]
        if len(axes) == 4:
            return self.g
        return self.g[tuple(slice(None) if axis in axes else None for axis in "BTHK")]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, H, K, V]"""
        N, H, K, V = (self.sizes[axis] for axis in "NHKV")
        return N, H, K, V

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each sequence on the token axis, on the host. Waits for the device if packed."""
        return [(0, self.sizes["T"])] * self.sizes["B"] if self.cu_seqlens is None else ranges(self.cu_seqlens)


class OverSequences(TokenProblem):
    """A call over whole sequences. Its results are the output and the final states."""

    initial_state: Tensor | None  # [N, H, K, V]
    reverse: bool
    output_final_state: bool
    flipped: bool = False
    """Set by ``forward_in_time``."""

    def forward_in_time(self) -> Self:
        """The same problem with ``reverse`` undone by flipping the token axis (and, if packed, the order of sequences)."""
        if not self.reverse:
            return self
        packed = self.cu_seqlens is not None
        turned = {name: self._turned(x, axes, packed) for (name, axes), x in zip(self.signature.axes.items(), self.tensors)}
        flipped = self.with_tensors(turned)
        flipped.reverse, flipped.flipped = False, True
        return flipped

    def _turned(self, x: Tensor | None, axes: tuple[str, ...], packed: bool) -> Tensor | None:
        """An argument with its tokens, or its packed sequences, in the opposite order."""
        if x is None:
            return None
        if axes == ("N+1",):
            return self.sizes["T"] - x.flip(0)
        if "T" in axes:
            return x.flip(axes.index("T"))
        return x.flip(0) if packed and axes[:1] == ("N",) else x

    def back_in_time(self, output: Tensor, final_state: Tensor) -> tuple[Tensor, Tensor]:
        """Undo ``forward_in_time`` on the results."""
        if not self.flipped:
            return output, final_state
        return output.flip(1), final_state.flip(0) if self.cu_seqlens is not None else final_state


class InPlace(TokenProblem):
    """A call that updates states in place: sequence n starts from row ``slots[n]`` of a pool."""

    state: Tensor  # [P, H, K, V], written
    slots: Tensor | None  # [N]; None: sequence n is row n. Negative: skipped
    reverse = False
    sequences: ClassVar[Operator[Any]]
    """The operator over whole sequences, with a signature of the same ``about`` for each of this one's. Its passes update states in plain
    PyTorch (``pieces``). The family sets it."""
