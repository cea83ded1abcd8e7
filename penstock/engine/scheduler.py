"""Chooses the tokens and sequences of the next step. Pure Python: it sees counts, never tensors.

A step has one piece of each chosen sequence:

- a decode row: the one token after the live state;
- a piece of a prompt: whole chunks from the aligned state (``request.Sequence``), or the rest of less than 64 tokens from the live state.

Decode rows come first, and prompts have a separate budget. So the time between tokens is bounded, however long prompts are.

Slots are divided evenly between clients, and within a client between its requests (``shares``). A waiting sequence takes the slot of a
running one in these cases:

- The running one has a lower priority, and has not waited and run long enough to count as of the same priority.
- The client of the running one, or its request if the client is the same, has at least two slots more: the shares then become more even.
- It has one slot more, the running one needs more than twice as many steps as the waiting one, and is due later. So a short request does
  not wait for a long one if there are more requests than slots.

Each preemption makes shares more even, or the running sequences due earlier, so two sequences cannot preempt each other in turn. Sequences
of one request never preempt each other, except by priority.

Models with softmax attention also need pages (``pages``). A waiting sequence gets a slot only if there are pages for its tokens so far and
a chunk. In each step, running sequences get the pages that they need next, those due first before the others. If there are too few, those
due last are preempted, and wait for pages for all their tokens. The first one always runs, because one sequence fits into the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .request import CHUNK, Sequence, aligned
from .shares import Client, Share, Shares, Turns

PATIENCE = 256
"""One level of priority outweighs this many steps of waiting. So every request runs eventually, whatever its priority."""
STRETCH = 4
"""A sequence is due this many times the steps that it needs alone, after its arrival. So long ones wait for short ones, but not forever."""
CHECK = 16
"""While no sequence arrives or ends, slots are divided again after this many steps: only passing deadlines change what is fair."""


class Slots(Protocol):
    """The interface of a pool for the scheduler."""

    def allocate(self) -> int | None:
        """A free slot, or None."""

    def release(self, slot: int) -> None:
        """Free a slot."""

    def fits(self, tokens: int) -> bool:
        """Whether there are pages for so many tokens."""

    def grow(self, slot: int, tokens: int) -> int:
        """Give a slot pages for its first ``tokens`` tokens, as far as there are any; the number of tokens for which it has pages."""

    def reserve(self, slot: int, tokens: int) -> None:
        """The same for a new sequence, so that ``fits`` counts its pages, unless windows make most of them needless."""


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
    """The work of one step."""

    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that left the pool."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that entered it."""
    works: list[Work] = field(default_factory=list)
    decodes: int = 0
    """The number of decode rows, which come first among the works."""
    completing: list[Work] = field(default_factory=list)
    """Decode rows that complete a chunk: their live row is then copied to the aligned one. Empty with canonical states."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the forward pass."""
        return sum(work.end - work.begin for work in self.works)


