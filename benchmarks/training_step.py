"""Times training steps and prompts of whole models on one GPU, ours and fla's, with where the time goes.

    python benchmarks/training_step.py rwkv6 [--shape 8x2048] [--prompt 1x8192] [--candidates ours,fla] [--tiny] --out FILE.json

A training step is forward and backward of the mean cross entropy of ``--shape`` tokens in bfloat16, without the optimizer. Weights are
random; with ``--autocast`` they are float32, under autocast. Work is counted as 6 x parameters x tokens (prompts: 2 x), with all
parameters but the embeddings. ``--tiny`` runs small models, also on a CPU.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict

import torch
from random_models import SIZES, config_of

from penstock.models import CausalLM, Config

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Shape = tuple[int, int]
CLASSES = (  # first match: names of kernels by what they do
    ("matrix products", ("gemm", "nvjet", "cutlass", "sm90_xmma", "ampere_", "_matmul")),
    (
        "recurrence",
        (
            "penstock_chunk",
            "penstock_walk",
            "penstock_rec",
            "penstock_seg",
            "penstock_delta",
            "penstock_gated",
            "penstock_gdn",
            "penstock_kda",
            "penstock_rwkv7_steps",
            "penstock_rwkv7_chain",
            "penstock_rwkv7_gradients",
            "chunk_",
            "fused_recurrent",
            "dplr",
            "kda_",
            "recompute_w_u",
            "wy_fast",
            "tri_inv",
            "solve_tril",
        ),
    ),
    ("loss", ("cross_entropy", "logsumexp", "softmax")),
    ("norms", ("norm",)),
    ("copies and fills", ("Memcpy", "Memset", "copy_", "fill", "cat", "index")),
    ("sums", ("reduce", "sum")),
    ("element-wise", ("",)),
)


def fla_model(name: str, config: Config) -> torch.nn.Module:
    """fla's model of the same sizes."""
    import fla_models

    fla_models.tune_briefly()
    return fla_models.model_of_sizes(name, config)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def timed(call, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of calls, each measured alone, and those until the host is done."""
    found, host = [], []
    for _ in range(steps):
        synchronize()
        begin = time.perf_counter()
        call()
        host.append((time.perf_counter() - begin) * 1e3)
        synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    return found, host


def classes(call) -> dict:
    """Milliseconds of kernels by class, from the first one to the end of the last, and the longest times in which the GPU waits.

    A gap has its milliseconds, those since the first kernel, and the names of the kernels around it.
    """
    kind = torch.profiler.ProfilerActivity.CUDA if GPU else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as seen:
        call()
        synchronize()
    found: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        group = next(label for label, words in CLASSES if any(word in event.key for word in words))
        found[group] += event.self_device_time_total / 1e3
        names[event.key[:90]] += event.self_device_time_total / 1e3
    on_gpu = [one for one in seen.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    there = sorted((one.time_range.start / 1e3, one.time_range.end / 1e3, one.name[:60]) for one in on_gpu)
    gaps, last, before = [], there[0][0] if there else 0.0, ""
    for begin, end, name in there:
        if begin > last:
            gaps.append((begin - last, begin - there[0][0], before, name))
        if end > last:
            last, before = end, name
    return {
        "classes": dict(found), "whole": last - there[0][0] if there else 0.0, "idle": sum(gap for gap, *_ in gaps),
        "kernels": dict(sorted(names.items(), key=lambda item: -item[1])[:25]), "gaps": sorted(gaps, reverse=True)[:12],
    }  # fmt: skip


def measure(candidate: str, model, step, prompt, shape: Shape, prompt_shape: Shape, steps: int) -> dict:
    parameters = sum(p.numel() for name, p in model.named_parameters() if "embeddings" not in name)
    begin = time.perf_counter()
    step()
    synchronize()
    first = time.perf_counter() - begin
    step()
    synchronize()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    training, host = timed(step, steps)
    peak = torch.cuda.max_memory_allocated() if GPU else 0
    with torch.no_grad():
        prompt()
        prompts, prompt_host = timed(prompt, steps)
    train, read = statistics.median(training), statistics.median(prompts)
    tokens, read_tokens = shape[0] * shape[1], prompt_shape[0] * prompt_shape[1]
    row = {
        "candidate": candidate, "parameters": parameters, "first_step_s": first, "training_ms": train, "training_samples": training,
        "host_ms": statistics.median(host), "prompt_ms": read, "prompt_samples": prompts, "prompt_host_ms": statistics.median(prompt_host),
        "tokens_per_s": tokens / train * 1e3, "peak_gb": peak / 1e9,
        "share_of_700_tflops": 6 * parameters * tokens / (train * 1e-3) / 700e12,
        "prompt_share": 2 * parameters * read_tokens / (read * 1e-3) / 700e12,
    }  # fmt: skip
    print(
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items() if "samples" not in name}, flush=True
    )
    profile = row["profile"] = classes(step)
    print(profile["classes"], f"sum {sum(profile['classes'].values()):.1f} of {profile['whole']:.1f} ms", flush=True)
    for gap, at, before, after in profile["gaps"][:6]:
        print(f"    idle {gap:.2f} ms after {at:.1f}, between {before} and {after}")
    for name, ms in list(profile["kernels"].items())[:12]:
        print(f"    {ms:8.2f} ms  {name}")
    return row


def calls(candidate: str, model, ids: torch.Tensor, read: torch.Tensor, cast):
    """A training step and a prompt."""
    if candidate == "fla":

        def step():
            with cast:
                loss = model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss  # it shifts the labels
            loss.backward()
            model.zero_grad(set_to_none=True)

        def prompt():
            with cast:
                model(input_ids=read, logits_to_keep=1)

        return step, prompt
    if candidate == "compiled":
        for layer in model.layers:
            layer.compile(dynamic=False)
    model.gradient_checkpointing = "selective" if candidate == "selective" else False

    def own_step():
        with cast:
            loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        model.zero_grad(set_to_none=True)

    def own_prompt():
        with cast:
            model.head(model.hidden(read)[0][:, -1:])

    return own_step, own_prompt


def compare(rows: list[dict]) -> None:
    """Print each candidate beside fla."""
    peer = next((row for row in rows if row["candidate"] == "fla"), None)
    for row in rows if peer else ():
        speed, read = (peer[key] / row[key] for key in ("training_ms", "prompt_ms"))
        memory = row["peak_gb"] / peer["peak_gb"] if peer["peak_gb"] else 0
        print(
            f"{row['candidate']}: {speed:.2f} times as fast as fla, {memory:.2f} of its memory, prompts {read:.2f} times as fast",
            flush=True,
        )


def main() -> None:
    shape = lambda given: tuple(map(int, given.split("x")))  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SIZES))
    parser.add_argument("--layers", type=int, help="default: those of the published model")
    parser.add_argument("--shape", type=shape, default=(8, 2048), help="sequences x tokens of a training step")
    parser.add_argument("--prompt", type=shape, help="sequences x tokens; default: those of a training step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--candidates", default="ours,selective,compiled,fla")
    parser.add_argument("--autocast", action="store_true", help="float32 weights, products in bfloat16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    given.prompt = given.prompt or given.shape
    config = config_of(given.model, given.tiny, **({"num_layers": given.layers} if given.layers else {}))
    torch.manual_seed(0)
    (B, T), (P, L) = given.shape, given.prompt
    ids, read = torch.randint(config.vocab_size, (B, T + 1), device=DEVICE), torch.randint(config.vocab_size, (P, L), device=DEVICE)
    rows, cast = [], torch.autocast(DEVICE, torch.bfloat16, enabled=given.autocast)
    for candidate in given.candidates.split(","):
        if candidate == "fla" and given.model == "mamba2":
            print("fla's Mamba-2 runs kernels of the package mamba_ssm")
            continue
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        try:
            with torch.device("meta"):
                model = fla_model(given.model, config) if candidate == "fla" else CausalLM(config)
            model = model.to(torch.float32 if given.autocast else torch.bfloat16).to_empty(device=DEVICE)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
            rows.append(measure(candidate, model, *calls(candidate, model, ids, read, cast), given.shape, given.prompt, given.steps))
        except Exception as failure:
            print(candidate, "failed:", repr(failure)[-600:], flush=True)
        model = None
        if given.out:
            with open(given.out, "w") as file:
                setting = {"model": given.model, "layers": config.num_layers, "autocast": given.autocast}
                setting |= {"shape": given.shape, "prompt": given.prompt, "device": torch.cuda.get_device_name() if GPU else "cpu"}
                json.dump({**setting, "rows": rows}, file, indent=1)
    compare(rows)


if __name__ == "__main__":
    main()
