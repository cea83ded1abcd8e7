"""Peers of the delta rule, called through stubs: modules with the functions of the packages, which compute with the oracle.

A stub has the names, layouts, dtypes and defaults of its package, and raises for others. So a wrong conversion gives a wrong result.
"""

import math
import sys
from types import ModuleType

import pytest
import torch

import penstock as ps
from penstock.bench import delta_peers, fla
from penstock.bench.delta_peers import PACKAGES, installed
from penstock.bench.measure import measure
from penstock.bench.peers import peer, peer_names
from penstock.errors import RangeError
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {"kda": Shape(2, 7, 2, 128, 128), "gated_delta_rule": Shape(2, 7, 4, 128, 128), "rwkv7": Shape(2, 7, 2, 64, 64)}
GROUPS = {"gated_delta_rule": 2}
VARIANTS = ("delta_rule", "gated_delta_rule", "kda", "rwkv7", "dplr")


def has(x, dtype, *size):
    assert x.dtype == dtype
    assert x.shape == size
    assert x.is_contiguous()


def reference(variant, *given, **options):
    """Output and final state by the oracle's loop, in the arithmetic of the inputs' float32."""
    wide = [x.float() for x in given]
    result = getattr(ps, variant)(*wide, **options, output_final_state=True, impl="reference")
    return result.output.to(given[0].dtype), result.final_state


