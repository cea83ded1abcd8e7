"""Context parallelism of models: losses and gradients of all ranks beside those of one GPU.

    torchrun --nproc-per-node 2 benchmarks/context_parallel_models.py [--json FILE]

Small models of every kind, with cuts of batch rows and of packed sequences: losses and gradients, summed over ranks, are compared with
those of all tokens on one GPU. ``parallel_training.py`` measures training steps.
"""

import argparse
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as ps
from penstock.layers import GLAConfig, SoftmaxAttentionConfig
from penstock.layers.chains import Choice, recorded
from penstock.models import CausalLM, gla, hybrid, linear, mamba2, retnet, rwkv5, rwkv6

SMALL = {"vocab_size": 512, "hidden_size": 256, "num_layers": 2}
CUTS = [([300, 213], None), ([300, 213], [0, 5, 5, 299, 302, 513]), ([511, 2], [0, 510, 513]), ([0, 513], None), ([513, 0], [0, 513])]


def small():
    wide = gla(**SMALL, num_heads=2)
    return {
        "rwkv6": rwkv6(**SMALL), "rwkv5": rwkv5(**SMALL), "gla": wide, "retnet": retnet(**SMALL, num_heads=2),
        "gla, convolutions": replace(wide, mixer=GLAConfig(num_heads=2, conv_size=4)), "linear": linear(**SMALL, num_heads=4),
        "mamba2": mamba2(**SMALL), "hybrid": hybrid(mamba2(**SMALL), SoftmaxAttentionConfig(4, 2), [1]),
        "hybrid, window": hybrid(rwkv6(**SMALL), SoftmaxAttentionConfig(4, 2, window_size=100), [0]),
    }  # fmt: skip


def gradients(model, ids, labels, **options):
    model.zero_grad()
    loss = model.loss(ids, labels, **options)
    loss.backward()
    return loss.detach(), [one.grad.float() for one in model.parameters()]


def checked(name, config, dtype):
    """The largest relative error of loss and gradients, and the forms of chains that ran."""
    rank, worst, forms = dist.get_rank(), 0.0, Counter()
    for n, (lengths, ends) in enumerate(CUTS):
        torch.manual_seed(n)
        model = CausalLM(config).cuda()
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn_like(one) * (0.3 if one.dim() < 2 else one.shape[-1] ** -0.5 * 0.3))
        for one in model.parameters():
            dist.broadcast(one.data, 0)
        model = model.to(dtype)
        model.gradient_checkpointing = (False, True, "selective")[n % 3]
        torch.manual_seed(n)
        ids, labels = (torch.randint(512, (1 if ends else 2, 513)).cuda() for _ in range(2))
        offsets = None if ends is None else torch.tensor(ends).cuda()
        wanted, known = gradients(model, ids, labels, cu_seqlens=offsets)
        part = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        context = ps.distributed.ContextParallel(dist.group.WORLD, tokens=lengths[rank], cu_seqlens=offsets)
        with recorded(model) as found:
            loss, grads = gradients(model, ids[:, part].contiguous(), labels[:, part].contiguous(), context=context)
        forms.update(f"{one.chain} {one.form}" for one in found if isinstance(one, Choice))
        dist.all_reduce(loss)
        for one in grads:
            dist.all_reduce(one)
        error = torch.cat([(one - other).flatten() for one, other in zip(grads, known)]).norm()
        error = float(error / torch.cat([one.flatten() for one in known]).norm())
        worst = max(worst, error, abs(float((loss - wanted) / wanted)))
        assert worst < {torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype], (name, lengths, ends, error, float(loss), float(wanted))
    return worst, forms


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found, first = [], dist.get_rank() == 0
    for name, config in small().items():
        for dtype in (torch.float32, torch.bfloat16):
            error, forms = checked(name, config, dtype)
            found.append({"model": name, "dtype": str(dtype), "error": error, "forms": dict(forms)})
            if first:
                print(json.dumps(found[-1]), flush=True)
    if given.json and first:
        given.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "found": found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
