"""Calls over the ranks of a process group, beside the same calls on one process."""

import itertools
import os
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import cases
import deltas
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import penstock as ps
from penstock.call.validation import known_values
from penstock.delta import variants as removals
from penstock.errors import ExchangeError
from penstock.recurrence import variants as sums
from penstock.tokens import borders
from penstock.tokens.context import combined
from penstock.tokens.summaries import DIAGONAL, MATRIX

VARIANTS = {**sums.VARIANTS, **removals.VARIANTS}
"""The variants of all families whose functions take a context."""


class Call(NamedTuple):
    """A call whose tokens are cut."""

    variant: str
    lengths: tuple[int, ...]
    """Tokens of each rank."""
    packed: tuple[int, ...] | None
    """Lengths of packed sequences, or None for two batch rows."""
    initial: bool
    final: bool
    dtype: torch.dtype = torch.float64
    gate: str = "logsigmoid/16"
    raw: bool = False
    """Whether inputs of the delta rule are raw."""

    @property
    def case(self) -> cases.Case:
        sizes = {"B": 2, "T": sum(self.lengths), "H": 4, "G": 2, "K": 8, "V": 5, "lengths": self.packed, "state": self.initial}
        if self.variant in removals.VARIANTS:
            return deltas.Delta(self.variant, **sizes, dtype=self.dtype, gate=self.gate, raw=self.raw)
        return cases.Case(self.variant, **sizes, dtype=self.dtype, gate=self.gate)

    @property
    def offsets(self) -> Tensor | None:
        return None if self.packed is None else torch.tensor([0, *self.packed]).cumsum(0)

    def drawn(self) -> dict[str, Tensor | None]:
        return self.case.drawn()

    def over_tokens(self, name: str) -> bool:
        return "T" in self.case.operator.signatures[self.variant].axes[name]

    def sliced(self, tensors: dict[str, Tensor | None], part: slice) -> dict[str, Tensor | None]:
        return {name: x[:, part] if x is not None and self.over_tokens(name) else x for name, x in tensors.items()}

    def named(self, tensors: dict[str, Tensor | None], query: str = "", gate: str = "") -> dict[str, object]:
        """Arguments by the names of the public function, or by these."""
        case = self.case
        if isinstance(case, deltas.Delta):
            return deltas.named(case, tensors, query or case.row.query, gate or case.row.gate)
        return cases.named(case, tensors)


def pieces(rng: random.Random, total: int, most: int) -> tuple[int, ...]:
    """Lengths of fewer than ``most`` + 1 packed sequences of all tokens, some of them empty."""
    ends = sorted(rng.randrange(total + 1) for _ in range(rng.randrange(most)))
    return tuple(b - a for a, b in itertools.pairwise([0, *ends, total]))


def calls(ranks: int, count: int) -> list[Call]:
    """Random cuts, some of them empty, batch rows and packed sequences, every variant."""
    rng, found = random.Random(ranks), []
    for n in range(count):
        lengths = tuple(rng.choice((0, 1, 5, 40, 64, 70)) for _ in range(ranks))
        total, packed = sum(lengths), None
        if n % 3:
            packed = pieces(rng, total, 6)
        gate = rng.choice(("logsigmoid/16", "zero", "mixture"))
        variant, raw = list(VARIANTS)[n % len(VARIANTS)], rng.random() < 0.5
        found.append(Call(variant, lengths, packed, n % 2 == 0, n % 4 < 2, gate=gate, raw=raw))
    return found


