"""Agent rollout: the admission policy is evaluated against pods, and the hooks of Slurm and enroot are run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond import __version__

DEPLOY = Path(__file__).parents[2] / "deploy"
POLICIES = DEPLOY / "kubernetes/injection"
INJECT = f"/opt/gpumond-agent/{__version__}/gpumond/agent/inject"
Pod = dict[str, Any]

MISSING = (
    "needs Python 3.11 or newer, as the pinned cel-python"
    if sys.version_info < (3, 11)
    else "needs cel-python, which the dev extra brings"
    if util.find_spec("celpy") is None
    else ""
)
with_cel = pytest.mark.skipif(bool(MISSING), reason=MISSING)
GPU = {"limits": {"nvidia.com/gpu": 1, "cpu": "4"}}


def container(name: str = "main", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "i", **fields}


def pod(*containers: dict[str, Any], labels: dict[str, str] | None = None, **spec: Any) -> Pod:
    metadata: dict[str, Any] = {"name": "p"} | ({} if labels is None else {"labels": labels})
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


def policy() -> tuple[dict[str, Any], dict[str, Any]]:
    first, binding = yaml.safe_load_all((POLICIES / "policy.yaml").read_text())
    return first, binding


def as_maps(expression: str) -> str:
    """Return the expression with its typed objects as maps, which an evaluator without the types of Kubernetes can
    construct."""
    maps = re.sub(r"\bObject(?:\.\w+)*\s*\{", "{", expression)
    return re.sub(r"([{,]\s*)(\w+):(?=\s)", r'\1"\2":', maps)


def evaluate(expression: str, **values: Any) -> Any:
    import celpy

    environment = celpy.Environment()
    program = environment.program(environment.compile(as_maps(expression)))
    return plain(program.evaluate({name: celpy.json_to_cel(value) for name, value in values.items()}))


def plain(value: Any) -> Any:
    """Return a value of CEL as one of Python."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return bool(value) if type(value).__name__ == "BoolType" else str(value) if isinstance(value, str) else value


def selected(labels: dict[str, str], selector: dict[str, Any]) -> bool:
    """Return True if the labels match a label selector of Kubernetes."""
    exact = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "NotIn"
        exact = exact and labels.get(each["key"]) not in each["values"]
    return exact


def admitted(given: Pod, namespace: dict[str, str]) -> Pod:
    """Return the pod after the policy: its patch merged as server-side apply merges lists of names."""
    spec = policy()[0]["spec"]
    constraints = spec["matchConstraints"]
    labels = given["metadata"].get("labels", {})
    if not selected(namespace, constraints["namespaceSelector"]) or not selected(labels, constraints["objectSelector"]):
        return given
    if not all(evaluate(each["expression"], object=given) for each in spec["matchConditions"]):
        return given
    variables: dict[str, Any] = {}
    for each in spec["variables"]:
        variables[each["name"]] = evaluate(each["expression"], object=given, variables=variables)
    (mutation,) = spec["mutations"]
    expression = mutation["applyConfiguration"]["expression"]
    patch = evaluate(expression, object=given, variables=variables)
    merged = merge(given, patch)
    assert isinstance(merged, dict)
    return merged


def merge(one: Any, other: Any, key: str = "") -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{name: merge(one.get(name), value, name) for name, value in other.items()}}
    if isinstance(one, list) and isinstance(other, list):
        by = "mountPath" if key == "volumeMounts" else "name"
        found = {entry[by]: entry for entry in one}
        for entry in other:
            found[entry[by]] = merge(found.get(entry[by], {}), entry)
        return list(found.values())
    return other


def variables_of(one: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in one.get("env", [])}


ON = {"gpumond-agent": "on"}
UNTOUCHED: dict[str, tuple[Pod, dict[str, str]]] = {
    "CPU only": (pod(container(resources={"limits": {"cpu": "1"}})), ON),
    "no resources": (pod(container()), ON),
    "no limits": (pod(container(resources={"requests": {"cpu": "1"}})), ON),
    "other namespace": (pod(container(resources=GPU)), {}),
    "opted out": (pod(container(resources=GPU), labels={"gpumond-agent": "off"}), ON),
    "user namespace": (pod(container(resources=GPU), hostUsers=False), ON),
}


@with_cel
@pytest.mark.parametrize(("given", "namespace"), UNTOUCHED.values(), ids=UNTOUCHED)
def test_pods_without_devices_or_that_opt_out_are_unchanged(given: Pod, namespace: dict[str, str]):
    assert admitted(given, namespace) == given


