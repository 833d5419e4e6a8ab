from __future__ import annotations

import pytest

from gpumond.facts.units import (
    GIB,
    MIB,
    accepts,
    caller_text,
    distinct_size_texts,
    growth_rate_text,
    parse_seconds,
    parse_seconds_argument,
    plural,
    size_text,
)


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (1, "time", "1 time"),
        (2, "time", "2 times"),
        (0, "time", "0 times"),
        (2, "process", "2 processes"),
        (2, "flush", "2 flushes"),
    ],
)
def test_counted_uses_the_plural_except_for_one(count: int, noun: str, words: str):
    assert plural(count, noun) == words


@pytest.mark.parametrize(("text", "value"), [("90s", 90.0), ("1h30m", 5400.0), ("250ms", 0.25), ("0", 0.0)])
def test_typed_duration_has_a_unit(text: str, value: float):
    assert parse_seconds_argument(text) == value


def test_typed_duration_without_a_unit_is_refused_with_units_to_choose_from():
    assert parse_seconds("1") == 1.0
    with pytest.raises(ValueError, match="expected a unit, as in 1s, 1m or 1h"):
        parse_seconds_argument("1")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1002 << 20, "1.0 GiB"),
        (999 << 20, "999.0 MiB"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (1023 << 30, "1.0 TiB"),
        (9024 << 30, "8.8 TiB"),
        (-(1 << 30), "-1.0 GiB"),
    ],
)
def test_sizes_have_the_largest_unit_that_they_reach(size: int, text: str):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("whole", "part", "texts"),
    [
        (15.36 * GIB, 13.44 * GIB, ("15.36 GiB", "13.44 GiB")),
        (15.4 * GIB, 13.4 * GIB, ("15.4 GiB", "13.4 GiB")),
        (6.2 * GIB, 866 * MIB, ("6.2 GiB", "866.0 MiB")),
    ],
)
def test_sizes_whose_difference_is_stated_have_the_digits_that_it_needs(
    whole: float, part: float, texts: tuple[str, str]
):
    assert distinct_size_texts(int(whole), int(part)) == texts


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZip", True),
        ("br, gzip;q=0.5", True),
        ("deflate,gzip; q = 1", True),
        ("", False),
        ("x-gzip", False),
        ("gzipped", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000, br", False),
        ("br;q=gzip", False),
        (";;,,;", False),
    ],
)
def test_name_is_accepted_if_it_is_listed_with_a_weight(header: str, accepted: bool):
    assert accepts(header, "gzip") is accepted


@pytest.mark.parametrize(
    ("per_minute", "text"),
    [
        (840.0 * MIB, "about 840 MiB/min"),
        (837.9 * MIB, "about 840 MiB/min"),
        (1002.0 * MIB, "about 1.0 GiB/min"),
        (64.0 * MIB, "about 64 MiB/min"),
        (6.42 * MIB, "about 6.4 MiB/min"),
        (9.97 * MIB, "about 10 MiB/min"),
        (200.0 * 1024 * GIB, "about 200 TiB/min"),
        (12.0, "about 12 B/min"),
        (-300.0 * MIB, "about -300 MiB/min"),
    ],
)
def test_rate_is_rounded_so_that_it_stays(per_minute: float, text: str) -> None:
    assert growth_rate_text(per_minute) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uid:0", "root"),
        ("token@uid:0", "root (token)"),
        ("token:ci@uid:0", "root (token:ci)"),
        ("uid:0/session:66da1d2d", "root (browser)"),
        ("token/session:66da1d2d@uid:0", "root (token, browser)"),
        ("uid:1000/session:66da1d2d@uid:0", "uid:1000/session:66da1d2d@uid:0"),
        ("token@uid:1000", "token@uid:1000"),
        ("token@10.0.0.7", "token@10.0.0.7"),
        ("rule:leak", "rule:leak"),
    ],
)
def test_caller_is_a_user_with_what_the_request_came_with(name: str, text: str) -> None:
    assert caller_text(name, user_name={0: "root"}.get) == text
