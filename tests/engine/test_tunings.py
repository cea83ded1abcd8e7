"""Initial states and adapters that requests name: each request equals an engine of a model of its own."""

import math

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from random_adapters import factors_of, merged
from sampling import every
from torch import nn

from penstock.engine import Engine, SamplingParams
from penstock.engine.graphs import StepGraphs
from penstock.errors import DtypeError, InvalidArgument, RangeError, ShapeError
from penstock.models.arguments import named_tensors

pytestmark = pytest.mark.sampled(file=True)

NAMES = [*ARCHITECTURES]
PROMPT = [n * n % 13 for n in range(150)]


def state_of(model, seed):
    """A state after some text, and another one for each seed."""
    return model(torch.randint(13, (1, 9), generator=torch.Generator().manual_seed(seed))).state


def run(engine, requests):
    while not all(one.done for one in requests):
        engine.step()
    assert [one.result.error for one in requests] == [None] * len(requests)
    engine.check_integrity()
    return [[completion.tokens for completion in one.result.completions] for one in requests]


@pytest.mark.parametrize("name", every(5, NAMES))
def test_requests_with_different_tunings_share_steps(name):
    """Prompts of several chunks, more requests than slots, several completions. They equal merged weights, and initial states."""
    dtype = torch.float64
    model = model_of(name, dtype)
    adapters = {f"adapter{n}": factors_of(model, rank, n) for n, rank in enumerate((2, 5))}
    grows = any(mixer.grows for mixer in model.config.mixers)
    states = {} if grows else {f"state{n}": state_of(model, n) for n in range(2)}
    engine = Engine(model, slots=3, token_budget=256, states=states, adapters=adapters)
    params = [SamplingParams(max_tokens=12, seed=n, n=1 + n % 2, temperature=0.8) for n in range(5)]
    names, prompts = [None, *engine.tunings], [PROMPT[: 20 + 31 * n] for n in range(5)]
    requests = [engine.submit(prompt, one, tuning=tuning) for tuning, prompt, one in zip(names, prompts, params)]
    found = run(engine, requests)
    for tuning, prompt, one, tokens in zip(names, prompts, params, found):
        if tuning in adapters:
            alone = Engine(merged(name, adapters[tuning], dtype), slots=3, token_budget=256)
        elif tuning in states:
            alone = Engine(model_of(name, dtype), slots=3, token_budget=256)
            for place, (_, x) in zip(alone._pool.layout, named_tensors(states[tuning])):
                place.view(alone._pool._initial).copy_(x)
        else:
            alone = Engine(model_of(name, dtype), slots=3, token_budget=256)
        assert tokens == run(alone, [alone.submit(prompt, one)])[0], tuning
    assert len({str(one) for one in found}) == 1 + len(engine.tunings)


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7", "mamba2", "gla"])
def test_bits_do_not_depend_on_the_tunings_of_other_requests(name):
    """Log probabilities of prompts and of generated tokens."""
    model = model_of(name)
    adapters = {f"adapter{n}": factors_of(model, 1 + n, n) for n in range(4)}
    states = {f"state{n}": state_of(model, n) for n in range(3)}
    engine = Engine(model, slots=8, token_budget=256, cache_bytes=0, batch_invariant=True, states=states, adapters=adapters)
    params = SamplingParams(max_tokens=8, seed=1, logprobs=2, prompt_logprobs=0)
    names = [None, *engine.tunings]
    together = [engine.submit(PROMPT[: 10 + 9 * n], params, tuning=one) for n, one in enumerate(names)]
    run(engine, together)
    for n, one in enumerate(names):
        alone = engine.submit(PROMPT[: 10 + 9 * n], params, tuning=one)
        run(engine, [alone])
        assert alone.result.completions[0].logprobs == together[n].result.completions[0].logprobs
        assert alone.result.prompt_logprobs == together[n].result.prompt_logprobs


