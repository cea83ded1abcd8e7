"""Seconds of the first call of every function in a process of its own with an empty cache of Triton, on one GPU.

    python benchmarks/first_calls.py [--only kda;rwkv7] [--dtype bfloat16] [--model] [--seconds 150] [--out FILE.json]

Calls are (1,2048,16,D) with raw inputs where a variant has them, as models pass them, and D = 64 for RWKV, else 128. Printed are the
seconds until a forward pass without gradients is done ("forward"), and in another process a forward pass with gradients and its backward
pass ("training", "backward"). One process at a time. ``--model``: a training step of a layer's model instead. The target is 8 s.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

NAMES = ("delta_rule", "gated_delta_rule", "kda", "rwkv7", "dplr", "gla", "rwkv6", "rwkv5", "simple_gla", "linear_attention", "retention")


def drawn(name: str, dtype, B: int = 1, T: int = 2048, H: int = 16, D: int = 0):
    """The arguments of a call by name: tensors that need gradients, and options."""
    import torch

    D = D or (64 if name.startswith("rwkv") else 128)

    def normal(*shape: int):
        return torch.randn(shape, device="cuda").to(dtype)

    x = {one: normal(B, T, H, D) for one in ("r" if name.startswith("rwkv") else "q", "k", "v")}
    options = {}
    if name in ("delta_rule", "gated_delta_rule", "kda"):
        x["beta"], options = normal(B, T, H), {"use_qk_l2norm": True, "beta_logits": True}
    if name == "gated_delta_rule":
        x |= {"g": normal(B, T, H), "A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H, device="cuda")}
    if name == "kda":
        x |= {"g": normal(B, T, H, D), "A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H, D, device="cuda")}
    if name in ("rwkv7", "dplr"):
        unit = torch.nn.functional.normalize(normal(B, T, H, D), dim=-1)
        x |= {"a": -unit, "b": 0.5 * unit, "w" if name == "rwkv7" else "g": normal(B, T, H, D)}
        if name == "rwkv7":
            options = {"raw_decay": True}
        else:
            x["g"] = -x["g"].abs()
    if name in ("gla", "rwkv6"):
        x["g" if name == "gla" else "w"] = -normal(B, T, H, D).abs()
    if name == "simple_gla":
        x["g"] = -normal(B, T, H).abs()
    if name == "rwkv5":
        x["w"] = -torch.rand(H, D, device="cuda")
    if name in ("rwkv5", "rwkv6"):
        x["u"] = torch.randn(H, D, device="cuda")
    return x, options


def child(name: str, kind: str, gradients: bool) -> None:
    """One first call; prints the seconds of its passes."""
    import torch

    import penstock as ps

    dtype = getattr(torch, kind)
    torch.randn(8, device="cuda").sum().item()
    if name.startswith("model "):
        from random_models import SIZES

        from penstock.models import CausalLM

        make, sizes = SIZES[name.removeprefix("model ")]
        model = CausalLM(make(**sizes | {"num_layers": 2, "vocab_size": 512})).cuda().to(dtype)
        ids = torch.randint(512, (1, 2049), device="cuda")
        call, leaves = (lambda: model(ids[:, :-1])), list(model.parameters())
    else:
        x, options = drawn(name, dtype)
        leaves = list(x.values())
        call = lambda: getattr(ps, name)(**x, **options).output  # noqa: E731
    for leaf in leaves:
        leaf.requires_grad_(gradients)
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    output = call()
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    if gradients:
        output = output if isinstance(output, torch.Tensor) else output[0]
        torch.autograd.grad(output, leaves, torch.randn_like(output), allow_unused=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    print(*[later - earlier for earlier, later in itertools.pairwise(times)])


def seconds(name: str, kind: str, gradients: bool) -> list[float]:
    """Of the passes of a first call, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        words = [sys.executable, os.path.abspath(__file__), "--child", name, kind, str(int(gradients))]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:])
        return []
    return [float(x) for x in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=";".join(NAMES), help="names, separated by semicolons")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--model", action="store_true", help="names are of random_models.py")
    parser.add_argument("--seconds", type=float, default=150, help="begin no further row after this time")
    parser.add_argument("--out")
    given = parser.parse_args()
    begin, rows = time.perf_counter(), []
    for name in given.only.split(";"):
        if time.perf_counter() - begin > given.seconds:
            break
        name = f"model {name}" if given.model else name
        forward, training = (seconds(name, given.dtype, gradients) for gradients in (False, True))
        row = {"name": name, "dtype": given.dtype, "forward": forward[:1], "training": training[:1], "backward": training[1:]}
        rows.append(row)
        print(f"{name:24s} forward {sum(forward):.1f}, training {sum(training[:1]):.1f} + {sum(training[1:]):.1f} s", flush=True)
    if given.out:
        import torch

        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4] == "1")
    else:
        main()
