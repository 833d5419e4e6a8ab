"""Selection of one device, whose processes and history are shown, or of all devices. Pure."""

from __future__ import annotations

from dataclasses import replace

from gpumond.top.rows import DeviceRow, Key, ProcessRow
from gpumond.top.view import View


def device_of(view: View | None, uuid: str | None) -> DeviceRow | None:
    """Return the device, None if it no longer exists."""
    return next((device for device in view.devices if device.uuid == uuid), None) if view else None


def neighbour(view: View, uuid: str | None, step: int) -> str | None:
    """Return the device ``step`` places after the selected one. All devices (None) are one place in the order."""
    places: list[str | None] = [None, *(device.uuid for device in view.devices)]
    at = places.index(uuid) if uuid in places else 0
    return places[(at + step) % len(places)]


def at_index(view: View, index: int) -> str | None:
    """Return the first device with that index. Instances (MIG) have the index of their device."""
    return next((device.uuid for device in view.devices if device.index == index), None)


def processes_on(view: View, uuid: str | None) -> tuple[ProcessRow, ...]:
    """Return the processes on a device and its instances; all processes without a device."""
    if uuid is None:
        return view.processes
    uuids = {uuid, *(device.uuid for device in view.devices if device.parent_uuid == uuid)}
    return tuple(row for row in view.processes if row.key[0] in uuids)


def of_device(view: View, uuid: str | None) -> View:
    """Return the view of one device and its instances; of all devices without a device."""
    if uuid is None:
        return view
    devices = tuple(device for device in view.devices if uuid in (device.uuid, device.parent_uuid))
    return replace(view, devices=devices, processes=processes_on(view, uuid))


def key_of(device: DeviceRow) -> Key:
    """Return the key of the history of a whole device."""
    return device.uuid, None
