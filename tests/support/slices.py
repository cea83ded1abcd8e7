"""Mixers and models over the ranks of a process group, beside the same calls on one process."""

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from architectures import flat, model_of, randomised
from passing import alone
from ranks import pieces
from torch import Tensor, nn

import penstock as ps
from penstock.layers import Mixer, MixerConfig

C = 24
"""The hidden size of mixers."""


class Cut(NamedTuple):
    """The tokens of a batch and their slices."""

    lengths: tuple[int, ...]
    """Tokens of each rank."""
    packed: tuple[int, ...] | None
    """Lengths of packed sequences, or None for two batch rows."""

    @property
    def offsets(self) -> Tensor | None:
        return None if self.packed is None else torch.tensor([0, *self.packed]).cumsum(0)

    @property
    def shape(self) -> tuple[int, int]:
        return 2 if self.packed is None else 1, sum(self.lengths)

    @property
    def count(self) -> int:
        return 2 if self.packed is None else len(self.packed)

    def part(self, rank: int) -> slice:
        begin = sum(self.lengths[:rank])
        return slice(begin, begin + self.lengths[rank])


def cuts(ranks: int, count: int, seed: int = 0) -> list[Cut]:
    """Random cuts: slices shorter than convolutions, empty ones, batch rows and packed sequences, some of them empty."""
    rng, found = random.Random(100 * ranks + seed), []
    for n in range(count):
        lengths = tuple(rng.choice((0, 1, 2, 3, 7, 12)) for _ in range(ranks))
        total, packed = sum(lengths), None
        if n % 3:
            packed = pieces(rng, total, 5)
        found.append(Cut(lengths, packed))
    return found


def context_of(cut: Cut, rank: int) -> Any:
    return ps.distributed.ContextParallel(dist.group.WORLD, tokens=cut.lengths[rank], cu_seqlens=cut.offsets)


def close(found: Tensor, wanted: Tensor, *what: object) -> None:
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda text: f"{what}\n{text}")


def models_alike(rank: int, every: list[tuple[str, Cut]]) -> None:
    """Logits, states, losses and all gradients equal those of one process."""
    for n, (name, cut) in enumerate(every):
        model, rng = model_of(name, torch.float64), torch.Generator().manual_seed(n)
        ids, labels = (torch.randint(13, cut.shape, generator=rng) for _ in range(2))
        labels[torch.rand(cut.shape, generator=rng) < (1.0 if n % 5 == 2 else 0.3)] = -100  # sometimes no label counts
        part, context, what = cut.part(rank), context_of(cut, rank), (name, cut, rank)
        with torch.no_grad():
            logits, state = model(ids, None, cut.offsets)
            found = model(ids[:, part], context=context)
        close(found.logits, logits[:, part], *what, "logits")
        for one, other in zip(flat(found.state), flat(state)):
            close(one, other, *what, "state")
        model.gradient_checkpointing = (False, True, "selective")[n % 3]
        reduction = ("mean", "sum", "mean", "none")[n % 4]
        weights = torch.randn(cut.shape, generator=rng, dtype=torch.float64) if reduction == "none" else torch.ones(1, 1)
        whole = model.loss(ids, labels, cut.offsets, reduction=reduction)
        wanted = _gradients((whole * weights).sum(), model)
        loss = model.loss(ids[:, part], labels[:, part], reduction=reduction, context=context)
        gradients = _gradients((loss * (weights[:, part] if reduction == "none" else weights)).sum(), model)
        if reduction == "none":
            close(loss, whole[:, part], *what, "losses")
        else:
            total = loss.detach().clone()
            dist.all_reduce(total)
            close(total, whole, *what, "loss")
        for parameter, one in gradients.items():
            dist.all_reduce(one)
            close(one, wanted[parameter], *what, model.gradient_checkpointing, reduction, "gradient of", parameter)


def _gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found))


def mixers_alike(rank: int, every: list[tuple[MixerConfig, Cut, Cut]]) -> None:
    """Outputs and states of two calls, the second of which continues the first, and all gradients equal those of one process."""
    for config, *both in every:
        torch.manual_seed(0)
        mixer = alone(config.build(C, 1, 3))
        randomised(mixer)
        mixer, rng = mixer.double(), torch.Generator().manual_seed(1)
        inputs, upstream = ([torch.randn(*cut.shape, C, generator=rng, dtype=torch.float64) for cut in both] for _ in range(2))
        calls = [({"cu_seqlens": cut.offsets}, slice(None)) for cut in both]
        d_states: list[Tensor] = []
        wanted = _two_calls(mixer, inputs, upstream, d_states, calls, 1)
        calls = [({"context": context_of(cut, rank)}, cut.part(rank)) for cut in both]
        found = _two_calls(mixer, inputs, upstream, d_states, calls, dist.get_world_size())
        what = config, both, rank
        parts = [cut.part(rank) for cut in both]
        for n, part in enumerate(parts):
            close(found.outputs[n], wanted.outputs[n][:, part], *what, "output", n)
            close(found.of_inputs[n], wanted.of_inputs[n][:, part], *what, "gradient of x", n)
        for n, (one, other) in enumerate(zip(found.states, wanted.states)):
            close(one, other, *what, "state", n)
        for name, one in found.of_parameters.items():
            dist.all_reduce(one)
            close(one, wanted.of_parameters[name], *what, "gradient of", name)


