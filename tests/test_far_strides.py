"""Neighbours on an axis may be so far apart that offsets within a tile of tokens or channels need more than 32 bits."""

import attention
import deltas
import pytest
import torch
from cases import Case
from contract import run, takers
from pools import Pooled

from penstock.recurrence.variants import VARIANTS

HALF = torch.float16
CASES = [
    *(Case(variant, B=1, T=20, H=2, K=20, dtype=HALF) for variant in VARIANTS),
    *(Pooled(variant, H=2, K=20, lengths=(1, 19), slots=(1, 3), dtype=HALF) for variant in VARIANTS),
    *(deltas.Delta(variant, B=1, T=20, H=2, K=20, dtype=HALF) for variant in deltas.VARIANTS),
    deltas.Delta("kda", B=1, T=20, H=2, K=20, dtype=HALF, raw=True),
    *(deltas.PooledDelta(variant, H=2, K=20, lengths=(1, 19), slots=(1, 3), dtype=HALF) for variant in deltas.VARIANTS),
    attention.Attention(B=1, Tq=20, Tk=20, dtype=HALF),
]
FAR = {"T": 2**28, "Tq": 2**28, "Tk": 2**28, "K": 2**27}
"""Elements between neighbours: 2^31 and more between those of a tile."""


def apart(x, axes):
    """The same values, with neighbours on the first of these axes that is in FAR far apart. Pages between them take no memory."""
    place = next((place for place, letter in enumerate(axes) if letter in FAR), None)
    if x is None or not x.is_floating_point() or place is None:
        return x
    far, inner = FAR[axes[place]], x.movedim(place, 0).contiguous()
    memory = torch.empty(far * x.shape[place], dtype=x.dtype).as_strided(inner.shape, (far, *inner.stride()[1:]))
    return memory.copy_(inner).movedim(0, place)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize(("case", "impl"), [(case, impl) for case in CASES for impl in takers(case)], ids=str)
def test_equals_the_oracle(case, impl):
    """Each tensor alone, or all together under the interpreter."""
    operator, tensors, upstream = case.operator, case.tensors(), case.upstream()
    axes = {one.name: one.axes.split() for one in operator.signatures[case.function].arguments}
    results = [one.axes.split() for one in operator.results] * (not operator.in_place)
    names = [*(name for name, x in tensors.items() if apart(x, axes[name]) is not x), *range(len(results))]
    for which in [names] if impl.startswith("triton") else [[name] for name in names]:
        given = {name: apart(x, axes[name]) if name in which else x for name, x in case.tensors().items()}
        d_results = tuple(apart(d, results[place]) if place in which else d for place, d in enumerate(upstream))
        case.check(run(case, given, d_results, impl), impl)
