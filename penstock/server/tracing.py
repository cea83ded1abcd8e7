"""OpenTelemetry spans of requests: one for HTTP, and below it the wait for a slot, the prompt, and the tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import MissingExtra
from .caller import Caller

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of the environment that OpenTelemetry's exporters read."""


class Tracing:
    """Records spans with a provider. Spans are made when a request has ended, with the times that were noted."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider, self._tracer = provider, provider.get_tracer("penstock", __version__)

    @classmethod
    def configured(cls, endpoint: str | None) -> Tracing | None:
        """Exports to an endpoint by OTLP over HTTP, or to that of the environment; None without either. Raises MissingExtra."""
        if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingExtra.of("serve", "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http", "otel") from error
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "penstock"}
        provider = TracerProvider(resource=Resource.create(named))
        exporter = OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def record(self, method: str, endpoint: str, caller: Caller, headers: Mapping[str, str]) -> None:
        """The spans of a request. They continue the trace of its ``traceparent`` header."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def at(moment: float) -> int:
            return caller.time_ns + round((moment - caller.began) * 1e9)

        parent = TraceContextTextMapPropagator().extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        span = self._tracer.start_span(
            f"{method} {endpoint}", parent, SpanKind.SERVER, _attributes(method, endpoint, caller), start_time=caller.time_ns
        )
        if caller.status is None or caller.status >= 500:
            span.set_status(StatusCode.ERROR)
        ended, below = caller.began + caller.seconds, set_span_in_context(span)
        for name, begin, end in _parts(caller, ended):
            self._tracer.start_span(name, below, start_time=at(begin)).end(at(end))
        span.end(at(ended))


def _attributes(method: str, endpoint: str, caller: Caller) -> dict[str, Any]:
    """By OpenTelemetry's conventions for HTTP and generative models, where they have a name."""
    found: dict[str, Any] = {
        "http.request.method": method, "http.route": endpoint, "http.response.status_code": caller.status or 500,
        "penstock.request_id": caller.id,
    }  # fmt: skip
    if caller.error is not None:
        found["error.type"] = caller.error
    if caller.key.name:
        found["penstock.key"] = caller.key.name
    if caller.generation is not None:
        usage = caller.generation.usage()
        found |= {
            "gen_ai.request.model": caller.model, "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens, "penstock.cached_tokens": usage.prompt_tokens_details.cached_tokens,
        }  # fmt: skip
    return found


def _parts(caller: Caller, ended: float) -> list[tuple[str, float, float]]:
    """The wait for the first slot, the time to the first token, and from there to the last one."""
    done = caller.generation
    if done is None:
        return []
    began = min((one.began for one in done.requests if one.began is not None), default=None)
    marks = [("queue", done.began), ("prompt", began), ("decode", done.first)]
    known = [(name, mark) for name, mark in marks if mark is not None]
    ends = [*(mark for _, mark in known[1:]), ended if done.last is None else done.last]
    return [(name, mark, max(mark, end)) for (name, mark), end in zip(known, ends)]
