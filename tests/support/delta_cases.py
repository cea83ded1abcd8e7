"""The contract of the delta rule: the calls on which every implementation is compared with the oracle."""

from dataclasses import replace

import torch
from cases import SHARED
from deltas import KEYS, VARIANTS, Delta, PooledDelta

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS = (0, 5, 64, 0, 1, 81, 0)
SHORT_LENGTHS = (0, 5, 40, 0, 1, 33, 0)
GATES = ("zero", "weak", "logsigmoid/16", "logsigmoid/0.1", "-exp(N(2,1))", "spikes", "gone", "mixture")
CHANNELS = ("channels", "uneven")
"""Gates that differ between channels."""


def gates(variant: str) -> tuple[str, ...]:
    """The distributions of decays of a variant."""
    decay = VARIANTS[variant].decay
    return (*GATES, *CHANNELS) if "K" in decay else GATES if decay else ()


def raw_cases(of: Delta) -> list[Delta]:
    """Raw inputs: keys, logits of beta, gates."""
    row = of.row
    of = replace(of, raw=True)
    if row.streams == 2 and row.raw:  # the bound of the decay is known: kernels may have one anchor in a chunk
        found = [replace(of, dtype=dtype, others=FLOAT32, centre=x) for dtype in (FLOAT32, FLOAT16, BFLOAT16) for x in (-9.0, 0.0, 9.0)]
        return [*found, replace(of, lengths=SHORT_LENGTHS, dtype=FLOAT16, centre=2.0), replace(of, H=4, G=2, T=70, centre=2.0)]
    if row.streams == 2:
        return []
    found = [of, replace(of, dtype=FLOAT64), replace(of, negative=True), replace(of, dtype=BFLOAT16, others=FLOAT32), replace(of, H=4, G=2)]
    found += [replace(of, biased=False), replace(of, dtype=FLOAT16)] * (row.raw == "softplus")
    found += [replace(of, bound=-5.0), replace(of, bound=-5.0, dtype=FLOAT64, lengths=(3, 0, 9)), replace(of, strided=True)] * row.bounded
    return [*found, replace(of, B=0), replace(of, T=0)]


def bounded_cases(of: Delta) -> list[Delta]:
    """Log decays of two streams whose bound is known."""
    bounded = replace(of, gate="logsigmoid/16", bound=-0.6)
    return [replace(bounded, dtype=dtype, T=70) for dtype in (FLOAT32, FLOAT16, BFLOAT16)] if of.row.streams == 2 else []


