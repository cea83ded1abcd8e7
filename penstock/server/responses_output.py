"""The output of a response: items that are made of the pieces of an answer, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Literal

from .answers import Piece
from .responses_protocol import OutputItem, StreamEvent
from .tools import call_id

KINDS: dict[str, Literal["message", "function_call", "reasoning"]] = {
    "content": "message", "reasoning": "reasoning", "call": "function_call",
}  # fmt: skip
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputWriter:
    """Makes the items of one output, and the events of a stream."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._text = ""
        self._count = 0

    def event(self, kind: str, **fields: Any) -> StreamEvent:
        """The next event."""
        self._count += 1
        return StreamEvent(type=f"response.{kind}", sequence_number=self._count - 1, **fields)

    def write(self, piece: Piece) -> Iterator[StreamEvent]:
        """Events of a piece."""
        if piece.kind == "call" or (piece.kind != "arguments" and (self._open is None or self._open.type != KINDS[piece.kind])):
            yield from self._close("completed")
            yield from self._begin(KINDS[piece.kind], piece.text)
        if piece.kind != "call":
            self._text += piece.text
            yield self._delta(piece.text)

    def finish(self, status: Literal["completed", "incomplete"], cut: bool) -> Iterator[StreamEvent]:
        """Events of the end. An output has an item at least. The last one has the answer's status; a call is complete unless ``cut``."""
        if not self.items:
            yield from self._begin("message", "")
        if self._open is not None and self._open.type == "function_call":
            status = "incomplete" if cut else "completed"
        yield from self._close(status)

    def _place(self, part: bool = True) -> dict[str, Any]:
        assert self._open is not None
        place: dict[str, Any] = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if part and self._open.type in PARTS else place

    def _part(self, kind: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": PARTS[kind], "text": self._text}
        return {**part, "annotations": []} if kind == "message" else part

    def _begin(self, kind: Literal["message", "function_call", "reasoning"], name: str) -> Iterator[StreamEvent]:
        forms: dict[str, dict[str, Any]] = {
            "message": {"role": "assistant", "content": []}, "reasoning": {"summary": [], "content": []},
            "function_call": {"call_id": call_id(), "name": name, "arguments": ""},
        }  # fmt: skip
        self._open, self._text = OutputItem(id=f"{IDS[kind]}_{secrets.token_hex(12)}", type=kind, **forms[kind]), ""
        self.items.append(self._open)
        yield self.event("output_item.added", output_index=len(self.items) - 1, item=self._open.model_copy())
        if kind in PARTS:
            yield self.event("content_part.added", **self._place(), part=self._part(kind))

    def _delta(self, text: str) -> StreamEvent:
        assert self._open is not None
        if self._open.type == "message":
            return self.event("output_text.delta", **self._place(), delta=text, logprobs=[])
        kind = "reasoning_text" if self._open.type == "reasoning" else "function_call_arguments"
        return self.event(f"{kind}.delta", **self._place(), delta=text)

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[StreamEvent]:
        if self._open is None:
            return
        kind = self._open.type
        if kind == "function_call":
            name = (self._open.model_extra or {})["name"]
            yield self.event("function_call_arguments.done", **self._place(), name=name, arguments=self._text)
            update: dict[str, Any] = {"arguments": self._text}
        else:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self.event(f"{PARTS[kind]}.done", **self._place(), text=self._text, **more)
            part = self._part(kind)
            yield self.event("content_part.done", **self._place(), part=part)
            update = {"content": [part]}
        self.items[-1] = self._open.model_copy(update={**update, "status": status})
        yield self.event("output_item.done", output_index=len(self.items) - 1, item=self.items[-1])
        self._open = None
