"""Each diff in docs/contributing/extend.md applies to this tree, and the part that it adds works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTEND = ROOT / "docs/contributing/extend.md"
SECTIONS = dict(re.findall(r"^## (Add .*?)\n(.*?)(?=^## |\Z)", EXTEND.read_text(), re.DOTALL | re.MULTILINE))
DIFF = re.compile(r"^```diff\n(.*?)^```", re.DOTALL | re.MULTILINE)

SOURCE = """
from gpumond.devices import AUTOMATIC_SOURCES
from gpumond.config.settings import SettingsConfig
from gpumond.devices import load_source
source = load_source(SettingsConfig(source="tegra").source)
source.open()
(device,) = source.read().devices
assert device.unified and device.size_bytes > device.free_bytes > 0
assert [spec.detect("/nowhere") for spec in AUTOMATIC_SOURCES if spec.name == "tegra"] == [False]
from tools.docs.plugins import document
assert "| `tegra` | the GPU of an NVIDIA Jetson |" in document()
"""

ADAPTER = """
import sys
from types import ModuleType, SimpleNamespace
emptied = []
mindspore = ModuleType("mindspore")
mindspore.__version__ = "3.0"
mindspore.runtime = SimpleNamespace(
    empty_cache=lambda: emptied.append(True),
    memory_allocated=lambda: 1 << 20,
    memory_reserved=lambda: 3 << 20,
)
sys.modules["mindspore"] = mindspore
from gpumond.agent.loaded_allocators import ALLOCATORS
(adapter,) = [adapter for adapter in ALLOCATORS.find_adapters() if adapter.name == "mindspore"]
assert adapter.framework() == "mindspore 3.0"
assert adapter._pool("GPU-a").reclaimable.likely == 2 << 20
assert list(adapter.read()) == [] and adapter.flush(("cache",))[0].step == "cache" and emptied
from tools.docs.plugins import document
assert "| `mindspore` | `mindspore` |" in document()
"""

ENGINE = """
import asyncio, json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from gpumond.config.settings import SettingsConfig
from gpumond.features.engines.poller import Engines

posted = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"queue": {"in_progress": 1, "pending": 2, "completed": 3, "failed": 0, "canceled": 0}})
    def do_POST(self):
        posted.append(self.path)
        self.answer({})
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *words): ...

server = HTTPServer(("127.0.0.1", 0), Handler)
Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
config = SettingsConfig(engines=[{"name": "e", "kind": "invokeai", "url": url, "allow": ["engine"]}])
(engine,) = config.settings().engines
engines = Engines()
engines.configure([engine])
state = asyncio.run(engines.read("e"))
assert (state.running, state.waiting, state.work) == (1, 2, (3, 0, 0))
assert asyncio.run(engines.carry_out("e", engine.release_method.release(engine, state), 9)) == ()
assert posted == ["/api/v2/models/empty_model_cache"]
from tools.docs.plugins import document
assert "| `invokeai` | InvokeAI | `empty` | a job that begins" in document()
"""

IMPORTER = """
import io
from gpumond.features.recordings.formats import detect, snapshots
from gpumond.features.recordings.reader import LogLines, Remarks
log = b"device,VRAM Total Memory (B),VRAM Total Used Memory (B)\\ncard0,16,5\\ncard1,16,6\\ncard0,16,7\\n"
lines = LogLines("log", io.BytesIO(log))
assert detect(lines).name == "rocm-smi"
first, second = snapshots(lines, "auto", Remarks("log"), interval_seconds=2.0)
assert [(device.uuid, device.used_bytes) for device in first.devices] == [("card0", 5), ("card1", 6)]
assert all(device.size_bytes == 16 for device in first.devices)
assert (second.elapsed_seconds - first.elapsed_seconds, second.devices[0].used_bytes) == (2.0, 7)
"""

RECEIVER = """
import asyncio, json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from gpumond.config.settings import SettingsConfig
from gpumond.facts.frame import Alert

bodies = []
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words): ...

