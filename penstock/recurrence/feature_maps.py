"""Feature maps of linear attention, and the column of ones for its normaliser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.declaration import FLOATS
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described

FeatureMap = Literal["elu+1", "relu", "identity"] | Callable[[Tensor], Tensor] | None
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
}


def featured(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Q and k through the feature map, v with a column of ones if normalised.

    Raises RangeError for an unknown feature map, ShapeError for one that changes the number of heads, DtypeError for a ``normalize`` that
    is no bool. Other dtypes than floating-point are not mapped: validation refuses them later.
    """
    complaints = Complaints("linear_attention")
    if not isinstance(normalize, bool):
        complaints.add(DtypeError, "normalize", "True or False", described(normalize))
    named = isinstance(feature_map, str) and feature_map in FEATURE_MAPS
    if not (named or feature_map is None or (callable(feature_map) and not isinstance(feature_map, str))):
        rule = f"one of {', '.join(map(repr, FEATURE_MAPS))}, a callable or None"
        complaints.add(RangeError, "feature_map", rule, repr(feature_map), "A callable takes and returns a tensor.")
    complaints.raise_any()
    if feature_map is not None and all(isinstance(x, Tensor) and x.dtype in FLOATS for x in (q, k)):
        phi = FEATURE_MAPS[feature_map] if isinstance(feature_map, str) else feature_map
        mapped = phi(q), phi(k)
        for name, x, y in zip("qk", (q, k), mapped):
            if x.dim() == 4 and y.dim() == 4 and x.shape[2] != y.shape[2]:
                rule, value = f"a map that keeps the {x.shape[2]} heads of {name}", f"one to {y.shape[2]} heads"
                complaints.add(ShapeError, "feature_map", rule, value, "Only its last axis may change.")
        complaints.raise_any()
        q, k = mapped
    return q, k, torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1) if normalize and isinstance(v, Tensor) and v.dim() else v
