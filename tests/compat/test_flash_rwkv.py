"""flash_rwkv's functions against its kernels' loop, written out: raw decays, flat channels, states with value channels first."""

import re

import pytest
import torch

from penstock.compat import flash_rwkv
from penstock.errors import DtypeError, InvalidArgument, RangeError, ShapeError

B, T, H, N = 2, 7, 3, 4
FUNCTIONS = {"rwkv5": flash_rwkv.rwkv5_cuda_linear_attention, "rwkv6": flash_rwkv.rwkv6_cuda_linear_attention}


def kernel(r, k, v, time_decay, u, state):
    """One loop for both: state[i][j] of value channel i and key channel j, as a thread of the CUDA kernel holds it."""
    w = time_decay.view(1, 1, H, N).expand(B, T, H, N) if time_decay.dim() == 2 else time_decay
    r, k, v, w = (x.double().reshape(B, T, H, N) for x in (r, k, v, w))
    u, state = u.double().view(H, N), list(state.double().unbind())
    rows = []
    for b in range(B):
        for t in range(T):
            x = v[b, t, :, :, None] * k[b, t, :, None, :]
            rows.append((r[b, t, :, None, :] * (u[:, None, :] * x + state[b])).sum(-1))
            state[b] = state[b] * torch.exp(-torch.exp(w[b, t]))[:, None, :] + x
    return torch.stack(rows).view(B, T, H, N), torch.stack(state)


@pytest.fixture(params=FUNCTIONS)
def name(request):
    return request.param


@pytest.fixture
def inputs(name):
    torch.manual_seed(0)
    r, k, v = (torch.randn(B, T, H * N) for _ in range(3))
    decay = torch.randn(H, N) if name == "rwkv5" else torch.randn(B, T, H * N)
    return [r, k, v, decay, torch.randn(H, N), torch.randn(B, H, N, N)]


def test_outputs_and_states(name, inputs):
    before = inputs[5].clone()
    output, state = FUNCTIONS[name](*inputs)
    expected, last = kernel(*inputs)
    assert output.shape == ((B, T, H * N) if name == "rwkv5" else (B, T, H, N))
    torch.testing.assert_close(output.double().view(B, T, H, N), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)
    assert state.dtype == torch.float32
    assert torch.equal(inputs[5], before)


def test_flat_decays_and_bonuses_are_the_same(name, inputs):
    flat = [*inputs[:3], inputs[3].flatten() if name == "rwkv5" else inputs[3], inputs[4].flatten(), inputs[5]]
    for one, other in zip(FUNCTIONS[name](*flat), FUNCTIONS[name](*inputs)):
        assert torch.equal(one, other)


def test_states_with_key_channels_first(name, inputs):
    output, state = FUNCTIONS[name](*inputs)
    other, keys_first = FUNCTIONS[name](*inputs[:5], inputs[5].transpose(2, 3).contiguous(), state_v_first=False)
    assert torch.equal(output, other)
    assert torch.equal(state, keys_first.transpose(2, 3))


def test_a_sequence_in_two_calls_equals_one(name, inputs):
    whole, last = FUNCTIONS[name](*inputs)
    state, parts = inputs[5], []
    for part in (slice(3), slice(3, T)):
        decay = inputs[3] if name == "rwkv5" else inputs[3][:, part]
        output, state = FUNCTIONS[name](*(x[:, part] for x in inputs[:3]), decay, inputs[4], state)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


def test_gradients_reach_every_input_and_the_raw_decay(name, inputs):
    leaves = [x.double().requires_grad_() for x in inputs]
    gradients = []
    for function in (FUNCTIONS[name], kernel):
        output, state = function(*leaves)
        gradients.append(torch.autograd.grad(output.sin().sum() + state.cos().sum(), leaves))
    for mine, theirs in zip(*gradients):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs_give_outputs_of_their_dtype(name, inputs, dtype):
    low = [x.to(dtype) for x in inputs[:5]]
    output, state = FUNCTIONS[name](*low, inputs[5])
    assert output.dtype == dtype
    assert state.dtype == torch.float32
    torch.testing.assert_close(output.double().view(B, T, H, N), kernel(*low, inputs[5])[0], rtol=2e-2, atol=2e-2)


ARGUMENTS = ("receptance", "key", "value", "time_decay", "time_first", "state")


