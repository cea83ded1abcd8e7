"""Properties of the delta rule: blocks of chunks, cuts, packing, limits of the gates, memory of keys, gradients' dtypes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases import AXES as RESULTS
from closing import check_closing
from contract import check_contract, problem_of
from deltas import NAMES, VARIANTS, Delta

import penstock as ps
from penstock.call.implementation import Upstream
from penstock.tokens import chunks

FLOAT32, FLOAT64 = torch.float32, torch.float64
LENGTHS = (0, 5, 64, 0, 1, 81, 0)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_implementation = pytest.mark.parametrize("impl", NAMES)


@pytest.mark.parametrize("elements", [1, 10_000], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("options", [{"T": 300}, {"T": 90, "B": 5, "state": False}, {"lengths": (*LENGTHS, 300)}], ids=str)
@every_variant
def test_blocks_of_chunks_equal_the_oracle(variant, options, elements, monkeypatch):
    """``chunkwise`` cuts long sequences into blocks; with smaller blocks, short ones too."""
    monkeypatch.setattr(chunks, "BLOCK", elements)
    for dtype in (FLOAT32, FLOAT64):
        check_contract(replace(Delta(variant, dtype=dtype, K=8, V=8), **options), "chunkwise")


@every_implementation
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_a_decay_of_minus_infinity_equals_minus_ten_thousand(variant, impl):
    """Both are a factor of 0, so the results have the same bits."""
    case = Delta(variant, T=70, gate="-inf")
    tensors = case.tensors()
    assert tensors["g"].isinf().any()
    for found, wanted in zip(case.call(tensors, impl), case.call(tensors | {"g": tensors["g"].clamp(min=-1e4)}, impl)):
        assert found.isfinite().all()
        assert torch.equal(found, wanted)


@every_implementation
@every_variant
def test_dtypes_of_results_and_gradients(variant, impl):
    """Output in v's dtype, final state in float32, each gradient in its input's dtype."""
    case = Delta(variant, B=1, T=3, H=2, G=1, K=4, V=5, dtype=torch.float16, others=torch.bfloat16)
    problem = problem_of(case, case.tensors())
    given = [x for x, gradient in zip(problem.tensors, case.operator.gradient) if gradient]
    found = case.operator.gradients(problem, impl, Upstream(case.upstream()))
    assert [None if x is None else x.dtype for x in found] == [None if x is None else x.dtype for x in given]
    assert [None if x is None else x.shape for x in found] == [None if x is None else x.shape for x in given]
    results = case.call(case.tensors(), impl)
    assert (results.output.dtype, results.final_state.dtype) == (torch.float16, FLOAT32)
    assert len(RESULTS["output"]) == results.output.dim()


@every_implementation
@every_variant
def test_cut_anywhere(variant, impl):
    """Two halves with the state between them."""
    case = Delta(variant, T=100, K=8, V=5)
    tensors, axes = case.tensors(), case.operator.signatures[variant].axes
    whole = case.call(tensors, impl)
    for cut in (1, 37, 64, 99):
        state, outputs = tensors["initial_state"], []
        for begin, end in ((0, cut), (cut, 100)):
            part = {name: x[:, begin:end] if x is not None and "T" in axes[name] else x for name, x in tensors.items()}
            output, state = case.call(part | {"initial_state": state}, impl)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), whole.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, whole.final_state, rtol=1e-5, atol=1e-5)


@every_implementation
@every_variant
def test_packed_equals_separate(variant, impl):
    case = Delta(variant, lengths=LENGTHS, K=8, V=5)
    tensors, axes = case.tensors(), case.operator.signatures[variant].axes
    packed, ends = case.call(tensors, impl), [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for n, (begin, end) in enumerate(pairwise(ends)):
        part = {name: x[:, begin:end] if x is not None and "T" in axes[name] else x for name, x in tensors.items()}
        alone = case.call(part | {"initial_state": tensors["initial_state"][n : n + 1], "cu_seqlens": None}, impl)
        torch.testing.assert_close(packed.output[:, begin:end], alone.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.final_state[n : n + 1], alone.final_state, rtol=1e-5, atol=1e-5)


@every_implementation
@every_variant
def test_linear_in_values_and_state(variant, impl):
    case = Delta(variant, T=70, K=8, V=5)
    tensors = case.tensors()
    found = case.call(tensors | {name: -3 * tensors[name] for name in ("v", "initial_state")}, impl)
    for x, wanted in zip(found, case.call(tensors, impl)):
        torch.testing.assert_close(x, -3 * wanted, rtol=1e-5, atol=1e-4)


@every_implementation
@pytest.mark.parametrize("variant", ["gated_delta_rule", "kda"])
def test_gates_of_zero_are_the_delta_rule(variant, impl):
    case = Delta(variant, T=70, K=8, V=5, gate="zero")
    tensors = case.tensors()
    wanted = replace(case, variant="delta_rule").call(tensors | {"g": None}, impl)
    for x, y in zip(case.call(tensors, impl), wanted):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@every_implementation
def test_one_stream_is_a_case_of_two(impl):
    """KDA is DPLR with a = -k o exp(g), b = k = beta k."""
    case = Delta("kda", T=70, K=8, V=5, gate="logsigmoid", dtype=FLOAT32)
    x = case.tensors()
    key = x["beta"][..., None] * x["k"]
    wanted = ps.dplr(x["q"], key, x["v"], -x["k"] * x["g"].exp(), key, x["g"], initial_state=x["initial_state"], impl=impl)
    torch.testing.assert_close(case.call(x, impl).output, wanted.output, rtol=1e-5, atol=1e-5)


@every_implementation
def test_a_written_value_is_returned_for_its_key(impl):
    """With beta = 1 and keys of norm 1, the state returns the value of the last token for its key, whatever was written before."""
    case = Delta("delta_rule", T=130, K=16, V=5, beta=1.0, scale=1.0)
    x = case.tensors()
    found = ps.delta_rule(x["k"], x["k"], x["v"], x["beta"], scale=1.0, initial_state=x["initial_state"], impl=impl)
    torch.testing.assert_close(found.output, x["v"], rtol=1e-5, atol=1e-4)


@every_implementation
@every_variant
def test_beta_of_zero_leaves_the_state(variant, impl):
    """A token without beta, or without a and k, only decays the state."""
    case = Delta(variant, T=70, K=8, V=5, beta=0.0, gate=-0.01)
    x = case.tensors()
    if VARIANTS[variant].streams == 2:
        x |= {name: torch.zeros_like(x[name]) for name in ("k", "b")}
    decay = (x["g"].sum(1) if x["g"] is not None else torch.zeros(2, 3)).exp()
    decay = decay[..., None] if decay.dim() == 2 else decay
    found = case.call(x, impl).final_state
    torch.testing.assert_close(found, decay[..., None] * x["initial_state"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["kda", "rwkv7"])
def test_a_batch_row_never_sees_its_neighbour(variant):
    case = Delta(variant, B=3, T=70, K=8, V=5)
    tensors = case.tensors()
    whole = case.call(tensors, "chunkwise")
    changed = {name: None if x is None else torch.cat([x[:1], x[1:2] * torch.nan, x[2:]]) for name, x in tensors.items()}
    changed["g"] = torch.cat([tensors["g"][:1], tensors["g"][1:2] * 1000, tensors["g"][2:]])
    found = case.call(changed, "chunkwise")
    for x, wanted in zip(found, whole):
        assert torch.equal(x[::2], wanted[::2])
        assert x[1].isnan().any()


@every_implementation
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_what_a_last_token_leaves_of_a_state_is_exact(variant, impl):
    check_closing(Delta(variant, T=128, dtype=FLOAT32, gate="weak", state=False), impl)
