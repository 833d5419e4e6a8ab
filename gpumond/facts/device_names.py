"""Device names that users type: an index, a UUID, the unique beginning of a UUID, or a PCI address. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpumond.facts.errors import AmbiguousDevice, NoSuchDevice
from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import DeviceReading

NAMED_BY = "an index, a UUID or its beginning, or a PCI address"
LISTED = 16
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", re.IGNORECASE)


def device_uuid(name: str, devices: Sequence[DeviceReading], others: Iterable[str] = ()) -> str:
    """Return the UUID of the device with that name.

    ``others`` are UUIDs that the driver does not list, from agents or from the history. Raises NoSuchDevice and
    AmbiguousDevice, whose messages list the devices.
    """
    uuids = dict.fromkeys((*(device.uuid for device in devices), *others))
    if name in uuids:
        return name
    name = re.sub(r"(?i)^gpu\s+(?=\d+$)", "", name)  # as every view names it
    # A partition has the index and the address of its parent; the name then means the parent.
    whole = [device for device in devices if device.parent_uuid is None] or devices
    found = [device.uuid for device in whole if name in (str(device.index), device.pci_bus_id)]
    if not found and (address := _address(name)):
        found = [device.uuid for device in whole if _address(device.pci_bus_id) == address]
    if not found and name:
        found = [uuid for uuid in uuids if uuid.lower().startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise AmbiguousDevice(f"device {name!r:.128} is ambiguous: {_listed(devices, found)}; specify more of the UUID")
    known = f"the devices are {_listed(devices, uuids)}" if uuids else "no device is known"
    raise NoSuchDevice(f"no device {name!r:.128}: {known}; expected {NAMED_BY}")


def _address(text: str) -> tuple[int, ...] | None:
    match = _PCI.fullmatch(text)
    return None if match is None else tuple(int(part or "0", 16) for part in match.groups())


def _listed(devices: Sequence[DeviceReading], uuids: Iterable[str]) -> str:
    indices = {device.uuid: f"{device.index} " for device in devices}
    names = [f"{indices.get(uuid, '')}{uuid}" for uuid in uuids]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def device_named(name: str, frame: Frame | None, uid: int | None = None, others: Iterable[str] = ()) -> str:
    """Return the device's UUID. With ``uid``, devices unknown to the driver are limited to those of that user's agents.

    Raises NoSuchDevice, AmbiguousDevice.
    """
    if frame is None:
        return device_uuid(name, (), others)
    reports = (report for report in frame.snapshot.reports if uid is None or report.uid == uid)
    pools = (pool.device_uuid for report in reports for pool in report.pools)
    return device_uuid(name, frame.snapshot.devices, (*pools, *others))
