"""Updates in place by the delta rule: cuts, other rows, decode steps; options of raw inputs."""

from dataclasses import replace

import pytest
import torch
from canonical import Sequences, check
from deltas import NAMES, VARIANTS, Delta, named

import penstock as ps

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS, SHORT = (131, 0, 64, 5, 70), (67, 0, 64, 3)
RANDOM = [
    (FLOAT32, FLOAT32, "contiguous", False),
    (FLOAT32, FLOAT16, "gaps", True),
    (BFLOAT16, BFLOAT16, "heads first", False),
    (FLOAT64, FLOAT64, "contiguous", False),
    (FLOAT16, FLOAT32, "gaps", True),
]
"""Dtypes of inputs and pool, the pool's layout, and whether the inputs have gaps."""
TAKEN = [(impl, one) for impl in NAMES for one in RANDOM if impl != "cpu" or one[0] != FLOAT64]
OF_RAW = [name for name, row in VARIANTS.items() if row.streams == 1 or row.raw]
EITHER = [(name, raw) for name in VARIANTS for raw in (False, True) if not raw or name in OF_RAW]


@pytest.mark.parametrize(("impl", "options"), TAKEN, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_calls_equal_each_sequence_alone(variant, impl, options):
    """Random cuts, rows, orders and slots, decode steps among them. Rows of one length share torch's products if not packed."""
    dtype, pool, layout, strided = options
    gate = "mixture" if VARIANTS[variant].decay else "logsigmoid"
    case = Delta(variant, B=1, T=sum(LENGTHS), H=2, K=5, V=7, dtype=dtype, strided=strided, gate=gate, state=False)
    check(Sequences(case, LENGTHS, pool, layout), impl, range(1), batches=impl != "chunkwise")


@pytest.mark.parametrize(("impl", "options"), TAKEN, ids=str)
@pytest.mark.parametrize("variant", OF_RAW)
def test_random_calls_with_raw_inputs_equal_each_sequence_alone(variant, impl, options):
    dtype, pool, layout, strided = options
    case = Delta(variant, B=1, T=sum(LENGTHS), H=2, G=1, K=20, V=12, dtype=dtype, strided=strided, raw=True, state=False)
    check(Sequences(case, LENGTHS, pool, layout), impl, range(1), batches=impl != "chunkwise")


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("options", [RANDOM[1], RANDOM[4]], ids=str)
@pytest.mark.parametrize(("variant", "raw"), EITHER)
def test_random_calls_of_triton_equal_each_sequence_alone(variant, raw, options):
    dtype, pool, layout, strided = options
    gate = "mixture" if VARIANTS[variant].decay else "logsigmoid"
    case = Delta(variant, B=1, T=sum(SHORT), H=2, G=1, K=5, V=7, dtype=dtype, strided=strided, gate=gate, raw=raw, state=False)
    check(Sequences(case, SHORT, pool, layout), "triton_recurrent", range(1))


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_steps_continue_a_call(variant, raw, impl):
    """Steps without an axis of tokens, and of 3 tokens, equal a call over the whole sequence."""
    if raw and variant not in OF_RAW:
        return
    case = Delta(variant, B=2, T=9, H=2, G=1, K=8, V=12, raw=raw)
    tensors = case.drawn()
    state = tensors.pop("initial_state").clone()
    wanted = case.call(tensors | {"initial_state": state.clone()}, impl)
    axes = case.operator.signatures[variant].axes
    outputs = []
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 6), (6, 9)):
        part = {name: x[:, begin:end] if x is not None and "T" in axes[name] else x for name, x in tensors.items()}
        if end - begin == 1:
            part = {name: x.squeeze(1) if x is not None and "T" in axes[name] else x for name, x in part.items()}
        found = ps.decode_step(variant, **named(case, part, "q", "g"), state=state, impl=impl)
        outputs.append(found if found.dim() == 4 else found[:, None])
    torch.testing.assert_close(torch.cat(outputs, 1), wanted.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, wanted.final_state, rtol=1e-5, atol=1e-5)


ONE = Delta("kda", B=2, T=1, H=2, K=4, V=4, state=False)
STREAMS = {"beta": None, "a": torch.zeros(2, 1, 2, 4), "b": torch.zeros(2, 1, 2, 4)}


@pytest.mark.parametrize(
    ("variant", "changed", "kind", "said"),
    [
        ("kda", {"u": torch.zeros(2, 4)}, ps.RangeError, r"advance\('kda'\): u must be left out for kda.* beta, .*by name"),
        ("gla", {"use_qk_l2norm": True}, ps.RangeError, r"advance\('gla'\): .* must be left out for gla"),
        ("kda", {"beta": None}, ps.DtypeError, r"advance\('kda'\): beta must be a torch.Tensor, got None"),
        ("kda", {"raw_decay": True}, ps.RangeError, r"raw_decay must be False for kda"),
        ("kda", {"lower_bound": -5.0}, ps.RangeError, "lower_bound must be None without A_log"),
        ("rwkv7", STREAMS | {"lower_bound": -0.01}, ps.RangeError, r"advance\('rwkv7'\): g must be at least lower_bound = -0.01, got -"),
        ("kda", {"allow_neg_eigval": True}, ps.RangeError, "allow_neg_eigval must be False without beta_logits"),
        ("kda", {"g": -ONE.drawn()["g"]}, ps.RangeError, "g must be a log decay"),
        ("kda", {"g": None}, ps.ShapeError, r"g must be given, of shape \[B,T,H,K\], got None"),
        ("delta_rule", {}, ps.ShapeError, r"g must be left out \(this variant has no decay\)"),
    ],
    ids=str,
)
def test_a_refused_call_leaves_the_pool_unchanged(variant, changed, kind, said):
    arguments = {name: x for name, x in ONE.drawn().items() if x is not None}
    if variant == "gla":
        del arguments["beta"]
    pool = torch.randn(2, 2, 4, 4)
    before = pool.clone()
    with pytest.raises(kind, match=said):
        ps.advance(variant, **arguments | changed, state=pool)
    assert torch.equal(pool, before)


def test_variants_of_all_families_are_listed():
    with pytest.raises(
        ps.RangeError, match=r"advance: variant must be one of linear_attention, .*, rwkv6, delta_rule, .*, dplr, got 'ttt'"
    ):
        ps.advance("ttt", *(torch.zeros(1, 1, 1, 1),) * 3, state=torch.zeros(1, 1, 1, 1))


def test_explained():
    tensors = {name: x for name, x in replace(ONE, raw=True).drawn().items() if x is not None}
    named_ = named(replace(ONE, raw=True), tensors, "q", "g")
    found = ps.explain("advance", "kda", **named_, state=torch.zeros(2, 2, 4, 4))
    assert set(found.chosen) == {"advance"}
    assert found.call.startswith("advance('kda')(B=2, T=1, H=2")
    assert ps.explain("advance", "gla", *(torch.zeros(1, 1, 1, 1),) * 4, state=torch.zeros(1, 1, 1, 1)).chosen.keys() == {"advance"}
