"""The daemon's port with TLS: certificates, tokens and non-loopback addresses."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import certificates
from tests.helpers.running import RunningDaemon, until
from tests.helpers.serving import SIM, TlsDaemon, connect, start_daemon


def scrape(daemon: RunningDaemon, place: Path, client: str | None = None, **headers: str) -> int | str:
    """Return the status, or "refused" if there was no connection."""
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


@pytest.mark.needs("openssl")
def test_client_certificates_are_required_and_renewed_without_a_restart(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    web = place / "web.yml"
    tls = "cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt"
    mutual = f"{tls}, client_auth_type: RequireAndVerifyClientCert, client_allowed_sans: [ops@example.com]"
    web.write_text(f"tls_server_config: {{{mutual}}}\n")
    with start_daemon(tmp_path, "--web-config", str(web), kind=TlsDaemon) as daemon:
        assert scrape(daemon, place, "client") == 200
        assert scrape(daemon, place, "unlisted") == "refused"  # of the authority, but not of an allowed name
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


def certificate(daemon: RunningDaemon, place: Path) -> bytes | None:
    trust = ssl.create_default_context(cafile=place / "ca.crt")
    trust.load_cert_chain(place / "client.crt", place / "client.key")
    with connect(daemon) as plain, trust.wrap_socket(plain, server_hostname="localhost") as encrypted:
        return encrypted.getpeercert(binary_form=True)


@pytest.mark.needs("openssl")
def test_non_loopback_address_with_tls_requires_a_token_to_read(tmp_path: Path):
    place = certificates.make(tmp_path / "certificates")
    (place / "web.yml").write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    cards = tmp_path / "cards"
    cards.mkdir()

    class NonLoopbackDaemon(TlsDaemon):
        def __init__(self, directory: Path) -> None:
            config = place / "gpumond.yaml"
            config.write_text("{}")
            options = ("--config", str(config), "--web-config", str(place / "web.yml"))
            super().__init__(directory, *SIM, *options, environ={"GPUMOND_SIM_DIR": str(cards)}, around=self.around())

        def around(self) -> tuple[str, ...]:
            replace = "import os,sys; a=[w.replace('127.0.0.1','0.0.0.0') for w in sys.argv[1:]]; os.execv(a[0],a)"
            return (sys.executable, "-c", replace)

    daemon = NonLoopbackDaemon(tmp_path / "daemon")
    try:
        token = (daemon.directory / "token").read_text().strip()
        assert scrape(daemon, place) == 401
        assert scrape(daemon, place, Authorization=f"Bearer {token}") == 200
        assert scrape(daemon, place, Authorization=f"Bearer {token}", Host="evil.com") == 421
    finally:
        daemon.stop()


def test_non_loopback_address_is_refused_without_tls(tmp_path: Path):
    command = [sys.executable, "-m", "gpumond", "serve", *SIM, "--listen", "0.0.0.0:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--listen: 0.0.0.0:0 is reachable from other machines, so it requires TLS and authentication" in done.stderr
