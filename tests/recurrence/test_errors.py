"""Bad input: which exception, what its message says, and that nothing was changed."""

import math
import re

import numpy
import pytest
import torch
from cases import ALL, NAMES, Case, draw, named, problem_of, upstream

import penstock as ps
from penstock.call.implementation import Upstream
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.decays import log_decay

B, T, H, K, V = 2, 5, 3, 4, 6
ELSEWHERE = torch.device("meta")


def good(variant, **changed):
    """Arguments of a valid call, by the names of the public function, some changed."""
    case = Case(variant, B=B, T=T, H=H, K=K, V=V)
    return named(case, draw(case)) | changed


def rejected(kind, function, arguments, *said):
    """The call raises exactly this kind, saying all of this, each time after ``<function>: ``."""
    with pytest.raises(ps.PenstockError) as caught:
        function(**arguments)
    assert type(caught.value) is kind
    for text in said:
        assert text in str(caught.value)
    return str(caught.value)


every_variant = pytest.mark.parametrize("variant", VARIANTS)
NORMAL = torch.randn(B, T, H, K)


@every_variant
@pytest.mark.parametrize("name", ["k", "v", "gate", "u", "initial_state"])
def test_shapes(variant, name):
    """One more on the last axis, then one axis less: function, argument, rule and value are named."""
    row = VARIANTS[variant]
    name = row.gate if name == "gate" else name
    arguments = good(variant)
    if name not in arguments:
        return
    right = arguments[name]
    if name != "v":  # any V will do
        wrong = right.new_zeros(*right.shape[:-1], right.shape[-1] + 1)
        said = f"{variant}: {name} must be of shape [", f"= {list(right.shape)}, got {list(wrong.shape)}"
        rejected(ps.ShapeError, getattr(ps, variant), arguments | {name: wrong}, *said)
    rejected(
        ps.ShapeError, getattr(ps, variant), arguments | {name: right.flatten(0, 1) if right.dim() > 1 else right[0]}, f"{name} must be"
    )


@every_variant
def test_a_query_of_the_wrong_rank(variant):
    query = VARIANTS[variant].query
    said = f"{variant}: {query} must be of shape [B,T,G,K], got [5, 3, 4]", "Tokens come before heads."
    rejected(ps.ShapeError, getattr(ps, variant), good(variant, **{query: NORMAL[0]}), *said)


def test_heads_that_no_group_shares_evenly():
    said = "simple_gla: v must be of shape [B,T,H,V] with H a multiple of the G = 2 heads of q and k, got [2, 5, 3, 6]."
    rejected(ps.ShapeError, ps.simple_gla, good("simple_gla", q=NORMAL[:, :, :2], k=NORMAL[:, :, :2]), said)
    rejected(ps.ShapeError, ps.rwkv5, good("rwkv5", r=NORMAL[:, :, :2], k=NORMAL[:, :, :2]), "the G = 2 heads of r and k, got [2, 5, 3, 6]")


def test_keys_of_fewer_heads_than_queries():
    said = "k must be of shape [B,T,G,K] = [2, 5, 3, 4], got [2, 5, 1, 4].", "k has as many heads as q", "k.repeat_interleave(n, 2)"
    rejected(ps.ShapeError, ps.simple_gla, good("simple_gla", k=NORMAL[:, :, :1]), *said)
    rejected(ps.ShapeError, ps.simple_gla, good("simple_gla", g=-torch.ones(B, T, 1)), "A decay has the heads of v.")


@pytest.mark.parametrize(("axis", "size"), [("K", (B, T, H, 0)), ("H", (B, T, 0, K))])
def test_sizes_of_zero(axis, size):
    empty = torch.zeros(size)
    rejected(
        ps.ShapeError, ps.linear_attention, {"q": empty, "k": empty, "v": empty}, f"linear_attention: {axis} must be at least 1, got 0"
    )


@every_variant
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_non_float_dtypes(variant, dtype):
    row = VARIANTS[variant]
    for name in {row.query, "k", "v", row.gate, "u", "initial_state"} & set(good(variant)):
        arguments = good(variant)
        said = rejected(ps.DtypeError, getattr(ps, variant), arguments | {name: arguments[name].to(dtype)})
        assert f"{variant}: {name} must be " in said
        assert f"got {dtype}. Convert it with {name}.to(...)." in said


@every_variant
@pytest.mark.parametrize("name", ["k", "v"])
def test_q_k_and_v_share_a_dtype(variant, name):
    arguments = good(variant)
    arguments[name] = arguments[name].double()
    rejected(ps.DtypeError, getattr(ps, variant), arguments, f"{variant}: {name} must be float32, got torch.float64")


