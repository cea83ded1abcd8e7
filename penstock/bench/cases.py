"""Benchmark cases: shapes of real models in one table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import Complaints, RangeError
from ..layers.keywords import suggestion
from ..tokens.distributions import GATES, STRENGTHS
from ..tokens.shape import Shape


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    variant: str
    shape: Shape
    model: str
    """The model whose layer has this shape."""
    gates: str = ""
    """The distribution of the decays: one of ``GATES`` or ``STRENGTHS``, or "" for that of the variant."""
    groups: int | None = None
    """Heads of q and k, if heads of v share them."""
    slots: bool = False
    """Whether a decode step updates rows of the states in random order."""

    @property
    def kind(self) -> str:
        """The variant, with the distribution of its decays if it is not the variant's own, as in rwkv6-soft."""
        return f"{self.variant}-{self.gates}" if self.gates else self.variant


DECODE_BATCHES = (1, 4, 16, 64, 256)

MODELS = (
    Case("linear-1024", "linear_attention", Shape(1, 1024, 16, 64, 64), "Linear Transformer, 16 heads of 64"),
    Case("retnet-1.3b", "retention", Shape(1, 1024, 8, 256, 512), "RetNet 1.3B"),
    Case("mamba2-1.3b", "simple_gla", Shape(1, 1024, 64, 128, 64), "Mamba-2 1.3B: state 128, heads of 64"),
    Case("gla-1.3b", "gla", Shape(1, 1024, 4, 256, 512), "GLA 1.3B"),
    Case("rwkv5-1.5b", "rwkv5", Shape(1, 1024, 32, 64, 64), "RWKV-5 World 1.5B"),
    Case("rwkv6-1.6b", "rwkv6", Shape(1, 1024, 32, 64, 64), "RWKV-6 World 1.6B"),
    Case("rwkv6-7b", "rwkv6", Shape(1, 1024, 64, 64, 64), "RWKV-6 World 7B"),
    Case("deltanet-1.3b", "delta_rule", Shape(1, 1024, 16, 128, 128), "DeltaNet 1.3B: 16 heads of 128"),
    Case("qwen3-next", "gated_delta_rule", Shape(1, 1024, 32, 128, 128), "Qwen3-Next 80B: 32 heads of v, 16 of q and k", groups=16),
    Case("kimi-linear", "kda", Shape(1, 1024, 32, 128, 128), "Kimi Linear 48B: 32 heads of 128"),
    Case("rwkv7-1.5b", "rwkv7", Shape(1, 1024, 32, 64, 64), "RWKV-7 World 1.5B"),
    Case("dplr-1.5b", "dplr", Shape(1, 1024, 32, 64, 64), "RWKV-7 World 1.5B: its sizes"),
    Case("rwkv6-profile", "rwkv6", Shape(1, 54, 32, 64, 64), "RWKV-6 World 1.6B, a prompt of 54 tokens"),
)
"""The input of one layer of each model for a prompt or a training sequence. The first row of a variant is its default."""

DECODING = tuple(
    replace(case, name=f"{case.name}-decode-{batch}", shape=case.shape._replace(B=batch, T=1), model=f"{case.model}, decoding")
    for case in MODELS
    if case.shape.T == 1024
    for batch in DECODE_BATCHES
)
"""A decode step of these models for batches of 1 to 256 sequences."""


def _sized(kind: str, sizes: str, model: str, slots: bool = False) -> Case:
    """Name a case by its sizes, as in gla-8x2048x32x64. Heads 16/64: 64 heads of v share 16 heads of q and k."""
    variant, _, gates = kind.partition("-")
    B, T, heads, *rest = sizes.split(",")
    groups, shared, heads = heads.rpartition("/")
    shape = Shape.parse(",".join((B, T, heads, *rest)))
    return Case(f"{kind}-{sizes.replace(',', 'x')}", variant, shape, model, gates, int(groups) if shared else None, slots)


