"""States that a request continues from, and those that its answers leave.

A chat that continues from a state has the new messages only. Its prompt is what the chat template writes after an answer: the end of that
answer, these messages, and the begin of the next one. A state may have some of this already, since the answer before may have ended by it:
what its text ends with is left out, and so is its last token if that is the end of text. A special token has its name there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..engine import SequenceState
from ..models.tokenizers import ends_of, special_tokens_of
from .errors import Refused
from .generation import Generation
from .protocol import ErrorFields, SamplingBody, StateFields
from .service import Service

TAIL = 4096
"""Tokens at the end of a state whose text may be the begin of what follows."""


async def state_of(service: Service, body: SamplingBody, function: str, prompts: int = 1) -> SequenceState | None:
    """The state that a request continues from. Raises Refused if there is none, or for too many that are wanted."""
    if body.state is not None or body.save_state:
        await service.workers.run(service.engine.model_hash)  # the first time takes seconds
    if body.state is not None and prompts > 1:
        raise Refused(400, f"{function}: prompt must be a single one with a state, got {prompts}.", param="state")
    most = service.limits.states
    if body.save_state and prompts * body.n > most:
        message = f"{function}: save_state must be of at most {most} completions, got {prompts * body.n}."
        raise Refused(400, message, param="save_state")
    return None if body.state is None else await service.workers.run(service.states.get, body.state)


def keep_states(service: Service, choices: Sequence[StateFields], generation: Generation) -> None:
    """Keep the states of all completions, in the order of choices. A choice whose state cannot be kept has the error."""
    states = [done.state for one in generation.requests for done in one.result.completions]
    wanted = [(choice, state) for choice, state in zip(choices, states) if state is not None]
    if not wanted:
        return
    try:
        found = service.states.add([state for _, state in wanted])
    except Refused as error:  # there is no folder
        found = [error] * len(wanted)
    for (choice, _), saved in zip(wanted, found):
        if isinstance(saved, Refused):
            choice.state_error = ErrorFields(**saved.content["error"])
        else:
            choice.state = saved


def without_end(state: SequenceState, ends: Collection[int]) -> SequenceState:
    """A state before the end of text, if that is its last token."""
    if len(state.tokens) == state.aligned or state.tokens[-1] not in ends:
        return state
    return replace(state, tokens=state.tokens[:-1])


async def continued(service: Service, state: SequenceState | None) -> tuple[SequenceState | None, str | None]:
    """What a chat continues from, and the text at its end."""
    if state is None:
        return None, None
    state = without_end(state, ends_of(service.tokenizer))
    known = [token for token in state.tokens[-TAIL:] if token < service.tokenizer.vocab_size]
    name = next((name for name, token in special_tokens_of(service.tokenizer).items() if known[-1:] == [token]), "")
    return state, await service.text(known, "state") + name
