"""The scheduler without a model."""

from penstock.engine import SamplingParams
from penstock.engine.request import CHUNK, Request, Sequence, aligned
from penstock.engine.scheduler import Scheduler


class Slots:
    """A pool without memory. ``pages``: their number, or None."""

    def __init__(self, count, pages=None):
        self.free, self.taken, self.pages = list(range(count)), set(), pages
        self.of = [0] * count

    def allocate(self):
        if not self.free:
            return None
        slot = self.free.pop()
        self.taken.add(slot)
        return slot

    def release(self, slot):
        self.taken.remove(slot)
        self.free.append(slot)
        self.of[slot] = 0

    @property
    def free_pages(self):
        return self.pages - sum(self.of)

    def fits(self, tokens):
        return self.pages is None or self.free_pages >= -(-tokens // CHUNK)

    def grow(self, slot, tokens):
        if self.pages is None:
            return tokens
        self.of[slot] += max(0, min(-(-tokens // CHUNK) - self.of[slot], self.free_pages))
        return self.of[slot] * CHUNK

    reserve = grow


class Simulation:
    """Runs plans as the engine does, with numbers for tokens; checks that each piece begins where its row stands."""

    def __init__(self, slots=3, budget=3 + 2 * CHUNK, overlap=False, canonical=True, beside=2 * CHUNK, pages=None):
        self.slots, self.canonical = Slots(slots, pages), canonical
        self.scheduler = Scheduler(self.slots, budget, beside, self.admit, self.preempt, canonical, pages is not None)
        self.live, self.rows_aligned, self.outside = {}, {}, {}
        self.alive, self.overlap, self.flight, self.steps = [], overlap, [], 0

    def add(self, length, max_tokens, priority=0, cuts=(), hit=0, n=1, share=("", "")):
        request = Request([0] * length, SamplingParams(max_tokens=max_tokens, n=n), priority, share=share)
        request.sequences += [Sequence(request, index, [0] * length, cuts={aligned(cut) for cut in cuts}) for index in range(n)]
        self.alive += request.sequences
        one = request.sequences[0]
        one.hit = min(aligned(hit), aligned(length))
        self.scheduler.add(one)
        return one

    def fork(self, request):
        for one in request.sequences[1:]:
            one.sample_only, one.computed, one.aligned = True, len(request.prompt), aligned(len(request.prompt))
            self.outside[one] = one.computed, one.aligned
            self.scheduler.add(one, like=request.sequences[0])

    def steps_of(self, one):
        """Run until all completions of a request have ended; the number of steps."""
        before = self.steps
        while any(some in self.alive for some in one.request.sequences):
            self.step()
        return self.steps - before

    def admit(self, one):
        assert self.slots.grow(one.slot, max(one.computed, getattr(one, "hit", 0))) >= one.computed
        self.live[one], self.rows_aligned[one] = self.outside.pop(one, (0, 0))
        if one.computed == 0 and one.hit:
            self.live[one] = self.rows_aligned[one] = one.computed = one.aligned = one.hit
            one.sample_only = one.hit == len(one.request.prompt)

    def preempt(self, one):
        self.outside[one] = self.live.pop(one), self.rows_aligned.pop(one)

    def step(self):
        self.steps += 1
        plan = self.scheduler.schedule()
        assert plan.tokens <= self.scheduler.token_budget
        assert not plan.decodes or plan.tokens - plan.decodes <= self.scheduler.prompt_budget
        assert len({work.sequence for work in plan.works}) == len(plan.works)
        for work in plan.works:
            one = work.sequence
            assert one.slot is not None
            if work.on_aligned:
                assert work.begin == self.rows_aligned[one] == aligned(work.begin)
                assert work.end == aligned(work.end)
                assert not [cut for cut in one.cuts if work.begin < cut < work.end]
                self.live[one] = self.rows_aligned[one] = work.end
            elif work.begin < work.end:
                assert work.begin == self.live[one]
                self.live[one] = work.end
                if work in plan.completing:
                    assert not self.canonical
                    self.rows_aligned[one] = work.end
                known = one.prompt if self.canonical else work.end
                assert self.rows_aligned[one] == one.aligned == aligned(min(work.end, known))
            else:
                assert work.sample
                assert self.live[one] == work.end
            assert work.end <= one.length
            assert self.slots.pages is None or work.begin == work.end or work.end <= self.slots.of[one.slot] * CHUNK
        flights, self.flight = ([self.flight, []][:1], plan.works) if self.overlap else ([plan.works], [])
        for works in flights:
            self.process(works)
        return plan

    def process(self, works):
        for work in works:
            one = work.sequence
            if work.sample and not one.finished:
                one.pending -= 1
                one.tokens.append(0)
                if one.index == 0 and len(one.tokens) == len(one.request.prompt) + 1:
                    self.fork(one.request)
                if len(one.tokens) - len(one.request.prompt) == one.request.params.max_tokens:
                    self.remove(one)

    def cancel(self, one):
        for some in one.request.sequences:
            if some in self.alive:
                self.remove(some)

    def remove(self, one):
        self.scheduler.remove(one)
        self.alive.remove(one)

    def check(self):
        assert self.slots.pages is None or self.slots.free_pages >= 0
        used = [one.slot for one in self.scheduler.running]
        assert len(set(used)) == len(used)
        assert set(used) == self.slots.taken
        assert len(used) + len(self.slots.free) == len({*used, *self.slots.free})
        assert {*self.scheduler.running} <= {*self.alive}
        assert self.scheduler.waiting + len(self.scheduler.running) == len(self.alive)
        shares = {one.request.share for one in self.alive}
        assert {(share.client.name, share.name) for share in self.scheduler.shares} == shares
        for client in {name for name, _ in shares}:
            waiting = [one for one in self.alive if one.request.share[0] == client and one.slot is None]
            assert self.scheduler.shares.waiting(client) == len(waiting)
        for share in self.scheduler.shares:
            assert share.held == sum(one.share is share for one in self.scheduler.running)
            assert share.client.held == sum(one.share.client is share.client for one in self.scheduler.running)
