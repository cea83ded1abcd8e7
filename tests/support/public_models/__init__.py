"""Random small checkpoints under their public names, and their logits by the published formulas, token by token in float64.

One file per architecture. ``draw`` makes weights, ``config`` is the stored config.json, ``logits`` evaluates one sequence.
Nothing here uses penstock: these files decide whether it is right.
"""

import json
import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class Draw:
    """Random weights [shape] of a given size around a given middle: no zeros or ones, which would hide errors."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, size: float = 0.3, middle: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * size + middle).to(self.dtype)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        """A linear map that keeps magnitudes."""
        return self(outputs, inputs, size=inputs**-0.5)


def tokens(count: int, vocab_size: int, seed: int = 2) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def write_pth(weights: Weights, folder: Path) -> Path:
    """One file, as BlinkDL's."""
    torch.save(weights, folder / "small.pth")
    return folder / "small.pth"


def write_safetensors(weights: Weights, config: dict[str, object], folder: Path, shards: int = 1) -> Path:
    """A folder as on a model hub: config.json, and the weights in one or several files."""
    from safetensors.torch import save_file

    return _write_folder(weights, config, folder, shards, "model", "safetensors", partial(save_file, metadata={"format": "pt"}))


def write_bin(weights: Weights, config: dict[str, object], folder: Path, shards: int = 1) -> Path:
    return _write_folder(weights, config, folder, shards, "pytorch_model", "bin", torch.save)


def _write_folder(weights, config, folder, shards, stem, suffix, save) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: x.contiguous() for name, x in weights.items()}
    if shards == 1:
        save(weights, folder / f"{stem}.{suffix}")
        return folder
    names = sorted(weights)
    files = {name: f"{stem}-{i % shards + 1:05}-of-{shards:05}.{suffix}" for i, name in enumerate(names)}
    for file in set(files.values()):
        save({name: weights[name] for name in names if files[name] == file}, folder / file)
    total = sum(x.numel() * x.element_size() for x in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


FILES = re.compile(r".*\.(safetensors|bin|pth)")


def files_of(path: Path) -> list[Path]:
    """The files of weights of a checkpoint."""
    return [path] if path.is_file() else sorted(one for one in path.iterdir() if FILES.fullmatch(one.name))


def read_file(file: Path) -> Weights:
    from safetensors.torch import load_file

    return load_file(file) if file.suffix in (".safetensors", ".st") else torch.load(file, weights_only=True)


def read_all(path: Path) -> Weights:
    """All tensors of a checkpoint."""
    return {name: x for file in files_of(path) for name, x in read_file(file).items()}


def rewritten(content: object, path: Path, folder: Path) -> Path:
    """A checkpoint with other content in one file, as torch writes it, beside the config.json of the one at ``path``."""
    folder.mkdir()
    if path.is_file():
        torch.save(content, folder / "small.pth")
        return folder / "small.pth"
    (folder / "config.json").write_bytes((path / "config.json").read_bytes())
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def layer_norm(x: Tensor, w: Weights, name: str, eps: float = 1e-5) -> Tensor:
    x = (x - x.mean()) / (((x - x.mean()) ** 2).mean() + eps).sqrt()
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x**2).mean() + eps).sqrt() * weight


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def below(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


def depth(w: Weights, prefix: str) -> int:
    """The number of blocks: names are ``prefix``N.more."""
    return 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in w if name.startswith(prefix))


def doubled(w: Weights) -> Weights:
    return {name: x.double() for name, x in w.items()}


def short_convolution(x: Tensor, past: list[Tensor], weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One token x [C] of a causal convolution [C,1,width]; ``past`` holds the last inputs and gets x appended."""
    past.append(x)
    width = weight.shape[-1]
    y = torch.zeros_like(x) if bias is None else bias.clone()
    for back in range(min(width, len(past))):
        y = y + weight[:, 0, width - 1 - back] * past[-1 - back]
    return silu(y)
