"""What a chat template writes between an answer and the next one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from .errors import Refused
from .protocol import Message
from .templates import Template
from .tools import Function


def continuation(template: Template, messages: Sequence[Message], functions: Sequence[Function] = ()) -> str:
    r"""The text from the end of an answer to the begin of the next one, with the messages between them.

    A template renders whole conversations. So it renders two that differ before the answer; what is behind it must be equal.
    Raises Refused.

    >>> from penstock.server.templates import WorldTemplate
    >>> continuation(WorldTemplate(), [Message(role="user", content="Bye")])
    '\n\nUser: Bye\n\nAssistant:'
    """
    answer = f"answer-{secrets.token_hex(16)}"
    earlier = [Message(role="user", content="Hello"), Message(role="assistant", content="Yes?"), Message(role="user", content="Thanks")]
    found = set()
    for history in earlier[2:], earlier:
        text = template.render([*history, Message(role="assistant", content=answer), *messages], functions)
        before, _, behind = text.partition(answer)
        if before == text or answer in behind:
            raise _refused("does not write an earlier answer once")
        found.add(behind)
    if len(found) > 1:
        raise _refused("writes what follows an answer by what was before it")
    return found.pop()


def _refused(reason: str) -> Refused:
    message = f"responses: previous_response_id must be absent, because the model's chat template {reason}, got one. Send all of the input."
    return Refused(400, message, param="previous_response_id", code="template_not_continuable")
