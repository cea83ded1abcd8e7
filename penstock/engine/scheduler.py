"""Which tokens of which sequences the next step processes. Pure Python: it sees counts, never tensors.

A step has one piece of each chosen sequence:

- a decode row: the one token behind the live state;
- a piece of a prompt: whole chunks from the aligned state (``request.Sequence``), or the rest of less than 64 tokens from the live state.

Decode rows come first, and prompts have a budget of their own beside them. So the time between tokens is bounded, however long prompts are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .request import CHUNK, Sequence, aligned

PATIENCE = 256
"""One level of priority outweighs this many steps of waiting. So every request runs in the end, whatever its priority."""


class Slots(Protocol):
    """What the scheduler needs of a pool."""

    def allocate(self) -> int | None:
        """A free slot, or None."""

    def release(self, slot: int) -> None:
        """Give a slot back."""


@dataclass(eq=False, slots=True)
class Work:
    """Tokens ``begin`` to ``end`` of a sequence in one step."""

    sequence: Sequence
    begin: int
    end: int
    on_aligned: bool
    """Whether the piece advances the aligned row; the live row is then set to it."""
    sample: bool
    """Whether a token is sampled after the last one."""


@dataclass
class Plan:
    """What one step does."""

    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that left the pool."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that entered it."""
    works: list[Work] = field(default_factory=list)
    decodes: int = 0
    """So many of the works are decode rows; these come first."""
    completing: list[Work] = field(default_factory=list)
    """Decode rows that complete a chunk, whose live row is then copied to the aligned one. None with canonical states."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the forward pass."""
        return sum(work.end - work.begin for work in self.works)


class Scheduler:
    """Waiting and running sequences.

    token_budget, prompt_budget : int
        The most tokens of a step, and those of prompts in a step with decode rows.
    admit : callable
        Called for each sequence that gets a slot; it may move ``computed`` and ``aligned`` on.
    preempt : callable
        Called for each sequence before it loses its slot.
    canonical : bool
        Aligned states are of prompts only, so their bits are a function of the tokens alone. Otherwise those of generated tokens are, too.
    """

    def __init__(
        self, slots: Slots, token_budget: int, prompt_budget: int, admit: Callable[[Sequence], None] = lambda _: None,
        preempt: Callable[[Sequence], None] = lambda _: None, canonical: bool = True,
    ) -> None:  # fmt: skip
        self._slots, self._on_admit, self._on_preempt, self._canonical = slots, admit, preempt, canonical
        self.token_budget, self.prompt_budget = token_budget, prompt_budget
        self.running: list[Sequence] = []
        self._heap: list[tuple[int, int, Sequence]] = []
        self._step = self._orders = self._left = 0

    @property
    def waiting(self) -> int:
        """The number of waiting sequences."""
        return len(self._heap) - self._left

    def add(self, sequence: Sequence, like: Sequence | None = None) -> None:
        """Let a sequence wait, at the place of ``like`` if given (a fork waits as its parent did)."""
        if like is None:
            sequence.deadline, sequence.order = self._step - sequence.request.priority * PATIENCE, self._orders
            self._orders += 1
        else:
            sequence.deadline, sequence.order = like.deadline, like.order
        sequence.queued = True
        heapq.heappush(self._heap, (sequence.deadline, sequence.order * 2**16 + sequence.index, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence; its slot is free for the next step."""
        sequence.finished, sequence.saved = True, None
        if sequence.slot is not None:
            self.running.remove(sequence)
            self._slots.release(sequence.slot)
            sequence.slot = None
        elif sequence.queued:
            self._left += 1
            if self._left > len(self._heap) // 2:
                self._heap = [entry for entry in self._heap if not entry[2].finished]
                heapq.heapify(self._heap)
                self._left = 0

    def schedule(self) -> Plan:
        """The next step. The counts of its sequences are moved on as if it had run."""
        self._step += 1
        plan = Plan()
        self._fill(plan)
        self._choose(plan)
        for work in plan.works[plan.decodes :]:
            self._commit(work)
        return plan

    def _fill(self, plan: Plan) -> None:
        """Give slots to waiting sequences."""
        put_back = []
        while (first := self._first()) is not None:
            if first.pending:  # it was preempted, and its last token is not known yet
                put_back.append(heapq.heappop(self._heap)[2])
                continue
            slot = self._slots.allocate()
            if slot is None and (slot := self._preempt(plan, first)) is None:
                break
            heapq.heappop(self._heap)
            first.slot, first.queued = slot, False
            self.running.append(first)
            plan.admitted.append(first)
            self._on_admit(first)
        for sequence in put_back:
            self.add(sequence, like=sequence)

    def _first(self) -> Sequence | None:
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
            self._left -= 1
        return self._heap[0][2] if self._heap else None

    def _preempt(self, plan: Plan, first: Sequence) -> int | None:
        """Take the slot of the running sequence with the latest deadline, if it has a lower priority than ``first``."""
        lower = [one for one in self.running if one.request.priority < first.request.priority and one.deadline > first.deadline]
        candidates = [one for one in lower if one not in plan.admitted]
        if not candidates:
            return None
        last = max(candidates, key=lambda one: (one.deadline, one.order, one.index))
        assert last.slot is not None
        self._on_preempt(last)
        plan.preempted.append(last)
        self._slots.release(last.slot)
        last.slot = None
        self.running.remove(last)
        self.add(last, like=last)
        return self._slots.allocate()

    def _choose(self, plan: Plan) -> None:
        prompts, known = [], []
        decodes = plan.works
        for one in self.running:
            length, computed = len(one.tokens) + one.pending, one.computed
            if computed == length:
                if one.sample_only:
                    known.append(Work(one, computed, computed, False, True))
                continue  # else it waits for its last token to be known
            if computed < one.prompt:
                prompts.append(one)
            elif length >= one.most:
                continue  # its last token is pending
            else:
                decodes.append(Work(one, computed, length, False, True))
                if length % CHUNK == 0 and not self._canonical:
                    plan.completing.append(decodes[-1])
                    one.aligned = length
                one.computed = length  # as _commit does
                one.pending += 1
        plan.decodes = len(decodes)
        budget = self.token_budget - plan.decodes
        if plan.decodes:
            budget = min(budget, self.prompt_budget)
        plan.works += known
        prompts.sort(key=lambda one: (one.deadline, one.order, one.index))
        for one in prompts:
            budget = self._add_piece(plan, one, budget)

    def _add_piece(self, plan: Plan, one: Sequence, budget: int) -> int:
        """Add the next piece of at most ``budget`` tokens; returns what is left of it."""
        length = one.length
        target = aligned(length)
        if one.aligned < target:
            begin = one.aligned
            end = min([cut for cut in one.cuts if begin < cut < target], default=target)
            end = min(end, begin + aligned(budget))
        else:
            begin = one.computed
            end = min(length, begin + budget)
        if end > begin:
            plan.works.append(Work(one, begin, end, one.aligned < target, end == length and length < one.most))
            budget -= end - begin
        return budget

    def _commit(self, work: Work) -> None:
        one = work.sequence
        one.computed = max(one.computed, work.end)
        if work.on_aligned:
            one.aligned = one.computed = work.end
        if work.sample:
            one.pending += 1
            one.sample_only = False
