"""Configurations of the kernels: measured, or by rule, within the GPU's shared memory."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from ...gpu.target import Target, from_registers, tensor_memory

KERNELS = ("forward", "backward", "states", "recurrent", "step")
"""The last two are one source: whole sequences token by token, and decode steps in place."""
DECAYS = ("none", "scalar", "channel")
"""Names of the kinds of decay, in the order of the kernels' constants."""
READS = ("updated", "previous")
PRECISIONS = ("bf16", "tf32", "tf32x3", "ieee")

LEAST = 64
"""Blocks of the chunk kernels: with 32 columns and chunks of 64, Triton 3.6 made code that read out of bounds on Hopper."""
LONGEST = 64
"""Tokens in a chunk at most, by rule."""


class KernelConfig(NamedTuple):
    """Sizes of a launch."""

    warps: int
    BV: int = 64
    """Value channels per program."""
    BK: int = 64
    """Key channels per block; kernels that hold a state have one block."""
    C: int = 0
    """Tokens in a chunk."""
    stages: int = 1
    """Of the software pipeline."""
    programs_per_sm: int = 0
    """The target of programs per multiprocessor: sequences are cut into segments, or the blocks of a step get fewer columns."""
    form: str = ""
    """"hopper": where they apply, the kernels for Hopper are the first launches; the sizes are then those of what follows."""


class Key(NamedTuple):
    """The key of a measured configuration."""

    kernel: str
    decay: str
    read: str
    precision: str
    """Of the products, see ``plan.precision``."""
    K: int
    """Key channels, up to the next power of two."""
    V: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def config(key: Key, target: Target) -> KernelConfig:
    """Sizes for a kernel on a GPU."""
    found = target.table.get(key)
    return found if found is not None else fitted(by_rule(key, target), key, target.shared_memory)


HOPPER = tuple(
    Key(kernel, "channel", read, precision, K, V)
    for read in READS
    for precision in ("bf16", "tf32", "tf32x3")
    for kernel in ("forward", "backward")
    for K, V in product((64, 128, 256), (64, 128, 256, 512))
)
"""Where the kernels for Hopper are faster. "tf32": also float16 tensors, which Hopper's kernels multiply in float16."""


def by_rule(key: Key, target: Target) -> KernelConfig:
    """Sizes where nothing was measured: those that were best on one NVIDIA H200 (tables/sm_90.json), carried over."""
    config = _as_on_hopper(key, target)
    if target.arch.startswith("gfx"):  # 4 warps leave a thread 512 registers: gla at 256 and 512 spilled 3964 bytes with 8, none with 4
        config = config._replace(warps=min(config.warps, 4))
    elif from_registers(target) and key.kernel in ("forward", "backward"):
        config = _of_255_registers(config, key)
    if target.arch == "sm_90" and key in HOPPER:
        config = config._replace(form="hopper", programs_per_sm=min(config.programs_per_sm, 2))  # two fit at K = 64
    if tensor_memory(target) and key.kernel in ("forward", "backward"):
        config = _of_tensor_memory(config, key)
    return config


def _of_tensor_memory(config: KernelConfig, key: Key) -> KernelConfig:
    """Sizes if products go to tensor memory, from which threads read them: 8 warps, and short chunks where a state is large.

    Bytes of spills on sm_100 with 4 warps or in chunks of 32, and now: gla at 64 forward 336, 0; backward 408, 0; in float32 848, 8; at 128
    464, 0 and 376, 80; with K = 256 600, 216 and 712, 40; rwkv6 at 64 in float16 680, 8 and 584, 0; retention with K = 256 200, 0.
    """
    if key.decay == "channel":
        config = config._replace(warps=8)
    if key.kernel == "forward" and key.K > 128 and key.decay != "none":
        return config._replace(warps=8, C=16, stages=1)
    if key.kernel == "backward" and key.precision == "tf32x3" and key.decay == "channel":
        return config._replace(C=16)
    if key.kernel == "backward" and key.decay == "scalar":
        return config._replace(C=min(config.C, 32))  # Triton 3.7.1 cannot compile chunks of 64 there
    return config


