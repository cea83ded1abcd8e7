"""Forms of chains that run on a CPU, whatever the sizes and the memory of their tensors. A native kernel reads memory by address."""

import pytest
import torch
from torch import Tensor, nn

from penstock.layers.chains import CHAINS
from penstock.layers.examples import Draw
from penstock.layers.sequences import Sequences
from penstock.verify.chains import tensors

CPU = torch.device("cpu")
FORMS = [
    (chain.name, form.name)
    for chain in CHAINS.values()
    for form in chain.forms[:-1]
    if form.absent(CPU) is None and any(not one.gradients for one in form.examples)
]
pytestmark = pytest.mark.sampled(file=True)


def places(part, place=()):
    """Where tensors are in a call: names of fields, parameters and buffers, indices of tuples."""
    if isinstance(part, Tensor):
        yield place
    elif isinstance(part, Sequences):
        yield from [(*place, "slots")] if part.slots is not None else []
    elif isinstance(part, nn.Module):
        yield from ((*place, name) for name, _ in [*part.named_parameters(), *part.named_buffers()])
    elif isinstance(part, list | tuple):
        for n, one in enumerate(part):
            yield from places(one, (*place, n))


def changed(part, place, change):
    """A part of a call with a tensor changed; modules and sequences are changed in place."""
    if not place:
        return change(part)
    first, *rest = place
    if isinstance(part, nn.Module):
        owner, _, name = first.rpartition(".")
        owner = part.get_submodule(owner)
        x = getattr(owner, name)
        made = change(x)
        setattr(owner, name, nn.Parameter(made, requires_grad=False) if isinstance(x, nn.Parameter) else made)
        return part
    if isinstance(part, Sequences):
        return Sequences(torch.empty(part.batch, part.tokens, 1), part.cu_seqlens, change(part.slots), in_place=part.in_place)
    every = [changed(one, rest, change) if n == first else one for n, one in enumerate(part)]
    return type(part)(*every) if hasattr(part, "_fields") else type(part)(every)


def every_change(form, dtype=torch.float32):
    """Every tensor of every example of a form: the context, a function that draws the call, and the place."""
    for example in form.examples:
        if example.dtype == dtype and not example.gradients:

            def drawn(example=example):
                return example.draw(Draw(example.dtype, CPU))

            for place in places(drawn()):
                yield example.within, drawn, place


def computed(chain, call, form=None):
    """The results, or None if they cannot be computed."""
    try:
        return [x.clone() for x in tensors(chain.computed(call, form))]
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def is_pool(call, place):
    """Whether a place is that of states or of their rows, which functions check before they call a chain."""
    fields = getattr(type(call), "_fields", ())
    return "slots" in place or fields[place[0] : place[0] + 1] in [("pool",), ("state",)]


def alike(found, wanted):
    """The same values, or the form did nothing. A weight that is stored otherwise may have sums in another order."""
    if found != []:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("name", "form"), [one for one in FORMS if one[0] != "linear"])  # its sizes are compared before
def test_tensors_of_other_sizes_are_not_read_past_their_end(name, form):
    """What the formula cannot compute is refused, or raises; the rest has its results."""
    chain = CHAINS[name]
    for within, drawn, place in every_change(chain.form(form)):
        sizes = []
        changed(drawn(), place, lambda x, sizes=sizes: sizes.extend(x.shape) or x)
        for axis, size in [(axis, size) for axis, whole in enumerate(sizes) if whole > 1 for size in {whole - 1, 1}]:
            with within():
                call, other = (changed(drawn(), place, lambda x, axis=axis, size=size: x.narrow(axis, 0, size).clone()) for _ in "12")
                if (is_pool(call, place) and axis == 0) or chain.form(form).refuses(call) is not None:
                    continue
                alike(computed(chain, call, form), computed(chain, other))


def spread(x):
    """The same values, not next to each other, from the second element of their memory on."""
    wide = torch.full((*x.shape, 2), 77, dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def turned(x):
    """The same values with the last axis first in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() else x


def moved(x):
    """The same values from the second element of their memory on."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def negated(x):
    """The same values, lazily negated."""
    return torch._neg_view(-x)


def repeated(axis):
    """The first element of an axis everywhere, with a stride of 0."""
    return lambda x: x.narrow(axis, 0, 1).expand(x.shape) if x.dim() else x


@torch.no_grad()
@pytest.mark.parametrize("memory", [spread, turned, moved, negated, repeated(0), repeated(-1)])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_results_do_not_depend_on_the_layout(name, form, memory):
    chain = CHAINS[name]
    for within, drawn, place in every_change(chain.form(form)):
        with within():
            other, call = changed(drawn(), place, memory), changed(drawn(), place, lambda x: memory(x).clone().contiguous())
            if is_pool(call, place) and memory not in (spread, turned, moved):
                continue
            if chain.form(form).refuses(other) is None:
                alike(computed(chain, other, form), computed(chain, call, form))
