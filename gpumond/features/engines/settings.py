"""Serving engines in the configuration file; docs/reference/configuration.md describes the keys.

An engine is declared, never discovered. Its address is on this machine: loopback, a Unix socket, or, with TLS, an
address of a pod.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gpumond.config.models import Strict
from gpumond.facts.pools import ENGINE_STEP
from gpumond.features.engines.kinds import KINDS, spec_of
from gpumond.features.engines.spec import Address, Auth, Call, Declaration, Generic, Pointers

POINTER = re.compile(r"(/([^~/]|~[01])*)+")
HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")


class AuthConfig(Strict):
    """Credentials of an engine: exactly one kind, each secret in a file."""

    bearer_token_file: Path | None = None
    username: str | None = None
    password_file: Path | None = None
    header: str | None = None
    header_file: Path | None = None
    hmac_key_file: Path | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> AuthConfig:
        files = (self.bearer_token_file, self.password_file, self.header_file, self.hmac_key_file)
        if sum(file is not None for file in files) != 1:
            raise ValueError(
                "expected exactly one of bearer_token_file, password_file, header_file and hmac_key_file; "
                "a secret is read from a file only"
            )
        if (self.username is None) != (self.password_file is None):
            raise ValueError("username and password_file belong together")
        if (self.header is None) != (self.header_file is None):
            raise ValueError("header and header_file belong together")
        if self.header is not None and not HEADER.fullmatch(self.header):
            raise ValueError(f"{self.header!r:.80} is not the name of a header, such as X-Api-Key")
        return self


class RequestConfig(Strict):
    """A request of a generic engine: `get` or `post` with a path, and for `post` a JSON body."""

    get: str | None = None
    post: str | None = None
    body: Any = None

    @model_validator(mode="after")
    def _one_method(self) -> RequestConfig:
        path = self.get if self.get is not None else self.post
        if path is None or (self.get is not None and self.post is not None):
            raise ValueError("expected exactly one of get and post, with a path such as /unload")
        if not re.fullmatch(r"/[!-~]*", path):
            raise ValueError(f"{path!r:.80} is not a path; expected one such as /unload")
        if self.get is not None and self.body is not None:
            raise ValueError("body belongs to post")
        return self

    def call(self) -> Call:
        if self.get is not None:
            return Call(method="GET", path=self.get)
        return Call(method="POST", path=self.post or "/", body=self.body)


class StateConfig(RequestConfig):
    """A generic engine's harmless read, with JSON pointers into its answer."""

    running: str = ""
    waiting: str = ""
    work: str = ""
    models: str = ""
    asleep: str = ""
    held_bytes: str = ""
    kv_cache_bytes: str = ""
    kv_cache_used_ratio: str = ""

    @field_validator(*Pointers.__dataclass_fields__)
    @classmethod
    def _pointer(cls, pointer: str) -> str:
        if pointer and not POINTER.fullmatch(pointer):
            raise ValueError("expected a JSON pointer such as /requests/running")
        return pointer

    def pointers(self) -> Pointers:
        return Pointers(**{name: getattr(self, name) for name in Pointers.__dataclass_fields__})


class ReleaseConfig(RequestConfig):
    """A generic engine's release. `ends_process`: the process that holds the memory ends. `moves_to_host`: the memory
    moves to the host. `waits`: the engine completes running requests first.
    """

    ends_process: bool = False
    moves_to_host: bool = True
    waits: bool = False


