"""Steps of a fixed number of tokens and rows, with a function that runs again in place of a CUDA graph."""

import pytest
import torch
from architectures import model_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.graphs import StepGraphs
from penstock.errors import RangeError


def again(step):
    """As a CUDA graph: the same memory for each result."""
    memory = step().clone()

    def replay():
        return memory.copy_(step())

    return replay


def with_graphs(engine, **options) -> StepGraphs:
    runner = engine._steps.runner
    runner.graphs = StepGraphs(engine.model, engine._pool, runner.last, engine._steps.scheduler.token_budget, capture=again, **options)
    return runner.graphs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["rwkv6", "rwkv7", "mamba2", "gla", "hybrid", "hybrid_window"])
def test_tokens_are_those_of_packed_steps(name, overlap):
    model = model_of(name)
    prompts = [[n % 13] * (20 * n + 1) for n in range(7)]
    params = [
        SamplingParams(max_tokens=10 * n + 1, seed=n, n=1 + n // 5, presence_penalty=0.5 * (n % 3), repetition_penalty=1 + 0.2 * (n % 2))
        for n in range(7)
    ]
    wanted = Engine(model, slots=5, token_budget=200).generate(prompts, params)
    engine = Engine(model, slots=5, token_budget=200, overlap=overlap)
    graphs = with_graphs(engine)
    found = engine.generate(prompts, params)
    assert [[one.tokens for one in result.completions] for result in found] == [
        [one.tokens for one in result.completions] for result in wanted
    ]
    engine.check_integrity()
    assert {T for T, N in graphs._graphs if not N} <= {1, 2, 4, 8}
    assert {(T, N) for T, N in graphs._graphs if N} <= {(64, 8), (128, 8), (192, 8), (256, 8)}
    assert len(graphs._graphs) > 4


def test_the_sizes_of_graphs_are_few_and_close():
    engine = Engine(model_of("gla"), slots=5, token_budget=2048)
    graphs = with_graphs(engine)
    assert [graphs.decode_tokens(rows) for rows in (1, 2, 3, 5, 9, 16, 17, 33, 128, 129, 512)] == [
        1,
        2,
        4,
        8,
        16,
        16,
        32,
        48,
        128,
        160,
        512,
    ]
    assert [graphs.packed_tokens(tokens) for tokens in (2, 64, 65, 449, 513, 640, 1025, 2048)] == [64, 64, 128, 512, 640, 640, 1280, 2048]
    assert len(list(graphs._packed_sizes())) == 16
    graphs = with_graphs(engine, block=16)
    assert [graphs.decode_tokens(rows) for rows in (1, 15, 16, 128)] == [16, 16, 32, 160]
    assert [graphs.packed_tokens(tokens) for tokens in (2, 63, 64, 128)] == [64, 64, 128, 192]


def test_graphs_that_are_captured_before_serve_all_steps():
    model = model_of("rwkv6")
    engine = Engine(model, slots=3, token_budget=200)
    graphs = with_graphs(engine)
    before = engine._pool.memory.clone()
    engine.warm_up()
    assert torch.equal(engine._pool.memory, before)
    captured = set(graphs._graphs)
    engine.generate([[1] * length for length in (1, 2, 63, 64, 65, 130, 199)], SamplingParams(max_tokens=70, seed=1))
    assert set(graphs._graphs) == captured == {(1, 0), (2, 0), (4, 0), (64, 8), (128, 8), (192, 8), (256, 8)}


def test_graphs_need_a_gpu():
    with pytest.raises(RangeError, match="cuda_graphs must be None or False"):
        Engine(model_of("gla"), slots=2, token_budget=200, cuda_graphs=True)
