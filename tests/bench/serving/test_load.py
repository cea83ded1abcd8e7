"""Lengths, counts and quantiles of a load."""

import asyncio
import random
from collections import Counter

import pytest
from live_server import running, small_model

from penstock.bench.serving.client import Answer, Target
from penstock.bench.serving.load import Load, Times, run, summary
from penstock.bench.serving.workload import Job, Lengths, Workload
from penstock.server.limits import Limits


def test_lengths_follow_their_distribution():
    rng = random.Random(1)

    def drawn(text):
        lengths = Lengths.parse("test", "lengths", text)
        return [lengths.draw(rng) for _ in range(4000)]

    assert set(drawn("7")) == {7}
    uniform = Counter(drawn("3-6"))
    assert set(uniform) == {3, 4, 5, 6}
    assert min(uniform.values()) > 850
    exponential = drawn("exp:100")
    assert 90 < sum(exponential) / 4000 < 110
    assert min(exponential) >= 1


def test_prompts_share_prefixes():
    jobs = Workload(Lengths(5, 5), Lengths(2, 4), prefix=30, prefixes=3).draw(50, random.Random(1))
    assert {len(job.prompt) for job in jobs} == {35}
    assert {job.max_tokens for job in jobs} == {2, 3, 4}
    assert len({tuple(job.prompt[:30]) for job in jobs}) == 3
    assert len({tuple(job.prompt) for job in jobs}) == 50


def test_a_summary_counts_what_succeeded():
    good = Answer(10.0, [10.5, 10.6, 10.9], 11.0, prompt_tokens=8, cached_tokens=4, output_tokens=3)
    bad = Answer(10.0, [10.1], 10.2, error="status 429")
    found = summary(Load(clients=2), [good, bad, bad], 2.0)
    assert (found.requests, found.failed, found.output_tokens, found.output_rate) == (3, {"status 429": 2}, 3, 1.5)
    assert (found.cached_share, found.total_rate) == (0.5, 5.5)
    assert found.first == Times(0.5, 0.5)
    assert found.between.p50 == pytest.approx(0.2)
    assert found.whole == Times(1.0, 1.0)
    assert summary(Load(rate=1.0), [bad], 1.0).first is None


@pytest.mark.parametrize("load", [Load(clients=16), Load(rate=200.0)], ids=str)
def test_requests_that_the_server_refuses_are_counted(load):
    with running(small_model(), Limits(max_tokens=20)) as live:
        target = Target(live.url)
        jobs = [Job([1, 2, 3], 5 if n % 4 else 30) for n in range(32)]

        async def measured():
            await target.find_model()
            return await run(target, jobs, load, random.Random(1))

        found = asyncio.run(measured())
        assert (found.requests, found.output_tokens) == (32, 24 * 5)
        ((reason, count),) = found.failed.items()
        assert count == 8
        assert reason.startswith("status 400: completions: max_tokens must be")
        live.settles()
