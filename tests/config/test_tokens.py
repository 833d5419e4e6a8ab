from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from gpumond.config.tokens import check_subjects, parse_tokens, read_tokens, token_digest
from gpumond.facts.errors import ConfigError

OTHER = hashlib.sha256(b"gpm_y").hexdigest()
DIGEST, EMPTY = hashlib.sha256(b"gpm_x").hexdigest(), hashlib.sha256(b"").hexdigest()


def test_line_is_a_name_scopes_and_a_hash():
    tokens = parse_tokens(f"# who may what\n\nnightly flush,read {DIGEST}  # cron\nops admin {OTHER.upper()}\n", "f")
    assert [(token.name, token.scopes) for token in tokens] == [
        ("nightly", frozenset({"flush", "read"})),
        ("ops", frozenset({"admin"})),
    ]
    assert [token.digest for token in tokens] == [token_digest("gpm_x"), token_digest("gpm_y")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nightly flush", "line 1: expected NAME SCOPE[,SCOPE] SHA256, as in `nightly flush,read "),
        (f"nightly flush {DIGEST} more", "line 1: expected NAME SCOPE"),
        (
            f"nightly write {DIGEST}",
            "line 1: nightly: unknown scope 'write'; expected one or more of read, rules, flush, admin",
        ),
        (f"nightly flush, {DIGEST}", "line 1: nightly: unknown scope ''"),
        ("nightly flush secret", "line 1: nightly: expected a SHA-256 of 64 hexadecimal digits"),
        ("nightly flush gpm_secret", "line 1: contains a token; write its SHA-256 instead"),
        (f"night/ly flush {DIGEST}", "line 1: expected a name of 1 to 64 characters from A-Z, a-z, 0-9, ., _ and -"),
        (f"a read {DIGEST}\na admin {DIGEST}", "line 2: the name 'a' is used twice"),
        ("a flush service-account:argo", "line 1: a: expected a SHA-256 of 64 hexadecimal digits, certificate:NAME,"),
        (f"a read {DIGEST}\nb admin {DIGEST.upper()}", "line 2: b has the same hash as another line"),
        (f"a read {EMPTY}", "line 1: a: this is the hash of an empty token; was the variable with the token set?"),
        ("a read certificate:x\nb flush certificate:x", "line 2: certificate:x is on two lines"),
    ],
)
def test_invalid_line_is_reported_without_secrets(line: str, says: str):
    with pytest.raises(ConfigError) as error:
        parse_tokens(line, "/etc/tokens")
    assert says in str(error.value)
    assert str(error.value).startswith("tokens_file /etc/tokens, line ")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("mode", "good"), [(0o600, True), (0o400, True), (0o640, True), (0o644, False), (0o660, False)]
)
def test_file_accessible_to_others_is_refused(tmp_path: Path, mode: int, good: bool):
    file = tmp_path / "tokens"
    file.write_text(f"a read {DIGEST}\n")
    file.chmod(mode)
    if good:
        assert read_tokens(file)[0].name == "a"
    else:
        with pytest.raises(ConfigError, match=f"has mode {mode:04o}; expected 0600"):
            read_tokens(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_refused(tmp_path: Path):
    file = tmp_path / "tokens"
    file.write_text(f"a admin {DIGEST}\n")
    file.chmod(0o600)
    os.chown(file, 4242, 4242)
    with pytest.raises(ConfigError, match="belongs to uid 4242"):
        read_tokens(file)


def test_missing_and_endless_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_tokens(tmp_path / "none")
    file = tmp_path / "tokens"
    file.write_bytes(b"#" * (1 << 20) + b"#")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="more than"):
        read_tokens(file)


def test_line_may_name_a_certificate_or_a_service_account():
    tokens = parse_tokens("a flush certificate:spiffe://x/a  # SPIFFE\nb read,flush service-account:argo/b.c\n", "f")
    assert [(token.name, token.digest, token.subject) for token in tokens] == [
        ("a", b"", "certificate:spiffe://x/a"),
        ("b", b"", "service-account:argo/b.c"),
    ]
    check_subjects(tokens, accepts_certificates=True, reviews_tokens=True)
    with pytest.raises(ConfigError, match="a is a certificate, but the daemon requests none; set client_ca_file"):
        check_subjects(tokens, accepts_certificates=False, reviews_tokens=True)
    with pytest.raises(ConfigError, match=r"b is a Kubernetes service account, .* set token_review_audience"):
        check_subjects(tokens, accepts_certificates=True, reviews_tokens=False)
