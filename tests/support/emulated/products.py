"""Products of tensor cores, which read their operands when they are waited for."""

from .machine import operands_under_way, proxies
from .memory import Shared
from .values import Value, raw


class Product:
    """A product that is under way."""

    def __init__(self, compute):
        self.compute, self.result = compute, None

    def value(self):
        if self.result is None:
            self.result = self.compute()
        return self.result


def mma(a, b, acc, use_acc=True, is_async=False, **_):
    def compute():
        x, y = raw(a).float(), raw(b).float()
        c = acc.value() if isinstance(acc, Product) else acc
        product = x @ y
        return Value(product + c.data if use_acc else product)

    assert raw(a).dtype == raw(b).dtype, (raw(a).dtype, raw(b).dtype)
    for x in (a, b):
        if isinstance(x, Shared):
            x.use()
            proxies().take(x.data, "a product")
            operands_under_way().extend([x.data] * is_async)
    one = Product(compute)
    return one if is_async else one.value()


def mma_wait(num_outstanding=0, deps=None):
    found = [x.value() if isinstance(x, Product) and num_outstanding == 0 else x for x in deps]
    if num_outstanding == 0:
        operands_under_way().clear()
    else:
        found = [x.value() if isinstance(x, Product) and i < len(deps) else x for i, x in enumerate(deps)]
    return found[0] if len(found) == 1 else tuple(found)
