"""Web configuration file of the Prometheus exporters: accepted options, and messages for invalid ones."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from gpumond.config.loading import load_settings
from gpumond.config.web_file import ReloadingFile, WebSettings, read_web
from gpumond.facts.errors import ConfigError
from tests.helpers import certificates

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"
TLS = "cert_file: server.crt, key_file: server.key"
MUTUAL = "client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert"

GOOD = {
    "empty": "",
    "tls": f"tls_server_config: {{{TLS}}}",
    "tls 1.3 alone": f"tls_server_config: {{{TLS}, min_version: TLS13, max_version: TLS13}}",
    "mutual": f"tls_server_config: {{{TLS}, {MUTUAL}}}",
    "certificate if given": f"tls_server_config: {{{TLS}, client_ca_file: ca.crt, "
    "client_auth_type: VerifyClientCertIfGiven}",
    "sans": f"tls_server_config: {{{TLS}, {MUTUAL}, client_allowed_sans: [prometheus.example.com]}}",
    "ciphers": f"tls_server_config: {{{TLS}, cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, "
    "TLS_AES_128_GCM_SHA256], prefer_server_cipher_suites: false}",
    "headers": "http_server_config: {http2: false, headers: {X-Frame-Options: deny, X-Content-Type-Options: nosniff, "
    "Strict-Transport-Security: max-age=31536000, X-XSS-Protection: '', Content-Security-Policy: \"default-src *\"}}",
    "users": f"basic_auth_users: {{prometheus: {HASH}, grafana: {HASH}}}",
    "no users": "basic_auth_users:",
}

BAD = {
    "a rate limit": ("rate_limit: {interval: 1s}", "web_config web.yml: rate_limit: unknown key"),
    "not yaml": ("tls_server_config: {", "web_config web.yml, line 1: invalid YAML: "),
    "a number in base 60 that no float holds": (
        f"a: 1{':20' * 300}.5",
        "web_config web.yml: invalid YAML: int too large",
    ),
    "a list": ("[]", "web_config web.yml: must be keys and values"),
    "an unknown key": ("tls_config: {}", "web_config web.yml: tls_config: unknown key"),
    "an unknown key of tls": (f"tls_server_config: {{{TLS}, certfile: a}}", "tls_server_config.certfile: unknown key"),
    "no certificate": ("tls_server_config: {key_file: server.key}", "tls_server_config: set cert_file (or cert)"),
    "no key": ("tls_server_config: {cert_file: server.crt}", "tls_server_config: set key_file (or key)"),
    "both": (f"tls_server_config: {{{TLS}, cert: x}}", "cert and cert_file are both set; set only one"),
    "no such certificate": (
        "tls_server_config: {cert_file: none.crt, key_file: server.key}",
        "web_config web.yml: tls_server_config.cert_file: none.crt: No such file or directory",
    ),
    "another's key": (
        "tls_server_config: {cert_file: server.crt, key_file: client.key}",
        "web_config web.yml: tls_server_config: cert and key: key values mismatch",
    ),
    "no private key": (
        "tls_server_config: {cert_file: server.crt, key_file: junk}",
        "web_config web.yml: tls_server_config: cert and key: ",
    ),
    "no certificate of an authority": (
        f"tls_server_config: {{{TLS}, client_ca_file: junk, client_auth_type: RequireAndVerifyClientCert}}",
        "web_config web.yml: tls_server_config: client_ca: contains no certificate",
    ),
    "an authority that is asked for nothing": (
        f"tls_server_config: {{{TLS}, client_ca_file: ca.crt}}",
        "client_ca is set, but client_auth_type doesn't request certificates",
    ),
    "no authority": (
        f"tls_server_config: {{{TLS}, client_auth_type: RequireAndVerifyClientCert}}",
        "client_auth_type RequireAndVerifyClientCert requires client_ca_file (or client_ca)",
    ),
    "any certificate": (
        f"tls_server_config: {{{TLS}, client_auth_type: RequireAnyClientCert}}",
        "client_auth_type RequireAnyClientCert accepts any certificate; use RequireAndVerifyClientCert",
    ),
    "an unknown policy": (
        f"tls_server_config: {{{TLS}, client_auth_type: Sometimes}}",
        "unknown client_auth_type 'Sometimes'; expected one of NoClientCert, VerifyClientCertIfGiven, "
        "RequireAndVerifyClientCert",
    ),
    "sans without client certificates": (
        f"tls_server_config: {{{TLS}, client_allowed_sans: [a]}}",
        "client_allowed_sans requires client_auth_type RequireAndVerifyClientCert",
    ),
    "an unknown version": (
        f"tls_server_config: {{{TLS}, min_version: TLS14}}",
        "tls_server_config.min_version: expected TLS10, TLS11, TLS12 or TLS13",
    ),
    "versions upside down": (
        f"tls_server_config: {{{TLS}, min_version: TLS13, max_version: TLS12}}",
        "tls_server_config: min_version TLS13 is above max_version TLS12",
    ),
    "a weak cipher": (
        f"tls_server_config: {{{TLS}, cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}}",
        "tls_server_config.cipher_suites: unknown or unsafe cipher suite 'TLS_RSA_WITH_RC4_128_SHA'; expected one",
    ),
    "a header of one's own": (
        "http_server_config: {headers: {Server: x}}",
        "http_server_config.headers: header 'Server' can't be configured; expected one or more of Content-",
    ),
    "a wrong frame option": (
        "http_server_config: {headers: {X-Frame-Options: allow}}",
        "http_server_config.headers: X-Frame-Options: invalid value 'allow'; expected deny or sameorigin",
    ),
    "a wrong type option": (
        "http_server_config: {headers: {X-Content-Type-Options: sniff}}",
        "X-Content-Type-Options: invalid value 'sniff'; expected nosniff",
    ),
    "a header of two lines": (
        'http_server_config: {headers: {Content-Security-Policy: "a\\r\\nSet-Cookie: b"}}',
        "Content-Security-Policy: expected printable ASCII",
    ),
    "a password in clear": (
        "basic_auth_users: {prometheus: wonder}",
        "basic_auth_users: 'prometheus': expected a bcrypt hash (",
    ),
    "a costly password": (
        f"basic_auth_users: {{prometheus: {HASH.replace('$10$', '$31$')}}}",
        "basic_auth_users: 'prometheus': the bcrypt cost is 31; expected 4 to 15",
    ),
    "a user that cannot log in": (
        f"basic_auth_users: {{'a:b': {HASH}}}",
        "basic_auth_users: 'a:b' isn't a valid user name",
    ),
    "users as a list": ("basic_auth_users: [prometheus]", "basic_auth_users: expected names and bcrypt hashes, as in "),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = certificates.make(tmp_path_factory.mktemp("web"))
    (directory / "junk").write_text("not a certificate")
    return directory


def read(place: Path, text: str) -> WebSettings:
    (place / "web.yml").write_text(text)
    return read_web(place / "web.yml")


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("case", GOOD)
def test_valid_configuration_is_accepted(place: Path, case: str):
    web = read(place, GOOD[case])
    assert (web.tls is not None) == ("tls_server_config" in GOOD[case])


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("case", BAD)
def test_invalid_configuration_names_place_and_expectation(place: Path, case: str):
    text, says = BAD[case]
    with pytest.raises(ConfigError) as error:
        read(place, text)
    message = str(error.value).replace(f"{place}/", "")
    assert message.startswith("web_config web.yml")
    assert says in message
    assert "wonder" not in message


@pytest.mark.needs("openssl")
def test_configuration_takes_effect(place: Path):
    web = read(place, "\n".join(GOOD[case] for case in ("mutual", "users")))
    assert web.tls is not None
    assert (web.tls.verify_mode, web.requires_certificate) == (ssl.CERT_REQUIRED, True)
    assert (web.tls.minimum_version, web.tls.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    assert web.users == {"prometheus": HASH.encode(), "grafana": HASH.encode()}
    assert [path.name for path in web.files] == ["web.yml", "server.crt", "server.key", "ca.crt"]
    assert HASH not in repr(web)
    ciphers = read(place, GOOD["ciphers"]).tls
    assert ciphers is not None
    assert {cipher["name"] for cipher in ciphers.get_ciphers() if cipher["protocol"] == "TLSv1.2"} == {
        "ECDHE-ECDSA-AES128-GCM-SHA256"
    }


@pytest.mark.needs("openssl")
def test_certificates_may_be_inline(place: Path):
    def block(name: str) -> str:
        return "|\n" + "".join(f"    {line}\n" for line in (place / name).read_text().splitlines())

    inline = f"tls_server_config:\n  cert: {block('server.crt')}\n  key: {block('server.key')}\n"
    web = read(place, inline)
    assert web.tls is not None
    assert [path.name for path in web.files] == ["web.yml"]
    assert not list(place.glob("tls*"))


@pytest.mark.needs("openssl")
def test_non_loopback_address_requires_tls(place: Path):
    config = place / "gpumond.yaml"
    config.write_text(f"listen: 0.0.0.0:9917\nweb_config: {place / 'web.yml'}\n")
    (place / "web.yml").write_text(GOOD["users"])
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:9917 is reachable .* tls_server_config, .*--insecure"):
        load_settings(config, environ={}).web()
    assert load_settings(config, {"insecure": True}, environ={}).web().users
    (place / "web.yml").write_text(GOOD["tls"])
    assert load_settings(config, environ={}).web().tls is not None
    with pytest.raises(ConfigError, match="requires TLS and authentication"):
        load_settings(None, {"listen": "0.0.0.0:9917"}, environ={})


@pytest.mark.needs("openssl")
def test_changed_file_is_reloaded_and_an_invalid_one_is_not(place: Path, caplog: pytest.LogCaptureFixture):
    now = [0.0]
    path = place / "web.yml"
    path.write_text(GOOD["tls"])
    watched = ReloadingFile(lambda: read_web(path), lambda web: web.files, clock=lambda: now[0])

    def later() -> WebSettings:
        now[0] += 2.0
        return watched.value

    first = later()
    assert later() is first
    certificates.renew(place, "server")
    second = later()
    assert second is not first
    path.write_text("tls_server_config: {")
    for _ in range(3):
        assert later() is second
    assert caplog.text.count("its previous content stays in effect") == 1
    path.unlink()
    assert later() is second
    path.write_text(GOOD["users"])
    assert later().users
    before = watched.value
    path.write_text(GOOD["empty"])
    assert watched.value is before  # the file is read at most once a second