def cases(variant: str) -> list[Delta]:
    """The contract of one variant."""
    of, row = Delta(variant, H=2), VARIANTS[variant]
    found = [replace(of, T=T, dtype=dtype) for T in (0, 1, 2, 5, 17, 63, 64, 65, 130) for dtype in (FLOAT32, FLOAT64)]
    found += [replace(of, T=35, K=K, V=V) for K, V in ((20, 36), (100, 100), (8, 3), (64, 96), (1, 1), (3, 130), (200, 7))]
    found += [replace(of, T=35, K=K, V=V, dtype=FLOAT64) for K, V in ((20, 36), (8, 3))]
    found += [replace(of, dtype=dtype, T=T) for dtype in (BFLOAT16, FLOAT16) for T in (1, 65)]
    found += [replace(of, dtype=dtype, others=FLOAT32, T=33) for dtype in (BFLOAT16, FLOAT16, FLOAT64)]
    found += [replace(of, others=dtype, T=33) for dtype in (BFLOAT16, FLOAT64)]
    found += [replace(of, T=T, state=False) for T in (0, 1, 65)]
    found += [replace(of, scale=scale) for scale in (0.3, -2.0, 0.0)]
    found += [replace(of, lengths=lengths) for lengths in (LENGTHS, (0, 0), (), (16, 16, 17))]
    found += [replace(of, lengths=LENGTHS, state=False, dtype=FLOAT64), replace(of, lengths=LENGTHS, dtype=BFLOAT16, others=FLOAT32)]
    found += [replace(of, T=33, strided=True, dtype=dtype) for dtype in (FLOAT32, FLOAT64, BFLOAT16)]
    found += [replace(of, T=19, shared=axes) for axes in SHARED]
    found += [replace(of, lengths=(9, 0, 17), shared="N"), replace(of, lengths=(0, 0), shared="N")]
    found += [replace(of, B=0, T=5), replace(of, B=5, H=1, T=40), replace(of, B=1, H=9, T=40)]
    found += [replace(of, T=33, H=6, G=2), replace(of, T=70, H=4, G=1, dtype=BFLOAT16), replace(of, lengths=LENGTHS, G=1)]
    found += [replace(of, T=33, H=4, G=2, strided=True, dtype=FLOAT64), replace(of, T=19, H=4, G=2, shared="H"), replace(of, B=0, T=5, G=1)]
    found += [replace(of, T=33, H=4, G=2, removed=4), replace(of, T=5, H=4, G=1, removed=4, dtype=FLOAT64)] * (row.streams == 2)
    found += [replace(of, T=130, gate=gate, dtype=dtype) for gate in gates(variant) for dtype in (FLOAT32, FLOAT64)]
    found += [replace(of, T=70, gate=gate, dtype=dtype) for gate in ("mixture", "spikes") for dtype in (FLOAT16, BFLOAT16) if row.decay]
    found += [replace(of, T=5, gate=gate, still=True) for gate in (-0.3, -3.0, -30.0) if row.decay]
    found += key_cases(variant)
    return found + raw_cases(replace(of, T=33)) + bounded_cases(of)


def key_cases(variant: str) -> list[Delta]:
    """Correlated and equal keys, full and doubled removal, large values: what the inverse of a chunk amplifies."""
    of, row = Delta(variant, H=2, T=130, K=32, V=16, gate="weak"), VARIANTS[variant]
    betas = (0.0, 1.0, 2.0) if row.streams == 1 else (None,)
    found = [replace(of, key=key, beta=beta, dtype=dtype) for key in KEYS for beta in betas for dtype in (FLOAT32, FLOAT64)]
    found += [replace(of, v_factor=1e4, state_factor=1e5, upstream_factor=1e3, dtype=dtype) for dtype in (FLOAT32, FLOAT64)]
    return [*found, replace(of, v_factor=10000.0, dtype=BFLOAT16, others=FLOAT32)]


def long_cases(variant: str) -> list[Delta]:
    """Thousands of tokens: rounding errors must not add up."""
    of = Delta(variant, B=1, H=2, K=16, V=8, T=2048)
    return [replace(of, gate=gate) for gate in (("drift", "mixture") if VARIANTS[variant].decay else ("zero",))]


def interpreted_cases(variant: str) -> list[Delta]:
    """Each part of the Triton kernels, in sizes that the interpreter takes."""
    of, row = Delta(variant, B=1, H=2), VARIANTS[variant]
    found = [replace(of, T=T) for T in (0, 1, 16, 33, 70)] + [replace(of, B=2, T=5), replace(of, B=0, T=5)]
    found += [replace(of, T=20, K=K, V=V) for K, V in ((20, 36), (8, 3), (100, 70), (1, 1))]
    found += [replace(of, T=33, dtype=BFLOAT16, others=FLOAT32), replace(of, T=20, dtype=FLOAT16), replace(of, T=5, dtype=FLOAT64)]
    found += [replace(of, T=40, state=False, scale=-0.3), replace(of, T=20, strided=True)]
    found += [replace(of, lengths=lengths) for lengths in (SHORT_LENGTHS, ())]
    found += [replace(of, lengths=SHORT_LENGTHS, strided=True, state=False)]
    found += [replace(of, B=2, T=7, shared=axes) for axes in ("BNH", "TKV", "overlap")]
    found += [replace(of, H=4, G=G, T=33) for G in (1, 2)] + [replace(of, H=8, G=1, T=20, dtype=FLOAT16), replace(of, B=0, T=5, G=1)]
    found += [replace(of, T=70, gate=gate) for gate in gates(variant)]
    found += [replace(of, T=70, key=key, beta=beta, gate="weak") for key in KEYS for beta in (1.0, 2.0) if row.streams == 1]
    return found + raw_cases(replace(of, T=20)) + bounded_cases(of)


