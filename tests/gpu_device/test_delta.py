"""The delta rule on a GPU against the token loop in float64: heads, lengths, gates, keys, raw inputs, pools. Run with ``pytest -m gpu``."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from canonical import Sequences, check
from closing import check_closing
from contract import check_results, measured, run
from cuts import CUTS, changed, followed
from delta_cases import bounded_cases, gates, pooled_cases, raw_cases
from deltas import KEYS, VARIANTS, Delta, PooledDelta
from shares import check_shared_tiles

from penstock.gpu.launch import trying

pytest.importorskip("triton")
from delta_products import check_inverse, check_nan, check_parts, check_products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
HEADS = [(64, 64), (128, 128), (64, 128), (128, 64), (256, 512), (192, 40), (100, 100), (80, 96), (20, 36)]
"""K, V: those that have kernels for Hopper, wide ones, and others."""
ONE_STREAM = [name for name, row in VARIANTS.items() if row.streams == 1]
every_dtype = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
hopper_heads = pytest.mark.parametrize("D", [64, 128])


def case_of(variant: str, T: int = 150, **changed: object) -> Delta:
    """Two rows of a batch and two heads; gates and states in float32, as in models."""
    return Delta(variant, H=2, T=T, **{"K": 64, "V": 64, "others": FLOAT32} | changed)


@every_dtype
@every_variant
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_head_sizes(sizes, variant, dtype):
    K, V = sizes
    check_results(case_of(variant, T=150 if K < 256 else 70, K=K, V=V, dtype=dtype), "triton_chunkwise", DEVICE)


@every_dtype
@every_variant
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (100, 36)], ids=str)
def test_head_sizes_token_by_token(sizes, variant, dtype):
    K, V = sizes
    check_results(case_of(variant, T=40, K=K, V=V, dtype=dtype), "triton_recurrent", DEVICE)


@hopper_heads
@every_variant
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 700])
def test_lengths(T, variant, D):
    check_results(case_of(variant, T=T, K=D, V=D, dtype=BFLOAT16), "triton_chunkwise", DEVICE)


@pytest.mark.parametrize("impl", ["triton_chunkwise", "triton_recurrent"])
@hopper_heads
@every_variant
@pytest.mark.parametrize("lengths", [(0, 5, 64, 0, 1, 131, 0), (16, 16, 17), (3,) * 40, (0, 0)], ids=str)
def test_packed_sequences(lengths, variant, D, impl):
    check_results(case_of(variant, lengths=lengths, K=D, V=D, dtype=BFLOAT16), impl, DEVICE)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@hopper_heads
@pytest.mark.parametrize(("variant", "gate"), [(variant, gate) for variant in VARIANTS for gate in gates(variant)])
def test_any_gate(variant, gate, D, dtype):
    check_results(case_of(variant, K=D, V=D, gate=gate, dtype=dtype), "triton_chunkwise", DEVICE)


@hopper_heads
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_gates_of_16_bits_have_the_bits_of_the_same_gates_in_float32(variant, D):
    """All multiprocessors are busy, and memory: stores are under way for long."""
    case = Delta(variant, B=1, H=16, T=16384, K=D, V=D, dtype=BFLOAT16, others=BFLOAT16, gate="weak", state=False)
    tensors = case.tensors(DEVICE)
    with torch.no_grad():
        found, wanted = (case.call(tensors | {"g": tensors["g"].to(kind)}, "triton_chunkwise") for kind in (BFLOAT16, FLOAT32))
    assert torch.equal(found.output, wanted.output)
    assert torch.equal(found.final_state, wanted.final_state)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@hopper_heads
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("variant", ONE_STREAM)
def test_correlated_keys(variant, key, beta, D, dtype):
    check_results(case_of(variant, K=D, V=D, key=key, beta=beta, gate="weak", dtype=dtype), "triton_chunkwise", DEVICE)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@hopper_heads
@every_variant
def test_large_values(variant, D, dtype):
    of = case_of(variant, K=D, V=D, dtype=dtype, gate="weak")
    check_results(replace(of, v_factor=1e4, state_factor=1e5, upstream_factor=1e3), "triton_chunkwise", DEVICE)


RAW = [one for variant in VARIANTS for one in (*raw_cases(case_of(variant)), *bounded_cases(case_of(variant))) if one.dtype.itemsize < 8]


@hopper_heads
@pytest.mark.parametrize("case", RAW, ids=str)
def test_raw_inputs_and_bounds(case, D):
    check_results(replace(case, K=D, V=D), "triton_chunkwise", DEVICE)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@hopper_heads
@pytest.mark.parametrize(("H", "G"), [(4, 1), (4, 2), (6, 2)])
@every_variant
def test_heads_that_share_queries_and_keys(variant, H, G, D, dtype):
    of = replace(case_of(variant, K=D, V=D, dtype=dtype), H=H, G=G)
    check_results(of, "triton_chunkwise", DEVICE)
    if of.row.streams == 2:
        check_results(replace(of, removed=H), "triton_chunkwise", DEVICE)


@pytest.mark.parametrize("shared", ["BN", "T", "H", "KV", "overlap"])
@every_variant
def test_memory_that_elements_share(variant, shared):
    check_results(case_of(variant, T=70, dtype=BFLOAT16, shared=shared), "triton_chunkwise", DEVICE)


@every_variant
def test_strided_tensors_without_a_state(variant):
    check_results(case_of(variant, dtype=BFLOAT16, strided=True, state=False, scale=-0.3), "triton_chunkwise", DEVICE)


@hopper_heads
@pytest.mark.parametrize("case", [one for variant in VARIANTS for one in pooled_cases(variant) if one.dtype.itemsize < 8], ids=str)
def test_pools(case: PooledDelta, D):
    check_results(replace(case, K=D, V=D), "triton_recurrent", DEVICE)


@hopper_heads
@every_dtype
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_what_a_last_token_leaves_of_a_state_is_exact(variant, dtype, D):
    check_closing(case_of(variant, T=128, K=D, V=D, dtype=dtype, gate="weak", state=False), "triton_chunkwise", DEVICE)


LENGTHS = (200, 0, 64, 131, 37, 1, 300, 65, 5)
RANDOM = [
    (BFLOAT16, FLOAT32, "contiguous", False, 64),
    (BFLOAT16, BFLOAT16, "gaps", False, 128),
    (FLOAT16, FLOAT16, "heads first", True, 36),
    (FLOAT32, FLOAT32, "contiguous", True, 36),
    (BFLOAT16, FLOAT32, "contiguous", True, 128),
]
"""Dtypes of inputs and pool, the pool's layout, whether the inputs have gaps, and K."""


