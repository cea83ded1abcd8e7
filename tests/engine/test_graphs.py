"""Decode steps of a fixed number of rows, with a function that runs again in place of a CUDA graph."""

import pytest
from architectures import model_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.graphs import DecodeGraphs
from penstock.errors import RangeError


def again(step):
    """As a CUDA graph: the same memory for each result."""
    memory = step().clone()

    def replay():
        return memory.copy_(step())

    return replay


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["rwkv6", "mamba2", "gla"])
def test_tokens_are_those_of_packed_steps(name, overlap):
    model = model_of(name)
    prompts = [[n % 13] * (20 * n + 1) for n in range(7)]
    params = [SamplingParams(max_tokens=10 * n + 1, seed=n, n=1 + n // 5) for n in range(7)]
    wanted = Engine(model, slots=5, token_budget=200).generate(prompts, params)
    engine = Engine(model, slots=5, token_budget=200, overlap=overlap)
    graphs = engine._steps.runner.graphs = DecodeGraphs(model, engine._pool, again)
    found = engine.generate(prompts, params)
    assert [[one.tokens for one in result.completions] for result in found] == [
        [one.tokens for one in result.completions] for result in wanted
    ]
    assert set(graphs._graphs) <= {1, 2, 4, 8}
    assert len(graphs._graphs) > 1


def test_buckets():
    assert [DecodeGraphs.bucket(rows) for rows in (1, 2, 3, 5, 9, 16, 17, 33, 128)] == [1, 2, 4, 8, 16, 16, 32, 48, 128]
    with pytest.raises(RangeError, match="cuda_graphs must be None or False"):
        Engine(model_of("gla"), slots=2, token_budget=200, cuda_graphs=True)
