"""``accelerate(model)``: models of transformers, and remote-code models, run on our operators without a change of their code.

What it replaces are functions that a model's modelling module calls by name:

- RWKV-5 and RWKV-6 remote code: ``rwkv5_linear_attention`` and ``rwkv6_linear_attention`` (a Python loop over tokens)
- Mamba-2 of transformers 5, and the hybrids that have the same functions (Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2):
  ``mamba2_chunk_scan``, ``mamba2_selective_state_update``, and ``mamba2_split_conv1d_scan_combined``, the fused form for training without a
  cache, which then gives way to the former
- the delta rule of Qwen3-Next, Qwen3.5, Qwen4, OLMo-Hybrid, Kimi Linear, Ling and GLM-5: see ``transformers_delta``
- in modules with one of these, ``causal_conv1d_fn``, which keeps packed sequences apart: see ``transformers_packed``
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Complaints, DtypeError, ImplementationRefused, RangeError, described
from ..recurrence.functional import decode_step, simple_gla
from ..tokens.dtypes import state_dtype
from . import transformers_delta, transformers_packed
from .flash_rwkv import raw_decay
from .replacement import Place, Replacement


def accelerate(model: nn.Module) -> Replacement:
    """Replace the recurrence of a model by our operators, until ``restore()`` of what it returns, or the end of a ``with`` block.

    The functions belong to the model's modelling module, so every model of that module in this process runs on our operators meanwhile.
    Weights, caches, masks, ``generate()`` and training work as before. Returns the ``Replacement``; its ``replaced`` names the functions.

    In training, the gradients are those of the whole recurrence. (RWKV's remote code stops them at the state in its loop over tokens.)
    Outputs of the recurrence have the dtype of its inputs, as those of CUDA kernels do; the replaced Python code returns float32.

    model : torch.nn.Module
        A model of transformers, or of Hugging Face's remote code: Mamba-2, Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi Linear, Ling, GLM-5,
        RWKV-5, RWKV-6.

    Recurrent layers raise RangeError in a call of ``model`` with packed sequences that they are not told of, as by ``position_ids`` alone.

    Raises RangeError where a model has none of these functions, and ImplementationRefused where one has other parameters than are known. ::

        with accelerate(model) as accelerated:
            print(accelerated.replaced)
            model.generate(ids)
    """
    if not isinstance(model, nn.Module):
        complaints = Complaints("accelerate")
        complaints.add(DtypeError, "model", "a torch.nn.Module", described(model))
        complaints.raise_any()
    modules = {name: sys.modules[name] for name in sorted({type(part).__module__ for part in model.modules()}) if name in sys.modules}
    places = [place for module in modules.values() for place in _places(module)]
    if not places:
        complaints = Complaints("accelerate")
        rule = f"of a modelling module with one of {', '.join(_REPLACED)}"
        found = f"{type(model).__name__} of {type(model).__module__}"
        complaints.add(RangeError, "model", rule, found, "For other models, call the functions of penstock.")
        complaints.raise_any()
    for place in places:
        _check_parameters(place)
    return Replacement(lambda: places, transformers_packed.Watch(model).remove)


def _places(module: ModuleType) -> list[Place]:
    """The recurrences of a modelling module and, if there are any, the convolution before them."""
    found = [Place(module, name, ours) for name, ours in _REPLACED.items() if hasattr(module, name)]
    convolution = transformers_packed.causal_conv1d_fn
    if found and hasattr(module, convolution.__name__):
        found.append(Place(module, convolution.__name__, convolution))
    return found


def _check_parameters(place: Place) -> None:
    """Refuse a function whose parameters are not those that ours takes its place for."""
    if place.name in _WITHOUT_PARAMETERS:
        return
    functions: tuple[Any, Any] = getattr(place.module, place.name), place.ours
    found, known = (
        [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        for function in functions
    )
    if found != known:
        function = f"{place.module.__name__}.{place.name}"
        raise ImplementationRefused(
            f"accelerate: {function} must have the parameters {', '.join(known)}, got {', '.join(found)}. "
            "This version of the modelling code is not known: use another one, or call the functions of penstock."
        )


def _rwkv5_linear_attention(
    training: bool, receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return _rwkv("rwkv5", receptance, key, value, time_decay, time_first, state)


def _rwkv6_linear_attention(
    training: bool, receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return _rwkv("rwkv6", receptance, key, value, time_decay, time_first, state)


def _rwkv(
    variant: Literal["rwkv5", "rwkv6"], receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output [B,T,H,n] and the new state [B,H,K,V]; time_first is [H,n]."""
    if state is not None and torch.is_grad_enabled():
        state = state.clone()  # the caller writes the new state where this one is, before the backward pass reads it
    function = f"{variant}_linear_attention"
    transformers_packed.check_alone(function)
    return raw_decay(function, variant, receptance, key, value, time_decay, time_first, state, time_first.shape[0])


def _mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """Hidden states [B,T,H,V], dt [B,T,H], A and D [H], B and C [B,T,G,K], states [B,H,V,K]; chunk_size is theirs."""
    _check_others("mamba2_chunk_scan", others)
    x, heads = hidden_states, hidden_states.shape[2]
    cached = initial_states is not None or return_final_states
    ends = transformers_packed.offsets("mamba2_chunk_scan", x.shape[0], x.shape[1], others, cached=cached)
    dt = _time_step(dt, dt_bias, dt_softplus)
    if not (dt_softplus and tuple(dt_limit) == (0.0, float("inf"))):
        dt = dt.clamp(*dt_limit)
    output, state = simple_gla(
        _per_head(C, heads), _per_head(B, heads), (x * dt[..., None]).to(x.dtype), A.float() * dt.float(), scale=1.0,
        initial_state=None if initial_states is None else initial_states.transpose(-1, -2), output_final_state=return_final_states,
        cu_seqlens=ends,
    )  # fmt: skip
    if D is not None:
        output = (output + D[:, None] * x).to(x.dtype)
    return (output, state.transpose(-1, -2)) if state is not None else output


def _mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """One token: state [B,H,V,K], written; hidden states [B,H,V], B and C [B,G,K]; dt, dt_bias, A and D expanded from one value a head."""
    function = "mamba2_selective_state_update"
    _check_others(function, others)
    for name, tensor, first in (("dt", dt, 2), ("A", A, 1), ("dt_bias", dt_bias, 1), ("D", D, 1)):
        if tensor is not None and any(size > 1 and stride for size, stride in zip(tensor.shape[first:], tensor.stride()[first:])):
            _refuse(function, name, "expanded from one value a head", list(tensor.shape), "Mamba-1's values per channel are not supported.")
    x, heads = hidden_states, hidden_states.shape[1]
    dt = _time_step(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
    q, k, v, g = _per_head(C, heads), _per_head(B, heads), (x * dt[..., None]).to(x.dtype), A[:, 0, 0].float() * dt.float()
    if torch.is_grad_enabled():
        result = simple_gla(
            *(one.unsqueeze(1) for one in (q, k, v, g)), scale=1.0, initial_state=state.transpose(-1, -2).clone(), output_final_state=True
        )
        assert result.final_state is not None
        state.copy_(result.final_state.transpose(-1, -2))
        output = result.output.squeeze(1)
    else:
        output = decode_step("simple_gla", q, k, v, g, state=state.transpose(-1, -2), scale=1.0)
    if D is not None:
        output = (output + D[:, :1] * x).to(x.dtype)
    return output if z is None else output * F.silu(z)


def _mamba2_split_conv1d_scan_combined(*arguments: Any, **named: Any) -> None:
    """Nothing: the caller then runs its convolution and ``mamba2_chunk_scan``."""


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Time steps in float32, as the layer has them: a sum of dt and its bias may be far smaller than either."""
    dt = dt.to(state_dtype(dt.dtype))
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _per_head(x: Tensor, heads: int) -> Tensor:
    """[..., G, K] as [..., H, K]: a view for one group."""
    groups = x.shape[-2]
    return (
        x.unsqueeze(-2).expand(*x.shape[:-1], heads // groups, x.shape[-1]).flatten(-3, -2)
        if groups > 1
        else x.expand(*x.shape[:-2], heads, -1)
    )


def _check_others(function: str, others: dict[str, Any]) -> None:
    """Refuse what changes the result; the rest are arguments of attention layers, which transformers passes along."""
    if function == "mamba2_chunk_scan":
        if others.get("z") is not None:
            _refuse(function, "z", "None", described(others["z"]), "Multiply the output by silu(z).")
        return
    for name in transformers_packed.NAMES:
        if others.get(name) is not None:
            _refuse(function, name, "None", described(others[name]), "Sequences of one token each are rows of a batch.")


def _refuse(function: str, argument: str, rule: str, value: object, remedy: str) -> NoReturn:
    complaints = Complaints(function)
    complaints.add(RangeError, argument, rule, value, remedy)
    complaints.raise_any()
    raise AssertionError


_WITHOUT_PARAMETERS = ("mamba2_split_conv1d_scan_combined",)
_REPLACED: dict[str, Callable[..., Any]] = {
    "rwkv5_linear_attention": _rwkv5_linear_attention,
    "rwkv6_linear_attention": _rwkv6_linear_attention,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba2_selective_state_update": _mamba2_selective_state_update,
    "mamba2_split_conv1d_scan_combined": _mamba2_split_conv1d_scan_combined,
    **transformers_delta.REPLACED,
}
