"""What copies and products may read and overwrite: they reach shared memory by another way than the loads and stores of threads.

Before a copy or product reads what threads have stored, or a copy overwrites it, the threads that stored must fence
(``fence_async_shared``), then all warps must meet. Before a copy overwrites what threads or products have read, all warps must meet.
Groups of warps that divide the work synchronize by barriers of their own, so only programs of one group are looked at.
"""


def span(data):
    """The addresses of a view of shared memory."""
    reach = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride()))
    return data.data_ptr(), data.data_ptr() + (reach + 1) * data.element_size()


class Proxies:
    """The parts of shared memory that threads have stored or read since a fence, and since all warps met."""

    def __init__(self):
        self.stored, self.fenced, self.read = [], [], []

    def store(self, data):
        """Threads store a part."""
        self.stored.append(span(data))

    def load(self, data):
        """Threads load a part."""
        self.read.append(span(data))

    def fence(self):
        self.fenced += self.stored
        self.stored = []

    def meet(self):
        self.fenced, self.read = [], []

    def take(self, data, what):
        """A copy or product, ``what``, reads a part."""
        self._apart(data, self.stored, f"{what} reads shared memory that threads have stored without a fence after it")
        self._apart(data, self.fenced, f"{what} reads shared memory that other warps have stored, before all warps meet")
        self.load(data)

    def overwrite(self, data):
        """A copy overwrites a part."""
        self._apart(data, self.stored, "a copy overwrites shared memory that threads have stored without a fence after it")
        self._apart(data, self.fenced, "a copy overwrites shared memory that other warps have stored, before all warps meet")
        self._apart(data, self.read, "a copy overwrites shared memory that other warps have read, before all warps meet")

    @staticmethod
    def _apart(data, parts, message):
        first, end = span(data)
        assert not any(first < b and a < end for a, b in parts), f"{message}: {list(data.shape)}"
