"""The data of multi-query associative recall."""

import pytest
import torch

from penstock import RangeError
from penstock.training.data import IGNORED
from penstock.training.mqar import NEARNESS, Recall


def drawn(recall, count, seed=0):
    return recall.draw(count, torch.Generator().manual_seed(seed))


def test_every_key_is_asked_once_and_answered_by_its_value():
    recall = Recall(pairs=3, length=20, vocab_size=40)
    tokens, labels = drawn(recall, 200)
    assert tokens.shape == labels.shape == (200, 20)
    for row, answers in zip(tokens.tolist(), labels.tolist()):
        keys, values = row[:6:2], row[1:6:2]
        assert len(set(keys)) == len(set(values)) == 3
        assert all(1 <= key < 20 for key in keys)
        assert all(20 <= value < 40 for value in values)
        value_of = dict(zip(keys, values))
        asked = [t for t, label in enumerate(answers) if label != IGNORED]
        assert all(t >= 6 and t % 2 == 0 for t in asked)
        assert sorted(row[t] for t in asked) == sorted(keys)
        assert all(answers[t] == value_of[row[t]] for t in asked)


def test_queries_follow_the_power_law():
    _, labels = drawn(Recall(pairs=1, length=22, vocab_size=40), 40_000)
    found = (labels != IGNORED).double().mean(0)[2::2]
    law = torch.arange(1, 11).double() ** (NEARNESS - 1)
    assert torch.allclose(found, law / law.sum(), atol=0.01)


def test_equal_seeds_give_equal_sequences():
    recall = Recall(pairs=2, length=8, vocab_size=16)
    one, same, other = drawn(recall, 5), drawn(recall, 5), drawn(recall, 5, seed=1)
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pairs": 0}, "mqar: pairs must be at least 1, got 0"),
        ({"length": 31}, r"mqar: length must be an even number of at least 4 \* pairs = 32, got 31"),
        ({"length": 33}, "length must be an even number"),
        ({"vocab_size": 17}, r"mqar: vocab_size must be at least 2 \* pairs \+ 2 = 18, got 17"),
    ],
)
def test_sizes_that_do_not_fit_raise(sizes, message):
    with pytest.raises(RangeError, match=message):
        Recall(**sizes).draw(1)
    for pairs in (1, 8):
        Recall(pairs=pairs, length=4 * pairs, vocab_size=2 * pairs + 2).draw(2)  # the smallest sizes
