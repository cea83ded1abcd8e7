"""Every form of every chain against the chain's formula, as ``penstock check`` compares them."""

from typing import NamedTuple

import pytest
import torch

from penstock.call.declaration import FLOATS
from penstock.gpu.target import Target
from penstock.layers.chains import NOTHING_RAN, Chain, ChainForm, no_kernels, plain, recorded
from penstock.layers.examples import Draw, examples
from penstock.layers.triton import refusal
from penstock.verify.chains import CHAINS, findings, tensors

FORMS = [(name, one.name) for name, chain in CHAINS.items() for one in chain.listed()]


def compared(chain, form, dtypes=FLOATS):
    return list(findings(CHAINS[chain], dtypes, "cpu", only=form))


@pytest.mark.parametrize(("chain", "form"), FORMS)
def test_examples_equal_the_formula(chain, form, kernels_on_a_cpu):
    """Each form runs on its examples, and what it computes is right, gradients included."""
    found = compared(chain, form)
    assert found or CHAINS[chain].form(form).absent(torch.device("cpu")) is not None
    assert not [(one.dtype, one.result, one.reason, one.error, one.budget) for one in found if one.failed]


def test_token_shifts_on_gpus_of_amd_equal_the_formula(kernels_on_a_cpu, monkeypatch):
    """Their compiler gets two loads in place of a choice between pointers."""
    monkeypatch.setattr(Target, "of", lambda device: Target("gfx942", 304, 64 << 10))
    found = compared("token_shift", "shift", (torch.float32,))
    assert len(found) > 20
    assert not [(one.result, one.reason, one.error, one.budget) for one in found if one.failed]


@pytest.fixture
def launched(monkeypatch, kernels_on_a_cpu):
    """The names of the kernels that ran."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    names, whole = set(), interpreter.InterpretedFunction.run
    monkeypatch.setattr(
        interpreter.InterpretedFunction, "run", lambda self, *given, **more: names.add(self.__name__) or whole(self, *given, **more)
    )
    return names


def calls(chain, form, **options):
    """The examples of a form that the interpreter computes: example, draw and call."""
    for example in CHAINS[chain].form(form).examples:
        draw = Draw(example.dtype, torch.device("cpu"), gradients=example.gradients, **options)
        with torch.set_grad_enabled(example.gradients), example.within():
            if example.dtype != torch.bfloat16:
                yield example, draw, example.draw(draw)


@pytest.mark.parametrize(("chain", "form"), FORMS)
def test_examples_run_all_kernels_of_a_form(chain, form, launched):
    """Also those of the backward pass."""
    one = CHAINS[chain].form(form)
    if one.absent(torch.device("cpu")) is not None:
        pytest.skip("needs another device")
    compared(chain, form)
    assert {name for _, _, call in calls(chain, form) for name in one.kernels(call)} <= launched


def with_gradients():
    return [(chain, form) for chain, form in FORMS if any(one.gradients for one in CHAINS[chain].form(form).examples)]


def results_of(chain, form):
    """The results that have gradients, gradients of them, and the leaves, of each example in float32."""
    for example, draw, call in calls(chain, form):
        if example.gradients and example.dtype == torch.float32:
            results = [y for y in tensors(CHAINS[chain].computed(call, form)) if y.requires_grad]
            random = torch.Generator().manual_seed(1)
            yield results, [torch.randn(y.shape, generator=random).to(y) for y in results], list(draw.leaves.values())


def assert_close(found, wanted):
    """Lists of gradients, of which some are None."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("chain", "form"), with_gradients())
def test_lazily_negated_gradients(chain, form, kernels_on_a_cpu):
    """Their memory holds other values."""
    for (results, upstream, leaves), (others, _, same) in zip(results_of(chain, form), results_of(chain, form)):
        wanted = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
        assert_close(torch.autograd.grad(others, same, [torch._neg_view(-d) for d in upstream], allow_unused=True), wanted)


