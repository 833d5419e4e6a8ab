"""Scopes of client certificates and of Kubernetes service accounts, at the port of a daemon with TLS."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.config.settings import Settings
from gpumond.config.web_file import certificate_subjects
from gpumond.facts.errors import ConfigError, DaemonError, TokenReviewError
from gpumond.features.fleet.connection import Client, parse_machine, read_credentials
from gpumond.features.fleet.flush import FLUSHES_ROUTE
from gpumond.serve.authentication import ACCOUNT_CACHE_SECONDS, KubernetesTokenReviews, account_of, make_token_reviews
from tests.helpers import certificates
from tests.helpers.running import RunningDaemon, free_port
from tests.helpers.serving import TlsDaemon, start_daemon
from tests.helpers.stubs import Answer, Stub, stub

TOKENS = """\
ops rules certificate:ops@example.com
runner flush,read certificate:spiffe://example.org/ns/gpumond/sa/runner
argo flush service-account:argo/runner
"""
FLUSH = {"target": {"pid": 1}}
"""A flush of a process that has no agent: 404 for a caller who may flush."""
REVIEWED: dict[str, dict[str, Any]] = {
    "a.runner.c": {"authenticated": True, "user": {"username": "system:serviceaccount:argo:runner"}},
    "a.other.c": {"authenticated": True, "user": {"username": "system:serviceaccount:argo:other"}},
    "a.person.c": {"authenticated": True, "user": {"username": "argo:runner"}},
    "a.elsewhere.c": {
        "authenticated": True,
        "user": {"username": "system:serviceaccount:argo:runner"},
        "audiences": ["https://kubernetes.default.svc"],
    },
}


def review(path: str, body: str) -> Answer:
    """Answer as the API server."""
    asked = json.loads(body)
    token = asked["spec"]["token"]
    if path != "/apis/authentication.k8s.io/v1/tokenreviews" or token == "a.forbidden.c":
        return 403, {"kind": "Status", "message": "forbidden"}
    status = {"audiences": asked["spec"]["audiences"], **REVIEWED.get(token, {"user": {}, "error": "invalid"})}
    return 201, {**asked, "status": status}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("access") / "certificates")


@pytest.fixture(scope="module")
def account(place: Path) -> Path:
    """Return the directory of the pod's own service account."""
    directory = place / "account"
    directory.mkdir()
    shutil.copy(place / "ca.crt", directory)
    (directory / "token").write_text("own\n")
    return directory


@pytest.fixture(scope="module")
def api_server(place: Path) -> Iterator[Stub]:
    with stub(review, place / "server.crt") as served:
        yield served


@pytest.fixture(scope="module")
def daemon(place: Path, account: Path, api_server: Stub) -> Iterator[RunningDaemon]:
    tls = "cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt"
    (place / "web.yml").write_text(f"tls_server_config: {{{tls}, client_auth_type: VerifyClientCertIfGiven}}\n")
    (place / "tokens").touch(0o600)
    (place / "tokens").write_text(TOKENS)
    host, _, port = api_server.address.partition(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    environ |= {"GPUMOND_TOKEN_REVIEW_AUDIENCE": "gpumond", "GPUMOND_TOKEN_REVIEW_DIRECTORY": str(account)}
    options = ("--web-config", str(place / "web.yml"), "--tokens-file", str(place / "tokens"))
    with start_daemon(place / "machine", *options, kind=TlsDaemon, environ=environ) as started:
        yield started


def post(
    daemon: RunningDaemon, place: Path, route: str, body: object, client: str | None = None, token: str | None = None
) -> tuple[int, str]:
    """Return the status and the text of the answer."""
    trust = ssl.create_default_context(cafile=place / "ca.crt")
    if client:
        trust.load_cert_chain(place / f"{client}.crt", place / f"{client}.key")
    port = int(daemon.url.rpartition(":")[2])
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trust)
    fields = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        connection.request("POST", f"/api/v1/{route}", json.dumps(body), fields)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.needs("openssl")
def test_certificate_has_the_scopes_of_its_names(daemon: RunningDaemon, place: Path):
    assert post(daemon, place, "flushes", FLUSH, "runner")[0] == 404
    status, text = post(daemon, place, "flushes", FLUSH, "client")
    assert (status, "certificate:ops lacks the `flush` scope" in text) == (403, True)
    silence = {"matchers": [{"name": "rule", "operator": "=", "value": "leak"}], "for_seconds": 60, "reason": "known"}
    status, text = post(daemon, place, "silences", silence, "client")
    assert (status, '"certificate:ops"' in text) == (201, True)
    assert post(daemon, place, "flushes", FLUSH, "unlisted")[0] == 401
    assert post(daemon, place, "flushes", FLUSH)[0] == 401


@pytest.mark.needs("openssl")
def test_token_precedes_the_certificate_and_a_certificate_has_no_session(daemon: RunningDaemon, place: Path):
    assert post(daemon, place, "flushes", FLUSH, "runner", "gpm_wrong")[0] == 401
    status, text = post(daemon, place, "sessions/code", {}, "runner")
    assert (status, "certificate:runner can't have a session" in text) == (403, True)


