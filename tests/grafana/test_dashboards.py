"""Files of the dashboards: up to date, and valid by the rules of Grafana's dashboard-linter and of this project."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml

from gpumond.view.text import COLORS
from tests.grafana.boards import BOARDS, DIRECTORY, NAMES, ROOT, Target, marks, opened, panels, targets, variables
from tools.docs.metrics import document

METRIC = re.compile(r"\bgpumond_\w+")
SERIES = re.compile(r"[a-z_]+:gpumond_[\w:]+|gpumond:[\w:]+|gpumond_\w+")
SELECTOR = re.compile(rf"(?:{SERIES.pattern}|\bup|\bscrape_\w+|\bALERTS(?:_FOR_STATE)?)\{{([^}}]*)\}}")
OWN = set(re.findall(r"^\| `(\w+)`", document(), re.MULTILINE))
SUFFIXES = re.compile(r"_(bucket|count|sum)$")
RULES = yaml.safe_load((ROOT / "deploy/prometheus/gpumond.rules.yaml").read_text())
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
OF_OWNERS = {
    f"gpumond_owner_{name}_bytes"
    for name in ("used", "live", "cached", "stranded", "idle_held", "idle_and_reclaimable")
}
"""Metrics that tables of owners and workloads sum over all machines."""
OF_ALL_MACHINES = OF_OWNERS | {name for name in RECORDED if name.startswith(("workload", "owner"))}
"""Metrics of sums over all machines, without the label instance."""

FEW_OF_A_MACHINE = {
    "gpumond_alerts",
    "gpumond_devices",
    "gpumond_events_total",
    "gpumond_flush_released_bytes_total",
    "gpumond_flushes_total",
    "gpumond_owner_time_to_full_seconds",
    "gpumond_owner_verdicts",
    "gpumond_notifications_failed_total",
    "gpumond_notifications_total",
}
"""Metrics of which a machine has a few series, whatever number of devices and programs it has."""

RUNBOOKS = (ROOT / "docs" / "how-to" / "runbooks.md").read_text()
SECTIONS = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", RUNBOOKS, re.MULTILINE)}
RULE_NAME = "${__value.raw}"

PLAIN_COUNTERS = {
    ("device", "Xid errors", "gpumond_device_xid_errors_total"): "begins at 1: an increase would miss the first",
    ("workload", "Scopes", "gpumond_scope_entries_total"): "divides another sum over all passes",
}
"""Counters that are shown without a rate, with the reason."""

ALL = [*targets(), *marks()]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
@pytest.mark.parametrize("name", NAMES)
def test_dashboard_file_is_up_to_date(name: str):
    from grafana.build import BOARDS as built, text

    assert built.keys() == set(NAMES)
    assert (DIRECTORY / f"{name}.json").read_text() == text(built[name]), "run `python -m grafana.build`"


@pytest.mark.parametrize("name", NAMES)
def test_dashboard_has_a_description_and_cannot_be_edited_in_place(name: str):
    board = BOARDS[name]
    assert (board["uid"], board["title"]) == (f"gpumond-{name}", f"gpumond: {name.capitalize()}")
    assert board["description"].endswith(".")
    assert board["editable"] is False
    assert board["tags"] == ["gpumond"]


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_labeled_described_and_fresh(name: str):
    first, *others = BOARDS[name]["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    assert all(variable["label"] and variable["description"] for variable in others)
    for variable in variables(name):
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert variable["refresh"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_import_asks_for_the_data_source(name: str):
    board = BOARDS[name]
    (asked,) = board["__inputs"]
    assert (asked["type"], asked["pluginId"]) == ("datasource", "prometheus")
    assert board["templating"]["list"][0]["current"]["value"] == f"${{{asked['name']}}}"
    assert {each["id"] for each in board["__requires"]} == {"grafana", "prometheus"}


@pytest.mark.parametrize("name", NAMES)
def test_all_values_of_a_variable_are_not_listed_in_queries(name: str):
    found = {variable["name"]: variable for variable in variables(name)}
    assert [*found][:3] == ["cluster", "job", "machine"]
    for variable in found.values():
        assert variable.get("allValue") == (".*" if variable["includeAll"] else None)
    assert {each for each, variable in found.items() if variable["includeAll"]} >= {"cluster", "job"}


def test_rows_that_not_all_machines_fill_are_collapsed():
    rows = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] == "row"]
    assert [(name, row["title"]) for name, row in rows if row["collapsed"]] == [
        ("fleet", "Released"),
        ("fleet", "Response to alerts"),
        ("device", "Unmapped memory"),
        ("device", "Sensors"),
        ("device", "Health"),
        ("workload", "Steps, utilization and host memory"),
        ("workload", "Details"),
    ]
    assert all(bool(row["panels"]) == row["collapsed"] for _, row in rows)


@pytest.mark.parametrize("target", [*marks()], ids=str)
def test_text_of_an_annotation_consists_of_labels_of_its_series(target: Target):
    (mark,) = (each for each in BOARDS[target.board]["annotations"]["list"] if each["expr"] == target.expression)
    grouped = re.match(r"\w+ by \(([^)]*)\)", target.expression)
    named = set(re.findall(r"{{(\w+)}}", mark["textFormat"]))
    assert named == {"xid"} if grouped is None else named <= set(grouped[1].split(", "))


def panels_of(name: str, *types: str) -> Iterator[dict[str, Any]]:
    return (panel for board, panel in panels() if board == name and (not types or panel["type"] in types))


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_a_description_a_unit_and_the_chosen_source(name: str):
    for panel in panels_of(name):
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel
        assert panel["targets"], panel
        for target in panel["targets"]:
            assert target["expr"].strip(), panel
            assert target["datasource"] == panel["datasource"], panel
            assert target["instant"] != target["range"], panel
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel


@pytest.mark.parametrize("name", NAMES)
def test_single_values_use_instant_queries(name: str):
    for panel in panels_of(name):
        curves = panel["type"] in ("timeseries", "state-timeline")
        assert {target["range"] for target in panel["targets"]} == {curves}, panel


@pytest.mark.parametrize("name", NAMES)
def test_tables_format_numbers_but_not_pids(name: str):
    for panel in panels_of(name, "table"):
        *_, arranged = panel["transformations"]
        renamed = arranged["options"]["renameByName"].items()
        names = {field: column for field, column in renamed if field.startswith("Value")}
        units = {
            entry["matcher"]["options"]: property["value"]
            for entry in panel["fieldConfig"]["overrides"]
            for property in entry["properties"]
            if property["id"] == "unit"
        }
        assert panel["fieldConfig"]["defaults"]["unit"] == "string", panel
        assert units.keys() == set(names.values()), panel
        assert len(names) == len(panel["targets"]), panel


@pytest.mark.parametrize("name", NAMES)
def test_colored_panels_have_thresholds(name: str):
    for panel in panels_of(name, "stat", "bargauge", "state-timeline"):
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None, panel
        assert all(one["value"] < other["value"] for one, other in pairwise(steps[1:])), panel


@pytest.mark.parametrize("name", NAMES)
def test_titles_are_unique_and_panels_fill_their_rows_without_overlapping(name: str):
    board = opened(BOARDS[name])
    titles = [panel["title"] for panel in board]
    assert len(set(titles)) == len(titles)
    assert len({panel["id"] for panel in board}) == len(board)
    taken: dict[tuple[int, int], str] = {}
    for panel in board:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    width, height = max(x for x, _ in taken) + 1, max(y for _, y in taken) + 1
    assert (width, len(taken)) == (24, 24 * height)


def test_queries_use_existing_metrics():
    known = OWN | RECORDED
    for target in ALL:
        used = set(SERIES.findall(target.expression))
        assert {name if name in known else SUFFIXES.sub("", name) for name in used} <= known, target


def test_fleet_reads_sums():
    for target in ALL:
        read = set(SERIES.findall(target.expression))
        of_machines = {name for name in read if name.startswith("gpumond_machine_")}
        assert target.board != "fleet" or read <= RECORDED | FEW_OF_A_MACHINE | OF_OWNERS | of_machines, target


def test_rates_use_the_interval_that_grafana_chooses():
    for target in ALL:
        assert set(re.findall(r"\[([^]]+)\]", target.expression)) <= {"$__rate_interval", "$__range"}, target
        for function, length in re.findall(r"\b(rate|irate|increase)\([^[]*\[([^]]+)\]", target.expression):
            assert length == "$__rate_interval" or function == "increase", target


def test_counters_are_shown_as_rates():
    for target in ALL:
        counted = re.sub(r"\b(rate|increase)\([^[]*\[[^]]+\]\)", "", target.expression)
        plain = {name for name in METRIC.findall(counted) if name.endswith("_total")}
        assert {name for name in plain if (target.board, target.panel, name) not in PLAIN_COUNTERS} == set(), target


def test_queries_are_limited_to_the_chosen_machines():
    for target in ALL:
        names = set(SERIES.findall(target.expression))
        if names and names <= OF_ALL_MACHINES:
            continue
        inner = SELECTOR.findall(target.expression)
        assert any("$machine" in matchers for matchers in inner), target
        for matchers in inner:
            assert "$machine" in matchers or matchers == 'parent_uuid!=""', target


def links(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("url"), str):
            yield value["url"]
        for inner in value.values():
            yield from links(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from links(inner)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_existing_dashboards_and_variables(name: str):
    found = [url for url in links(BOARDS[name]["panels"]) if url.startswith("/d/")]
    for url in found:
        uid, _, query = url.removeprefix("/d/").partition("?")
        other = BOARDS[uid.removeprefix("gpumond-")]
        given = set(re.findall(r"var-(\w+)=", query))
        assert given <= {variable["name"] for variable in other["templating"]["list"]}
        assert query.endswith("&${__url_time_range}")
    others, *pages = BOARDS[name]["links"]
    assert others["tags"] == ["gpumond"]
    assert [link["url"] for link in pages] == (["${page}${machine}/"] if name == "device" else [])
    assert found or name == "daemon"


@pytest.mark.parametrize("name", NAMES)
def test_links_to_runbooks_lead_to_existing_sections(name: str):
    sections = [url.removeprefix("${runbooks}") for url in links(BOARDS[name]) if url.startswith("${runbooks}")]
    assert sections
    assert {section for section in sections if section != RULE_NAME} <= SECTIONS
    variables = BOARDS[name]["templating"]["list"]
    assert [v["query"] for v in variables if v["name"] == "runbooks"] == ["http://localhost:9917/docs/runbooks/"]


def test_shares_have_the_same_colors_everywhere():
    found = 0
    for _, panel in panels():
        names = {target.get("legendFormat") for target in panel["targets"]} & COLORS.keys()
        overrides = {entry["matcher"]["options"]: entry["properties"] for entry in panel["fieldConfig"]["overrides"]}
        for name in names if len(names) > 3 else ():
            colors = [entry["value"] for entry in overrides[name] if entry["id"] == "color"]
            assert colors == [{"mode": "fixed", "fixedColor": COLORS[name]}]
            found += 1
    assert found == 6 + 6 + 5


def test_provisioning_names_existing_files():
    directory = ROOT / "grafana" / "provisioning"
    (source,) = yaml.safe_load((directory / "datasources/gpumond.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((directory / "dashboards/gpumond.yaml").read_text())["providers"]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert provider["options"]["path"] in (ROOT / "grafana/README.md").read_text()


def test_fleet_fits_on_three_screens():
    height = 0
    for panel in BOARDS["fleet"]["panels"]:
        place = panel["gridPos"]
        height += place["h"] if place["x"] == 0 else 0  # those of collapsed rows are within their row
    assert 38 * height <= 2450


def test_out_of_memory_errors_are_bars_in_a_color_of_their_own():
    found = [panel for _, panel in panels() if panel["type"] == "timeseries" and "ooms_total" in str(panel["targets"])]
    assert len(found) == 2
    for panel in found:
        assert panel["fieldConfig"]["defaults"]["custom"]["drawStyle"] == "bars"
        assert "out of memory" in {each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"]}