@pytest.mark.parametrize(("pool", "layout", "strided"), [(FLOAT32, "contiguous", True), (BFLOAT16, "gaps", False)], ids=str)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("variant", "K", "V", "dtype"),
    [
        ("delta_rule", 128, 128, BFLOAT16),
        ("gated_delta_rule", 128, 128, BFLOAT16),
        ("gated_delta_rule", 128, 128, FLOAT16),
        ("gated_delta_rule", 256, 128, BFLOAT16),
        ("kda", 128, 128, BFLOAT16),
        ("kda", 64, 64, BFLOAT16),
        ("kda", 128, 128, FLOAT16),
        ("rwkv7", 64, 64, BFLOAT16),
        ("rwkv7", 64, 64, FLOAT16),
    ],
    ids=str,
)
def test_random_calls_of_heads_whose_pieces_have_kernels_for_hopper(variant, K, V, dtype, raw, pool, layout, strided):
    gate = "mixture" if VARIANTS[variant].decay else "logsigmoid"
    case = case_of(variant, sum(LENGTHS), B=1, K=K, V=V, dtype=dtype, gate=gate, raw=raw, strided=strided, state=False)
    check(Sequences(case, LENGTHS, pool, layout, DEVICE), "auto", range(3))


@pytest.mark.parametrize(("dtype", "pool", "layout", "strided", "K"), RANDOM, ids=str)
@pytest.mark.parametrize("raw", [False, True])
@every_variant
def test_random_calls_equal_each_sequence_alone(variant, raw, dtype, pool, layout, strided, K):
    """Random cuts, rows, orders and slots, decode steps among them: every bit."""
    gate = "mixture" if VARIANTS[variant].decay else "logsigmoid"
    case = case_of(variant, sum(LENGTHS), B=1, K=K, V=64, dtype=dtype, gate=gate, raw=raw, strided=strided, state=False)
    check(Sequences(case, LENGTHS, pool, layout, DEVICE), "auto", range(3))


