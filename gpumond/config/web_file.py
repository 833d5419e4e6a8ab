"""Web configuration file of the Prometheus exporters (exporter-toolkit): TLS, basic authentication, headers.

One file serves node_exporter and gpumond: https://github.com/prometheus/exporter-toolkit, docs/web-configuration.md.
Paths in it are relative to the file. An option that gpumond does not support is an error; none is ignored silently.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from gpumond.config.models import EncodableModel, expectation, parse_yaml, yaml_problem
from gpumond.facts.errors import ConfigError
from gpumond.host.files import open_regular, unreadable_text

log = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_SECONDS = 1.0


class ReloadingFile(Generic[T]):
    """Value that ``read`` derives from files, which are checked on access, at most once a second.

    If ``read`` rejects a change, one error is logged and the previous value is kept. The first read raises ConfigError
    as ``read`` does. ``files`` maps a value to the files that it was read from.
    """

    def __init__(
        self,
        read: Callable[[], T],
        files: Callable[[T], Iterable[Path]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._files, self._clock = read, files, clock
        self._value = read()
        self._loaded_signature = self._signature()
        self._checked_at = clock()

    @property
    def value(self) -> T:
        now = self._clock()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._check()
        return self._value

    def _check(self) -> None:
        signature = self._signature()
        if signature == self._loaded_signature:
            return
        self._loaded_signature = signature
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("a changed file is invalid; its previous content stays in effect: %s", error)
        else:
            log.info("reloaded after a change: %s", ", ".join(map(str, self._files(self._value))))
            self._loaded_signature = self._signature()

    def _signature(self) -> list[tuple[int, int, int] | None]:
        return [_file_signature(path) for path in self._files(self._value)]


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


TLS_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
CIPHER_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
}
"""OpenSSL names by Go's names. The suites of TLS 1.3 are always enabled, as in Go."""
CERTIFICATE_HEADER = re.compile(r"-----BEGIN CERTIFICATE-----")


