"""Metrics in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ..engine import Engine

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)
WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineCollector(Collector):
    """The engine's own counts, read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Metrics of now."""
        stats = self._engine.stats
        gauges = {
            "running": ("Sequences that have a slot", stats.running),
            "waiting": ("Sequences that wait for a slot", stats.waiting),
            "slots": ("Sequences that can run together", stats.slots),
            "prompt_budget": ("Tokens of prompts that a step may have beside those of streams", stats.prompt_budget),
            "pages": ("Pages of keys and values of a hybrid", stats.pages),
            "free_pages": ("Those that neither a sequence nor a kept state has", stats.free_pages),
            "cache_bytes": ("Memory of kept states", stats.cache_bytes),
            "cache_entries": ("Kept states", stats.cache_entries),
        }
        counters = {
            "steps": ("Forward passes", stats.steps),
            "prompt_tokens": ("Tokens of prompts that were computed", stats.prompt_tokens),
            "generated_tokens": ("Generated tokens", stats.generated_tokens),
            "cache_hits": ("Prompts that began at a kept state", stats.cache.hits),
            "cache_misses": ("Prompts that began at no kept state", stats.cache.misses),
            "cache_evictions": ("States that were dropped for others", stats.cache.evictions),
            "cached_tokens": ("Tokens of prompts that were not computed", stats.cache.hit_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"penstock_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"penstock_{name}", text, value)


class HttpMetrics:
    """Counts of answers, in a registry of its own."""

    def __init__(self, prefix: str = "penstock") -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(f"{prefix}_http_answers", "Answers by path and status", ["path", "status"], registry=self._registry)
        self._disconnects = Counter(f"{prefix}_http_disconnects", "Requests whose client disconnected", registry=self._registry)

    def answered(self, path: str, status: int) -> None:
        """Count an answer. ``path`` is that of a route, so clients cannot make new ones."""
        self._answers.labels(path, str(status)).inc()

    def disconnected(self) -> None:
        """Count a client that disconnected."""
        self._disconnects.inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class Metrics(HttpMetrics):
    """All metrics of a server."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._registry.register(EngineCollector(engine))
        self._first = Histogram(
            "penstock_time_to_first_token_seconds", "From a request to the first token of each completion",
            buckets=FIRST, registry=self._registry,
        )  # fmt: skip
        self._between = Histogram(
            "penstock_inter_token_seconds", "Between two tokens of a completion", buckets=BETWEEN, registry=self._registry
        )
        self._whole = Histogram("penstock_request_seconds", "From a request to its last token", buckets=WHOLE, registry=self._registry)

    def tokens(self, count: int, since_begin: float, since_last: float | None) -> None:
        """Tokens of a completion that came together; ``since_last`` is None for the first ones."""
        if since_last is None:
            self._first.observe(since_begin)
        else:
            for _ in range(count):
                self._between.observe(since_last / count)

    def finished(self, seconds: float) -> None:
        """A request that ended with a result."""
        self._whole.observe(seconds)


class DoorMetrics(HttpMetrics):
    """Those of the door, whose replicas count the same requests."""

    def __init__(self) -> None:
        super().__init__("penstock_door")
        self.replicas = Gauge("penstock_replicas", "Replicas that answer", registry=self._registry)


class Replicas(Collector):
    """The metrics of several servers, each with the label ``replica``."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        """Metrics of all."""
        found: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        return found.values()


def of_replicas(texts: Mapping[str, str]) -> bytes:
    """Prometheus' text format of several servers, from those of each by name."""
    registry = CollectorRegistry()
    registry.register(Replicas(texts))
    return generate_latest(registry)
