"""The engine: requests in, tokens out."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import Complaints, EngineError, QueueFull, RangeError
from ..layers.adapted import Factors
from ..layers.as_written import hooked
from ..layers.quantization import Kind
from ..layers.sizes import check_whole
from ..models import CausalLM, State
from ..models import quantize as quantized
from .arguments import (
    check_model,
    check_pages,
    check_request,
    check_saved,
    check_sizes,
    check_switches,
    checked_request,
    each_prompt,
    without_graphs,
)
from .graphs import StepGraphs
from .inbox import Inbox
from .invariance import smallest_block
from .kept import KeptState
from .parameters import SamplingParams
from .request import Event, Request, Result
from .runner import Runner
from .state_cache import StateCache
from .state_pool import StatePool
from .states import SequenceState, fingerprint, load_state, save_state
from .stats import Stats
from .steps import Steps
from .streaming import Mailbox, Mailboxes
from .thread import StepThread
from .tunings import Tuning, check_tunings, model_hashes, tunings_of, with_adapters

Prompt = str | Items[int]


class Engine:
    """Generates for many requests at once: one forward pass per step for all of them. See ``docs/engine.md``.

    The tokens of a request do not depend on the other requests, nor on how its prompt was cut, cached, forked or preempted: in
    float32, tokens are equal; with ``batch_invariant``, logits are bitwise equal.

    model : CausalLM
        In evaluation mode; its weights must not change.
        Hooks of its modules act in every step, on the tokens of all requests; see ``cuda_graphs``.
    tokenizer : penstock.models.tokenizers.Tokenizer, optional
        Without one, prompts must be tokens, results have no text, and there are no stop strings.
    slots : int
        The number of sequences that run at once. Each takes the memory of two states; raises OutOfMemory if they do not fit.
    token_budget : int
        The most tokens of a forward pass; at least slots + 64.
    prompt_budget : int, optional
        The most tokens of prompts in a forward pass that also has tokens of streams; at least 64. It bounds the time between two tokens of
        a stream. Default: adapted from measured times, so that a pass with prompts takes at most about twice as long as one without.
    cache_bytes, host_cache_bytes : int
        Memory for states of earlier prompts on the device, and on the host for those that leave the device. 0: none.
    keep_every : int
        States of long prompts are cached at multiples of this many tokens. A multiple of 64.
    max_queue : int
        The most waiting completions of one client (``share``), including those that get a slot at the next step; more raise QueueFull. At
        least 1.
    batch_invariant : bool
        Logits are bitwise independent of the batch. The next turn of a conversation processes the generated tokens again, as a part of its
        prompt: see ``docs/engine.md``. Raises EngineError where products depend on the number of rows.
    overlap : bool, optional
        Launch the next step before the tokens of this one are on the host. Default: True on a GPU.
    cuda_graphs : bool, optional
        Run steps as CUDA graphs, each captured when first needed or by ``warm_up``. Default: True on a GPU, unless modules have hooks. A
        graph replays what hooks computed on the GPU when it was captured; their Python code does not run again.
    states : mapping of str to State, optional
        Initial states of one sequence, which requests choose by name (``tuning``) in place of the model's own: tuned states
        (``models.load_tuned_state``), or the state that the model returned after a text. Requests with different ones share steps.
    adapters : mapping of str to mapping, optional
        Adapters of linear maps, which requests choose in the same way (``models.load_adapter``): for each weight W [out,in], by its name,
        ``down`` [r,in] and ``up`` [out,r] of W + up down. With R the sum of the ranks of all adapters of a map, each token computes R (in +
        out) more products in this map, even without an adapter, so that its bits do not depend on the adapters of others. Such maps are
        not fused with other operations.
    quantize : "int8" or "int4", optional
        The engine runs ``models.quantize(model, quantize)``, whose large weights are copies in 8 or 4 bits; ``models.load(quantize=...)``
        reads a model without the others.
    pages : int, optional
        Of a model with softmax attention: the pages of keys and values that all sequences and kept prefixes share. A page has 64 tokens.
        Default: enough for ``slots`` sequences of ``max_length`` tokens. With fewer, requests wait for pages.
    max_length : int, optional
        Of a model with softmax attention: the most tokens of a sequence. Default: the least ``max_length`` of its layers' configurations.

    >>> from penstock.models import CausalLM, rwkv6
    >>> engine = Engine(CausalLM(rwkv6(vocab_size=16, hidden_size=16, num_layers=1, head_size=8)), slots=4)
    >>> results = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3, seed=1))
    >>> [len(result.tokens) for result in results]
    [3, 3]
    """

    def __init__(
        self, model: CausalLM, tokenizer: Any = None, *, slots: int = 32, token_budget: int = 2048, prompt_budget: int | None = None,
        cache_bytes: int = 2**28, host_cache_bytes: int = 0, keep_every: int = 1024, max_queue: int = 1024, batch_invariant: bool = False,
        overlap: bool | None = None, cuda_graphs: bool | None = None, states: Mapping[str, State] | None = None,
        adapters: Mapping[str, Factors] | None = None, quantize: Kind | None = None, pages: int | None = None,
        max_length: int | None = None,
    ) -> None:  # fmt: skip
        check_model(model, quantize)
        states, adapters = {} if states is None else states, {} if adapters is None else adapters
        complaints = Complaints("Engine")
        check_switches(complaints, model, batch_invariant, overlap, cuda_graphs)
        check_sizes(complaints, slots, token_budget, prompt_budget, cache_bytes, host_cache_bytes, keep_every, max_queue)
        check_pages(complaints, model, slots, pages, max_length, cuda_graphs)
        complaints.raise_any()
        model = model if quantize is None else quantized(model, quantize)
        check_tunings(complaints, model, states, adapters)
        self.model, self.tokenizer, self.max_queue = model, tokenizer, max_queue
        adapted = with_adapters(model, adapters)
        self.vocab_size = min(model.config.vocab_size, getattr(tokenizer, "vocab_size", model.config.vocab_size))
        self._pool = StatePool(model, slots, pages, max_length)
        device = self._pool.memory.device
        page_pool = self._pool.pages
        self._cache = StateCache(cache_bytes, host_cache_bytes, KeptState.to_host, lambda state: state.to(device, page_pool))
        self._block = smallest_block(adapted, token_budget) if batch_invariant else 0
        runner = Runner(adapted, self._pool, self.vocab_size, self._block, bool(adapters))
        graphs = not any(map(hooked, model.modules())) and without_graphs(model) is None if cuda_graphs is None else cuda_graphs
        if device.type == "cuda" and graphs:
            runner.graphs = StepGraphs(adapted, self._pool, runner.last, token_budget, self._block, bool(adapters))
        self._steps = Steps(
            runner, self._pool, self._cache, token_budget=token_budget, prompt_budget=prompt_budget, keep_every=keep_every,
            overlap=device.type == "cuda" if overlap is None else overlap, canonical=batch_invariant, tokenizer=tokenizer,
            model_hash=self._tuned_hash,
        )  # fmt: skip
        self.tunings: Mapping[str, Tuning] = tunings_of(self._pool, states, adapters)
        """The names that requests may give as ``tuning``, see ``states`` and ``adapters``."""
        self._model_hash: str | None = None
        self._lock = threading.RLock()
        """Held during a step, and during changes of the state that steps read."""
        self._thread = StepThread()
        self._inbox = Inbox(self._thread.wake.set)
        self._closed = False
        self._mailboxes = Mailboxes()

    # requests

    def generate(
        self, prompts: Prompt | Items[Prompt], params: SamplingParams | Items[SamplingParams] | None = None, *, tuning: str | None = None
    ) -> list[Result]:  # fmt: skip
        """Run prompts to completion: one Result for each, in their order.

        prompts : a text or tokens, or a list of such
        params : SamplingParams, or one for each prompt
        tuning : str, optional
            As for ``submit``.

        A request that fails has its error in its Result. Raises InvalidArgument for wrong arguments, before anything runs.

        May be called from several threads.
        """
        requests = [self._request("generate", prompt, some, tuning=tuning) for prompt, some in each_prompt(prompts, params)]
        try:
            for request in requests:
                self._put(request)
            while not all(request.done for request in requests):
                self.step()
        except BaseException:  # KeyboardInterrupt
            with self._lock:
                for request in requests:
                    self.cancel(request)
                self._receive()
            raise
        return [request.result for request in requests]

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, boundaries: Items[int] = (),
        state: SequenceState | None = None, sink: Callable[[Request, Event], None] | None = None, cache_salt: str = "",
        tuning: str | None = None, share: tuple[str, str] = ("", ""),
    ) -> Request:  # fmt: skip
        """Queue a request. Steps run while ``stream`` or ``generate`` are in use, after ``start``, or by calls of ``step``.

        priority : int
            Requests of higher priority run first, and take slots from those of lower priority if none is free.
        boundaries : sequence of int
            Positions in the prompt whose states are worth keeping, such as the ends of chat messages. With a state they count from
            the end of its tokens.
        state : SequenceState, optional
            A state to continue from: the prompt, which may be empty, follows its tokens.
        sink : callable, optional
            Called for each Event, by the thread that runs the step. It may call the engine. If it raises, this request fails.
        cache_salt : str
            Cached states of prefixes serve only requests with the same salt. The time of a prompt shows whether its prefix is cached, so
            requests that must not learn about each other's prompts need different salts.
        tuning : str, optional
            One of the engine's ``states`` or ``adapters``. A ``state`` must come from a request with the same one.
        share : tuple of two str
            The names of a client and of one of its requests. Slots and the budget of prompts are divided evenly between clients, and within
            a client between its requests, however many prompts and completions are submitted under one name.

        Raises InvalidArgument, or QueueFull.
        """
        more = priority, boundaries, state, sink, cache_salt, tuning, share
        request = self._request("submit", prompt, params or SamplingParams(), *more)
        self.check_queue(request.share[0], request.params.n)
        self._put(request)
        return request

    def check_queue(self, client: str, n: int) -> None:
        """Raise QueueFull if so many more completions of a client may not wait, and RangeError if they never may."""
        if n > self.max_queue:
            raise RangeError(f"submit: n must be at most max_queue = {self.max_queue}, got {n}. Submit fewer completions together.")
        waiting = self.waiting_of(client)
        if waiting + n > self.max_queue:
            rule = f"waiting completions of a client must be at most {self.max_queue}"
            raise QueueFull(f"submit: {rule}, got {waiting} and {n} more. Try again later.")

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, boundaries: Items[int] = (),
        state: SequenceState | None = None, cache_salt: str = "", tuning: str | None = None, share: tuple[str, str] = ("", ""),
    ) -> AsyncIterator[Event]:  # fmt: skip
        """Events of a request as they come. Leaving the loop early cancels it. Arguments and errors as for ``submit``.

        A request that fails raises its error after its last event.
        """
        self.start()
        with self._mailboxes.open() as mailbox:
            request = self.submit(
                prompt, params, priority=priority, boundaries=boundaries, state=state, sink=mailbox.put, cache_salt=cache_salt,
                tuning=tuning, share=share,
            )  # fmt: skip
            try:
                left = request.params.n
                while left:
                    event = await mailbox.get()
                    left -= event.finish_reason is not None
                    yield event
                if request.result.error is not None:
                    raise request.result.error
            finally:
                self.cancel(request)

    def mailbox(self) -> AbstractContextManager[Mailbox]:
        """A mailbox for events of requests of ``submit``, for the running event loop: ``sink=mailbox.put``."""
        return self._mailboxes.open()

    def cancel(self, request: Request) -> None:
        """End a request and free its slot before the next step. Ignores requests that are done or of another engine."""
        check_request("cancel", request)
        if not request.done:
            self._inbox.command(lambda: self._steps.cancel(request))

    def fork(self, request: Request, prompt: Prompt = (), params: SamplingParams | None = None, *, index: int = 0) -> Request:
        """A new request that continues a completion of a running one after its last token, or after a further prompt.

        Raises EngineError if the completion does not run in this engine.
        """
        check_request("fork", request)
        state, tuning = self.state_of(request, index=index), None if request.tuning is None else request.tuning.name
        params = params or request.params
        return self.submit(prompt, params, state=state, cache_salt=request.cache_salt, tuning=tuning, share=request.share)

    def state_of(self, request: Request, *, index: int = 0) -> SequenceState:
        """The state of a completion that runs, after its last token. Raises EngineError if it does not run in this engine."""
        check_request("state_of", request)
        complaints = Complaints("state_of")
        check_whole(complaints, "index", index, 0)
        complaints.raise_any()
        with self._lock:
            self._receive()
            self._steps.drain()
            self._deliver()
            return self._steps.entry.state_of(self._steps.past_prompt(request, index))

    # states in files

    def model_hash(self) -> str:
        """The fingerprint of this model, which identifies its states. The first call reads all weights."""
        if self._model_hash is None:
            self._model_hash = fingerprint(self.model)
        return self._model_hash

    def _tuned_hash(self, tuning: Tuning | None) -> str:
        return self.model_hash() if tuning is None else tuning.model_hash(self.model_hash())

    def save_state(self, state: SequenceState, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Write a state as safetensors. Raises DtypeError, or RangeError for the state of another model.

        notes : dict of str, optional
            Additional metadata of the file.
        """
        check_saved(state, notes, model_hashes(self.model_hash, self.tunings))
        save_state(state, path, self.model, self._pool, notes or {})

    def load_state(self, path: str | Path) -> SequenceState:
        """Read a state that ``save_state`` wrote. Raises MissingExtra, and RangeError or ShapeError unless it fits this model."""
        return load_state(path, self.model, self._pool, model_hashes(self.model_hash, self.tunings))

    # running

    def step(self) -> bool:
        """Run one step. Returns whether there was anything to do."""
        with self._lock:
            try:
                self._receive()
                return self._steps.step()
            finally:
                self._deliver()

    def warm_up(self) -> None:
        """Capture all CUDA graphs now, so that no request waits for one. Does nothing without them."""
        with self._lock:
            if self._steps.runner.graphs is not None:
                self._steps.runner.graphs.capture_all()

    def start(self) -> None:
        """Run steps in a background thread from now on. An engine without references is collected once its requests are done."""
        with self._lock:
            if self._closed:
                raise EngineError("start: the engine must be open, got a closed one. Make a new one.")
            self._thread.start(self)

    @property
    def alive(self) -> bool:
        """Whether the background thread runs."""
        return self._thread.alive

    def close(self) -> None:
        """Cancel all requests and end the background thread."""
        self._closed = True
        self._thread.end(wait=False)
        with self._lock:
            self._receive()
            self._steps.drain()
            for request in list(self._steps.requests):
                self._steps.cancel(request)
            self._deliver()
            in_sink = self._steps.telling  # a sink of this thread: it holds the lock until the sink returns
        self._thread.end(wait=not in_sink)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_length(self) -> int | None:
        """The most tokens of a sequence, prompt and completion. None: any number."""
        return self._pool.max_length

    @property
    def waiting(self) -> int:
        """The number of completions that wait for a slot."""
        return self._inbox.completions() + self._steps.scheduler.waiting

    def waiting_of(self, client: str) -> int:
        """The number of waiting completions of one client."""
        return self._inbox.completions(client) + self._steps.scheduler.shares.waiting(client)

    @property
    def stats(self) -> Stats:
        """Current and cumulative counts."""
        return Stats.of(self._steps, self.waiting)

    def check_integrity(self) -> None:
        """Raise PenstockError if a slot is lost or shared, or a page is lost."""
        with self._lock:
            slots = [one.slot for one in self._steps.scheduler.running if one.slot is not None]
            self._pool.check_integrity(slots)
            if self._pool.pages is not None and self._steps.references is not None:
                self._pool.pages.check_integrity(slots, self._steps.references.every())

    def _put(self, request: Request) -> None:
        if self._closed:
            raise EngineError("submit: the engine must be open, got a closed one. Make a new one.")
        self._inbox.put(request)
        if self._closed:  # closed meanwhile, perhaps before it saw this request
            self.close()

    def _receive(self) -> None:
        self._inbox.receive(self._steps.add)

    def _deliver(self) -> None:
        self._steps.tell()
        self._mailboxes.deliver()

    def _request(
        self, function: str, prompt: Any, params: Any, priority: Any = 0, boundaries: Any = (), state: Any = None, sink: Any = None,
        cache_salt: Any = "", tuning: Any = None, share: Any = ("", ""),
    ) -> Request:  # fmt: skip
        return checked_request(
            function, prompt, params, priority, boundaries, state, sink, cache_salt, tuning, share, model=self.model,
            tokenizer=self.tokenizer, vocab_size=self.vocab_size, tunings=self.tunings, model_hash=self._tuned_hash,
            max_length=self.max_length,
        )  # fmt: skip
