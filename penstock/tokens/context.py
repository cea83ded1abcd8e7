"""Context parallelism: the tokens of sequences are cut into contiguous slices, one for each rank of a group of processes.

A rank computes what its tokens do to a state (a summary: the state that they leave of none, and their transition). All ranks exchange
their summaries once, and each combines those of the ranks before it, in their order, to the state that enters its slice. Then the operator
runs as on one device, from that state. The backward pass mirrors this: adjoint summaries of the ranks after a slice are combined to the
gradient of the state that leaves it. A rank sends a packet of B H K (V + W) numbers, V columns of a state and W of a transition; with
packed sequences one of them crosses a border, and B is 1. Only slices within a sequence need a transition: if there are none, W is 0.

The combined states depend on the cuts only: one process that computes the slices one by one gets equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import private
from ..call.autocast import cast
from ..call.operator import Explain
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described, shortened
from ..gpu.sharing import shared
from .dtypes import state_dtype
from .exchange import exchange, gathered, summed
from .passes import Passes, Tensors
from .summaries import Transition

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FUNCTION = "ContextParallel"
"""In messages about exchanges of the context and of layers."""


class Slice(NamedTuple):
    """The tokens of one rank."""

    begin: int
    end: int
    sequences: range
    """Its packed sequences: those with tokens of it, and empty ones after its tokens (rank 0: also before them). Batch rows: none."""
    enters: bool
    """Whether its first sequence (each batch row) begins on an earlier rank."""
    leaves: bool
    """Whether its last sequence (each batch row) ends on a later rank."""

    @property
    def within(self) -> bool:
        """Whether all its tokens are of one sequence (each batch row) that begins on an earlier and ends on a later rank."""
        return self.enters and self.leaves and len(self.sequences) < 2


def slices(lengths: Sequence[int], offsets: Sequence[int] | None) -> list[Slice]:
    """The slices of ranks with ``lengths`` tokens each; ``offsets``: of packed sequences on the whole token axis, or None."""
    found, ends = [], list(accumulate(lengths, initial=0))
    for rank, (begin, end) in enumerate(pairwise(ends)):
        if offsets is None:
            found.append(Slice(begin, end, range(0), 0 < begin < end, begin < end < ends[-1]))
            continue
        own = [
            n
            for n, (a, b) in enumerate(pairwise(offsets))
            if (a < end and b > begin and begin < end if a < b else begin < a <= end or a == rank == 0)
        ]
        sequences = range(own[0], own[-1] + 1) if own else range(0)
        enters = begin < end and offsets[sequences[0]] < begin
        found.append(Slice(begin, end, sequences, enters, begin < end and offsets[sequences[-1] + 1] > end))
    return found


class ContextParallel:
    """The slices of a group of ranks, each with consecutive tokens of the same sequences.

    Give it to a public function as ``context``, with the tokens of this rank only::

        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (8,), mesh_dim_names=("cp",))
        context = ps.distributed.ContextParallel(mesh["cp"], tokens=q.shape[1])
        output, _ = ps.gla(q, k, v, g, context=context)

    Every rank must make the same calls in the same order, and their backward passes too. Losses of ranks are summed: gradients of tensors
    without tokens (a constant decay, u, A_log, the initial state) are each rank's part, as those of replicated parameters are.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, *, tokens: int, lengths: Sequence[int] | None = None, cu_seqlens: Tensor | None = None
    ) -> None:
        """A context for calls with these slices. Make one for each batch, and use it in every layer.

        group : ProcessGroup or DeviceMesh of one axis
            The ranks, in the order of their tokens.
        tokens : int
            The number of tokens of this rank; it may be 0.
        lengths : sequence of int, optional
            The numbers of tokens of all ranks. Default: they are exchanged, and the host waits for that once.
        cu_seqlens : int Tensor [N+1], optional
            Packed sequences: their offsets on the whole token axis, the same on every rank. They are read on the host. Sequences may cross
            borders. The calls take no ``cu_seqlens`` of their own.
        """
        from torch.distributed.device_mesh import DeviceMesh

        complaints = Complaints(FUNCTION)
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                rule, remedy = "a mesh of one axis", 'Take one of its axes: mesh["cp"].'
                complaints.add(ShapeError, "group", rule, f"one of {group.ndim}", remedy)
                complaints.raise_any()
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            remedy = "Start the processes with torchrun and take dist.group.WORLD or an axis of a DeviceMesh."
            complaints.add(DtypeError, "group", "a ProcessGroup or a DeviceMesh", described(group), remedy)
            complaints.raise_any()
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            complaints.add(RangeError, "tokens", "the number of tokens of this rank, at least 0", described(tokens))
            complaints.raise_any()
        self.group, self.rank, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        if lengths is None:
            lengths = self._exchanged(tokens, ranks)
        lengths = [int(one) for one in lengths]
        if len(lengths) != ranks or lengths[self.rank] != tokens or min(lengths) < 0:
            rule = f"the tokens of {ranks} ranks, {tokens} of them on rank {self.rank}"
            complaints.add(ShapeError, "lengths", rule, shortened(lengths))
            complaints.raise_any()
        offsets = None if cu_seqlens is None else [int(one) for one in cu_seqlens.tolist()]
        if offsets is not None and (
            not offsets or offsets[0] != 0 or offsets[-1] != sum(lengths) or any(a > b for a, b in pairwise(offsets))
        ):
            rule = f"offsets that begin at 0, never fall and end at the {sum(lengths)} tokens of all ranks"
            complaints.add(RangeError, "cu_seqlens", rule, shortened(offsets), "Every rank gets the offsets of the whole token axis.")
            complaints.raise_any()
        self.tokens, self.slices, self.offsets = tokens, slices(lengths, offsets), offsets
        self.slice = self.slices[self.rank]
        self._crossed = any(one.enters for one in self.slices)
        self._moves = any(one.within for one in self.slices)
        self._before, self._after = self._chain(False), self._chain(True)
        self.cu_seqlens: Tensor | None = None
        """Offsets of this rank's sequences in its slice."""
        if cu_seqlens is not None and offsets is not None:
            own = self.slice.sequences
            here = [min(max(one - self.slice.begin, 0), tokens) for one in offsets[own.start : own.stop + 1]] if own else [0]
            self.cu_seqlens = torch.tensor(here, dtype=cu_seqlens.dtype, device=cu_seqlens.device)

    def _exchanged(self, tokens: int, ranks: int) -> list[int]:
        """The numbers of tokens of all ranks."""
        device = "cpu" if dist.get_backend(self.group) == "gloo" else torch.device("cuda", torch.cuda.current_device())
        found = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(ranks)]
        exchange(FUNCTION, dist.all_gather, found, torch.tensor([tokens], device=device), group=self.group)
        return [int(one) for one in found]

    def __repr__(self) -> str:
        of = "" if self.offsets is None else f" of {len(self.offsets) - 1} sequences"
        return f"ContextParallel(rank {self.rank} of {len(self.slices)}, tokens {self.slice.begin} to {self.slice.end}{of})"

    def run(self, passes: Passes, tensors: Tensors, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Output of this rank's tokens and, if ``wanted``, the final states of all sequences, on every rank."""
        if torch.compiler.is_compiling():  # compiled graphs break here; the decorator would import the compiler at once
            return torch.compiler.disable(self._run)(passes, tensors, wanted)  # type: ignore[no-any-return]
        return self._run(passes, tensors, wanted)

    def _run(self, passes: Passes, tensors: Tensors, wanted: bool) -> tuple[Tensor, Tensor | None]:
        self._check(passes.function, tensors)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            output, final = _Run.apply(self, passes, wanted, *tensors)  # type: ignore[no-untyped-call]
        else:
            with shared():
                output, final = passes.call(self.entered(passes, tensors)[0])
            final = self.finals(passes, final) if wanted else final
        return output, final if wanted else None

    def check(self, complaints: Complaints, name: str, tokens: int | None, cu_seqlens: object) -> None:
        """Check that an argument of this name, if it has tokens, has those of this rank, and that there are no other offsets."""
        if cu_seqlens is not None:
            remedy = "Give the context the offsets of the whole token axis."
            complaints.add(RangeError, "cu_seqlens", "None with a context", described(cu_seqlens), remedy)
        if tokens not in (None, self.tokens):
            rule = f"of the context's {self.tokens} tokens on rank {self.rank}"
            complaints.add(ShapeError, name, rule, tokens, "Make a context for each batch.")

    def _check(self, function: str, tensors: Tensors) -> None:
        q, v, state, complaints = tensors[0], tensors[2], tensors[-1], Complaints(function)
        if not torch.compiler.is_compiling() and private.transforming():
            rule = "outside of torch.func transforms and forward-mode differentiation"
            complaints.add(RangeError, "the call", rule, "one inside", "They cannot follow the exchange with other ranks.")
        self.check(complaints, "q", q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else None, tensors[-2])
        if isinstance(state, Tensor) and isinstance(v, Tensor) and v.dim() == 4 and isinstance(q, Tensor) and q.dim() == 4:
            N = v.shape[0] if self.offsets is None else len(self.offsets) - 1
            wanted = [N, v.shape[2], q.shape[3], v.shape[3]]
            if list(state.shape) != wanted:
                rule = f"of shape [N,H,K,V] = {wanted}: the states of all sequences, on every rank"
                complaints.add(ShapeError, "initial_state", rule, list(state.shape))
        complaints.raise_any()

    # Both passes

    def entered(self, passes: Passes, tensors: Tensors) -> tuple[Tensors, Tensor | None]:
        """The tensors of the call on this rank: those given, its offsets, and the states that enter or begin here.

        Also the columns of the slice's transition, None unless it is within a sequence.
        """
        q, v, state = tensors[0], tensors[2], tensors[-1]
        assert q is not None
        assert v is not None
        own, here, columns = self.slice, [*tensors[:-2], None, state], None
        mine = state if self.offsets is None or state is None else state[own.sequences.start : own.sequences.stop]
        begins = None if mine is None or (own.enters and len(own.sequences) < 2) else mine[-1:] if own.sequences else mine
        if self._crossed:
            made = None
            if self._summarizes(passes, own.leaves, -1, q.is_cuda):
                with self._sharing(-1):
                    made, columns = passes.summary(self._of_part(passes, here, -1), begins, own.within)
            entered = self._combined(passes, made, columns, (q, v), False)
            if entered is not None:
                mine = self._with_row(mine, entered, 0)
        one = self.tokens > 0 and len(own.sequences) == 1  # as a batch row, whose kernels need no offsets
        return (*tensors[:-2], None if one else self.cu_seqlens, mine), columns if own.within else None

    def finals(self, passes: Passes, final: Tensor) -> Tensor:
        """The final states of all sequences, on every rank."""
        return summed(passes.function, self.of_ended(final), self.group)

    def of_ended(self, x: Tensor) -> Tensor:
        """The rows of the sequences that end on this rank, among 0 for all others: [N,...] from x [n,...] of those of this slice.

        The sum over ranks has the rows of all sequences. It is a function of x for autograd, also without any row of x.
        """
        if self.offsets is None:
            N, start, kept = x.shape[0], 0, x.shape[0] if self.rank == self._last() else 0
        else:
            own = self.slice.sequences
            N, start, kept = len(self.offsets) - 1, own.start, len(own) - self.slice.leaves
        before, after = (x.new_zeros(rows, *x.shape[1:]) for rows in (start, N - start - kept))
        return torch.cat([before, x[:kept], after])

    def of_given(self, given: Tensor, d_states: Tensor | None) -> Tensor:
        """The gradient of the given initial states as far as it comes from this rank, from that of the states of its call."""
        own, whole = self.slice, torch.zeros_like(given)
        if d_states is None:
            return whole
        if self.offsets is None:
            return whole if own.enters else d_states.to(given.dtype)
        first = own.sequences.start + own.enters
        whole[first : own.sequences.stop] = d_states[own.enters :]
        return whole

    def backward(self, passes: Passes, d_output: Tensor, d_final: Tensor | None, here: Tensors, columns: Tensor | None) -> Tensor:
        """The gradient of the final states of this rank's call.

        ``d_final``: its part of that of all final states, None if not wanted; ``columns``: of the transition, as of ``entered``.
        """
        q, v = here[0], here[2]
        assert q is not None
        assert v is not None
        own = self.slice
        N = v.shape[0] if self.offsets is None else len(own.sequences)
        d_states = v.new_zeros(N, v.shape[2], q.shape[3], v.shape[3], dtype=state_dtype(q.dtype))
        if d_final is not None:
            d_final = summed(passes.function, d_final.contiguous().clone(), self.group)
            if self.offsets is not None:
                d_states = d_final[own.sequences.start : own.sequences.stop].clone()
            elif self.rank == self._last():
                d_states = d_final
        if not self._crossed:
            return d_states
        ends = None if own.leaves and len(own.sequences) < 2 else d_states[:1] if own.sequences else d_states
        made = None
        if self._summarizes(passes, own.enters, 0, q.is_cuda):
            *given, part = self._of_part(passes, [*here[:-2], None, None, d_output], 0, [*passes.timed, True])
            assert part is not None
            with self._sharing(0):
                made = passes.adjoint(given, part, ends)
        left = self._combined(passes, made, None if columns is None else passes.transition.adjoint(columns), (q, v), True)
        return d_states if left is None else self._with_row(d_states, left, -1)

    def _part(self, place: int) -> slice:
        """The tokens of this rank's first or last sequence."""
        if self.offsets is None or not self.slice.sequences:
            return slice(0, self.tokens)
        n = self.slice.sequences[place]
        begin = self.slice.begin
        return slice(max(self.offsets[n] - begin, 0), min(self.offsets[n + 1] - begin, self.tokens))

    def _sharing(self, place: int) -> AbstractContextManager[object]:
        """Whether the call on this rank takes results of the summary of its first or last sequence. Else they are freed after it."""
        return nullcontext() if self._part(place) == slice(0, self.tokens) else shared()

    def _of_part(self, passes: Passes, tensors: Tensors, place: int, timed: Sequence[bool] = ()) -> Tensors:
        """The tensors with the tokens of this rank's first or last sequence."""
        part = self._part(place)
        if part == slice(0, self.tokens):
            return tensors
        return [x[:, part] if x is not None and some else x for x, some in zip(tensors, timed or passes.timed)]

    def _summarizes(self, passes: Passes, gives: bool, place: int, on_gpu: bool) -> bool:
        """Whether this rank computes a summary. ``gives``: whether other ranks need it."""
        return gives or (passes.shares and on_gpu and self.tokens > 0 and self._part(place) == slice(0, self.tokens))

    def _combined(
        self, passes: Passes, made: Tensor | None, columns: Tensor | None, like: tuple[Tensor, Tensor], adjoint: bool
    ) -> Tensor | None:
        """Exchange summaries. The state that enters this slice or, as the adjoint, the gradient of that which leaves it; None if none does.

        ``made``, ``columns``: of the summary of this rank; ``like``: q and v, which say its sizes.
        """
        q, v = like
        rows, (H, V), K = v.shape[0] if self.offsets is None else 1, v.shape[2:], q.shape[3]
        parts = [v.new_zeros(rows, H, K, V, dtype=state_dtype(q.dtype)) if made is None else made]
        if self._moves:
            parts.append(parts[0].new_zeros(rows, H, K, passes.transition.columns(K)) if columns is None else columns)
        packets = gathered(passes.function, torch.cat(parts, -1), self.group)
        return combined(packets, self._after if adjoint else self._before, V, passes.transition)

    def _chain(self, adjoint: bool) -> list[int]:
        """The ranks whose summaries make up what enters this slice (as the adjoint: what leaves it), the farthest first."""
        step, ranks, rank = (1 if adjoint else -1), [], self.rank
        goes_on = self.slice.leaves if adjoint else self.slice.enters
        while goes_on:
            rank += step
            one = self.slices[rank]
            if one.begin == one.end:
                continue
            ranks.append(rank)
            goes_on = (one.leaves if adjoint else one.enters) and len(one.sequences) < 2
        return ranks[::-1]

    def _with_row(self, states: Tensor | None, row: Tensor, place: int) -> Tensor:
        """The states of this rank's sequences with that of the first or last replaced."""
        if self.offsets is None:
            return row
        if states is None:
            states = row.new_zeros(len(self.slice.sequences), *row.shape[1:])
        states = states.to(row.dtype, copy=True)
        states[place] = row[0]
        return states

    def _last(self) -> int:
        """The rank on which batch rows end."""
        return max((rank for rank, one in enumerate(self.slices) if one.begin < one.end), default=0)


def combined(packets: Tensor | Sequence[Tensor], ranks: Sequence[int], V: int, transition: Transition) -> Tensor | None:
    """The state after the slices of ``ranks``, in this order, from their packets [.,H,K,V+W]; None if there are none."""
    state = None
    for rank in ranks:
        made, columns = packets[rank][..., :V], packets[rank][..., V:]
        state = made.contiguous() if state is None else transition.moved(columns, state) + made
    return state


def over_ranks(
    passes: Passes, tensors: Tensors, context: ContextParallel, wanted: object, complaints: Complaints
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A call whose tokens are those of one rank of a group. ``complaints``: about arguments that are not the operator's."""
    if not isinstance(context, ContextParallel):
        complaints.add(DtypeError, "context", "a ContextParallel or None", described(context), "See penstock.distributed.")
    complaints.raise_any()
    if isinstance(passes.impl, Explain):
        passes.call((*tensors[:-2], context.cu_seqlens, None))
    return context.run(passes, cast(tensors, passes.operator.cast), bool(wanted))


class _Run(torch.autograd.Function):
    """The call on this rank. Its gradient of the final states comes from other ranks."""

    @staticmethod
    def forward(ctx: Any, context: ContextParallel, passes: Passes, wanted: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        with shared():
            here, columns = context.entered(passes, tensors)
            (output, final), residuals = passes.forward(here)
        ctx.call = context, passes, wanted
        ctx.save_for_backward(tensors[-1], columns, *here, *residuals)
        final = context.finals(passes, final) if wanted else final
        if not wanted:
            ctx.mark_non_differentiable(final)
        return output, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> tuple[Any, ...]:
        context, passes, wanted = ctx.call
        given, columns, *kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        here, residuals = kept[: len(needed)], kept[len(needed) :]
        with shared():
            d_states = context.backward(passes, d_output, d_final if wanted else None, here, columns)
            *grads, d_given = passes.backward(here, (d_output, d_states), residuals, needed)
        return None, None, None, *grads, context.of_given(given, d_given) if needed[-1] else None
