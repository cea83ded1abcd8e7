"""The routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..errors import PenstockError, shortened
from .caller import current
from .chat import chat
from .completions import completions
from .errors import Refused, refusal
from .hosts import check_host
from .keys import Keys
from .limits import check_state_type, read_body
from .messages import PATH as MESSAGES
from .messages import count_tokens, error_response, messages
from .messages_protocol import CountBody, MessagesBody
from .metrics import HttpMetrics
from .origins import ORIGINS, allow_origins
from .pagefiles import PAGE, PATHS
from .protocol import ChatBody, CompletionBody, ModelCard, ModelList, StateCard, StateList
from .requestlog import RequestLog
from .responses import input_items, kept_response, remove_response, responses
from .responses_protocol import ResponseAnswer, ResponseBody
from .sending import check_framing, send_pieces, with_close
from .service import Service
from .streaming import Attended
from .tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize
from .tracing import Tracing

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(
    service: Service, api_key: str | None = None, keys: Keys | None = None, origins: Sequence[str] = (), tracing: Tracing | None = None,
    hosts: frozenset[str] | None = None,
) -> FastAPI:  # fmt: skip
    """The application. It runs the engine's thread, and closes the engine at its end.

    api_key : str, optional
        Requests below /v1, and those for tokens, must have it as bearer token, or in the header x-api-key.
    keys : Keys, optional
        Or one of these.
    origins : list of str
        Web pages of these origins may call the server; "*": all pages.
    tracing : Tracing, optional
        Records spans of requests. The application closes it at its end.
    hosts : frozenset of str, optional
        Requests must name one of these in their Host header (``hosts.known_hosts``). Default: any.
    """
    ORIGINS.check("create_app", origins)
    if api_key is not None:
        keys = Keys.single(api_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.abort()
        await asyncio.to_thread(service.engine.close)
        await asyncio.to_thread(service.close_states)
        for one in (service.workers, service.compilers, service.processes):
            one.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(title="Penstock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    check = None if keys is None else key_check(keys)
    _add_errors(app, service, check, hosts)
    guarded = [] if check is None else [Depends(check)]
    _add_openai(app, service, guarded)
    _add_messages(app, service, guarded)
    _add_tokens(app, service, guarded)
    _add_states(app, service, guarded)
    _add_page(app, service)
    if origins:
        allow_origins(app, origins)
    app.add_middleware(RequestLog, model=service.name, tracing=tracing)
    return app


KeyCheck = Callable[[Request], Awaitable[None]]
GUARDED = re.compile(r"/(v1|tokenize|detokenize)(/|$)")
"""Paths that need the key, also those that do not exist."""


def key_check(keys: Keys) -> KeyCheck:
    """Lets a request in that has a key and is within its limit, and notes the key as the caller's. Raises Refused."""

    async def check(request: Request) -> None:
        given, other = (request.headers.get(name, "") for name in ("authorization", "x-api-key"))
        current().key = keys.check(f"Bearer {other}" if other and not given else given)
        current().key.quota.take_request()

    return check


def _add_errors(app: FastAPI, service: Service, check: KeyCheck | None, hosts: frozenset[str] | None) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            if check is not None and GUARDED.match(request.url.path):
                try:
                    await check(request)
                except Refused as refused:
                    return error_answer(request.url.path, refused)
            message = f"server: the path must exist for this method, got {request.method} {shortened(request.url.path)}."
            error = Refused(error.status_code, message, code="not_found", headers=dict(error.headers or {}))
        return error_answer(request.url.path, error)

    for kind in (Refused, PenstockError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_middleware(Attended)
    app.add_middleware(Answers, service=service, hosts=hosts)


class Running(Protocol):
    """What runs requests: the service of one engine, or the door of several replicas."""

    running: set[Any]
    """Requests."""
    draining: bool
    """Whether the server ends: requests that run are finished."""

    @property
    def metrics(self) -> HttpMetrics:
        """Counts of answers."""

    def abort(self) -> None:
        """End all requests with an error, and take no new ones."""


class Answers:
    """Counts answers and sends them in pieces, and answers requests that raise."""

    def __init__(self, app: ASGIApp, service: Running, hosts: frozenset[str] | None) -> None:
        self._app, self._service, self._metrics, self._hosts = app, service, service.metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, caller = False, current()

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message).update(caller.key.quota.headers())
                self._metrics.answered(getattr(scope.get("route"), "path", "other"), message["status"])
                if self._service.draining:
                    message = with_close(message)
            await send_pieces(send, message)

        try:
            check_framing(scope)
            check_host(scope, self._hosts)
            if caller.refused is not None:
                raise caller.refused
            await self._app(scope, receive, counted)
        except ClientDisconnect:
            caller.status = 499
            self._metrics.disconnected()
        except Exception as error:
            if begun:
                raise
            await error_answer(scope["path"], error)(scope, receive, counted)


