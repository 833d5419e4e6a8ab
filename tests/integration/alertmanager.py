"""Real Alertmanager with a receiver."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tests.helpers.alert_listener import Listener
from tests.helpers.running import free_port, until

BINARY = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")


ROUTES = """
route: {{receiver: receiver, group_by: [alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: receiver, webhook_configs: [{{url: "{url}", send_resolved: true}}]}}]
"""


class Alertmanager:
    def __init__(self, directory: Path, receiver: Listener, config: str = ROUTES):
        self.directory, self.url = directory, f"http://127.0.0.1:{free_port()}"
        directory.mkdir()
        (directory / "config.yaml").write_text(config.format(url=receiver.url))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert BINARY
        command = [BINARY, f"--config.file={self.directory}/config.yaml", f"--storage.path={self.directory}/data"]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--cluster.listen-address="]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: self.alerts() is not None)

    def stop(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        self.process = None

    def lose_everything(self) -> None:
        self.stop()
        shutil.rmtree(self.directory / "data")

    def alerts(self) -> list[Any] | None:
        """Return the firing alerts of the Alertmanager; None while it does not respond."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v2/alerts?active=true", timeout=5) as answer:
                return list(json.load(answer))
        except OSError:
            return None