def wrong_shapes(x):
    """Tensors of the elements of x, or of a part of them."""
    yield x[..., :-1]
    yield x[None]
    yield x[..., None]
    yield x.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2]) if x.shape[-1] != x.shape[-2] else x[..., :-1, :]
    yield x[:1] if x.dim() > 2 else x[0]
    if x.dim() > 2:
        yield x.flatten()


@pytest.mark.parametrize("state_v_first", [True, False])
def test_wrong_shapes_are_refused_as_they_were_passed(name, state_v_first, inputs):
    for i, x in enumerate(inputs):
        for wrong in wrong_shapes(x):
            with pytest.raises(ShapeError) as caught:
                FUNCTIONS[name](*inputs[:i], wrong, *inputs[i + 1 :], state_v_first=state_v_first)
            shown = {one.argument: one.value for one in caught.value.complaints}
            if i in (0, 5):  # receptance tells the sizes, and state the heads: others are shown that do not fit
                assert all(shown[ARGUMENTS[j]] == str(list(inputs[j].shape)) for j in range(6) if j != i and ARGUMENTS[j] in shown)
                assert shown.get(ARGUMENTS[i], str(list(wrong.shape))) == str(list(wrong.shape))
            else:
                assert shown == {ARGUMENTS[i]: str(list(wrong.shape))}


def test_one_decay_of_each_head(inputs, name):
    if name == "rwkv6":
        pytest.skip("its decays are those of channels")
    decay = inputs[3][:, :1]
    expected = FUNCTIONS[name](*inputs[:3], decay.expand(H, N), *inputs[4:])
    for one in (decay, decay[:, 0]):
        assert torch.equal(FUNCTIONS[name](*inputs[:3], one, *inputs[4:])[0], expected[0])


def test_wrong_types_dtypes_devices_and_values_are_named(name, inputs):
    for i, x in enumerate(inputs):
        wrong = ("x", x.long(), x.to("meta"), *((x.half(),) if i in (1, 2) else ()), *((None,) if i < 5 else ()))
        for one in wrong if i else wrong[:2]:
            with pytest.raises(InvalidArgument, match=rf"(?m)^{name}_cuda_linear_attention: {ARGUMENTS[i]} must") as caught:
                FUNCTIONS[name](*inputs[:i], one, *inputs[i + 1 :])
            for complaint in caught.value.complaints:
                used = re.findall(r"with (?:torch\.as_tensor\()?(\w+)|where (\w+) is", f"{complaint.rule} {complaint.remedy}")
                assert complaint.argument in ARGUMENTS
                assert all("".join(found) in ARGUMENTS for found in used), str(complaint)
    missing = inputs[3].clone()
    missing.view(-1)[1] = float("nan")
    with pytest.raises(RangeError, match=rf"^{name}_cuda_linear_attention: time_decay must be nowhere NaN, got 1 times NaN"):
        FUNCTIONS[name](*inputs[:3], missing, *inputs[4:])
    for flag in ("no", None, torch.zeros(2)):
        with pytest.raises(DtypeError, match="state_v_first must be True or False, got"):
            FUNCTIONS[name](*inputs, state_v_first=flag)


def test_wrong_shapes_are_named(name, inputs):
    function = FUNCTIONS[name]
    cases = [
        ({5: None}, f"{name}_cuda_linear_attention: state must be of shape [B,H,n,n], got None. Without a state"),
        ({5: inputs[5][0]}, "state must be of shape [B,H,n,n], got [3, 4, 4]"),
        ({1: inputs[1][..., :-1]}, "key must be of shape [B,T,H*n] = [2, 7, 12], got [2, 7, 11]"),
        ({4: inputs[4][0]}, "time_first must be of shape [H,n] = [3, 4] or [H*n] = [12], got [4]"),
        ({5: inputs[5][:, :0]}, "state must be of shape [B,H,n,n], got [2, 0, 4, 4]"),
        ({2: "v"}, "value must be a torch.Tensor, got 'v' of type str"),
    ]
    if name == "rwkv5":
        rule = "time_decay must be of shape [H,n] = [3, 4] or [H*n] = [12] or [H] = [3] or [H,1] = [3, 1], got [3, 2]"
        cases.append(({3: inputs[3].reshape(3, -1)[:, :2]}, rule))
    for changed, message in cases:
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            function(*(changed.get(i, x) for i, x in enumerate(inputs)))
