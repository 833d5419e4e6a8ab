"""Users whom a declared proxy has signed in: whose headers count, and what a user without a scope sees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumond.config.tokens import IdentityProxy, parse_tokens
from gpumond.facts.frame import Alert, Frame, Verdict
from gpumond.facts.snapshot import Fault
from gpumond.serve.guard import Policy
from gpumond.serve.identity import OTHERS, IdentityHeaders
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot
from tests.serve.application import View
from tests.serve.guarded import FLUSH, GuardedApi, bearer

PROXY, ANOTHER = "10.1.0.5", "10.1.0.77"
UID = 990
ROUTES = ("frame", "snapshot", "devices", "processes", "agents", "engines", "ledger", "verdicts", "alerts")
SECRETS = ("secret-work", "grace", "prod-models", "10987", "bob", "a secret path")
TOKENS = "admins admin group:gpu-admins\nwatch read email:ops@example.com\nnight flush user:night\n"


def alert(labels: dict[str, str], pid: int | None = None) -> Alert:
    texts = (("summary", "secret-work of grace fills it"),)
    own = {"pid": pid, "start_ticks": pid and 100}
    return Alert(
        rule="r", phase="firing", labels=tuple(labels.items()), annotations=texts, value=1.0, active_at=1.0, **own
    )


def frame() -> Frame:
    """ada's pid 10 uses 20 GiB, grace's secret-work 30 GiB; bob's pod 5 GiB in prod-models; 60 GiB are used."""
    device = make_device(
        used_bytes=60 * GIB,
        processes=(
            make_process(10, 20 * GIB, user="ada", uid=1000),
            make_process(10987, 30 * GIB, user="grace", uid=1001, comm="secret-work"),
            make_process(12, 5 * GIB, user="bob", uid=1002, pod_namespace="prod-models"),
        ),
    )
    reports = (
        make_report(10, (make_pool(live=10 * GIB, cached=6 * GIB),), workload="train"),
        make_report(10987, (make_pool(live=20 * GIB, cached=5 * GIB),), workload="secret-work"),
    )
    snapshot = make_snapshot(device, reports=reports, faults=(Fault("nvml", "timeout", None, "a secret path"),))
    about = {"start_ticks": snapshot.reports[1].start_ticks, "summary": "secret-work leaks"}
    verdict = Verdict(device_uuid="GPU-a", pid=10987, kind="leak", since=1.0, **about)
    alerts = (
        alert({"uuid": "GPU-a", "gpu": "0"}),
        alert({"uuid": "GPU-a", "pid": "10987"}, 10987),
        alert({"workload": "secret-work", "uid": "1001"}),
    )
    return Frame(snapshot, make_ledger(snapshot), (verdict,), alerts)


def guarded(open_reads: bool = True) -> GuardedApi:
    proxy = IdentityProxy(addresses=("10.1.0.0/28",), user=str(UID), namespaces={"models": ("prod-*",)})
    headers = IdentityHeaders(proxy, proxy.resolve_uid())
    policy = Policy(frozenset({"127.0.0.1"}), open_reads=open_reads, identities=headers)
    return GuardedApi(policy, parse_tokens(TOKENS, "tokens"), View(frame()))


def ask(api: GuardedApi, route: str, user: str = "ada", client: str = PROXY, **headers: str) -> Any:
    stated = {"X-Forwarded-User": user} if user else {}
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return api.ask("GET", f"/api/v1/{route}", client=client, headers={**stated, **named})


@pytest.mark.parametrize("route", ROUTES)
def test_tenant_sees_nothing_of_the_others(route: str):
    answer = ask(guarded(), route)
    assert answer.status_code == 200
    assert not [text for text in SECRETS if text in answer.text]
    assert all(text in guarded().ask("GET", "/api/v1/frame", client="127.0.0.2").text for text in SECRETS)


def test_totals_of_a_tenants_ledger_are_complete():
    whole = ask(guarded(), "frame").json()
    (device,) = whole["snapshot"]["devices"]
    lines = whole["ledger"]["lines"]
    assert sum(line["used_bytes"] for line in lines) == device["used_bytes"] == 60 * GIB
    assert {(line["share"], line["workload"]): line["used_bytes"] // GIB for line in lines} == {
        ("live", "train"): 10,
        ("cached", "train"): 6,
        ("stranded", "train"): 0,
        ("overhead", "train"): 4,
        ("opaque", OTHERS): 35,
        ("unattributed", ""): 5,
    }
    assert [process["pid"] for process in whole["processes"]] == [10]
    assert [each["labels"] for each in whole["alerts"]] == [[["uuid", "GPU-a"], ["gpu", "0"]]]


def test_group_opens_a_namespace():
    answer = ask(guarded(), "processes", "eve", X_Forwarded_Groups="staff, models")
    assert [(each["pid"], each["pod_namespace"]) for each in answer.json()] == [(12, "prod-models")]
    assert ask(guarded(), "processes", "eve", X_Forwarded_Groups="staff").json() == []