GPU_SHAPES = (
    (
        ("linear_attention", "retention", "simple_gla", "gla", "rwkv6-soft", "rwkv6"),
        "8,2048,32,64",
        "32 heads of 64, a batch that fills a GPU",
    ),
    (("gla", "rwkv6-soft"), "1,65536,32,64", "the same, one long sequence"),
    (("linear_attention", "gla", "rwkv6-soft", "rwkv6"), "4,2048,16,128", "16 heads of 128"),
    (("gla", "rwkv6-soft"), "1,8192,96,128", "a wide model: 96 heads of 128"),
    (("gla", "rwkv6-soft"), "2,16384,16,128", "16 heads of 128, long sequences"),
    (("gla",), "8,2048,4,256,512", "GLA 1.3B: 4 heads of 256 and 512"),
    (("gla", "rwkv6-soft"), "1,2048,32,64", "one sequence: few programs"),
    (("gla", "rwkv6-soft"), "1,54,32,64", "a prompt of 54 tokens: bound by the host"),
)
"""Training and prompts on a GPU: variants, sizes and a description. Other projects measure rwkv6 with soft decays."""
GPU_TRAINING = tuple(_sized(kind, sizes, model) for kinds, sizes, model in GPU_SHAPES for kind in kinds)
GPU_DECODING = tuple(
    _sized(variant, f"{batch},1,32,64", f"one token, {batch} sequence{'s' * (batch > 1)}")
    for variant in ("gla", "rwkv6")
    for batch in (1, 256, 1024)
) + tuple(
    _sized(variant, f"{batch},1,{heads}", f"one token, {batch} sequence{'s' * (batch > 1)}, by slots", slots=True)
    for variant, heads in (("kda", "32,128"), ("rwkv7", "32,64"))
    for batch in (1, 128, 1024)
)
GATED = tuple(
    _sized(f"{variant}-{gates}", sizes, model)
    for sizes, model in (("8,2048,32,64", "32 heads of 64"), ("4,2048,16,128", "16 heads of 128"))
    for variant in ("rwkv6", "gla")
    for gates in GATES
    if gates != "soft"
)
"""From decays that keep nearly everything to those that forget nearly everything. The soft ones are among the training shapes."""
ANY_STRENGTH = tuple(strength for strength in STRENGTHS if strength != "bound")
IN_BOUND = ("tiny", "slow", "bounded", "bound")
"""The strengths between RWKV-7's bounds."""
DELTA_SHAPES = (
    ("kda", ANY_STRENGTH, "1,8192,64,128", "64 heads of 128, one sequence"),
    ("kda", ANY_STRENGTH, "1,4096,16,128", "16 heads of 128, one sequence"),
    ("kda", ANY_STRENGTH, "1,2048,12,128", "12 heads of 128: few programs"),
    ("gated_delta_rule", ANY_STRENGTH, "4,8192,16/64,128", "64 heads of v, 16 of q and k"),
    ("gated_delta_rule", ANY_STRENGTH, "1,32768,16/32,128", "a long sequence, 32 heads of v, 16 of q and k"),
    ("rwkv7", IN_BOUND, "8,2048,32,64", "32 heads of 64, a batch that fills a GPU"),
    ("rwkv7", IN_BOUND, "1,8192,32,64", "32 heads of 64, one sequence"),
)
"""Variants of the delta rule, the strengths of their decays, sizes and a description."""


def _strengths(shapes: tuple[tuple[str, tuple[str, ...], str, str], ...]) -> tuple[Case, ...]:
    return tuple(_sized(f"{variant}-{gates}", sizes, model) for variant, strengths, sizes, model in shapes for gates in strengths)


DELTA_GATES = _strengths(DELTA_SHAPES)
DELTA_GATES_CPU = _strengths(
    (
        ("rwkv7", IN_BOUND, "1,1024,32,64", "32 heads of 64"),
        ("kda", ANY_STRENGTH, "1,1024,16,128", "16 heads of 128"),
        ("gated_delta_rule", ANY_STRENGTH, "1,1024,16,128", "16 heads of 128"),
    )
)
"""The same on a CPU, beside the token loop."""
LENGTHS = tuple(
    _sized("rwkv6", f"1,{length},32,64", "one sequence of growing length")
    for length in (2048, 4096, 8192, 16384, 32768, 65536, 131072, 163840)
)

SOFTMAX = tuple(
    _sized("softmax_attention", sizes, model)
    for sizes, model in (("4,4096,16,128", "16 heads of 128"), ("8,2048,32,64", "32 heads of 64"), ("1,16384,32,128", "one long sequence"))
)
"""Causal softmax attention of hybrid models."""
SOFTMAX_MODEL = Case("llama-7b", "softmax_attention", Shape(1, 1024, 32, 128, 128), "Llama 7B: 32 heads of 128")
"""The default case of softmax attention."""

CASES = tuple(
    {
        case.name: case
        for cases in (
            *(MODELS, (SOFTMAX_MODEL,), DECODING, LENGTHS, GPU_TRAINING, GPU_DECODING, GATED, SOFTMAX),
            *(DELTA_GATES, DELTA_GATES_CPU),
        )
        for case in cases
    }.values()
)
"""Every case of ``penstock bench --case``. Two of the lengths are also training shapes."""


def case_named(name: str) -> Case:
    """The case of this name. Raises RangeError if there is none."""
    found = [case for case in CASES if case.name == name]
    if not found:
        complaints = Complaints("bench")
        remedy = suggestion(name, [case.name for case in CASES]) or "For example rwkv6-1.6b."
        complaints.add(RangeError, "case", "a name that penstock bench --list shows", repr(name), remedy)
        complaints.raise_any()
    return found[0]


def default_cases(variant: str, decode: bool) -> list[Case]:
    """The cases of a variant if no case is named: its first model, or for decoding that model with every batch size."""
    first = next(case for case in (*MODELS, SOFTMAX_MODEL) if case.variant == variant)
    return [case for case in DECODING if case.name.startswith(f"{first.name}-decode-")] if decode else [first]
