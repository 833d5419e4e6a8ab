"""The Helm chart and the manifests, rendered by Helm's own engine and by kustomize for sets of values."""

from __future__ import annotations

import functools
import json
from importlib import util
from typing import Any

import yaml

from tests.helpers.machine import ROOT, in_tree, library, missing
from tests.integration import crds

HELM = "helm-sdkpy==0.1.32"
KUBERNETES = "1.36"
REASON = missing("mmdebstrap", "systemd-nspawn") or (
    crds.REASON if util.find_spec("kubernetes_validate") else "needs kubernetes-validate (pip)"
)

HASH = "$2y$10$" + "." * 53
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pod monitor": {"podMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}}},
    "service monitor": {
        "serviceMonitor": {"enabled": True, "interval": "30s", "collect": ["device", "owner", "daemon"]}
    },
    "rules": {"prometheusRule": {"enabled": True}},
    "dashboards": {"dashboards": {"enabled": True}},
    "open": {"networkPolicy": {"enabled": False}},
    "injection": {"injection": {"enabled": True}},
    "kyverno": {"injection": {"enabled": True, "engine": "kyverno"}, "runAsUser": 0},
    "no names": {"podNames": False},
    "root": {"runAsUser": 0},
    "another user": {"runAsUser": 64917},
    "TLS": {
        "tls": {"existingSecret": "certificate", "serverName": "gpu.example.com"},
        "podMonitor": {"enabled": True},
        "serviceMonitor": {"enabled": True},
    },
    "TLS and users": {
        "tls": {"existingSecret": "certificate", "caKey": ""},
        "basicAuth": {"users": {"prometheus": HASH}, "existingSecret": "scraper"},
        "podMonitor": {"enabled": True},
        "serviceMonitor": {"enabled": True},
    },
    "access": {
        "tls": {"existingSecret": "certificate", "clientCaKey": "ca.crt"},
        "access": [
            "runner flush,read certificate:spiffe://example.org/ns/gpumond/sa/runner",
            "argo flush service-account:argo/runner",
        ],
        "tokenReview": {"audience": "gpumond"},
    },
    "everything else": {
        "image": {"repository": "r.example/gpumond", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "config": {"interval": "2s", "rules": [{"name": "full", "scope": "device", "value": "used_ratio", "above": 1}]},
        "source": "nvml",
        "port": 9400,
        "runtimeClassName": "nvidia",
        "secretName": "hooks",
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "affinity": {"nodeAffinity": {}},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
    },
}
ADDITIONS: dict[str, Any] = {
    "global": {"imageRegistry": "mirror.example"},
    "nameOverride": "gpu-memory",
    "fullnameOverride": "gpus",
    "namespaceOverride": "accounting",
    "commonLabels": {"team": "ml"},
    "image": {"registry": "r.example"},
    "extraArgs": ["--log-level", "debug"],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
    "hostPID": False,
    "tokens": {"existingSecret": "changes"},
    "serviceAccount": {"create": False, "name": "existing"},
    "service": {"annotations": {"a": "b"}, "labels": {"c": "d"}},
    "gpuNodeLabels": [],
    "initResources": {"limits": {"memory": "64Mi"}},
    "podSecurityContext": {"supplementalGroups": [44]},
    "securityContext": {"runAsNonRoot": True},
    "readinessProbe": {"httpGet": {"path": "/-/ready"}},
    "startupProbe": {"failureThreshold": 30},
    "podMonitor": {
        "enabled": True,
        "namespace": "monitoring",
        "scrapeTimeout": "10s",
        "sampleLimit": 60000,
        "honorLabels": True,
        "jobLabel": "team",
        "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
        "metricRelabelings": [{"action": "labeldrop", "regex": "comm"}],
    },
    "prometheusRule": {
        "enabled": True,
        "runbookUrl": "https://wiki.example/gpumond#",
        "disabled": ["GpumondIdleHolder"],
        "additionalRules": [{"record": "one", "expr": "vector(1)"}],
    },
    "dashboards": {"enabled": True, "namespace": "grafana", "annotations": {"folder": "GPU"}},
}
REFUSED = {
    "an unknown value": ({"prot": 9917}, "prot"),
    "a port as text": ({"port": "9917"}, "/port"),
    "an unknown source": ({"source": "nvidia"}, "/source"),
    "a relative directory": ({"socketDirectory": "run/gpumond"}, "/socketDirectory"),
    "what the chart sets": ({"config": {"listen": "0.0.0.0:9917"}}, "/config"),
    "a place for its token": ({"config": {"runtime_dir": "/run/gpumond"}}, "/config"),
    "a web configuration in addition to its own": ({"config": {"web_config": "web.yml"}}, "/config"),
    "users without TLS": ({"basicAuth": {"users": {"prometheus": HASH}}}, "/tls/existingSecret"),
    "a password in the open": (
        {"tls": {"existingSecret": "certificate"}, "basicAuth": {"users": {"prometheus": "secret"}}},
        "/basicAuth/users/prometheus",
    ),
    "a monitor that would be refused": (
        {
            "tls": {"existingSecret": "certificate"},
            "basicAuth": {"users": {"prometheus": HASH}},
            "serviceMonitor": {"enabled": True},
        },
        "/basicAuth/existingSecret",
    ),
    "the user nobody": ({"runAsUser": 65534}, "/runAsUser"),
    "an unknown engine": ({"injection": {"engine": "webhook"}}, "/injection/engine"),
    "callers without TLS": ({"access": ["a flush " + "0" * 64]}, "/tls/existingSecret"),
    "a certificate without an authority": (
        {"tls": {"existingSecret": "certificate"}, "access": ["a flush certificate:x"]},
        "/tls/clientCaKey",
    ),
    "a service account without an audience": (
        {"tls": {"existingSecret": "certificate"}, "access": ["a flush service-account:a/b"]},
        "/tokenReview/audience",
    ),
    "a token that is not hashed": (
        {"tls": {"existingSecret": "certificate"}, "access": ["a flush gpm_secret"]},
        "/access/0",
    ),
}