def spawned(function: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Run ``function(rank, *arguments)`` in that many processes with a Gloo group."""
    mp.spawn(_begun, (ranks, _port(), function, arguments), nprocs=ranks)


def _port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _begun(rank: int, ranks: int, port: int, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    function(rank, *arguments)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch keeps groups of meshes, and their threads may ask for Python's lock while it ends, which aborts the process


def run(call: Call, tensors: dict[str, Tensor | None], **options: object) -> ps.Result:
    function = getattr(ps, call.variant)
    return function(**call.named(tensors), output_final_state=call.final, **options)


def gradients(call: Call, tensors: dict[str, Tensor | None], d_output: Tensor, d_final: Tensor, **options: object):
    """Results, and the gradient of every tensor."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items() if x is not None}
    output, final = run(call, leaves, **options)
    results, upstream = ((output, final), (d_output, d_final)) if call.final else ((output,), (d_output,))
    found = torch.autograd.grad(results, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    return output.detach(), final if final is None else final.detach(), dict(zip(leaves, found))


def compare(rank: int, every: list[Call]) -> None:
    """Outputs, final states and all gradients equal those of one process."""
    for call in every:
        case, ranks = call.case, len(call.lengths)
        tensors, rng = call.drawn(), torch.Generator().manual_seed(3)
        shapes = ([case.sizes[axis] for axis in axes] for axes in ("BTHV", "NHKV"))
        d_output, d_final = (torch.randn(shape, generator=rng, dtype=call.dtype) for shape in shapes)
        output, final, wanted = gradients(call, tensors, d_output, d_final, cu_seqlens=call.offsets)
        begin = sum(call.lengths[:rank])
        part = slice(begin, begin + call.lengths[rank])
        context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=call.lengths[rank], cu_seqlens=call.offsets)
        found = gradients(call, call.sliced(tensors, part), d_output[:, part], d_final / ranks, context=context)
        torch.testing.assert_close(found[0], output[:, part], rtol=1e-9, atol=1e-9, msg=lambda text: f"{call} {rank}\n{text}")  # noqa: B023
        if call.final:
            torch.testing.assert_close(found[1], final, rtol=1e-9, atol=1e-9, msg=lambda text: f"{call} {rank} final\n{text}")  # noqa: B023
        for name, x in found[2].items():
            whole = wanted[name]
            if call.over_tokens(name):
                whole = whole[:, part]
            else:
                dist.all_reduce(x)
            torch.testing.assert_close(x, whole, rtol=1e-8, atol=1e-8, msg=lambda text: f"{call} {rank} d{name}\n{text}")  # noqa: B023


def packet(call: Call, tensors: dict[str, Tensor | None], state: Tensor | None) -> Tensor:
    """The summary of a slice as ranks send it."""
    given = call.named({name: x for name, x in tensors.items() if name not in ("q", "u", "initial_state")}, gate="g")
    given["g"] = given.pop("w", given.get("g"))
    found = ps.summary(call.variant, initial_state=state, **given)
    return torch.cat([found.state, found.matrix if isinstance(found, ps.MatrixSummary) else found.decay[..., None]], -1)


def same_bits(rank: int, every: list[Call]) -> None:
    """Outputs have the bits of one process that computes the slices one by one, with the same summaries."""
    for call in every:
        tensors, ends = call.drawn(), [sum(call.lengths[:n]) for n in range(len(call.lengths) + 1)]
        parts = [call.sliced(tensors, slice(*pair)) for pair in itertools.pairwise(ends)]
        packets = [packet(call, parts[n], tensors["initial_state"] if n == 0 else None) for n in range(rank)]
        entered = combined(packets, range(rank), call.case.V, MATRIX if call.variant in removals.VARIANTS else DIAGONAL)
        alone = run(call, parts[rank] | {"initial_state": entered if rank else tensors["initial_state"]}).output
        context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=call.lengths[rank], lengths=call.lengths)
        assert torch.equal(run(call, parts[rank], context=context).output, alone), call


def carry_nan(rank: int) -> None:
    """NaN in a decay or a value of one rank: no rank raises an error, and results are NaN where those of one process are.

    Decays are called as layers call them: those that are NaN are no error.
    """
    for variant, row in VARIANTS.items():
        call = Call(variant, (5, 9), None, True, True)
        for name, token in itertools.product(("v", "g") if "T" in row.decay else ("v",), (2, 7)):
            tensors, part = call.drawn(), (slice(0, 5), slice(5, 14))[rank]
            tensors[name][0, token].view(-1)[0] = torch.nan
            d_output, d_final = torch.ones(2, 14, 4, 5, dtype=call.dtype), torch.ones(2, 4, 8, 5, dtype=call.dtype)
            own = call.sliced(tensors, part)
            context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=call.lengths[rank])
            with known_values("g"):
                wanted, final = run(call, tensors, impl="reference")
                leaves = {name: x.clone().requires_grad_() for name, x in own.items() if x is not None}
                results = run(call, leaves, context=context)
            torch.autograd.grad(results, list(leaves.values()), (d_output[:, part], d_final))
            assert results[1].isnan()[final.isnan()].all(), (variant, name)
            assert results[0].isnan()[wanted[:, part].isnan()].all(), (variant, name)
            assert rank * 5 + 5 > token or not results[0].isnan().any(), (variant, name)


def lose_a_rank(rank: int) -> None:
    """After rank 1 has ended, backward passes, calls and what layers exchange raise errors on rank 0 that name them."""
    x = torch.randn(1, 5, 2, 4, requires_grad=True)
    context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=5)
    output = ps.linear_attention(x, x, x, context=context).output
    if rank == 1:
        os._exit(0)
    for function, call in (
        ("linear_attention", lambda: output.sum().backward()),
        ("linear_attention", lambda: ps.linear_attention(x, x, x, context=context, output_final_state=True)),
        ("ContextParallel", lambda: borders.earlier(context, x)),
        ("ContextParallel", lambda: borders.total(context, x)),
        ("ContextParallel", lambda: ps.distributed.ContextParallel(dist.group.WORLD, tokens=5)),
    ):
        with pytest.raises(ExchangeError, match=f"{function}: all ranks .* take part in all_.*, got an error on rank 0 of 2"):
            call()
    os._exit(0)


def compare_and_lose_a_rank(rank: int, every: list[Call]) -> None:
    """All that is tested of two ranks, in one start of processes."""
    compare(rank, every)
    carry_nan(rank)
    lose_a_rank(rank)