server = HTTPServer(("127.0.0.1", 0), Handler)
Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
config = SettingsConfig(receivers=[{"name": "n", "type": "ntfy", "topic": "gpus", "url": url}])
alert = Alert(
    rule="leak", phase="firing", labels=(), annotations=(("summary", "it grows"),), value=1.0, active_at=0.0
)
asyncio.run(config.settings().receivers[0].send((alert,), ()))
assert bodies == [{"topic": "gpus", "title": "leak firing", "message": "it grows"}]
from tools.docs.plugins import document
assert "| `ntfy` | `topic` | the messages' topic |" in document()
"""

METRIC = """
from tests.helpers.values import TickState, advance
from gpumond.metrics.catalog import FAMILIES
from tests.helpers.values import make_device, make_process, make_snapshot
frame = advance(TickState(), (), make_snapshot(make_device(processes=(make_process(42, 1),)))).frame
(family,) = [family for family in FAMILIES if family.name == "gpumond_device_processes"]
assert [value for _, value in family.rows(frame)] == [1]
from tools.docs.metrics import document
assert "| `gpumond_device_processes` | gauge |" in document()
"""

VALUE = """
from tests.helpers.values import TickState, advance
from gpumond.features.rules.settings import RuleConfig
from tests.helpers.values import GIB, make_device, make_snapshot
rule = RuleConfig(name="low", scope="device", value="free_ratio", below="10%").rule()
(alert,) = advance(TickState(), (rule,), make_snapshot(make_device(free_bytes=4 * GIB))).frame.alerts
assert (alert.rule, alert.value) == ("low", 0.05)
from tools.docs.rules import document
assert "| `free_ratio` | ratio | free bytes as a fraction of the size |" in document()
"""

VERDICT = """
from tests.helpers.values import TickState, advance
from gpumond.metrics.catalog import FAMILIES
from gpumond.facts.snapshot import Sensors
from gpumond.features.rules.settings import RuleConfig
from tests.helpers.values import make_device, make_snapshot
sensors = Sensors(remapped_rows_failed=True, remapped_rows_uncorrectable=2)
rule = RuleConfig(name="failing", scope="device", value="failing_memory", above=0).rule()
frame = advance(TickState(), (rule,), make_snapshot(make_device(sensors=sensors))).frame
assert [(verdict.kind, verdict.evidence) for verdict in frame.verdicts] == [("failing-memory", (("rows", 2.0),))]
assert [alert.rule for alert in frame.alerts] == ["failing"]
assert "failing-memory" in next(family.help for family in FAMILIES if family.name == "gpumond_verdict")
from tools.docs.verdicts import document
assert "| `failing-memory` | problem | a memory row is faulty" in document()
"""

FEATURE = """
import asyncio, contextlib, io, sys
from types import SimpleNamespace
from fastapi.testclient import TestClient
from starlette.datastructures import State
from gpumond.commands.main import main
from gpumond.features import FEATURES, routers
from gpumond.core import Tick
from gpumond.quantities.window import RuleWindow
from gpumond.facts.frame import Frame, Ledger
from gpumond.serve.app import create_app
from tests.helpers.values import make_device, make_snapshot

(feature,) = [feature for feature in FEATURES if feature.name == "peaks"]
services = {}
core = SimpleNamespace(provide=services.__setitem__, get=services.__getitem__)
part = feature.resolve(feature.parts[0])(core)
for used in (1, 3, 2):
    snapshot = make_snapshot(make_device("GPU-0", used_bytes=used))
    part.act(Tick(frame=Frame(snapshot, Ledger(())), window=RuleWindow()))

app = create_app(State({"core": core}), routers())
assert TestClient(app).get("/api/v1/peaks").json() == {"GPU-0": 3}
with contextlib.redirect_stdout(io.StringIO()) as text:
    main(["--help"])
assert "show the most bytes in use on each device" in text.getvalue()
with contextlib.suppress(SystemExit):
    main(["peaks", "--help"])
"""


@pytest.mark.needs("git")
@pytest.mark.parametrize(
    ("section", "program"),
    [
        ("Add a device source", SOURCE),
        ("Add an adapter for an allocator", ADAPTER),
        ("Add a log importer", IMPORTER),
        ("Add an engine kind", ENGINE),
        ("Add an alert receiver", RECEIVER),
        ("Add a metric", METRIC),
        ("Add a rule value", VALUE),
        ("Add a verdict", VERDICT),
        ("Add a feature", FEATURE),
    ],
)
def test_example_applies_and_works(tmp_path: Path, section: str, program: str):
    for package in ("gpumond", "tools"):
        unfinished = shutil.ignore_patterns("*.pyc.*")  # of other tests that run at the same time
        shutil.copytree(ROOT / package, tmp_path / package, ignore=unfinished)
    (example,) = DIFF.findall(SECTIONS[section])
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PYTHONPATH": str(tmp_path)}
    apply = ["git", "apply", "--whitespace=error", "-C1", "-"]  # -C1: other lines nearby may have changed
    applied = subprocess.run(apply, cwd=tmp_path, env=environment, input=example, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr
    code = f"import gpumond; assert gpumond.__file__.startswith({str(tmp_path)!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
