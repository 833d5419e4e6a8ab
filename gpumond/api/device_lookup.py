"""Resolution of a device name in a request, within the current frame."""

from __future__ import annotations

from collections.abc import Iterable

from gpumond.model.device_names import device_uuid
from gpumond.model.frame import Frame


def device_named(name: str, frame: Frame | None, uid: int | None = None, others: Iterable[str] = ()) -> str:
    """Return the device's UUID. With ``uid``, devices unknown to the driver are limited to those of that user's agents.

    Raises NoSuchDevice, AmbiguousDevice.
    """
    if frame is None:
        return device_uuid(name, (), others)
    reports = (report for report in frame.snapshot.reports if uid is None or report.uid == uid)
    pools = (pool.device_uuid for report in reports for pool in report.pools)
    return device_uuid(name, frame.snapshot.devices, (*pools, *others))
