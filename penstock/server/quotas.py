"""How much a key may use in a minute: buckets that fill evenly, and OpenAI's headers that tell what they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from .errors import Refused

MINUTE = 60.0


@dataclass
class Bucket:
    """Has at most the amount of a minute, which it gains in a minute. Only the event loop uses it.

    >>> bucket = Bucket("requests", 60, clock=iter([0.0, 1.5]).__next__)
    >>> bucket.wait(60), bucket.take(60), bucket.wait(2)
    (0.0, None, 0.5)
    """

    name: str
    limit: int
    clock: Callable[[], float] = monotonic
    _left: float = field(init=False)
    _time: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._left = float(self.limit)

    @property
    def left(self) -> float:
        """What it has now."""
        now = self.clock()
        if self._time is not None:
            self._left = min(self.limit, self._left + (now - self._time) * self.limit / MINUTE)
        self._time = now
        return self._left

    def wait(self, amount: float) -> float:
        """Seconds until it has an amount."""
        return max(0.0, (amount - self.left) * MINUTE / self.limit)

    def take(self, amount: float) -> None:
        """Take an amount; a negative one gives back."""
        self._left = min(self.limit, self._left - amount)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers."""
        return {
            f"x-ratelimit-limit-{self.name}": str(self.limit),
            f"x-ratelimit-remaining-{self.name}": str(max(0, int(self.left))),
            f"x-ratelimit-reset-{self.name}": f"{self.wait(self.limit):.3f}s",
        }


class Quota:
    """Requests and tokens that a key may use in a minute; None: any number."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.limits = requests, tokens
        self._requests = None if requests is None else Bucket("requests", requests)
        self._tokens = None if tokens is None else Bucket("tokens", tokens)

    def take_request(self) -> None:
        """Count a request. Raises Refused with status 429."""
        self._take(self._requests, 1)

    def take_tokens(self, count: int, function: str) -> None:
        """Reserve the tokens that a request can use. Raises Refused with status 429, or 400 for more than those of a minute."""
        if self._tokens is not None and count > self._tokens.limit:
            rule = f"tokens of the prompts and max_tokens together must be at most {self._tokens.limit}, those of this key in a minute"
            raise Refused(400, f"{function}: {rule}, got {count}. Ask for fewer tokens.", param="max_tokens", code="tokens_exceeded")
        self._take(self._tokens, count)

    async def reserve(self, tokens: int, completions: int, function: str) -> None:
        """Reserve the tokens of a request before it is queued. Raises Refused. Replicas ask the door (``replica.py``)."""
        self.take_tokens(tokens, function)

    def give_back(self, count: int) -> None:
        """Tokens that were reserved and not used."""
        if self._tokens is not None:
            self._tokens.take(-count)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers for both."""
        return {name: value for one in (self._requests, self._tokens) if one is not None for name, value in one.headers().items()}

    @staticmethod
    def _take(bucket: Bucket | None, amount: int) -> None:
        if bucket is None:
            return
        wait = bucket.wait(amount)
        if wait > 0:
            message = f"server: {bucket.name} of a key must be at most {bucket.limit} a minute, got more. Try again in {wait:.3f} seconds."
            headers = {"Retry-After": str(ceil(wait))}
            raise Refused(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        bucket.take(amount)
