"""The daemon's port as strangers use it: raw bytes, slowness, crowds, few descriptors, TLS."""

from __future__ import annotations

import http.client
import json
import os
import re
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.receiving import MAX_HEAD_BYTES, RECEIVE_SECONDS
from gpumond.tokens import digest
from tests import certificates
from tests.running import RunningDaemon, until

SIM = ("--source", "sim")


def a_daemon(directory: Path, *options: str, around: tuple[str, ...] = (), kind: type[RunningDaemon] = RunningDaemon):
    cards = directory / "cards"
    cards.mkdir(parents=True)
    return kind(directory / "daemon", *SIM, *options, environ={"GPUMOND_SIM_DIR": str(cards)}, around=around)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    daemon = a_daemon(tmp_path_factory.mktemp("server"))
    yield daemon
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def connect(daemon: RunningDaemon, source: str = "127.0.0.1") -> socket.socket:
    port = int(daemon.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    connection.settimeout(20)
    return connection


def say(daemon: RunningDaemon, raw: bytes) -> bytes:
    """All that is answered until the daemon closes, or says nothing more for a moment."""
    with connect(daemon) as connection:
        connection.sendall(raw)
        connection.settimeout(1.0)
        heard = b""
        try:
            while chunk := connection.recv(65536):
                heard += chunk
        except (TimeoutError, ConnectionError):
            pass
        return heard


def statuses(heard: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", heard)]


def rejected(daemon: RunningDaemon, reason: str) -> float:
    return daemon.value("gpumond_http_rejects_total", reason=reason) or 0.0


HEAD = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nAuthorization: Bearer @TOKEN@\r\n"
BODY = b'{"name":"hog","scope":"process","value":"used_bytes","above":"40GiB"}'
MAKE = b"POST /api/v1/rules HTTP/1.1\r\n" + HEAD
SMUGGLED = MAKE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"

MALFORMED = {
    "length and chunked": MAKE + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "chunked and length": MAKE + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED,
    "two lengths": MAKE + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY,
    "two lengths in one": MAKE + b"Content-Length: 1, 1\r\n\r\n" + BODY,
    "a signed length": MAKE + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a negative length": MAKE + b"Content-Length: -1\r\n\r\n" + BODY,
    "a hexadecimal length": MAKE + b"Content-Length: 0x45\r\n\r\n" + BODY,
    "chunked twice removed": MAKE + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "chunked and more": MAKE + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED,
    "chunked in another line": MAKE + b"Transfer-Encoding:\n chunked\r\n\r\n" + CHUNKED,
    "a space before the colon": MAKE + b"Content-Length : %d\r\n\r\n" % len(BODY) + BODY,
    "a folded header": MAKE + b"X: a\r\n b\r\n" + b"Content-Length\r\n : 69\r\n\r\n" + BODY,
    "a bare line feed in a header": MAKE + b"X: a\nContent-Length: 69\r\r\n\r\n" + BODY,
    "a chunk of a wrong size": MAKE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk longer than said": MAKE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "absolute form": MAKE.replace(b"POST /", b"POST http://127.0.0.1/") + LENGTH + b"\r\n" + BODY,
    "absolute form of another": MAKE.replace(b"POST /", b"POST http://evil.com/") + LENGTH + b"\r\n" + BODY,
    "authority form": b"CONNECT 127.0.0.1:9917 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no host": MAKE.replace(b"Host: 127.0.0.1\r\n", b"") + LENGTH + b"\r\n" + BODY,
    "two hosts": MAKE + b"Host: 127.0.0.1\r\n" + LENGTH + b"\r\n" + BODY,
    "no version": MAKE.replace(b" HTTP/1.1", b"") + LENGTH + b"\r\n" + BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a null in a header": MAKE + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_two_parsers_could_read_differently_is_refused(daemon: RunningDaemon, case: str):
    token = (daemon.directory / "token").read_bytes().strip()
    heard = say(daemon, MALFORMED[case].replace(b"@TOKEN@", token) + SMUGGLED.replace(b"@TOKEN@", token))
    assert statuses(heard) == [400], heard
    assert [rule["name"] for rule in daemon.get("rules") if rule["origin"] == "api"] == []


def test_what_is_well_formed_is_understood(daemon: RunningDaemon):
    """The table above would be empty words if these requests were wrong in some other way."""
    token = (daemon.directory / "token").read_bytes().strip()
    made = say(daemon, SMUGGLED.replace(b"@TOKEN@", token))
    remove = b"DELETE /api/v1/rules/hog HTTP/1.1\r\n" + HEAD.replace(b"@TOKEN@", token) + b"\r\n"
    chunked = (MAKE + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED).replace(b"@TOKEN@", token)
    assert statuses(made) == [201]
    assert statuses(say(daemon, remove + chunked + remove)) == [204, 201, 204]


def test_after_a_close_nothing_is_done(daemon: RunningDaemon):
    token = (daemon.directory / "token").read_bytes().strip()
    first = b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    heard = say(daemon, first + SMUGGLED.replace(b"@TOKEN@", token))
    assert statuses(heard) == [200]
    assert [rule["name"] for rule in daemon.get("rules") if rule["origin"] == "api"] == []


def test_a_target_of_two_slashes_is_no_other_host(daemon: RunningDaemon):
    assert statuses(say(daemon, b"GET //evil.com/metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")) == [404]


def test_headers_and_requests_without_end_are_cut_off(daemon: RunningDaemon):
    start = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    assert statuses(say(daemon, start + b"X: " + b"x" * (MAX_HEAD_BYTES + 300_000))) == [431]
    assert statuses(say(daemon, start + b"X: y\r\n" * 100_000)) == [431]
    endless = (
        b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 400_000
    )
    began = time.monotonic()
    assert statuses(say(daemon, endless)) in ([200], [])
    assert time.monotonic() - began < RECEIVE_SECONDS
    assert statuses(say(daemon, MAKE + b"Content-Length: 70000\r\n\r\n" + bytes(70_000)))[:1] == [413]


def test_who_dribbles_is_closed_and_scrapes_go_on(daemon: RunningDaemon):
    """300 connections of ten addresses, each a byte now and then: none outlives its ten seconds."""
    before = rejected(daemon, "slow")
    slow = [connect(daemon, f"127.0.0.{10 + n % 10}") for n in range(300)]
    body = MAKE.replace(b"@TOKEN@", b"x") + b"Content-Length: 6000\r\n\r\n{"
    starts = (b"", b"GET / HTTP/1.1\r\nX: ", body, b"GET /")
    for number, connection in enumerate(slow):
        connection.setblocking(False)
        connection.sendall(starts[number % 4])
    numbers = {connection: number for number, connection in enumerate(slow)}
    waiting = {connection.fileno(): connection for connection in slow}
    watch = selectors.DefaultSelector()
    for connection in slow:
        watch.register(connection, selectors.EVENT_READ)
    began = time.monotonic()
    while waiting and time.monotonic() - began < RECEIVE_SECONDS + 3:
        assert daemon.request("/metrics")[0] == 200
        for key, _ in watch.select(0.5):
            try:
                heard = key.fileobj.recv(4096)  # type: ignore[union-attr]
            except ConnectionError:
                heard = b""
            if not heard:
                watch.unregister(key.fileobj)
                waiting.pop(key.fd)
        for connection in list(waiting.values()):
            try:
                connection.send(b"\r\n" if numbers[connection] % 4 == 0 else b"x")
            except OSError:
                pass
    for connection in slow:
        connection.close()
    assert not waiting
    until(lambda: rejected(daemon, "slow") - before > 200)
    assert len(daemon.log.read_text().splitlines()) < 100


def test_a_keep_alive_connection_has_the_same_deadline_for_its_next_request(daemon: RunningDaemon):
    with connect(daemon) as connection:
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert statuses(connection.recv(4096)) == [200]
        began = time.monotonic()
        try:
            while time.monotonic() - began < RECEIVE_SECONDS + 5:
                connection.sendall(b"\r\n")
                connection.settimeout(0.5)
                try:
                    if not connection.recv(4096):
                        break
                except TimeoutError:
                    pass
        except ConnectionError:
            pass
        assert time.monotonic() - began < RECEIVE_SECONDS + 3


def test_a_crowd_of_idle_connections_keeps_nobody_out(daemon: RunningDaemon):
    crowd = [connect(daemon) for _ in range(200)]
    try:
        for _ in range(20):
            assert daemon.request("/metrics")[0] == 200
    finally:
        for connection in crowd:
            connection.close()


def test_with_few_descriptors_scrapes_and_changes_go_on(tmp_path: Path):
    daemon = a_daemon(tmp_path, around=("prlimit", "--nofile=256:256"))
    try:
        crowd = []
        for address in range(8):
            crowd += [connect(daemon, f"127.0.1.{address + 1}") for _ in range(100)]
        agents = []
        for _ in range(300):
            agent = socket.socket(socket.AF_UNIX)
            agent.setblocking(False)
            agent.connect_ex(str(daemon.socket))
            agents.append(agent)
        for _ in range(20):
            assert daemon.request("/metrics")[0] == 200
        assert daemon.flush(target={"all": True})[0] == 404
        used = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
        assert used < 256
        for connection in (*crowd, *agents):
            connection.close()
        until(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 60)
        assert len(daemon.log.read_text().splitlines()) < 60
    finally:
        daemon.stop()


def test_over_the_unix_socket_the_daemons_user_needs_no_token(daemon: RunningDaemon):
    assert (daemon.directory / "api.sock").stat().st_mode & 0o777 == 0o600
    (daemon.directory / "token").rename(daemon.directory / "hidden")
    try:
        done = daemon.run("flush", "--all")
    finally:
        (daemon.directory / "hidden").rename(daemon.directory / "token")
    assert "no connected agent matches all" in done.stderr
    assert done.returncode == 3
    by = daemon.get("audit")[-1]["actor"]
    assert by == f"uid:{os.geteuid()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_asks_for_his_own_programs_and_for_nothing_else(tmp_path: Path):
    for directory in (tmp_path, *tmp_path.parents):
        if directory == Path(tempfile.gettempdir()):
            break
        directory.chmod(0o755)
    config = tmp_path / "gpumond.yaml"
    config.write_text('socket_mode: "0666"\n')
    daemon = a_daemon(tmp_path, "--config", str(config))
    program = """
import http.client, json, os, socket, sys
os.setuid(4242)
def ask(path, body):
    c = http.client.HTTPConnection("localhost"); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect(sys.argv[1])
    c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = c.getresponse(); return answer.status, json.load(answer)["detail"]
for path, body in json.loads(sys.argv[2]): print(*ask(path, body))
"""
    asked = [("/api/v1/flushes", {"target": {"pid": 1}}), ("/api/v1/release", {"for_seconds": 1}), ("/-/reload", {})]
    try:
        command = [sys.executable, "-c", program, str(daemon.directory / "api.sock"), json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines() == [
            "404 no connected agent matches pid 1 of uid 4242; `gpumond status` lists the agents",
            "403 uid:4242 has no scope admin",
            "403 uid:4242 has no scope admin",
        ], done.stderr
    finally:
        daemon.stop()


def test_tokens_of_the_file_hold_from_the_moment_they_are_written(tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text("")
    tokens.chmod(0o600)
    daemon = a_daemon(tmp_path, "--tokens-file", str(tokens), "--log-format", "json")

    def flush(token: str) -> int:
        return daemon.request("/api/v1/flushes", {"target": {"all": True}}, Authorization=f"Bearer {token}")[0]

    try:
        assert flush("gpm_nightly") == 401
        tokens.write_text(f"nightly flush {digest('gpm_nightly').hex()}\n")
        until(lambda: flush("gpm_nightly") == 404)
        assert daemon.get("audit")[-1]["actor"] == "token:nightly"
        tokens.write_text("nightly everything\n")
        time.sleep(1.5)  # it is looked at once a second, when somebody shows a token
        assert flush("gpm_nightly") == 404
        assert "expected NAME SCOPE" in daemon.log.read_text()
        tokens.write_text("# nobody\n")
        until(lambda: flush("gpm_nightly") == 401)
        log = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        assert {"at", "level", "logger", "message"} == log[0].keys()
        assert "gpm_nightly" not in daemon.log.read_text()
    finally:
        daemon.stop()


class Encrypted(RunningDaemon):
    """Asked over TLS; it is there as soon as its port is."""

    def healthy(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.url.rpartition(":")[2]))) == 0


def scrape(daemon: RunningDaemon, place: Path, client: str | None = None, **headers: str) -> int | str:
    """The status, or why there was no connection."""
    trust = ssl.create_default_context(cafile=place / "ca.crt")
    if client:
        trust.load_cert_chain(place / f"{client}.crt", place / f"{client}.key")
    port = int(daemon.url.rpartition(":")[2])
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=trust)
    try:
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return "refused"
    finally:
        connection.close()


def test_tls_with_certificates_of_clients_that_are_renewed_without_a_restart(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    web = place / "web.yml"
    tls = "cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt"
    mutual = f"{tls}, client_auth_type: RequireAndVerifyClientCert, client_allowed_sans: [ops@example.com]"
    web.write_text(f"tls_server_config: {{{mutual}}}\n")
    daemon = a_daemon(tmp_path, "--web-config", str(web), kind=Encrypted)
    try:
        assert scrape(daemon, place, "client") == 200
        assert scrape(daemon, place, "stranger") == "refused"  # of our authority, not of our list
        assert scrape(daemon, place) == "refused"
        with connect(daemon) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            try:
                assert b"HTTP" not in plain.recv(4096)
            except ConnectionError:
                pass
        before = certificate(daemon, place)
        certificates.renew(place, "server")
        until(lambda: certificate(daemon, place) != before)
        assert scrape(daemon, place, "client") == 200
        environ = {"GPUMOND_URL": daemon.url.replace("http:", "https:"), "GPUMOND_CA_FILE": str(place / "ca.crt")}
        web.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
        until(lambda: scrape(daemon, place) == 200)
        daemon.environ |= environ
        done = daemon.run("status")
        assert done.returncode == 0, done.stderr
    finally:
        daemon.stop()


def certificate(daemon: RunningDaemon, place: Path) -> bytes | None:
    trust = ssl.create_default_context(cafile=place / "ca.crt")
    trust.load_cert_chain(place / "client.crt", place / "client.key")
    with connect(daemon) as plain, trust.wrap_socket(plain, server_hostname="localhost") as encrypted:
        return encrypted.getpeercert(binary_form=True)


def test_another_address_with_tls_wants_a_token_to_read(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    (place / "web.yml").write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    cards = tmp_path / "cards"
    cards.mkdir()

    class Everywhere(Encrypted):
        def __init__(self, directory: Path) -> None:
            config = place / "gpumond.yaml"
            config.write_text("{}")
            options = ("--config", str(config), "--web-config", str(place / "web.yml"))
            super().__init__(directory, *SIM, *options, environ={"GPUMOND_SIM_DIR": str(cards)}, around=self.around())

        def around(self) -> tuple[str, ...]:
            replace = "import os,sys; a=[w.replace('127.0.0.1','0.0.0.0') for w in sys.argv[1:]]; os.execv(a[0],a)"
            return (sys.executable, "-c", replace)

    daemon = Everywhere(tmp_path / "daemon")
    try:
        token = (daemon.directory / "token").read_text().strip()
        assert scrape(daemon, place) == 401
        assert scrape(daemon, place, Authorization=f"Bearer {token}") == 200
        assert scrape(daemon, place, Authorization=f"Bearer {token}", Host="evil.com") == 421
    finally:
        daemon.stop()


def test_an_address_that_others_reach_is_refused_without_tls(tmp_path: Path):
    command = [sys.executable, "-m", "gpumond", "serve", *SIM, "--listen", "0.0.0.0:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "0.0.0.0:0 is reachable from other machines, and needs TLS and authentication there" in done.stderr


def test_a_token_for_this_machine_is_not_sent_to_another(tmp_path: Path):
    (tmp_path / "token").write_text("gpm_secret\n")
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.9", 0))
    environ = {**os.environ, "GPUMOND_SOCKET": str(tmp_path / "agent.sock")}
    url = f"http://127.0.0.9:{listener.getsockname()[1]}"
    client = subprocess.Popen([sys.executable, "-m", "gpumond", "flush", "--all", "--url", url], env=environ)
    connection, _ = listener.accept()
    heard.append(connection.recv(65536))
    connection.close()
    listener.close()
    client.wait(timeout=60)
    assert b"POST /api/v1/flushes" in heard[0]
    assert b"gpm_secret" not in heard[0]
