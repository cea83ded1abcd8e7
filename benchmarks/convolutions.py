"""Times the short convolution of Mamba-2 1.3B and 2.7B on one GPU: in training, 8 x 2048 tokens, and in decode steps.

    python benchmarks/convolutions.py [--out FILE.json]

Plain PyTorch (the formula) and the kernels, bfloat16, width 4, bias and silu. x is a part of the projection, as in the layer. Training: ms
of the forward pass, and of the backward pass from y on, and TB/s of the least bytes (2 and 3 passes over all tokens and channels). Both are
first compared with float64. Decode: us of a layer in a CUDA graph of 24 layers with pools of their own.
"""

import argparse
import json
from functools import partial

import torch
from linear_maps import graph_of, milliseconds
from torch import Tensor

from penstock.layers.convolution import ShortConvolution, convolution_formula
from penstock.layers.sequences import Sequences

SIZES = {"1.3B": (4096, 4352, 8512), "2.7B": (5120, 5376, 10576)}
"""Where the channels of the convolution begin in the projection, how many there are, and the channels of the projection."""
LAYERS = 24


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def convolution_of(channels: int) -> ShortConvolution:
    one = ShortConvolution(channels, 4, bias=True).to("cuda", torch.bfloat16)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter)
    return one


def plain(one: ShortConvolution, x: Tensor, state: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """The layer without kernels."""
    return convolution_formula(x, sequences.read(state), one.weight.squeeze(1), one.bias, sequences=sequences, silu=True)


def hold(found: Tensor, wanted: Tensor) -> None:
    assert (found.double() - wanted).norm() <= 2 * torch.finfo(found.dtype).eps * wanted.norm()


def training(name: str) -> dict[str, tuple[float, float]]:
    """Milliseconds of the forward and of the backward pass."""
    first, channels, total = SIZES[name]
    one, wide, dy, times = convolution_of(channels), drawn(8, 2048, total), drawn(8, 2048, channels), {}
    x, tail, sequences = wide[..., first : first + channels].requires_grad_(), one.initial_state(8, wide), Sequences(wide)
    inputs = (x, *one.parameters())
    for kind, call in (("torch", partial(plain, one)), ("kernels", one)):
        y, _ = call(x, tail, sequences)
        grads = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        exact = [leaf[..., :64].detach().double() if n == 0 else leaf[:64].detach().double() for n, leaf in enumerate(inputs)]
        exact = [leaf.requires_grad_() for leaf in exact]
        wanted, _ = convolution_formula(exact[0], tail[..., :64], exact[1].squeeze(1), exact[2], sequences=sequences, silu=True)
        hold(y[..., :64], wanted)
        for n, (grad, true) in enumerate(zip(grads, torch.autograd.grad(wanted, exact, dy[..., :64].double()))):
            hold(grad[..., :64] if n == 0 else grad[:64], true)
        forward = milliseconds(lambda call=call: call(x, tail, sequences), 20)
        backward = milliseconds(lambda y=y: torch.autograd.grad(y, inputs, dy, retain_graph=True), 20)
        times[kind] = forward, backward
        del y, grads
    return times


@torch.no_grad()
def decoding(name: str, rows: int) -> dict[str, float]:
    """Microseconds of a layer."""
    first, channels, total = SIZES[name]
    layers, x = [convolution_of(channels) for _ in range(LAYERS)], drawn(rows, 1, total)[..., first : first + channels]
    pools, slots, times = [drawn(rows + 1, 3, channels) for _ in range(LAYERS)], torch.arange(rows, 0, -1, device="cuda"), {}

    def step(kind: str) -> None:
        sequences = Sequences(x, None, slots, in_place=True)
        for one, pool in zip(layers, pools):
            _, after = plain(one, x, pool, sequences) if kind == "torch" else one(x, pool, sequences)
            sequences.write((pool,), (after,))

    for kind in ("torch", "kernels"):
        times[kind] = milliseconds(graph_of(partial(step, kind)).replay, 10) * 1e3 / LAYERS
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.manual_seed(0)
    found: list[dict[str, object]] = []
    for name, (_, channels, _) in SIZES.items():
        size = 8 * 2048 * channels * 2 / 1e9
        for kind, (forward, backward) in training(name).items():
            rates = 2 * size / forward, 3 * size / backward
            print(
                f"{name} {kind:<8} forward {forward:6.3f} ms ({rates[0]:4.2f} TB/s)  backward {backward:6.3f} ms ({rates[1]:4.2f} TB/s)",
                flush=True,
            )
            found.append({"model": name, "kind": kind, "forward_ms": forward, "backward_ms": backward})
        for rows in (1, 8, 128):
            times = decoding(name, rows)
            print(f"{name} {rows:>4} rows a step: torch {times['torch']:5.1f} us a layer, kernels {times['kernels']:5.1f}", flush=True)
            found.append({"model": name, "rows": rows, **{f"{kind}_us": us for kind, us in times.items()}})
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "times": found}, file, indent=1)


if __name__ == "__main__":
    main()
