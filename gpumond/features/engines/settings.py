"""Serving engines in the configuration file; docs/reference/engines.md describes the keys.

An engine is declared, never discovered. Its address is on this machine: loopback, a Unix socket, or, with TLS, a
private IP address.
"""

from __future__ import annotations

import re
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from gpumond.config.models import StrictModel
from gpumond.facts.pools import ENGINE_STEP
from gpumond.features.engines.engine_kinds import KINDS
from gpumond.features.engines.spec import Address, EngineRequest, EngineSpec, ReleaseMethod

POINTER_PATTERN = re.compile(r"(/([^~/]|~[01])*)+")
HEADER_PATTERN = re.compile(r"[A-Za-z0-9-]{1,64}")


def _check_pointer(text: str) -> str:
    if text and not POINTER_PATTERN.fullmatch(text):
        raise ValueError("expected a JSON pointer such as /requests/running")
    return text


Pointer = Annotated[str, AfterValidator(_check_pointer)]


class AuthConfig(StrictModel):
    """Credentials of an engine: exactly one kind, each secret in a file, which is read at each use."""

    bearer_token_file: Path | None = None
    username: str | None = None
    password_file: Path | None = None
    header: str | None = None
    header_file: Path | None = None
    hmac_key_file: Path | None = None

    @model_validator(mode="after")
    def _check_one_kind(self) -> AuthConfig:
        files = (self.bearer_token_file, self.password_file, self.header_file, self.hmac_key_file)
        if sum(file is not None for file in files) != 1:
            raise ValueError(
                "set exactly one of bearer_token_file, password_file, header_file and hmac_key_file; "
                "secrets are only read from files"
            )
        if (self.username is None) != (self.password_file is None):
            raise ValueError("set both username and password_file, or neither")
        if (self.header is None) != (self.header_file is None):
            raise ValueError("set both header and header_file, or neither")
        if self.header is not None and not HEADER_PATTERN.fullmatch(self.header):
            raise ValueError(f"{self.header!r:.80} isn't a header name such as X-Api-Key")
        return self


class RequestConfig(StrictModel):
    """A request of a generic engine: `get` or `post` with a path, and for `post` a JSON body."""

    get: str | None = None
    post: str | None = None
    body: Any = None

    @model_validator(mode="after")
    def _check_one_method(self) -> RequestConfig:
        path = self.get if self.get is not None else self.post
        if path is None or (self.get is not None and self.post is not None):
            raise ValueError("set exactly one of get and post, with a path such as /unload")
        if not re.fullmatch(r"/[!-~]*", path):
            raise ValueError(f"{path!r:.80} isn't a path; expected one such as /unload")
        if self.get is not None and self.body is not None:
            raise ValueError("body is only valid with post")
        return self

    @property
    def request(self) -> EngineRequest:
        method = "POST" if self.get is None else "GET"
        return EngineRequest(method=method, path=self.get or self.post or "/", body=self.body)


class StateConfig(RequestConfig):
    """A generic engine's harmless read, with JSON pointers (RFC 6901) into its answer; empty for what it lacks."""

    running: Pointer = ""
    waiting: Pointer = ""
    work: Pointer = ""
    models: Pointer = ""
    sleeping: Pointer = ""
    held_bytes: Pointer = ""
    kv_cache_bytes: Pointer = ""
    kv_cache_used_ratio: Pointer = ""


class ReleaseConfig(RequestConfig):
    """A generic engine's release. `ends_process`: the process that holds the memory ends. `moves_to_host`: the memory
    moves to the host. `waits`: the engine completes running requests first.
    """

    ends_process: bool = False
    moves_to_host: bool = True
    waits: bool = False