@pytest.mark.parametrize("impl", ["triton_chunkwise", "triton_recurrent"])
@pytest.mark.parametrize("raw", [False, True])
@every_dtype
@hopper_heads
@every_variant
def test_outputs_before_a_cut_have_equal_bits(variant, D, dtype, raw, impl):
    case = case_of(variant, T=130, K=D, V=D, dtype=dtype, raw=raw, gate="mixture" if VARIANTS[variant].decay else "logsigmoid")
    tensors = case.tensors(DEVICE)
    with torch.no_grad():
        whole = case.call(tensors, impl).output
        for cut in CUTS:
            for after in followed(case, impl):
                found = case.call(changed(case, tensors, cut, after), impl).output
                assert torch.equal(found[:, :cut], whole[:, :cut]), (cut, after)


ANCHORED = "rwkv7_sm90", "rwkv7_bwd_sm90"
OF_ANCHORED = Delta("rwkv7", H=2, T=200, K=64, V=64, dtype=BFLOAT16, others=FLOAT32, raw=True)
ANCHORED_CASES = [
    *(replace(OF_ANCHORED, T=T) for T in (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 700)),
    *(replace(OF_ANCHORED, centre=centre) for centre in (-9.0, -5.0, 9.0, 60.0)),
    *(replace(OF_ANCHORED, key=key, centre=-5.0) for key in KEYS),
    *(replace(OF_ANCHORED, lengths=lengths) for lengths in ((0, 5, 64, 0, 1, 131, 0), (16, 16, 17), (3,) * 40)),
    replace(OF_ANCHORED, H=9, state=False, scale=-0.3),
    replace(OF_ANCHORED, H=4, G=2),
    replace(OF_ANCHORED, v_factor=1e4, state_factor=1e5, upstream_factor=1e3),
]


OF_ANCHORED_HALF = replace(OF_ANCHORED, dtype=FLOAT16)
ANCHORED_HALF_CASES = [
    *(replace(OF_ANCHORED_HALF, T=T) for T in (1, 17, 63, 64, 65, 129, 700)),
    *(replace(OF_ANCHORED_HALF, centre=centre) for centre in (-9.0, -5.0, 9.0, 60.0)),
    *(replace(OF_ANCHORED_HALF, key=key, centre=-5.0) for key in KEYS),
    *(replace(OF_ANCHORED_HALF, lengths=lengths) for lengths in ((0, 5, 64, 0, 1, 131, 0), (3,) * 40)),
    replace(OF_ANCHORED_HALF, H=9, state=False, scale=-0.3),
    replace(OF_ANCHORED_HALF, H=4, G=2),
]


OF_ANCHORED_SINGLE = replace(OF_ANCHORED, dtype=FLOAT32)
ANCHORED_SINGLE_CASES = [
    *(replace(OF_ANCHORED_SINGLE, T=T) for T in (1, 17, 63, 64, 65, 129, 700)),
    *(replace(OF_ANCHORED_SINGLE, centre=centre) for centre in (-9.0, -5.0, 9.0, 60.0)),
    *(replace(OF_ANCHORED_SINGLE, key=key, centre=-5.0) for key in KEYS),
    *(replace(OF_ANCHORED_SINGLE, lengths=lengths) for lengths in ((0, 5, 64, 0, 1, 131, 0), (3,) * 40)),
    replace(OF_ANCHORED_SINGLE, H=9, state=False, scale=-0.3),
    replace(OF_ANCHORED_SINGLE, H=4, G=2),
    replace(OF_ANCHORED_SINGLE, v_factor=1e4, state_factor=1e5, upstream_factor=1e3),
]


