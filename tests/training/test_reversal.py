"""The data of the reversal of digits."""

import pytest
import torch

from penstock import RangeError
from penstock.training.data import IGNORED
from penstock.training.reversal import SEPARATOR, Reversal


def drawn(task, count, seed=0):
    return task.draw(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("task", [Reversal(1), Reversal(2), Reversal(7), Reversal(7, fewest=5), Reversal(5, fewest=5)], ids=str)
def test_numbers_are_followed_by_their_reversal(task):
    tokens, labels = drawn(task, 400)
    assert tokens.shape == labels.shape == (400, 2 * task.digits)
    sizes = []
    for row, answers in zip(tokens.tolist(), labels.tolist()):
        size = row.index(SEPARATOR)
        number, sizes = row[:size], [*sizes, size]
        assert all(0 <= digit <= 9 for digit in number)
        reversal = [*number[::-1], *[SEPARATOR] * (2 * task.digits)]
        assert row[size + 1 :] == reversal[: 2 * task.digits - size - 1]
        assert answers[size : 2 * size] == number[::-1]
        assert set(answers[:size] + answers[2 * size :]) <= {IGNORED}
    assert set(sizes) == set(range(task.fewest, task.digits + 1))


def test_equal_seeds_give_equal_sequences():
    one, same, other = (drawn(Reversal(4), 5, seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fewest": 0}, "reversal: fewest must be at least 1, got 0"),
        ({"digits": 0}, "reversal: digits must be at least fewest = 1, got 0"),
        ({"digits": 3, "fewest": 4}, "reversal: digits must be at least fewest = 4, got 3"),
    ],
)
def test_sizes_that_do_not_fit_raise(sizes, message):
    with pytest.raises(RangeError, match=message):
        Reversal(**sizes).draw(1)
