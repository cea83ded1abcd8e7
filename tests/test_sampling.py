"""Which combinations of parameters are fast tests."""

from itertools import product

from sampling import cover


def rows(*axes):
    return [{(str(axis), str(value)) for axis, value in enumerate(row)} for row in product(*map(range, axes))]


def test_every_value_is_covered_by_as_few_combinations_as_the_longest_axis_has_values():
    many = rows(7, 3, 2)
    kept = cover(many)
    assert set().union(*(many[place] for place in kept)) == set().union(*many)
    assert len(kept) == 7


def test_values_are_chosen_equally_often():
    many = rows(12, 3)
    kept = cover(many)
    assert all(sum(("1", value) in many[place] for place in kept) == 4 for value in "012")


def test_nothing_is_covered_by_nothing():
    assert cover([]) == set()
