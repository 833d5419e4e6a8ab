"""Web configuration: TLS, users, headers and the limit of requests. `web_file` reads it from a file."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Web:
    """Validated web configuration. ``files``: the files that it was read from."""

    tls: ssl.SSLContext | None = None
    mutual: bool = False
    allowed_sans: frozenset[str] = frozenset()
    headers: tuple[tuple[str, str], ...] = ()
    users: dict[str, bytes] = field(default_factory=dict, repr=False)
    rate_interval: float = 0.0
    rate_burst: int = 1
    files: tuple[Path, ...] = ()

    @property
    def client_certificates(self) -> bool:
        """Return True if clients may present a certificate, which is then verified."""
        return self.tls is not None and self.tls.verify_mode != ssl.CERT_NONE
