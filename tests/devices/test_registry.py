"""The registry of sources: what configuration, chart, help and documentation derive from it or repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumond.config.loading import load_settings
from gpumond.devices import SOURCES, SourceSpec
from gpumond.facts.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("spec", SOURCES, ids=lambda spec: spec.name)
def test_source_of_each_record_has_its_name_and_is_configurable(spec: SourceSpec):
    assert spec.type().name == spec.name
    assert load_settings(environ={"GPUMOND_SOURCE": spec.name}).source == spec.name


def test_unknown_source_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'nvlm': expected one of auto, nvml, drm, all, sim"):
        load_settings(environ={"GPUMOND_SOURCE": "nvlm"})


def test_chart_and_command_line_reference_name_every_source():
    schema = json.loads((ROOT / "deploy/helm/gpumond/values.schema.json").read_text())
    names = {spec.name for spec in SOURCES}
    assert set(schema["properties"]["source"]["enum"]) == names
    assert "\\|".join(("auto", *(spec.name for spec in SOURCES))) in (ROOT / "docs/reference/commands.md").read_text()