def test_prefixes_are_cached_for_each_tuning():
    model = model_of("rwkv6")
    engine = Engine(model, slots=2, token_budget=256, states={"s": state_of(model, 0)}, adapters={"a": factors_of(model, 3, 0)})
    params, first = SamplingParams(max_tokens=6, temperature=0, logprobs=0), {}
    for one in (None, "s", "a"):
        request = engine.submit(PROMPT, params, tuning=one)
        run(engine, [request])
        first[one] = request.result.completions[0].logprobs
    assert len({str(one) for one in first.values()}) == 3
    for one, logprobs in first.items():
        again = engine.submit(PROMPT, params, tuning=one)
        run(engine, [again])
        assert again.result.cached_tokens == 128
        assert again.result.completions[0].logprobs == logprobs
    assert engine.stats.cache.misses == 3


@pytest.mark.parametrize("kind", ["states", "adapters"])
@pytest.mark.parametrize("size", [5, 150])
def test_states_of_completions_belong_to_the_tuning(kind, size, tmp_path):
    model = model_of("rwkv6")
    made = {"states": {"one": state_of(model, 0), "other": state_of(model, 1)}}
    made["adapters"] = {"one": factors_of(model, 3, 0), "other": factors_of(model, 3, 1)}
    engine = Engine(model, slots=2, token_budget=256, cache_bytes=0, **{kind: made[kind]})
    params = SamplingParams(max_tokens=20, temperature=0, keep_state=True)
    whole = run(engine, [engine.submit(PROMPT[:size], SamplingParams(max_tokens=30, temperature=0), tuning="one")])[0][0]
    request = engine.submit(PROMPT[:size], params, tuning="one")
    run(engine, [request])
    state = request.result.completions[0].state
    engine.save_state(state, tmp_path / "a.safetensors")
    for kept in (state, engine.load_state(tmp_path / "a.safetensors")):
        more = SamplingParams(max_tokens=10, temperature=0)
        assert run(engine, [engine.submit((), more, state=kept, tuning="one")])[0][0] == whole[20:]
        for wrong in (None, "other"):
            with pytest.raises(
                RangeError, match="submit: state must be of this model with this tuning, got one of another model or tuning"
            ):
                engine.submit((), more, state=kept, tuning=wrong)
    with pytest.raises(RangeError, match="the model of the file must be"):
        Engine(model_of("rwkv6"), slots=2, token_budget=256).load_state(tmp_path / "a.safetensors")