def sampled_cases(variant: str) -> list[Delta]:
    """The smallest of them that still cross a block of the kernels: all features for one variant, fewer for the others."""
    of = Delta(variant, B=1, H=1, T=33)
    lengths, gate = (0, 5, 33, 0, 1), "mixture" if VARIANTS[variant].decay else "logsigmoid"
    found = [replace(of, H=2), replace(of, H=2, G=1), replace(of, lengths=lengths, gate=gate), replace(of, H=2, T=5, B=2, dtype=FLOAT16)]
    found += [replace(of, raw=True)] * (VARIANTS[variant].raw != "" or VARIANTS[variant].streams == 1)
    if variant != "kda":
        return found
    found += [replace(of, T=T) for T in (0, 1, 16)] + [replace(of, B=0, T=5), replace(of, lengths=())]
    found += [replace(of, T=17, K=K, V=V) for K, V in ((20, 36), (8, 3), (100, 70), (1, 1))]
    found += [replace(of, dtype=dtype, others=FLOAT32, T=5) for dtype in (BFLOAT16, FLOAT64)]
    found += [replace(of, state=False, scale=-0.3), replace(of, strided=True), replace(of, lengths=lengths)]
    found += [replace(of, B=2, T=7, shared=axes) for axes in ("BNH", "TKV", "overlap")]
    return found + [replace(of, gate=gate) for gate in ("zero", "gone", "spikes")] + [replace(of, key="equal", beta=2.0, gate="weak")]


def pooled_cases(variant: str) -> list[PooledDelta]:
    """Rows of all lengths around a chunk, some skipped."""
    of, row = PooledDelta(variant, H=2, K=8, V=12, lengths=(0, 1, 63, 64, 65, 130), slots=(4, 0, -1, 2, 7, 5)), VARIANTS[variant]
    found = [of, replace(of, dtype=FLOAT64, pool=FLOAT64, slots=(1, 6, 3, 0, -1, 2))]
    found += [replace(of, lengths=(3, 0, 66), slots=None, rows=3, strided=True, layout="gaps")]
    found += [replace(of, lengths=(2, 5), slots=(6, 1), dtype=BFLOAT16, others=FLOAT32, pool=BFLOAT16, layout="heads first")]
    found += [replace(of, G=1), replace(of, lengths=(3, 66), slots=(6, 1), H=4, G=2, strided=True)]
    found += [replace(of, lengths=None, B=3, T=67, slots=(3, -1, 0), scale=0.3), replace(of, lengths=(), slots=(), K=1, V=3)]
    found += [replace(of, gate=gate) for gate in ("spikes", "weak") if row.decay]
    found += [replace(of, gate="logsigmoid/16", bound=-0.6)] * (row.streams == 2)
    return found + [replace(of, raw=True, lengths=(1, 66), slots=(4, 0))] * (row.raw != "" or row.streams == 1)


def interpreted_pooled_cases(variant: str) -> list[PooledDelta]:
    """The same in sizes that the interpreter takes."""
    of = PooledDelta(variant, H=2, K=8, V=12, lengths=(0, 1, 5, 17), slots=(4, 0, -1, 2))
    found = [of, replace(of, lengths=None, B=3, T=2, K=20, slots=(4, -1, 0), strided=True, layout="gaps"), replace(of, G=1)]
    pieces = replace(of, H=1, lengths=(3, 70, 64), slots=(5, 2, 7), strided=True, layout="heads first")
    return found + [replace(pieces, gate=gate) for gate in (("spikes", "weak") if VARIANTS[variant].decay else ("logsigmoid",))]
