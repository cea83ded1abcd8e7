"""The scheduler over a pool, as a state machine: no slot is lost or shared, counts are right, and every request runs in the end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation import Simulation

from penstock.engine.request import CHUNK
from penstock.engine.scheduler import PATIENCE

PAGES = st.sampled_from([None, -(-550 // CHUNK), 12, 30])
"""None, or at least as many as the longest sequence needs."""


class Machine(RuleBasedStateMachine):
    """Requests come, end, are cancelled."""

    def __init__(self):
        super().__init__()
        self.simulation = None

    @precondition(lambda self: self.simulation is None)
    @rule(slots=st.integers(1, 4), extra=st.integers(0, 100), overlap=st.booleans(), canonical=st.booleans(), pages=PAGES)
    def begin(self, slots, extra, overlap, canonical, pages):
        self.simulation = Simulation(slots, slots + 2 * CHUNK + extra, overlap, canonical, pages=pages)

    @precondition(lambda self: self.simulation is not None)
    @rule(
        length=st.integers(1, 400),
        count=st.integers(1, 150),
        priority=st.integers(-2, 2),
        cuts=st.lists(st.integers(0, 400)),
        hit=st.integers(0, 300),
        n=st.sampled_from([1, 1, 3]),
        share=st.tuples(st.sampled_from("ab"), st.sampled_from("cd")),
    )
    def add(self, length, count, priority, cuts, hit, n, share):
        self.simulation.add(length, count, priority, cuts, hit, n, share)

    @precondition(lambda self: self.simulation is not None and self.simulation.alive)
    @rule(data=st.data())
    def cancel(self, data):
        self.simulation.cancel(data.draw(st.sampled_from(self.simulation.alive)))

    @precondition(lambda self: self.simulation is not None)
    @rule(count=st.integers(1, 60))
    def steps(self, count):
        for _ in range(count):
            self.simulation.step()
            self.simulation.check()

    @invariant()
    def slots_are_neither_lost_nor_shared(self):
        if self.simulation is not None:
            self.simulation.check()

    def teardown(self):
        if self.simulation is None:
            return
        work = sum(len(one.request.prompt) + 2 * one.request.params.max_tokens for one in self.simulation.alive)
        for _ in range(2 * work + 10):
            self.simulation.step()
        assert not self.simulation.alive
        assert not self.simulation.slots.taken


TestMachine = Machine.TestCase
TestMachine.settings = settings(deadline=None, max_examples=40, stateful_step_count=20)


def test_a_request_of_low_priority_runs_in_the_end():
    simulation = Simulation(slots=2)
    low = simulation.add(10, 5, priority=0)
    while low in simulation.alive:
        simulation.add(10, 3, priority=1)  # more than the slots can serve
        simulation.step()
        assert simulation.steps < 3 * PATIENCE


def test_higher_priorities_take_slots_of_lower_ones():
    simulation = Simulation(slots=2)
    low = [simulation.add(100, 50) for _ in range(2)]
    for _ in range(5):
        simulation.step()
    high = simulation.add(100, 4, priority=1)
    plan = simulation.step()
    assert plan.preempted == [low[1]]
    assert plan.admitted == [high]
    for _ in range(200):
        simulation.step()
    assert not simulation.alive


def test_equal_priorities_never_preempt():
    simulation = Simulation(slots=1)
    simulation.add(10, 100)
    for _ in range(50):
        simulation.add(10, 1)
        assert not simulation.step().preempted


def test_decode_rows_run_in_every_step_beside_a_long_prompt():
    simulation = Simulation(slots=3, budget=3 + 2 * CHUNK)
    for _ in range(2):
        simulation.add(5, 500)
    simulation.step()
    long = simulation.add(100 * CHUNK + 7, 1)
    while long in simulation.alive:
        plan = simulation.step()
        assert len(plan.works) == 3
    assert simulation.steps < 120


@pytest.mark.parametrize("beside", [CHUNK, CHUNK + 10, 4 * CHUNK])
def test_prompts_have_a_budget_of_their_own_beside_decode_rows(beside):
    """And the whole one if nothing is decoded."""
    simulation = Simulation(slots=4, budget=4 + 8 * CHUNK, beside=beside)
    first = simulation.add(20 * CHUNK + 7, 30)
    assert [simulation.step().tokens for _ in range(3)] == [8 * CHUNK, 8 * CHUNK, 4 * CHUNK]
    simulation.step()
    long = simulation.add(6 * CHUNK, 1)
    plan = simulation.step()
    assert plan.works[0].sequence is first
    assert [(work.sequence, work.end - work.begin) for work in plan.works[1:]] == [(long, beside // CHUNK * CHUNK)]
    while long in simulation.alive:
        simulation.step()
    assert simulation.steps == 4 + -(-6 // (beside // CHUNK))


def test_each_token_is_processed_once_and_aligned_states_of_generated_tokens_are_not_canonical():
    for canonical in (True, False):
        simulation = Simulation(slots=1, canonical=canonical)
        one = simulation.add(10, 200)
        plans = [simulation.step() for _ in range(200)]
        assert one not in simulation.alive
        assert sum(plan.tokens for plan in plans) == 209
        assert [work.end for plan in plans for work in plan.completing] == ([] if canonical else [64, 128, 192])
        assert one.aligned == (0 if canonical else 192)


def test_sequences_wait_for_pages_and_those_due_last_give_theirs():
    simulation = Simulation(slots=3, pages=5)
    first, second = simulation.add(2 * CHUNK, 2 * CHUNK), simulation.add(CHUNK, 2 * CHUNK)
    third = simulation.add(2 * CHUNK, 1)
    plan = simulation.step()
    assert plan.admitted == [first, second]
    preempted = []
    while second in simulation.alive:
        preempted += simulation.step().preempted
        simulation.check()
    assert preempted
    assert {*preempted} == {second}
    assert first not in simulation.alive
    while third in simulation.alive:
        simulation.step()
    assert simulation.slots.free_pages == 5