DEVICES: dict[str, dict[str, Any]] = {
    "whole": {"limits": {"nvidia.com/gpu": "1"}},
    "MIG": {"limits": {"nvidia.com/mig-1g.10gb": 1}},
    "AMD": {"limits": {"amd.com/gpu": 2}},
    "Intel": {"limits": {"gpu.intel.com/xe": 1}},
    "DRA": {"claims": [{"name": "gpu"}]},
}


@with_cel
@pytest.mark.parametrize("resources", DEVICES.values(), ids=DEVICES)
def test_pods_with_devices_get_volumes_and_environment(resources: dict[str, Any]):
    given = pod(container(resources=resources), container("logs"), volumes=[{"name": "data", "emptyDir": {}}])
    spec = admitted(given, ON)["spec"]
    main, logs = spec["containers"]
    assert logs == container("logs")
    assert variables_of(main) == {
        "GPUMOND_AGENT": "1",
        "GPUMOND_SOCKET": "/run/gpumond/agent.sock",
        "PYTHONPATH": INJECT,
    }
    assert [(each["mountPath"], each["readOnly"]) for each in main["volumeMounts"]] == [
        ("/opt/gpumond-agent", True),
        ("/run/gpumond", True),
    ]
    assert [each["name"] for each in spec["volumes"]] == ["data", "gpumond-agent", "gpumond-socket"]
    assert {each["hostPath"]["type"] for each in spec["volumes"][1:]} == {"DirectoryOrCreate"}


@with_cel
def test_environment_of_the_container_remains():
    own = [{"name": "PYTHONPATH", "value": "/app"}, {"name": "GPUMOND_WORKLOAD", "value": "mine"}, {"name": "A"}]
    given = pod(container(resources=GPU, env=own), labels={"app": "chat"})
    (main,) = admitted(given, ON)["spec"]["containers"]
    found = variables_of(main)
    assert (found["PYTHONPATH"], found["GPUMOND_WORKLOAD"], found["A"]) == (f"{INJECT}:/app", "mine", "")
    assert main["image"] == "i"


