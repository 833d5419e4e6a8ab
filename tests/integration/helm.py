"""Program that renders a chart with Helm's own engine, by an installation into a fake Kubernetes API.

python helm.py CHART < {"defaults": values, "cases": {"case": values}} > {"case": {"objects": [...], "lint": worst} |
{"refused": "reason"}}

Helm lints a chart with its own values only, so each case is linted as a chart with the case's values as defaults. It
requires helm-sdkpy, which requires Python 3.12, and nothing of gpumond.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helm_sdkpy

KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount", "Namespace"),
    "apps/v1": ("DaemonSet", "Deployment"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding"),
    "monitoring.coreos.com/v1": ("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    "admissionregistration.k8s.io/v1": ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"),
    "kyverno.io/v1": ("ClusterPolicy",),
}
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: stub, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: stub, context: {{cluster: stub, user: stub}}}}]
users: [{{name: stub, user: {{}}}}]
current-context: stub
"""


def plural(kind: str) -> str:
    return f"{kind[:-1]}ies".lower() if kind.endswith("y") else f"{kind}s".lower()


def discovery(path: str) -> dict[str, Any] | None:
    """Capabilities that the Kubernetes API reports."""
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [version.split("/") for version in KINDS if "/" in version]
        versions = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in groups]
        named = [{"name": group, "versions": [entry], "preferredVersion": entry} for group, entry in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version in KINDS:
        verbs = ["create", "get", "list", "patch", "delete"]
        known = [{"name": plural(kind), "kind": kind, "namespaced": True, "verbs": verbs} for kind in KINDS[version]]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": known}
    return None


class Stub(BaseHTTPRequestHandler):
    """Fake API that accepts every object and returns none."""

    protocol_version = "HTTP/1.1"
    objects: list[dict[str, Any]]

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        found = discovery(self.path.partition("?")[0])
        if found is None and self.path.partition("?")[0].endswith("/secrets"):
            found = {"kind": "SecretList", "apiVersion": "v1", "items": []}
        self._answer(404 if found is None else 200, missing if found is None else found)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "json" in self.headers["Content-Type"]:
            self.objects.append(json.loads(body))
            self._answer(201, self.objects[-1])
        else:  # Helm's record of the release
            self._answer(201, {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "release"}})

    do_PUT = do_PATCH = do_POST

    def _answer(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


async def rendered(chart: str, values: dict[str, Any]) -> dict[str, Any]:
    stub = type("Recording", (Stub,), {"objects": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as kubeconfig:
        kubeconfig.write(KUBECONFIG.format(port=server.server_port))
        kubeconfig.flush()
        configuration = helm_sdkpy.Configuration(namespace="gpumond", kubeconfig=kubeconfig.name)
        try:
            await helm_sdkpy.Install(configuration).run("gpumond", chart, values=values, wait=False)
        except helm_sdkpy.HelmError as error:
            return {"refused": str(error)}
        finally:
            server.shutdown()
    return {"objects": stub.objects}


async def linted(chart: str, values: dict[str, Any]) -> int:
    """Return the worst finding of Helm: 1 is information, 2 a warning, 3 an error."""
    with tempfile.TemporaryDirectory() as directory:
        copy = shutil.copytree(chart, Path(directory) / "gpumond")
        (copy / "values.yaml").write_text(json.dumps(values))
        (Path(directory) / "nothing").touch()
        configuration = helm_sdkpy.Configuration(kubeconfig=str(Path(directory) / "nothing"))
        lint = await helm_sdkpy.Lint(configuration).run(str(copy))
    return 3 if lint["Errors"] else max((message["Severity"] for message in lint["Messages"]), default=0)


def merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Merge values like Helm: objects key by key, other values as a whole."""
    both = {key: (defaults.get(key), value) for key, value in values.items()}
    return defaults | {
        key: merged(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for key, (old, new) in both.items()
    }


async def main(chart: str) -> None:
    given, answer = json.load(sys.stdin), {}
    for case, values in given["cases"].items():
        answer[case] = await rendered(chart, values)
        if "objects" in answer[case]:
            answer[case]["lint"] = await linted(chart, merged(given["defaults"], values))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
