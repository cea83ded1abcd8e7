"""Fixtures of the server's tests."""

import pytest
from live_server import VOCAB, running, small_model

from penstock.engine import Engine, SamplingParams
from penstock.models.tokenizers import Bytes


@pytest.fixture(scope="session")
def model():
    return small_model()


@pytest.fixture(scope="session")
def live(model):
    with running(model) as live:
        yield live


@pytest.fixture
def client(live):
    yield live.client
    live.settles()


@pytest.fixture(scope="session")
def expected(model):
    """What an engine of its own gives."""
    engine = Engine(model, Bytes(VOCAB), slots=4, token_budget=256, cache_bytes=0)

    def generate(prompt, **params):
        return engine.generate([prompt], SamplingParams(**params))[0]

    return generate