@pytest.mark.parametrize(("chain", "form"), with_gradients())
def test_batches_of_gradients(chain, form, kernels_on_a_cpu):
    """Under vmap, as for Jacobians, of all results and of each alone. The tensors have no memory."""
    for results, upstream, leaves in results_of(chain, form):
        options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        for places in (range(len(results)), *([n] for n in range(len(results)))):
            batches, others = [torch.stack([upstream[n], -2 * upstream[n]]) for n in places], list(upstream)

            def gradients(*given, results=results, leaves=leaves, places=places, others=others, options=options):
                for n, d in zip(places, given):
                    others[n] = d
                return torch.autograd.grad(results, leaves, others, **options)

            found = torch.func.vmap(gradients)(*batches)
            for one in range(2):
                assert_close([x[one] for x in found], gradients(*[d[one] for d in batches]))


def with_other_strides(x):
    """The same values; elements of other tensors lie between those of a row."""
    return torch.stack([x, torch.full_like(x, torch.nan) if x.is_floating_point() else x + 1], -1)[..., 0]


@pytest.mark.parametrize(("chain", "form"), [one for one in with_gradients() if not CHAINS[one[0]].form(one[1]).compiles])
def test_hooks_of_saved_tensors_may_change_strides(chain, form, kernels_on_a_cpu):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, with_other_strides):
        others = list(results_of(chain, form))
    for (results, upstream, leaves), (same, _, its) in zip(results_of(chain, form), others, strict=True):
        wanted = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
        assert_close(torch.autograd.grad(same, its, upstream, allow_unused=True), wanted)


def test_tensors_on_several_devices_are_refused(kernels_on_a_cpu):
    """A kernel would read other memory by address; the formula raises torch's error."""

    class Elsewhere(torch.Tensor):
        def get_device(self):
            return 1

    x = torch.ones(3)
    assert refusal(x, None, x) is None
    assert refusal(x, torch.ones(3).as_subclass(Elsewhere)) == "its tensors are on several devices"


@pytest.mark.parametrize(("chain", "form"), with_gradients())
def test_no_views_around_autograd_functions(chain, form, kernels_on_a_cpu):
    """A view is a node of the graph and takes time of the host in both passes."""
    views = []
    for example, _, call in calls(chain, form):
        if example.gradients and CHAINS[chain].form(form).kernels(call):
            waiting, seen = [y.grad_fn for y in tensors(CHAINS[chain].computed(call, form)) if y.requires_grad], set()
            while waiting:
                node = waiting.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    waiting += [one for one, _ in node.next_functions]
            linear = any("Mm" in one.name() for one in seen)  # torch's product of tokens has views of its own
            views += [one.name() for one in seen if not linear and "View" in one.name()]
    assert not views


ONE_ROW = [("low_rank_maps", "low_rank_maps"), ("channel_mix", "channel_mix")]
PRODUCTS = [("linear", "products"), ("linears", "products"), ("linears_of", "products")]


@pytest.mark.parametrize(("chain", "form"), [*ONE_ROW, *PRODUCTS])
def test_examples_equal_the_formula_on_hopper(chain, form, on_hopper):
    """The kernels in Gluon, in the emulator."""
    found = compared(chain, form, (torch.float16,))
    assert found
    assert on_hopper
    assert not [(one.dtype, one.result, one.reason, one.error, one.budget) for one in found if one.failed]


@pytest.fixture
def on_hopper(kernels_on_a_cpu, monkeypatch):
    """A CPU with the kernels for Hopper, which the emulator runs. The names of those that ran."""
    gluon = pytest.importorskip("emulated.gluon")
    few_rows, products, one_row = (
        pytest.importorskip(f"penstock.layers.triton.{name}_launch") for name in ("few_rows", "hopper_products", "hopper_one_row")
    )
    names = []

    class Launcher:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launched(*given, **constants):
                names.append(self.kernel.__name__)
                options = {name: constants.pop(name) for name in ("num_warps", "maxnreg", "launch_pdl") if name in constants}
                gluon.launch(self.kernel, grid, list(given), constants, options["num_warps"])

            return launched

    for module in (products, one_row):
        monkeypatch.setattr(module, "on_device_of", lambda x, kernel: Launcher(kernel))
        monkeypatch.setattr(module, "described", lambda x, known: gluon.Descriptor(x, known["block_shape"]))
    monkeypatch.setattr(few_rows, "on_hopper", lambda device, name: {"hopper_products_launch": products}.get(name, one_row))
    return names


