"""All quotas of one provider: a call passes every one of them, or is charged by (almost) none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from tokenflow._usage import Usage

from ._answer import Booking
from ._quota import Denial, FakeQuota, Ledger, Level
from ._request import FakeRequest

__all__ = ["Door"]


@final
class Door:
    """The quotas, and a ledger for each, or for each of its models or keys."""

    __slots__ = ("_assumed_output", "_ledgers", "quotas")

    def __init__(self, quotas: Sequence[FakeQuota], assumed_output: int) -> None:
        self.quotas: tuple[FakeQuota, ...] = tuple(quotas)
        self._assumed_output = assumed_output
        self._ledgers: dict[tuple[FakeQuota, str], Ledger] = {}

    def admit(self, request: FakeRequest, booking: Booking) -> Denial | None:
        """Charge all, or tell which of those that refuse takes longest."""
        ledgers, now = self._of(request.model, request.key), booking.call.arrived
        denials = {
            ledger: denial
            for ledger in ledgers
            if (denial := ledger.denial(self._needed(ledger, request), now))
        }
        for ledger in ledgers:
            if not denials or (ledger.quota.counts_refused and ledger not in denials):
                booking.charge(ledger, ledger.quota.at_arrival(request, self._assumed_output), now)
        if not denials:
            booking.admit(request, ledgers)
        return max(denials.values(), key=lambda denial: denial.wait or 0.0, default=None)

    def _needed(self, ledger: Ledger, request: FakeRequest) -> int:
        return ledger.quota.needed(request, self._assumed_output)

    def levels(self, request: FakeRequest, now: float) -> list[Level]:
        """Where those stand that have a period."""
        ledgers = self._of(request.model, request.key)
        return [ledger.level(now) for ledger in ledgers if ledger.quota.rule != "concurrency"]

    def consume(self, usage: Usage, model: str, key: str, now: float) -> None:
        """Charge what another client uses, as far as there is room."""
        for ledger in self._of(model, key):
            if ledger.quota.rule != "concurrency":  # nobody would ever end it
                unit = "total_tokens" if ledger.quota.of == "tokens" else ledger.quota.of
                ledger.charge_foreign(getattr(usage, unit), now)

    def consume_share(self, share: float, seconds: float, model: str, key: str, now: float) -> None:
        """Charge this share of what has been refilled in so many seconds."""
        for ledger in self._of(model, key):
            if ledger.quota.rule != "concurrency":
                ledger.charge_foreign(share * ledger.quota.limit * seconds / ledger.quota.per, now)

    def worst_window(self, name: str, seconds: float | None) -> int:
        """Of the quota's ledgers the largest."""
        if name not in (names := [quota.name for quota in self.quotas]):
            raise ValueError(f"no quota is named {name!r}; there are {names}")
        ledgers = [ledger for ledger in self._ledgers.values() if ledger.quota.name == name]
        return max((each.worst_window(seconds) for each in ledgers), default=0)

    def foreign(self) -> dict[str, int]:
        """What other clients took, by quota."""
        taken = dict.fromkeys((quota.name for quota in self.quotas), 0.0)
        for ledger in self._ledgers.values():
            taken[ledger.quota.name] += ledger.foreign
        return {name: round(amount) for name, amount in taken.items()}

    def _of(self, model: str, key: str) -> list[Ledger]:
        owners: Mapping[str | None, str] = {None: "", "model": model, "key": key}
        return [self._ledger(quota, owners[quota.by]) for quota in self.quotas]

    def _ledger(self, quota: FakeQuota, owner: str) -> Ledger:
        if (quota, owner) not in self._ledgers:
            self._ledgers[quota, owner] = Ledger(quota)
        return self._ledgers[quota, owner]
