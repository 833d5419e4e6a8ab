"""Reading of HTTP headers that list what a client accepts."""

from __future__ import annotations

import pytest

from gpumond.facts.units import accepts


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