def server_context(
    cert: str,
    key: str,
    client_ca: str | None,
    client_auth: ssl.VerifyMode,
    versions: tuple[str, str],
    ciphers: Sequence[str],
    prefer_own_ciphers: bool,
) -> ssl.SSLContext:
    """Return the context. Raises ConfigError if OpenSSL or this Python rejects an option."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, cert, key)
    context.minimum_version, context.maximum_version = (TLS_VERSIONS[version] for version in versions)
    if client_ca is not None:
        if not CERTIFICATE_HEADER.search(client_ca):
            raise ConfigError("client_ca: contains no certificate")
        try:
            context.load_verify_locations(cadata=client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"client_ca: {_ssl_reason(error)}") from None
    context.verify_mode = client_auth
    cipher_names = [CIPHER_SUITES[name] for name in ciphers if CIPHER_SUITES[name]]
    if cipher_names:
        context.set_ciphers(":".join(cipher_names))
    if not prefer_own_ciphers:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def alternative_names(peercert: dict[str, Any] | None) -> frozenset[str]:
    """Return all subject alternative names of a client certificate: DNS, IP address, e-mail, URI."""
    return frozenset(value for _, value in (peercert or {}).get("subjectAltName", ()))


def certificate_subjects(peercert: dict[str, Any] | None) -> frozenset[str]:
    """Return ``certificate:NAME`` for each subject alternative name of a client certificate.

    A name counts only as the type that its form has, so an authority that verifies DNS names alone cannot issue
    a URI or an e-mail address.
    """
    subjects = set()
    for kind, name in (peercert or {}).get("subjectAltName", ()):
        if kind == _kind_of(name):
            subjects.add(f"certificate:{name}")
    return frozenset(subjects)


def _kind_of(name: str) -> str:
    """Return the type of a subject alternative name with this form."""
    if "://" in name:
        return "URI"
    if "@" in name:
        return "email"
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "DNS"
    return "IP Address"


def _load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load certificate and key from an anonymous file: OpenSSL only accepts files, and no other process sees this
    one."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, f"{cert}\n{key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"cert and key: {_ssl_reason(error)}") from None
    finally:
        os.close(descriptor)


def _ssl_reason(error: Exception) -> str:
    """Return OpenSSL's message without its source position and file name."""
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error).partition(" (")[0]


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Validated web configuration. ``files``: the files that it was read from."""

    tls: ssl.SSLContext | None = None
    requires_certificate: bool = False
    allowed_sans: frozenset[str] = frozenset()
    headers: tuple[tuple[str, str], ...] = ()
    users: dict[str, bytes] = field(default_factory=dict, repr=False)
    files: tuple[Path, ...] = ()

    @property
    def accepts_client_certificates(self) -> bool:
        """Return True if clients may present a certificate, which is then verified."""
        return self.tls is not None and self.tls.verify_mode != ssl.CERT_NONE


TlsVersion = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
UNVERIFYING_TYPES = ("RequestClientCert", "RequireAnyClientCert")
ALLOWED_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
BCRYPT_HASH = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
MAX_BCRYPT_COST = 15
MAX_BYTES = 1 << 20


class WebConfigModel(EncodableModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class TlsConfig(WebConfigModel):
    cert: str | None = None
    key: str | None = Field(default=None, repr=False)
    client_ca: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    @field_validator("cipher_suites")
    @classmethod
    def _ciphers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in CIPHER_SUITES:
                raise ValueError(
                    f"unknown or unsafe cipher suite {name!r:.60}; expected one or more of {', '.join(CIPHER_SUITES)}"
                )
        return names

    @model_validator(mode="after")
    def _check(self) -> TlsConfig:
        for name in ("cert", "key", "client_ca"):
            if getattr(self, name) and getattr(self, f"{name}_file"):
                raise ValueError(f"{name} and {name}_file are both set; set only one")
        for name in ("cert", "key"):
            if not getattr(self, name) and not getattr(self, f"{name}_file"):
                raise ValueError(f"set {name}_file (or {name})")
        self._check_client_auth()
        if TLS_VERSIONS[self.min_version] > TLS_VERSIONS[self.max_version]:
            raise ValueError(f"min_version {self.min_version} is above max_version {self.max_version}")
        return self

    def _check_client_auth(self) -> None:
        kind, ca = self.client_auth_type, self.client_ca or self.client_ca_file
        if kind in UNVERIFYING_TYPES:
            raise ValueError(f"client_auth_type {kind} accepts any certificate; use RequireAndVerifyClientCert")
        if kind not in CLIENT_AUTH:
            raise ValueError(f"unknown client_auth_type {kind!r:.40}; expected one of {', '.join(CLIENT_AUTH)}")
        if ca and kind == "NoClientCert":
            raise ValueError("client_ca is set, but client_auth_type doesn't request certificates")
        if not ca and kind != "NoClientCert":
            raise ValueError(f"client_auth_type {kind} requires client_ca_file (or client_ca)")
        if self.client_allowed_sans and kind != "RequireAndVerifyClientCert":
            raise ValueError("client_allowed_sans requires client_auth_type RequireAndVerifyClientCert")


class HttpConfig(WebConfigModel):
    """HTTP options. ``http2`` is accepted without effect: gpumond serves HTTP/1.1, which every HTTP/2 client
    supports."""

    http2: bool = True
    headers: dict[str, str] = Field(default_factory=dict)

    @field_validator("headers")
    @classmethod
    def _allowed(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name not in ALLOWED_HEADERS:
                raise ValueError(
                    f"header {name!r:.60} can't be configured; expected one or more of {', '.join(ALLOWED_HEADERS)}"
                )
            if value and ALLOWED_HEADERS[name] and value.lower() not in ALLOWED_HEADERS[name]:
                raise ValueError(f"{name}: invalid value {value!r:.60}; expected {' or '.join(ALLOWED_HEADERS[name])}")
            if not value.isascii() or not (value.isprintable() or not value):
                raise ValueError(f"{name}: expected printable ASCII")
        return {name: value for name, value in headers.items() if value}


class WebFile(WebConfigModel):
    tls_server_config: TlsConfig | None = None
    http_server_config: HttpConfig = HttpConfig()
    basic_auth_users: dict[str, str] = Field(default={}, repr=False)

    @field_validator("basic_auth_users", mode="before")
    @classmethod
    def _hashes(cls, users: object) -> object:
        if users is None:
            return {}
        if not isinstance(users, dict):
            raise ValueError("expected names and bcrypt hashes, as in `prometheus: $2y$10$…`")
        for name, bcrypt_hash in users.items():
            if not isinstance(name, str) or not name or ":" in name:
                raise ValueError(f"{name!r:.60} isn't a valid user name")
            match = BCRYPT_HASH.fullmatch(bcrypt_hash) if isinstance(bcrypt_hash, str) else None
            if match is None:
                raise ValueError(f"{name!r:.60}: expected a bcrypt hash (htpasswd -nBC 10 '' | tr -d ':\\n')")
            if not 4 <= int(match[1]) <= MAX_BCRYPT_COST:
                raise ValueError(f"{name!r:.60}: the bcrypt cost is {int(match[1])}; expected 4 to {MAX_BCRYPT_COST}")
        return users


def read_web(path: Path) -> WebSettings:
    """Read the file and the certificates that it names. Raises ConfigError with file, key and expectation."""
    try:
        file = WebFile.model_validate(_read_file(path))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, entry) for entry in error.errors())) from None
    if file.basic_auth_users:
        _require_bcrypt(path)
    config = file.tls_server_config
    return WebSettings(
        tls=None if config is None else _ssl_context(config, path),
        requires_certificate=config is not None and config.client_auth_type == "RequireAndVerifyClientCert",
        allowed_sans=frozenset(config.client_allowed_sans if config else ()),
        headers=tuple(file.http_server_config.headers.items()),
        users={name: bcrypt_hash.encode() for name, bcrypt_hash in file.basic_auth_users.items()},
        files=(path, *_named_files(config, path)),
    )


def _read_file(path: Path) -> Any:
    import yaml  # most daemons have no file

    try:
        with open_regular(path) as file:
            text = file.read(MAX_BYTES)
        content = parse_yaml(text)
    except OSError as error:
        expected = "an exporter-toolkit web configuration with tls_server_config or basic_auth_users"
        raise ConfigError(f"web_config {unreadable_text(path, error, expected)}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        line, problem = yaml_problem(error)
        line_text = "" if line is None else f", line {line}"
        raise ConfigError(f"web_config {path}{line_text}: {problem}") from None
    return {} if content is None else content


def _ssl_context(config: TlsConfig, path: Path) -> ssl.SSLContext:
    def pem(name: str) -> str | None:
        file_name: str | None = getattr(config, f"{name}_file")
        if not file_name:
            inline: str | None = getattr(config, name)
            return inline
        try:
            return (path.parent / file_name).read_text(encoding="ascii")
        except OSError as error:
            problem = error.strerror
        except UnicodeDecodeError:
            problem = "not a PEM file"
        raise ConfigError(f"web_config {path}: tls_server_config.{name}_file: {file_name}: {problem}")

    try:
        return server_context(
            pem("cert") or "",
            pem("key") or "",
            pem("client_ca"),
            CLIENT_AUTH[config.client_auth_type],
            (config.min_version, config.max_version),
            config.cipher_suites,
            config.prefer_server_cipher_suites,
        )
    except ConfigError as error:
        raise ConfigError(f"web_config {path}: tls_server_config: {error}") from None


def _named_files(config: TlsConfig | None, path: Path) -> Iterator[Path]:
    for file_name in (config.cert_file, config.key_file, config.client_ca_file) if config else ():
        if file_name:
            yield path.parent / file_name


def _require_bcrypt(path: Path) -> None:
    try:
        import bcrypt  # noqa: F401
    except ImportError:
        raise ConfigError(f"web_config {path}: basic_auth_users requires bcrypt: pip install bcrypt") from None


def _explain(path: Path, error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    return f"web_config {path}: {f'{key}: ' if key else ''}{expectation(error)}"
