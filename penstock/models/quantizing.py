"""Models whose large linear maps have weights of 8 or 4 bits."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..errors import Complaints, DtypeError, RangeError, described
from ..layers.adapted import sharing
from ..layers.as_written import hooked, overridden
from ..layers.linear import Linear
from ..layers.mixer import Mixer
from ..layers.quantization import KINDS, Kind, Quantized, is_large, quantized
from ..layers.quantized import QuantizedLinear
from .causal_lm import CausalLM


def quantize(model: CausalLM, kind: Kind) -> CausalLM:
    """A model whose large linear maps, the head among them, have weights of 8 or 4 bits.

    model : CausalLM
        It does not change. The new model shares its other modules and weights.
    kind : "int8" or "int4"
        ``int8``: a scale for each row of a weight. ``int4``: a scale for each 64 columns of a row.

    A linear map is large if both of its sizes are at least a quarter of the hidden size. Embeddings, low-rank maps, maps to a number for
    each head (``Mixer.unquantized``), convolutions and all vectors keep their dtype; a head that is tied to the embeddings gets a
    quantized copy. The new model computes and continues states as any other. Gradients reach its inputs and its other weights.

    Raises DtypeError or RangeError: for a model without such maps, with linear maps that have hooks or adapters or are of other classes,
    or with NaN or infinite weights. ``load(path, quantize=...)`` has no unquantized copy of all weights at any time.

    >>> from penstock.models import rwkv7
    >>> model = quantize(CausalLM(rwkv7(vocab_size=11, num_layers=2, hidden_size=16, head_size=8)), "int8")
    >>> model.head
    QuantizedLinear(in_features=16, out_features=11, int8)
    """
    complaints = Complaints("quantize")
    if not isinstance(model, CausalLM):
        complaints.add(DtypeError, "model", "a CausalLM", described(model), "penstock.models.load reads one.")
    check_kind(complaints, "kind", kind)
    complaints.raise_any()
    maps = large_maps(complaints, model)
    for name, one in maps.items():
        check_finite(complaints, f"{name}.weight", one.weight)
    complaints.raise_any()
    return cast("CausalLM", sharing(model, {one: QuantizedLinear.of(one, kind) for one in maps.values()}))


def check_kind(complaints: Complaints, argument: str, kind: object) -> None:
    """Check the name of a format."""
    if not isinstance(kind, str):
        complaints.add(DtypeError, argument, f"one of {', '.join(KINDS)}", described(kind))
    elif kind not in KINDS:
        complaints.add(RangeError, argument, f"one of {', '.join(KINDS)}", repr(kind))


def check_finite(complaints: Complaints, name: str, weight: Tensor) -> None:
    """Check that a weight can be quantized."""
    if weight.is_meta:
        return
    if not bool(weight.isfinite().all()):
        complaints.add(RangeError, name, "finite to be quantized", "NaN or infinity")
    elif weight.dtype == torch.float64 and not bool(weight.float().isfinite().all()):
        complaints.add(RangeError, name, "in the range of float32 to be quantized", f"{float(weight.detach().abs().max()):.3g}")


def large_maps(complaints: Complaints, model: CausalLM) -> dict[str, nn.Linear]:
    """The linear maps that are quantized, by their names. Complains about those of other classes and about a model without any."""
    found = {}
    if kinds := quantized_kinds(model):
        remedy = "Quantize the model from which it was made."
        complaints.add(RangeError, "model", "one with unquantized weights", f"weights of {', '.join(kinds)}", remedy)
    kept = _kept_parts(complaints, model)
    for name, one in model.named_modules():
        if one not in kept and isinstance(one, nn.Linear) and is_large(one.out_features, one.in_features, model.config.hidden_size):
            found[name] = one
            plain = nn.Linear if type(one) is nn.Linear else Linear
            why = f"is a {type(one).__name__}" if type(one) not in (nn.Linear, Linear) else _altered(one, plain)
            if why is not None:
                remedy = "Quantize the model first, or merge the adapter."
                complaints.add(RangeError, "model", "one of linear maps without hooks and adapters", f"{name}, which {why}", remedy)
    if not found and not kinds:
        rule = "one of linear maps whose sizes are at least a quarter of the hidden size"
        complaints.add(RangeError, "model", rule, f"{type(model).__name__} without any")
    return found


def _kept_parts(complaints: Complaints, model: CausalLM) -> set[nn.Module]:
    """The modules that mixers name in ``unquantized``, and all in them. Complains once about what is no name of a module."""
    kept: set[nn.Module] = set()
    wrong: dict[str, str] = {}
    for mixer in (one for one in model.modules() if isinstance(one, Mixer)):
        names, kind = mixer.unquantized, type(mixer).__name__
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            wrong[f"{kind} with unquantized = {names!r}"] = "Set it to a tuple of names, one is ('name',)."
            continue
        for name in names:
            one: object = mixer
            for part in name.split("."):
                one = getattr(one, part, part)  # a name is no module
            if isinstance(one, nn.Module):
                kept.update(one.modules())
            elif one is not None:
                wrong[f"{kind} without a module {name}"] = "Where a mixer lacks one, set it to None."
    for value, remedy in wrong.items():
        complaints.add(RangeError, "model", "one whose mixers have the modules in their unquantized", value, remedy)
    return kept


def _altered(one: nn.Linear, kind: type[nn.Module]) -> str | None:
    return hooked(one) if kind is nn.Linear else overridden(one, kind)


def quantized_kinds(model: nn.Module) -> list[str]:
    """The formats of the weights of a model."""
    return sorted({one.quantized.kind for one in model.modules() if isinstance(one, QuantizedLinear)})


class Quantizing:
    """Quantizes weights while a checkpoint is read, one after another."""

    def __init__(self, model: CausalLM, kind: Kind) -> None:
        """``model`` is on the meta device."""
        self.complaints = Complaints("load")
        self.maps = {f"{name}.weight" for name in large_maps(self.complaints, model)}
        self.complaints.raise_any()
        self.kind, self.model = kind, quantize(model, kind)

    def __call__(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """The tensors of the quantized model that replace one of ``maps``, by their names."""
        check_finite(self.complaints, name, weight)
        self.complaints.raise_any()
        stem = name.removesuffix("weight")
        return {f"{stem}{part}": x for part, x in zip(Quantized._fields, quantized(weight, self.kind))}

    def finish(self, dtype: torch.dtype) -> None:
        """Remember the dtype of the weights."""
        for one in self.model.modules():
            if isinstance(one, QuantizedLinear):
                one.dtype = dtype