@every_variant
def test_one_device(variant):
    row = VARIANTS[variant]
    for name in {"k", "v", row.gate, "u", "initial_state"} & set(good(variant)):
        arguments = good(variant)
        arguments[name] = arguments[name].to(ELSEWHERE)
        said = f"{variant}: {name} must be on cpu, where {row.query} is, got meta. Move it with {name}.to('cpu')."
        rejected(ps.DeviceError, getattr(ps, variant), arguments, said)


@pytest.mark.parametrize("ends", [[1, T], [0, 3], [0, T + 1], [0, 4, 2, T], [-1, T], [0, -3, T], [0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_wrong_offsets(ends, dtype):
    arguments = {name: x[:1] for name, x in good("gla").items() if name != "initial_state"}
    said = "gla: cu_seqlens must be offsets that begin at 0, never fall and end at T = 5", f"got {ends}"
    rejected(ps.RangeError, ps.gla, arguments | {"cu_seqlens": torch.tensor(ends, dtype=dtype)}, *said)


@pytest.mark.parametrize(
    ("kind", "ends", "said"),
    [
        (ps.DtypeError, torch.tensor([0.0, T]), "cu_seqlens must be int32 or int64, got torch.float32"),
        (ps.ShapeError, torch.tensor([[0, T]]), "cu_seqlens must be of shape [N+1], got ["),
        (ps.ShapeError, torch.tensor(T), "cu_seqlens must be of shape [N+1], got ["),
        (ps.ShapeError, torch.tensor([], dtype=torch.int64), "cu_seqlens must be of shape [N+1], got [0]"),
        (ps.DeviceError, torch.tensor([0, T], device=ELSEWHERE), "cu_seqlens must be on cpu"),
        (ps.DtypeError, [0, T], "cu_seqlens must be a torch.Tensor or None, got [0, 5] of type list"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_offsets_of_the_wrong_kind(kind, ends, said):
    arguments = {name: x[:1] for name, x in good("gla").items() if name != "initial_state"}
    rejected(kind, ps.gla, arguments | {"cu_seqlens": ends}, "gla: " + said)


def test_packed_sequences_need_one_row():
    arguments = good("gla", cu_seqlens=torch.tensor([0, T]), initial_state=None)
    rejected(ps.ShapeError, ps.gla, arguments, "gla: B must be 1 with cu_seqlens, got 2")


def test_initial_states_of_packed_sequences():
    arguments = {name: x[:1] for name, x in good("gla").items()} | {"cu_seqlens": torch.tensor([0, 2, T])}
    rejected(ps.ShapeError, ps.gla, arguments, "initial_state must be of shape [N,H,K,V] = [2, 3, 4, 6], got [1, 3, 4, 6]")


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
@pytest.mark.parametrize("value", [1e-6, 2.0, float("inf")])
def test_a_decay_above_zero(variant, value):
    """One element is enough; also inside checks()."""
    gate = VARIANTS[variant].gate
    arguments = good(variant)
    arguments[gate].view(-1)[-1] = value
    said = f"{variant}: {gate} must be a log decay, natural logarithm, nowhere above 0 or NaN, got a largest value of {value:g}"
    rejected(ps.RangeError, getattr(ps, variant), arguments, said, "Pass log(decay)")
    with ps.checks():
        rejected(ps.RangeError, getattr(ps, variant), arguments, said)


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_nan_decays_are_refused(variant):
    """One NaN is enough, and it does not hide a positive decay beside it."""
    gate = VARIANTS[variant].gate
    arguments = good(variant)
    arguments[gate].view(-1)[0] = torch.nan
    said = f"{variant}: {gate} must be a log decay, natural logarithm, nowhere above 0 or NaN, got "
    rejected(ps.RangeError, getattr(ps, variant), arguments, said + "1 times NaN.")
    arguments[gate].view(-1)[-1] = 2.0
    rejected(ps.RangeError, getattr(ps, variant), arguments, said + "a largest value of 2 and 1 times NaN.")
    arguments[gate].fill_(torch.nan)
    rejected(ps.RangeError, getattr(ps, variant), arguments, f"got {arguments[gate].numel()} times NaN.")


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_unvalidated_nan_decays_give_nan(variant, impl):
    """As on a GPU, where values are not checked: results are NaN."""
    case = Case(variant, T=20)
    problem = problem_of(case, draw(case))
    problem = problem.with_tensors({"g": torch.full_like(problem.g, torch.nan)})
    implementation = FAMILY.named(impl)
    assert implementation.forward(problem)[1].isnan().all()
    gradients = implementation.gradients(problem, Upstream(upstream(case)))
    assert gradients[3].shape == problem.g.shape


@every_variant
def test_arguments_that_are_not_tensors(variant):
    row = VARIANTS[variant]
    for name in {row.query, "k", "v", row.gate, "u", "initial_state"} & set(good(variant)):
        rejected(
            ps.DtypeError, getattr(ps, variant), good(variant, **{name: 3}), f"{variant}: {name} must be a torch.Tensor", "3 of type int"
        )
    for name in {row.query, "k", "v", row.gate, "u"} & set(good(variant)) - {"g" if variant == "retention" else ""}:
        rejected(ps.DtypeError, getattr(ps, variant), good(variant, **{name: None}), f"{name} must be a torch.Tensor, got None")
    sparse = torch.zeros(B, T, H, K).to_sparse()
    rejected(ps.DtypeError, getattr(ps, variant), good(variant, k=sparse), f"{variant}: k must be a dense tensor, got torch.sparse_coo")
    said = f"{variant}: k must be a torch.Tensor, got ", "of type ndarray. Convert it with torch.as_tensor(k)."
    rejected(ps.DtypeError, getattr(ps, variant), good(variant, k=numpy.zeros((B, T, H, K))), *said)


@every_variant
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(variant, layout):
    nested = torch.nested.nested_tensor([torch.zeros(T, H, K), torch.zeros(T, H, K)], layout=layout)
    row = VARIANTS[variant]
    for name in {row.query, "k", "v", row.gate, "u", "initial_state"} & set(good(variant)):
        said = (
            f"{variant}: {name} must be a dense tensor, got a nested tensor. Concatenate its parts along the tokens, and give cu_seqlens."
        )
        rejected(ps.DtypeError, getattr(ps, variant), good(variant, **{name: nested}), said)
    for function in (ps.advance, ps.decode_step):
        given = {"variant": variant, "q": nested, "k": nested, "v": nested, "g": nested, "u": nested, "state": torch.zeros(2, H, K, K)}
        rejected(ps.DtypeError, function, given, f"{function.__name__}({variant!r}): q must be a dense tensor, got a nested tensor")


def test_values_of_expanded_decays_are_read_once():
    assert log_decay(torch.tensor(-1.0).expand(2**20, 2**40), {}, {}) is None
    assert "a largest value of 1" in log_decay(torch.tensor(1.0).expand(2**60), {}, {}).found
    assert "NaN" in log_decay(torch.tensor([[-1.0], [torch.nan]]).expand(2, 2**60), {}, {}).found


@every_variant
@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        (ps.DtypeError, "scale", "big", "scale must be a number or None, got 'big' of type str"),
        (ps.DtypeError, "scale", True, "scale must be a number or None, got True of type bool"),
        (ps.DtypeError, "scale", 1j, "scale must be a number or None"),
        (ps.DtypeError, "scale", numpy.bool_(True), "scale must be a number or None"),
        (ps.DtypeError, "scale", torch.tensor(0.5), "scale must be a number or None"),
        (ps.RangeError, "scale", math.nan, "scale must be finite, got nan"),
        (ps.RangeError, "scale", math.inf, "scale must be finite, got inf"),
        (ps.RangeError, "scale", -math.inf, "scale must be finite, got -inf"),
        (ps.RangeError, "scale", numpy.float32("inf"), "scale must be finite, got np.float32(inf)"),
        (ps.RangeError, "scale", 10**400, "scale must be finite, got 100000"),
        (ps.DtypeError, "reverse", 1, "reverse must be True or False, got 1 of type int"),
        (ps.DtypeError, "reverse", None, "reverse must be True or False, got None"),
        (ps.DtypeError, "output_final_state", "yes", "output_final_state must be True or False, got 'yes' of type str"),
        (ps.RangeError, "impl", "fast", f"impl must be one of auto, {', '.join(ALL)}, got 'fast'"),
        (ps.RangeError, "impl", None, "got None"),
        (ps.RangeError, "impl", ["cpu"], "got ['cpu']"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_options(variant, kind, name, value, said):
    found = rejected(kind, getattr(ps, variant), good(variant, **{name: value}), f"{variant}: {name} must be", said)
    assert len(found) < 250


@every_variant
@pytest.mark.parametrize("value", [0.5, 2, numpy.float32(0.5), numpy.float64(0.5), numpy.int64(2), numpy.float16(0.5)], ids=repr)
def test_numbers_of_numpy_are_numbers(variant, value):
    found, wanted = (getattr(ps, variant)(**good(variant, scale=scale)).output for scale in (value, float(value)))
    assert torch.equal(found, wanted)


@every_variant
def test_messages_about_long_lists_are_short(variant):
    query = VARIANTS[variant].query
    values = torch.randn(40, 20, 30, 4).tolist()
    found = rejected(
        ps.DtypeError, getattr(ps, variant), good(variant, **{query: values}), f"{query} must be a torch.Tensor", "of type list"
    )
    assert len(found) < 200


@pytest.mark.parametrize("operator", ["recurrence", "recurrence_backward", "advance", "softmax_attention", "softmax_attention_backward"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unknown_implementations_through_torch_ops(operator, device):
    """Every operator of torch raises the error that the public functions raise."""
    q = torch.randn(B, T, H, K, device=device)
    tensors = q, q, q, -q.abs(), None, None
    whole, state = (*tensors, None, "gla", None, False, True, "fast"), torch.zeros(B, H, K, K, device=device)
    attention = q, q, q, None, None, "softmax_attention", True, None, None, False, "fast"
    arguments = {
        "recurrence": whole,
        "recurrence_backward": (q, None, *whole),
        "advance": (*tensors, None, state, "advance('gla')", None, "fast"),
        "softmax_attention": attention,
        "softmax_attention_backward": (q, None, q, q[..., 0], *attention),
    }[operator]
    with pytest.raises(ps.RangeError, match=r": impl must be one of auto, .*, got 'fast'\. See penstock\.implementations"):
        getattr(torch.ops.penstock, operator)(*arguments)


@pytest.mark.parametrize("value", ["softmax", 3, ["relu"]], ids=str)
def test_unknown_feature_maps(value):
    said = "linear_attention: feature_map must be one of 'elu+1', 'relu', 'identity', a callable or None", repr(value)
    rejected(ps.RangeError, ps.linear_attention, good("linear_attention", feature_map=value), *said)


def test_linear_attention_validates_before_feature_maps():
    ints = {name: x.long() for name, x in good("linear_attention").items() if name in "qkv"}
    rejected(ps.DtypeError, ps.linear_attention, ints | {"feature_map": "elu+1"}, "q must be", "k must be", "v must be")
    arguments = good("linear_attention", v=torch.tensor(1.0), normalize=True)
    rejected(ps.ShapeError, ps.linear_attention, arguments, "v must be of shape [B,T,H,V] = [2, 5, *, *], got []")
    rejected(ps.DtypeError, ps.linear_attention, good("linear_attention", normalize=1), "normalize must be True or False, got 1")
    rejected(ps.ShapeError, ps.linear_attention, good("linear_attention", feature_map=lambda x: x[..., 0]), "q must be of shape")


@pytest.mark.parametrize("feature_map", [lambda x: x.sum(2, keepdim=True), lambda x: x.repeat_interleave(2, 2)])
def test_feature_maps_keep_heads(feature_map):
    """Else their results would be taken for q and k of groups."""
    said = "linear_attention: feature_map must be a map that keeps the 3 heads of q, got one to"
    rejected(ps.ShapeError, ps.linear_attention, good("linear_attention", feature_map=feature_map), said)


def test_every_broken_rule_is_listed():
    """Rules of one kind raise that kind; of several, their common base. All are ValueErrors."""
    arguments = good("gla")
    arguments |= {"k": arguments["k"][:, 1:], "v": arguments["v"].double(), "g": -arguments["g"], "initial_state": NORMAL.to(ELSEWHERE)}
    said = rejected(ps.InvalidArgument, ps.gla, arguments)
    for name in ("k", "v", "g", "initial_state"):
        assert re.search(f"^gla: {name} must be ", said, re.MULTILINE)
    assert issubclass(ps.InvalidArgument, ValueError)
    several = good("gla", k=NORMAL[:1], g=NORMAL[:1])
    assert len(rejected(ps.ShapeError, ps.gla, several).splitlines()) == 2
    assert len(rejected(ps.DtypeError, ps.gla, good("gla", q=1, scale="x", reverse=2)).splitlines()) == 3


def test_hint_for_a_decay_of_another_variant():
    rejected(ps.ShapeError, ps.gla, good("gla", g=-torch.rand(B, T, H)), "got [2, 5, 3]. A decay of 3 axes belongs to simple_gla.")


@every_variant
def test_a_named_implementation_that_refuses(variant):
    """The reason is in the message; "auto" takes another."""
    arguments = {name: x.double() for name, x in good(variant).items()}
    said = f"{variant}: impl must be one that takes this call, got 'cpu': it computes in float32, and the inputs are float64"
    rejected(ps.ImplementationRefused, getattr(ps, variant), arguments | {"impl": "cpu"}, said, "Use impl='auto'.")
    assert issubclass(ps.ImplementationRefused, RuntimeError)
    assert getattr(ps, variant)(**arguments).output.dtype == torch.float64


@every_variant
def test_unknown_keywords_raise(variant):
    """No keyword is ignored."""
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        getattr(ps, variant)(**good(variant), out_put_final_state=True)
