"""The functions of penstock.compat.fla of the delta rule against the recurrence written out token by token."""

import inspect
import re

import fla_errors
import pytest
import torch
from delta_loop import delta_loop
from token_loop import close
from torch.nn import functional as F

from penstock.compat import fla as ours
from penstock.compat.fla_delta import TABLE
from penstock.errors import InvalidArgument

B, T, G, H, K, V = 2, 9, 2, 4, 6, 5
NAMES = [row[0] for row in TABLE]
ONE = [name for name in NAMES if "rwkv7" not in name and "dplr" not in name]
GATED = [name for name in ONE if name.endswith(("gated_delta_rule", "gdn", "kda"))]


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def inputs():
    q, k, v, x, gates, a = tensors((B, T, G, K), (B, T, G, K), (B, T, H, V), (B, T, H), (B, T, H, K), (B, T, H, K))
    wide_q, wide_k, bias, state, rate = tensors((B, T, H, K), (B, T, H, K), (H * K,), (B, H, K, V), (H,), seed=1)
    return {
        "q": q, "k": F.normalize(k, dim=-1), "v": v, "beta": x, "g": F.logsigmoid(gates), "raw": gates, "a": F.normalize(a, dim=-1),
        "wide_q": wide_q, "wide_k": wide_k, "bias": bias, "state": state, "rate": rate,
    }  # fmt: skip


def call_of(name, x):
    """The arguments of a function, and those of the loop that they mean."""
    if name in ONE:
        beta, qkv = x["beta"].sigmoid(), {one: x[one] for one in "qkv"}
        gates = {} if name not in GATED else {"g": x["g"] if name.endswith("kda") else x["g"][..., 0]}
        return {**qkv, "beta": beta, **gates}, {**qkv, "beta": beta, **gates}
    q, k, lr = x["wide_q"], x["wide_k"], x["beta"].sigmoid()[..., None].expand(B, T, H, K)
    names = ("q", "gk") if "dplr" in name else ("r", "w")
    pair = {"kk": x["a"], "a": lr} if "mul" in name else {"a": -x["a"], "b": x["a"] * lr}
    call = {names[0]: q, names[1]: x["g"], "k": k, "v": x["v"], **pair}
    scale = {"scale": 1.0} if name in ("chunk_rwkv7", "fused_mul_recurrent_rwkv7") else {}
    return call, {"q": q, "k": k, "v": x["v"], "g": x["g"], "a": -x["a"], "b": x["a"] * lr, "before": True, **scale}


@pytest.mark.parametrize("name", NAMES)
def test_the_output_and_the_states_are_those_of_the_recurrence(name, inputs):
    call, options = call_of(name, inputs)
    output, final = ours.FUNCTIONS[name](**call, initial_state=inputs["state"], output_final_state=True)
    expected, state = delta_loop(**options, state=inputs["state"])
    close(output, expected)
    close(final, state)
    assert final.dtype == torch.float32
    assert (ours.FUNCTIONS[name](**call)[1] is None) == (name != "fused_recurrent_rwkv7"), "whose default is to return the state"
    close(ours.FUNCTIONS[name](**call, scale=2.5)[0], delta_loop(**{**options, "scale": 2.5})[0])
    close(ours.FUNCTIONS[name](**call, scale=None)[0], delta_loop(**{**options, "scale": None})[0])


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_are_separate(name, inputs):
    call, options = call_of(name, inputs)
    ends = torch.tensor([0, 4, 4, T])
    host = {"cu_seqlens_cpu": ends} if "cu_seqlens_cpu" in inspect.signature(ours.FUNCTIONS[name]).parameters else {}
    output, _ = ours.FUNCTIONS[name](**{key: x[:1] for key, x in call.items()}, cu_seqlens=ends, **host)
    for begin, end in ((0, 4), (4, T)):
        part = {key: x[:1, begin:end] if isinstance(x, torch.Tensor) else x for key, x in options.items()}
        close(output[:, begin:end], delta_loop(**part)[0])


