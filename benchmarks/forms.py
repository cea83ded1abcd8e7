"""Times forms of a call on one GPU beside those that are taken, in one run: GPU time of replayed graphs, peak memory, errors.

    python benchmarks/forms.py rwkv7 --shape 8,2048,32,64 --raw --forms delta_chunks,delta_chunks_bwd [--mode fwd] [--json FILE]

Each version is first compared with the float64 token loop, as ``penstock bench`` does. ``--forms`` may be repeated: a version each. Bits of
a version are compared between two calls.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from penstock.bench import clock
from penstock.bench.calls import call_of, copy_of, moved_bytes
from penstock.bench.exact import Exact
from penstock.bench.raw import own
from penstock.gpu.launch import trying
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs


def bits(results: object) -> list[torch.Tensor]:
    return [x for x in (results if isinstance(results, tuple) else (results,)) if isinstance(x, torch.Tensor)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant")
    parser.add_argument("--shape", default="8,2048,32,64", help="B,T,H,K or B,T,H,K,V")
    parser.add_argument("--raw", action="store_true", help="raw decays, of variants that bound them")
    parser.add_argument("--gate", default="slow", help="a strength of decays, see `penstock bench`")
    parser.add_argument("--mode", action="append", choices=["fwd", "fwdbwd"])
    parser.add_argument("--forms", action="append", default=[], help="names, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring each version")
    parser.add_argument("--json")
    given = parser.parse_args()
    device, shape = torch.device("cuda"), Shape.parse(given.shape)
    x = inputs(given.variant, shape, getattr(torch, given.dtype), "cuda", gates=given.gate)
    rows = []
    for mode in given.mode or ["fwd", "fwdbwd"]:
        exact, versions = Exact.of(x, mode), []
        for forms in [(), *(tuple(names.split(",")) for names in given.forms)]:
            with trying({}, *forms) as planned:
                candidate = own("raw" if given.raw else "auto", x, mode)
                results, first = exact.compare(candidate)
                call = call_of(candidate, x, mode)
                same = all(torch.equal(one, other) for one, other in zip(bits(call()), bits(call())))
                peak, _ = clock.peak_bytes(call, device)
                replay = clock.captured(call, device)
            missing = set(forms) - planned - {name for name in forms if mode == "fwd" and "bwd" in name}
            worst = max(one.error for one in results.values())
            row = {"mode": mode, "forms": forms, "error": worst, "equal bits": same, "MiB": peak / 2**20, "first call, s": first}
            print(
                mode,
                *(forms or ["as taken"]),
                f"error {worst:.1e}, {peak / 2**20:.0f} MiB, equal bits {same}",
                *missing and ["not run:", *missing],
            )
            if isinstance(replay, str):
                print("   not captured:", replay)
                continue
            versions.append((row, replay, call))  # the graph reads tensors that the call holds
        del exact
        copy = clock.captured(copy_of(x, mode), device)
        assert not isinstance(copy, str)
        taken = clock.in_turn([copy.replay, *(replay.replay for _, replay, _ in versions)], device, given.seconds)
        floor = statistics.median(taken[0]) / copy.calls
        print(f"{mode} copy {floor:.3f} ms, {moved_bytes(x, mode) / floor / 1e9:.2f} TB/s")
        for (row, replay, _), samples in zip(versions, taken[1:]):
            times = [one / replay.calls for one in samples]
            first, _, third = statistics.quantiles(times, n=4)
            rows.append(row | {"ms": statistics.median(times), "quartiles": [first, third], "copy, ms": floor})
            beside = rows[-1]["ms"] / next(one["ms"] for one in rows if one["mode"] == mode)
            print(f"  {rows[-1]['ms']:.3f} ms ({first:.3f} to {third:.3f}), {beside:.2f} of the first", *row["forms"], flush=True)
    if given.json:
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "variant": given.variant,
            "shape": shape,
            "raw": given.raw,
        }
        Path(given.json).write_text(json.dumps(about | {"gate": given.gate, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