class EngineConfig(StrictModel):
    """An engine as the configuration declares it. ``models``: those that may be released, also pinned ones; empty for
    all that are not pinned. ``wake``: False if no release is undone.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    kind: str
    url: str
    metrics_url: str | None = None
    auth: AuthConfig | None = None
    ca_file: Path | None = None
    server_name: str | None = None
    user: str | None = None
    allow: tuple[Literal["engine"], ...] | None = None
    method: str | None = None
    models: tuple[str, ...] = ()
    wake: bool | RequestConfig = True
    state: StateConfig | None = None
    release: ReleaseConfig | None = None

    @cached_property
    def address(self) -> Address:
        return address_of(self.url)

    @cached_property
    def metrics_address(self) -> Address | None:
        return address_of(self.metrics_url) if self.metrics_url else None

    @cached_property
    def spec(self) -> EngineSpec:
        return KINDS[self.kind]

    @property
    def may_release(self) -> bool:
        """True if the declaration allows the flush step, which a kind without a risk does unless it says otherwise."""
        if self.allow is None:
            return not (self.spec.warning or self.spec.no_methods_reason)
        return ENGINE_STEP in self.allow

    @property
    def release_method(self) -> ReleaseMethod | None:
        """The method that the declaration allows, or None."""
        if not self.may_release:
            return None
        if self.spec.method_of is not None:
            return self.spec.method_of(self)
        return next((method for method in self.spec.methods if self.method in (None, method.name)), None)

    @property
    def trusts_the_first_listener(self) -> bool:
        """True if its secret is sent to a listener that neither ``user`` nor a certificate names."""
        return self.auth is not None and self.user is None and self.address.scheme != "https"

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in KINDS:
            raise ValueError(f"expected one of {', '.join(KINDS)}; describe any other engine with kind: generic")
        return kind

    @field_validator("url", "metrics_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None:
            address_of(url)
        return url

    @model_validator(mode="after")
    def _check_config(self) -> EngineConfig:
        if config_error := self._config_error():
            raise ValueError(f"{self.name}: {config_error}")
        return self

    def _config_error(self) -> str:
        """Return what contradicts the kind or the address; empty if nothing does."""
        names = [method.name for method in self.spec.methods]
        if self.method is not None and self.method not in names:
            expected = f"expected one of {', '.join(names)}" if names else "remove the key"
            return f"kind {self.kind} has no method {self.method!r:.40}; {expected}"
        if self.allow and self.spec.no_methods_reason:
            return f"kind {self.kind} can't be released: {self.spec.no_methods_reason}; remove allow"
        if self.kind == "generic" and self.state is None:
            return "kind generic requires state, a request that changes nothing, such as get: /status"
        if self.kind != "generic":
            for key in ("state", "release"):
                if getattr(self, key) is not None:
                    return f"{key} is only valid with kind: generic; remove it, or change the kind"
            if isinstance(self.wake, RequestConfig):
                return "wake must be true or false; only the kind generic has a request here"
        if self.allow and (config_error := self.spec.config_error(self)):
            return config_error
        if not self.url.startswith("https:") and (self.ca_file is not None or self.server_name is not None):
            return "ca_file and server_name require an https:// url"
        return ""


def address_of(url: str) -> Address:
    """Return the address of a URL. Raises ValueError unless it is on this machine or, with TLS, private."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError("expected unix: and an absolute path, as in unix:/run/engine.sock")
        return Address("unix", path)
    expected = "expected http://127.0.0.1:PORT, unix:/PATH, or https:// with a private IP address"
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise ValueError(expected) from None
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{expected}, without a user, password or query")
    if re.search(r"[^!-~]", parts.path):
        raise ValueError(f"{expected}, with a path of printable characters")
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(f"{expected}; use an IP address, because a name's address may change") from None
    is_private = address.is_private and not address.is_unspecified
    if address.is_loopback or (parts.scheme == "https" and is_private):
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return Address(scheme, str(address), port or (443 if scheme == "https" else 80), parts.path.rstrip("/"))
    if is_private:
        raise ValueError(f"{address} isn't loopback, so https:// is required")
    raise ValueError(f"{address} is neither a loopback nor a private address; {expected}")
