"""Stop strings across borders of tokens and characters, stop tokens, echo, prompt log probabilities."""

import pytest
import torch
from architectures import model_of
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_files import TOKENIZERS, tokenizer_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.text import StopStrings, TextStream, text_stream
from penstock.models import CausalLM, gla
from penstock.models.tokenizers import Bytes, ByteStream


def pieces_of(text: bytes, sizes: list[int]):
    """A decoder of tokens that are byte strings of these sizes, and the tokens."""
    values, at = [], 0
    for size in sizes:
        values.append(text[at : at + size])
        at += size
    values.append(text[at:])
    return ByteStream(values), range(len(values))


@given(
    st.text("aé🙂b", max_size=30),
    st.lists(st.integers(1, 5), max_size=20),
    st.lists(st.text("aé🙂b", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
@example("aabaabaaa", [3, 1], ["aabaaa", "abaab", "baa"], False)
@example("abababac", [1] * 8, ["ababac", "bac"], True)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(text, sizes, stop, include):
    decoder, tokens = pieces_of(text.encode(), sizes)
    stream = TextStream(decoder, tuple(stop), include)
    found = ""
    for token in tokens:
        found += stream.push(token)
        assert not any(one in found for one in stop) or include
        if stream.stopped:
            break
    found += stream.finish()
    ends = [(text.index(one) + len(one), -len(one)) for one in stop if one in text]
    if not ends:
        assert (found, stream.stopped) == (text, False)
    else:  # the one that is complete first counts, and the longest of several
        end, size = min(ends)
        assert (found, stream.stopped_by) == (text[: end if include else end + size], text[end + size : end])


class Until:
    """A prelude up to the first of some letter, or none: it holds back what has not got there."""

    def __init__(self, letter):
        self.letter, self.held, self.over = letter, "", False

    def push(self, text):
        if self.over:
            return "", text
        self.held += text
        before, found, after = self.held.partition(self.letter)
        self.over = found != ""
        return (before + found, after) if found else ("", "")

    def finish(self):
        return "", "" if self.over else self.held


@given(
    st.text("aé🙂b|", max_size=30),
    st.lists(st.integers(1, 5), max_size=20),
    st.lists(st.text("aéb|", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.text("aé🙂b|", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(0, 6),
)
@example("a|b", [1], ["a", "|", "|b"], [], False, 0)
@example("aa|aab", [2], ["ab"], ["a|a"], True, 0)
@example("a|aab", [3], ["ba"], ["ab"], False, 0)
@example("|ab", [1], ["a"], ["ab"], True, 0)
@example("|aé", [1, 1, 1], ["|", "aé"], ["a|", "é"], False, 0)
@example("b|a", [1], ["a"], ["|a"], True, 0)
@example("aba", [1, 1], ["a"], [], False, 1)  # no prelude: the text is held until its end
@example("abb", [1, 1], ["b"], ["ab"], False, 2)
@example("a|aba", [1, 1, 2], ["a"], ["b"], False, 3)
def test_late_stop_strings_count_after_the_prelude(text, sizes, late, stop, include, least):
    """Of those that begin after it, and others, the first that is complete counts, and the longest of several.

    None counts that is complete within the first ``least`` tokens, also where their text was held until later ones came.
    """
    decoder, tokens = pieces_of(text.encode(), sizes)
    params = SamplingParams(
        stop=tuple(stop), late_stop=tuple(late), prelude=lambda: Until("|"), include_stop=include, min_tokens=least, max_tokens=99
    )
    stream = text_stream(decoder, params)
    known = pieces_of(text.encode(), sizes)[0]
    early = len("".join(map(known.push, tokens[:least])))
    found = ""
    for token in tokens:
        found += stream.push(token)
        if stream.stopped:
            break
    found += stream.finish()
    ends = ends_of(text, stop, 0, early)
    seen = text[: min(ends)[0]] if ends else text  # no more is there when it ends
    ends += ends_of(text, late, seen.find("|") + 1, early)
    end, size = min(ends, default=(len(text), 0))
    assert found == text[: end if include else end + size]
    assert stream.stopped_by == (text[end + size : end] if ends else None)


def ends_of(text, stop, begin, early):
    """The first end after ``early`` characters, and the negative length, of each stop string that begins at ``begin`` or later."""
    firsts = [(text.find(one, max(begin, early + 1 - len(one))), one) for one in stop]
    return [(first + len(one), -len(one)) for first, one in firsts if first >= 0]


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    decoder, _ = pieces_of(b"", [])
    decoder._values = [bytes([n]) for n in range(256)]
    stream = TextStream(decoder, ("stop", "oh"))
    assert [stream.push(token) for token in b"a stots ohm"] == ["a", " ", "", "", "", "stot", "", "s ", "", "", ""]
    assert stream.stopped


def test_a_character_is_compared_once_however_many_stop_strings_there_are(monkeypatch):
    """Held text of 200 characters that go on in most of the strings."""
    stop, text, seen, plain = tuple("a" * n + "b" for n in range(190, 206)), "a" * 5000 + "c" * 1000, [], StopStrings.next
    monkeypatch.setattr(StopStrings, "next", lambda self, node, character: seen.append(character) or plain(self, node, character))
    decoder, tokens = pieces_of(text.encode(), [3] * 1999)
    stream = TextStream(decoder, stop)
    seen.clear()
    assert "".join([*map(stream.push, tokens), stream.finish()]) == text
    assert len(seen) <= 5003
    assert not stream.stopped


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    model = CausalLM(gla(vocab_size=256, hidden_size=24, num_layers=1, num_heads=2, intermediate_size=32))
    torch.nn.init.normal_(model.embeddings.weight)
    model.head.weight.data.normal_()
    return Engine(model, Bytes(), slots=4, token_budget=200)


def test_stop_strings_and_stop_ids(engine):
    params = {"max_tokens": 60, "seed": 3, "logit_bias": {n: 100.0 for n in range(97, 123)}}
    (free,) = engine.generate(["hello"], SamplingParams(**params))
    assert free.completions[0].finish_reason == "length"
    assert free.text == bytes(free.tokens).decode()
    stop = free.text[20:23]
    end = free.text.index(stop)
    (stopped,) = engine.generate("hello", SamplingParams(**params, stop=(stop, "1")))
    assert (stopped.text, stopped.completions[0].finish_reason) == (free.text[:end], "stop")
    assert stopped.tokens == free.tokens[: end + 3]
    assert (stopped.completions[0].stopped_by, free.completions[0].stopped_by) == (stop, None)
    (included,) = engine.generate("hello", SamplingParams(**params, stop=[stop], include_stop=True))
    assert included.text == free.text[: end + 3]
    token = free.tokens[30]
    (ended,) = engine.generate("hello", SamplingParams(**params, stop_ids=(token,)))
    assert ended.tokens == free.tokens[: free.tokens.index(token) + 1]
    assert ended.completions[0].stopped_by == token
    assert ended.text == bytes(ended.tokens[:-1]).decode()


def test_a_stop_string_in_the_rest_of_the_text(engine):
    """The last token leaves a character incomplete; the decoder returns its text at the end."""
    params = {"max_tokens": 3, "temperature": 0.0, "logit_bias": {0xC3: 1000.0}}
    (free,) = engine.generate("hello", SamplingParams(**params))
    assert (free.text, free.completions[0].finish_reason) == ("\ufffd\ufffd\ufffd", "length")
    (stopped,) = engine.generate("hello", SamplingParams(**params, stop=("\ufffd" * 3,)))
    assert (stopped.text, stopped.completions[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize("ends", [None, frozenset({5}), frozenset({7, 5})])
def test_the_end_of_text_ends_unless_ignored(ends):
    """Or another token that the tokenizer names."""
    model = model_of("gla")

    class Ends(Bytes):
        vocab_size = 13
        end_of_text = 5

        def __init__(self):
            pass

        def stream(self, after=()):
            return pieces_of(b"x" * 12, [1] * 12)[0]

    tokenizer = Ends()
    if ends is not None:
        tokenizer.ends, tokenizer.end_of_text = ends, min(ends - {5}, default=5)
    engine = Engine(model, tokenizer, slots=2, token_budget=200)
    bias = {"logit_bias": {5: 50.0}, "max_tokens": 4}
    ended, ignored = engine.generate([[1], [1]], [SamplingParams(**bias), SamplingParams(**bias, ignore_end=True)])
    assert (ended.tokens, ended.text, ended.completions[0].finish_reason) == ([5], "", "stop")
    assert ended.completions[0].stopped_by is None
    assert (ignored.tokens, ignored.text, ignored.completions[0].finish_reason) == ([5] * 4, "xxxx", "length")


@pytest.mark.parametrize("name", ["stop", "late_stop"])
def test_a_stop_text_that_is_a_special_token_ends_at_the_token(name):
    """It has no text that could be searched."""

    class Special(Bytes):
        vocab_size, end_of_text, special_tokens = 13, None, {"<stop>": 5, "<other>": 6}

        def __init__(self):
            pass

        def stream(self, after=()):
            return ByteStream([b"" if token in (5, 6) else b"x" for token in range(13)])

    engine = Engine(model_of("gla"), Special(), slots=2, token_budget=200)
    given = {"logit_bias": {5: 50.0, 7: 40.0}, "max_tokens": 5, "temperature": 0, "prelude": lambda: Until("|")}
    (found,) = engine.generate([[1]], SamplingParams(**given, **{name: ("<stop>", "y")}))
    assert (found.tokens, found.text) == ([5], "")
    assert (found.completions[0].finish_reason, found.completions[0].stopped_by) == ("stop", "<stop>")
    (included,) = engine.generate([[1]], SamplingParams(**given, **{name: ("<stop>",)}, include_stop=True, min_tokens=2))
    assert (included.tokens, included.text) == ([7, 7, 5], "xx<stop>")
    (other,) = engine.generate([[1]], SamplingParams(**given, **{name: ("<other>",)}))
    assert (other.tokens, other.text, other.completions[0].finish_reason) == ([5] * 5, "", "length")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_completion_continues_the_text_of_its_prompt(name, tmp_path):
    """Also where the tokenizer's decoder removes a space from the begin of a text."""
    tokenizer = tokenizer_of(name, tmp_path, ["the cat sat"] * 9)
    (wanted,) = tokenizer.encode("a a")[len(tokenizer.encode("a")) :][:1] or [0]
    engine = Engine(CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=8, num_layers=1, num_heads=1)), tokenizer, slots=2)
    params = {"max_tokens": 2, "temperature": 0, "logit_bias": {wanted: 1e4}}
    plain, echoed = engine.generate(["the cat"] * 2, [SamplingParams(**params), SamplingParams(**params, echo=True)])
    whole = tokenizer.decode([*tokenizer.encode("the cat"), wanted, wanted])
    assert plain.text == whole.removeprefix("the cat") == 2 * tokenizer.stream([wanted]).push(wanted)
    assert echoed.text == whole
    engine.close()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_continues_a_state(name, tmp_path):
    """Also where the tokenizer adds a space to the begin of a text."""
    tokenizer = tokenizer_of(name, tmp_path, ["the cat sat"] * 9)
    engine = Engine(CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=8, num_layers=1, num_heads=1)), tokenizer, slots=2)
    state = engine.generate(["the cat"], SamplingParams(max_tokens=0, keep_state=True))[0].completions[0].state
    for text in "s sat", " sat":
        request = engine.submit(text, SamplingParams(max_tokens=1), state=state)
        assert tokenizer.decode(request.prompt) == f"the cat{text}"
    engine.close()


def test_echo_and_log_probabilities_of_the_prompt(engine):
    prompt = "words " * 40
    params = SamplingParams(max_tokens=6, seed=1, echo=True, prompt_logprobs=2, logprobs=3)
    for _ in range(2):  # the second time, the cache has the prompt
        (result,) = engine.generate(prompt, params)
        tokens = [*prompt.encode(), *result.tokens]
        assert result.completions[0].tokens == tokens[len(prompt) :]
        assert result.text.startswith(prompt)
        with torch.no_grad():
            scores = torch.log_softmax(engine.model(torch.tensor([tokens])).logits[0].double(), -1)
        found = [*result.prompt_logprobs[1:], *result.completions[0].logprobs]
        assert result.prompt_logprobs[0] is None
        assert [one.token for one in found] == tokens[1:]
        for place, one in enumerate(found):
            assert one.logprob == pytest.approx(float(scores[place, one.token]), abs=1e-4)
            assert len(one.top) == (2 if place < len(prompt) - 1 else 3)
            best, names = scores[place].topk(len(one.top))
            assert [value for _, value in one.top] == pytest.approx(best.tolist(), abs=1e-4)
            assert one.top[0][0] == int(names[0]) or best[0] - best[1] < 1e-4
    (scored,) = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    wanted = [one.logprob for one in result.prompt_logprobs[1:]]
    assert [one.logprob for one in scored.prompt_logprobs[1:]] == pytest.approx(wanted, abs=1e-5)
    assert scored.tokens == []
    (echoed,) = engine.generate(prompt, SamplingParams(max_tokens=0, echo=True, n=3))
    assert [(one.text, one.finish_reason) for one in echoed.completions] == [(prompt, "length")] * 3
    for short in ("a", "ab" * 32 + "c"):  # no token follows the last one, alone in its piece
        (scored,) = engine.generate(short, SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert len(scored.prompt_logprobs) == len(short)


@pytest.mark.parametrize("overlap", [False, True])
def test_all_tokens_of_a_long_prompt_are_scored_without_new_ones(engine, overlap):
    """Its pieces are in several steps."""
    made = Engine(engine.model, Bytes(), slots=2, token_budget=130, overlap=overlap)
    (found,) = made.generate("words " * 80, SamplingParams(max_tokens=0, prompt_logprobs=0))
    (wanted,) = engine.generate("words " * 80, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert [one and one.logprob for one in found.prompt_logprobs] == pytest.approx([one and one.logprob for one in wanted.prompt_logprobs])