def test_answers_are_not_shared_between_tenants():
    api = guarded()
    answers = {user: ask(api, "frame", user, Accept_Encoding="gzip") for user in ("ada", "grace", "night")}
    assert len({answer.headers["etag"] for answer in answers.values()}) == 3
    pids = {user: [each["pid"] for each in answer.json()["processes"]] for user, answer in answers.items()}
    assert pids == {"ada": [10], "grace": [10987], "night": [10, 10987, 12]}
    etag = answers["grace"].headers["etag"]
    assert ask(api, "frame", "ada", If_None_Match=etag).status_code == 200
    assert ask(api, "frame", "grace", If_None_Match=etag).status_code == 304


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/api/v1/history?uuid=0",
        "/api/v1/history/shares",
        "/api/v1/history/moment?at=0",
        "/api/v1/receipts",
        "/api/v1/audit",
        "/api/v1/events",
        "/api/v1/status",
        "/api/v1/silences",
        "/api/v1/rules",
        "/api/v1/alerts/history",
        "/api/v1/frame/",
        "/api/v1/Frame",
        "//api/v1/frame",
        "/api/v1/../../metrics",
    ],
)
def test_all_other_routes_are_refused(path: str):
    answer = guarded().ask("GET", path, client=PROXY, headers={"X-Forwarded-User": "ada"})
    assert answer.status_code in (403, 404)
    assert not [text for text in SECRETS if text in answer.text]


def test_tenant_changes_nothing():
    api = guarded()
    for method, path in (("POST", "/api/v1/flushes"), ("POST", "/-/reload"), ("DELETE", "/api/v1/silences/x")):
        answer = api.ask(method, path, client=PROXY, headers={"X-Forwarded-User": "ada"}, json=FLUSH)
        assert answer.status_code == 403
        assert "user:ada" in answer.json()["detail"]
    assert api.unchanged()


@pytest.mark.parametrize(
    "headers", [{"X-Forwarded-Email": "ops@example.com"}, {"X-Forwarded-User": "x", "X-Forwarded-Groups": "gpu-admins"}]
)
def test_line_of_the_tokens_file_grants_scopes(headers: dict[str, str]):
    answer = guarded().ask("GET", "/api/v1/processes", client=PROXY, headers=headers)
    assert [each["pid"] for each in answer.json()] == [10, 10987, 12]


def test_audit_names_the_user_and_not_the_group():
    api = guarded()
    headers = {"X-Forwarded-User": "carol", "X-Forwarded-Groups": "gpu-admins", "X-Forwarded-Proto": "https"}
    same_origin = {**headers, "Origin": "https://127.0.0.1:9917"}
    assert api.ask("POST", "/api/v1/flushes", client=PROXY, headers=same_origin, json=FLUSH).status_code == 200
    refused = api.ask(
        "POST", "/api/v1/flushes", client=PROXY, headers={**headers, "Origin": "https://evil.example"}, json=FLUSH
    )
    assert refused.status_code == 403
    reload = api.ask("POST", "/api/v1/release", client=PROXY, headers={"X-Forwarded-User": "night"}, json={})
    assert "proxy:night lacks the `admin` scope" in reload.json()["detail"]


@pytest.mark.parametrize("client", [ANOTHER, "127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_headers_of_others_are_ignored(client: str):
    api = guarded(open_reads=False)
    stated = {"X-Forwarded-User": "night", "X-Forwarded-Groups": "gpu-admins"}
    assert api.ask("GET", "/api/v1/frame", client=client, headers=stated).status_code == 401
    assert api.ask("POST", "/api/v1/flushes", client=client, headers=stated, json=FLUSH).status_code == 401
    assert api.unchanged()


def test_headers_are_ignored_on_a_unix_socket():
    api = guarded(open_reads=False)
    stated = {"X-Forwarded-User": "night", "X-Forwarded-Groups": "gpu-admins"}
    answer = api.ask("POST", "/-/reload", uid=UID, client="", headers=stated)
    assert answer.status_code == 403
    assert f"uid:{UID}" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("X-Forwarded-User", "")], 401),
        ([("X-Forwarded-User", " \t")], 401),
        ([("X_Forwarded_User", "night")], 401),
        ([("X-Forwarded-Groups", "gpu-admins")], 401),
        ([("X-Forwarded-User", "ada"), ("X-Forwarded-User", "night")], 400),
        ([("X-Forwarded-User", "ada"), ("x-forwarded-USER", "night")], 400),
        ([("X-Forwarded-User", "ada"), ("X-Forwarded-Groups", "a"), ("X-Forwarded-Groups", "gpu-admins")], 400),
        ([("X-Forwarded-User", "n\u00efght".encode("latin-1"))], 400),
        ([("X-Forwarded-User", "a" * 257)], 400),
        ([("X-Forwarded-User", "ada"), ("Authorization", "Bearer gpm_wrong")], 401),
    ],
)
def test_unclear_identity_is_refused(headers: list[tuple[str, Any]], status: int):
    answer = guarded().ask("GET", "/api/v1/frame", client=PROXY, headers=headers)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("name", ["x-forwarded-user", "X-FORWARDED-USER", "X-Forwarded-user"])
def test_case_of_a_header_is_ignored(name: str):
    answer = guarded().ask("GET", "/api/v1/processes", client=PROXY, headers={name: "ada", "X_Forwarded_User": "night"})
    assert [each["pid"] for each in answer.json()] == [10]


def test_token_counts_instead_of_the_identity():
    answer = ask(guarded(), "processes", **bearer("gpm_own"))
    assert [each["pid"] for each in answer.json()] == [10, 10987, 12]


def test_probes_need_no_identity():
    assert guarded().ask("GET", "/-/healthy", client=PROXY).status_code == 200
    assert guarded().ask("GET", "/", client=PROXY, headers={"X-Forwarded-User": "ada"}).status_code == 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "set the proxy's addresses"),
        ({"addresses": ["proxy.example.com"]}, "isn't an IP address or network"),
        (
            {"addresses": ["127.0.0.1"]},
            "so it doesn't identify the proxy; set user",
        ),
        ({"addresses": ["10.1.0.5/24"]}, "isn't an IP address or network"),
    ],
)
def test_invalid_proxy_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        IdentityProxy.model_validate_json(json.dumps(values))