KDA = "kda_prepare_sm90", "kda_bwd_sm90"
OF_KDA = Delta("kda", H=2, T=150, K=64, V=64, dtype=FLOAT16, others=FLOAT32)
KDA_CASES = [
    *(replace(OF_KDA, gate=gate) for gate in gates("kda")),
    *(replace(OF_KDA, key=key, beta=beta, gate="weak") for key in ("random", "positive", "equal") for beta in (0.0, 1.0, 2.0)),
    replace(OF_KDA, B=1, H=1, T=700, K=128, V=128),
    replace(OF_KDA, T=70, K=128, V=128),
    replace(OF_KDA, T=17, others=FLOAT16),
    replace(OF_KDA, T=70, H=4, G=2),
    replace(OF_KDA, state=False, scale=-0.3),
]


KDA_SINGLE = "kda_float32_sm90", "kda_bwd_float32_sm90"
OF_KDA_SINGLE = replace(OF_KDA, dtype=FLOAT32)
KDA_SINGLE_CASES = [
    *(replace(OF_KDA_SINGLE, gate=gate) for gate in gates("kda")),
    *(replace(OF_KDA_SINGLE, key=key, beta=beta, gate="weak") for key in KEYS for beta in (0.0, 1.0, 2.0)),
    *(replace(OF_KDA_SINGLE, T=T, K=128, V=128) for T in (1, 17, 63, 64, 65, 700)),
    *(replace(OF_KDA_SINGLE, **heads, gate="mixture") for heads in ({"K": 128}, {"V": 128})),
    *(replace(OF_KDA_SINGLE, K=128, V=128, lengths=lengths) for lengths in ((0, 5, 64, 0, 1, 131, 0), (3,) * 40)),
    replace(OF_KDA_SINGLE, T=70, H=4, G=2),
    replace(OF_KDA_SINGLE, state=False, scale=-0.3),
    replace(OF_KDA_SINGLE, v_factor=1e4, state_factor=1e5, upstream_factor=1e3, gate="mixture"),
]


SCALAR = "gdn_prepare_sm90", "gdn_bwd_sm90"
OF_SCALAR = Delta("gated_delta_rule", H=4, G=2, T=150, K=128, V=128, dtype=BFLOAT16, others=FLOAT32)
SCALAR_CASES = [
    *(replace(OF_SCALAR, gate=gate) for gate in gates("gated_delta_rule")),
    *(replace(OF_SCALAR, key=key, beta=beta, gate="weak") for key in ("random", "positive", "equal") for beta in (0.0, 1.0, 2.0)),
    *(replace(OF_SCALAR, T=T, G=1, K=64, V=64) for T in (1, 63, 64, 65, 700)),
    *(replace(OF_SCALAR, lengths=lengths) for lengths in ((0, 5, 64, 0, 1, 131, 0), (3,) * 40)),
    replace(OF_SCALAR, variant="delta_rule", G=4),
    replace(OF_SCALAR, variant="delta_rule", V=64, others=BFLOAT16, state=False, scale=-0.3),
]


SCALAR_SINGLE = "gdn_float32_sm90", "gdn_bwd_float32_sm90"
OF_SCALAR_SINGLE = replace(OF_SCALAR, dtype=FLOAT32)
SCALAR_SINGLE_CASES = [
    *(replace(OF_SCALAR_SINGLE, gate=gate) for gate in gates("gated_delta_rule")),
    *(replace(OF_SCALAR_SINGLE, key=key, beta=beta, gate="weak") for key in KEYS for beta in (0.0, 1.0, 2.0)),
    *(replace(OF_SCALAR_SINGLE, T=T, G=1, K=64, V=64) for T in (1, 63, 64, 65, 700)),
    *(replace(OF_SCALAR_SINGLE, **heads, gate="mixture") for heads in ({"K": 64}, {"V": 64})),
    *(replace(OF_SCALAR_SINGLE, lengths=lengths) for lengths in ((0, 5, 64, 0, 1, 131, 0), (3,) * 40)),
    replace(OF_SCALAR_SINGLE, variant="delta_rule", G=4),
    replace(OF_SCALAR_SINGLE, variant="delta_rule", state=False, scale=-0.3),
    replace(OF_SCALAR_SINGLE, v_factor=1e4, state_factor=1e5, upstream_factor=1e3, gate="mixture"),
]


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU")
@pytest.mark.parametrize(
    ("case", "forms"),
    [
        *((case, ANCHORED) for case in (*ANCHORED_CASES, *ANCHORED_HALF_CASES, *ANCHORED_SINGLE_CASES)),
        *((case, KDA) for case in KDA_CASES),
        *((case, KDA_SINGLE) for case in KDA_SINGLE_CASES),
        *((case, SCALAR) for case in SCALAR_CASES),
        *((case, SCALAR_SINGLE) for case in SCALAR_SINGLE_CASES),
    ],
    ids=str,
)
def test_forms_that_are_named(case, forms):
    """Results, equal bits in two calls, and before a cut: of RWKV-7 with one anchor in a chunk, of KDA and gated DeltaNet."""
    with trying({}, *forms) as planned:
        check_results(case, "triton_chunkwise", DEVICE)
        tensors = case.tensors(DEVICE)
        first, again = (measured(case, "triton_chunkwise", DEVICE) for _ in range(2))
        for name, x in first.items():
            assert torch.equal(x, again[name]), name
        for cut in CUTS if case.lengths is None else ():
            for after in followed(case, "triton_chunkwise"):
                found = case.call(changed(case, tensors, cut, after), "triton_chunkwise").output
                assert torch.equal(found[:, :cut], first["output"][:, :cut]), (cut, after)
    assert set(forms) <= planned