@pytest.mark.parametrize("name", NAMES)
def test_head_first_swaps_tokens_and_heads(name, inputs):
    call, _ = call_of(name, inputs)
    swapped = {key: x.transpose(1, 2) for key, x in call.items()}
    assert torch.equal(ours.FUNCTIONS[name](**swapped, head_first=True)[0], ours.FUNCTIONS[name](**call)[0].transpose(1, 2))


@pytest.mark.parametrize("name", GATED)
def test_state_v_first_swaps_the_axes_of_states(name, inputs):
    call, _ = call_of(name, inputs)
    expected, final = ours.FUNCTIONS[name](**call, initial_state=inputs["state"], output_final_state=True)
    swapped = {"initial_state": inputs["state"].transpose(2, 3).contiguous(), "output_final_state": True}
    for word in ("state_v_first", "transpose_state_layout"):
        output, other = ours.FUNCTIONS[name](**call, **swapped, **{word: True})
        assert torch.equal(output, expected)
        assert torch.equal(other, final.transpose(2, 3))


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("name", GATED)
def test_raw_inputs(name, bound, inputs):
    """Keys that are not normalised, logits of beta, and a gate with its parameters."""
    kda = name.endswith("kda")
    if bound is not None and not kda:
        pytest.skip("it has no lower bound")
    raw, bias = (inputs["raw"], inputs["bias"]) if kda else (inputs["raw"][..., 0], inputs["bias"][:H])
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), True)
    call = {**{one: inputs[one] for one in "qv"}, "k": 3 * inputs["k"], "g": raw, "beta": inputs["beta"], **flags, "A_log": inputs["rate"]}
    x = raw.double() + (bias.view(H, K) if kda else bias)
    rate = inputs["rate"].double().exp()
    rate = rate[:, None] if kda else rate
    g = -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)
    expected = delta_loop(F.normalize(inputs["q"], dim=-1), inputs["k"], inputs["v"], beta=2 * inputs["beta"].sigmoid(), g=g)[0]
    limits = {"lower_bound": bound} if kda else {}
    close(ours.FUNCTIONS[name](**call, dt_bias=bias, **limits)[0], expected)
    if kda:
        close(ours.FUNCTIONS[name](**call, dt_bias=bias.view(H, K), **limits)[0], expected)
    if bound is not None:
        call["A_log"] = None
        g = bound * torch.sigmoid(x)
        expected = delta_loop(F.normalize(inputs["q"], dim=-1), inputs["k"], inputs["v"], beta=2 * inputs["beta"].sigmoid(), g=g)[0]
        close(ours.FUNCTIONS[name](**call, dt_bias=bias, **limits)[0], expected)


def test_defaults_of_beta_and_of_gates(inputs):
    q, k, v = (inputs[one] for one in "qkv")
    close(ours.fused_recurrent_delta_rule(q, k, v)[0], delta_loop(q, k, v)[0])
    close(ours.fused_recurrent_gated_delta_rule(q, k, v)[0], delta_loop(q, k, v)[0])
    close(ours.fused_recurrent_gated_delta_rule(q, k, v, gk=inputs["g"])[0], delta_loop(q, k, v, g=inputs["g"])[0])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_input(name, inputs):
    call, _ = call_of(name, inputs)
    leaves = {key: x.detach().clone().requires_grad_() for key, x in call.items()} | {"initial_state": inputs["state"].requires_grad_()}
    output, final = ours.FUNCTIONS[name](**leaves, output_final_state=True)
    (output.sum() + final.sin().sum()).backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in leaves.values())


