"""Requests to daemons: where a token is sent, and the reason of each failure."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.features.fleet.connection import (
    Client,
    Credentials,
    Machine,
    Machines,
    parse_machine,
    read_credentials,
    run_each,
)
from gpumond.features.fleet.discovery import Prometheus
from gpumond.host.http import may_receive_token
from gpumond.view.frame import frame_of
from tests.helpers import certificates
from tests.helpers.running import free_port
from tests.helpers.stubs import fleet, stub

TRUST = ssl.create_default_context()
SERIES = {"metric": {"job": "gpumond", "instance": "gpu-1"}, "value": [1.0, "1"]}


def client(ssl_context: ssl.SSLContext = TRUST, seconds: float = 10.0) -> Client:
    return Client(
        Credentials(ssl_context=ssl_context, token="secret", tokens={"own": "own-secret", "10.0.0.7": "host-secret"}),
        seconds,
    )


def get(address: str, own: Client | None = None, name: str = "a", scheme: str = "http") -> Any:
    return asyncio.run(
        (own or client()).get(parse_machine(address, {"instance": name}, scheme=scheme), "/api/v1/frame")
    )


@pytest.mark.needs("openssl")
def test_token_is_sent_to_a_loopback_address_and_over_tls_only(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    ssl_context = ssl.create_default_context(cafile=place / "ca.crt")
    with stub(lambda path, body: (200, {})) as plain, stub(lambda path, body: (200, {}), place / "server.crt") as tls:
        get(plain.address)
        get(plain.address.replace("127.0.0.1", "0.0.0.0"))  # reaches the same server, and isn't a loopback address
        get(tls.address, client(ssl_context), "own", "https")
        assert [token for _, token, _ in plain.requests] == ["Bearer secret", None]
        assert [token for _, token, _ in tls.requests] == ["Bearer own-secret"]


def test_change_is_not_sent_where_the_token_must_not_be_sent():
    with stub(lambda path, body: (200, {})) as served:
        to = parse_machine(served.address.replace("127.0.0.1", "0.0.0.0"), {})
        with pytest.raises(DaemonError, match="isn't sent without TLS"):
            asyncio.run(client().post(to, "/api/v1/flushes", {}, 10.0))
        assert served.requests == []


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://gpu-1:9917", True),
        ("http://127.0.0.1:9917", True),
        ("http://[::1]:9917", True),
        ("http://localhost:9917", True),
        ("http://gpu-1:9917", False),
        ("http://10.0.0.5:9917", False),
        ("http://localhost.example.com:9917", False),
        ("http://127.0.0.1.example.com:9917", False),
    ],
)
def test_addresses_that_may_receive_a_token(url: str, allowed: bool):
    assert may_receive_token(url) is allowed


def test_token_of_a_machine_is_by_name_or_host():
    access = client().credentials
    assert access.token_of(Machine("own", "http://a:1")) == "own-secret"
    assert access.token_of(Machine("b", "http://10.0.0.7:9917")) == "host-secret"
    assert access.token_of(Machine("b", "http://b:1")) == "secret"


def test_machine_of_a_list_without_tls_receives_only_the_token_of_its_host():
    access = client().credentials
    assert access.token_of(Machine("own", "https://a:1", from_verified_list=False)) is None
    assert access.token_of(Machine("own", "https://10.0.0.7:9917", from_verified_list=False)) == "host-secret"
    assert access.token_of(Machine("b", "https://b:1", from_verified_list=False)) is None


@pytest.mark.needs("openssl")
def test_list_without_tls_decides_of_no_token(tmp_path: Path):
    """Whoever answers for the list, or is on its way, could give any address the name of another machine."""
    place = certificates.make(tmp_path / "certificates")
    (tmp_path / "tokens.yaml").write_text("gpu-1: secret-of-gpu-1\n")
    (tmp_path / "tokens.yaml").chmod(0o600)
    environ = {"GPUMOND_CA_FILE": str(place / "ca.crt"), "GPUMOND_TOKEN": "secret"}
    refusal = (401, {"detail": "reads require a token"})
    with stub(lambda path, body: refusal, place / "server.crt") as other:
        series = {"status": "success", "data": {"resultType": "vector", "result": [SERIES]}}
        scraped = {"labels": {"job": "gpumond", "instance": "gpu-1"}, "scrapeUrl": f"https://{other.address}/metrics"}
        listed = {"status": "success", "data": {"activeTargets": [scraped]}}
        answers = {"/api/v1/query": series, "/api/v1/targets": listed}
        with stub(lambda path, body: (200, answers[path])) as service:
            remote = service.address.replace("127.0.0.1", "0.0.0.0")  # the same server, at an address like another's
            source = ("--prometheus", f"http://{remote}")
            for tokens in ((), ("--tokens", str(tmp_path / "tokens.yaml"))):
                failed = fleet("status", *source, *tokens, **environ)
                assert "the token wasn't sent, because the list of machines came without TLS" in failed.stdout
            assert {token for _, token, _ in other.requests} == {None}
            other.requests.clear()
            (tmp_path / "tokens.yaml").write_text("127.0.0.1: secret-of-the-host\n")
            fleet("status", *source, "--tokens", str(tmp_path / "tokens.yaml"), **environ)
            fleet("status", "--prometheus", f"http://{service.address}", **environ)  # a list of this user
            assert [token for _, token, _ in other.requests] == ["Bearer secret-of-the-host", "Bearer secret"]


def test_frame_of_more_than_its_limit_is_refused():
    with (
        stub(lambda path, body: (200, [[]] * (1 << 22))) as served,
        pytest.raises(DaemonError, match="more than 8 MiB"),
    ):
        asyncio.run(client().frame(parse_machine(served.address, {}), frame_of))


@pytest.mark.needs("openssl")
def test_certificate_for_another_name_is_refused_and_no_token_is_sent(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    ssl_context = ssl.create_default_context(cafile=place / "ca.crt")
    with stub(lambda path, body: (200, {}), place / "client.crt") as other:
        with pytest.raises(DaemonError, match="certificate isn't valid for this address"):
            get(other.address, client(ssl_context), scheme="https")
        with pytest.raises(DaemonError, match="certificate isn't valid"):
            get(other.address, scheme="https")  # of an authority that is not trusted
        assert other.requests == []


def test_redirect_is_not_followed():
    with stub(lambda path, body: (302, {})) as served, pytest.raises(DaemonError, match="HTTP status 302"):
        get(served.address)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "x" * 10), None),
        ((401, {"detail": "no token"}), "HTTP status 401: no token"),
        ((500, ["x"]), "HTTP status 500"),
        (None, "no response within 0.5 s"),
    ],
)
def test_failure_has_a_reason(answer: Any, message: str | None):
    with stub(lambda path, body: answer) as served:
        if message is None:
            assert get(served.address) == answer[1]
        else:
            with pytest.raises(DaemonError, match=message):
                get(served.address, client(seconds=0.5))


def test_handshake_that_does_not_end_has_a_reason():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DaemonError, match=r"no response within 0\.5 s"),
    ):
        get(f"127.0.0.1:{silent.getsockname()[1]}", client(seconds=0.5), scheme="https")


def test_address_without_a_listener_and_name_without_an_address_have_a_reason():
    with pytest.raises(DaemonError, match="nothing is listening"):
        get(f"127.0.0.1:{free_port()}")
    with pytest.raises(DaemonError, match="can't be resolved"):
        get("no..name")


def test_answer_that_is_not_http_or_not_json_has_a_reason():
    with socket.create_server(("127.0.0.1", 0)) as server:

        async def raw() -> None:
            def work() -> None:
                for sent in (b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{x}"):
                    with server.accept()[0] as connection:
                        connection.recv(65536)
                        connection.sendall(sent)

            task = asyncio.get_running_loop().run_in_executor(None, work)
            to = parse_machine(f"127.0.0.1:{server.getsockname()[1]}", {})
            with pytest.raises(DaemonError, match="no response: BadStatusLine"):
                await client().get(to, "/")
            with pytest.raises(DaemonError, match="the response isn't JSON"):
                await client().get(to, "/")
            await task

        asyncio.run(raw())


def test_results_keep_the_order_and_the_bound():
    running, most = 0, 0

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(1 + item % 3):
            await asyncio.sleep(0)
        running -= 1
        return item * 2

    assert asyncio.run(run_each(range(50), work, 4)) == [item * 2 for item in range(50)]
    assert most == 4


def test_token_of_the_daemons_is_not_sent_to_prometheus():
    answer = {"status": "success", "data": {"activeTargets": []}}
    with stub(lambda path, body: (200, answer)) as served:
        url = f"http://{served.address}"
        assert asyncio.run(Prometheus(url=url, ssl_context=TRUST).targets()) == []
        assert asyncio.run(Prometheus(url=url, ssl_context=TRUST, token="its-own").targets()) == []
        assert [(path, token) for path, token, _ in served.requests] == [
            ("/api/v1/targets?state=active", None),
            ("/api/v1/targets?state=active", "Bearer its-own"),
        ]
    with pytest.raises(DiscoveryError, match="isn't sent without TLS"):
        asyncio.run(Prometheus(url="http://prometheus:9090", ssl_context=TRUST, token="its-own").targets())
    with pytest.raises(DiscoveryError, match="nothing is listening at this address; pass the address of a Prometheus"):
        asyncio.run(Prometheus(url=f"http://127.0.0.1:{free_port()}", ssl_context=TRUST).targets())


@pytest.mark.needs("openssl")
def test_client_certificate_is_presented(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    files = {"certificate_file": place / "client.crt", "key_file": place / "client.key"}
    environ = {"GPUMOND_CA_FILE": str(place / "ca.crt")}
    with stub(lambda path, body: (200, {}), place / "server.crt", clients=place / "ca.crt") as served:
        assert get(served.address, Client(read_credentials(**files, environ=environ), 10.0), scheme="https") == {}
        with pytest.raises(DaemonError):
            get(served.address, Client(read_credentials(environ=environ), 10.0), scheme="https")
    with pytest.raises(ConfigError, match=r"client\.key"):
        read_credentials(certificate_file=place / "client.key", environ=environ)


@pytest.mark.parametrize(
    ("address", "labels", "expected"),
    [
        ("gpu-1", {}, Machine("gpu-1", "http://gpu-1:9917")),
        ("gpu-1:80", {"__scheme__": "https"}, Machine("gpu-1:80", "https://gpu-1:80")),
        ("[::1]:9917", {"instance": "a", "rack": "7"}, Machine("a", "http://[::1]:9917", (("rack", "7"),))),
        ("10.0.0.5", {"__metrics_path__": "/gpu/metrics"}, Machine("10.0.0.5", "http://10.0.0.5:9917/gpu")),
    ],
)
def test_address_of_service_discovery(address: str, labels: dict[str, str], expected: Machine):
    assert parse_machine(address, labels) == expected


@pytest.mark.parametrize(
    ("address", "labels"),
    [
        ("user@gpu-1", {}),
        ("gpu-1/path", {}),
        ("gpu-1\r\nX: y", {}),
        ("gpu-1:0", {}),
        ("gpu-1:99999", {}),
        ("", {}),
        ("gpu-1", {"__scheme__": "file"}),
        ("gpu-1", {"__metrics_path__": "/a b"}),
        ("gpu-1", {"__metrics_path__": "@evil.example"}),
        ("gpu-1", {"instance": "a\x1b[2J"}),
    ],
)
def test_text_that_is_no_address_is_refused(address: str, labels: dict[str, str]):
    with pytest.raises(DiscoveryError):
        parse_machine(address, labels)


@pytest.mark.parametrize(
    ("instance", "url"),
    [
        ("gpu-1", "http://gpu-1:9917"),
        ("gpu-1:9917", "http://gpu-1:9917"),
        ("node-2", "https://10.0.0.2:9917"),
        ("10.0.0.2:9917", "https://10.0.0.2:9917"),
        ("10.0.0.2", "https://10.0.0.2:9917"),
        ("gpu-3:9100", "http://gpu-3:9917"),
        ("gpu-3", "http://gpu-3:9917"),
    ],
)
def test_instance_has_one_address(instance: str, url: str):
    found = Machines(
        (
            parse_machine("gpu-1:9917", {}),
            parse_machine("10.0.0.2:9917", {"instance": "node-2", "__scheme__": "https"}),
            parse_machine("gpu-3", {}),
        )
    )
    assert found.machine_of(instance).url == url


@pytest.mark.parametrize("instance", ["gpu-9", "gpu-1:9100", "two"])
def test_instance_without_one_address_is_refused(instance: str):
    found = Machines(
        (
            parse_machine("gpu-1:9917", {}),
            parse_machine("a:9917", {"instance": "two"}),
            parse_machine("b:9917", {"instance": "two"}),
        )
    )
    with pytest.raises(DiscoveryError):
        found.machine_of(instance)


def test_machine_that_two_jobs_scrape_is_listed_once():
    plain, dcgm = parse_machine("gpu-1:9917", {"job": "gpumond"}), parse_machine("gpu-1:9917", {"job": "dcgm"})
    assert len(Machines((plain, dcgm)).all) == 1
