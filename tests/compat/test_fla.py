"""The functions of penstock.compat.fla against the recurrences written out token by token."""

import inspect
import re

import fla_errors
import pytest
import torch
from token_loop import close, loop
from torch.nn import functional as F

from penstock.compat import fla as ours
from penstock.compat.fla_delta import TABLE
from penstock.errors import InvalidArgument

B, T, H, K, V = 2, 9, 3, 4, 5
NAMES = [name for name in ours.FUNCTIONS if name not in [row[0] for row in TABLE]]  # of the recurrence
WITH_STATES = [name for name in NAMES if "parallel" not in name]


def tensors(*shapes, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, **options) for shape in shapes]


@pytest.fixture
def inputs():
    q, k, v, raw, u, state = tensors((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (H, K), (B, H, K, V))
    return {"q": q, "k": k, "v": v, "g": F.logsigmoid(raw), "u": u, "state": state}


def gates_of(name, x):
    """The arguments of a function beyond q, k and v, and the decay and bonus of the loop that they mean."""
    if "linear_attn" in name:
        return {"normalize": False}, {}
    if "retention" in name:
        return {}, {"g": torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))).expand(B, T, H)}
    if "simple_gla" in name:
        return {"g": x["g"][..., 0]}, {"g": x["g"][..., 0]}
    if "rwkv6" in name:
        return {"w": x["g"], "u": x["u"]}, {"g": x["g"], "u": x["u"]}
    return {"gk" if "recurrent" in name else "g": x["g"]}, {"g": x["g"]}


def named_inputs(name, x):
    return {"r" if "rwkv6" in name else "q": x["q"], "k": x["k"], "v": x["v"], **gates_of(name, x)[0]}


@pytest.mark.parametrize("name", NAMES)
def test_the_output_and_the_states_are_those_of_the_recurrence(name, inputs):
    call, options = named_inputs(name, inputs), gates_of(name, inputs)[1]
    if "parallel" in name:
        output, attentions = ours.FUNCTIONS[name](**call)
        assert attentions is None
        close(output, loop(inputs["q"], inputs["k"], inputs["v"], **options)[0])
        return
    output, final = ours.FUNCTIONS[name](**call, initial_state=inputs["state"], output_final_state=True)
    expected, state = loop(inputs["q"], inputs["k"], inputs["v"], state=inputs["state"], **options)
    close(output, expected)
    close(final, state)
    assert final.dtype == torch.float32
    assert ours.FUNCTIONS[name](**call)[1] is None


@pytest.mark.parametrize("name", NAMES)
def test_the_scale_is_a_number_or_the_default(name, inputs):
    call, options = named_inputs(name, inputs), gates_of(name, inputs)[1]
    expected = loop(inputs["q"], inputs["k"], inputs["v"], scale=1.0, **options)[0]
    close(ours.FUNCTIONS[name](**call, scale=2.5)[0], 2.5 * expected)
    for default in (None, -1, -1.0):
        close(ours.FUNCTIONS[name](**call, scale=default)[0], K**-0.5 * expected)


@pytest.mark.parametrize("name", [name for name in NAMES if "recurrent" in name])
def test_reverse_runs_time_backwards(name, inputs):
    call, options = named_inputs(name, inputs), gates_of(name, inputs)[1]
    output, final = ours.FUNCTIONS[name](**call, initial_state=inputs["state"], output_final_state=True, reverse=True)
    expected, state = loop(inputs["q"], inputs["k"], inputs["v"], state=inputs["state"], reverse=True, **options)
    close(output, expected)
    close(final, state)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fused_chunk_gla"])
def test_packed_sequences_are_separate(name, inputs):
    call, options = named_inputs(name, inputs), gates_of(name, inputs)[1]
    packed = {key: x[:1] if isinstance(x, torch.Tensor) and x.dim() > 2 else x for key, x in call.items()}
    ends = torch.tensor([0, 4, 4, T])
    on_host = {"cu_seqlens_cpu": ends} if "cu_seqlens_cpu" in inspect.signature(ours.FUNCTIONS[name]).parameters else {}
    output, _ = ours.FUNCTIONS[name](**packed, cu_seqlens=ends, **on_host)
    for begin, end in ((0, 4), (4, T)):
        part = {key: x[:1, begin:end] if x.dim() > 2 else x for key, x in options.items()}
        close(output[:, begin:end], loop(*(inputs[one][:1, begin:end] for one in "qkv"), **part)[0])


