from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from gpumond.cli.serve import choose_source
from gpumond.errors import SourceUnavailable
from tests.sources.trees import SysTree


@pytest.mark.parametrize("name", ["nvml", "drm", "sim"])
def test_named_source_is_used(name: str):
    assert choose_source(name) == name


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
        assert choose_source("auto", str(tree.root)) == "every"
        assert choose_source("auto", str(tmp_path)) == "nvml"
