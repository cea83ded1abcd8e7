"""States that clients save and continue from."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..engine import Engine, SequenceState
from .errors import Refused
from .protocol import StateCard


class States:
    """The last ``most`` states that were used, in the host's memory. Names are random."""

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine, self._most = engine, most
        self._kept: OrderedDict[str, tuple[int, SequenceState]] = OrderedDict()

    def add(self, state: SequenceState) -> str:
        """Keep a state; its name."""
        name = f"state-{secrets.token_hex(16)}"
        self._kept[name] = (int(time.time()), replace(state, row=state.row.cpu()))
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> SequenceState:
        """A state. Raises Refused if there is none."""
        self._check(name)
        self._kept.move_to_end(name)
        return self._kept[name][1]

    def remove(self, name: str) -> None:
        """Drop a state. Raises Refused if there is none."""
        self._check(name)
        del self._kept[name]

    def card(self, name: str) -> StateCard:
        """What clients see of a state."""
        self._check(name)
        created, state = self._kept[name]
        return StateCard(id=name, created=created, tokens=len(state.tokens), bytes=state.row.nbytes)

    def cards(self) -> list[StateCard]:
        """Of all states, the last used one first."""
        return [self.card(name) for name in reversed(self._kept)]

    def to_bytes(self, state: SequenceState) -> bytes:
        """The safetensors file of a state."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "state.safetensors"
            self._engine.save_state(state, file)
            return file.read_bytes()

    def from_bytes(self, content: bytes, most_tokens: int) -> SequenceState:
        """The state in a safetensors file. Raises InvalidArgument or Refused unless it fits the model."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "state.safetensors"
            file.write_bytes(content)
            state = self._engine.load_state(file)
        if len(state.tokens) > most_tokens:
            raise Refused(400, f"states: a state must have at most {most_tokens} tokens, got {len(state.tokens)}.")
        return state

    def _check(self, name: str) -> None:
        if name not in self._kept:
            message = f"states: the state must be one that the server keeps, got {name!r}. It keeps the last {self._most}."
            raise Refused(404, message, param="state", code="state_not_found")