class Scheduler:
    """Waiting and running sequences.

    token_budget, prompt_budget : int
        The most tokens of a step, and the most prompt tokens in a step with decode rows. The second may change between steps.
    admit : callable
        Called for each sequence that gets a slot; it may advance ``computed`` and ``aligned``.
    preempt : callable
        Called for each sequence before it loses its slot.
    canonical : bool
        Aligned states have tokens of prompts only, so their bits are a function of the tokens alone. Otherwise they may have generated
        tokens, too.
    paged : bool
        Whether sequences need pages.
    """

    def __init__(
        self, slots: Slots, token_budget: int, prompt_budget: int, admit: Callable[[Sequence], None] = lambda _: None,
        preempt: Callable[[Sequence], None] = lambda _: None, canonical: bool = True, paged: bool = False,
    ) -> None:  # fmt: skip
        self._slots, self._on_admit, self._on_preempt, self._canonical, self._paged = slots, admit, preempt, canonical, paged
        self.token_budget, self.prompt_budget = token_budget, prompt_budget
        self.running: list[Sequence] = []
        self.shares = Shares()
        self._settled = False
        """Whether the last step found no slot for waiting sequences, and none has arrived or ended since."""
        self._turn = prompt_budget
        self._clients, self._requests = Turns(prompt_budget), dict[Client, Turns]()
        self._step = self._orders = 0

    @property
    def waiting(self) -> int:
        """The number of waiting completions, including those that are forked after their prompt."""
        return self.shares.waiting()

    def add(self, sequence: Sequence, like: Sequence | None = None) -> None:
        """Queue a sequence, with the arrival of ``like`` if given (a fork has that of its parent)."""
        request = sequence.request
        if like is None:
            share = self.shares.of(request.share)
            sequence.deadline, sequence.order = self._step - request.priority * PATIENCE, self._orders
            sequence.due = sequence.deadline + STRETCH * self._steps_left(sequence)
            self._orders += 1
            for one in request.sequences:
                self.shares.waits(one, share, True)
        else:
            share = like.share
            sequence.deadline, sequence.order, sequence.due = like.deadline, like.order, like.due
            self.shares.waits(sequence, share, True)
        share.push(sequence)
        self._settled = False

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence; its slot is free for the next step."""
        sequence.finished, sequence.saved = True, None
        share: Share | None = sequence.share
        if share is None:  # it never waited
            return
        if sequence.slot is not None:
            self._leave(sequence)
        elif sequence.queued:
            share.forget()
        self.shares.waits(sequence, share, False)
        self.shares.drop(share)
        self._settled = False

    def _leave(self, one: Sequence) -> None:
        """Free the slot of a sequence."""
        assert one.slot is not None
        self.running.remove(one)
        self._slots.release(one.slot)
        one.slot = None
        self.shares.holds(one.share, -1)

    def schedule(self) -> Plan:
        """The next step. Advances the counts of its sequences as if it had run."""
        self._step += 1
        plan = Plan()
        self._fill(plan)
        self._choose(plan, self._without_pages(plan) if self._paged else set())
        for work in plan.works[plan.decodes :]:
            self._commit(work)
        return plan

    def _fill(self, plan: Plan) -> None:
        """Give slots to waiting sequences."""
        if self._settled and self._step % CHECK:
            return
        self._settled, unknown = True, list[Sequence]()
        while (found := self._first(unknown)) is not None:
            first, level = found
            slot = self._slot(plan, first, level)
            if slot is None:
                break
            first.share.pop()
            self.shares.waits(first, first.share, False)
            self.shares.holds(first.share, 1)
            first.slot = slot
            self.running.append(first)
            plan.admitted.append(first)
            self._settled = False
            self._on_admit(first)
            if first.slot is not None:  # else its state could not be written
                self._slots.reserve(first.slot, first.length)
        for sequence in unknown:
            self.add(sequence, like=sequence)

    def _slot(self, plan: Plan, first: Sequence, level: int) -> int | None:
        """A slot for a waiting sequence, and pages for its tokens and a chunk, perhaps after preemptions. Or None."""
        tokens = min(first.most, first.length + CHUNK)
        while True:
            slot = self._slots.allocate() if self._slots.fits(tokens) else None
            victim = None if slot is not None else self._victim(plan, first, level)
            if victim is None:
                return slot
            self._preempt(plan, victim)

    def _first(self, unknown: list[Sequence]) -> tuple[Sequence, int] | None:
        """The waiting sequence that gets the next slot, and its effective priority.

        Among those of the highest priority: from the client with the fewest slots, of its request with the fewest, the one due first.

        unknown : list
            Collects preempted sequences whose last tokens are not known yet.
        """
        heads = []
        for share in self.shares:
            while (head := share.first()) is not None and head.pending:
                unknown.append(share.pop())
            if head is not None:
                heads.append(head)
        if not heads:
            return None
        top = max(one.request.priority for one in heads)

        def rank(one: Sequence) -> tuple[int, ...]:
            share: Share = one.share
            return -self._level(one, top), share.client.held, share.held, one.due, one.order, one.index

        first = min(heads, key=rank)
        return first, self._level(first, top)

    def _level(self, one: Sequence, top: int) -> int:
        """The priority of a sequence, plus one for each ``PATIENCE`` steps since its arrival, up to ``top``."""
        return min(top, (self._step - one.deadline) // PATIENCE)

    def _victim(self, plan: Plan, first: Sequence, level: int) -> Sequence | None:
        """The running sequence that ``first`` preempts: of the lowest priority, from the one with the most slots, due last. Or None."""
        steps = self._steps_left(first)
        entered = {*plan.admitted}
        found = [one for one in self.running if one not in entered and self._yields(one, first, level, steps)]
        if not found:
            return None
        return max(
            found, key=lambda one: (-one.request.priority, one.share.client.held, one.share.held, one.due, one.order, one.index)
        )  # fmt: skip

    def _yields(self, one: Sequence, first: Sequence, level: int, steps: int) -> bool:
        """Whether ``first``, which needs ``steps`` steps, may preempt a running sequence."""
        priority = first.request.priority
        if one.request.priority < priority and one.deadline > first.deadline and self._level(one, priority) < priority:
            return True
        own: Share = first.share
        share: Share = one.share
        if share is own or one.request.priority > level:
            return False
        more = share.held - own.held if share.client is own.client else share.client.held - own.client.held
        return more > 1 or (more == 1 and one.due > first.due and self._steps_left(one) > 2 * steps)

    def _steps_left(self, one: Sequence) -> int:
        """The number of steps to the end of a sequence, if it ran alone."""
        return -(-max(0, one.prompt - one.computed) // self._turn) + one.most - max(one.prompt, one.length)

    def _preempt(self, plan: Plan, one: Sequence) -> None:
        """Preempt a running sequence: it loses its slot and waits."""
        self._on_preempt(one)
        plan.preempted.append(one)
        self._leave(one)
        self.add(one, like=one)

    def _without_pages(self, plan: Plan) -> set[Sequence]:
        """Give running sequences pages for their next tokens; those that get none. The last ones are preempted for the first ones."""
        top, entered, stalled = max((one.request.priority for one in self.running), default=0), {*plan.admitted}, set()

        def rank(one: Sequence) -> tuple[int, ...]:
            return -self._level(one, top), one.due, one.order, one.index

        left = sorted(self.running, key=rank)
        while left:
            one = left.pop(0)
            assert one.slot is not None
            needed = min(one.length, one.computed + CHUNK)
            while self._slots.grow(one.slot, needed) < needed:
                victim = next((other for other in reversed(left) if other not in entered), None)
                if victim is None:
                    stalled.add(one)
                    break
                left.remove(victim)
                self._preempt(plan, victim)
        return stalled

    def _choose(self, plan: Plan, stalled: set[Sequence]) -> None:
        prompts, known = [], []
        decodes = plan.works
        for one in self.running:
            length, computed = len(one.tokens) + one.pending, one.computed
            if computed == length:
                if one.sample_only:
                    known.append(Work(one, computed, computed, False, True))
                continue  # else it waits until its last token is known
            if one in stalled:
                continue
            if computed < one.prompt:
                prompts.append(one)
            elif length >= one.most:
                continue  # its last token is pending
            else:
                decodes.append(Work(one, computed, length, False, True))
                if length % CHUNK == 0 and not self._canonical:
                    plan.completing.append(decodes[-1])
                    one.aligned = length
                one.computed = length  # as in _commit
                one.pending += 1
        plan.decodes = len(decodes)
        budget = self.token_budget - plan.decodes
        if plan.decodes:
            budget = min(budget, self.prompt_budget)
        plan.works += known
        for one in self._in_turn(prompts):
            left = self._add_piece(plan, one, budget)
            one.share.served += budget - left
            one.share.client.served += budget - left
            budget = left

    def _in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Prompts in the order of the budget: of the client that got the least, of its request that got the least, by arrival.

        The tokens that clients and requests got count in whole turns, so prompts shorter than a turn are finished one after the other.
        """
        shares: dict[Share, None] = dict.fromkeys(one.share for one in prompts)
        if shares or self._requests:
            clients: dict[Client, list[Share]] = {}
            for share in shares:
                clients.setdefault(share.client, []).append(share)
            self._clients.join(clients)
            self._requests = {client: self._requests.get(client, Turns(0)) for client in clients}
            for client, turns in self._requests.items():
                turns.join(clients[client])
        top = max((one.request.priority for one in prompts), default=0)

        def rank(one: Sequence) -> tuple[int, ...]:
            share: Share = one.share
            rounds = share.client.served // self._turn, share.served // self._turn
            return -self._level(one, top), *rounds, one.deadline, one.order, one.index

        return sorted(prompts, key=rank)

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
            assert one.slot is not None
            end = min(end, self._slots.grow(one.slot, end))
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