@pytest.mark.parametrize("name", NAMES)
def test_head_first_swaps_tokens_and_heads(name, inputs):
    call = named_inputs(name, inputs)
    swapped = {key: x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() > 2 else x for key, x in call.items()}
    expected, _ = ours.FUNCTIONS[name](**call)
    assert torch.equal(ours.FUNCTIONS[name](**swapped, head_first=True)[0], expected.transpose(1, 2))
    assert torch.equal(ours.FUNCTIONS[name](**call, head_first=False, causal=True)[0], expected)


@pytest.mark.parametrize("name", [name for name in NAMES if "state_v_first" in inspect.signature(ours.FUNCTIONS[name]).parameters])
def test_state_v_first_swaps_the_axes_of_states(name, inputs):
    call = named_inputs(name, inputs)
    expected, final = ours.FUNCTIONS[name](**call, initial_state=inputs["state"], output_final_state=True)
    swapped = {"initial_state": inputs["state"].transpose(2, 3).contiguous(), "output_final_state": True}
    earlier = "transpose_state_layout" in inspect.signature(ours.FUNCTIONS[name]).parameters
    for word in ("state_v_first", "transpose_state_layout")[: 1 + earlier]:
        output, other = ours.FUNCTIONS[name](**call, **swapped, **{word: True})
        assert torch.equal(output, expected)
        assert torch.equal(other, final.transpose(2, 3))


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_sequence_in_two_calls_equals_one(name, inputs):
    call = named_inputs(name, inputs)
    halves = slice(4), slice(4, T)
    cut = [{key: x[:, part] if isinstance(x, torch.Tensor) and x.dim() > 2 else x for key, x in call.items()} for part in halves]
    normalize = {"normalize": True} if "normalize" in call else {}
    if normalize:
        for x in (call, *cut):
            x.update(normalize, q=x["q"].abs(), k=x["k"].abs())
    whole, final = ours.FUNCTIONS[name](**call, output_final_state=True)
    first, state = ours.FUNCTIONS[name](**cut[0], output_final_state=True)
    second, last = ours.FUNCTIONS[name](**cut[1], initial_state=state, output_final_state=True)
    close(torch.cat([first, second], 1), whole)
    for one, other in zip(last, final) if normalize else [(last, final)]:
        close(one, other)


@pytest.mark.parametrize("name", [name for name in NAMES if "linear_attn" in name])
def test_normalized_outputs_are_divided_by_the_sum_of_keys(name, inputs):
    q, k, v = inputs["q"].abs(), inputs["k"].abs(), inputs["v"]
    z = torch.rand(B, 1, H, K)
    output, (state, keys) = ours.FUNCTIONS[name](q, k, v, initial_state=(inputs["state"], z), output_final_state=True, normalize=True)
    weighted, expected = loop(q, k, v, state=inputs["state"])
    sums = z.double() + k.double().cumsum(1)
    close(output, weighted / ((q.double() * K**-0.5 * sums).sum(-1, keepdim=True) + 1e-10))
    close(state, expected)
    close(keys, sums[:, -1:])
    only_state, _ = ours.FUNCTIONS[name](q, k, v, initial_state=inputs["state"], normalize=True)
    close(only_state, weighted / (q.double() * K**-0.5 * k.double().cumsum(1)).sum(-1, keepdim=True))
    only_keys, _ = ours.FUNCTIONS[name](q, k, v, initial_state=(None, z), normalize=True)
    close(only_keys, loop(q, k, v)[0] / (q.double() * K**-0.5 * sums).sum(-1, keepdim=True))


def test_normalized_outputs_without_weights_are_zero(inputs):
    zeros = torch.zeros(1, 3, H, K)
    assert ours.chunk_linear_attn(zeros, zeros, inputs["v"][:1, :3])[0].eq(0).all()


def test_a_constant_decay_of_heads_is_g_gamma(inputs):
    gamma = -torch.rand(H)
    expected, state = loop(inputs["q"], inputs["k"], inputs["v"], g=gamma.expand(B, T, H), state=inputs["state"])
    for name in ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"):
        x = (inputs["q"], inputs["k"], inputs["v"])
        output, final = ours.FUNCTIONS[name](*x, g_gamma=gamma, initial_state=inputs["state"], output_final_state=True)
        close(output, expected)
        close(final, state)
        without = ours.FUNCTIONS[name](*x)[0]
        close(without, loop(*x)[0])
    close(ours.fused_recurrent_gla(*x)[0], loop(*x)[0])


