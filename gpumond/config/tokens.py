"""File of tokens, kept as hashes: one per line, ``NAME SCOPE[,SCOPE] SHA256``.

A token is 256 random bits after the prefix ``gpm_``. A plain SHA-256 of it is therefore not reversible, and secret
scanners can detect it. Instead of a hash, a line may contain ``certificate:NAME``, a subject alternative name of client
certificates, ``service-account:NAMESPACE/NAME``, a service account of Kubernetes, or what the declared proxy states
about who sends a request: ``user:NAME``, ``email:ADDRESS`` or ``group:NAME``. That proxy is declared here, too.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import pwd
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from gpumond.config.models import StrictModel
from gpumond.facts.errors import ConfigError
from gpumond.host.files import open_regular, unreadable_text

TOKEN_SCOPES = ("read", "rules", "flush", "admin")
TOKEN_PREFIX = "gpm_"
MAX_BYTES = 1 << 20
EXAMPLE = "nightly flush,read 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

_EMPTY_DIGEST = hashlib.sha256(b"").digest()
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_CERTIFICATE_PREFIX, _ACCOUNT_PREFIX = "certificate:", "service-account:"
_IDENTITY_PREFIXES = ("user:", "email:", "group:")
_SUBJECT = re.compile(
    rf"{_CERTIFICATE_PREFIX}[!-~]{{1,512}}|{_ACCOUNT_PREFIX}[a-z0-9-]{{1,63}}/[a-z0-9.-]{{1,253}}|"
    rf"({'|'.join(_IDENTITY_PREFIXES)})[!-~]{{1,256}}"
)


@dataclass(frozen=True, slots=True)
class Token:
    """Entry of the file. ``scopes``: read, rules, flush, admin (includes all others).

    It has the ``digest`` of a token, or a ``subject``, such as ``certificate:NAME``.
    """

    name: str
    scopes: frozenset[str]
    digest: bytes = b""
    subject: str = ""


def token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read the tokens. Raises ConfigError for an invalid line, and for a file that other users can read or write."""
    try:
        with open_regular(path) as file:
            _check_owner(path, os.fstat(file.fileno()))
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"tokens_file {unreadable_text(path, error, f'lines such as `{EXAMPLE}`')}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"tokens_file {path}: more than {MAX_BYTES} bytes")
    return parse_tokens(content.decode("utf-8", "replace"), str(path))


def parse_tokens(text: str, where: str) -> tuple[Token, ...]:
    tokens: dict[str, Token] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        token = _parse_line(words, f"tokens_file {where}, line {number}")
        if token.name in tokens:
            raise ConfigError(f"tokens_file {where}, line {number}: the name {token.name!r} is used twice")
        if token.subject and token.subject in {other.subject for other in tokens.values()}:
            raise ConfigError(f"tokens_file {where}, line {number}: {token.subject} is on two lines")
        if token.digest and token.digest in {other.digest for other in tokens.values()}:
            raise ConfigError(f"tokens_file {where}, line {number}: {token.name} has the same hash as another line")
        tokens[token.name] = token
    return tuple(tokens.values())


def check_subjects(
    tokens: Iterable[Token], accepts_certificates: bool, reviews_tokens: bool, has_identity_proxy: bool = False
) -> None:
    """Raise ConfigError for an entry that no caller can have, because the daemon does not verify its kind."""
    for token in tokens:
        if token.subject.startswith(_CERTIFICATE_PREFIX) and not accepts_certificates:
            raise ConfigError(
                f"tokens_file: {token.name} is a certificate, but the daemon requests none; set client_ca_file and "
                "client_auth_type: VerifyClientCertIfGiven in web_config"
            )
        if token.subject.startswith(_ACCOUNT_PREFIX) and not reviews_tokens:
            raise ConfigError(
                f"tokens_file: {token.name} is a Kubernetes service account, but token review is off; set "
                "token_review_audience"
            )
        if token.subject.startswith(_IDENTITY_PREFIXES) and not has_identity_proxy:
            raise ConfigError(
                f"tokens_file: {token.name} names a user or group that only a proxy can verify; set identity_proxy"
            )