def module(monkeypatch, name, **functions):
    """Install a stub; its parents are empty modules."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:n]))
        made.__spec__ = type(sys.__spec__)(made.__name__, None)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    vars(made).update(functions)


@pytest.fixture
def stubs(monkeypatch):
    """All packages, on a device that the adapters take for a GPU."""
    module(monkeypatch, "flash_kda", fwd=flash_kda)
    module(monkeypatch, "cudnn.linear_attention.ops", kimi_delta_attention=kimi_delta_attention)
    module(monkeypatch, "flash_qla", chunk_gated_delta_rule=flash_qla)
    module(
        monkeypatch, "flashrwkv2",
        pretrain_tmix_wkv7_recurrent_bf16=flash_rwkv,
        prepare_tmix_wkv7_recurrent_metadata=metadata,
        prepare_tmix_wkv7_recurrent_fp32io16_state_from_tensor=Pool,
        infer_tmix_wkv7_recurrent_fp32io16_forward_varlen=flash_rwkv_step,
    )  # fmt: skip
    monkeypatch.setattr(delta_peers, "on_gpu", lambda device: True)


def flash_kda(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None):
    B, T, H, K = q.shape
    for x in (q, k, v, g, out):
        has(x, BF16, B, T, H, K)
    has(beta, BF16, B, T, H)
    has(A_log, FP32, H)
    has(dt_bias, FP32, H, K)
    options = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "use_qk_l2norm": True, "beta_logits": True, "scale": scale}
    out.copy_(reference("kda", q, k, v, g, beta, **options)[0])


def kimi_delta_attention(q, k, v, g, beta, cu_seqlens, scale=None, plan_name=None):
    assert plan_name == "kda_hopper_cuda"
    N, H, K = q.shape
    for x in (q, k, v):
        has(x, BF16, N, H, K)
    has(g, FP32, N, H, K)
    has(beta, FP32, N, H)
    assert cu_seqlens.dtype == torch.int32
    given = (x[None] for x in (q, k, v, g, beta))
    output, state = reference("kda", *given, scale=scale, cu_seqlens=cu_seqlens)
    return output[0], state


def flash_qla(q, k, v, g, beta, scale=None):
    assert q.dtype == BF16
    assert g.dtype == FP32
    return reference("gated_delta_rule", q, k, v, g, beta, scale=scale)


def flash_rwkv(r, w, k, v, a, b, *, head_size=64):
    B, T, C = r.shape
    for x in (r, w, k, v, a, b):
        has(x, BF16, B, T, C)
    split = (x.unflatten(2, (C // head_size, head_size)) for x in (r, w, k, v, a, b))
    return reference("rwkv7", *split, raw_decay=True)[0].flatten(2)


class Pool:
    def __init__(self, state):
        assert state.dtype == FP32
        self.state = state


def metadata(cu_seqlens, state_indices, *, state_pool_size, total_tokens=None):
    assert cu_seqlens.dtype == state_indices.dtype == torch.int32
    assert cu_seqlens.tolist() == [*range(total_tokens + 1)]
    return state_indices, state_pool_size


def flash_rwkv_step(r, decay_logits, k, v, a, b, *, state, cu_seqlens, state_indices, validated_metadata):
    assert validated_metadata == (state_indices, len(state.state)) or validated_metadata[0] is state_indices
    rows = state_indices.long()
    split = (x[:, None] for x in (r, decay_logits, k, v, a, b))
    output, after = reference("rwkv7", *split, raw_decay=True, initial_state=state.state[rows])
    state.state[rows] = after
    return output[:, 0]


def drawn(variant, gates="", mode="fwd", dtype=BF16, shape=None):
    shape = shape or SHAPES[variant]
    decode = mode == "decode"
    return inputs(variant, shape._replace(T=1) if decode else shape, dtype, gates=gates, groups=GROUPS.get(variant), slots=decode)


RUNS = [(name, mode, gates) for name, package in PACKAGES.items() for mode in package.modes for gates in ("slow", "bounded")]


@pytest.mark.parametrize(("name", "mode", "gates"), RUNS)
def test_each_package_gets_what_it_takes(name, mode, gates, stubs):
    """The error is that of bfloat16 results: a wrong layout, unit or scale is 0.1 and more."""
    x = drawn(PACKAGES[name].variants[0], gates, mode)
    found = measure("a", x, mode, [peer(name, x, mode)], seconds=0.001)
    assert found.timings[0].candidate == name
    assert found.timings[0].error < 0.012


def test_a_wrong_unit_of_a_gate_is_found(stubs, monkeypatch):
    def in_log2(q, k, v, g, beta, scale=None):
        return flash_qla(q, k, v, g * math.log(2), beta, scale)

    module(monkeypatch, "flash_qla", chunk_gated_delta_rule=in_log2)
    x = drawn("gated_delta_rule", "slow")
    found = measure("a", x, "fwd", [peer("flash_qla", x, "fwd")], seconds=0.001, keep_going=True)
    assert found.untimed[0].reason.startswith("wrong: its output is 0.")


def test_results_that_are_not_finite_are_wrong_wherever_they_are(stubs, monkeypatch):
    def last_is_nan(q, k, v, g, beta, scale=None):
        output, state = flash_qla(q, k, v, g, beta, scale)
        output[:, -1, 0, 0] = math.nan
        return output, state

    module(monkeypatch, "flash_qla", chunk_gated_delta_rule=last_is_nan)
    x = drawn("gated_delta_rule", "slow")
    for tokens, where in ((7, "output"), (3, "output after token 3")):
        monkeypatch.setattr("penstock.bench.exact.checked_tokens", lambda *_, tokens=tokens: tokens)
        found = measure("a", x, "fwd", [peer("flash_qla", x, "fwd")], seconds=0.001, keep_going=True)
        assert found.untimed[0].reason == f"wrong: its {where} has values that are not finite"


@pytest.mark.parametrize("name", PACKAGES)
def test_missing_packages_and_cpus_are_refusals_with_a_reason(name, stubs, monkeypatch):
    x = drawn(PACKAGES[name].variants[0], "slow")

    def reason():
        (refused,) = measure("a", x, "fwd", [peer(name, x, "fwd")], seconds=0.001, keep_going=True).untimed
        assert not refused.fault
        return refused.reason

    monkeypatch.setattr(delta_peers, "on_gpu", lambda device: False)
    assert reason() == "refuses: it needs a GPU and the inputs are on cpu"
    monkeypatch.delitem(sys.modules, PACKAGES[name].module)
    assert reason() == f"refuses: it is not installed (pip install {PACKAGES[name].distribution})"


@pytest.mark.parametrize(
    ("name", "mode", "gates", "dtype", "shape", "reason"),
    [
        ("flash_kda", "fwdbwd", "slow", BF16, None, "it has no backward pass"),
        ("flash_kda", "decode", "slow", BF16, None, "it has no decode step of states in a pool"),
        ("flash_kda", "fwd", "fast", BF16, None, "its log decays are -5 sigmoid(x) of bfloat16 x, and these are not"),
        ("flash_kda", "fwd", "resets", BF16, None, "its log decays are -5 sigmoid(x) of bfloat16 x, and these are not"),
        ("cudnn", "fwd", "slow", FP32, None, "it takes bfloat16, and the inputs are float32"),
        ("cudnn", "fwd", "slow", BF16, Shape(1, 3, 2, 64, 64), "it takes heads of 128, and these have K = 64, V = 64"),
    ],
)
def test_calls_that_a_package_does_not_take_are_refusals(name, mode, gates, dtype, shape, reason, stubs):
    x = drawn(PACKAGES[name].variants[0], gates, mode, dtype, shape)
    (refused,) = measure("a", x, mode, [peer(name, x, mode)], seconds=0.001, keep_going=True).untimed
    assert refused.reason == f"refuses: {reason}"


def fla_operator(name, variant, order, called):
    """A function of ``fla.ops`` with the arguments of fla 0.6.0."""

    def call(*, scale=None, initial_state=None, output_final_state=False, **given):
        options = {key: given.pop(key) for key in ("safe_gate", "lower_bound") if key in given}
        called.append((name, options))
        assert sorted(given) == sorted(order)
        return reference(variant, *(given[key] for key in order), scale=scale, initial_state=initial_state)

    return call


ORDERS = {
    "delta_rule": "q k v beta",
    "gated_delta_rule": "q k v g beta",
    "kda": "q k v g beta",
    "rwkv7": "r w k v a b",
    "dplr_delta_rule": "q k v a b gk",
}


@pytest.fixture
def fla_calls(monkeypatch):
    """A stub of fla; the list of calls of its operators and their options."""
    called = []
    operators = {
        f"{kind}_{name}": fla_operator(f"{kind}_{name}", name.replace("dplr_delta_rule", "dplr"), order.split(), called)
        for name, order in ORDERS.items()
        for kind in ("chunk", "fused_recurrent")
    }

    def in_place(*, q, k, v, g, beta, scale, initial_state, ssm_state_indices):
        called.append(("fused_recurrent_kda_fwd", {}))
        output, rows = reference("kda", q, k, v, g, beta, scale=scale, initial_state=initial_state[ssm_state_indices])
        return output, initial_state.index_copy_(0, ssm_state_indices, rows)

    module(monkeypatch, "fla.ops.kda.fused_recurrent", fused_recurrent_kda_fwd=in_place)
    vars(sys.modules["fla.ops"]).update(operators)
    monkeypatch.setattr(fla, "unavailable", lambda device: None)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    return called


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd", "decode"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fla_gets_what_it_takes(variant, mode, fla_calls):
    x = drawn(variant, mode=mode, shape=Shape(2, 7, 2, 64, 64)) if variant != "gated_delta_rule" else drawn(variant, mode=mode)
    found = measure("a", x, mode, [peer("fla", x, mode)], seconds=0.001)
    assert found.timings[0].error < 0.012
    names = {name for name, _ in fla_calls}
    wanted = {"kda": "fused_recurrent_kda_fwd"}.get(variant, f"fused_recurrent_{variant}") if mode == "decode" else f"chunk_{variant}"
    assert names == {wanted.replace("dplr", "dplr_delta_rule")}


def test_fla_runs_without_flash_qla(fla_calls, monkeypatch):
    import os

    peer("fla", drawn("kda"), "fwd")
    assert os.environ["FLA_FLASH_QLA"] == "0"


def test_bounded_kernels_of_fla_take_bounded_gates_only(fla_calls):
    options = {"kda": {"safe_gate": True}, "rwkv7": {"lower_bound": -math.exp(-0.5)}}
    for variant, gates in (("kda", "bounded"), ("rwkv7", "bound")):
        x = drawn(variant, gates)
        assert measure("a", x, "fwd", [peer("fla_bounded", x, "fwd")], seconds=0.001).timings[0].candidate == "fla_bounded"
        assert {str(given) for _, given in fla_calls} == {str(options[variant])}
        fla_calls.clear()
    x = drawn("kda", "channels")
    (refused,) = measure("a", x, "fwd", [peer("fla_bounded", x, "fwd")], seconds=0.001, keep_going=True).untimed
    assert refused.reason == "refuses: its bounded kernels take log decays from -5"
    assert not fla_calls


def test_names_of_peers():
    assert peer_names("kda") == ("loop", "fla", "fla_recurrent", "fla_bounded", "flash_kda", "cudnn")
    assert peer_names("gated_delta_rule") == ("loop", "fla", "fla_recurrent", "flash_qla")
    assert peer_names("rwkv7") == ("loop", "fla", "fla_recurrent", "fla_bounded", "flash_rwkv")
    with pytest.raises(RangeError, match="peer must be one of loop, fla, fla_recurrent, flash_qla, got 'cudnn'"):
        peer("cudnn", drawn("gated_delta_rule"), "fwd")


def test_versions_of_installed_packages_only(monkeypatch):
    monkeypatch.setattr(delta_peers, "version", {"flash-qla": "0.1.3", "tilelang": "0.1.15"}.__getitem__)
    monkeypatch.setattr(delta_peers, "PackageNotFoundError", KeyError)
    assert installed() == {"flash-qla": "0.1.3", "tilelang": "0.1.15"}


def test_decays_of_a_bound_have_short_logits():
    """A peer that takes bfloat16 logits gets the same decays: recovered logits give them again."""
    for variant, bound in (("kda", -5.0), ("rwkv7", -math.exp(-0.5))):
        for gates in ("tiny", "slow", "bounded", "bound"):
            x = drawn(variant, gates)
            again = bound * torch.sigmoid(delta_peers.gate_logits(x.g, bound).double())
            assert torch.allclose(again, x.g.double(), rtol=1e-5, atol=0)
    beta = drawn("kda", "slow").others["beta"]
    assert torch.allclose(torch.sigmoid(delta_peers.logits(beta).double()), beta.double(), rtol=1e-5, atol=0)
