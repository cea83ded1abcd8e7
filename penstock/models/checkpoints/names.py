"""Containers and name prefixes that trainers add to the weights of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
"""Names under which trainers keep the weights: Lightning, scripts for torch, DeepSpeed. Other contents of their files are ignored."""
WRAPPERS = re.compile(r"(?:^|(?<=\.))_(?:forward_module|orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
"""Modules that wrap others, anywhere in a model: Lightning's, those of ``torch.compile``, FSDP and activation checkpointing."""
DEEPEST = 5
"""Parts of a prefix."""


def weights_of(content: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """The innermost dict of weights of a file of torch; several if there are other weights in it."""
    found = {id(content[name]): content[name] for name in CONTAINERS if _has_tensors(content.get(name))}
    return [one for inner in found.values() for one in weights_of(inner)] if found else [content]


def _has_tensors(value: Any) -> bool:
    """Whether it is a dict with tensors, at any depth."""
    return isinstance(value, dict) and any(isinstance(one, Tensor) or _has_tensors(one) for one in value.values())


def unwrapped(name: str) -> str:
    """A name without the modules that wrap others."""
    return WRAPPERS.sub("", name)


def prefixes(names: Iterable[str], half: bool = False) -> list[str]:
    """The prefixes, of whole parts, that most names share, the shortest first: "", then for example "module.", "module.model.".

    half : bool
        Whether half of the names are enough: an adapter may have one target below a prefix, and one beside it, such as a head.
    """
    every = list(names)
    counts: Counter[str] = Counter()
    for name in every:
        parts = name.split(".")[:-1]
        counts.update(".".join([*parts[:n], ""]) for n in range(1, min(len(parts), DEEPEST) + 1))
    return ["", *sorted((prefix for prefix, count in counts.items() if 2 * count + half > len(every)), key=len)]


def without(name: str, prefix: str) -> str:
    """A name without a prefix, or the longest part of it that it has: modules beside those of the prefix, such as a head."""
    while not name.startswith(prefix):
        prefix = prefix[: prefix[:-1].rfind(".") + 1]
    return name.removeprefix(prefix)
