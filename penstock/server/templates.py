"""Chat templates: from messages to the text of a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ..errors import Complaints, RangeError, shortened
from ..files import read_text
from ..models.tokenizer_json import HuggingFace
from ..models.tokenizers import Tokenizer, World
from .families import CALLS, REASONING, CallForm, ReasoningForm, recognised_calls, recognised_reasoning
from .protocol import Message
from .tools import Function

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""A folder of templates beside that file, whose names are those of their files."""
CONFIG_FILE = "tokenizer_config.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""The names of the template that is taken, and of the one that is taken where a request lists functions, as transformers takes them."""
MOST_CHARACTERS = 2**24
"""A template that writes more is refused: loops in a template can multiply what a client sends."""
WORLD_TOOLS = (
    "You can call functions. Each of these lines is one of them, as JSON:",
    'To call one, write its name and its arguments: <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. '
    "The result is between <tool_response> and </tool_response>.",
)
"""What RWKV World's form says before and after the list of functions."""
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Variables of templates that have the texts of special tokens."""
NONE: Mapping[str, Any] = MappingProxyType({})
G1 = re.compile(r"rwkv-?7[a-z]?-?g\d")
"""Names of checkpoints of RWKV-7 that reason, such as rwkv7-g1-1.5b-20250429-ctx4096.pth."""


class Template(Protocol):
    """A chat template."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""

    @property
    def strips(self) -> bool:
        """Whether white space before an answer belongs to the template."""

    @property
    def calls(self) -> CallForm | None:
        """How answers call functions; None if that is not known."""

    @property
    def reasoning(self) -> ReasoningForm | None:
        """How answers mark reasoning; None if they have none."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of what clients may set."""

    def render(self, messages: Sequence[Message], functions: Sequence[Function] = (), variables: Mapping[str, Any] = NONE) -> str:
        """The prompt. It ends where an answer begins."""


