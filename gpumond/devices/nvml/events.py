"""XID errors: subscribed to continuously, and fetched at each reading without waiting.

NVML queues events for a registered process. The counts start with this process; the supervisor adds the counts of
successive children, so that a restart does not reset them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from gpumond.devices.nvml.inventory import Device, Refusal, Unsupported
from gpumond.devices.nvml.library import Library, functions
from gpumond.devices.validation import Tally
from gpumond.facts.snapshot import XidErrors

MOST_AT_ONCE = 256
"""Number of events fetched in one reading; the others are fetched at the next."""

RETRY_SECONDS = 10.0


class XidEvents:
    """Subscription to XID events. ``wall`` is unix time, ``clock`` monotonic seconds."""

    def __init__(self, library: Library, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._library, self._clock, self._wall = library, clock, wall
        self._set: Any = None
        self._uuids: dict[int | None, str] = {}
        """UUIDs of subscribed devices by the address behind their handle; a lost device may still send events."""
        self._registered: set[str] = set()
        self._retry_at = float("-inf")
        self._trouble = Tally()
        self._counts: dict[tuple[str, int], XidErrors] = {}

    @property
    def counts(self) -> tuple[XidErrors, ...]:
        return tuple(self._counts.values())

    def is_registered(self, device: Device) -> bool | None:
        return True if device.uuid in self._registered else None

    def listen(self, devices: Iterable[Device]) -> None:
        """Subscribe to the events of new and returned devices."""
        present = {device.uuid: device for device in devices if device.handle is not None}
        self._registered &= present.keys()
        if self._clock() < self._retry_at:
            return
        self._trouble = Tally()
        new = [
            device for uuid, device in present.items() if uuid not in self._registered and device.parent_uuid is None
        ]
        try:
            self._set = self._set or (self._library.query(functions("nvmlEventSetCreate")) if new else None)
        except Refusal as refusal:
            self._fail(None, refusal)
            return
        for device in new:
            self._library.at(device.index)
            arguments = (device.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
            try:
                self._library.query(functions("nvmlDeviceRegisterEvents"), *arguments)
            except Refusal as refusal:
                self._fail(device.uuid, refusal)
            else:
                self._uuids[_address(device.handle)] = device.uuid
                self._registered.add(device.uuid)

    def fetch(self, tally: Tally) -> None:
        """Count the events since the last call."""
        for _ in range(MOST_AT_ONCE if self._uuids else 0):
            try:
                event = self._library.query(functions("nvmlEventSetWait_v2"), self._set, 0)
            except Refusal as refusal:
                if refusal.kind != "timeout":
                    self._fail(None, refusal)
                    self.close()  # one lost device may invalidate the whole set
                break
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                key = (uuid, int(event.eventData))
                before = self._counts.get(key)
                self._counts[key] = XidErrors(*key, (before.count if before else 0) + 1, self._wall())
        tally.extend(self._trouble)

    def close(self) -> None:
        if self._set is not None:
            events, self._set = self._set, None
            self._uuids.clear()
            self._registered.clear()
            try:
                pynvml.nvmlEventSetFree(events)
            except pynvml.NVMLError:
                pass  # the driver is already unloaded

    def _fail(self, uuid: str | None, refusal: Refusal) -> None:
        self._retry_at = self._clock() + RETRY_SECONDS
        if not isinstance(refusal, Unsupported):
            self._trouble.add(uuid, refusal.kind, f"XID events: {refusal}")


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
