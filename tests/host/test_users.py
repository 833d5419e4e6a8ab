"""The person for whom a uid counts, by /etc/subuid."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumond.host.peer import SubordinateUids

PASSWD = "root:x:0:0::/:/bin/sh\nkubelet:x:998:998::/:\nalice:x:1000:1000::/:/bin/sh\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    subuid, passwd = tmp_path / "subuid", tmp_path / "passwd"
    passwd.write_text(PASSWD)
    return subuid, passwd


@pytest.mark.parametrize(
    ("uid", "person"),
    [
        (99_999, 99_999),
        (100_000, 1000),
        (165_535, 1000),
        (165_536, 1001),  # the owner is a number
        (231_072, 231_072),  # an owner without a line in passwd, such as one of LDAP
        (231_072 + 65_535, 231_072),
        (1_000_000, 1_000_000),  # of a system account: each container has a block
        (1_000_000 + 65_535, 1_000_000),
        (1_000_000 + 65_536, 1_065_536),
        (1000, 1000),
        (0, 0),
    ],
)
def test_uid_of_a_range_counts_for_its_owner(files: tuple[Path, Path], uid: int, person: int):
    files[0].write_text(
        "alice:100000:65536\n1001:165536:65536\n\n# a remark\nbob:231072:65536\nkubelet:1000000:6553600\nbad:x:1\n"
    )
    assert SubordinateUids(*files).person_of(uid) == person


def test_no_uid_counts_for_root(files: tuple[Path, Path]):
    files[0].write_text("root:100000:65536\n")
    assert SubordinateUids(*files).person_of(100_001) == 100_000


@pytest.mark.parametrize("content", [None, b"\xff\xfe\n"])
def test_without_a_readable_file_each_uid_counts_for_itself(files: tuple[Path, Path], content: bytes | None):
    if content is not None:
        files[0].write_bytes(content)
    assert SubordinateUids(*files).person_of(100_000) == 100_000
