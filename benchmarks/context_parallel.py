"""Context parallelism of operators: time on several GPUs beside one GPU, in one run.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--variants rwkv6 kda] [--tokens 65536] [--impl NAME] [--json FILE]

``--tokens`` is for each GPU, ``--impl`` for all variants. Weak: a GPU's slice alone over the same slice as one of N. Strong: all tokens on
one GPU over N times the time of N GPUs. Every rank also computes the whole call: its own results are compared with that first. Times are
medians of the slowest rank: of a call that begins on idle GPUs, while the host launches the next kernels, and of a call in a row, as in a
model.
"""

import argparse
import itertools
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as ps
from penstock.delta import variants as removals
from penstock.recurrence import variants as sums

VARIANTS = {**sums.VARIANTS, **removals.VARIANTS}
WIDE = ("kda", "gated_delta_rule", "delta_rule")
"""Variants with heads of 128; others have 64."""
SIZES = {name: (32, 128 if name in WIDE else 64) for name in VARIANTS}
ROW = 8
"""Calls in a row."""


def draw(variant, tokens, device):
    """The same tensors on every rank."""
    H, D = SIZES[variant]
    random = torch.Generator(device).manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=random, device=device)

    row = VARIANTS[variant]
    axes = {"B": 1, "T": tokens, "H": H, "K": D}
    q, k, v = (normal(1, tokens, H, D).mul_(0.1).bfloat16() for _ in range(3))
    found = {row.query: q, "k": k, "v": v}
    if variant in removals.VARIANTS:
        found |= removal(row, normal, (1, tokens, H, D))
    g = normal(*(axes[axis] for axis in row.decay)) if row.decay else None
    if g is not None:  # RWKV-7 gets raw decays, as from its layers
        g = g.bfloat16() if variant == "rwkv7" else -torch.exp(g - 4).bfloat16()
    if variant == "retention":
        g = g.float()
    if g is not None:
        found[row.gate] = g
    if variant in sums.VARIANTS and row.bonus:
        found["u"] = normal(H, D)
    return found, normal(1, tokens, H, D).bfloat16()


def removal(row, normal, sizes):
    """Keys of norm 1, and beta or a and b."""
    keys = torch.nn.functional.normalize(normal(*sizes), dim=-1)
    if row.streams == 1:
        return {"k": keys.bfloat16(), "beta": normal(*sizes[:3]).sigmoid().bfloat16()}
    return {"a": -keys.bfloat16(), "b": (keys * normal(*sizes[:3], 1).sigmoid()).bfloat16()}


def sliced(tensors, begin, end):
    return {n: x[:, begin:end].contiguous() if x.dim() > 2 else x for n, x in tensors.items()}


def call(variant, x, impl, context=None):
    raw = {"raw_decay": True} if variant == "rwkv7" else {}
    return getattr(ps, variant)(**x, **raw, impl=impl, context=context).output


def timed(function, samples, calls=1):
    """Milliseconds of a call, in a row of ``calls``."""
    for _ in range(3):
        function()
    found = []
    for _ in range(samples):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        spent = torch.tensor(begin.elapsed_time(end) / calls, device="cuda")
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        found.append(float(spent))
    return statistics.median(found)


def measured(variant, tokens, samples, impl):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, upstream = draw(variant, ranks * tokens, "cuda")
    begin = rank * tokens
    own, d_own = sliced(whole, begin, begin + tokens), upstream[:, begin : begin + tokens].contiguous()
    context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=tokens, lengths=[tokens] * ranks)
    found = {"variant": variant, "tokens": tokens, "ranks": ranks, "impl": impl}

    def forward(x, context=None):
        with torch.no_grad():
            return call(variant, x, impl, context)

    def both(x, d, context=None):
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        return torch.autograd.grad(call(variant, leaves, impl, context), list(leaves.values()), d)

    def error(x, y):
        return float((x.float() - y.float()).norm() / y.float().norm())

    found["error"] = error(forward(own, context), forward(whole)[:, begin : begin + tokens])
    pairs = zip(both(own, d_own, context)[:3], both(whole, upstream)[:3])
    found["gradients"] = max(error(x, y[:, begin : begin + tokens]) for x, y in pairs)
    assert max(found["error"], found["gradients"]) < 1e-2, found
    passes = {"forward": forward, "both": lambda x, context=None: both(x, upstream if x is whole else d_own, context)}
    for (name, run), calls in itertools.product(passes.items(), (1, ROW)):
        slice_alone, all_alone = timed(lambda: run(own), samples, calls), timed(lambda: run(whole), samples, calls)  # noqa: B023
        parallel = timed(lambda: run(own, context), samples, calls)  # noqa: B023
        found[name + f" in a row of {calls}" * (calls > 1)] = {
            "slice alone": slice_alone, "all alone": all_alone, "parallel": parallel, "weak": slice_alone / parallel,
            "strong": all_alone / ranks / parallel,
        }  # fmt: skip
    H, D = SIZES[variant]
    columns = 0 if ranks == 2 else D if variant in removals.VARIANTS else 1
    packet = torch.zeros(1, H, D, D + columns, device="cuda")
    packets = [torch.empty_like(packet) for _ in range(ranks)]
    found["exchange"] = timed(lambda: dist.all_gather(packets, packet), samples)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = []
    for variant in given.variants:
        found.append(measured(variant, given.tokens, given.samples, given.impl))
        if dist.get_rank() == 0:
            print(json.dumps(found[-1]), flush=True)
        torch.cuda.empty_cache()
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "found": found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
