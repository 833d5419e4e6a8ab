"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

EXTENSIONS = {
    "server": "subjectAltName=IP:127.0.0.1,DNS:localhost",
    "client": "subjectAltName=DNS:prometheus.example.com,email:ops@example.com",
    "unlisted": "subjectAltName=DNS:unlisted.example.com",
    "runner": "subjectAltName=URI:spiffe://example.org/ns/gpumond/sa/runner",
}


def make(directory: Path) -> Path:
    """``ca.crt`` and, signed by it, ``server``, ``client``, ``unlisted`` and ``runner``, each ``.crt`` and ``.key``."""
    directory.mkdir(exist_ok=True)
    authority = ["-x509", "-subj", "/CN=tests", "-addext", "basicConstraints=critical,CA:TRUE"]
    _openssl(directory, "req", *authority, *_key("ca"), "-out", "ca.crt")
    for name in EXTENSIONS:
        renew(directory, name)
    return directory


def renew(directory: Path, name: str) -> None:
    """Another certificate and key under the same names."""
    _openssl(directory, "req", *_key(name), "-subj", f"/CN={name}", "-out", f"{name}.csr")
    (directory / "extensions").write_text(EXTENSIONS[name])
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "36500", "-extfile", "extensions"]
    _openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt.new")
    (directory / f"{name}.crt.new").rename(directory / f"{name}.crt")


def _key(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)
