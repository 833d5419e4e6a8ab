"""Metrics for dcgm-exporter's dashboards and rules: names, labels, units."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as families

from gpumond.facts.frame import Frame, Ledger
from gpumond.facts.snapshot import Sensors, SourceState, XidErrors
from gpumond.metrics import dcgm
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.exposition import ALL_GROUPS, Exposition, FrameCollector, Group, ScrapeFormat
from gpumond.metrics.telemetry import Telemetry
from tests.helpers.values import make_device, make_process, make_snapshot

GOLDEN: Mapping[Compat, Path] = {
    "dcgm-4.9": Path(__file__).with_name("dcgm.txt"),
    "dcgm-4.7": Path(__file__).with_name("dcgm-4.7.txt"),
}
MIB = 1 << 20
DASHBOARD_12239 = {"DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL"}
LABELS = {"gpu", "UUID", "pci_bus_id", "device", "modelName"}

SENSORS = Sensors(
    gpu_utilization_ratio=0.29,  # times 100 is not 29 in floating point
    memory_controller_utilization_ratio=0.61,
    sm_clock_hertz=1.98e9,
    memory_clock_hertz=3.201e9,
    gpu_temperature_celsius=64.0,
    power_watts=612.345,
    energy_joules=8_100_000.123,
    encoder_utilization_ratio=0.0,
    decoder_utilization_ratio=0.07,
    memory_temperature_celsius=71.0,
    pcie_replays=3,
    ecc_corrected_volatile=1,
    ecc_corrected_aggregate=12,
    ecc_uncorrected_volatile=0,
    ecc_uncorrected_aggregate=2,
    remapped_rows_correctable=4,
    remapped_rows_uncorrectable=5,
    remapped_rows_failed=False,
    xid_events=True,
    sm_active_ratio=0.625,
    tensor_active_ratio=0.25,
    pcie_transmit_bytes_per_second=1.5e9,
    nvlink_receive_bytes_per_second=2.0e11,
)


def make_frame() -> Frame:
    """Return a frame with a device that has two Xids, a MIG device with an instance, and a device of another vendor."""
    nvidia = {"vendor": "nvidia", "reserved_bytes": 512 * MIB, "sensors": SENSORS}
    h200 = make_device("GPU-a", name="NVIDIA H200", pci_bus_id="00000000:1B:00.0", used_bytes=1000 * MIB, **nvidia)
    h100 = make_device("GPU-b", index=1, name="NVIDIA H100", pci_bus_id="00000000:2B:00.0", free_bytes=MIB, **nvidia)
    instance = make_device(
        *("MIG-c",),
        index=1,
        name="NVIDIA H100 MIG 1g.10gb",
        vendor="nvidia",
        parent_uuid="GPU-b",
        gpu_instance_id=7,
        size_bytes=9984 * MIB,
        used_bytes=12 * MIB + MIB // 2,
    )
    other = make_device("pci-0000:03:00.0", index=2, name="Radeon", vendor="amd")
    xids = (XidErrors("GPU-a", 79, 2, 10.0), XidErrors("GPU-a", 31, 1, 20.0), XidErrors("GPU-a", 48, 9, 5.0))
    source = SourceState(name="nvml", up=True, responsive=True, driver_version="580.65.06")
    return Frame(make_snapshot(h200, h100, instance, other, source=source, xids=xids), Ledger())


def page(frame: Frame | None = None, compat: Compat = "dcgm-4.8") -> str:
    registry = CollectorRegistry()
    registry.register(FrameCollector(partial(dcgm.metrics, frame or make_frame(), compat, "node-1")))
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """Return the samples by name, UUID and MIG instance."""
    return {
        (sample.name, sample.labels["UUID"], sample.labels.get("GPU_I_ID", "")): sample.value
        for family in families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("compat", GOLDEN)
def test_text_equals_the_golden_file(compat: Compat):
    """Regenerate the files with ``python -m tests.metrics.test_dcgm``."""
    assert page(compat=compat) == GOLDEN[compat].read_text()


def test_version_4_8_differs_in_the_label_of_the_host_only():
    pairs = zip(families(page(compat="dcgm-4.8")), families(page(compat="dcgm-4.7")), strict=True)
    for new, former in pairs:
        assert (new.name, new.type, new.documentation) == (former.name, former.type, former.documentation)
        for sample, other in zip(new.samples, former.samples, strict=True):
            labels = {"hostname" if label == "Hostname" else label: text for label, text in other.labels.items()}
            assert (sample.labels, sample.value) == (labels, other.value)
    assert page(compat="dcgm") == page(compat="dcgm-4.9")


def test_version_4_9_has_base_units():
    new, former = samples(page(compat="dcgm-4.9")), samples(page(compat="dcgm-4.8"))
    assert len(new) == len(former)
    for family in dcgm.FAMILIES:
        for (name, uuid, instance), value in former.items():
            if name == family.name(True):
                assert new[family.name(False), uuid, instance] * family.unit.factor == pytest.approx(value)
    assert new["DCGM_FI_DEV_FB_USED_BYTES", "GPU-a", ""] == 1000 * MIB
    assert new["DCGM_FI_DEV_SM_CLOCK_HERTZ", "GPU-a", ""] == 1.98e9
    assert new["DCGM_FI_DEV_GPU_UTIL_RATIO", "GPU-a", ""] == 0.29
    assert new["DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", "GPU-a", ""] == 8_100_000.123


def test_dashboard_12239_has_all_families_that_nvml_provides():
    found = samples(page())
    assert {name for name, uuid, _ in found if uuid == "GPU-a"} >= {*DASHBOARD_12239, "DCGM_FI_DEV_FB_USED"}
    assert found["DCGM_FI_DEV_GPU_UTIL", "GPU-a", ""] == 29
    assert found["DCGM_FI_DEV_SM_CLOCK", "GPU-a", ""] == 1980
    assert found["DCGM_FI_DEV_FB_USED", "GPU-a", ""] == 1000
    assert found["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "GPU-a", ""] == 8_100_000_123


@pytest.mark.parametrize(
    ("compat", "host", "driver"),
    [
        ("dcgm-4.7", "Hostname", "DCGM_FI_DRIVER_VERSION"),
        ("dcgm-4.8", "hostname", "DCGM_FI_DRIVER_VERSION"),
        ("dcgm-4.9", "hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION"),
    ],
)
def test_labels_are_dcgms(compat: Compat, host: str, driver: str):
    labels = LABELS | {host, driver}
    for family in families(page(compat=compat)):
        for sample in family.samples:
            own = sample.labels.keys() - {"err_code", "pod", "namespace", "container"}
            assert own in (labels, labels | {"GPU_I_PROFILE", "GPU_I_ID"})
            assert sample.labels["device"] == f"nvidia{sample.labels['gpu']}"
            assert (sample.labels[host], sample.labels[driver]) == ("node-1", "580.65.06")


def test_memory_families_use_mig_instances_and_others_the_gpu():
    found = samples(page())
    assert found["DCGM_FI_DEV_FB_USED", "GPU-b", "7"] == 12.5
    assert ("DCGM_FI_DEV_FB_USED", "GPU-b", "") not in found
    assert ("DCGM_FI_DEV_GPU_TEMP", "GPU-b", "") in found
    assert ("DCGM_FI_DEV_GPU_TEMP", "GPU-b", "7") not in found
    assert 'GPU_I_PROFILE="1g.10gb"' in page()


def test_activity_is_a_ratio_and_traffic_bytes_a_second():
    found = samples(page())
    assert found["DCGM_FI_PROF_SM_ACTIVE", "GPU-a", ""] == 0.625
    assert found["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "GPU-a", ""] == 0.25
    assert found["DCGM_FI_PROF_PCIE_TX_BYTES", "GPU-a", ""] == 1.5e9
    assert found["DCGM_FI_PROF_NVLINK_RX_BYTES", "GPU-a", ""] == 2e11
    assert ("DCGM_FI_PROF_DRAM_ACTIVE", "GPU-a", "") not in found


IN_POD = {"pod_name": "llama-0", "pod_namespace": "research", "container_name": "main"}


@pytest.mark.parametrize(
    ("processes", "labels"),
    [
        ([], {}),
        ([IN_POD, IN_POD], {"pod": "llama-0", "namespace": "research", "container": "main"}),
        ([IN_POD, {}], {"pod": "llama-0", "namespace": "research", "container": "main"}),
        ([IN_POD | {"container_name": None}], {"pod": "llama-0", "namespace": "research", "container": ""}),
        ([IN_POD, IN_POD | {"container_name": "other"}], {}),
        ([IN_POD, IN_POD | {"pod_name": "llama-1"}], {}),
        ([{"container_name": "main"}], {}),
    ],
)
def test_device_of_one_container_has_its_pods_labels(processes: list[dict[str, str]], labels: dict[str, str]):
    used = tuple(make_process(pid, **fields) for pid, fields in enumerate(processes, 1))
    frame = Frame(make_snapshot(make_device(vendor="nvidia", processes=used)), Ledger())
    for family in families(page(frame)):
        for sample in family.samples:
            assert {k: v for k, v in sample.labels.items() if k in ("pod", "namespace", "container")} == labels


def test_xid_is_the_last_one_and_zero_only_with_subscribed_events():
    found = samples(page())
    assert found["DCGM_FI_DEV_XID_ERRORS", "GPU-a", ""] == 31
    assert found["DCGM_FI_DEV_XID_ERRORS", "GPU-b", ""] == 0
    assert 'err_code="31"' in page()
    deaf = Frame(make_snapshot(make_device(vendor="nvidia")), Ledger())
    assert samples(page(deaf)) == {
        ("DCGM_FI_DEV_FB_TOTAL", "GPU-a", ""): 81920,
        ("DCGM_FI_DEV_FB_USED", "GPU-a", ""): 0,
    }


def test_page_has_dcgm_names_alone_or_both():
    frame, telemetry = make_frame(), Telemetry()
    alone = Exposition(telemetry).scrape(frame, ScrapeFormat(False, "dcgm")).body.decode()
    both = Exposition(telemetry, additional="dcgm").scrape(frame, ScrapeFormat(False)).body.decode()
    plain = Exposition(telemetry).scrape(frame, ScrapeFormat(False)).body.decode()

    def names(text: str) -> set[str]:
        return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))

    assert {name for name in names(alone) if not name.startswith("DCGM_")} == {"gpumond_device_xid_errors_total"}
    assert names(both) == names(plain) | names(alone)
    assert not [name for name in names(plain) if name.startswith("DCGM_")]


@pytest.mark.parametrize("group", ["device", "process", "daemon"])
def test_page_of_a_group_is_a_part_of_the_page(group: Group):
    """The groups divide the page, and the names of an exporter are those of devices."""
    frame, telemetry = make_frame(), Telemetry()

    def names(groups: frozenset[Group]) -> list[str]:
        page = Exposition(telemetry, additional="dcgm").scrape(frame, ScrapeFormat(False, groups=groups)).body.decode()
        return re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)

    own = names(frozenset({group}))
    assert sorted(own + names(ALL_GROUPS - {group})) == sorted(names(ALL_GROUPS))
    assert any(name.startswith("DCGM_") for name in own) == (group == "device")
    assert ("gpumond_process_memory_used_bytes" in own) == (group == "process")
    assert ("gpumond_ticks_skipped_total" in own) == (group == "daemon")


@pytest.mark.needs("promtool")
def test_promtool_reads_it():
    """Complaints about names and labels concern dcgm-exporter's names, which cannot be changed here."""
    text = Exposition(Telemetry()).scrape(make_frame(), ScrapeFormat(False, "dcgm")).body.decode()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    complaints = {line.partition(" ")[2] for line in checked.stderr.splitlines() + checked.stdout.splitlines()}
    assert checked.returncode in (0, 3), checked.stderr
    assert complaints <= {
        "metric name should not include type 'counter'",
        'non-counter metrics should not have "_total" suffix',
        "label names should be written in 'snake_case' not 'camelCase'",
    }


if __name__ == "__main__":
    for version, path in GOLDEN.items():
        path.write_text(page(compat=version))
