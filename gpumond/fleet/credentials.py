"""Tokens and trust of the requests to many machines, from files and the environment."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumond.errors import ConfigError
from gpumond.fleet.connection import Access
from gpumond.fleet.http import checked
from gpumond.host.files import open_regular, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFiles:
    """``tokens``: a YAML file of tokens by machine. ``certificate`` and ``key``: those of the client."""

    token: Path | None = None
    tokens: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def access(files: CredentialFiles, environ: Mapping[str, str] = os.environ) -> Access:
    """Return tokens and trust. $GPUMOND_TOKEN is used without a token file. Raises ConfigError."""
    named = environ.get("GPUMOND_TOKEN")
    token = secret(files.token) if files.token else (checked(named, "GPUMOND_TOKEN") if named else None)
    tokens = _tokens(files.tokens) if files.tokens else {}
    return Access(trust=trust(files, environ.get("GPUMOND_CA_FILE") or None), token=token, tokens=tokens)


def trust(files: CredentialFiles, authorities: str | None) -> ssl.SSLContext:
    """Return a TLS context with the authorities in a file, else those of the system. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ConfigError(f"{authorities}: {error.strerror or error}") from None
    if files.certificate is not None:
        try:
            context.load_cert_chain(files.certificate, files.key, password="")  # no prompt for an encrypted key
        except OSError as error:
            raise ConfigError(f"--client-cert {files.certificate}: {error.strerror or error}") from None
    return context


def secret(file: Path) -> str:
    """Return the only line of a file. Raises ConfigError."""
    try:
        return checked(read_text(file).strip(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'not text'}") from None


def _tokens(file: Path) -> Mapping[str, str]:
    """Return the tokens by name or host of a machine. Raises ConfigError, also if other users may read the file."""
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(f"{file} contains tokens: remove the access of other users (chmod 0600 {file})")
    from gpumond.config.loading import read_yaml  # it takes half a second, and few commands read such a file

    return {name: checked(token, f"{file}: {name}") for name, token in read_yaml(file).items()}