@pytest.mark.needs("openssl")
def test_fleet_flushes_with_a_client_certificate(daemon: RunningDaemon, place: Path):
    environ = {"GPUMOND_CA_FILE": str(place / "ca.crt")}
    client = Client(
        read_credentials(certificate_file=place / "runner.crt", key_file=place / "runner.key", environ=environ), 60.0
    )
    to = parse_machine(daemon.url.removeprefix("http://"), {}, scheme="https")
    with pytest.raises(DaemonError) as refused:
        asyncio.run(client.post(to, FLUSHES_ROUTE, FLUSH, 60.0))
    assert refused.value.status == 404


@pytest.mark.needs("openssl")
def test_service_account_has_the_scopes_of_its_line(
    daemon: RunningDaemon, place: Path, account: Path, api_server: Stub
):
    before = len(api_server.requests)
    for _ in range(2):
        assert post(daemon, place, "flushes", FLUSH, token="a.runner.c")[0] == 404
    ((_, own, sent),) = api_server.requests[before:]  # the second request needs no review
    assert own == "Bearer own"
    assert json.loads(sent)["spec"] == {"token": "a.runner.c", "audiences": ["gpumond"]}
    (account / "token").write_text("renewed")
    status, text = post(daemon, place, "flushes", FLUSH, token="a.other.c")
    assert (status, "the service account argo/other has no scope" in text) == (403, True)
    assert api_server.requests[-1][1] == "Bearer renewed"
    for token in ("a.unknown.c", "a.elsewhere.c", "a.person.c"):
        assert post(daemon, place, "flushes", FLUSH, token=token)[0] == 401
    status, text = post(daemon, place, "flushes", FLUSH, token="a.forbidden.c")
    assert (status, "allow the daemon's service account to create tokenreviews" in text) == (503, True)
    before = len(api_server.requests)
    assert post(daemon, place, "flushes", FLUSH, token="gpm_wrong")[0] == 401
    assert len(api_server.requests) == before  # only a token of that form is sent to the API server


def reviews(address: str, account: Path, now: list[float]) -> KubernetesTokenReviews:
    host, _, port = address.partition(":")
    return KubernetesTokenReviews(host, int(port), "gpumond", account, clock=lambda: now[0])


@pytest.mark.needs("openssl")
def test_review_is_remembered_for_a_minute(account: Path, api_server: Stub):
    now = [100.0]
    own = reviews(api_server.address, account, now)
    assert own.cached_account("a.runner.c") is None
    assert asyncio.run(own.review("a.runner.c")) == own.cached_account("a.runner.c") == "argo/runner"
    now[0] += ACCOUNT_CACHE_SECONDS
    assert own.cached_account("a.runner.c") is None


@pytest.mark.needs("openssl")
def test_review_that_fails_has_a_reason(place: Path, account: Path):
    with pytest.raises(TokenReviewError, match="no response from the API server"):
        asyncio.run(reviews(f"127.0.0.1:{free_port()}", account, [0.0]).review("a.b.c"))
    with stub(review, place / "client.crt") as other:
        with pytest.raises(TokenReviewError, match="API server: the certificate isn't valid"):
            asyncio.run(reviews(other.address, account, [0.0]).review("a.runner.c"))
        assert other.requests == []  # no token was sent


@pytest.mark.parametrize("answer", [None, [], {}, {"status": []}, {"status": {"user": "x"}}])
def test_answer_of_another_form_is_refused(answer: object):
    with pytest.raises(TokenReviewError, match="isn't a TokenReview"):
        account_of(answer, "gpumond")


@pytest.mark.parametrize("username", ["system:serviceaccount:argo", "system:serviceaccount::x", None, 5])
def test_user_that_is_no_service_account_is_refused(username: object):
    status = {"authenticated": True, "user": {"username": username}, "audiences": ["gpumond"]}
    assert account_of({"status": status}, "gpumond") is None


def test_reviews_require_the_api_server_and_the_account_of_the_pod(tmp_path: Path):
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    settings = Settings(token_review_audience="gpumond", token_review_directory=tmp_path)
    assert make_token_reviews(Settings(), environ) is None
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        make_token_reviews(settings, {})
    with pytest.raises(ConfigError, match="token: No such file"):
        make_token_reviews(settings, environ)


def test_name_of_a_certificate_counts_only_as_the_type_of_its_form():
    names = (
        ("DNS", "gpu.example.com"),
        ("URI", "spiffe://example.org/runner"),
        ("email", "ops@example.com"),
        ("IP Address", "10.0.0.1"),
        ("DNS", "spiffe://example.org/admin"),
        ("DNS", "admin@example.com"),
        ("DNS", "10.0.0.2"),
        ("DNS", "fe80::1"),
        ("URI", "urn:x"),
        ("DirName", ((("commonName", "admin"),),)),
    )
    assert certificate_subjects({"subjectAltName": names}) == {
        "certificate:gpu.example.com",
        "certificate:spiffe://example.org/runner",
        "certificate:ops@example.com",
        "certificate:10.0.0.1",
    }
    assert certificate_subjects(None) == frozenset()
