"""The list of implementations, the choice among them, and the validation of values."""

import pytest
import torch
from cases import ALL, Case, call, draw, named

import penstock as ps
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS


def test_implementations_are_listed_in_order():
    assert [one.name for one in ps.implementations()] == [one.name for one in FAMILY.implementations]
    assert len(set(ALL)) == len(ALL)
    for one in ps.implementations():
        assert one.summary
        assert one.reason is None or one.name == "cuda"  # the only one that needs a GPU


@pytest.mark.parametrize("variant", VARIANTS)
def test_explain_prints_the_walk(variant):
    """It lists every implementation with its verdict, forward and backward, and the chosen one."""
    case = Case(variant, T=7, state=False)
    arguments = named(case, draw(case))
    walk = ps.explain(variant, **arguments)
    assert str(walk).startswith(f"{variant}(B=2, T=7, H=3, K=16, V=16, N=2, float32 on cpu)\n  forward runs cpu, backward runs cpu")
    assert [line.split()[:2] for line in str(walk).splitlines()[2:]] == [[name, mode] for name in ALL for mode in ("forward", "backward")]
    assert "chosen" in str(walk).splitlines()[2]
    walk = ps.explain(variant, **{name: x.double() for name, x in arguments.items()}, reverse=True)
    assert (walk.forward, walk.backward) == ("chunkwise", "chunkwise")
    assert "refuses: it computes in float32, and the inputs are float64" in str(walk)
    assert "float64 on cpu, reverse=True" in str(walk)


@pytest.mark.parametrize("named", ["auto", "parallel"])
def test_implementations_that_take_a_call_and_do_not_run(named):
    """The reason fits their place in the list, or the name in the call."""
    q = torch.randn(1, 5, 2, 8)
    walk = ps.explain("linear_attention", q, q, q, impl=named)
    lines = {tuple(line.split()[:2]): line for line in str(walk).splitlines()[2:]}
    for name, mode, reason in walk.verdicts:
        if reason is None and name != walk.chosen[mode]:
            wanted = "takes it, but is later in the list" if named == "auto" else f"takes it, but {named} is named"
            assert lines[name, mode].endswith(wanted)
    assert named == "auto" or ALL.index(named) > 1


def test_a_pass_that_no_implementation_runs():
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    walk = ps.explain("linear_attention", q, q, q, impl="cpu")
    assert walk.forward is None
    assert str(walk).splitlines()[1] == "  no implementation runs forward, no implementation runs backward"
    assert "chunkwise        forward   takes it, but cpu is named" in str(walk)


def test_explain_takes_the_arguments_of_the_function():
    q = torch.randn(1, 5, 2, 8)
    assert "V=9" in str(ps.explain("linear_attention", q, q, q, feature_map="elu+1", normalize=True))
    assert "with cu_seqlens" in str(ps.explain("retention", q, q, q, cu_seqlens=torch.tensor([0, 5])))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bfloat16" in str(ps.explain("retention", q, q, q))


@pytest.mark.parametrize("changed", [{"q": 1}, {"scale": "x"}, {"reverse": 1}, {"impl": "fast"}, {"g": torch.ones(1, 5, 2, 8)}], ids=str)
def test_explain_raises_the_errors_of_the_function(changed):
    q = torch.randn(1, 5, 2, 8)
    arguments = {"q": q, "k": q, "v": q, "g": -q.abs()} | changed
    with pytest.raises(ps.InvalidArgument) as wanted:
        ps.gla(**arguments)
    with pytest.raises(ps.InvalidArgument) as found:
        ps.explain("gla", **arguments)
    assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))


@pytest.mark.parametrize("variant", VARIANTS)
def test_auto_runs_what_explain_says(variant):
    for dtype in (torch.float32, torch.float64):
        case = Case(variant, dtype=dtype)
        tensors = draw(case)
        explained = ps.explain(variant, **named(case, tensors)).forward
        for found, wanted in zip(call(case, tensors, "auto"), call(case, tensors, explained)):
            assert torch.equal(found, wanted)


def test_checks_nest_and_end_with_their_block():
    """The block can be nested, left by an exception and entered again."""
    from penstock.call.validation import _checking_values

    with ps.checks():
        with ps.checks():
            pass
        assert _checking_values.get()
    assert not _checking_values.get()
    with pytest.raises(KeyError), ps.checks():
        raise KeyError
    assert not _checking_values.get()