MANY = [
    *((variant, dtype, D, ()) for variant in VARIANTS for dtype in (BFLOAT16, FLOAT16, FLOAT32) for D in (64, 128)),
    *((variant, BFLOAT16, D, SCALAR) for variant in ("gated_delta_rule", "delta_rule") for D in (64, 128)),
    *((variant, FLOAT32, D, SCALAR_SINGLE) for variant in ("gated_delta_rule", "delta_rule") for D in (64, 128)),
    ("rwkv7", FLOAT32, 64, ANCHORED),
    *(("kda", FLOAT32, D, KDA_SINGLE) for D in (64, 128)),
]
"""Variants, dtypes, heads, and forms that are named."""


@pytest.mark.parametrize(("variant", "dtype", "D", "forms"), MANY, ids=str)
def test_gradients_of_many_programs_have_equal_bits(variant, dtype, D, forms):
    """All multiprocessors are busy, and programs begin beside others: what one of 10,000 changes is found."""
    if forms and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    case = case_of(variant, T=2048, B=4, K=D, V=D, dtype=dtype, raw=variant == "rwkv7")
    case = replace(case, H=8, gate="weak" if VARIANTS[variant].decay and not case.raw else case.gate)
    tensors, upstream = case.tensors(DEVICE), case.upstream(DEVICE)
    with trying({}, *forms) if forms else nullcontext():
        first = run(case, tensors, upstream, "triton_chunkwise")
        for _ in range(10):
            for name, x in run(case, tensors, upstream, "triton_chunkwise").items():
                assert torch.equal(x, first[name]), name


HALF = {"dtype": BFLOAT16, "others": FLOAT32}
SHARING = [
    (Delta("kda", T=700, B=1, H=2, K=128, V=128, **HALF), False),
    (Delta("gated_delta_rule", T=700, B=1, H=2, K=128, V=128, **HALF), False),
    (Delta("delta_rule", T=130, B=1, H=2, K=64, V=64, **HALF), False),
    (Delta("rwkv7", T=700, B=1, H=2, K=64, V=64, raw=True, **HALF), True),
    (Delta("dplr", T=130, B=1, H=2, K=48, V=48, **HALF), False),
]
"""Calls, and whether their tiles depend on values on Hopper."""


@pytest.mark.parametrize(("case", "own_values"), SHARING, ids=str)
def test_passes_take_the_tiles_of_summaries(case, own_values):
    check_shared_tiles(case, own_values and torch.cuda.get_device_capability()[0] == 9, DEVICE)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16", "tf32", "ieee"])
def test_products_of_parts(precision):
    check_products(precision, DEVICE)


def test_nan_of_any_bits_stays_nan():
    check_nan(DEVICE, ["tf32x3", "bf16", "tf32", "ieee"])


def test_parts_of_products():
    check_parts(DEVICE)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("precision", ["tf32x3", "bf16", "ieee"])
def test_the_inverse_of_a_chunk(precision, in_place):
    check_inverse(precision, in_place, DEVICE)