def error_answer(path: str, error: Exception) -> Response:
    """The answer to a request that fails, in the form of its API."""
    refused = current().failed(refusal(error))
    return error_response(refused) if path == MESSAGES or path.startswith(f"{MESSAGES}/") else refused.response()


def _body(kind: Any) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def _add_openai(app: FastAPI, service: Service, guarded: list[Any]) -> None:
    @app.post("/v1/completions", dependencies=guarded, openapi_extra=_body(CompletionBody))
    async def post_completions(request: Request) -> Response:
        return await completions(service, request)

    @app.post("/v1/chat/completions", dependencies=guarded, openapi_extra=_body(ChatBody))
    async def post_chat(request: Request) -> Response:
        return await chat(service, request)

    @app.post("/v1/responses", dependencies=guarded, openapi_extra=_body(ResponseBody))
    async def post_responses(request: Request) -> Response:
        return await responses(service, request)

    @app.get("/v1/responses/{name}", dependencies=guarded)
    async def get_response(name: str) -> ResponseAnswer:
        return await service.workers.run(kept_response, service, name)

    @app.get("/v1/responses/{name}/input_items", dependencies=guarded)
    async def get_input_items(name: str) -> dict[str, Any]:
        return await service.workers.run(input_items, service, name)

    @app.delete("/v1/responses/{name}", dependencies=guarded)
    async def delete_response(name: str) -> dict[str, Any]:
        return await service.workers.run(remove_response, service, name)

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=service.created, parent=None if service.models[name] is None else service.name)

    @app.head("/v1/models", dependencies=guarded, include_in_schema=False)
    @app.get("/v1/models", dependencies=guarded)
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in service.models])

    @app.head("/v1/models/{name:path}", dependencies=guarded, include_in_schema=False)
    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> ModelCard:
        service.check_model(name)
        return card(name)


def _add_messages(app: FastAPI, service: Service, guarded: list[Any]) -> None:
    @app.post(MESSAGES, dependencies=guarded, openapi_extra=_body(MessagesBody))
    async def post_messages(request: Request) -> Response:
        return await messages(service, request)

    @app.post(f"{MESSAGES}/count_tokens", dependencies=guarded, openapi_extra=_body(CountBody))
    async def post_count(request: Request) -> Response:
        return await count_tokens(service, request)


def _add_tokens(app: FastAPI, service: Service, guarded: list[Any]) -> None:
    @app.post("/tokenize", dependencies=guarded, openapi_extra=_body(TokenizeBody))
    async def post_tokenize(request: Request) -> Response:
        return await tokenize(service, request)

    @app.post("/detokenize", dependencies=guarded, openapi_extra=_body(DetokenizeBody))
    async def post_detokenize(request: Request) -> Response:
        return await detokenize(service, request)

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_states(app: FastAPI, service: Service, guarded: list[Any]) -> None:
    limits = service.limits

    @app.get("/v1/states", dependencies=guarded)
    async def listed() -> StateList:
        return StateList(data=await service.workers.run(service.states.cards))

    @app.get("/v1/states/{name}", dependencies=guarded)
    async def file(name: str) -> Response:
        content = await service.workers.run(service.states.content, name)
        headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    @app.post("/v1/states", dependencies=guarded)
    async def add(request: Request) -> StateCard:
        content = await read_body(request, limits.state_bytes, limits.body_seconds)
        check_state_type(request)
        name = await service.workers.run(service.states.add_file, content, limits.prompt_tokens)
        return await service.workers.run(service.states.card, name)

    @app.delete("/v1/states/{name}", dependencies=guarded)
    async def remove(name: str) -> dict[str, Any]:
        await service.workers.run(service.states.remove, name)
        return {"id": name, "object": "state", "deleted": True}


def _add_page(app: FastAPI, service: Service) -> None:
    def serve(path: str, name: str, media: str) -> None:
        content = (PAGE / name).read_bytes()

        async def page() -> Response:
            return Response(content, media_type=media, headers=PAGE_HEADERS)

        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)

    for path, (name, media) in PATHS.items():
        serve(path, name, media)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        status = "closing" if service.draining else "ok" if service.engine.alive else "stopped"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
