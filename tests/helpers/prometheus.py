"""Real Prometheus, queried like Grafana does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.running import free_port, until

STEP_SECONDS = 5
MATCHERS = re.compile(r"^label_values\((?P<series>.+), *(?P<label>\w+)\)$")
RESULT = re.compile(r"^query_result\((?P<expression>.+)\)$", re.DOTALL)


class QueryRefused(Exception):
    """Prometheus refuses the expression."""


class Prometheus:
    """Prometheus that scrapes each second and evaluates the rules of a file.

    ``jobs`` are scrape configurations, by name. ``evaluation``: the interval of the rules. ``others``: further keys of
    its configuration. ``flags``: further options of its command. ``blocks``: a directory with data that it begins with.
    """

    def __init__(
        self,
        directory: Path,
        jobs: Mapping[str, Mapping[str, Any]],
        rules: Path | None = None,
        evaluation: str = "1s",
        others: Mapping[str, Any] | None = None,
        external_labels: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        blocks: Path | None = None,
    ) -> None:
        directory.mkdir()
        if blocks is not None:
            shutil.copytree(blocks, directory / "data")
        configs = [{"job_name": name, **job} for name, job in jobs.items()]
        config: dict[str, Any] = {
            "global": {
                "scrape_interval": "1s",
                "evaluation_interval": evaluation,
                "external_labels": dict(external_labels or {}),
            },
            "scrape_configs": configs,
            **(others or {}),
        }
        if rules is not None:
            groups = [{**group, "interval": evaluation} for group in yaml.safe_load(rules.read_text())["groups"]]
            (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
            config["rule_files"] = ["rules.yaml"]
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.since = time.time()
        command = ["prometheus", f"--config.file={directory / 'prometheus.yaml'}"]
        command += [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
        command += flags
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            until(self._ready)
        except AssertionError:
            self.stop()
            raise

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        self._process.kill()  # its data is that of one test
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def ask(self, route: str, **parameters: str | float) -> Any:
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{route}", data, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise QueryRefused(json.load(error)["error"]) from None

    def instant(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the series that have a value now, or at that time."""
        found = self.ask("query", query=expression, **({"time": at} if at else {}))["result"]
        return [series for series in found if series["value"][1] != "NaN"]

    def over_time(self, expression: str, end: float | None = None) -> list[dict[str, Any]]:
        """Return the series that had a value since the start. Calls with the same ``end`` have the same times."""
        end = end or time.time()
        steps = int((end - self.since) // STEP_SECONDS)
        answer = self.ask("query_range", query=expression, start=end - steps * STEP_SECONDS, end=end, step=STEP_SECONDS)
        return [series for series in answer["result"] if any(value != "NaN" for _, value in series["values"])]

    def choices(self, query: str, pattern: str = "") -> list[str]:
        """Return the values of a variable: ``label_values`` or ``query_result``, cut by the regular expression."""
        if labels := MATCHERS.match(query):
            found = self.ask("series", **{"match[]": labels["series"], "start": self.since, "end": time.time()})
            return sorted({series[labels["label"]] for series in found if labels["label"] in series})
        result = RESULT.match(query)
        assert result, f"a variable asks neither for label_values nor for query_result: {query}"
        return [cut(as_text(series), pattern) for series in self.instant(result["expression"])]


def as_text(series: Mapping[str, Any]) -> str:
    """Format a series like Grafana's ``query_result``."""
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(series["metric"].items()) if name != "__name__")
    return f"{series['metric'].get('__name__', '')}{{{labels}}} {series['value'][1]} {series['value'][0]}"


def cut(text: str, pattern: str) -> str:
    """Return the group ``value`` of a regular expression in Grafana's notation."""
    found = re.search(pattern.strip("/").replace("(?<", "(?P<"), text)
    assert found, f"{pattern} does not match {text}"
    return found["value"]


def fill(expression: str, chosen: Mapping[str, Sequence[str]]) -> str:
    """Replace variables and intervals like Grafana; several values become a regular expression."""
    for name, values in chosen.items():
        text = values[0] if len(values) == 1 else "(" + "|".join(re.escape(value) for value in values) + ")"
        expression = expression.replace(f'"${name}"', f'"{text}"'.replace("\\", "\\\\"))
    intervals = {"$__rate_interval": "10s", "$__range": "300s", "$__interval_ms": f"{STEP_SECONDS}000"}
    intervals["$__interval"] = f"{STEP_SECONDS}s"  # after the longer names
    for name, length in intervals.items():
        expression = expression.replace(name, length)
    return expression
