"""NaN and inf in one packed sequence or head change no bit of outputs, states and gradients of the others."""

import pytest
import torch
from deltas import NAMES, VARIANTS, Delta

VALUES = (torch.nan, torch.inf, -torch.inf)
BEGIN, TOKEN, END = 5, 40, 75
"""The packed sequence that is not finite, and its token."""
ELSEWHERE = [*range(BEGIN), *range(END, END + 3)]
TENSORS = ("q", "k", "v", "beta", "a", "b", "initial_state", "output", "final_state")
"""Those that are poisoned; "output" and "final_state" are their gradients."""
every_implementation = pytest.mark.parametrize("impl", NAMES)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def case_of(variant):
    """Three packed sequences and two heads."""
    case = Delta(variant, H=2, G=2, K=6, V=5, lengths=(BEGIN, END - BEGIN, 3))
    return case, case.tensors() | dict(zip(("output", "final_state"), case.upstream()))


def passes(case, tensors, impl):
    """Results and gradients, and the tensors whose axes they have."""
    given = dict(tensors)
    upstream = [given.pop(name) for name in ("output", "final_state")]
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None and x.is_floating_point()}
    results = case.call(given | leaves, impl)
    gradients = torch.autograd.grad(results, list(leaves.values()), upstream)
    return {"output": results.output, "final_state": results.final_state} | {f"d{name}": x for name, x in zip(leaves, gradients)}


def per_sequence(name):
    return name.endswith("state")


def poisoned(case, tensors, impl, head):
    """Each call with a value that is not finite at one token, or in one state, of head ``head``."""
    for number, name in enumerate(TENSORS):
        if tensors[name] is not None:
            x = tensors[name].clone()
            x[(1, head) if per_sequence(name) else (0, TOKEN, head)] = VALUES[number % 3]
            yield name, passes(case, tensors | {name: x}, impl)


@every_implementation
@every_variant
def test_other_sequences_and_heads(variant, impl):
    case, tensors = case_of(variant)
    healthy = passes(case, tensors, impl)
    for head in (0, 1):
        for name, found in poisoned(case, tensors, impl, head):
            for result, wanted in healthy.items():
                x = found[result]
                parts = ([0, 2], slice(None)) if per_sequence(result) else (0, ELSEWHERE)
                heads = (slice(None), 1 - head) if per_sequence(result) else (0, slice(None), 1 - head)
                assert torch.equal(x[parts], wanted[parts]), (name, result)
                assert torch.equal(x[heads], wanted[heads]), (name, result)
            assert any(not x.isfinite().all() for x in found.values()), name


@pytest.mark.parametrize("impl", [name for name in NAMES if name != "chunkwise"])
@every_variant
def test_earlier_tokens_of_token_loops(variant, impl):
    """Where tokens are computed one after another, NaN reaches later tokens only."""
    case, tensors = case_of(variant)
    wanted = passes(case, tensors, impl)["output"]
    for name, found in poisoned(case, tensors, impl, 0):
        if not per_sequence(name) and name != "output":
            assert torch.equal(found["output"][:, :TOKEN], wanted[:, :TOKEN]), name
            assert not found["output"][0, TOKEN:END, 0].isfinite().all(), name
