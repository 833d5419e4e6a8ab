from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import pytest

from gpumond.commands.serve import add_arguments, choose_source, flags
from gpumond.config.loading import load
from gpumond.facts.errors import ConfigError, SourceUnavailable
from tests.helpers.trees import SysTree


@pytest.mark.parametrize("name", ["nvml", "drm", "sim"])
def test_named_source_is_used(name: str):
    assert choose_source(name) == name


def test_flags_of_prometheus_exporters_are_accepted(tmp_path: Path):
    web = tmp_path / "web.yml"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    given = ["--web.listen-address", ":9400", "--web.config.file", str(web), "--log.level", "debug"]
    settings = load(None, flags(parser.parse_args(given)), environ={})
    assert (settings.listen, settings.web_config, settings.log_level) == ("0.0.0.0:9400", web, "debug")


def test_unknown_log_level_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="must be debug, info, warning or error"):
        load(None, {"log_level": "verbose"}, environ={})


def test_devices_of_all_vendors_are_served(tmp_path: Path):
    tree = SysTree(tmp_path / "sys")
    tree.amdgpu()
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert choose_source("auto", str(tree.root)) == "drm"
        with pytest.raises(SourceUnavailable, match="gpumond demo"):
            choose_source("auto", str(tmp_path))
    else:
        assert choose_source("auto", str(tree.root)) == "all"
        assert choose_source("auto", str(tmp_path)) == "nvml"