@with_cel
@pytest.mark.parametrize(
    "own",
    [
        {"name": "GPUMOND_AGENT", "value": "0"},
        {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ],
)
def test_containers_with_their_own_configuration_are_unchanged(own: dict[str, Any]):
    given = pod(container(resources=GPU, env=[own]))
    changed = admitted(given, ON)
    assert changed["spec"]["containers"] == given["spec"]["containers"]
    assert not changed["spec"].get("volumes")


@with_cel
@pytest.mark.parametrize(
    ("labels", "workload"),
    [
        ({"app": "chat"}, "chat"),
        ({"app": "chat", "app.kubernetes.io/name": "vllm"}, "vllm"),
        ({"gpumond-workload": "own", "app": "chat"}, "own"),
        ({"job-name": "train-7"}, "train-7"),
        ({"other": "x"}, None),
        (None, None),
    ],
)
def test_workload_is_a_label_of_the_pod(labels: dict[str, str] | None, workload: str | None):
    (main,) = admitted(pod(container(resources=GPU), labels=labels), ON)["spec"]["containers"]
    assert variables_of(main).get("GPUMOND_WORKLOAD") == workload


@pytest.mark.skipif(util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate (pip)")
def test_policy_is_valid_for_kubernetes():
    import kubernetes_validate

    for entry in policy():
        kubernetes_validate.validate(entry, "1.36", strict=True)


def test_policy_and_kyverno_add_the_same():
    first, binding = policy()
    assert binding["spec"] == {"policyName": first["metadata"]["name"]}
    expression = first["spec"]["mutations"][0]["applyConfiguration"]["expression"]
    kyverno = yaml.safe_load((POLICIES / "kyverno.yaml").read_text())
    (rule,) = kyverno["spec"]["rules"]
    (each,) = rule["mutate"]["foreach"]
    added = each["patchStrategicMerge"]["spec"]
    (main,) = added["containers"]
    texts = [*variables_of(main).values(), *(mount["mountPath"] for mount in main["volumeMounts"])]
    texts += [volume["hostPath"]["path"] for volume in added["volumes"]]
    assert [text for text in texts if f'"{text}"' not in expression] == []
    (matched,) = rule["match"]["any"]
    assert matched["resources"]["namespaceSelector"] == first["spec"]["matchConstraints"]["namespaceSelector"]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory as `pip install --target` writes it."""
    directory = tmp_path / "agent"
    (directory / "gpumond/agent/inject").mkdir(parents=True)
    return directory


def run(script: str, **environ: str) -> str:
    done = subprocess.run(
        ["sh", DEPLOY / "slurm" / script], env={"PATH": "/usr/bin:/bin", **environ}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_task_prolog_starts_the_agent_in_tasks_with_devices(installed: Path):
    own = {"GPUMOND_AGENT_DIRECTORY": str(installed)}
    inject = f"{installed}/gpumond/agent/inject"
    task = own | {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_NAME": "train llm\nexport A=x",
        "PYTHONPATH": "/home/a",
    }
    assert run("taskprolog.sh", **task).splitlines() == [
        "export GPUMOND_AGENT=1",
        f"export PYTHONPATH={inject}:/home/a",
        "export GPUMOND_WORKLOAD=trainllmexportAx",
    ]
    assert "WORKLOAD" not in run("taskprolog.sh", **task, GPUMOND_WORKLOAD="mine")
    assert run("taskprolog.sh", **own, SLURM_JOB_NAME="cpu") == ""
    assert run("taskprolog.sh", **own, CUDA_VISIBLE_DEVICES="NoDevFiles", ROCR_VISIBLE_DEVICES="NoDevFiles") == ""
    assert run("taskprolog.sh", **task, GPUMOND_AGENT="0") == ""
    assert run("taskprolog.sh", **task | {"GPUMOND_AGENT_DIRECTORY": "/nonexistent"}) == ""


def test_enroot_hook_mounts_the_agent_and_keeps_the_path_of_the_image(installed: Path, tmp_path: Path):
    socket, environ, mounts = tmp_path / "run", tmp_path / "environ", tmp_path / "mounts"
    socket.mkdir()
    environ.write_text("PATH=/bin\nPYTHONPATH=/app\n")
    own = {
        "GPUMOND_AGENT_DIRECTORY": str(installed),
        "GPUMOND_SOCKET_DIRECTORY": str(socket),
        "ENROOT_ENVIRON": str(environ),
        "ENROOT_MOUNTS": str(mounts),
    }
    run("enroot-hook.sh", **own)
    variables = dict(line.split("=", 1) for line in environ.read_text().splitlines())
    assert variables == {
        "PATH": "/bin",
        "PYTHONPATH": f"{installed}/gpumond/agent/inject:/app",
        "GPUMOND_AGENT": "1",
        "GPUMOND_SOCKET": f"{socket}/agent.sock",
    }
    assert [line.split()[1] for line in mounts.read_text().splitlines()] == [str(installed), str(socket)]
    assert all("ro," in line for line in mounts.read_text().splitlines())


@pytest.mark.parametrize("way", ["job", "image"])
def test_enroot_hook_is_without_effect_if_the_job_or_the_image_opts_out(installed: Path, tmp_path: Path, way: str):
    environ, mounts = tmp_path / "environ", tmp_path / "mounts"
    environ.write_text("GPUMOND_AGENT=0\n" if way == "image" else "PATH=/bin\n")
    before = environ.read_text()
    own = {
        "GPUMOND_AGENT_DIRECTORY": str(installed),
        "GPUMOND_SOCKET_DIRECTORY": str(tmp_path),
        "ENROOT_ENVIRON": str(environ),
        "ENROOT_MOUNTS": str(mounts),
    }
    run("enroot-hook.sh", **own, **({"GPUMOND_AGENT": "0"} if way == "job" else {}))
    assert (environ.read_text(), mounts.exists()) == (before, False)


def test_directory_of_the_variables_starts_the_agent():
    """PYTHONPATH as the policy, the hooks and environment.d set it, with this tree as the directory."""
    root = Path(__file__).parents[2]
    shown = (DEPLOY / "environment.d/50-gpumond.conf").read_text()
    (path,) = re.findall(r"^PYTHONPATH=/opt/gpumond-agent/([^$\n]+)", shown, re.MULTILINE)
    assert INJECT.endswith(path)
    program = "import threading; print([each.name for each in threading.enumerate()], flush=True)"
    environ = {"PATH": "/usr/bin:/bin", "GPUMOND_AGENT": "1", "PYTHONPATH": str(root / path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert "gpumond" in done.stdout
    assert done.stderr == ""
