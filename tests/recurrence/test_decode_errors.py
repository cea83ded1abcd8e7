"""Bad input to decode_step: which exception, what it says; the pool keeps its bits."""

import pytest
import torch
from cases import NAMES, Case, draw

import penstock as ps
from penstock.call.families import variants
from penstock.delta.operators import ADVANCE as DELTA_ADVANCE
from penstock.delta.variants import VARIANTS as OF_DELTA
from penstock.recurrence.operators import ADVANCE as RECURRENCE_ADVANCE
from penstock.recurrence.variants import VARIANTS

N, H, K, V, ROWS = 3, 2, 4, 6, 5


def good(variant, **changed):
    """Arguments of a valid step, some changed."""
    tensors = draw(Case(variant, B=N, T=2, H=H, K=K, V=V, state=False))
    arguments = {name: tensors[name] for name in ("q", "k", "v", "g", "u")}
    return arguments | {"state": torch.randn(ROWS, H, K, V), "slots": torch.tensor([4, -1, 0])} | changed


def rejected(kind, arguments, *said, variant="gla", impl="auto"):
    """Raises exactly this kind, saying all of this, and leaves the pool alone."""
    state = arguments["state"]
    before = state.detach().clone() if isinstance(state, torch.Tensor) else None
    with pytest.raises(ps.PenstockError) as caught:
        ps.decode_step(variant, **arguments, impl=impl)
    assert type(caught.value) is kind
    for text in said:
        assert text in str(caught.value)
    assert before is None or torch.equal(state, before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decay_and_bonus_are_required_or_refused(variant):
    row, name = VARIANTS[variant], f"decode_step({variant!r}): "
    if row.decay and variant != "retention":  # which has a default
        rejected(ps.ShapeError, good(variant, g=None), f"{name}g must be given", "got None", variant=variant)
    if not row.decay:
        rejected(ps.ShapeError, good(variant, g=torch.zeros(N)), f"{name}g must be left out", "got [3]", variant=variant)
    said = f"{name}u must be given, of shape [H,K], got None" if row.bonus else f"{name}u must be left out"
    rejected(ps.ShapeError, good(variant, u=None if row.bonus else torch.zeros(H, K)), said, variant=variant)


@pytest.mark.parametrize(
    ("kind", "slots", "said"),
    [
        (ps.RangeError, torch.tensor([0, 5, 1]), "slots must be below the 5 rows of state, got 5"),
        (ps.RangeError, torch.tensor([0, 2, 2]), "slots must be different for every sequence, got [2] more than once"),
        (ps.ShapeError, torch.tensor([0, 1]), "slots must be of shape [N] = [3], got [2]"),
        (ps.ShapeError, torch.tensor([[0, 1, 2]]), "slots must be of shape [N] = [3], got [1, 3]"),
        (ps.DtypeError, torch.tensor([0.0, 1.0, 2.0]), "slots must be int32 or int64, got torch.float32"),
        (ps.DeviceError, torch.zeros(3, dtype=torch.int64, device="meta"), "slots must be on cpu"),
        (ps.DtypeError, [0, 1, 2], "slots must be a torch.Tensor or None, got [0, 1, 2] of type list"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_slots(kind, slots, said):
    rejected(kind, good("gla", slots=slots), "decode_step('gla'): " + said)


TIMED = [
    (key.split("'")[1], name) for one in (RECURRENCE_ADVANCE, DELTA_ADVANCE) for key, signature in one.signatures.items()
    for name in ("k", "v", "g", "beta", "a", "b") if key.startswith("decode_step") and "T" in signature.axes.get(name, ())
]  # fmt: skip


@pytest.mark.parametrize(("variant", "name"), TIMED)
def test_no_input_has_an_axis_of_tokens_that_q_lacks(variant, name):
    given = {"q": torch.zeros(N, H, K), "k": torch.zeros(N, H, K), "v": torch.zeros(N, H, V), "state": torch.zeros(N, H, K, V)}
    one = DELTA_ADVANCE if variant in OF_DELTA else RECURRENCE_ADVANCE
    axes = one.signatures[f"decode_step({variant!r})"].axes[name]
    given[name] = torch.zeros([{"B": N, "T": 1, "K": K, "V": V}.get(axis, H) for axis in axes])
    said = f"decode_step({variant!r}): {name} must be without the axis T, as q, got {list(given[name].shape)}. Pass {name}[:, 0]"
    rejected(ps.ShapeError, given, said, variant=variant)


@pytest.mark.parametrize("K", [K, H])
@pytest.mark.parametrize("variant", ["simple_gla", "gated_delta_rule"])
def test_a_decay_of_channels_is_none_of_heads(variant, K):
    """With as many channels as heads, too: its first channel would be decays of heads."""
    given = {"q": torch.zeros(N, H, K), "k": torch.zeros(N, H, K), "v": torch.zeros(N, H, V), "state": torch.zeros(N, H, K, V)}
    said = f"decode_step({variant!r}): g must be of shape [B,T,H] = [3, 1, 2], got [3, 2, {K}]."
    beta = {"beta": torch.zeros(N, H)} if variant in OF_DELTA else {}
    rejected(ps.ShapeError, given | beta | {"g": torch.zeros(N, H, K)}, said, variant=variant)


def test_skipped_slots_may_repeat():
    arguments = good("gla", slots=torch.tensor([-1, -1, 0]))
    assert ps.decode_step("gla", **arguments)[:2].eq(0).all()


@pytest.mark.parametrize(
    ("kind", "state", "said"),
    [
        (ps.ShapeError, torch.zeros(ROWS, H, K, V + 1), "state must be of shape [P,H,K,V] = [*, 2, 4, 6], got [5, 2, 4, 7]"),
        (ps.ShapeError, torch.zeros(H, K, V), "state must be of shape"),
        (
            ps.DtypeError,
            torch.zeros(ROWS, H, K, V, dtype=torch.int32),
            "state must be float16 or bfloat16 or float32 or float64, got torch.int32",
        ),
        (ps.DeviceError, torch.zeros(ROWS, H, K, V, device="meta"), "state must be on cpu"),
        (ps.RangeError, torch.zeros(1, H, K, V).expand(ROWS, H, K, V), "state must be free of overlap, since it is written in place"),
        (ps.RangeError, torch.zeros(ROWS * H * K * V).as_strided((ROWS, H, K, V), (K * V, K * V, V, 1)), "state must be free of overlap"),
        (ps.DtypeError, None, "state must be a torch.Tensor, got None"),
        (ps.RangeError, torch.zeros(ROWS, H, K, V, requires_grad=True), "state must be free of gradients"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_pools(kind, state, said):
    if isinstance(state, torch.Tensor) and state.is_meta:
        with pytest.raises(kind, match="state must be on cpu"):
            ps.decode_step("gla", **good("gla", state=state))
        return
    rejected(kind, good("gla", state=state), "decode_step('gla'): " + said)


def test_a_larger_pool_needs_slots():
    said = "decode_step('gla'): state must be of shape [N,H,K,V] = [3, 2, 4, 6], got [5, 2, 4, 6]. Pass slots="
    rejected(ps.ShapeError, good("gla", slots=None), said)


def test_too_many_tokens_in_a_step():
    long = {name: torch.zeros(N, 17, H, V if name == "v" else K) for name in ("q", "k", "v", "g")}
    said = "decode_step('gla'): T must be at most 16 tokens a sequence, got 17. Use advance() for more."
    rejected(ps.ShapeError, good("gla", **long), said)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "u"])
def test_inputs_that_require_gradients(name):
    arguments = good("rwkv6")
    arguments[name].requires_grad_()
    said = f"decode_step('rwkv6'): {name} must be free of gradients"
    rejected(ps.RangeError, arguments, said, "torch.no_grad()", variant="rwkv6")


def test_token_arguments():
    """The rules of the functions over sequences hold here too."""
    arguments = good("gla")
    rejected(ps.ShapeError, arguments | {"k": arguments["k"][:, :, :1]}, "decode_step('gla'): k must be of shape")
    rejected(ps.ShapeError, arguments | {"q": arguments["q"][0, 0]}, "decode_step('gla'): q must be of shape")
    rejected(ps.ShapeError, arguments | {"k": arguments["k"][:, 0]}, "decode_step('gla'): k must be of shape")
    rejected(ps.DtypeError, arguments | {"v": arguments["v"].double()}, "decode_step('gla'): v must be float32")
    rejected(ps.DtypeError, arguments | {"q": "q"}, "decode_step('gla'): q must be a torch.Tensor, got 'q' of type str")
    rejected(ps.DtypeError, arguments | {"scale": "x"}, "decode_step('gla'): scale must be a number or None")
    rejected(ps.RangeError, arguments | {"g": -arguments["g"]}, "decode_step('gla'): g must be a log decay")
    rejected(ps.InvalidArgument, arguments | {"v": arguments["v"].double(), "slots": torch.tensor([0])}, "v must be", "slots must be")


@pytest.mark.parametrize("variant", ["delta_net", None, ["gla"]], ids=str)
def test_unknown_variants(variant):
    said = f"decode_step: variant must be one of {', '.join(variants(drawn=True))}, got"
    rejected(ps.RangeError, good("gla"), said, repr(variant), variant=variant)
    with pytest.raises(ps.RangeError, match="explain: function must be one of"):
        ps.explain(variant)


@pytest.mark.parametrize("ask", [ps.explain, ps.implementations])
def test_functions_are_named(ask):
    with pytest.raises(ps.RangeError, match=r"got <function gla .*>\. Pass its name, 'gla'\."):
        ask(ps.gla)


def test_named_implementations():
    rejected(ps.RangeError, good("gla"), "decode_step('gla'): impl must be one of auto", impl="fast")
    double = {name: x.double() for name, x in good("gla").items() if name in "qkvg"}
    rejected(ps.ImplementationRefused, good("gla", **double), "it computes in float32, and the inputs are float64", impl="cpu")
    assert {ps.decode_step("gla", **good("gla"), impl=impl).shape for impl in NAMES} == {(N, 2, H, V)}
