"""Requests and commands of other threads, which the next step receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .request import Request


class Inbox:
    """Requests to add, and commands that run between steps. Appending is thread-safe.

    arrived : callable
        Called after each arrival.
    """

    def __init__(self, arrived: Callable[[], object]) -> None:
        self._arrived = arrived
        self._requests: deque[Request] = deque()
        self._commands: deque[Callable[[], None]] = deque()

    def put(self, request: Request) -> None:
        """Append a request."""
        self._requests.append(request)
        self._arrived()

    def command(self, command: Callable[[], None]) -> None:
        """Append a command. It runs after all requests before it are added."""
        self._commands.append(command)
        self._arrived()

    def receive(self, add: Callable[[Request], None]) -> None:
        """Add all requests and run all commands."""
        while self._requests or self._commands:
            command = self._commands.popleft() if self._commands else None
            while self._requests:  # after popleft: a command follows the request it refers to
                add(self._requests.popleft())
            if command is not None:
                command()

    def completions(self, client: str | None = None) -> int:
        """The number of completions of its requests, or of those of one client."""
        return sum(one.params.n for one in list(self._requests) if client in (None, one.share[0]))
