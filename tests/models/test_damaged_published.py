"""Damaged checkpoints of every public format: each error names what is wrong, and no other exception reaches the caller."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from public_models import files_of, read_file
from public_models.published import PUBLISHED
from torch import Tensor

from penstock import PenstockError
from penstock.models import load

pytestmark = pytest.mark.sampled(file=True)

Change = Callable[[dict[str, Tensor]], object]


def write(w: dict[str, Tensor], file: Path) -> None:
    """Write a new file: the old one may be mapped."""
    from safetensors.torch import save_file

    file.unlink()
    if file.suffix == ".safetensors":
        save_file(w, file, {"format": "pt"})
    else:
        torch.save(w, file)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "missing": (lambda x: None, r"must be .*(of shape|\]), got none"),
    "whole numbers": (lambda x: x.int(), r"must be a tensor of floating point numbers, got torch\.int32"),
    "one row more": (lambda x: torch.cat([x, x[:1]]), r"must be .*, got \[.*\]"),
    "one column less": (lambda x: x[..., :-1].contiguous(), r"must be .*, got \[.*\]"),
    "no values": (lambda x: x[:0], r"must be .*, got \[0.*\]"),
    "more axes": (lambda x: torch.stack([x, x]), r"must be .*, got \[.*\]"),
}


FIRST_VALUES = re.compile(r"\.1\.(att|attention|attn)\.v(1|_lora\.lora\.0\.weight)$")
"""Layer 1 of RWKV-7 is the first with a map of layer 0's values."""
UNUSED = re.compile(r"blocks\.0\.(att|attention)\.v[012]$")
"""Tensors of RWKV-7 that some files have and nothing reads."""


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_each_tensor_that_is_wrong_is_named(name: str, every: bool, tmp_path: Path) -> None:
    """If sizes are read from the wrong tensor, all others disagree with it, and those are named."""
    path = PUBLISHED[name].write(tmp_path)
    count = 0
    for file in files_of(path):
        w = read_file(file)
        for one in sorted(name for name in w if not UNUSED.search(name)):
            for n, (kind, (change, message)) in enumerate(CHANGES.items()):
                count += 1
                tied = ("embedding" in one and kind == "one row more") or (one, kind) == ("lm_head.weight", "missing")  # may be a model
                if tied or not (every or count % 29 == n % 29):
                    continue
                sizes = "hybrid" in name or FIRST_VALUES.search(one)  # may be read from this tensor
                alone = kind in ("missing", "whole numbers") or (re.search(r"\.[1-9]\.", one) and not sizes)
                changed = change(w[one])
                write({k: x for k, x in w.items() if k != one} | ({} if changed is None else {one: changed}), file)
                with pytest.raises(
                    PenstockError, match=rf"(?m)^load: {re.escape(one) if alone else '.*'} {message if alone else 'must be'}"
                ):
                    load(path)
        write(w, file)
    load(path)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content, cut off, with other bytes, or with more bytes."""
    at = draw.randrange(len(content))
    near = draw.randrange(min(len(content), 2000))  # headers are at the begin
    bytes_ = draw.randbytes(draw.choice([1, 8, 64]))
    return draw.choice(
        [
            content[:at],
            content[:at] + bytes_ + content[at:],
            content[:at] + bytes_ + content[at + len(bytes_) :],
            content[:near] + bytes_[:1] + content[near + 1 :],
            content[:at] + bytes(100) + content[at + 100 :],
        ]
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("count", [pytest.param(1000, marks=pytest.mark.slow), 20])
def test_files_with_damaged_bytes_are_refused_or_load(name: str, count: int, tmp_path: Path) -> None:
    path = PUBLISHED[name].write(tmp_path)
    files = {one: one.read_bytes() for one in ([path] if path.is_file() else sorted(path.iterdir()))}
    draw = random.Random(name)
    for _ in range(count):
        file = draw.choice(list(files))
        file.unlink()
        file.write_bytes(damaged(files[file], draw))
        with suppress(PenstockError):
            load(path)
        file.unlink()
        file.write_bytes(files[file])
    load(path)
