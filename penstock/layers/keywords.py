"""Keywords of configurations: unknown and missing ones are errors that name the nearest known one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from ..errors import Complaints, RangeError

OTHER_NAMES = {
    "vocab_size": ("vocabulary", "vocab", "n_vocab", "padded_vocab_size", "vocabulary_size", "num_embeddings"),
    "hidden_size": ("n_embd", "d_model", "dim", "embed_dim", "model_dim", "channels", "width"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "depth", "num_blocks"),
    "intermediate_size": ("dim_ffn", "d_ffn", "ffn_dim", "d_inner", "ffn_hidden_size", "ffn_channels"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "nheads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "head_size": ("head_dim", "head_size_a", "headdim", "d_head"),
    "head_dim": ("head_size", "headdim", "d_head"),
    "state_size": ("d_state", "ssm_state_size"),
    "n_groups": ("ngroups", "num_groups"),
    "conv_size": ("conv_kernel", "d_conv", "conv_kernel_size"),
    "tie_embeddings": ("tie_word_embeddings",),
    "norm_eps": ("layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon", "eps"),
    "mixer": ("token_mixer", "attention", "attn"),
    "channel": ("channel_mixer", "ffn", "mlp"),
}
"""Names of these arguments in other projects that differ too much in spelling to be found as near matches."""
Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[Any])


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the known name nearest to an unknown one; empty if there is none.

    >>> suggestion("d_model", ["hidden_size", "num_layers"]), suggestion("num_layer", ["hidden_size", "num_layers"])
    ('Did you mean hidden_size?', 'Did you mean num_layers?')
    """
    known = list(known)
    meant = [one for one in known if name in OTHER_NAMES.get(one, ())] or get_close_matches(name, known, 1)
    return f"Did you mean {meant[0]}?" if meant else ""


def checked_keywords(function: Function) -> Function:
    """Check the names of arguments before a call. Raises RangeError for unknown ones, for missing ones, and for values without a name."""
    known = list(inspect.signature(function).parameters.values())
    names = [one.name for one in known]
    ordered = sum(one.kind is not one.KEYWORD_ONLY for one in known)

    @functools.wraps(function)
    def call(*values: Any, **given: Any) -> Any:
        complaints = Complaints(function.__name__)
        if len(values) > ordered:
            rule = f"given by name{f' after the first {ordered}' * bool(ordered)}"
            complaints.add(RangeError, "arguments", rule, f"{len(values)} without", f"Names are {', '.join(names)}.")
        _check(complaints, names, given)
        for one in known[len(values) :]:
            if one.default is one.empty and one.name not in given:
                complaints.add(RangeError, one.name, "given", "none", f"Pass {one.name}=...")
        complaints.raise_any()
        return function(*values, **given)

    return call  # type: ignore[return-value]


def checked_fields(config: Class) -> Class:
    """The same for the fields of a dataclass, whose values may also come in order."""
    make = config.__init__
    names = [name for name in inspect.signature(make).parameters if name != "self"]

    @functools.wraps(make)
    def init(self: Any, *values: Any, **given: Any) -> None:
        complaints = Complaints(config.__name__)
        _check(complaints, names, given)
        complaints.raise_any()
        make(self, *values, **given)

    config.__init__ = init
    return config


def _check(complaints: Complaints, known: list[str], given: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            complaints.add(RangeError, "arguments", f"among {', '.join(known)}", name, suggestion(name, known))