@dataclass(frozen=True)
class WorldTemplate:
    r"""RWKV World's form. An empty line ends a message, so messages have none inside.

    >>> WorldTemplate().render([Message(role="user", content="Hi\n\nthere")])
    'User: Hi\nthere\n\nAssistant:'

    Functions are listed in a first message of the system, calls are written as in Hermes' form, and results are messages of the user.
    Models that reason (RWKV-7 G1) do so after ``<think``, with which the prompt ends if ``enable_thinking`` is true: the end of the marker
    is one token with what follows.

    >>> WorldTemplate(reasoning=REASONING["think"]).render([Message(role="user", content="Hi")], variables={"enable_thinking": True})
    'User: Hi\n\nAssistant: <think'
    """

    calls: CallForm | None = CALLS["hermes"]
    reasoning: ReasoningForm | None = None
    stops: tuple[str, ...] = ("\n\nUser:",)
    strips: bool = True

    @property
    def variables(self) -> tuple[str, ...]:
        """``enable_thinking`` of models that reason."""
        return () if self.reasoning is None else self.reasoning.switches[:1]

    def render(self, messages: Sequence[Message], functions: Sequence[Function] = (), variables: Mapping[str, Any] = NONE) -> str:
        """The prompt. Raises RangeError for other variables."""
        check_variables(variables, self.variables)
        end = "Assistant:"
        if self.reasoning is not None and variables.get(self.reasoning.switches[0]):
            end += f" {self.reasoning.begin[:-1]}"
        parts = []
        if functions:
            listed = "\n".join(json.dumps(one.shown, ensure_ascii=False) for one in functions)
            parts.append(f"System: {WORLD_TOOLS[0]}\n{listed}\n{WORLD_TOOLS[1]}\n\n")
        return "".join([*parts, *map(self.message, messages), end])

    def message(self, one: Message) -> str:
        """The text of a message."""
        texts = [one.text.strip()]
        if one.role == "tool":
            texts = [f"<tool_response>\n{texts[0]}\n</tool_response>"]
        for call in one.tool_calls:
            value = {"name": call.function.name, "arguments": call.function.value}
            texts.append(f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>")
        text = "\n".join(filter(None, texts)).replace("\r\n", "\n")
        while "\n\n" in text:  # an expression of re.sub keeps Python's lock for a quarter of a second beside 4 MB
            text = text.replace("\n\n", "\n")
        names = {"system": "System", "developer": "System", "assistant": "Assistant"}
        return f"{names.get(one.role, 'User')}: {text}\n\n"


class JinjaTemplate:
    """A Jinja template as Hugging Face repositories have it, in a sandbox. Raises RangeError for one that cannot be compiled.

    ``with_tools``: that of requests which list functions.
    """

    stops: tuple[str, ...] = ()
    strips = False

    def __init__(
        self, source: str, special: dict[str, str] | None = None, name: str = "template", with_tools: JinjaTemplate | None = None
    ) -> None:
        from jinja2 import TemplateError, meta, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        from .template_tags import Generation

        self._source = source, special, name, with_tools
        self._with_tools = with_tools
        extensions = ["jinja2.ext.loopcontrols", Generation]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        self._special = special or {}
        self.calls, self.reasoning = recognised_calls(source), recognised_reasoning(source)
        if with_tools is not None:
            self.calls, self.reasoning = with_tools.calls or self.calls, self.reasoning or with_tools.reasoning
        try:
            self._template, parsed = environment.from_string(source), environment.parse(source)
            developers = any(one.value == "developer" for one in parsed.find_all(nodes.Const))  # a word of a text is no role
            known = meta.find_undeclared_variables(parsed)  # which changes what was parsed
        except TemplateError as error:
            complaints = Complaints("serve")
            complaints.add(RangeError, "chat_template", "a Jinja template", f"{name} ({error})", "Give another with --chat-template.")
            complaints.raise_any()
        self.variables = tuple(sorted(known - {"messages", "tools", "add_generation_prompt", *SPECIAL, *environment.globals}))
        self._takes_tools = "tools" in known
        self._roles = {} if developers else {"developer": "system"}
        """Names of roles that the template does not know, as it has them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return JinjaTemplate, self._source, {"calls": self.calls, "reasoning": self.reasoning}

    def render(self, messages: Sequence[Message], functions: Sequence[Function] = (), variables: Mapping[str, Any] = NONE) -> str:
        """The prompt. Raises RangeError where the template refuses the messages, or does not know functions or variables."""
        if functions and self._with_tools is not None:
            return self._with_tools.render(messages, functions, variables)
        complaints = Complaints("chat")
        check_variables(variables, self.variables)
        if functions and not self._takes_tools:
            remedy = "Serve with another --chat-template."
            complaints.add(RangeError, "tools", "absent, because the model's chat template has none", f"{len(functions)}", remedy)
            complaints.raise_any()
        given = {**self._special, **variables, "messages": _listed(messages, self._roles), "add_generation_prompt": True}
        given["tools"] = [{"type": "function", "function": one.shown} for one in functions] or None
        pieces, size = [], 0
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_CHARACTERS:
                    complaints.add(RangeError, "messages", f"at most {MOST_CHARACTERS} characters when rendered", "more")
                    break
        except Exception as error:  # a template may raise anything
            complaints.add(RangeError, "messages", "what the model's chat template takes", f"{type(error).__name__}: {error}")
        complaints.raise_any()
        return "".join(pieces)


def _listed(messages: Sequence[Message], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages as templates of Hugging Face expect them: arguments are objects, and results have the name of their function."""
    listed, names = [], dict[str, str]()
    for one in messages:
        found: dict[str, Any] = {"role": roles.get(one.role, one.role), "content": one.text}
        if one.name is not None:
            found["name"] = one.name
        if one.reasoning_content is not None:
            found["reasoning_content"] = one.reasoning_content
        if one.tool_calls:
            if "content" not in one.model_fields_set:
                found["content"] = None
            names |= {call.id: call.function.name for call in one.tool_calls}
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.value}}
                for call in one.tool_calls
            ]
        if one.tool_call_id is not None:
            found["tool_call_id"] = one.tool_call_id
            if one.tool_call_id in names:
                found.setdefault("name", names[one.tool_call_id])
        listed.append(found)
    return listed