def test_arguments_that_have_no_meaning_here_are_refused(inputs):
    kda, gdn, dplr = (call_of(name, inputs)[0] for name in ("chunk_kda", "fused_recurrent_gdn", "chunk_dplr_delta_rule"))
    raw = {**kda, "g": inputs["raw"], "use_gate_in_kernel": True}
    for call, message in [
        (lambda: ours.chunk_kda(**kda, cp_context=object()), "chunk_kda: cp_context must be None"),
        (lambda: ours.chunk_kda(**kda, return_intermediate_states=True), "return_intermediate_states must be False"),
        (lambda: ours.chunk_kda(**kda, use_graph=True), "use_graph must be False"),
        (lambda: ours.chunk_kda(**kda, allow_neg_eigval=True), "allow_neg_eigval must be False without use_beta_sigmoid_in_kernel"),
        (lambda: ours.chunk_kda(**raw), "A_log must be given with use_gate_in_kernel, unless there is a lower_bound"),
        (lambda: ours.chunk_kda(**raw, A_log=inputs["rate"], safe_gate=True), "lower_bound must be given with safe_gate and"),
        (lambda: ours.chunk_gdn(**gdn, use_gate_in_kernel=True), "chunk_gdn: A_log must be given with use_gate_in_kernel"),
        (lambda: ours.fused_recurrent_gdn(**gdn, gk=inputs["g"]), "gk must be left out where g is given"),
        (lambda: ours.fused_recurrent_gdn(**gdn, gv=inputs["g"]), "fused_recurrent_gdn: gv must be None"),
        (lambda: ours.fused_recurrent_gdn(inputs["q"], inputs["k"], inputs["v"], use_gate_in_kernel=True), "g must be given with"),
        (lambda: ours.fused_recurrent_dplr_delta_rule(**dplr, reverse=True), "reverse must be False"),
    ]:
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_no_tensors_or_have_no_heads_are_refused(name, inputs):
    call, _ = call_of(name, inputs)
    raw = {"use_gate_in_kernel": True, "A_log": inputs["rate"]} if name in GATED else {}
    raw |= {"lower_bound": -5.0, "dt_bias": inputs["bias"]} if name.endswith("kda") else {}
    for one in call:
        with pytest.raises(InvalidArgument, match=rf"(?m)^{name}: {one} must"):
            ours.FUNCTIONS[name](**{**call, **raw, one: [1.0]})
    with pytest.raises(InvalidArgument, match=rf"(?m)^{name}: H must be at least 1"):
        ours.FUNCTIONS[name](**{key: x[:, :, :0] for key, x in call.items()}, **raw)


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_function_and_its_argument(name, inputs):
    """Also those of arguments that have another name in the operators."""
    call, _ = call_of(name, inputs)
    for one, x in call.items():
        for wrong in (x[..., None], x.long()):
            with pytest.raises(InvalidArgument, match=rf"(?m)^{name}: {one} must"):
                ours.FUNCTIONS[name](**{**call, one: wrong})
    if "gk" in inspect.signature(ours.FUNCTIONS[name]).parameters and "gk" not in call:
        with pytest.raises(InvalidArgument, match=rf"^{name}: gk must"):
            ours.FUNCTIONS[name](**{**call, "g": None}, gk=x)


@pytest.mark.parametrize("check", fla_errors.CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_errors_name_what_the_caller_passed(name, check, inputs):
    check(ours.FUNCTIONS[name], call_of(name, inputs)[0], inputs["state"])


def test_promises_about_gates_do_not_change_results(inputs):
    call, _ = call_of("chunk_rwkv7", inputs)
    expected = ours.chunk_rwkv7(**call)[0]
    assert torch.equal(ours.chunk_rwkv7(**call, safe_gate=True, lower_bound=-5.0, chunk_size=16, disable_recompute=True)[0], expected)


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_gated_delta_rule", "chunk_rwkv7"])
def test_calls_are_compiled_without_graph_breaks(name, inputs):
    call = {**call_of(name, inputs)[0], "initial_state": inputs["state"], "output_final_state": True}
    compiled = torch.compile(lambda **x: ours.FUNCTIONS[name](**x), backend="eager", fullgraph=True)
    for one, other in zip(compiled(**call), ours.FUNCTIONS[name](**call)):
        assert torch.equal(one, other)
