"""Fake for ONNX Runtime: sessions that write their runs to stdout."""

from __future__ import annotations

import sys
from typing import Any


class RunOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value


class InferenceSession:
    def __init__(self, path: str, providers: list[str]) -> None:
        sys.stdout.write(f"{path} {' '.join(providers)}\n")

    def run(self, output_names: list[str] | None, feed: dict[str, Any], options: RunOptions) -> None:
        sys.stdout.write(f"run {' '.join(feed)} {options.entries}\n")