def _of_255_registers(config: KernelConfig, key: Key) -> KernelConfig:
    """Sizes if operands of products are registers, of which a thread has 255: short chunks, and 8 warps where 4 would spill.

    Bytes of spills on sm_80 in chunks of 64 or with 4 warps, and now: simple_gla at 64 forward 232, 0; backward 240, 0; at 128 176, 0 and
    384, 0; linear_attention at 64 float16 backward 1448, 0; gla at 128 float16 forward 216, 0; rwkv6 at 64 float16 backward 144, 0.
    With K = 256 in chunks of 32 and of 16: gla forward 4544, 240; retention 608, 0.
    """
    if key.decay != "none" or key.precision != "bf16":
        config = config._replace(C=min(config.C, 16 if key.precision == "tf32x3" else 32))
    if key.kernel == "forward" and key.K > 128 and key.decay != "none":
        config = config._replace(C=16, stages=1)
    more = key.K > 64
    if key.kernel == "backward":
        more |= (key.decay, key.precision) in (("channel", "tf32"), ("scalar", "tf32x3"))
    if key.decay == "channel" or (key.decay == "scalar" and more):
        config = config._replace(warps=8 if more else 4)
    return config


def _as_on_hopper(key: Key, target: Target) -> KernelConfig:
    kernel, decay, read, precision, K, V = key
    short = precision == "bf16"
    if kernel in ("recurrent", "step") and target.interpreted:
        return KernelConfig(1, BV=64)  # the time of the interpreter is proportional to the number of programs
    if kernel == "step":  # 64 float32 of the state a thread; gla, 1024 sequences: rows of 64 take 0.276 ms, 32 0.289, 16 0.329
        BV = 64 if K <= 256 else 32
        return KernelConfig(
            max(K * BV // 2048, 1), BV=BV, programs_per_sm=4
        )  # one sequence: 2.3 us with rows of 16; between, nothing is measured
    if kernel == "recurrent":
        return KernelConfig(1, BV=16) if K <= 128 else KernelConfig(4, BV=8)
    if kernel == "states":  # wider config read less, but there are fewer: segments are walked twice
        if decay == "channel" and not short and target.arch == "sm_90":  # float32 at 64: 0.23 and 0.17 ms, with 2 warps 0.24 and 0.22
            return KernelConfig(4, BK=32, stages=2, programs_per_sm=4)
        if K <= 64 or V <= 64 or not short:
            return KernelConfig(2, BK=32, stages=3 if short else 1, programs_per_sm=4)
        return KernelConfig(4, BK=32 if K <= 128 else 64, BV=128, stages=3, programs_per_sm=2)
    if kernel == "backward":
        if not short:
            return KernelConfig(4, C=64 if precision == "tf32" and K <= 64 else 32)
        if K <= 64:
            return KernelConfig(4, C=64)
        if decay != "channel" or K > 128:  # no factors to make again for each block
            return KernelConfig(4, C=64, BK=128 if decay == "none" and K <= 128 else 64)
        return KernelConfig(4, C=32, BK=128)
    if not short:
        return (
            KernelConfig(4, C=64 if precision == "tf32" else 16, programs_per_sm=2) if K <= 64 else KernelConfig(8, C=16, programs_per_sm=2)
        )
    if K <= 64:
        return KernelConfig(4, C=32 if decay == "none" or read == "previous" else 64, stages=3, programs_per_sm=3)
    return KernelConfig(4 if K <= 128 else 8, C=32, stages=3, programs_per_sm=1)


def fitted(config: KernelConfig, key: Key, shared_memory: int) -> KernelConfig:
    """Fewer stages, then shorter chunks, until a program fits; if nothing does, the smallest."""
    while shared_bytes(config, key) > shared_memory and (config.stages > 1 or config.C > 16):
        config = config._replace(stages=config.stages - 1) if config.stages > 1 else config._replace(C=config.C // 2)
    return config


def shared_bytes(config: KernelConfig, key: Key) -> int:
    """Shared memory that a program may take: never less than what it was compiled to (bench/resources.json), up to 3 times as much.

    A state (in float32 products also as it was), four tiles and A are operands there or change their layout through it, in the
    backward pass a fifth tile (half a tile more in short chunks of float32) and the gradient of A; and each stage but one of the pipeline
    waits there.
    """
    size = 2 if key.precision == "bf16" else 4
    if key.kernel in ("recurrent", "step"):
        return 4 * key.K * config.BV
    K, V, C = min(key.K, config.BK), min(key.V, config.BV), config.C or LONGEST
    K, V = (max(K, LEAST), max(V, LEAST)) if key.kernel != "states" else (K, V)
    if key.kernel == "forward":
        K = max(key.K, LEAST)
    tiles, states = C * (3 * K + V + C), K * V
    if key.kernel == "backward":
        tiles += C * (K + C) + C * K // 2 * (size == 4 and C < 32)
    elif key.kernel == "forward" and size == 4:
        states *= 2
    layouts = size * (states + tiles)
    if (key.kernel, key.decay, key.precision) == ("forward", "channel", "tf32"):
        layouts += 2 * C * K  # the tile of a level, of float16 inputs
    stage = C * (size * (2 * K + V) + 4 * K * (key.decay == "channel"))
    return layouts + stage * (config.stages - 1)
