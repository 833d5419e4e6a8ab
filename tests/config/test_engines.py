"""Serving engines in the configuration: what is accepted, and the text of each refusal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.commands.main import main
from gpumond.config.loading import load_settings
from gpumond.config.settings import Settings
from gpumond.facts.errors import ConfigError
from gpumond.features.engines.engine_kinds import KINDS
from gpumond.features.engines.spec import Address

GENERIC = {"name": "e", "kind": "generic", "url": "http://127.0.0.1:8080"}


def settings(directory: Path, *engines: dict[str, Any]) -> Settings:
    file = directory / "gpumond.yaml"
    file.write_text(yaml.safe_dump({"engines": list(engines)}))
    return load_settings(file, environ={})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:11434", Address("http", "127.0.0.1", 11434)),
        ("http://localhost:11434/", Address("http", "127.0.0.1", 11434)),
        ("http://[::1]:8000/base/", Address("http", "::1", 8000, "/base")),
        ("https://10.1.2.3:8443", Address("https", "10.1.2.3", 8443)),
        ("https://127.0.0.1", Address("https", "127.0.0.1", 443)),
        ("unix:/run/engine.sock", Address("unix", "/run/engine.sock")),
        ("unix:///run/engine.sock", Address("unix", "/run/engine.sock")),
    ],
)
def test_addresses_of_this_machine_are_accepted(tmp_path: Path, url: str, address: Address):
    (declared,) = settings(tmp_path, {"name": "e", "kind": "ollama", "url": url}).engines
    assert declared.address == address


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"url": "http://10.1.2.3:8000"}, "10.1.2.3 isn't loopback, so https:// is required"),
        ({"url": "https://8.8.8.8:443"}, "8.8.8.8 is neither a loopback nor a private address; expected http"),
        ({"url": "http://engine.example.com:8000"}, "; use an IP address, because a name's address may change"),
        ({"url": "http://user:secret@127.0.0.1:8000"}, "without a user, password or query"),
        ({"url": "unix:engine.sock"}, "an absolute path"),
        ({"url": "127.0.0.1:11434"}, "expected http://127.0.0.1:PORT"),
        ({"url": "http://0.0.0.0:11434"}, "0.0.0.0 is neither a loopback nor a private address; expected http"),
        ({"kind": "olama"}, "engines[0].kind: 'olama': expected one of ollama, comfyui"),
        ({"name": "a b"}, "engines[0].name"),
        ({"alow": ["engine"]}, "engines[0].alow: unknown key; did you mean allow?"),
        ({"allow": ["cache"]}, "engines[0].allow[0]"),
        ({"kind": "sglang", "allow": ["engine"]}, "kind sglang can't be released: a release crashes"),
        ({"method": "sleep"}, "kind ollama has no method 'sleep'; expected one of unload"),
        ({"kind": "vllm", "method": "level2"}, "expected one of kv_cache, sleep"),
        ({"kind": "triton", "allow": ["engine"]}, "allow requires models"),
        ({"state": {"get": "/x"}}, "state is only valid with kind: generic"),
        ({"wake": {"post": "/x"}}, "wake must be true or false"),
        ({"auth": {"bearer_token_file": "a", "hmac_key_file": "b"}}, "exactly one of bearer_token_file"),
        ({"auth": {"password_file": "a"}}, "set both username and password_file, or neither"),
        ({"auth": {"token": "a"}}, "engines[0].auth.token: unknown key; did you mean bearer_token_file"),
        ({"auth": {"header": "X:\n", "header_file": "a"}}, "isn't a header name"),
        ({"ca_file": "a"}, "ca_file and server_name require an https:// url"),
        (GENERIC, "kind generic requires state"),
        (GENERIC | {"state": {"get": "x"}}, "isn't a path"),
        (GENERIC | {"state": {"get": "/x", "post": "/x"}}, "set exactly one of get and post"),
        (GENERIC | {"state": {"get": "/x", "running": "a/b"}}, "expected a JSON pointer such as /requests/running"),
        (GENERIC | {"state": {"get": "/x", "runing": "/a"}}, "engines[0].state.runing: unknown key; did you mean"),
        (GENERIC | {"state": {"get": "/x", "running": "/r"}, "allow": ["engine"]}, "allow requires release"),
        (
            GENERIC | {"state": {"get": "/x"}, "release": {"post": "/r"}, "allow": ["engine"]},
            "allow requires state.running or state.waiting",
        ),
        (GENERIC | {"state": {"get": "/x"}, "wake": {"put": "/r"}}, "unknown key"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, fields: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, {"name": "e", "kind": "ollama", "url": "http://127.0.0.1:11434"} | fields)
    assert says in str(refused.value)
    assert re.match(re.escape(f"{tmp_path}/gpumond.yaml, line ") + r"\d+: engines", str(refused.value))


def test_names_are_unique(tmp_path: Path):
    engine = {"name": "e", "kind": "ollama", "url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="engines: the name 'e' is used twice"):
        settings(tmp_path, engine, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_only_methods_without_a_warning_are_allowed_by_the_declaration_alone(tmp_path: Path, kind: str):
    engine: dict[str, Any] = {"name": "e", "kind": kind, "url": "http://127.0.0.1:1"}
    if kind == "generic":
        engine["state"] = {"get": "/"}
    (declared,) = settings(tmp_path, engine).engines
    assert declared.may_release == (kind in ("ollama", "comfyui", "llama-router"))
    assert (declared.release_method is not None) == declared.may_release


def test_allow_can_be_empty(tmp_path: Path):
    (declared,) = settings(tmp_path, {"name": "e", "kind": "ollama", "url": "http://127.0.0.1:1", "allow": []}).engines
    assert not declared.may_release


def test_secrets_are_not_shown(tmp_path: Path):
    engine = {"name": "e", "kind": "ollama", "url": "http://user:hunter2@127.0.0.1:1"}
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, engine)
    assert "hunter2" not in str(refused.value)


def test_engines_are_reloaded_without_a_restart(tmp_path: Path):
    engine = {"name": "e", "kind": "ollama", "url": "http://127.0.0.1:1"}
    assert settings(tmp_path, engine).changes_requiring_restart(settings(tmp_path)) == []


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"auth": {"bearer_token_file": "/s"}}, True),
        ({"auth": {"bearer_token_file": "/s"}, "user": "llama"}, False),
        ({"auth": {"bearer_token_file": "/s"}, "url": "https://127.0.0.1:1"}, False),
        ({}, False),
    ],
)
def test_check_notes_a_secret_for_whoever_listens_first(
    tmp_path: Path, fields: dict[str, Any], noted: bool, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "gpumond.yaml"
    file.write_text(
        yaml.safe_dump({"engines": [{"name": "e", "kind": "ollama", "url": "http://127.0.0.1:1"} | fields]})
    )
    assert main(["check-config", str(file)]) == 0
    assert ("note: engines: e: gpumond sends the secret to whichever user" in capsys.readouterr().out) == noted
