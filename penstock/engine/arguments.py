"""Checks of the arguments of ``Engine`` and ``submit``, and the requests made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from collections.abc import Sequence as Items
from typing import Any

from ..errors import Complaints, DtypeError, RangeError, ShapeError, described, shortened
from ..layers.sizes import check_whole
from ..models import CausalLM
from ..models.probabilities import MOST_TOKENS
from ..models.quantizing import check_kind
from .pages import pages_of
from .parameters import SamplingParams
from .request import CHUNK, Request
from .state_pool import most_tokens
from .states import SequenceState
from .tunings import Tuning


def check_model(model: object, quantize: object = None) -> None:
    """Raise DtypeError for anything but a CausalLM, RangeError for one whose states grow or with too many tokens; check ``quantize``."""
    complaints = Complaints("Engine")
    if quantize is not None:
        check_kind(complaints, "quantize", quantize)
    if not isinstance(model, CausalLM):
        complaints.add(DtypeError, "model", "a CausalLM", described(model), "penstock.models.load reads one.")
        complaints.raise_any()
    assert isinstance(model, CausalLM)
    for kind in dict.fromkeys(one.kind for one in model.config.mixers if one.grows and not one.paged):
        name, layers = kind.replace("_", " "), [n for n, mixer in enumerate(model.config.mixers) if mixer.kind == kind]
        remedy = "Its state grows with the sequence, and only that of softmax attention is kept in pages. Use CausalLM.generate."
        complaints.add(RangeError, "model", f"free of {name}", f"{name} in layers {layers}", remedy)
    if model.config.vocab_size > MOST_TOKENS:
        rule = f"of at most {MOST_TOKENS} tokens"
        complaints.add(RangeError, "model", rule, f"a vocabulary of {model.config.vocab_size}", "Use CausalLM.generate.")
    complaints.raise_any()


def check_sizes(
    complaints: Complaints, slots: int, token_budget: int, prompt_budget: int | None, cache_bytes: int, host_cache_bytes: int,
    keep_every: int, max_queue: int,
) -> None:  # fmt: skip
    """Check the arguments of ``Engine`` that are numbers."""
    numbers = {"slots": (slots, 1), "token_budget": (token_budget, 1), "cache_bytes": (cache_bytes, 0), "max_queue": (max_queue, 1)}
    if prompt_budget is not None:
        numbers["prompt_budget"] = prompt_budget, CHUNK
    numbers |= {"host_cache_bytes": (host_cache_bytes, 0), "keep_every": (keep_every, CHUNK)}
    for name, (value, least) in numbers.items():
        check_whole(complaints, name, value, least)
    complaints.raise_any()
    if token_budget < slots + CHUNK:
        rule = f"at least slots + {CHUNK} = {slots + CHUNK}"
        complaints.add(RangeError, "token_budget", rule, token_budget, "All streams and a chunk of a prompt must fit into a step.")
    if keep_every % CHUNK:
        complaints.add(RangeError, "keep_every", f"a multiple of {CHUNK}", keep_every)


def check_switches(
    complaints: Complaints, model: CausalLM, batch_invariant: bool, overlap: bool | None, cuda_graphs: bool | None
) -> None:  # fmt: skip
    """Check the arguments of ``Engine`` that are True or False."""
    switches = {"batch_invariant": batch_invariant, "overlap": overlap, "cuda_graphs": cuda_graphs}
    for name, switch in switches.items():
        if not isinstance(switch, bool) and (switch is not None or name == "batch_invariant"):
            rule = "True or False" if name == "batch_invariant" else "True, False or None"
            complaints.add(DtypeError, name, rule, described(switch))
    if cuda_graphs is True and model.like().device.type != "cuda":
        complaints.add(RangeError, "cuda_graphs", "None or False without a GPU", cuda_graphs)


def check_pages(
    complaints: Complaints, model: CausalLM, slots: int, pages: int | None, max_length: int | None, cuda_graphs: bool | None
) -> None:
    """Check the arguments of ``Engine`` for models with softmax attention. Others have none of these layers, and no pages."""
    given = {"pages": pages, "max_length": max_length}
    for name, value in given.items():
        if value is not None:
            check_whole(complaints, name, value, 1)
    complaints.raise_any()
    most = most_tokens(model, max_length)
    for name, value in given.items():
        if most is None and value is not None:
            complaints.add(RangeError, name, "None for a model without softmax attention", value, "Its states have a fixed size.")
    if most is not None and pages is not None and pages < pages_of(most):
        rule = f"at least {pages_of(most)}, for a sequence of max_length = {most} tokens"
        complaints.add(RangeError, "pages", rule, pages, "Or lower max_length.")
    if cuda_graphs and (why := without_graphs(model)) is not None:
        complaints.add(RangeError, "cuda_graphs", "None or False with this softmax attention", True, f"The kernels say: {why}.")


def without_graphs(model: CausalLM) -> str | None:
    """Why steps of a model cannot be captured, or None: its softmax attention runs in plain PyTorch, which waits for the device."""
    layers: list[Any] = [one for one in model.modules() if hasattr(one, "unpaged")]
    return next((why for one in layers if (why := one.unpaged(model.like())) is not None), None)


def check_saved(state: object, notes: object, model_hashes: Iterable[str]) -> None:
    """Check the arguments of ``save_state``: a state of a model with one of these fingerprints."""
    if not isinstance(state, SequenceState):
        raise DtypeError(f"save_state: state must be a SequenceState, got {described(state)}. keep_state and state_of give one.")
    if notes is not None and not (isinstance(notes, Mapping) and all(isinstance(one, str) for pair in notes.items() for one in pair)):
        raise DtypeError(f"save_state: notes must be a dict of texts or None, got {described(notes)}. Write other values as JSON.")
    if state.model not in model_hashes:
        raise RangeError("save_state: state must be of this engine's model, got one of another model. Save it with its own engine.")


def each_prompt(prompts: Any, params: Any) -> Iterable[tuple[Any, Any]]:
    """The prompts of ``generate``, each with its parameters. Raises DtypeError, or ShapeError for another number of parameters."""
    if not isinstance(prompts, Items):
        rule = "a text, a list of tokens, or a list of such"
        complaints = Complaints("generate")
        complaints.add(DtypeError, "prompts", rule, described(prompts), "Arrays have tolist().")
        complaints.raise_any()
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    listed = [prompts] if one else prompts
    given = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(listed)
    if len(given) != len(listed):
        raise ShapeError(f"generate: params must be one for each of {len(listed)} prompts, got {len(given)}. Or pass a single one.")
    return zip(listed, given)


def check_request(function: str, request: object) -> None:
    """Raise DtypeError for anything but a Request."""
    if not isinstance(request, Request):
        raise DtypeError(f"{function}: request must be a Request, got {described(request)}. submit returns one.")


def checked_request(
    function: str, prompt: Any, params: Any, priority: Any = 0, boundaries: Any = (), state: Any = None, sink: Any = None,
    cache_salt: Any = "", tuning: Any = None, share: Any = ("", ""), *, model: CausalLM, tokenizer: Any, vocab_size: int,
    tunings: Mapping[str, Tuning], model_hash: Callable[[Tuning | None], str], max_length: int | None = None,
) -> Request:  # fmt: skip
    """The request of a caller of ``function``. Raises InvalidArgument with all broken rules.

    vocab_size : int
        Sampled tokens are below it.
    max_length : int, optional
        The most tokens of a sequence.
    """
    complaints = Complaints(function)
    if not isinstance(params, SamplingParams):
        complaints.add(DtypeError, "params", "SamplingParams", described(params))
        complaints.raise_any()
    before = state.tokens if isinstance(state, SequenceState) else ()
    tokens = _tokens(complaints, prompt, before, tokenizer, model.config.vocab_size)
    if type(priority) is not int:
        complaints.add(DtypeError, "priority", "a whole number", described(priority))
    known = len(before)
    if not isinstance(boundaries, Items) or not all(type(one) is int for one in boundaries):
        complaints.add(DtypeError, "boundaries", "a list of positions in the prompt", described(boundaries))
    elif any(not 0 <= one <= len(tokens) for one in boundaries):
        outside = next(one for one in boundaries if not 0 <= one <= len(tokens))
        complaints.add(RangeError, "boundaries", f"positions in the prompt, from 0 to {len(tokens)}", shortened(outside))
    if sink is not None and not callable(sink):
        complaints.add(DtypeError, "sink", "a callable or None", described(sink))
    if not isinstance(cache_salt, str):
        complaints.add(DtypeError, "cache_salt", "a text", described(cache_salt))
    if not isinstance(share, tuple) or [*map(type, share)] != [str, str]:
        complaints.add(DtypeError, "share", "a tuple of two texts, a client and one of its requests", described(share))
    tuned = tunings.get(tuning) if isinstance(tuning, str) else None
    if tuning is not None and tuned is None:
        names = ", ".join(map(repr, tunings)) or "none: the engine has neither states nor adapters"
        complaints.add(RangeError, "tuning", f"None or one of {names}", shortened(tuning))
        complaints.raise_any()
    if state is not None and not isinstance(state, SequenceState):
        complaints.add(DtypeError, "state", "a SequenceState or None", described(state))
        complaints.raise_any()
    if state is not None and state.model != model_hash(tuned):
        rule = "of this model" if not tunings else "of this model with this tuning"
        complaints.add(RangeError, "state", rule, "one of another model" + " or tuning" * bool(tunings))
    if not tokens and state is None:
        complaints.add(ShapeError, "prompt", "at least one token", "none")
    if not tokens and state is not None and state.aligned == len(state.tokens):  # the state has no logits after its last token
        remedy = "Or make the state of one token less, and give this token."
        complaints.add(ShapeError, "prompt", "at least one token after a state of max_tokens 0 and whole chunks of 64", "none", remedy)
    for name in ("stop", "late_stop"):
        if getattr(params, name) and tokenizer is None:
            rule = "empty, because the engine has no tokenizer"
            complaints.add(RangeError, name, rule, shortened(getattr(params, name)), "Use stop_ids.")
    largest = max(params.logit_bias, default=0)
    if largest >= vocab_size:
        complaints.add(RangeError, "logit_bias", f"of tokens from 0 to {vocab_size - 1}", f"one of token {shortened(largest)}")
    last = max(params.stop_ids, default=0)
    if last >= vocab_size:
        complaints.add(RangeError, "stop_ids", f"tokens from 0 to {vocab_size - 1}", shortened(last))
    if state is not None and params.prompt_logprobs is not None:
        complaints.add(RangeError, "prompt_logprobs", "None with a state", params.prompt_logprobs)
    if max_length is not None and known + len(tokens) + params.max_tokens > max_length:
        if known + len(tokens) > max_length:
            complaints.add(RangeError, "prompt", f"of at most max_length = {max_length} tokens", f"{known + len(tokens)} tokens")
        else:
            rule = f"at most {max_length - known - len(tokens)} after {known + len(tokens)} tokens, for max_length = {max_length}"
            complaints.add(RangeError, "max_tokens", rule, params.max_tokens)
    complaints.raise_any()
    whole = [*before, *tokens] if before else tokens
    return Request(whole, params, priority, tuple(known + one for one in boundaries), sink, state, cache_salt, tuned, share)


def _tokens(complaints: Complaints, prompt: Any, before: Items[int], tokenizer: Any, vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            complaints.add(DtypeError, "prompt", "tokens, because the engine has no tokenizer", described(prompt))
            complaints.raise_any()
        prompt = tokenizer.encode(prompt, after=before)
    try:
        if isinstance(prompt, bytes | bytearray | Mapping | Set):
            raise TypeError
        tokens = list(prompt)
    except TypeError:
        complaints.add(DtypeError, "prompt", "a text or a list of tokens", described(prompt))
        complaints.raise_any()
    if not tokens or ({*map(type, tokens)} == {int} and min(tokens) >= 0 and max(tokens) < vocab_size):
        return tokens
    rule = f"tokens from 0 to {vocab_size - 1}"
    for token in tokens:
        if type(token) is not int:
            complaints.add(DtypeError, "prompt", f"{rule}, of type int", described(token), "Arrays have tolist().")
            break
        if not 0 <= token < vocab_size:
            complaints.add(RangeError, "prompt", rule, shortened(token))
            break
    return tokens