def test_states_of_an_adapter_do_not_continue_with_its_factors_at_another_weight():
    model = model_of("rwkv6")
    pair = next(iter(factors_of(model, 3, 0).values()))
    shape = next(one.weight.shape for one in model.modules() if isinstance(one, nn.Linear))
    maps = [(f"{name}.weight", one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    first, second = [name for name, one in maps if one.weight.shape == shape][:2]
    engine = Engine(model, slots=2, token_budget=256, adapters={"a": {first: pair}, "b": {second: pair}})
    request = engine.submit(PROMPT, SamplingParams(max_tokens=1, temperature=0, keep_state=True), tuning="a")
    run(engine, [request])
    with pytest.raises(RangeError, match="submit: state must be of this model with this tuning"):
        engine.submit((), SamplingParams(max_tokens=1), state=request.result.completions[0].state, tuning="b")


def test_forks_keep_the_tuning():
    model = model_of("rwkv6")
    engine = Engine(model, slots=3, token_budget=256, adapters={"a": factors_of(model, 3, 0)}, states={"s": state_of(model, 1)})
    for tuning in ("a", "s"):
        whole = run(engine, [engine.submit(PROMPT[:70], SamplingParams(max_tokens=20, temperature=0), tuning=tuning)])[0][0]
        request = engine.submit(PROMPT[:70], SamplingParams(max_tokens=20, temperature=0), tuning=tuning)
        while len(request.result.tokens) < 5:
            engine.step()
        state = engine.state_of(request)
        fork = engine.fork(request, (), SamplingParams(max_tokens=5, temperature=0))
        run(engine, [request, fork])
        known = len(state.tokens) - 70
        assert fork.result.tokens == whole[known : known + 5]


@pytest.mark.parametrize("block", [0, 8])
def test_graphs_read_the_adapters_of_each_step(block):
    """Graphs repeat one Python function here: only what is in their inputs may change between steps."""
    model = model_of("rwkv6")
    options = {"slots": 5, "token_budget": 256, "adapters": {f"{n}": factors_of(model, 3, n) for n in range(3)}}
    params = SamplingParams(max_tokens=12, temperature=0)
    found = []
    for graphs in (False, True):
        engine = Engine(model, cache_bytes=0, batch_invariant=block > 0, **options)
        runner = engine._steps.runner
        if graphs:
            runner.graphs = StepGraphs(runner.model, runner.pool, runner.last, 256, engine._block, True, capture=lambda step: step)
        requests = [engine.submit(PROMPT[: 1 + 40 * n], params, tuning=one) for n, one in enumerate((None, "2", "0", "1", None, "2"))]
        found.append(run(engine, requests))
    assert found[0] == found[1]
    assert len({str(one) for one in found[0]}) == 6


def test_wrong_tunings_are_refused():
    model = model_of("rwkv6")
    other = model_of("gla")
    good = factors_of(model, 3, 0)
    name, pair = next(iter(good.items()))
    cases = [
        ({"states": [1]}, DtypeError, "states must be a mapping of names to initial states"),
        ({"states": {1: state_of(model, 0)}}, DtypeError, "states must be a mapping of names"),
        ({"states": {"": state_of(model, 0)}}, DtypeError, "states must be a mapping of names"),
        ({"states": {"a": 3}}, DtypeError, "state must be a list of LayerState"),
        ({"states": {"a": state_of(other, 0)}}, InvalidArgument, "state"),
        ({"states": {"a": model.initial_state(2)}}, ShapeError, "state"),
        ({"states": {"a": nan_state(model)}}, RangeError, "states must be of finite numbers, got NaN or infinity in 'a'"),
        ({"adapters": {"a": 3}}, DtypeError, "adapters must be a mapping of weights to pairs of matrices"),
        ({"adapters": {"a": {name: pair[0]}}}, DtypeError, "adapters must be a mapping of weights to pairs of matrices"),
        ({"adapters": {"a": {"embeddings.weight": pair}}}, RangeError, "embeddings.weight in 'a'"),
        ({"adapters": {"a": {name: (pair[0].T, pair[1])}}}, ShapeError, "factors of"),
        ({"adapters": {"a": {name: (pair[0] * math.nan, pair[1])}}}, RangeError, "finite"),
        ({"adapters": {"a": {3: pair}}}, DtypeError, "adapters must be a mapping of weights to pairs of matrices"),
        ({"adapters": {"a": {name: (pair[0].double() * 1e300, pair[1])}}}, RangeError, "finite"),
        *(
            ({"adapters": {"a": {name: (odd, pair[1])}}}, DtypeError, "adapters must be of dense tensors of floating-point numbers")
            for odd in (pair[0].to("meta"), pair[0].to_sparse(), pair[0] + 0j, pair[0].long())
        ),
        ({"adapters": {"a": good}, "states": {"a": state_of(model, 0)}}, RangeError, "of other names than states, got 'a'"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            Engine(model, slots=2, token_budget=256, **options)
    engine = Engine(model, slots=2, token_budget=256, adapters={"a": good})
    for tuning in ("b", 3, "", b"a"):
        with pytest.raises(RangeError, match="submit: tuning must be None or one of 'a', got"):
            engine.submit([1], tuning=tuning)
    with pytest.raises(RangeError, match="generate: tuning must be None or one of none: the engine has neither states nor adapters"):
        Engine(model, slots=2, token_budget=256).generate([[1]], tuning="a")


def nan_state(model):
    state = state_of(model, 0)
    next(x for _, x in named_tensors(state))[:] = math.nan
    return state
