"""Replicas on Ray Serve, which places them, asks for their health, replaces and scales them. Requests do not pass through Ray.

Ray's own proxy and its handles take half a millisecond of Python for each piece of a stream (benchmarks/NOTES.md, "Several servers").
"""

from __future__ import annotations

import logging
import logging.config
import os
import resource
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, MissingExtra
from .door import Door, create_door
from .hosts import known_hosts
from .keys import Keys
from .limits import Limits
from .replica import Replica
from .requestlog import LogFormat, log_config
from .run import DRAIN_SECONDS, LAST_SECONDS, Server, serving
from .service import Service

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

LOG = logging.getLogger("penstock.server")
NAME = "penstock"
"""Of the application in Ray Serve, and of its deployment."""
OBJECT_BYTES = 100 * 2**20
"""Ray's object store, of which replicas need nothing: the least that it takes is about this."""
LOOK_SECONDS = 5
"""A replica that has not answered by then is not counted on until the next look."""
HEALTH_SECONDS = 2


class Served(Replica):
    """A replica as Ray Serve runs it. Ray and ``Replicas.call`` know its methods by their names."""

    def __init__(
        self, make: Callable[[], Service], address: str | None, secret: bytes, drain_seconds: float, log_format: LogFormat,
        otlp_endpoint: str | None,
    ) -> None:  # fmt: skip
        ray, serve = _ray()
        _open_many_files()
        logging.config.dictConfig(log_config(log_format))
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(make, name, address or ray.util.get_node_ip_address(), secret, drain_seconds, otlp_endpoint)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve scales by the number of open requests."""
        return {"open": float(self.open)}

    def __del__(self) -> None:
        """Ray Serve takes the replica away."""
        self.close()


class SlotsForAll:
    """As many replicas as have slots for all open requests: a policy of Ray's autoscaling, which runs in its controller."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state."""
        counts = (context.aggregated_metrics or {}).get("open", {})
        return -int(-sum(counts.values()) // self._slots), {}


@dataclass(frozen=True)
class Plan:
    """Where replicas run, and how many.

    least, most : int
        Different ones let Ray Serve choose by the number of open requests.
    gpu : bool
        One GPU for each replica; else threads.
    threads : int
        CPU cores of each.
    address : str, optional
        Of a Ray cluster, or "auto". Default: Ray is started on this machine, and ends with the server.
    """

    least: int
    most: int
    gpu: bool
    threads: int
    address: str | None = None


class Replicas:
    """Replicas of one model. ``handle`` reaches all of them; ``close`` ends them."""

    def __init__(
        self, make: Callable[[], Service], plan: Plan, slots: int, drain_seconds: float, log_format: LogFormat, otlp_endpoint: str | None
    ) -> None:  # fmt: skip
        ray, serve = _ray()
        self._local = plan.address is None
        self.secret = secrets.token_bytes(32)
        if self._local:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address="local",  # not one that is found
                num_cpus=plan.threads * plan.most, num_gpus=plan.most if plan.gpu else 0, object_store_memory=OBJECT_BYTES,
                include_dashboard=False, log_to_driver=False, logging_level="warning",
            )  # fmt: skip
        else:
            ray.init(address=plan.address, log_to_driver=False, logging_level="warning")
        serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})
        given = (make, "127.0.0.1" if self._local else None, self.secret, drain_seconds, log_format, otlp_endpoint)
        deployment = serve.deployment(Served).options(name=NAME, **_settings(plan, slots, drain_seconds))
        try:
            self.handle: DeploymentHandle[Any] = serve.run(deployment.bind(*given), name=NAME, route_prefix=None)
        except RuntimeError as error:
            *_, told = serve.status().applications[NAME].deployments[NAME].message.strip().splitlines()
            self.close()
            raise EngineError(f"serve: the replicas must start, got {told}") from error

    async def call(self, method: str) -> list[Any]:
        """The results of a method of all replicas that answer."""
        response = self.handle.broadcast(method)
        found = await response.results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        return [one for one in found if not isinstance(one, BaseException)]

    def close(self) -> None:
        """End the replicas; and Ray, if it was started here."""
        ray, serve = _ray()
        if not self._local:
            serve.delete(NAME)
        ray.shutdown()


def make_server(
    make: Callable[[], Service], plan: Plan, host: str, port: int, *, name: str, slots: int, max_queue: int, keys: Keys | None = None,
    origins: Sequence[str] = (), hosts: Sequence[str] = (), drain_seconds: float = DRAIN_SECONDS, log_format: LogFormat = "text",
    otlp_endpoint: str | None = None,
) -> tuple[Server, Replicas]:  # fmt: skip
    """Start replicas; a server that is their door. As ``run.make_server`` for one process.

    make : function
        Makes the service of a replica, in its process.
    """
    _open_many_files()
    replicas = Replicas(make, plan, slots, drain_seconds, log_format, otlp_endpoint)
    door = Door(lambda: replicas.call("about"), lambda: replicas.call("metrics"), replicas.secret, Limits(), max_queue, keys)
    app = create_door(door, name, origins, known_hosts(host, hosts, keyed=keys is not None))
    return serving(app, door, host, port, keys=keys, drain_seconds=drain_seconds, log_format=log_format), replicas


def _settings(plan: Plan, slots: int, drain_seconds: float) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    found: dict[str, Any] = {
        "ray_actor_options": {"num_gpus": 1, "num_cpus": 1} if plan.gpu else {"num_cpus": plan.threads},
        "graceful_shutdown_timeout_s": drain_seconds + 2 * LAST_SECONDS,
        "health_check_period_s": HEALTH_SECONDS,
        "max_constructor_retry_count": 2,
    }
    if plan.least == plan.most:
        return {**found, "num_replicas": plan.least}
    name = f"{__name__}:{SlotsForAll.__name__}"
    policy = AutoscalingPolicy(policy_function=name, policy_kwargs={"slots": slots})
    return {**found, "autoscaling_config": AutoscalingConfig(min_replicas=plan.least, max_replicas=plan.most, policy=policy)}


def _open_many_files() -> None:
    """Each request needs two connections at the door, and one at its replica."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _ray() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise MissingExtra.of("serve", "ray[serve]", "ray") from error
    return ray, serve
