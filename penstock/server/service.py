"""What every endpoint needs: the engine, its texts, limits and metrics; and the checks that all requests share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..engine import Engine, SamplingParams, SequenceState
from ..errors import Complaints, InvalidArgument, QueueFull, RangeError, shortened
from ..models.tokenizer_json import LONGEST
from ..models.tokenizers import Tokenizer
from .caller import LARGE, current
from .errors import Refused, refusal, shutting_down
from .generation import Generation, Job
from .grammars import Grammars, wanted_schema
from .limits import Limits
from .metrics import Metrics
from .processes import Processes
from .protocol import SamplingBody
from .states import States
from .templates import Template, with_markers
from .texts import Texts, decoded, encoded
from .workers import Workers

P = ParamSpec("P")
T = TypeVar("T")
REFUSED_SECONDS = 0.25
"""What a request waits before it is refused because the queue is full. A refused request costs the server some milliseconds, so a client
that tries again at once, whatever ``Retry-After`` says, would take the time of others."""


class Service:
    """One model behind HTTP.

    engine : Engine
        With a tokenizer, one of ``with_markers`` for a template. The service starts its thread.
    name : str
        The name of the model in requests.
    template : Template, optional
        Without one, chats are refused.
    states_folder : Path, optional
        Where states of clients are kept. Without it, a temporary folder, which the application removes at its end.
    """

    def __init__(
        self, engine: Engine, name: str, template: Template | None = None, limits: Limits | None = None,
        states_folder: Path | None = None,
    ) -> None:  # fmt: skip
        if with_markers(engine.tokenizer, template) is not engine.tokenizer:
            complaints = Complaints("Service")
            rule, got = "one that decodes the markers of the template", "one in which some of them are special tokens"
            remedy = "Create the engine with penstock.server.templates.with_markers(tokenizer, template)."
            complaints.add(RangeError, "the tokenizer of engine", rule, got, remedy)
            complaints.raise_any()
        self.engine, self.name, self.template = engine, name, template
        self.models: dict[str, str | None] = {name: None, **{f"{name}:{tuning}": tuning for tuning in engine.tunings}}
        """The names that requests may have as ``model``, and the tuning of each."""
        self.tokenizer: Tokenizer = engine.tokenizer
        self.texts = Texts(self.tokenizer, template)
        self.limits = limits or Limits()
        self.metrics = Metrics(engine)
        self.grammars = Grammars(self.tokenizer, engine.vocab_size, self.limits)
        self._states = {"": States(engine, self.limits.states, states_folder)}
        """By the name of the key that they belong to."""
        self.created = int(time.time())
        self.workers = Workers(4, "server")
        self.processes = Processes(self.texts)
        self.compilers = Workers(2, "grammars")
        """Schemas take seconds and memory, and must not hold up what takes milliseconds."""
        self.running: set[Generation] = set()
        self.draining = False
        """Whether the server ends: requests that run are finished."""
        self.closing = False
        """Whether requests end with an error."""

    @property
    def states(self) -> States:
        """Those of the caller's key."""
        name = current().key.name
        if name not in self._states:
            self._states[name] = self._states[""].below(name)
        return self._states[name]

    def close_states(self) -> None:
        """Remove the temporary folder of states."""
        self._states[""].close()

    def heading(self, kind: str) -> dict[str, Any]:
        """Fields that begin every answer."""
        return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": current().model or self.name}

    def check_model(self, name: str) -> None:
        """The caller gets this model. Raises Refused for another one."""
        if name not in self.models:
            rule = f"one of {', '.join(map(repr, self.models))}" if len(self.models) > 1 else repr(self.name)
            raise Refused(404, f"server: model must be {rule}, got {shortened(name)}.", param="model", code="model_not_found")
        current().model, current().tuning = name, self.models[name]

    def chat_template(self, function: str) -> Template:
        """The chat template. Raises Refused if there is none."""
        if self.template is None:
            rule = "the model must have a chat template, got one without"
            message = f"{function}: {rule}. Use /v1/completions, or serve with --chat-template."
            raise Refused(400, message, param="messages", code="no_chat_template")
        return self.template

    async def params(self, body: SamplingBody, function: str, max_tokens: int, stops: Sequence[str] = (), **more: Any) -> SamplingParams:
        """Sampling parameters of a request; the caller gets its other fields. ``stops`` are texts that end an answer beside those of the
        client. A ``constraint`` among ``more`` is for the response_format; with a ``prelude``, the client's stop texts count after it.
        Raises Refused or InvalidArgument.
        """
        limits, size, caller = self.limits, self.engine.vocab_size, current()
        if body.priority < caller.key.priority:
            message = f"{function}: priority must be at least {caller.key.priority} with this key, got {body.priority}."
            raise Refused(403, message, kind="permission_error", param="priority", code="priority_not_allowed")
        caller.cache_salt, caller.priority = body.cache_salt, body.priority
        given = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        bias = {int(token): value for token, value in body.logit_bias.items()}
        self.check(function, "max_tokens", limits.max_tokens, max_tokens)
        self.check(function, "n", limits.n, body.n)
        self.check(function, "the length of a stop text", limits.stop_length, max(map(len, given), default=0), "stop")
        self.check(function, "tokens of logit_bias", size - 1, max(bias, default=0), "logit_bias")
        self.check(function, "stop_token_ids", size - 1, max(body.stop_token_ids, default=0))
        more["prompt_logprobs"] = max(
            (most for most in (body.prompt_logprobs, more.get("prompt_logprobs")) if most is not None), default=None
        )
        schema = None if "constraint" in more else wanted_schema(body.response_format)
        if schema is not None:
            more["constraint"] = await self.compiled(function, self.grammars.compile, schema, function)
        more |= {"stop": (*given, *stops)} if more.get("prelude") is None else {"stop": tuple(stops), "late_stop": given}
        return SamplingParams(
            max_tokens=max_tokens, min_tokens=body.min_tokens,
            temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, min_p=body.min_p,
            presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty, logit_bias=bias, seed=body.seed,
            stop_ids=tuple(body.stop_token_ids), ignore_end=body.ignore_eos, n=body.n, **more,
        )  # fmt: skip

    def fitting(self, params: SamplingParams, known: int, wanted: int | None) -> SamplingParams:
        """Parameters after ``known`` tokens. Without a limit of the client, a hybrid generates no more tokens than it has room for."""
        room = None if self.engine.max_length is None else self.engine.max_length - known
        if wanted or room is None or room >= params.max_tokens:
            return params
        return replace(params, max_tokens=max(room, 1))  # without any room, the engine refuses it

    async def compiled(self, function: str, make: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        """What compiles grammars, in a thread, within a time. Raises Refused."""
        seconds = self.limits.schema_seconds
        try:
            return await asyncio.wait_for(self.compilers.run(make, *given, **named), seconds)
        except asyncio.TimeoutError:
            message = f"{function}: a schema must be compiled within {seconds:g} seconds, got one that was not. Use fewer patterns."
            raise Refused(400, message, param="response_format", code="schema_timeout") from None

    async def work(self, function: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        """The result of a function of a module: in a worker process if the caller's request is large, else in a thread."""
        return await (self.processes if current().size >= LARGE else self.workers).run(function, *given, **named)

    async def tokens(self, text: str, param: str, special: bool = True, state: SequenceState | None = None) -> Sequence[int]:
        """Tokens of a text, or of one that continues a state. An empty text begins with the end of the one before."""
        after = _last(state)
        try:
            return await self.work(encoded, self.texts, text, special and not after, after)
        except InvalidArgument as error:
            raise refusal(error, param) from error

    async def text(self, tokens: Sequence[int], param: str, state: SequenceState | None = None) -> str:
        """The text of tokens of a request, perhaps after a state."""
        try:
            return await self.work(decoded, self.texts, tokens, _last(state))
        except InvalidArgument as error:
            raise refusal(error, param) from error

    async def start(self, jobs: Sequence[Job], function: str) -> Generation:
        """Queue the requests of an HTTP request. Raises QueueFull, InvalidArgument or Refused."""
        longest, total = max(len(job.tokens) for job in jobs), sum(len(job.tokens) for job in jobs)
        self.check(function, "the prompt's tokens", self.limits.prompt_tokens, longest, "prompt")
        self.check(function, "the tokens of all prompts", self.limits.all_tokens, total, "prompt")
        self.check(function, "prompts times n", self.engine.max_queue, sum(job.params.n for job in jobs), "n")
        reserved, quota = sum(len(job.tokens) + job.params.n * job.params.max_tokens for job in jobs), current().key.quota
        await quota.reserve(reserved, sum(job.params.n for job in jobs), function)
        try:
            if self.closing:  # asked after all waits: abort ends the generations that it sees
                raise shutting_down()
            generation = Generation(self.engine, jobs, self.limits.seconds, self.metrics, self.running)
            await generation.begin(self.workers if jobs[0].params.constraint is None else self.compilers)
        except BaseException as error:
            quota.give_back(reserved)
            if isinstance(error, QueueFull):
                await asyncio.sleep(REFUSED_SECONDS)
            raise
        current().generation = generation
        generation.at_end(lambda: quota.give_back(reserved - generation.usage().total_tokens))
        return generation

    def check_answer(self, function: str, size: int) -> None:
        """Raise Refused for an answer that may have so many bytes, before it is begun."""
        if size > self.limits.answer_bytes:
            rule = f"the answer must be at most {self.limits.answer_bytes} bytes, got up to about {size}"
            message = f"{function}: {rule}. Ask for fewer tokens, completions, prompts or log probabilities."
            raise Refused(400, message, code="answer_too_large")

    def abort(self) -> None:
        """End all requests with an error, and take no new ones. Called by the event loop."""
        self.draining = self.closing = True
        for one in (self.workers, self.compilers, self.processes):
            one.end(shutting_down())
        for generation in self.running:
            generation.cancel()

    def check(self, function: str, name: str, most: int, value: int, param: str = "") -> None:
        """Raise Refused for a value beyond a limit."""
        if value > most:
            raise Refused(400, f"{function}: {name} must be at most {most}, got {value}.", param=param or name)


def _last(state: SequenceState | None) -> Sequence[int]:
    """The last tokens of a state, which the text after it depends on."""
    return () if state is None else state.tokens[-LONGEST:]
