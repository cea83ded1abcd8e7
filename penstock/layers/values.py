"""Values of tokens that mixers pass to mixers of later layers, beside the residual stream, such as RWKV-7's values of the first layer.

A mixer declares them by name: ``yields`` and ``takes``, each with the size of the last axis. A layer has those of its mixers. Both are
called with the values that they take after their other arguments, and return those that they yield after their other results. So values
are arguments and results of modules: hooks, wrappers, checkpoints and shards see them.

A model yields two values before its first layer: its tokens (``IDS``) and their embeddings (``EMBEDDED``). A layer gives its mixers the
residual stream (``RESIDUAL``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..call.declaration import FLOATS, INDICES, Argument
from ..call.validation import check_tensor, reads_values
from ..errors import Complaints, DtypeError, RangeError, described
from .as_written import unwrapped

Values = dict[str, Tensor]
"""By name: [B,T,size], a value of each token of a call."""
IDS = "ids"
"""The tokens that a model was called with, [B,T,1]: indices from 0 to vocab_size - 1. Not of calls with embeddings in their place."""
EMBEDDED = "embedded"
"""The embeddings of the tokens after their norm, [B,T,C]."""
RESIDUAL = "residual"
"""The residual stream before the norm of the mixer that takes it, [B,T,C]."""


def of_model(hidden_size: int) -> dict[str, int]:
    """What a model yields before its first layer, each with the size of the last axis."""
    return {IDS: 1, EMBEDDED: hidden_size}


class Passes(Protocol):
    """A module that passes values, or none."""

    takes: Mapping[str, int]
    yields: Mapping[str, int]


def passed(module: nn.Module, kind: type[Any], values: Values, *given: Any, call: Callable[..., Any] | None = None) -> tuple[Any, Any]:
    """Call a layer or mixer, or a wrapper of one, with the values that it takes; those that it yields are added to ``values``.

    kind : type
        The class that declares the values. A module without one inside passes none.
    call : function, optional
        Calls the module in its place, as ``torch.utils.checkpoint`` does.
    """
    inner = module if isinstance(module, kind) else unwrapped(module, kind)
    run = module if call is None else call
    if inner is None or not (inner.takes or inner.yields):
        x, after = run(*given)
        return x, after
    found = run(*given, taken(module, inner, values)) if inner.takes else run(*given)
    if inner.yields:
        if len(found) != 3 or not isinstance(found[2], dict) or found[2].keys() != inner.yields.keys():
            _refuse(module, inner.yields, "results")
        values.update(found[2])
    return found[0], found[1]


def taken(module: nn.Module, inner: Passes, values: Values) -> Values:
    """The values that a mixer or layer takes; ``inner`` declares them."""
    if not values.keys() >= inner.takes.keys():
        _refuse(module, inner.takes, "values of earlier layers")
    return {name: values[name] for name in inner.takes}


def _refuse(module: nn.Module, wanted: Mapping[str, int], what: str) -> None:
    complaints, names = Complaints("forward"), ", ".join(wanted)
    remedy = "A hook, a wrapper or another module in place of a layer removed it: return all results of the module."
    complaints.add(RangeError, what, f"such that {type(module).__name__} has {names}", "none", remedy)
    complaints.raise_any()


def check_values(complaints: Complaints, values: object, x: Tensor, takes: Mapping[str, int], vocab_size: int | None = None) -> None:
    """Check the values of a direct call of a mixer, for tokens x [B,T,C]. ``vocab_size``: the number of tokens that it knows."""
    if not takes and values is None:
        return
    rule = f"a dict of {', '.join(takes)}" if takes else "None: this mixer takes none"
    if not takes or not isinstance(values, dict) or values.keys() != takes.keys():
        found = ", ".join(map(str, values)) or "an empty dict" if isinstance(values, dict) else described(values)
        complaints.add(RangeError if isinstance(values, dict) or not takes else DtypeError, "values", rule, found)
        return
    for name, size in takes.items():
        dtypes = INDICES if name == IDS else FLOATS
        sizes, argument = {"B": x.shape[0], "T": x.shape[1], "A": size}, Argument(f"values[{name!r}]", "B T A", dtypes)
        if not isinstance(values[name], Tensor):
            complaints.add(DtypeError, argument.name, "a torch.Tensor", described(values[name]))
        else:
            check_tensor(complaints, argument, values[name], sizes, x.device, "x")
            if name == IDS and not complaints.found:
                check_range(complaints, argument.name, values[name], vocab_size)


def check_range(complaints: Complaints, name: str, ids: Tensor, vocab_size: int | None, remedy: str = "") -> None:
    """Check that tokens are from 0 to vocab_size - 1, if ``reads_values`` allows it, and not in compiled graphs."""
    if vocab_size is None or torch.compiler.is_compiling() or not reads_values(ids) or ids.numel() == 0:
        return
    least, most = (int(x) for x in ids.aminmax())
    if least < 0 or most >= vocab_size:
        complaints.add(RangeError, name, f"from 0 to {vocab_size - 1}", least if least < 0 else most, remedy)


def check_layers(complaints: Complaints, layers: Iterable[tuple[Any, Passes]], hidden_size: int) -> None:
    """Check that the model or earlier layers yield what each takes. ``layers``: the configuration of each token mixer, and the layer."""
    known = of_model(hidden_size)
    for n, (config, layer) in enumerate(layers):
        for name, size in layer.takes.items():
            if known.get(name) != size:
                value = f"{known[name]} channels" if name in known else "none"
                rule = f"such that an earlier layer yields {name!r} of {size} channels to layer {n}, {config.kind}"
                complaints.add(RangeError, "mixer", rule, value, f"Make layer 0 {config.kind} with heads of the same sizes.")
        known |= layer.yields


def example(like: Tensor, shape: tuple[int, ...], takes: Mapping[str, int]) -> Values | None:
    """Ones, as values of a call for an explanation; tokens are 0."""
    ids = torch.zeros(*shape, 1, dtype=torch.int64, device=like.device)
    return {name: ids if name == IDS else like.new_ones(*shape, size) for name, size in takes.items()} or None


def joined(*modules: Passes | None) -> tuple[dict[str, int], dict[str, int]]:
    """What modules that run one after another take from outside, and what they yield."""
    takes: dict[str, int] = {}
    yields: dict[str, int] = {}
    for one in modules:
        if one is not None:
            takes |= {name: size for name, size in one.takes.items() if name not in yields}
            yields |= one.yields
    return takes, yields


def own(values: Values, yields: Mapping[str, int]) -> tuple[Values, ...]:
    """The last results of a module that yields these: none, or the values."""
    return ({name: values[name] for name in yields},) if yields else ()