class EngineConfig(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    kind: str
    url: str
    metrics_url: str | None = None
    auth: AuthConfig | None = None
    ca_file: Path | None = None
    server_name: str | None = None
    user: str | None = None
    allow: tuple[Literal["engine"], ...] | None = None
    lever: str | None = None
    models: tuple[str, ...] = ()
    wake: bool | RequestConfig = True
    state: StateConfig | None = None
    release: ReleaseConfig | None = None

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        kinds = [spec.kind for spec in KINDS]
        if kind not in kinds:
            raise ValueError(f"expected one of {', '.join(kinds)}; describe any other engine with kind: generic")
        return kind

    @field_validator("url", "metrics_url")
    @classmethod
    def _local(cls, url: str | None) -> str | None:
        if url is not None:
            address_of(url)
        return url

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        spec, name = spec_of(self.kind), self.name
        levers = [lever.name for lever in spec.levers]
        if self.lever is not None and self.lever not in levers:
            expected = f"expected one of {', '.join(levers)}" if levers else "remove the key"
            raise ValueError(f"{name}: kind {self.kind} has no lever {self.lever!r:.40}; {expected}")
        if self.allow and spec.without_levers:
            raise ValueError(
                f"{name}: gpumond releases no memory of kind {self.kind}: {spec.without_levers}; remove allow"
            )
        is_generic = self.kind == "generic"
        for key in ("state", "release"):
            if not is_generic and getattr(self, key) is not None:
                raise ValueError(f"{name}: {key} belongs to kind generic; remove it, or change the kind")
        if not is_generic and isinstance(self.wake, RequestConfig):
            raise ValueError(f"{name}: expected wake: true or false; a request belongs to kind generic")
        if is_generic and self.state is None:
            raise ValueError(
                f"{name}: kind generic requires state, a request that changes nothing, such as get: /status"
            )
        if is_generic and self.allow:
            self._check_generic()
        if self.kind == "triton" and self.allow and (not self.models or self.metrics_url is None):
            raise ValueError(
                f"{name}: allow requires models, those to unload, and metrics_url, for the pending requests"
            )
        remote = self.url.startswith("https:")
        if not remote and (self.ca_file is not None or self.server_name is not None):
            raise ValueError(f"{name}: ca_file and server_name require an https:// url")
        return self

    def _check_generic(self) -> None:
        if self.release is None:
            raise ValueError(f"{self.name}: allow requires release, the request that releases memory")
        if self.state and not (self.state.running or self.state.waiting) and not self.release.waits:
            raise ValueError(
                f"{self.name}: allow requires state.running or state.waiting, so that a busy engine is not "
                "interrupted; or release.waits: true, if the engine completes running requests first"
            )

    def declaration(self) -> Declaration:
        spec = spec_of(self.kind)
        allowed = () if spec.warning or spec.without_levers else (ENGINE_STEP,)
        auth = self.auth or AuthConfig.model_construct()
        return Declaration(
            name=self.name,
            kind=self.kind,
            address=address_of(self.url),
            metrics_address=address_of(self.metrics_url) if self.metrics_url else None,
            auth=Auth(
                bearer_token_file=auth.bearer_token_file,
                username=auth.username or "",
                password_file=auth.password_file,
                header=auth.header or "",
                header_file=auth.header_file,
                hmac_key_file=auth.hmac_key_file,
            ),
            ca_file=self.ca_file,
            server_name=self.server_name,
            user=self.user,
            allow=allowed if self.allow is None else self.allow,
            lever=self.lever or "",
            wake=self.wake is not False,
            models=self.models,
            generic=self._generic(),
        )

    def _generic(self) -> Generic | None:
        if self.state is None:
            return None
        release = self.release or ReleaseConfig(post="/")
        return Generic(
            read=self.state.call(),
            pointers=self.state.pointers(),
            release=self.release.call() if self.release else None,
            wake=self.wake.call() if isinstance(self.wake, RequestConfig) else None,
            ends_holder=release.ends_process,
            moves_to_host=release.moves_to_host,
            waits=release.waits,
        )


def address_of(url: str) -> Address:
    """Return the address of a URL. Raises ValueError unless it is on this machine or, with TLS, of a pod."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError("expected unix: and an absolute path, as in unix:/run/engine.sock")
        return Address("unix", path)
    expected = "expected http://127.0.0.1:PORT, unix:/PATH, or https:// with the address of a pod"
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise ValueError(expected) from None
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{expected}, without user, password and query")
    if re.search(r"[^!-~]", parts.path):
        raise ValueError(f"{expected}, with a path of printable characters")
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(f"{expected}: an IP address, since the address of a name may change") from None
    if address.is_loopback or (parts.scheme == "https" and address.is_private and not address.is_unspecified):
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return Address(scheme, str(address), port or (443 if scheme == "https" else 80), parts.path.rstrip("/"))
    if address.is_private and not address.is_unspecified:
        raise ValueError(f"{expected}: {address} is not loopback, so https:// is required")
    raise ValueError(f"{expected}: {address} is not an address of this machine")
