"""The image and docker-compose.yml, built and run on a base image of Debian files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.container_engine import BASE, Engine
from tests.helpers.machine import ROOT, missing, wheels
from tests.helpers.running import free_port, until

REASON = missing("mmdebstrap", "buildah", "podman", "runc")
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(600)]

IMAGE = "localhost/gpumond:test"
MAX_BYTES = 150_000_000
CONTAINED = ("--network=host", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp")
DEMO = (*CONTAINED, "--env=GPUMOND_SOCKET=/tmp/gpumond/agent.sock")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A container runtime that contains the image."""
    directory = tmp_path_factory.mktemp("engine")
    engine = Engine(directory)
    (directory / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    engine.load(f"docker.io/library/{BASE}")
    given = (f"--volume={wheels()}:/wheels:ro", f"--volume={directory}/pip.conf:/etc/pip.conf:ro")
    try:
        engine.build(IMAGE, *given, str(ROOT))
        yield engine
    finally:
        engine.end()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def demo(engine: Engine) -> Iterator[str]:
    """The demo in a container, which the last of its tests stops."""
    address = f"127.0.0.1:{free_port()}"
    url = f"http://{address}"
    name = engine.run("--detach", *DEMO, f"--env=GPUMOND_URL={url}", IMAGE, "demo", f"--listen={address}")
    try:
        until(lambda: answer(f"{url}/api/v1/agents"))
        yield name
    finally:
        engine("podman", "rm", "--force", "--time=5", name)


def answer(url: str) -> Any:
    """Return the decoded answer, or None while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


def test_image_adds_little_to_its_base(engine: Engine):
    assert engine.size(IMAGE) - engine.size(BASE) <= MAX_BYTES


def test_programs_of_the_demo_are_listed(engine: Engine, demo: str):
    def workloads() -> set[str]:
        status = json.loads(engine("podman", "exec", demo, "gpumond", "status", "--json"))
        return {entry["workload"] for entry in status["agents"]}

    until(lambda: workloads() >= {"train-llm", "chat-api", "notebook", "etl"}, every=0.5)


def test_image_user_is_unprivileged_and_cannot_write(engine: Engine, demo: str):
    status = engine("podman", "exec", demo, "cat", "/proc/1/status")
    assert re.search(r"^Uid:\t10001\t", status, re.MULTILINE)
    assert re.findall(r"^Cap(?:Prm|Eff|Bnd|Amb):\t(\w+)$", status, re.MULTILINE) == ["0" * 16] * 4
    for path in ("/x", "/opt/gpumond/x", "/var/lib/gpumond/x"):
        assert engine("podman", "exec", demo, "python3", "-c", f"open({path!r}, 'w')", check=False) == "1"


def test_health_check_uses_the_program_itself(engine: Engine, demo: str):
    checked = json.loads(engine("podman", "image", "inspect", IMAGE))[0]["Healthcheck"]["Test"]
    assert checked == ["CMD", "gpumond", "status", "--healthy"]
    assert engine("podman", "exec", demo, *checked[1:], check=False) == "0"
    unused_address = f"--env=GPUMOND_URL=http://127.0.0.1:{free_port()}"
    assert engine("podman", "exec", unused_address, demo, *checked[1:], check=False) == "1"


def test_container_stops_in_order(engine: Engine, demo: str):
    engine("podman", "stop", "--time=10", demo)
    assert engine("podman", "inspect", demo, "--format", "{{.State.ExitCode}}") == "0"


def pod(path: str) -> dict[str, Any]:
    """Return the pod specification of a manifest."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kubernetes" / path).read_text())["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("user", ["10001", pytest.param("0", marks=pytest.mark.soak)])
def test_kubernetes_example_starts_the_agent_in_a_program(engine: Engine, tmp_path: Path, user: str):
    """The daemon has no capability and sees the processes of the machine; the program belongs to another user. Its
    image does not know the daemon's user, whom it trusts because root has given that user the directory.
    """
    example, daemons = pod("example/deployment.yaml"), pod("daemonset.yaml")
    (bringer,), (program,) = example["initContainers"], example["containers"]
    environ = [f"--env={entry['name']}={entry['value']}" for entry in program["env"]]
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent").chmod(0o777)  # like an emptyDir
    (tmp_path / "run").mkdir()
    engine.run(
        *("--rm", "--read-only", "--cap-drop=ALL", f"--volume={tmp_path}/agent:/agent", "--entrypoint=python3"),
        *(IMAGE, *bringer["command"][1:]),
    )
    socket, url = f"--volume={tmp_path}/run:/run/gpumond", f"127.0.0.1:{free_port()}"
    if user != "0":
        (giver,) = daemons["initContainers"]
        rights = giver["securityContext"]["capabilities"]["add"]
        engine.run(
            *("--rm", "--user=0:0", *CONTAINED, *(f"--cap-add={right}" for right in rights), socket),
            *("--tmpfs=/var/lib/gpumond", f"--entrypoint={giver['command'][0]}", IMAGE, *giver["command"][1:]),
        )
    variables = {entry["name"]: entry.get("value") for entry in daemons["containers"][0]["env"]}
    options = ("--env=GPUMOND_STATE_DIR=/tmp/state", f"--env=GPUMOND_URL={variables['GPUMOND_URL']}")
    daemon = engine.run(
        *("--detach", *CONTAINED, "--pid=host", f"--user={user}:{user}", *options, socket),
        *(IMAGE, "serve", f"--listen={url}"),
    )
    hosted = engine.run(
        *("--detach", "--user=1000:1000", "--read-only", f"--volume={tmp_path}/agent:/agent:ro", f"{socket}:ro"),
        *(*environ, BASE, "python3", "-c", "import time; time.sleep(600)"),
    )
    try:
        agents = until(lambda: answer(f"http://{url}/api/v1/agents"))
        assert [(entry["workload"], entry["uid"]) for entry in agents] == [("inference", 1000)]
        assert str(agents[0]["pid"]) == engine("podman", "inspect", hosted, "--format", "{{.State.Pid}}")
        assert engine("podman", "exec", "--user=0", hosted, "ls", "/run/gpumond") == "agent.sock"
        for command in (("status",), ("top", "--once"), ("flush", "--all", "--dry-run")):
            output = engine("podman", "exec", daemon, "gpumond", *command, "--json", check=command[0] != "flush")
            assert output == "3" if command[0] == "flush" else '"inference"' in output  # 3: nothing to release
    finally:
        engine("podman", "rm", "--force", "--time=2", daemon, hosted)


@pytest.mark.parametrize("shared", [True, False], ids=["one PID namespace", "two PID namespaces"])
def test_sidecar_receives_reports_of_a_root_program_over_the_volume(engine: Engine, shared: bool):
    """Containers as in deploy/sidecar, and without its line ``pid``: a volume that belongs to the daemon's user."""
    content = yaml.safe_load((ROOT / "deploy/sidecar/compose.yaml").read_text())
    (options,) = [volume["driver_opts"] for volume in content["volumes"].values()]
    daemon, train = (content["services"][name] for name in ("gpumond", "train"))
    engine("podman", "volume", "create", *(f"--opt={key}={value}" for key, value in options.items()), "socket")
    environ = [f"--env={key}={value}" for key, value in train["environment"].items()]
    program = ("python3", IMAGE, "-c", "import time; time.sleep(600)")
    names = ["gpumond-train", "gpumond-sidecar"]
    engine.run(
        *("--detach", f"--name={names[0]}", "--user=0:0", *(f"--volume={place}" for place in train["volumes"])),
        *(*environ, "--entrypoint", *program),
    )
    try:
        engine.run(
            *("--detach", f"--name={names[1]}", *([f"--pid={daemon['pid']}"] if shared else []), *CONTAINED[1:]),
            *(*(f"--volume={place}" for place in daemon["volumes"]), "--env=GPUMOND_STATE_DIR=/tmp/state", IMAGE),
        )
        until(lambda: "train (uid 0)" in agents_of(engine, names[1]), every=0.5)
        look = ("grep", "-qs", "gpm_", "/tmp/gpumond/token")
        around = ("sh", "-c", "exec grep -qs gpm_ /run/gpumond/* /proc/[0-9]*/root/tmp/gpumond/token")
        assert engine("podman", "exec", names[1], *look, check=False) == "0"
        assert engine("podman", "exec", names[0], *around, check=False) == "2"
        assert engine("podman", "exec", names[0], "ls", "/run/gpumond") == "agent.sock"
    finally:
        for name in reversed(names):  # the PID namespace is that of the first one
            engine("podman", "rm", "--force", "--time=2", name, check=False)
        engine("podman", "volume", "rm", "--force", "socket")


def agents_of(engine: Engine, daemon: str) -> list[str]:
    """Return the agents that a daemon without a network knows; none before it responds."""
    program = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9917/api/v1/agents').read().decode())"
    command = ("podman", "exec", daemon, "python3", "-c", program)
    done = subprocess.run(command, env=engine.environ, capture_output=True, text=True, timeout=60)
    agents = json.loads(done.stdout) if done.returncode == 0 else []
    return [f"{agent['workload']} (uid {agent['uid']})" for agent in agents]


def stand_in(engine: Engine, image: str, program: str, directory: str) -> None:
    """Build an image that cannot be pulled here from Debian's package of the same program."""
    binary = shutil.which(program) or ""
    templates = Path(
        "/usr/share/prometheus/alertmanager"
    )  # Debian's Alertmanager has its own files outside the program
    context = engine.directory / program
    context.mkdir()
    shutil.copy(binary, context / "program")
    shutil.copytree(templates, context / "templates")
    (context / "Dockerfile").write_text(
        f"FROM {BASE}\nRUN install -d -o 65534 {directory}\nCOPY program /bin/program\n"
        f"COPY templates {templates}\n"
        'USER 65534\nENTRYPOINT ["/bin/program"]\n'
    )
    engine.build(image, str(context))


@pytest.mark.soak
@pytest.mark.skipif(util.find_spec("podman_compose") is None, reason="needs podman-compose (pip)")
@pytest.mark.skipif(bool(missing("prometheus", "prometheus-alertmanager")), reason="needs prometheus and alertmanager")
def test_compose_file_scrapes_and_notifies_alertmanager(engine: Engine):
    compose = (sys.executable, "-m", "podman_compose", "-f", str(ROOT / "docker-compose.yml"), "--profile=demo")
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    engine("podman", "tag", IMAGE, services["demo"]["image"])
    stand_in(engine, services["prometheus"]["image"], "prometheus", "/prometheus")
    stand_in(engine, services["alertmanager"]["image"], "prometheus-alertmanager", "/alertmanager")
    engine(*compose, "up", "--detach", "--no-build", "demo", "prometheus", "alertmanager")
    try:
        prometheus = "http://127.0.0.1:9090/api/v1"
        until(lambda: (answer(f"{prometheus}/query?query=gpumond_device_up") or {"data": {}})["data"].get("result"), 60)
        variables = until(
            lambda: (answer(f"{prometheus}/alertmanagers") or {"data": {}})["data"].get("activeAlertmanagers")
        )
        assert [entry["url"] for entry in variables] == ["http://localhost:9093/api/v2/alerts"]
        until(lambda: answer("http://127.0.0.1:9093/api/v2/status"))
        engine("podman", "stop", "--time=5", "gpumond_demo_1")
        alerts = until(lambda: answer("http://127.0.0.1:9093/api/v2/alerts"), 300)
        assert {alert["labels"]["alertname"] for alert in alerts} == {"GpumondDaemonDown"}
    finally:
        engine(*compose, "down", "--volumes", "--timeout=2")