def test_every_form_but_the_last_has_examples():
    """The last is compared with nothing: it is the formula, or tells the caller to run other chains."""
    for chain in CHAINS.values():
        assert [one.name for one in chain.listed()] == [one.name for one in chain.forms[:-1]]
        assert all(one.examples for one in chain.forms[:-1]), chain.name
        assert not chain.forms[-1].examples


def test_forms_with_kernels_are_not_asked_in_compiled_graphs():
    """Nor are native kernels, except those that run in graphs as operators: the formula of such a form is ``plain``."""
    for chain in CHAINS.values():
        for one in chain.forms:
            assert not one.compiles or one.kernels is no_kernels
    named = ChainForm("one", lambda c: c, lambda c: None, no_kernels)
    assert not named.compiles


@pytest.fixture
def chain(monkeypatch):
    """A chain x -> 2 x whose first form is replaced by the test."""
    monkeypatch.setattr("penstock.layers.chains.CHAINS", {})

    def made(run, refuses=lambda c: None, *, given=True):
        drawn = examples(lambda draw: Point(draw("x", 3, 5)), torch.float32) if given else ()
        first = ChainForm("first", run, refuses, no_kernels, drawn, lambda device: None)
        return Chain("twice", first, plain("formula", lambda c: 2 * c.x))

    return made


class Point(NamedTuple):
    x: torch.Tensor


class Wrong(torch.autograd.Function):
    """Right results, wrong gradients."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 1.999 * dy


def failures(chain):
    return [(one.form, one.result, one.reason) for one in findings(chain, FLOATS, "cpu") if one.failed]


def test_right_forms_do_not_fail(chain):
    assert failures(chain(lambda c: c.x + c.x)) == []


@pytest.mark.parametrize(
    ("run", "result"), [(lambda c: 2.001 * c.x, "result 0"), (lambda c: Wrong.apply(c.x), "gradient of x")], ids=["results", "gradients"]
)
def test_wrong_forms_fail(run, result, chain):
    assert ("first", result, None) in failures(chain(run))


def test_forms_that_raise_fail(chain):
    ((form, result, reason),) = failures(chain(lambda c: c.x @ c.x))
    assert (form, result) == ("first", "all")
    assert reason.startswith("RuntimeError: ")


def test_other_numbers_of_results_fail(chain):
    ((form, result, reason),) = failures(chain(lambda c: (2 * c.x, c.x)))
    assert (form, result) == ("first", "all")
    assert reason.startswith("its results are result 0, result 1, gradient of x, those of the formula result 0,")


def test_the_next_form_runs_after_one_that_did_nothing(chain):
    """It is not compared with the formula, so it did not run on its examples."""
    made, x = chain(lambda c: None), torch.ones(2)
    with recorded(torch.nn.Module()) as found:
        assert torch.equal(made(Point(x)), 2 * x)
    assert torch.equal(made(Point(x)), 2 * x)
    ((_, name, form, _, reasons),) = found
    assert (name, form, reasons) == ("twice", "formula", (("first", NOTHING_RAN),))
    assert failures(made) == [("first", "form", "it did not run on any of its examples")]


def test_forms_that_did_not_run_fail(chain, monkeypatch):
    reason = "it did not run on any of its examples"
    assert failures(chain(lambda c: 2 * c.x, lambda c: "never")) == [("first", "form", reason)]
    monkeypatch.setattr("penstock.layers.chains.CHAINS", {})
    assert failures(chain(lambda c: 2 * c.x, given=False)) == [("first", "form", "it has no examples on which it could run")]


def test_chains_are_declared_once_and_end_with_a_plain_form(chain):
    made = chain(lambda c: 2 * c.x)
    last = made.forms[-1]
    for name, forms, message in (
        ("twice", (last,), "name must be new, and those of its forms differ, got twice of formula"),
        ("thrice", (last, last), "got thrice of formula, formula"),
        ("thrice", (made.forms[0],), "forms must end with a plain one that takes every call, got first of thrice"),
        ("thrice", (plain("some", lambda c: c.x, lambda c: "no"),), "got some of thrice"),
    ):
        with pytest.raises(ValueError, match=f"Chain: .*{message}"):
            Chain(name, *forms)
