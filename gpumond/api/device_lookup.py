"""A device that a request names, in the current frame."""

from __future__ import annotations

from collections.abc import Iterable

from gpumond.model.device_names import device_uuid
from gpumond.model.frame import Frame


def device_named(name: str, frame: Frame | None, uid: int | None = None, others: Iterable[str] = ()) -> str:
    """Its UUID. With ``uid``, of the devices that the driver does not list only those of that user's agents count.

    Raises NoSuchDevice, AmbiguousDevice.
    """
    if frame is None:
        return device_uuid(name, (), others)
    reports = (report for report in frame.snapshot.reports if uid is None or report.uid == uid)
    pools = (pool.device_uuid for report in reports for pool in report.pools)
    return device_uuid(name, frame.snapshot.devices, (*pools, *others))
