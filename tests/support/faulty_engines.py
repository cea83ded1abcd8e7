"""What tests of faults of the engine share."""

import time

from architectures import model_of

from penstock.engine import Engine, SamplingParams
from penstock.models.tokenizers import Bytes


class Text(Bytes):
    """Tokens of the small models as letters."""

    vocab_size = 13

    def __init__(self):
        self.end_of_text = None

    def encode(self, text, special=False, after=()):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)

    def stream(self, after=()):
        return Letters(self)


class Letters:
    def __init__(self, text):
        self.text = text

    def push(self, token):
        if self.text.end_of_text == "broken" and token == 4:
            raise ValueError("no letter for this token")
        return self.text.decode([token])

    def finish(self):
        return ""


PARAMS = SamplingParams(max_tokens=30, temperature=0)


def engine_of(**options) -> Engine:
    return Engine(model_of("gla"), **{"slots": 3, "token_budget": 200, **options})


def wait_for(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError


def assert_idle(engine):
    engine.check_integrity()
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)
    assert engine._pool.free == engine._pool.slots
    assert not engine._steps.requests
