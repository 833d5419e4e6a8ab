"""Addresses of machines: from texts of service discovery, and from the label instance of a series."""

from __future__ import annotations

import pytest

from gpumond.facts.errors import DiscoveryError
from gpumond.features.fleet.connection import Machine, Machines, machine


@pytest.mark.parametrize(
    ("address", "labels", "expected"),
    [
        ("gpu-1", {}, Machine("gpu-1", "http://gpu-1:9917")),
        ("gpu-1:80", {"__scheme__": "https"}, Machine("gpu-1:80", "https://gpu-1:80")),
        ("[::1]:9917", {"instance": "a", "rack": "7"}, Machine("a", "http://[::1]:9917", (("rack", "7"),))),
        ("10.0.0.5", {"__metrics_path__": "/gpu/metrics"}, Machine("10.0.0.5", "http://10.0.0.5:9917/gpu")),
    ],
)
def test_address_of_service_discovery(address: str, labels: dict[str, str], expected: Machine):
    assert machine(address, labels) == expected


@pytest.mark.parametrize(
    ("address", "labels"),
    [
        ("user@gpu-1", {}),
        ("gpu-1/path", {}),
        ("gpu-1\r\nX: y", {}),
        ("gpu-1:0", {}),
        ("gpu-1:99999", {}),
        ("", {}),
        ("gpu-1", {"__scheme__": "file"}),
        ("gpu-1", {"__metrics_path__": "/a b"}),
        ("gpu-1", {"__metrics_path__": "@evil.example"}),
        ("gpu-1", {"instance": "a\x1b[2J"}),
    ],
)
def test_text_that_is_no_address_is_refused(address: str, labels: dict[str, str]):
    with pytest.raises(DiscoveryError):
        machine(address, labels)


@pytest.mark.parametrize(
    ("instance", "url"),
    [
        ("gpu-1", "http://gpu-1:9917"),
        ("gpu-1:9917", "http://gpu-1:9917"),
        ("node-2", "https://10.0.0.2:9917"),
        ("10.0.0.2:9917", "https://10.0.0.2:9917"),
        ("10.0.0.2", "https://10.0.0.2:9917"),
        ("gpu-3:9100", "http://gpu-3:9917"),
        ("gpu-3", "http://gpu-3:9917"),
    ],
)
def test_instance_has_one_address(instance: str, url: str):
    found = Machines(
        (
            machine("gpu-1:9917", {}),
            machine("10.0.0.2:9917", {"instance": "node-2", "__scheme__": "https"}),
            machine("gpu-3", {}),
        )
    )
    assert found.address_of(instance).url == url


@pytest.mark.parametrize("instance", ["gpu-9", "gpu-1:9100", "two"])
def test_instance_without_one_address_is_refused(instance: str):
    found = Machines(
        (machine("gpu-1:9917", {}), machine("a:9917", {"instance": "two"}), machine("b:9917", {"instance": "two"}))
    )
    with pytest.raises(DiscoveryError):
        found.address_of(instance)


def test_machine_that_two_jobs_scrape_is_listed_once():
    plain, dcgm = machine("gpu-1:9917", {"job": "gpumond"}), machine("gpu-1:9917", {"job": "dcgm"})
    assert len(Machines((plain, dcgm)).all) == 1
