"""Softmax attention: every implementation held to the float64 oracle, and the oracle to the formula."""

from dataclasses import dataclass, replace

import pytest
import torch
from penstock.softmax.problem import Attention
from torch import Tensor
from torch.autograd import forward_ad

import penstock as ps
from penstock import eager
from penstock.softmax import attention, reference, sdpa
from penstock.softmax import eager as softmax_eager

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
IMPLS = ("sdpa", "triton")

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, about rows of tiles that belong to no key: nothing of them is kept."""


@dataclass(frozen=True)
class Case:
    """One call: its sizes, and what is unusual about it."""

    B: int = 2
    Tq: int = 70
    Tk: int = 70
    H: int = 2
    G: int = 1
    D: int = 16
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    dtype: torch.dtype = FLOAT32
    lengths: tuple[tuple[int, int], ...] | None = None
    strided: bool = False
    large: float = 1.0
    """Factor of q, for scores beyond what exp takes."""

    def __str__(self) -> str:
        default = Case()
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name)) or "plain"


def draw(case: Case, device: str = "cpu") -> tuple[Attention, Tensor, Tensor]:
    """The call, and gradients of its output and log-sum-exp."""
    made = torch.Generator(device).manual_seed(0)
    B, Tq, Tk, offsets = case.B, case.Tq, case.Tk, (None, None)
    if case.lengths is not None:
        B, Tq, Tk = 1, *(sum(length[side] for length in case.lengths) for side in (0, 1))
        offsets = tuple(torch.tensor([0, *(length[side] for length in case.lengths)], device=device).cumsum(0) for side in (0, 1))

    def normal(*size: int) -> Tensor:
        if case.strided:
            B, T, H, D = size
            return torch.randn(B, H, D, T, generator=made, device=device).permute(0, 3, 1, 2).to(case.dtype)
        return torch.randn(*size, generator=made, device=device).to(case.dtype)

    q, k, v = normal(B, Tq, case.H, case.D) * case.large, normal(B, Tk, case.G, case.D), normal(B, Tk, case.G, case.D)
    a = Attention.checked(q, k, v, *offsets, case.causal, case.scale, case.window)
    return a, normal(B, Tq, case.H, case.D), torch.randn(B, Tq, case.H, generator=made, device=device)


def run(a: Attention, impl: str, d_output: Tensor, d_lse: Tensor) -> dict[str, Tensor]:
    """Results and gradients of the public function by name."""
    q, k, v = (x.detach().requires_grad_() for x in (a.q, a.k, a.v))
    options = {"causal": a.causal, "scale": a.scale, "window": a.window, "cu_seqlens": a.cu_seqlens, "cu_seqlens_k": a.cu_seqlens_k}
    output, lse = ps.softmax_attention(q, k, v, **options, return_lse=True, impl=impl)
    seen = lse.isfinite()
    loss = (output.double() * d_output).sum() + (lse.double()[seen] * d_lse[seen]).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return {"output": output, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def exact(a: Attention, d_output: Tensor, d_lse: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same in float64, and what each entry loses for each unit of rounding of the operands of products.

    p and ds are rounded before they are multiplied, the output before delta is made of it: 1 unit each of the sums of absolute values.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (a.q, a.k, a.v))
    a64 = replace(a, q=q, k=k, v=v)
    output, lse = reference.exact(a64)
    seen = lse.isfinite()
    loss = (output * d_output).sum() + (lse[seen] * d_lse[seen]).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    results = {"output": output.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    lost = {name: torch.zeros_like(x) for name, x in results.items()}
    Tq, Tk = a.q.shape[1], a.k.shape[1]
    for rows, keys in [(slice(0, Tq), slice(0, Tk))] if a.cu_seqlens is None else a.spans():
        group = a.q.shape[2] // a.k.shape[2]
        Q, O, dO = (x[:, rows].detach().double() for x in (a.q, output, d_output))
        K, V = (x[:, keys].double().repeat_interleave(group, 2) for x in (a.k, a.v))
        visible = a.visible(
            slice(0, rows.stop - rows.start), slice(0, keys.stop - keys.start), rows.stop - rows.start, keys.stop - keys.start
        )
        e = lse[:, rows].detach().transpose(1, 2)[..., None]
        p = torch.exp((a.scale * torch.einsum("bihd,bjhd->bhij", Q, K) - e).masked_fill(~visible | ~e.isfinite(), float("-inf")))
        delta = ((O * dO).sum(-1) - d_lse[:, rows]).transpose(1, 2)[..., None]
        ds = (p * (torch.einsum("bihd,bjhd->bhij", dO, V) - delta)).abs() + p * (O * dO).abs().sum(-1).transpose(1, 2)[..., None]
        lost["output"][:, rows] = torch.einsum("bhij,bjhd->bihd", p, V.abs())
        lost["dq"][:, rows] = abs(a.scale) * torch.einsum("bhij,bjhd->bihd", ds, K.abs())
        by_head = {"dk": abs(a.scale) * torch.einsum("bhij,bihd->bjhd", ds, Q.abs()), "dv": torch.einsum("bhij,bihd->bjhd", p, dO.abs())}
        for name, x in by_head.items():
            lost[name][:, keys] = x.unflatten(2, (-1, group)).sum(3)
    return results, lost


def check(case: Case, impl: str, times: float = 1.0, device: str = "cpu") -> None:
    """Hold an implementation to the oracle, entry by entry where operands are rounded."""
    a, d_output, d_lse = draw(case, device)
    found, (wanted, lost) = run(a, impl, d_output, d_lse), exact(a, d_output, d_lse)
    unit = torch.finfo(case.dtype).eps / 2
    for name, x in found.items():
        x, y = x.detach(), wanted[name]
        assert x.shape == y.shape
        assert x.dtype == (torch.promote_types(FLOAT32, case.dtype) if name == "lse" else case.dtype)
        none = y == float("-inf")
        assert torch.equal(x == float("-inf"), none), name
        apart = (x.double() - y).masked_fill(none, 0).abs()
        largest = float(y.masked_fill(none, 0).abs().max()) if y.numel() else 0.0
        arithmetic = {FLOAT64: 1e-12, FLOAT32: 2e-6}.get(case.dtype, 4e-6) * max(largest, 1e-3) * max(1.0, case.large)
        allowed = arithmetic + (
            times * unit * (lost[name] + y.masked_fill(none, 0).abs()) if case.dtype.itemsize == 2 and name != "lse" else 0.0
        )
        assert bool((apart <= allowed).all()), f"{name}: {float((apart - allowed).max()):.2e} beyond what is allowed"


PLAIN = Case()
CASES = [
    PLAIN,
    *(replace(PLAIN, Tq=T, Tk=T) for T in (1, 2, 63, 64, 65, 130)),
    *(replace(PLAIN, Tq=Tq, Tk=Tk) for Tq, Tk in ((1, 130), (30, 100), (100, 30), (0, 5), (5, 0))),
    *(replace(PLAIN, Tq=Tq, Tk=Tk, causal=False) for Tq, Tk in ((70, 70), (65, 130), (130, 3))),
    *(replace(PLAIN, Tq=150, Tk=150, window=window, causal=causal) for window in (1, 40, 64, 100, 1000) for causal in (True, False)),
    *(replace(PLAIN, Tq=Tq, Tk=Tk, window=50, causal=causal) for Tq, Tk in ((40, 200), (200, 40)) for causal in (True, False)),
    *(replace(PLAIN, H=H, G=G) for H, G in ((1, 1), (4, 2), (6, 2), (3, 3))),
    *(replace(PLAIN, D=D) for D in (1, 20, 64, 100, 256)),
    replace(PLAIN, scale=-0.3),
    replace(PLAIN, strided=True, H=4, G=2),
    replace(PLAIN, large=300.0),
    *(replace(PLAIN, dtype=dtype, D=32) for dtype in (FLOAT16, BFLOAT16, FLOAT64)),
    replace(PLAIN, dtype=FLOAT16, window=30, Tq=100, Tk=120),
    *(
        replace(PLAIN, lengths=lengths, window=window, H=4, G=2)
        for lengths in (((70, 70), (1, 1), (0, 0), (65, 65)), ((5, 100), (0, 7), (80, 0), (64, 64), (90, 20)), ((0, 0),))
        for window in (None, 33)
    ),
    replace(PLAIN, lengths=((64, 64), (30, 90)), causal=False, dtype=FLOAT16),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case, impl):
    if impl == "triton" and case.dtype in (BFLOAT16, FLOAT64):
        a, *_ = draw(case)
        with pytest.raises(ps.ImplementationRefused, match=r"interpreter|float64"):
            ps.softmax_attention(a.q, a.k, a.v, impl=impl)
        return
    check(case, impl, times=4.0 if impl == "sdpa" else 1.0)  # how torch rounds inside is its own


def test_the_oracle_is_the_formula():
    q, k, v = (torch.randn(1, 6, 2, 3, dtype=FLOAT64) for _ in range(3))
    output, lse = reference.exact(Attention.checked(q, k, v, None, None, True, 0.7, 3))
    for i in range(6):
        for h in range(2):
            weights = {j: torch.exp(0.7 * q[0, i, h] @ k[0, j, h]) for j in range(max(0, i - 2), i + 1)}
            total = sum(weights.values())
            assert torch.allclose(output[0, i, h], sum(w * v[0, j, h] for j, w in weights.items()) / total)
            assert torch.allclose(lse[0, i, h], total.log())


def test_the_last_query_stands_at_the_last_key():
    q, k, v = torch.randn(1, 3, 1, 4), torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4)
    whole = ps.softmax_attention(torch.cat([torch.randn(1, 2, 1, 4), q], 1), k, v)
    assert torch.allclose(ps.softmax_attention(q, k, v), whole[:, 2:], atol=1e-6)


def test_attention_to_parts_of_the_keys_joins_by_the_log_sum_exp():
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2, 8)
    parts = [ps.softmax_attention(q, k[:, part], v[:, part], causal=False, return_lse=True) for part in (slice(0, 20), slice(20, 50))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)
    joined = sum(w[..., None] * output for w, (output, _) in zip(weights, parts))
    assert torch.allclose(joined, ps.softmax_attention(q, k, v, causal=False), atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_that_see_nothing_get_zeros_and_no_gradient(impl):
    q, k, v = (torch.randn(1, T, 1, 8, requires_grad=True) for T in (9, 4, 4))
    output, lse = ps.softmax_attention(q, k, v, return_lse=True, impl=impl)
    assert not output[:, :5].any()
    assert (lse[:, :5] == float("-inf")).all()
    dq, dk, dv = torch.autograd.grad(output.sum(), (q, k, v))
    assert not dq[:, :5].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_future_changes_nothing(impl):
    q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
    before = ps.softmax_attention(q, k, v, window=40, impl=impl)
    k[:, 60:], v[:, 60:] = 1e4, -1e4
    k[:, :10] = -1e4
    after = ps.softmax_attention(q, k, v, window=40, impl=impl)
    assert torch.equal(before[:, 50:60], after[:, 50:60])


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_no_number_stays_in_its_sequence(impl):
    a, d_output, d_lse = draw(replace(PLAIN, lengths=((40, 40), (30, 30), (70, 70))))
    wanted = run(a, impl, d_output, d_lse)
    for x in (a.q, a.k, a.v, d_output):
        x[:, 40:70] = float("nan")
    found = run(a, impl, d_output, d_lse)
    for x, y in zip(found.values(), wanted.values()):
        for part in (slice(0, 40), slice(70, 140)):
            assert torch.equal(x[:, part], y[:, part])


def test_gradients_in_float64():
    q, k, v = (torch.randn(1, 7, H, 4, dtype=FLOAT64, requires_grad=True) for H in (2, 1, 1))
    assert torch.autograd.gradcheck(lambda *x: ps.softmax_attention(*x, window=3, return_lse=True), (q, k, v))


def test_it_compiles_whole():
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: ps.softmax_attention(q, k, v, window=9), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v), ps.softmax_attention(q, k, v, window=9), atol=1e-6)


def test_the_triton_operators_are_torchs_citizens():
    q, k, v = (torch.randn(1, 20, H, 16, requires_grad=True) for H in (2, 1, 1))
    ps.softmax_attention(q, k, v, impl="triton")
    checked = torch.library.opcheck(torch.ops.penstock.softmax_forward.default, (q, k, v, None, None, True, 0.25, None))
    assert set(checked.values()) == {"SUCCESS"}


def test_autocast_casts_like_a_matrix_product():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert ps.softmax_attention(q, k, v).dtype == BFLOAT16


def test_auto_takes_torchs_operator_on_a_cpu(monkeypatch):
    seen = []
    monkeypatch.setattr(sdpa, "attend", lambda a, return_lse: seen.append(a) or (a.q, None))
    ps.softmax_attention(*(torch.randn(1, 5, 2, 8) for _ in range(3)))
    assert len(seen) == 1


X = torch.randn(1, 5, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, X[:, :, :3], X[:, :, :3]), {}, ps.ShapeError, "q must be of a multiple of k's 3 heads, got 4 heads"),
        ((X, X, X[:, :4]), {}, ps.ShapeError, r"v must be of shape \[B,T,G,D\] = \[1, 5, 4, 8\], got \[1, 4, 4, 8\]"),
        ((X[0], X, X), {}, ps.ShapeError, r"q must be of shape \[B,Tq,H,D\], got \[5, 4, 8\]"),
        ((X, X, X.double()), {}, ps.DtypeError, "v must be float32"),
        ((X.int(), X, X), {}, ps.DtypeError, "q must be float16"),
        ((X, X, None), {}, ps.DtypeError, "v must be a torch.Tensor"),
        ((X, X, X), {"window": 0}, ps.RangeError, "window must be at least 1"),
        ((X, X, X), {"window": 2.5}, ps.DtypeError, "window must be a whole number or None, got 2.5 of type float"),
        ((X, X, X), {"causal": 1}, ps.DtypeError, "causal must be True or False"),
        ((X, X, X), {"impl": "flash"}, ps.RangeError, "impl must be one of auto, triton, sdpa, got 'flash'"),
        ((X, X, X), {"cu_seqlens": torch.tensor([0, 4])}, ps.RangeError, "cu_seqlens must be offsets that begin at 0"),
        ((X, X, X), {"cu_seqlens_k": torch.tensor([0, 5])}, ps.ShapeError, "cu_seqlens_k must be left out without cu_seqlens"),
        (
            (X, X, X),
            {"cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 2, 5])},
            ps.ShapeError,
            "cu_seqlens_k must be as long as cu_seqlens",
        ),
        ((X, X, X), {"impl": "triton", "scale": None}, None, ""),
        (
            tuple(torch.randn(1, 2, 1, 257) for _ in range(3)),
            {"impl": "triton"},
            ps.ImplementationRefused,
            "at most 256 elements, these have 257",
        ),
    ],
)
def test_wrong_input_is_refused_with_the_rule(arguments, options, error, message):
    if error is None:
        ps.softmax_attention(*arguments, **options)
        return
    with pytest.raises(error, match=message):
        ps.softmax_attention(*arguments, **options)


def test_a_call_seen_before_is_not_validated_again_but_where_values_are_read(monkeypatch):
    seen, checked = [], Attention.checked.__func__
    monkeypatch.setattr(eager, "_calls", {})
    monkeypatch.setattr(Attention, "checked", classmethod(lambda cls, *a: seen.append(1) or checked(cls, *a)))
    q, k, v = (torch.randn(1, 12, 2, 16) for _ in range(3))
    offsets = torch.tensor([0, 5, 12])
    for _ in range(3):
        ps.softmax_attention(q, k, v, cu_seqlens=offsets)
    assert len(seen) == 1 + 3
    monkeypatch.setattr(softmax_eager, "reads_values", lambda x: False)
    for window in (None, 3):
        wanted = ps.softmax_attention(q, k, v, cu_seqlens=offsets, window=window)
        seen.clear()
        assert torch.equal(ps.softmax_attention(q, k, v, cu_seqlens=offsets, window=window), wanted)
        assert not seen
    with pytest.raises(ps.ShapeError):
        ps.softmax_attention(q, k[:, 1:], v)
    with pytest.raises(ps.DtypeError, match="return_lse must be True or False"):
        ps.softmax_attention(q, k, v, cu_seqlens=offsets, return_lse=1)


def test_saved_tensors_may_come_back_with_other_strides(monkeypatch):
    monkeypatch.setattr(softmax_eager, "reads_values", lambda x: False)
    a, d_output, d_lse = draw(replace(PLAIN, strided=True))
    wanted = run(a, "triton", d_output, d_lse)
    turned = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x  # noqa: E731
    for change in (torch.Tensor.contiguous, turned):
        with torch.autograd.graph.saved_tensors_hooks(change, lambda x: x):
            found = run(a, "triton", d_output, d_lse)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


@pytest.mark.parametrize("direct", [True, False])
def test_second_derivatives_are_refused(direct, monkeypatch):
    monkeypatch.setattr(attention, "unobserved", lambda *_: direct)
    q, k, v = (torch.randn(1, 5, 1, 16, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(ps.softmax_attention(q, k, v, impl="triton").sum(), q, create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(ps.softmax_attention(q, k, v, impl="triton").sum(), q)[0])
    with pytest.raises(ps.PenstockError, match="got a second derivative"):
        torch.autograd.grad(dq.sum(), v)


@pytest.mark.parametrize("impl", IMPLS)
def test_offsets_may_have_strides(impl):
    a, d_output, d_lse = draw(replace(PLAIN, lengths=((9, 9), (21, 21), (40, 40))))
    strided = torch.stack((a.cu_seqlens, a.cu_seqlens + 7), 1)[:, 0]
    found = run(replace(a, cu_seqlens=strided, cu_seqlens_k=strided), impl, d_output, d_lse)
    assert all(torch.equal(x, y) for x, y in zip(found.values(), run(a, impl, d_output, d_lse).values()))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [(1 << 31) - 80, (1 << 31) - 1, (1 << 63) - 1])
@pytest.mark.parametrize(("Tq", "causal"), [(70, True), (70, False), (90, True)])
def test_a_window_wider_than_all_tokens_is_none(window, Tq, causal, impl):
    a, d_output, d_lse = draw(replace(PLAIN, Tq=Tq, causal=causal))
    found, wanted = (run(one, impl, d_output, d_lse) for one in (replace(a, window=window), a))
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gradient_that_is_no_number_of_a_row_that_sees_nothing_changes_nothing(impl):
    """torch's own derivative of logaddexp is none where both are -inf: of parts of the keys that are joined."""
    q, k, v = (torch.randn(1, T, 1, 16, requires_grad=True) for T in (9, 4, 4))
    output, lse = ps.softmax_attention(q, k, v, return_lse=True, impl=impl)
    d_lse = torch.where(lse.isfinite(), 1.0, float("nan"))
    assert all(x.isfinite().all() for x in torch.autograd.grad((output, lse), (q, k, v), (torch.ones_like(output), d_lse)))


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_that_are_no_numbers_have_no_log_sum_exp(impl):
    q, k, v = (torch.randn(1, 9, 1, 16) for _ in range(3))
    q[0, 3] = float("nan")
    output, lse = ps.softmax_attention(q, k, v, return_lse=True, impl=impl)
    for x in (output, lse):
        assert x[0, 3].isnan().all()
        assert x[0, [0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_without_a_scale_all_weigh_the_same(impl):
    q, k, v = (torch.randn(1, 9, 1, 16) for _ in range(3))
    for causal in (True, False):
        found = ps.softmax_attention(q, k, v, scale=0.0, causal=causal, impl=impl)
        assert torch.allclose(found[:, -1], v.mean(1), atol=1e-6)


def test_under_autocast_the_log_sum_exp_is_exact():
    q, k, v = (torch.randn(1, 9, 1, 16).bfloat16() for _ in range(3))
    _, wanted = ps.softmax_attention(q, k, v, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = ps.softmax_attention(q, k, v, return_lse=True)
    assert found.dtype == FLOAT32
    assert torch.equal(found, wanted)


def test_forward_derivatives_are_refused_rather_than_dropped():
    q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            ps.softmax_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, impl="triton")
