"""Estimates of recent plans, for the receipts of the flushes that execute them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpumond.model.pools import Expected, Receipt
from gpumond.model.process import ProcessKey

PLANS_OF_ONE = 8
REQUESTERS = 64

Pool = tuple[ProcessKey, str | None, str | None]
"""Process, allocator and device"""

Promises = Mapping[Pool, Expected]


def pool_of(receipt: Receipt) -> Pool:
    return ProcessKey(receipt.pid, receipt.start_ticks), receipt.allocator, receipt.device_uuid


class Plans:
    """Newest plans of each requester, so that no requester's plans displace another's."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Promises]] = {}

    def keep(self, requested_by: str, plan: str, receipts: Iterable[Receipt]) -> None:
        own = self._of.pop(requested_by, {})
        own[plan] = {pool_of(receipt): receipt.expected for receipt in receipts if receipt.expected}
        self._of[requested_by] = dict([*own.items()][-PLANS_OF_ONE:])
        if len(self._of) > REQUESTERS:
            del self._of[next(iter(self._of))]

    def promises(self, requested_by: str, plan: str | None) -> Promises:
        """Return the estimates of a plan; empty if it is unknown or expired."""
        return self._of.get(requested_by, {}).get(plan or "", {})
