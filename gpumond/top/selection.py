"""Which device is looked at: its processes and its past, or those of all. Pure."""

from __future__ import annotations

from dataclasses import replace

from gpumond.top.rows import DeviceRow, Key, ProcessRow
from gpumond.top.view import View


def device_of(view: View | None, uuid: str | None) -> DeviceRow | None:
    """The device, as long as it is there."""
    return next((device for device in view.devices if device.uuid == uuid), None) if view else None


def beside(view: View, uuid: str | None, step: int) -> str | None:
    """The device so many places further, all of them (None) being one place."""
    places: list[str | None] = [None, *(device.uuid for device in view.devices)]
    at = places.index(uuid) if uuid in places else 0
    return places[(at + step) % len(places)]


def at_index(view: View, index: int) -> str | None:
    """The first device of that index, as instances (MIG) have the index of their card."""
    return next((device.uuid for device in view.devices if device.index == index), None)


def processes_on(view: View, uuid: str | None) -> tuple[ProcessRow, ...]:
    """Those on the device and its instances; without a device all."""
    if uuid is None:
        return view.processes
    uuids = {uuid, *(device.uuid for device in view.devices if device.parent_uuid == uuid)}
    return tuple(row for row in view.processes if row.key[0] in uuids)


def of_device(view: View, uuid: str | None) -> View:
    """The view of one device and its instances; without a device of all."""
    if uuid is None:
        return view
    devices = tuple(device for device in view.devices if uuid in (device.uuid, device.parent_uuid))
    return replace(view, devices=devices, processes=processes_on(view, uuid))


def key_of(device: DeviceRow) -> Key:
    """Of its past as a whole."""
    return device.uuid, None, None
