"""Device names: index, UUID, beginning of the UUID or PCI address; every error lists the devices."""

from __future__ import annotations

import pytest

from gpumond.facts.errors import AmbiguousDevice, NoSuchDevice
from gpumond.facts.frame import find_device_uuid
from tests.helpers.values import make_device

DEVICES = (
    make_device("GPU-5a3c9a52", index=0, pci_bus_id="00000000:1B:00.0"),
    make_device("GPU-5a77b001", index=1, pci_bus_id="00000000:1C:00.0"),
    make_device("MIG-5a3c0001", index=0, pci_bus_id="00000000:1B:00.0", parent_uuid="GPU-5a3c9a52"),
    make_device("PCI-0000:03:00.0", index=10, pci_bus_id="0000:03:00.0"),
)


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        ("0", "GPU-5a3c9a52"),
        ("10", "PCI-0000:03:00.0"),
        ("GPU-5a3c9a52", "GPU-5a3c9a52"),
        ("GPU-5a7", "GPU-5a77b001"),
        ("gpu-5A3", "GPU-5a3c9a52"),
        ("MIG", "MIG-5a3c0001"),
        ("00000000:1C:00.0", "GPU-5a77b001"),
        ("0000:1c:00.0", "GPU-5a77b001"),
        ("1c:00.0", "GPU-5a77b001"),
        ("GPU-of-an", "GPU-of-an-agent"),
    ],
)
def test_device_uuid_accepts_every_form_of_name(name: str, uuid: str):
    assert find_device_uuid(name, DEVICES, ["GPU-of-an-agent", "GPU-5a3c9a52"]) == uuid


@pytest.mark.parametrize("name", ["GPU-5a", "gpu", "GPU-"])
def test_ambiguous_beginning_of_a_uuid_is_an_error_that_lists_the_matches(name: str):
    with pytest.raises(AmbiguousDevice, match=r"0 \(GPU-5a3c9a52\), 1 \(GPU-5a77b001\)"):
        find_device_uuid(name, DEVICES)


@pytest.mark.parametrize("name", ["2", "", "GPU-b", "1d:00.0", "5a3c"])
def test_unknown_name_is_an_error_that_lists_the_devices(name: str):
    with pytest.raises(NoSuchDevice, match=r"0 \(GPU-5a3c9a52\), 1 \(GPU-5a77b001\), .*an index, a UUID"):
        find_device_uuid(name, DEVICES)


def test_unknown_name_without_any_device_is_an_error():
    with pytest.raises(NoSuchDevice, match="no GPU is known"):
        find_device_uuid("0", ())
