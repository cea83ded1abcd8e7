"""Times training steps and prompts of whole models on one GPU, ours and fla's, with where the time goes.

    python benchmarks/training_step.py rwkv6 --out FILE.json

A training step is forward and backward of the mean cross entropy of 8 x 2048 tokens in bfloat16, without the optimizer. Weights are
random; with ``--autocast`` they are float32, under autocast. Work is counted as 6 x parameters x tokens (prompts: 2 x), with all
parameters but the embeddings.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict

import torch

from penstock.models import CausalLM, gla, mamba2, rwkv6

B, T, V = 8, 2048, {"rwkv6": 65536, "gla": 32000, "mamba2": 50288}
OURS = {
    "rwkv6": lambda layers: rwkv6(vocab_size=V["rwkv6"], hidden_size=2048, num_layers=layers),
    "gla": lambda layers: gla(vocab_size=V["gla"], hidden_size=2048, num_layers=layers, num_heads=4),
    "mamba2": lambda layers: mamba2(vocab_size=V["mamba2"], hidden_size=2048, num_layers=layers),
}
CLASSES = (  # first match: names of kernels by what they do
    ("matrix products", ("gemm", "nvjet", "cutlass", "sm90_xmma", "ampere_", "_matmul")),
    ("recurrence", ("penstock_chunk", "penstock_walk", "penstock_rec", "penstock_seg", "chunk_", "fused_recurrent")),
    ("loss", ("cross_entropy", "logsumexp", "softmax")),
    ("norms", ("norm",)),
    ("copies and fills", ("Memcpy", "Memset", "copy_", "fill", "cat", "index")),
    ("sums", ("reduce", "sum")),
    ("element-wise", ("",)),
)


def fla_model(name: str, layers: int):
    if name == "rwkv6":
        from fla.models import RWKV6Config, RWKV6ForCausalLM

        config = RWKV6Config(
            hidden_size=2048, expand_k=1.0, num_hidden_layers=layers, num_heads=32, intermediate_size=7168, vocab_size=V[name]
        )
        return RWKV6ForCausalLM(config)
    from fla.models import GLAConfig, GLAForCausalLM

    return GLAForCausalLM(GLAConfig(hidden_size=2048, num_hidden_layers=layers, num_heads=4, vocab_size=V[name]))


def timed(call, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def classes(call) -> dict[str, float]:
    """Milliseconds of kernels by class."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        group = next(label for label, words in CLASSES if any(word in event.key for word in words))
        found[group] += event.self_device_time_total / 1e3
        names[event.key[:90]] += event.self_device_time_total / 1e3
    return {"classes": dict(found), "kernels": dict(sorted(names.items(), key=lambda item: -item[1])[:25])}


def measure(candidate: str, model, step, prompt, steps: int) -> dict:
    parameters = sum(p.numel() for name, p in model.named_parameters() if "embeddings" not in name)
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training = timed(step, steps)
    peak = torch.cuda.max_memory_allocated()
    with torch.no_grad():
        prompt()
        prompts = timed(prompt, steps)
    train, read = statistics.median(training), statistics.median(prompts)
    row = {
        "candidate": candidate, "parameters": parameters, "first_step_s": first, "training_ms": train, "training_samples": training,
        "prompt_ms": read, "prompt_samples": prompts, "tokens_per_s": B * T / train * 1e3, "peak_gb": peak / 1e9,
        "share_of_700_tflops": 6 * parameters * B * T / (train * 1e-3) / 700e12,
        "prompt_share": 2 * parameters * B * T / (read * 1e-3) / 700e12,
    }  # fmt: skip
    print(
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items() if "samples" not in name}, flush=True
    )
    row["profile"] = classes(step)
    print(row["profile"]["classes"], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(OURS))
    parser.add_argument("--layers", type=int, help="default: 24, of mamba2 48")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--candidates", default="ours,selective,compiled,fla")
    parser.add_argument("--autocast", action="store_true", help="float32 weights, products in bfloat16")
    parser.add_argument("--out")
    given = parser.parse_args()
    given.layers = given.layers or (48 if given.model == "mamba2" else 24)
    torch.manual_seed(0)
    ids = torch.randint(V[given.model], (B, T + 1), device="cuda")
    rows, cast = [], torch.autocast("cuda", torch.bfloat16, enabled=given.autocast)
    for candidate in given.candidates.split(","):
        if candidate == "fla" and given.model == "mamba2":
            print("fla's Mamba-2 runs kernels of the package mamba_ssm")
            continue
        gc.collect()
        torch.cuda.empty_cache()
        with torch.device("cuda" if candidate == "fla" else "meta"):
            model = fla_model(given.model, given.layers) if candidate == "fla" else CausalLM(OURS[given.model](given.layers))
        model = model.to(torch.float32 if given.autocast else torch.bfloat16).to_empty(device="cuda")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        if candidate == "fla":

            def step(model=model):
                with cast:
                    loss = model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss  # it shifts the labels
                loss.backward()
                model.zero_grad(set_to_none=True)

            def prompt(model=model):
                with cast:
                    model(input_ids=ids[:, :-1], logits_to_keep=1)
        else:
            if candidate == "compiled":
                for layer in model.layers:
                    layer.compile(dynamic=False)
            model.gradient_checkpointing = "selective" if candidate == "selective" else False

            def step(model=model):
                with cast:
                    loss = model.loss(ids[:, :-1], ids[:, 1:])
                loss.backward()
                model.zero_grad(set_to_none=True)

            def prompt(model=model):
                with cast:
                    model.head(model.hidden(ids[:, :-1])[0][:, -1:])

        try:
            rows.append(measure(candidate, model, step, prompt, given.steps))
        except Exception as failure:
            print(candidate, "failed:", repr(failure)[-600:], flush=True)
        del model, step, prompt
    if given.out:
        with open(given.out, "w") as file:
            setting = {"model": given.model, "layers": given.layers, "autocast": given.autocast}
            json.dump({**setting, "device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
