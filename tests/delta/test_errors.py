"""Bad input: which exception, and what its message says."""

import pytest
import torch
from deltas import Delta, named

import penstock as ps
from penstock.delta.declaration import _bounded
from penstock.delta.variants import VARIANTS

B, T, H, K, V = 2, 5, 4, 3, 6
A_LOG, BIAS = torch.zeros(H), torch.zeros(H, K)
ONES = torch.ones(B, T, H, K)


def good(variant, **changed):
    case = Delta(variant, B=B, T=T, H=H, G=2, K=K, V=V)
    return named(case, case.tensors(), case.row.query, case.row.gate) | changed


WRONG = [
    ("delta_rule", {"beta": torch.zeros(B, T, H, K)}, ps.ShapeError, "delta_rule: beta must be of shape [B,T,H] = [2, 5, 4], got [2,"),
    ("delta_rule", {"beta": None}, ps.DtypeError, "delta_rule: beta must be a torch.Tensor, got None."),
    ("delta_rule", {"k": torch.zeros(B, T, H, K)}, ps.ShapeError, "k must be of shape [B,T,G,K] = [2, 5, 2, 3], got [2, 5, 4, 3]."),
    ("gated_delta_rule", {"g": torch.zeros(B, T, H, K)}, ps.ShapeError, "g must be of shape [B,T,H] = [2, 5, 4], got [2, 5, 4, 3]."),
    ("kda", {"g": torch.ones(B, T, H, K)}, ps.RangeError, "kda: g must be a log decay, natural logarithm, nowhere above 0 or NaN"),
    ("kda", {"g": None}, ps.ShapeError, "kda: g must be given, of shape [B,T,H,K], got None."),
    ("kda", {"v": torch.zeros(B, T, 3, V)}, ps.InvalidArgument, "with H a multiple of the G = 2 heads of q and k"),
    ("kda", {"dt_bias": BIAS}, ps.ShapeError, "without a raw gate, got [4, 3]. It is added to a raw gate: pass A_log, too."),
    ("kda", {"A_log": A_LOG, "dt_bias": BIAS[0]}, ps.ShapeError, "kda: dt_bias must be of shape [H,K] = [4, 3], got [3]."),
    ("kda", {"A_log": A_LOG, "dt_bias": BIAS.flatten()}, ps.ShapeError, "got [12]. It has the heads of v: dt_bias.view(H, K) of a flat"),
    ("kda", {"A_log": A_LOG.view(1, 1, H, 1)}, ps.ShapeError, "got [1, 1, 4, 1]. It has one number per head of v: A_log.flatten()"),
    ("kda", {"A_log": A_LOG, "lower_bound": 0.0}, ps.RangeError, "kda: lower_bound must be finite and below 0, got 0.0."),
    ("kda", {"A_log": A_LOG, "lower_bound": -float("inf")}, ps.RangeError, "kda: lower_bound must be finite and below 0, got -inf."),
    ("kda", {"lower_bound": -5.0}, ps.RangeError, "kda: lower_bound must be None without A_log, got -5.0. It bounds"),
    ("kda", {"allow_neg_eigval": True}, ps.RangeError, "kda: allow_neg_eigval must be False without beta_logits, got True."),
    ("kda", {"use_qk_l2norm": 1}, ps.DtypeError, "kda: use_qk_l2norm must be True or False, got 1 of type int."),
    ("gated_delta_rule", {"A_log": torch.zeros(2)}, ps.ShapeError, "A_log must be of shape [H] = [4], got [2]."),
    ("rwkv7", {"a": None}, ps.DtypeError, "rwkv7: a must be a torch.Tensor, got None."),
    ("rwkv7", dict.fromkeys("ab", torch.zeros(B, T, 3, K)), ps.ShapeError, "a must be of 2 or 4 heads, those of k or of v, got [2,"),
    ("rwkv7", {"b": torch.zeros(B, T, H, K)}, ps.ShapeError, "b must be of shape [B,T,J,K] = [2, 5, 2, 3], got [2, 5, 4, 3]."),
    ("rwkv7", {"w": torch.ones(B, T, H, K)}, ps.RangeError, "rwkv7: w must be a log decay"),
    ("rwkv7", {"lower_bound": -0.6, "w": -ONES}, ps.RangeError, "rwkv7: w must be at least lower_bound = -0.6, got -1.0. Pass a bound"),
    ("rwkv7", {"lower_bound": -0.6, "raw_decay": True}, ps.RangeError, "rwkv7: lower_bound must be None with raw_decay, got -0.6."),
    ("rwkv7", {"lower_bound": 0.5, "w": -ONES}, ps.RangeError, "rwkv7: lower_bound must be finite and below 0, got 0.5."),
    ("rwkv7", {"lower_bound": "x"}, ps.DtypeError, "rwkv7: lower_bound must be a number or None, got 'x' of type str."),
    ("dplr", {"lower_bound": -0.6, "g": -ONES}, ps.RangeError, "dplr: g must be at least lower_bound = -0.6, got -1.0."),
    ("dplr", {"lower_bound": float("nan")}, ps.RangeError, "dplr: lower_bound must be finite and below 0, got nan"),
    ("rwkv7", {"lower_bound": -1e39, "w": -torch.inf * ONES}, ps.RangeError, "rwkv7: w must be at least lower_bound = -1e+39, got -inf."),
    ("rwkv7", {"lower_bound": -(10**400)}, ps.RangeError, "rwkv7: lower_bound must be finite and below 0, got -1000"),
    ("rwkv7", {"lower_bound": -0.6, "w": -ONES.to(torch.uint8)}, ps.DtypeError, "rwkv7: w must be"),
    ("rwkv7", {"lower_bound": -0.6, "w": -ONES.to_sparse()}, ps.DtypeError, "rwkv7: w must be a dense tensor"),
    ("rwkv7", {"raw_decay": 1}, ps.DtypeError, "rwkv7: raw_decay must be True or False, got 1 of type int."),
    ("dplr", {"a": torch.zeros(B, T, 2, K).double()}, ps.DtypeError, "dplr: a must be float32, got torch.float64."),
    ("dplr", {"scale": float("nan")}, ps.RangeError, "dplr: scale must be finite, got nan."),
    ("dplr", {"impl": "fast"}, ps.RangeError, "dplr: impl must be one of auto, "),
    ("dplr", {"cu_seqlens": torch.tensor([0, 5])}, ps.InvalidArgument, "dplr: B must be 1 with cu_seqlens, got 2."),
    ("kda", {"initial_state": torch.zeros(1, H, K, V)}, ps.ShapeError, "kda: initial_state must be of shape [N,H,K,V] = [2, 4, 3, 6]"),
]  # fmt: skip