def check_variables(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RangeError for a variable that the template does not have."""
    complaints = Complaints("chat")
    for name in given.keys() - {*known}:
        rule = f"some of the template's variables ({', '.join(known)})" if known else "absent, because the template has no variables"
        complaints.add(RangeError, "chat_template_kwargs", rule, shortened(name))
    complaints.raise_any()


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """The filter of templates, which takes what that of transformers does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def find_template(
    path: Path, tokenizer: Tokenizer, file: Path | None = None, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> Template | None:
    """The template of a checkpoint: ``file`` if given, the one in its folder, or RWKV World's for its tokenizer; None if there is none.

    tool_parser, reasoning_parser : str, optional
        Names of ``CALLS`` and ``REASONING``, or "none". Default: what the template's source shows; for RWKV World's form "think" if the
        path has the name of a checkpoint of RWKV-7 G1.
    """
    template: JinjaTemplate | WorldTemplate | None = _jinja(path if path.is_dir() else path.parent, file)
    if template is None:
        if not isinstance(tokenizer, World):
            return None
        template = WorldTemplate(reasoning=REASONING["think"] if G1.search(path.name.lower()) else None)
    calls = template.calls if tool_parser is None else CALLS.get(tool_parser)
    reasoning = template.reasoning if reasoning_parser is None else REASONING.get(reasoning_parser)
    if isinstance(template, WorldTemplate):
        return WorldTemplate(calls, reasoning)
    template.calls, template.reasoning = calls, reasoning
    return template


def with_markers(tokenizer: Tokenizer, template: Template | None) -> Tokenizer:
    """A tokenizer that decodes the markers of calls and reasoning of a template, also where they are special tokens of its file."""
    forms = [] if template is None else [form for form in (template.calls, template.reasoning) if form is not None]
    markers = {marker for form in forms for marker in (form.begin, form.end) if marker}
    return tokenizer.with_texts(markers) if isinstance(tokenizer, HuggingFace) else tokenizer


def _jinja(folder: Path, file: Path | None) -> JinjaTemplate | None:
    config = _config(folder / CONFIG_FILE)
    special = {name: _text(config[name]) for name in SPECIAL if config.get(name)}
    if file is not None:
        return JinjaTemplate(read_text(file, "serve", "chat_template"), special, str(file))
    found = _named(folder, config)
    if found and DEFAULT not in found:
        complaints = Complaints("serve")
        remedy = "Give one with --chat-template."
        complaints.add(RangeError, "chat_template", f"one or several of which one is named {DEFAULT!r}", ", ".join(found), remedy)
        complaints.raise_any()
    with_tools = JinjaTemplate(found[WITH_TOOLS][0], special, found[WITH_TOOLS][1]) if WITH_TOOLS in found else None
    return JinjaTemplate(found[DEFAULT][0], special, found[DEFAULT][1], with_tools) if found else None


def _named(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The templates of a folder and where each is, by name: those of files or, where there is none, of the tokenizer's configuration."""
    files = {one.stem: one for one in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files[DEFAULT] = folder / TEMPLATE_FILE
    if files:
        return {name: (read_text(one, "serve", "chat_template"), str(one)) for name, one in files.items()}
    given, origin = config.get("chat_template"), str(folder / CONFIG_FILE)
    if isinstance(given, str):
        return {DEFAULT: (given, origin)}
    listed = given if isinstance(given, list) else []
    named = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    return {name: (source, origin) for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _config(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
