"""Feature maps and normaliser of linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.autocast import autocasting, without_autocast
from ..call.declaration import FLOATS
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described

FeatureMap = Literal["elu+1", "relu", "identity"] | Callable[[Tensor], Tensor] | None


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 = exp(x) for x < 0, 1 + x else, rounded once. ``F.elu(x) + 1`` is (exp(x) - 1) + 1, which is 0 where exp(x) is small."""
    return without_autocast(x, lambda x: torch.exp(x.clamp(max=0)) + F.relu(x), x)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": elu_plus_one,
    "relu": F.relu,
    "identity": lambda x: x,
}


def featured(function: str, q: Tensor, k: Tensor, feature_map: FeatureMap, normalize: bool, wide: bool) -> tuple[Tensor, Tensor]:
    """Q and k of a call of ``function`` through the feature map; if ``wide``, in float32.

    Raises RangeError for an unknown feature map, ShapeError for one that changes the number of heads, DtypeError if ``normalize``
    is not a bool. Tensors that are not floating-point are returned unchanged: validation refuses them later.
    """
    complaints = Complaints(function)
    if not isinstance(normalize, bool):
        complaints.add(DtypeError, "normalize", "True or False", described(normalize))
    named = isinstance(feature_map, str) and feature_map in FEATURE_MAPS
    if not (named or feature_map is None or (callable(feature_map) and not isinstance(feature_map, str))):
        rule = f"one of {', '.join(map(repr, FEATURE_MAPS))}, a callable or None"
        complaints.add(RangeError, "feature_map", rule, repr(feature_map), "A callable takes and returns a tensor.")
    complaints.raise_any()
    if wide and not callable(feature_map):  # a callable may have parameters, so it is not given float32
        q, k = q.float(), k.float()
    if feature_map is not None and all(isinstance(x, Tensor) and x.dtype in FLOATS for x in (q, k)):
        phi = FEATURE_MAPS[feature_map] if isinstance(feature_map, str) else feature_map
        mapped = phi(q), phi(k)
        for name, x, y in zip("qk", (q, k), mapped):
            if x.dim() == 4 and y.dim() == 4 and x.shape[2] != y.shape[2]:
                rule, value = f"a map that keeps the {x.shape[2]} heads of {name}", f"one to {y.shape[2]} heads"
                complaints.add(ShapeError, "feature_map", rule, value, "Only its last axis may change.")
        complaints.raise_any()
        q, k = mapped
    return (q.float(), k.float()) if wide else (q, k)


def needs_float32(*tensors: Tensor) -> bool:
    """Whether q, k and v would be multiplied as float16, also under autocast. Sums of weights may underflow or overflow it."""
    if not all(isinstance(x, Tensor) and x.dtype in FLOATS for x in tensors):
        return False  # validation refuses them
    kind = tensors[0].device.type
    if autocasting(kind) and all(x.dtype != torch.float64 for x in tensors):
        return torch.get_autocast_dtype(kind) == torch.float16
    return all(x.dtype == torch.float16 for x in tensors)


def normalized(
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]], q: Tensor, k: Tensor, v: Tensor, wide: bool, least: float = 0.0
) -> tuple[Tensor, Any]:
    """Output [B,T,H,V] and state of ``attend(q, k, v)``, with each output divided by the sum of its weights, plus ``least``.

    The sum is computed as one more column of v, which is 1. ``wide`` (see ``needs_float32``): ``attend`` gets float32, and the quotient is
    rounded to v's dtype. A factor of a row of q cancels, so a power of two keeps the weights of small features of q in range.
    """
    dtype, wrong = v.dtype if isinstance(v, Tensor) else None, not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, v))
    if wrong or not q.is_floating_point() or q.shape[-1] == 0:
        return attend(q, k, v)  # validation refuses them
    if wide:
        v = v.float()
        dtype = torch.get_autocast_dtype(v.device.type) if autocasting(v.device.type) else dtype
    if least == 0:
        exponent = q.detach().abs().amax(-1, keepdim=True).float().log2().floor().clamp(-125, 125)
        q = q * torch.exp2(-exponent).to(q.dtype)
    v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    output, state = without_autocast(v, attend, q, k, v) if wide else attend(q, k, v)
    output = output[..., :-1] / (output[..., -1:] + least)
    return output.to(dtype) if wide else output, state