USERS = {"root": 0, "kyverno": 0, "another user": 64917}


@functools.cache
def rendered() -> dict[str, Any]:
    """Rendered cases; ``lint`` is the worst finding of Helm (1 is information, 2 a warning)."""
    shown = {ROOT / name: f"/src/{name}" for name in ("deploy", "grafana", "tests/integration/helm.py")}
    shown[library(HELM)] = "/library"
    refused = {name: values for name, (values, _) in REFUSED.items()}
    cases = {**CASES, "additions": ADDITIONS, **refused}
    values = {"defaults": yaml.safe_load((ROOT / "deploy/helm/gpumond/values.yaml").read_text()), "cases": cases}
    program = ("python3", "/src/tests/integration/helm.py", "/src/deploy/helm/gpumond")
    answer: dict[str, Any] = json.loads(
        in_tree("env", "PYTHONPATH=/library", *program, shown=shown, given=json.dumps(values))
    )
    return answer


def objects(case: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rendered()[case]["objects"]
    return found


@functools.cache
def built(directory: str) -> list[dict[str, Any]]:
    shown = {ROOT / name: f"/src/{name}" for name in ("deploy", "grafana")}
    return list(yaml.safe_load_all(in_tree("kustomize", "build", f"/src/{directory}", shown=shown)))


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [entry for entry in found if entry["kind"] == kind]
    return one


def valid(found: list[dict[str, Any]]) -> None:
    import kubernetes_validate

    operators = [entry for entry in found if entry["apiVersion"].startswith(crds.GROUP)]
    for entry in found:
        if entry not in operators and entry["kind"] != "ClusterPolicy":  # Kyverno publishes no schema for the validator
            kubernetes_validate.validate(entry, KUBERNETES, strict=True)
    assert crds.errors_of(operators) == [[] for _ in operators]
