"""Web configuration file of the Prometheus exporters (exporter-toolkit): TLS, basic authentication, headers.

One file serves node_exporter and gpumond: https://github.com/prometheus/exporter-toolkit, docs/web-configuration.md.
Paths in it are relative to the file. An option that gpumond does not support is an error; none is ignored silently.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from gpumond.config.expectations import expectation, yaml_problem
from gpumond.config.models import Encodable
from gpumond.config.tls import CIPHERS, VERSIONS, server_context
from gpumond.facts.errors import ConfigError
from gpumond.host.files import open_regular


@dataclass(frozen=True, slots=True)
class Web:
    """Validated web configuration. ``files``: the files that it was read from."""

    tls: ssl.SSLContext | None = None
    mutual: bool = False
    allowed_sans: frozenset[str] = frozenset()
    headers: tuple[tuple[str, str], ...] = ()
    users: dict[str, bytes] = field(default_factory=dict, repr=False)
    files: tuple[Path, ...] = ()

    @property
    def client_certificates(self) -> bool:
        """Return True if clients may present a certificate, which is then verified."""
        return self.tls is not None and self.tls.verify_mode != ssl.CERT_NONE


Version = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")
HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
BCRYPT = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
MAX_COST = 15
MAX_BYTES = 1 << 20


class Part(Encodable):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class TlsConfig(Part):
    cert: str | None = None
    key: str | None = Field(default=None, repr=False)
    client_ca: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: Version = "TLS12"
    max_version: Version = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    @field_validator("cipher_suites")
    @classmethod
    def _ciphers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in CIPHERS:
                raise ValueError(
                    f"unknown or unsafe cipher suite {name!r:.60}; expected one or more of {', '.join(CIPHERS)}"
                )
        return names

    @model_validator(mode="after")
    def _check(self) -> TlsConfig:
        for name in ("cert", "key", "client_ca"):
            if getattr(self, name) and getattr(self, f"{name}_file"):
                raise ValueError(f"{name} and {name}_file are both set; expected one of them")
        for name in ("cert", "key"):
            if not getattr(self, name) and not getattr(self, f"{name}_file"):
                raise ValueError(f"expected {name}_file (or {name})")
        self._check_client_auth()
        if VERSIONS[self.min_version] > VERSIONS[self.max_version]:
            raise ValueError(f"min_version {self.min_version} is above max_version {self.max_version}")
        return self

    def _check_client_auth(self) -> None:
        kind, ca = self.client_auth_type, self.client_ca or self.client_ca_file
        if kind in UNVERIFIED:
            raise ValueError(f"client_auth_type {kind} accepts any certificate; use RequireAndVerifyClientCert")
        if kind not in CLIENT_AUTH:
            raise ValueError(f"unknown client_auth_type {kind!r:.40}; expected one of {', '.join(CLIENT_AUTH)}")
        if ca and kind == "NoClientCert":
            raise ValueError("client_ca is set, but client_auth_type doesn't request certificates")
        if not ca and kind != "NoClientCert":
            raise ValueError(f"client_auth_type {kind} requires client_ca_file (or client_ca)")
        if self.client_allowed_sans and kind != "RequireAndVerifyClientCert":
            raise ValueError("client_allowed_sans requires client_auth_type RequireAndVerifyClientCert")


class HttpConfig(Part):
    """HTTP options. ``http2`` is accepted without effect: gpumond serves HTTP/1.1, which every HTTP/2 client
    supports."""

    http2: bool = True
    headers: dict[str, str] = Field(default_factory=dict)

    @field_validator("headers")
    @classmethod
    def _allowed(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name not in HEADERS:
                raise ValueError(
                    f"header {name!r:.60} can't be configured; expected one or more of {', '.join(HEADERS)}"
                )
            if value and HEADERS[name] and value.lower() not in HEADERS[name]:
                raise ValueError(f"{name}: invalid value {value!r:.60}; expected {' or '.join(HEADERS[name])}")
            if not value.isascii() or not (value.isprintable() or not value):
                raise ValueError(f"{name}: expected printable ASCII")
        return {name: value for name, value in headers.items() if value}


class WebFile(Part):
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
        for name, hashed in users.items():
            if not isinstance(name, str) or not name or ":" in name:
                raise ValueError(f"{name!r:.60} isn't a valid user name")
            found = BCRYPT.fullmatch(hashed) if isinstance(hashed, str) else None
            if found is None:
                raise ValueError(f"{name!r:.60}: expected a bcrypt hash (htpasswd -nBC 10 '' | tr -d ':\\n')")
            if not 4 <= int(found[1]) <= MAX_COST:
                raise ValueError(f"{name!r:.60}: the bcrypt cost is {int(found[1])}; expected 4 to {MAX_COST}")
        return users


def read_web(path: Path) -> Web:
    """Read the file and the certificates that it names. Raises ConfigError with file, key and expectation."""
    try:
        file = WebFile.model_validate(_content(path))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, entry) for entry in error.errors())) from None
    if file.basic_auth_users:
        _require_bcrypt(path)
    config = file.tls_server_config
    return Web(
        tls=None if config is None else _context(config, path),
        mutual=config is not None and config.client_auth_type == "RequireAndVerifyClientCert",
        allowed_sans=frozenset(config.client_allowed_sans if config else ()),
        headers=tuple(file.http_server_config.headers.items()),
        users={name: hashed.encode() for name, hashed in file.basic_auth_users.items()},
        files=(path, *_named_files(config, path)),
    )


def _content(path: Path) -> Any:
    import yaml  # most daemons have no file

    try:
        with open_regular(path) as file:
            text = file.read(MAX_BYTES)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"web_config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line, problem = yaml_problem(error)
        place = "" if line is None else f", line {line}"
        raise ConfigError(f"web_config {path}{place}: {problem}") from None
    return {} if content is None else content


def _context(config: TlsConfig, path: Path) -> ssl.SSLContext:
    def pem(name: str) -> str | None:
        named: str | None = getattr(config, f"{name}_file")
        if not named:
            inline: str | None = getattr(config, name)
            return inline
        try:
            return (path.parent / named).read_text(encoding="ascii")
        except OSError as error:
            problem = error.strerror
        except UnicodeDecodeError:
            problem = "not a PEM file"
        raise ConfigError(f"web_config {path}: tls_server_config.{name}_file: {named}: {problem}")

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
    for named in (config.cert_file, config.key_file, config.client_ca_file) if config else ():
        if named:
            yield path.parent / named


def _require_bcrypt(path: Path) -> None:
    try:
        import bcrypt  # noqa: F401
    except ImportError:
        raise ConfigError(f"web_config {path}: basic_auth_users requires bcrypt: pip install bcrypt") from None


def _explain(path: Path, error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    return f"web_config {path}: {f'{key}: ' if key else ''}{expectation(error)}"
