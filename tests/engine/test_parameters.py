"""One table of sampling parameters: what callers, the server and the documentation say of them."""

import math
import re
from pathlib import Path

import pytest

from penstock.engine import SamplingParams
from penstock.engine.parameters import PARAMETERS
from penstock.errors import RangeError

PAGE = Path(__file__).parents[2] / "docs/engine.md"


def shown(least, most, above=False):
    return f"above {least:g}, to {most:g}" if above else f"{least:g} to {most:g}"


def test_the_page_has_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) ?\| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        (
            name,
            repr(getattr(SamplingParams(), name)),
            shown(one.least, one.most, one.above),
            shown(*one.http) if one.http else "",
            one.reads,
        )
        for name, (one, _) in PARAMETERS.items()
    ]


@pytest.mark.parametrize("name", PARAMETERS)
def test_values_up_to_the_ends_of_a_range_pass_and_no_others(name):
    one, kind = PARAMETERS[name]
    step = (lambda x, to: math.nextafter(x, to)) if kind is float else (lambda x, to: x + 1 if to > 0 else x - 1)
    others = {"max_tokens": 2**62} if name == "min_tokens" else {}
    least = step(one.least, math.inf) if one.above else one.least
    assert getattr(SamplingParams(**others, **{name: least}), name) == least
    beyond = [one.least if one.above else step(one.least, -math.inf)]
    if one.most < math.inf:
        assert getattr(SamplingParams(**{name: one.most}), name) == one.most
        beyond.append(step(one.most, math.inf))
    for value in beyond:
        with pytest.raises(RangeError, match=f"SamplingParams: {name} must be"):
            SamplingParams(**others, **{name: value})


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_server_has_the_defaults_and_ranges(name):
    protocol = pytest.importorskip("penstock.server.protocol")
    one, _ = PARAMETERS[name]
    body = {"model": "m", "prompt": "x", "max_tokens": 16}
    assert getattr(protocol.CompletionBody(**body), name) == getattr(SamplingParams(), name)
    least, most = one.http or (one.least, one.most)
    for value in (least, most):
        if value < math.inf:
            beyond = value - 1 if value == least else value + 1
            others = body | ({"max_tokens": 2**62} if name == "min_tokens" else {})
            with pytest.raises(ValueError, match=name):
                protocol.CompletionBody(**others | {name: beyond})
            if not (one.above and value == least):
                assert getattr(protocol.CompletionBody(**others | {name: value}), name) == value