class _Results(NamedTuple):
    outputs: list[Tensor]
    states: list[Tensor]
    of_inputs: list[Tensor]
    of_parameters: dict[str, Tensor]


def _two_calls(
    mixer: Mixer, inputs: list[Tensor], upstream: list[Tensor], d_states: list[Tensor], calls: list[Any], ranks: int
) -> _Results:
    """The results, for gradients of outputs and of the states after both calls; the latter are filled in by the first use."""
    state, outputs, given = None, [], []
    for x, (options, part) in zip(inputs, calls):
        given.append(x[:, part].clone().requires_grad_())
        y, state = mixer(given[-1], state, **options)
        outputs.append(y)
    states, rng = [one for one in flat(state) if one.is_floating_point()], torch.Generator().manual_seed(2)
    if not d_states:
        d_states += [torch.randn(one.shape, generator=rng, dtype=torch.float64) for one in states]
    results = [(y, d[:, part]) for y, d, (_, part) in zip(outputs, upstream, calls)]
    results += [(one, d / ranks) for one, d in zip(states, d_states) if one.requires_grad]
    parameters = dict(mixer.named_parameters())
    leaves = [*given, *parameters.values()]
    ends, d_ends = zip(*results)
    grads = torch.autograd.grad(ends, leaves, d_ends, allow_unused=True, materialize_grads=True)
    found = [[one.detach() for one in tensors] for tensors in (outputs, flat(state))]
    return _Results(*found, list(grads[: len(given)]), dict(zip(parameters, grads[len(given) :])))


def pairs_of_cuts(ranks: int, count: int) -> list[tuple[Cut, Cut]]:
    """Cuts of two calls with the same number of sequences."""
    found, every = [], iter(cuts(ranks, 100 * count, seed=7))
    while len(found) < count:
        one = next(every)
        found.append((one, next(other for other in every if other.count == one.count and (other.packed is None) == (one.packed is None))))
    return found


def transformers_alike(rank: int, every: list[tuple[str, Cut]]) -> None:
    """Losses with labels that are shifted across borders, logits, caches and all gradients equal those of one process."""
    from penstock.models.huggingface import PenstockForCausalLM
    from penstock.models.huggingface.cache import CACHE

    for n, (name, cut) in enumerate(every):
        model, rng = PenstockForCausalLM.of(model_of(name, torch.float64)), torch.Generator().manual_seed(n)
        ids, labels = (torch.randint(13, cut.shape, generator=rng) for _ in range(2))
        labels[torch.rand(cut.shape, generator=rng) < 0.2] = -100
        part, what, options = cut.part(rank), (name, cut, rank), {"num_items_in_batch": 5} if n % 2 else {}
        packing = {} if cut.packed is None else {"cu_seqlens": cut.offsets}
        whole = model(ids, labels=labels, use_cache=True, **packing, **options)
        found = model(ids[:, part], labels=labels[:, part], use_cache=True, context=context_of(cut, rank), **options)
        close(found.logits, whole.logits[:, part], *what, "logits")
        for one, other in zip(flat(found[CACHE].state), flat(whole[CACHE].state)):
            close(one, other, *what, "state")
        wanted, gradients, total = _gradients(whole.loss, model), _gradients(found.loss, model), found.loss.detach().clone()
        dist.all_reduce(total)
        close(total, whole.loss, *what, "loss")
        for parameter, one in gradients.items():
            dist.all_reduce(one)
            close(one, wanted[parameter], *what, "gradient of", parameter)


class _Loss(nn.Module):
    """The loss as a module, as wrappers call it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return self.model.loss(ids, labels, **options)


def averaged_alike(rank: int, name: str) -> None:
    """DDP and FSDP over two replicas of two slices: averages of gradients over four ranks are those of the mean of two losses."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    alone, rng = model_of(name, torch.float64), torch.Generator().manual_seed(0)
    batches = [[torch.randint(13, (2, 9), generator=rng) for _ in range(2)] for _ in range(2)]
    batches[0][1][:, 4:] = -100
    wanted = _gradients(sum(alone.loss(*batch) for batch in batches) / 2, alone)
    ids, labels = batches[rank // 2]
    part, tokens = (slice(0, 3), 3) if rank % 2 == 0 else (slice(3, 9), 6)
    context = ps.distributed.ContextParallel(mesh["cp"], tokens=tokens)
    every = mesh["dp", "cp"]._flatten("all")
    for sharded in (False, True):
        model = model_of(name, torch.float64)
        step: nn.Module = _Loss(model)
        if sharded:
            for one in (*model.layers, model):
                fully_shard(one, mesh=every)
            register_fsdp_forward_method(model, "loss")
        else:
            step = nn.parallel.DistributedDataParallel(step)
        (step(ids[:, part], labels[:, part], context=context) * 2).backward()
        for parameter, one in model.named_parameters():
            found = one.grad.full_tensor() if sharded else one.grad
            close(found, wanted[parameter], name, sharded, rank, parameter)
