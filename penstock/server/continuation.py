"""What a chat template writes between an answer and the next one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from .protocol import Message

Render = Callable[[Sequence[Message]], str]


class NotContinuable(Exception):
    """Why the messages cannot be written after an answer."""


def continuation(render: Render, messages: Sequence[Message]) -> str:
    r"""The text from the end of an answer to the begin of the next one, with the messages between them.

    A template renders whole conversations. So it renders two that differ before the answer: the text after it must be equal, and the text
    before it must not depend on the messages. Raises NotContinuable.

    >>> from penstock.server.templates import WorldTemplate
    >>> continuation(WorldTemplate().render, [Message(role="user", content="Bye")])
    '\n\nUser: Bye\n\nAssistant:'
    """
    answer = f"answer-{secrets.token_hex(16)}"  # a template may change spaces and signs, and this has none
    user = Message(role="user", content="Thanks")
    found = set()
    for history in [user], [Message(role="user", content="Hello"), Message(role="assistant", content="Yes?"), user]:
        earlier = [*history, Message(role="assistant", content=answer)]
        before, mark, after = render([*earlier, *messages]).partition(answer)
        if not mark or answer in after:
            raise NotContinuable("does not write an earlier answer once")
        if before != render([*earlier, user]).partition(answer)[0]:
            raise NotContinuable("writes a part of these messages before the answer")
        found.add(after)
    if len(found) > 1:
        raise NotContinuable("writes what follows an answer by what was before it")
    return found.pop()


def without_overlap(text: str, before: str) -> str:
    r"""A continuation without its begin that the text ``before`` ends with: an answer may have ended by it.

    >>> without_overlap("\n\nUser: Bye", "Hello\n\nUser:")
    ' Bye'
    """
    return text[next(size for size in range(min(len(text), len(before)), -1, -1) if before.endswith(text[:size])) :]
