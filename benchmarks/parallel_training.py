"""Training steps of RWKV-6 on several GPUs beside one: FSDP2, context parallelism and both, in one run.

    torchrun --nproc-per-node 2 benchmarks/parallel_training.py [--layers 24] [--tokens 65536] [--cases one whole fsdp ...] [--json FILE]

A step is forward, backward and AdamW of the mean loss, in bfloat16 with float32 weights and gradient checkpointing. ``--tokens`` is for
each GPU. Cases: ``one``, a sequence of a GPU's tokens on one GPU; ``whole``, a sequence of all tokens on one GPU; ``fsdp``, a sequence of
its own on every GPU, weights sharded; ``cp``, one sequence of all tokens, weights replicated (DDP); ``both``, with weights sharded;
``small``, context parallelism of a model of 8 layers with 512 channels and 8 times as many tokens.

The losses of ``cp`` and ``both`` are compared with those of ``whole`` step by step: same weights, same tokens.
"""

import argparse
import functools
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.models import CausalLM, rwkv6

VOCAB, STEPS = 65536, 4
CASES = ("one", "whole", "fsdp", "cp", "both", "small")


class Loss(nn.Module):
    """The loss as a forward pass, for DDP."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels, context):
        return self.model.loss(ids, labels, context=context)


def build(case, layers):
    torch.manual_seed(0)
    size = {"hidden_size": 512, "num_layers": 8} if case == "small" else {"hidden_size": 2048, "num_layers": layers}
    with torch.device("cuda"):
        model = CausalLM(rwkv6(vocab_size=VOCAB, **size))
    model.gradient_checkpointing = True
    return model


def measured(case, layers, tokens):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = 8 * tokens if case == "small" else tokens
    cut = case in ("cp", "both", "small")
    model = build(case, layers)
    count = sum(p.numel() for p in model.parameters())
    if case in ("fsdp", "both"):
        module = Loss(ps.distributed.shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    elif cut:
        module = DistributedDataParallel(Loss(model), device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    else:
        module = Loss(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    rows = torch.randint(VOCAB, (1, ranks * each + 1), generator=torch.Generator().manual_seed(1))
    begin, length = (0, ranks * each) if case == "whole" else (rank * each if case in ("fsdp", "cp", "both", "small") else 0, each)
    ids, labels = (rows[:, begin + shift : begin + shift + length].cuda() for shift in (0, 1))
    context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=each, lengths=[each] * ranks) if cut else None
    cast = functools.partial(torch.autocast, "cuda", torch.bfloat16, enabled=case not in ("fsdp", "both"))
    torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for _ in range(2 if case == "small" else STEPS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with cast():
            loss = module(ids, labels, context)
        (loss * (ranks if cut else 1)).backward()  # DDP and FSDP2 take means
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - start, float(loss.detach())], device="cuda")
        slowest = spent.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(spent)
        seconds.append(float(slowest[0]))
        losses.append(float(spent[1]) / (1 if cut else ranks))
    step = statistics.median(seconds[1:])
    processed = length if case in ("one", "whole") else ranks * each
    return {
        "case": case, "parameters": count, "tokens a step": processed, "s a step": step, "tokens/s": processed / step, "losses": losses,
        "peak GB a GPU": torch.cuda.max_memory_allocated() / 1e9, "first step s": seconds[0],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    found = []
    for case in given.cases:
        try:
            found.append(measured(case, given.layers, given.tokens))
        except torch.OutOfMemoryError as error:
            found.append({"case": case, "error": str(error)[:200]})
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(json.dumps(found[-1]), flush=True)
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "found": found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
