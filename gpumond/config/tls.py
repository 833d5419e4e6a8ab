"""TLS server contexts from PEM texts, with the option names of Prometheus' web configuration, which are Go's; and
files that are reloaded when they change.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpumond.facts.errors import ConfigError

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
        self._loaded = self._signature()
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
        if signature == self._loaded:
            return
        self._loaded = signature
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("a changed file is invalid; its previous content stays in effect: %s", error)
        else:
            log.info("reloaded after a change: %s", ", ".join(map(str, self._files(self._value))))
            self._loaded = self._signature()

    def _signature(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._files(self._value)]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
CIPHERS = {
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
BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----")


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
    _load(context, cert, key)
    context.minimum_version, context.maximum_version = (VERSIONS[version] for version in versions)
    if client_ca is not None:
        if not BLOCK.search(client_ca):
            raise ConfigError("client_ca: contains no certificate")
        try:
            context.load_verify_locations(cadata=client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"client_ca: {_reason(error)}") from None
    context.verify_mode = client_auth
    named = [CIPHERS[name] for name in ciphers if CIPHERS[name]]
    if named:
        context.set_ciphers(":".join(named))
    if not prefer_own_ciphers:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def alternative_names(peercert: dict[str, Any] | None) -> frozenset[str]:
    """Return all subject alternative names of a client certificate: DNS, IP address, e-mail, URI."""
    return frozenset(value for _, value in (peercert or {}).get("subjectAltName", ()))


def certificate_subjects(peercert: dict[str, Any] | None) -> frozenset[str]:
    """Return ``certificate:NAME`` for each subject alternative name of a client certificate.

    A name counts only as the type that its form has, so that an authority that verifies DNS names alone cannot issue
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


def _load(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load certificate and key from an anonymous file: OpenSSL only accepts files, and no other process sees this
    one."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, f"{cert}\n{key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"cert and key: {_reason(error)}") from None
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """Return OpenSSL's message without its source position and file name."""
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error).partition(" (")[0]
