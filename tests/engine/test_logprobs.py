"""Log probabilities of completions are a list whose items are made when they are read."""

import pytest

from penstock.engine.request import Logprobs, TokenLogprobs

GIVEN = [TokenLogprobs(5, -0.5, ((5, -0.5), (2, -1.25))), TokenLogprobs(0, float("-inf")), TokenLogprobs(65535, -3.0, ((1, -0.1),))]


def test_they_are_a_list():
    found = Logprobs()
    assert len(found) == 0
    assert found == []
    found.extend(GIVEN[:1])
    found.extend(GIVEN[1:])
    assert found == GIVEN
    assert list(found) == GIVEN
    assert (found[-1], found[1:], found[::-1]) == (GIVEN[2], GIVEN[1:], GIVEN[::-1])
    assert repr(found) == repr(GIVEN)
    assert type(found[0].token) is type(found[0].top[0][0]) is int
    with pytest.raises(IndexError):
        found[3]


def test_equal_lists_are_equal():
    one, other = Logprobs(), Logprobs()
    one.extend(GIVEN)
    other.extend(GIVEN)
    assert one == other
    other.extend(GIVEN[:1])
    assert one != other
