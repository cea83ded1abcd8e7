"""Chat templates: from messages to the text of a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from ..errors import Complaints, RangeError
from ..files import read_text
from ..models.tokenizers import Tokenizer, World
from .protocol import Message

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
MOST_CHARACTERS = 2**24
"""A template that writes more is refused: loops in a template can multiply what a client sends."""


class Template(Protocol):
    """A chat template."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""

    @property
    def strips(self) -> bool:
        """Whether white space before an answer belongs to the template."""

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt. It ends where an answer begins."""


@dataclass(frozen=True)
class WorldTemplate:
    r"""RWKV World's form. An empty line ends a message, so messages have none inside.

    >>> WorldTemplate().render([Message(role="user", content="Hi\n\nthere")])
    'User: Hi\nthere\n\nAssistant:'
    """

    stops: tuple[str, ...] = ("\n\nUser:",)
    strips: bool = True

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt."""
        names = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
        texts = [re.sub(r"(\r?\n)+", "\n", one.text.strip()) for one in messages]
        parts = [f"{names[one.role]}: {text}\n\n" for one, text in zip(messages, texts)]
        return "".join([*parts, "Assistant:"])


class JinjaTemplate:
    """A Jinja template as Hugging Face repositories have it, in a sandbox. Raises RangeError for one that cannot be compiled."""

    stops: tuple[str, ...] = ()
    strips = False

    def __init__(self, source: str, special: dict[str, str] | None = None, name: str = "template") -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        self._special = special or {}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            complaints = Complaints("serve")
            complaints.add(RangeError, "chat_template", "a Jinja template", f"{name} ({error})", "Give another with --chat-template.")
            complaints.raise_any()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt. Raises RangeError where the template refuses the messages."""
        listed = [{"role": one.role, "content": one.text} | ({} if one.name is None else {"name": one.name}) for one in messages]
        complaints = Complaints("chat")
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=listed, add_generation_prompt=True, **self._special):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_CHARACTERS:
                    complaints.add(RangeError, "messages", f"at most {MOST_CHARACTERS} characters when rendered", "more")
                    break
        except Exception as error:  # a template may raise anything
            complaints.add(RangeError, "messages", "what the model's chat template takes", f"{type(error).__name__}: {error}")
        complaints.raise_any()
        return "".join(pieces)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def find_template(path: Path, tokenizer: Tokenizer, file: Path | None = None) -> Template | None:
    """The template of a checkpoint: ``file`` if given, the one in its folder, or RWKV World's for its tokenizer; None if there is none."""
    folder = path if path.is_dir() else path.parent
    config = _config(folder / CONFIG_FILE)
    special = {name: _text(config[name]) for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    if file is None and (folder / TEMPLATE_FILE).is_file():
        file = folder / TEMPLATE_FILE
    if file is not None:
        return JinjaTemplate(read_text(file, "serve", "chat_template"), special, str(file))
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"), None)
    if isinstance(found, str):
        return JinjaTemplate(found, special, str(folder / CONFIG_FILE))
    return WorldTemplate() if isinstance(tokenizer, World) else None


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _config(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