def _parse_line(words: list[str], place: str) -> Token:
    """Parse one line. Error messages never repeat a word that could be the token itself."""
    if any(word.startswith(TOKEN_PREFIX) for word in words):
        raise ConfigError(f"{place}: contains a token; write its SHA-256 instead (printf %s TOKEN | sha256sum)")
    if len(words) != 3:
        raise ConfigError(f"{place}: expected NAME SCOPE[,SCOPE] SHA256, as in `{EXAMPLE}`")
    name, scopes, digest_or_subject = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: expected a name of 1 to 64 characters from A-Z, a-z, 0-9, ., _ and -")
    for scope in scopes.split(","):
        if scope not in TOKEN_SCOPES:
            raise ConfigError(
                f"{place}: {name}: unknown scope {scope!r:.40}; expected one or more of {', '.join(TOKEN_SCOPES)}"
            )
    if _SUBJECT.fullmatch(digest_or_subject):
        return Token(name, frozenset(scopes.split(",")), subject=digest_or_subject)
    if not _DIGEST.fullmatch(digest_or_subject):
        raise ConfigError(
            f"{place}: {name}: expected a SHA-256 of 64 hexadecimal digits, certificate:NAME, "
            "service-account:NAMESPACE/NAME, user:NAME, email:ADDRESS or group:NAME"
        )
    hash_bytes = bytes.fromhex(digest_or_subject)
    if hash_bytes == _EMPTY_DIGEST:
        raise ConfigError(f"{place}: {name}: this is the hash of an empty token; was the variable with the token set?")
    return Token(name, frozenset(scopes.split(",")), hash_bytes)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"tokens_file {path} belongs to uid {status.st_uid}; expected the daemon's own user or root")
    if status.st_mode & 0o037:
        mode = f"{status.st_mode & 0o777:04o}"
        raise ConfigError(f"tokens_file {path} has mode {mode}; expected 0600 (chmod 600), or 0640")


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
ShortText = Annotated[str, Field(min_length=1, max_length=256)]


class IdentityProxy(StrictModel):
    """Proxy whose headers `X-Forwarded-User`, `-Email` and `-Groups` state who sends a request.

    Those of all others are ignored. Users without a line in `tokens_file` see their own programs only.
    """

    addresses: tuple[str, ...] = Field(
        (), max_length=64, description="its addresses or networks on other machines, such as `10.1.0.0/28`"
    )
    user: ShortText | None = Field(
        None, description="the user that it runs as on this machine, by name or uid; the kernel verifies it"
    )
    namespaces: dict[ShortText, tuple[ShortText, ...]] = Field(
        {}, description="by group, patterns of the Kubernetes namespaces whose programs its members see"
    )

    @field_validator("addresses")
    @classmethod
    def _networks(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if parse_network(text).network_address.is_loopback:
                raise ValueError(
                    f"{text}: any program on this machine can connect from this address, so it doesn't identify the "
                    "proxy; set user instead"
                )
        return texts

    @model_validator(mode="after")
    def _check_origin(self) -> IdentityProxy:
        if not self.addresses and self.user is None:
            raise ValueError("set the proxy's addresses or, if it runs on this machine, its user")
        return self

    def resolve_uid(self) -> int | None:
        """Return the uid of its user on this machine, None without one. Raises ConfigError."""
        if self.user is None:
            return None
        try:
            return int(self.user) if self.user.isdecimal() else pwd.getpwnam(self.user).pw_uid
        except KeyError:
            raise ConfigError(f"identity_proxy: user: this machine has no user {self.user!r:.80}") from None


def parse_network(text: str) -> Network:
    """Return the network of an address or a network. Raises ValueError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r:.80} isn't an IP address or network such as 10.1.0.0/28") from None