REMEDIES = {
    "gated_delta_rule": "Pass log(decay), or a raw gate together with A_log.",
    "kda": "Pass log(decay), or a raw gate together with A_log.",
    "rwkv7": "Pass log(decay), which is -exp(x) of the argument x of RWKV's kernels, or a raw gate with raw_decay=True.",
    "dplr": "Pass log(decay).",
}


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_raw_gates_in_place_of_log_decays(variant):
    """The remedy names the option of this variant, also of updates in place."""
    case = Delta(variant, B=B, T=T, H=H, G=2, K=K, V=V)
    remedy = f"got a largest value of 1. {REMEDIES[variant]}"
    g = case.tensors()["g"]
    with pytest.raises(ps.RangeError) as caught:
        getattr(ps, variant)(**good(variant, **{case.row.gate: torch.ones_like(g)}))
    assert str(caught.value).endswith(remedy)
    tensors = {name: x for name, x in case.tensors().items() if x is not None and name != "initial_state"}
    with pytest.raises(ps.RangeError) as caught:
        ps.advance(variant, **named(case, tensors | {"g": torch.ones_like(g)}, "q", "g"), state=torch.zeros(B, H, K, V))
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(("variant", "changed", "kind", "said"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments(variant, changed, kind, said):
    with pytest.raises(ps.PenstockError) as caught:
        getattr(ps, variant)(**good(variant, **changed))
    assert isinstance(caught.value, kind)
    assert said in str(caught.value)


def test_raw_gates_may_have_any_sign():
    """Only log decays are at most 0."""
    x = torch.randn(B, T, H, K)
    assert ps.kda(**good("kda", g=x, A_log=A_LOG)).output.isfinite().all()
    assert ps.rwkv7(**good("rwkv7", w=x, raw_decay=True)).output.isfinite().all()


def test_operators_refuse_options_of_other_variants():
    """Called below the public functions, too, no option is ignored."""
    case = Delta("rwkv7", B=1, T=2, H=1, K=2, V=2)
    given = [case.tensors()[name] for name in case.operator.names]
    with pytest.raises(ps.ImplementationRefused, match="rwkv7 has no beta, and no use_qk_l2norm"):
        torch.ops.penstock.delta(*given, "rwkv7", None, True, True, False, False, None, "auto")


def compiled(function, w):
    return torch.compile(function, backend="aot_eager", fullgraph=True)(w)


FORMS = {
    "compiled": compiled,
    "vmap": lambda function, w: torch.vmap(function)(w[None]),
    "grad": lambda function, w: torch.func.grad(lambda x: function(x).sum())(w),
    "jvp": lambda function, w: torch.func.jvp(function, (w,), (w,)),
    "operator": lambda function, w: function(w.requires_grad_()),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.streams == 2])
def test_bounds_in_every_form(variant, form):
    """A log decay below its bound is found wherever decays above 0 are; one that equals it in its dtype passes."""
    call, gate = good(variant), VARIANTS[variant].gate
    other = {name: x for name, x in call.items() if name != gate}

    def output(w):
        return getattr(ps, variant)(**other, **{gate: w}, lower_bound=-0.6).output

    form(output, torch.full((B, T, H, K), -0.6))  # in float32 below the double precision number
    with pytest.raises(ps.RangeError, match=f"{variant}: {gate} must be at least lower_bound = -0.6, got -1.0. Pass a bound"):
        form(output, torch.full((B, T, H, K), -1.0))


def test_values_of_expanded_decays_are_compared_once():
    """A mask of all of them would not fit in memory."""
    for bound, wrong in ((-0.5, True), (-2.0, False)):
        found = _bounded(torch.tensor(-1.0).expand(2**20, 2**40), {}, {"lower_bound": bound}, "")
        assert (found is not None) == wrong


def test_a_bound_of_nan_in_a_graph_of_any_bound():
    """A number of a compiled graph is symbolic."""
    call = good("dplr", g=-0.5 * ONES)
    function = torch.compile(lambda bound: ps.dplr(**call, lower_bound=bound).output, backend="eager", dynamic=True)
    function(-0.7)
    with pytest.raises(ps.RangeError, match="lower_bound must be finite and below 0, got nan"):
        function(float("nan"))
