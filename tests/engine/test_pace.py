"""The budget of prompts by the time of steps: against machines whose times are formulas."""

import random

import pytest
from architectures import model_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.pace import GOAL, MOST, PROBE, START, Pace
from penstock.engine.request import CHUNK


def run(pace, alone, token, packed, steps, noise=0.0, seed=0):
    """Seconds of steps while prompts never end: ``alone`` without prompts, else ``packed`` and ``token`` for each token more."""
    rng, found = random.Random(seed), []
    for _ in range(steps):
        tokens = pace.next()
        seconds = (alone + (packed + token * tokens if tokens else 0)) * (1 + noise * rng.random())
        pace.measured(tokens, seconds)
        found.append((tokens, seconds))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("alone", "token", "packed"), [(3.5, 0.004, 1.0), (5.5, 0.0375, 0.5), (10, 0.002, 0.1), (1, 0.01, 0.01)])
def test_steps_take_at_most_twice_as_long(alone, token, packed, noise):
    pace = Pace(2048)
    run(pace, alone, token, packed, 600)
    found = [one for one in run(pace, alone, token, packed, 2000, noise) if one[0]]
    longest = sorted(seconds for _, seconds in found)[int(len(found) * 0.99)]
    assert longest <= 2 * alone * (1 + noise / 2)
    ratio, larger = 1 + (packed + pace.budget * token) / alone, max(pace.budget + CHUNK, 1.25 * pace.budget)
    assert pace.budget == 2048 or 1 + (ratio - 1) * larger / pace.budget > GOAL - 3 * noise, "prompts get what is left"


def test_no_machine_is_too_slow_or_too_fast():
    for alone, token, packed, budget in ((1, 100, 100, 64), (1, 1e-9, 0, 1024)):
        pace = Pace(1030)
        run(pace, alone, token, packed, 1000)
        assert pace.budget == budget


def test_it_follows_a_machine_that_changes():
    pace = Pace(2048)
    run(pace, 5, 0.002, 0, 1000)
    fast = pace.budget
    run(pace, 5, 0.05, 0, 3000)
    assert pace.budget < fast / 4
    run(pace, 5, 0.002, 0, 3000)
    assert pace.budget == fast


def test_single_long_steps_change_nothing():
    """Such as those that compile a kernel or capture a graph."""
    pace, rng = Pace(2048), random.Random(0)
    run(pace, 5, 0.01, 0, 1000)
    before = pace.budget
    for _ in range(2000):
        tokens = pace.next()
        pace.measured(tokens, 500 if rng.random() < 0.02 else 5 + 0.01 * tokens)
    assert abs(pace.budget - before) <= 2 * CHUNK


def test_few_steps_leave_prompts_out():
    tokens = [one for one, _ in run(Pace(2048), 5, 0.01, 0, 1000)]
    assert tokens[0] == 0
    assert tokens[1] == START
    assert tokens.count(0) == 1 + len(tokens[1:]) // (PROBE + 1)
    assert 1 < GOAL < MOST < 2


def test_the_engine_measures_steps_with_streams_only():
    engine = Engine(model_of("rwkv6"), slots=3, token_budget=512, cache_bytes=0)
    given, measured = [], engine._steps.pace.measured
    engine._steps.pace.measured = lambda *step: given.append(step) or measured(*step)
    first = engine.submit([1], SamplingParams(max_tokens=60, ignore_end=True))
    for _ in range(5):
        engine.step()
    engine.submit([n % 13 for n in range(300)], SamplingParams(max_tokens=1))
    while not first.done:
        engine.step()
    assert {tokens for tokens, _ in given} >= {0, 44}
    assert all(tokens in (0, 44) or tokens % CHUNK == 0 for tokens, _ in given)
    assert all(0 < seconds < 60 for _, seconds in given)


def test_a_given_budget_stays():
    engine = Engine(model_of("rwkv6"), slots=3, token_budget=512, prompt_budget=128)
    assert engine.stats.prompt_budget == 128
    assert engine._steps.pace is None
    assert Engine(model_of("rwkv6"), slots=3, token_budget=512).stats.prompt_budget == START
