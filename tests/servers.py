"""How providers count, as plain models: what a client's limiter is compared with."""

from typing import Any, Protocol

PER = 60.0


class Server(Protocol):
    """One quota of one account."""

    limit: int

    def take(self, cost: int, now: float) -> float:
        """0.0 if that was admitted, else the seconds until it would be."""

    def said(self, now: float) -> dict[str, Any]:
        """What a response says about the quota: limit, remaining and reset."""


class Bucket:
    """It refills steadily, and holds a minute's worth."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = self._at = 0.0

    def _refill(self, now: float) -> None:
        self._used = max(0.0, self._used - (now - self._at) * self.limit / PER)
        self._at = now

    def take(self, cost: int, now: float) -> float:
        self._refill(now)
        over = self._used + cost - self.limit
        if over > 1e-6:
            return over * PER / self.limit
        self._used += cost
        return 0.0

    def said(self, now: float) -> dict[str, Any]:
        self._refill(now)
        reset = self._used * PER / self.limit
        return {"limit": self.limit, "remaining": int(self.limit - self._used), "reset": reset}


class Minute:
    """A sum, forgotten at each full minute of its own clock."""

    def __init__(self, limit: int, phase: float = 0.0) -> None:
        self.limit = limit
        self._phase = phase
        self._minute = self._used = 0

    def _left(self, now: float) -> float:
        minute, second = divmod(now + self._phase, PER)
        if minute != self._minute:
            self._minute, self._used = int(minute), 0
        return PER - second

    def take(self, cost: int, now: float) -> float:
        left = self._left(now)
        if self._used + cost > self.limit:
            return left
        self._used += cost
        return 0.0

    def said(self, now: float) -> dict[str, Any]:
        left = self._left(now)
        return {"limit": self.limit, "remaining": self.limit - self._used, "reset": left}
