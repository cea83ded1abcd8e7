"""Which combinations of parameters are fast tests. The others are slow.

The fast tests have every value of every parameter of a test at least once, in as few combinations as a greedy choice finds. A parameter
that is a data class or a named tuple, for example a ``Case``, counts field by field. ``@pytest.mark.sampled("impl")`` has every value once
with each value of ``impl``; a field is named ``case.variant``. ``@pytest.mark.sampled(file=True)`` takes the tests of a file together:
every test, and every value in one of them. ``slow`` and ``every`` are for lists of parameters.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from heapq import heappop, heapreplace

import pytest

Feature = tuple[str, ...]


def slow(*values: object) -> list[object]:
    """Parameters whose tests are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def every(step: int, values: Iterable[object]) -> list[object]:
    """Parameters of which every so many is a fast test, from the first on: where they have nothing in common."""
    return [value if place % step == 0 else pytest.param(value, marks=pytest.mark.slow) for place, value in enumerate(values)]


EVERY_VALUE = pytest.mark.sampled.mark


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Marks what is not sampled as slow."""
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            marker = item.get_closest_marker("sampled") or EVERY_VALUE
            group = item.path, "" if marker.kwargs.get("file") else item.nodeid.partition("[")[0]
            groups[group].append((item, features(item, *marker.args)))
    for group in groups.values():
        kept = cover([row for _, row in group]) if len(group) > 1 else {0}
        for place, (item, _) in enumerate(group):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def features(item: pytest.Item, *together: str) -> set[Feature]:
    """What an item is to cover: its test, and its values, each with those of the parameters that the marker names."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    values = {"test": item.nodeid.partition("[")[0]} | dict(pair for name, value in parameters.items() for pair in named(name, value))
    with_each = tuple(values[name] for name in together)
    return {(*with_each, name, value) for name, value in values.items()}


def named(name: str, value: object) -> Iterator[tuple[str, str]]:
    """A value, or those of its fields, as text."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = value._asdict()
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        yield name, repr(value)
        return
    for field, part in parts.items():
        yield from named(f"{name}.{field}", part)


def cover(rows: list[set[Feature]]) -> set[int]:
    """Places of rows that together have every feature: again and again one with the most new features, and the least often chosen ones."""
    chosen: Counter[Feature] = Counter()
    missing = set().union(*rows)

    def rank(place: int) -> tuple[int, int, int]:
        """It only grows while rows are chosen, so one that is still the least of all need not be compared again."""
        row = rows[place]
        return -len(row & missing), sum(chosen[feature] for feature in row), place

    queue, kept = sorted(map(rank, range(len(rows)))), set()
    while missing:
        place = queue[0][-1]
        if rank(place) > queue[0]:
            heapreplace(queue, rank(place))
            continue
        heappop(queue)
        kept.add(place)
        missing -= rows[place]
        chosen.update(rows[place])
    return kept