@pytest.mark.parametrize("name", ["parallel_retention", "parallel_simple_gla"])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("heads", [H, 1])
def test_attentions_are_the_weights_of_the_values(name, heads, scale, inputs):
    """With ``heads`` of q and k, each of which H // heads heads of v share."""
    call, options = named_inputs(name, inputs), gates_of(name, inputs)[1]
    call |= {one: inputs[one][:, :, :heads] for one in "qk"}
    inputs |= {one: call[one].repeat_interleave(H // heads, 2) for one in "qk"}
    output, attentions = ours.FUNCTIONS[name](**call, scale=scale, output_attentions=True)
    assert attentions.shape == (B, H, T, T)
    close(torch.einsum("bhij,bjhv->bihv", attentions, inputs["v"]), output)
    for j in range(T):  # the output for values that are 1 at token j alone
        one = torch.zeros(B, T, H, 1)
        one[:, j] = 1
        close(attentions[..., j].transpose(1, 2), loop(inputs["q"], inputs["k"], one, scale=scale, **options)[0][..., 0])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_input(name, inputs):
    call, options = named_inputs(name, inputs), gates_of(name, inputs)[1]
    call = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    if name in WITH_STATES:
        call |= {"initial_state": inputs["state"].double(), "output_final_state": True}
    leaves = {key: x.requires_grad_() for key, x in call.items() if isinstance(x, torch.Tensor)}
    output, final = ours.FUNCTIONS[name](**call)
    (output.sin().sum() + (0 if final is None else final.cos().sum())).backward()
    found = {key: x.grad.clone() for key, x in leaves.items()}
    for x in leaves.values():
        x.grad = None
    gate = next((key for key in ("w", "gk", "g") if key in leaves), "")
    options = {key: leaves.get(gate if key == "g" else key, x) for key, x in options.items()}
    query = leaves.get("q", leaves.get("r"))
    output, last = loop(query, leaves["k"], leaves["v"], state=leaves.get("initial_state"), **options)
    (output.sin().sum() + (0 if final is None else last.cos().sum())).backward()
    for key, x in leaves.items():
        torch.testing.assert_close(found[key], x.grad, msg=key)


def test_arguments_that_cannot_be_kept_are_refused(inputs):
    q, k, v, g = (inputs[one] for one in "qkvg")
    refused = [
        (lambda: ours.chunk_gla(q, k, v, g, causal=False), "chunk_gla: causal must be True, got False of type bool"),
        (lambda: ours.fused_recurrent_gla(q, k, v, gv=v), "fused_recurrent_gla: gv must be None"),
        (lambda: ours.chunk_simple_gla(q, k, v, g[..., 0], g_gamma=g[0, 0, :, 0]), "chunk_simple_gla: g_gamma must be left out"),
        (lambda: ours.chunk_simple_gla(q, k, v, chunk_size=48), "chunk_simple_gla: chunk_size must be a power of 2"),
        (lambda: ours.chunk_gla(q, k, v, g, checkpoint_level=1), "chunk_gla: checkpoint_level must be 0"),
        (lambda: ours.chunk_gla(q, k, v, g, cu_seqlens_cpu=torch.tensor([0, T])), "chunk_gla: cu_seqlens_cpu must be left out"),
        (lambda: ours.chunk_gla(q, k, v, g, cu_seqlens=torch.tensor([0, T]), offsets=torch.tensor([0, T])), "offsets must be left out"),
        (
            lambda: ours.fused_recurrent_gla(q, k, v, g, state_v_first=True, transpose_state_layout=True),
            "transpose_state_layout must be left out where state_v_first is given",
        ),
        (
            lambda: ours.parallel_retention(q[:1], k[:1], v[:1], output_attentions=True, cu_seqlens=torch.tensor([0, T])),
            "output_attentions must be False where cu_seqlens is given",
        ),
        (lambda: ours.chunk_linear_attn(q, k, v, initial_state=(q[0], None)), "initial_state[0] must be of shape [N,H,K,V] = [2, 3, 4, 5]"),
        (
            lambda: ours.chunk_linear_attn(q, k, v, initial_state=(inputs["state"], torch.zeros(1, 1, H, K))),
            "initial_state[1] must be of shape [N,1,H,K] = [2, 1, 3, 4], got [1, 1, 3, 4]",
        ),
        (lambda: ours.chunk_gla(q, k, v, -g), "a log decay, natural logarithm, nowhere above 0"),
    ]
    for call, message in refused:
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            call()


def test_arguments_that_do_not_fit_are_type_errors(inputs):
    q, k, v, g = (inputs[one] for one in "qkvg")
    for call, message in [
        (lambda: ours.chunk_gla(q, k, v, g, chunk_len=2), "chunk_gla: keywords must be among q, k, v, g, scale, .*, got chunk_len"),
        (lambda: ours.chunk_gla(q, k, v), "chunk_gla: g must be given, got nothing"),
        (lambda: ours.chunk_gla(q, k, v, g, q=q), "chunk_gla: q must be given once"),
        (lambda: ours.parallel_retention(*[q] * 7), "parallel_retention: there must be at most 6 positional arguments, got 7"),
        (lambda: ours.fused_chunk_simple_gla(q, k, v, reverse=True), "fused_chunk_simple_gla: keywords must be among"),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


def test_earlier_names_of_arguments(inputs):
    q, k, v, g, u = (inputs[one] for one in ("q", "k", "v", "g", "u"))
    expected = ours.chunk_rwkv6(q, k, v, g, u, chunk_size=32)[0]
    assert torch.equal(ours.chunk_rwkv6(q=q, k=k, v=v, g=g, u=u, checkpoint_level=0)[0], expected)
    ends = torch.tensor([0, 3, T])
    packed = [x[:1] for x in (q, k, v, g)]
    assert torch.equal(ours.chunk_gla(*packed, offsets=ends)[0], ours.chunk_gla(*packed, cu_seqlens=ends)[0])


@pytest.mark.parametrize("name", ["chunk_gla", "fused_recurrent_gla"])
def test_inputs_are_not_copied(name, inputs, monkeypatch):
    seen = {}
    gla = ours.functional.gla

    def observed(q, k, v, g, **options):
        seen.update(q=q, g=g, **options)
        return gla(q, k, v, g, **options)

    monkeypatch.setattr(ours.functional, "gla", observed)
    swapped = {key: x.transpose(1, 2) for key, x in named_inputs(name, inputs).items()}
    state = inputs["state"].transpose(2, 3)
    ours.FUNCTIONS[name](**swapped, head_first=True, initial_state=state, state_v_first=True)
    assert seen["q"].data_ptr() == inputs["q"].data_ptr()
    assert seen["g"].data_ptr() == inputs["g"].data_ptr()
    assert seen["initial_state"].data_ptr() == state.data_ptr()


@pytest.mark.parametrize("name", ["chunk_gla", "fused_recurrent_rwkv6", "chunk_linear_attn"])
def test_calls_are_compiled_without_graph_breaks(name, inputs):
    call = {**named_inputs(name, inputs), "initial_state": inputs["state"], "output_final_state": True}
    compiled = torch.compile(lambda **x: ours.FUNCTIONS[name](**x), backend="eager", fullgraph=True)
    for one, other in zip(compiled(**call), ours.FUNCTIONS[name](**call)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_function_and_its_argument(name, inputs):
    """Also those of arguments that have another name in the operators."""
    given = named_inputs(name, inputs)
    for one, x in given.items():
        for wrong in (x[..., None], x.long(), [1.0]) if isinstance(x, torch.Tensor) else ():
            with pytest.raises(InvalidArgument, match=rf"(?m)^{name}: {one} must"):
                ours.FUNCTIONS[name](**{**given, one: wrong})
    if "g_gamma" in inspect.signature(ours.FUNCTIONS[name]).parameters:
        with pytest.raises(InvalidArgument, match=f"^{name}: g_gamma must"):
            ours.FUNCTIONS[name](**{**given, "g": None}, g_gamma=inputs["g"])


@pytest.mark.parametrize("check", fla_errors.CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_errors_name_what_the_caller_passed(name, check, inputs):
    check(ours.FUNCTIONS[name], named_inputs(name, inputs), inputs["state"] if name in WITH_STATES else None)


def test_lists_of_states_are_refused_without_normalize(inputs):
    with pytest.raises(InvalidArgument, match="chunk_linear_attn: initial_state must be"):
        ours.chunk_linear_attn(*(inputs[one] for one in "qkv"), initial_state=(inputs["state"], None), normalize=False)
