"""Initial states and adapters under names of their own: ``model`` chooses one, and all share the batch."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from live_server import running, small_model
from torch import nn

from penstock.engine import SamplingParams
from penstock.models.arguments import named_tensors
from penstock.server.protocol import Message
from penstock.server.templates import WorldTemplate

STATES = ("formal", "casual")
ADAPTERS = ("code",)
NAMES = ("tiny", *(f"tiny:{name}" for name in (*STATES, *ADAPTERS)))
GIVEN = {"max_tokens": 12, "temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def live():
    model = small_model()
    draw = torch.Generator().manual_seed(0)
    states = {name: model(torch.randint(257, (1, 40), generator=draw)).state for name in STATES}
    for state in states.values():
        for _, x in named_tensors(state):
            x.detach().normal_(generator=draw)  # so that answers differ
    maps = [(f"{name}.weight", one.weight.shape) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    adapters = {
        adapter: {name: (torch.randn(4, inner, generator=draw), torch.randn(out, 4, generator=draw)) for name, (out, inner) in maps}
        for adapter in ADAPTERS
    }
    with running(model, states=states, adapters=adapters) as one:
        yield one
        one.settles()


def alone(live, prompt, model, special=True):
    """What the engine gives for a name."""
    tuning = model.partition(":")[2] or None
    tokens = live.service.tokenizer.encode(prompt, special)
    return live.engine.generate([tokens], SamplingParams(**GIVEN), tuning=tuning)[0].text


def test_models_lists_all_names(live):
    found = live.client.models.list().data
    assert [one.id for one in found] == [*NAMES]
    assert [one.parent for one in found] == [None, "tiny", "tiny", "tiny"]
    assert live.client.models.retrieve("tiny:code").id == "tiny:code"


def test_each_name_answers_as_alone_beside_all_others(live):
    prompts = ["a", "b", "Some text", *"cde"]
    calls = [(prompt, name) for prompt in prompts for name in NAMES]
    with ThreadPoolExecutor(12) as threads:
        answers = [*threads.map(lambda call: live.client.completions.create(prompt=call[0], model=call[1], **GIVEN), calls)]
    assert [one.model for one in answers] == [name for _, name in calls]
    texts = [one.choices[0].text for one in answers]
    assert texts == [alone(live, *call) for call in calls]
    assert len(set(texts[:4])) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_chats_choose_too(live, stream):
    messages, found = [{"role": "user", "content": "Hello"}], []
    for name in NAMES:
        answer = live.client.chat.completions.create(messages=messages, model=name, stream=stream, **GIVEN)
        pieces = [*answer] if stream else [answer]
        assert {piece.model for piece in pieces} == {name}
        found.append("".join(p.choices[0].delta.content or "" for p in pieces) if stream else answer.choices[0].message.content)
    prompt = WorldTemplate().render([Message(role="user", content="Hello")])
    assert found == [alone(live, prompt, name, special=False).lstrip() for name in NAMES]


def test_saved_states_continue_under_their_name_only(live):
    options = {"prompt": "A text", "model": "tiny:formal", "extra_body": {"save_state": True}}
    whole = live.client.completions.create(**{**options, **GIVEN, "max_tokens": 24})
    first = live.client.completions.create(**options, **GIVEN)
    state = first.choices[0].model_extra["state"]
    again = live.client.completions.create(prompt="", model="tiny:formal", extra_body={"state": state}, **GIVEN)
    assert first.choices[0].text + again.choices[0].text == whole.choices[0].text
    for other in ("tiny", "tiny:casual", "tiny:code"):
        with pytest.raises(openai.BadRequestError, match="state must be of this model with this tuning"):
            live.client.completions.create(prompt="", model=other, extra_body={"state": state}, **GIVEN)


@pytest.mark.parametrize("name", ["tiny:", "tiny:none", "formal", ":formal", "tiny:formal:code", "TINY"])
def test_other_names_are_refused_with_the_known_ones(live, name):
    with pytest.raises(openai.NotFoundError, match="model must be one of 'tiny', 'tiny:formal', 'tiny:casual', 'tiny:code', got"):
        live.client.completions.create(prompt="a", model=name)
    with pytest.raises(openai.NotFoundError, match="model must be one of"):
        live.client.models.retrieve(name)
