"""A program: its barriers, what is under way, and its groups of warps, of which one runs at a time."""

import random
import threading

from .proxies import Proxies
from .values import raw


class Machine:
    """One program: its barriers, copies in flight, and the threads that take turns."""

    def __init__(self, pid, seed):
        self.pid, self.random = pid, random.Random(seed)
        self.proxies = Proxies()
        self.time, self.used, self.reused = 0, {}, []
        self.turn = threading.Condition()
        self.running, self.alive, self.failure = None, [], None

    def use(self, data):
        """Note that an allocation is in use until now."""
        self.time += 1
        self.used[data.untyped_storage().data_ptr()] = self.time

    def reuse(self):
        """Note an allocation, which may get the memory of those that are not used after it."""
        self.time += 1
        read = [data for _, data in stores_under_way()] + operands_under_way()
        self.reused += [(self.time, data.untyped_storage().data_ptr(), list(data.shape)) for data in read]

    def check_reads(self):
        """A compiler does not know that a store or a product is under way: what it reads must be used after later allocations."""
        for time, block, shape in self.reused:
            assert self.used[block] > time, f"shared memory {shape} is free for a later allocation while a store or a product reads it"

    def switch(self, may_go):
        """Let others run until ``may_go``."""
        me = threading.get_ident()
        if len(self.alive) <= 1:
            if not may_go():
                raise RuntimeError("deadlock: a barrier that is never completed")
            return
        with self.turn:
            self.waiting[me] = may_go
            self._next()
            while self.running != me:
                self.turn.wait()
                if self.failure is not None:
                    raise RuntimeError("another warp failed")
            self.waiting.pop(me, None)

    def _next(self):
        ready = [one for one in self.alive if one not in self.waiting or self.waiting[one]()]
        if not ready:
            if self.alive:
                self.failure = RuntimeError("deadlock: every group of warps waits")
            self.running = None
        else:
            self.running = self.random.choice(ready)
        self.turn.notify_all()

    def run(self, jobs):
        """All jobs to their end."""
        self.waiting = {}
        started = threading.Barrier(len(jobs) + 1)

        def body(function, arguments, place):
            begin(self, place[1])
            me = threading.get_ident()
            with self.turn:
                self.alive.append(me)
            started.wait()
            try:
                with self.turn:
                    while self.running != me:
                        self.turn.wait()
                        if self.failure is not None:
                            raise RuntimeError("another warp failed")
                function(*arguments)
            except BaseException as error:
                with self.turn:
                    if self.failure is None:
                        self.failure = error
            finally:
                with self.turn:
                    self.alive.remove(me)
                    self.waiting.pop(me, None)
                    self._next()

        threads = [threading.Thread(target=body, args=(*job[:2], job[2:])) for job in [(f, a, i, w) for i, ((f, a), w) in enumerate(jobs)]]
        for one in threads:
            one.start()
        started.wait()
        with self.turn:
            self._next()
        for one in threads:
            one.join()
        if self.failure is not None:
            raise self.failure


_local = threading.local()


def machine():
    """The program of this thread."""
    return _local.machine


def warps():
    """The number of warps of this thread's group."""
    return _local.warps


def begin(program, count):
    """Let this thread run a program with ``count`` warps."""
    _local.machine, _local.warps = program, count


class _Bar:
    def __init__(self, count):
        self.count, self.pending, self.bytes, self.phase, self.copies = count, count, 0, 0, []

    def check(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


def barrier_of(bar):
    found = machine().bars.get(bar.data.data_ptr())
    assert found is not None, "a barrier before it is initialised, or after it is invalidated"
    return found


def bar_init(bar, count):
    machine().bars[bar.data.data_ptr()] = _Bar(count)


def bar_invalidate(bar):
    one = machine().bars.pop(bar.data.data_ptr())
    assert not one.copies, "a copy is in flight whose barrier is invalidated"


def bar_expect(bar, bytes_, pred=True):
    if bool(raw(pred)):
        one = barrier_of(bar)
        one.pending -= 1
        one.bytes += int(bytes_)
        assert one.pending >= 0, "more arrivals than a barrier counts"
        one.check()


def bar_arrive(bar, count=1, pred=True):
    if bool(raw(pred)):
        one = barrier_of(bar)
        one.pending -= count
        assert one.pending >= 0, "more arrivals than a barrier counts"
        one.check()
        machine().switch(lambda: True)


def bar_wait(bar, phase, pred=True):
    if not bool(raw(pred)):
        return
    one, phase = barrier_of(bar), int(phase)

    def complete():
        for land in one.copies:
            land()
        one.copies = []
        one.check()
        return one.phase != phase

    machine().switch(complete)


def stores_under_way():
    """Stores of this thread that are under way, and what they read."""
    return _under_way()[0]


def operands_under_way():
    """What the products of this thread that are under way read."""
    return _under_way()[1]


def _under_way():
    if not hasattr(_local, "under_way") or _local.owner is not machine():
        _local.under_way, _local.owner = ([], []), machine()
    return _local.under_way


def proxies():
    """Those of this thread's program. Where several groups of warps run, nothing is noted."""
    return machine().proxies if len(machine().alive) <= 1 else Proxies()


def fence():
    """``fence_async_shared``."""
    proxies().fence()


def meet():
    """A barrier of all warps."""
    proxies().meet()


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    counts = [machine().warps, *worker_num_warps]
    machine().run([((f, a), w) for (f, a), w in zip(functions_and_args, counts)])
    machine().proxies = Proxies()
