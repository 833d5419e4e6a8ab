from __future__ import annotations

import pytest

from gpumond.metrics.scrape_schedule import ScrapeSchedule


def schedule_after(*times: float) -> ScrapeSchedule[str]:
    scrapes: ScrapeSchedule[str] = ScrapeSchedule()
    for time in times:
        scrapes.asked("page", time)
    return scrapes


@pytest.mark.parametrize(
    ("times", "now", "expected"),
    [
        ((), 100.0, False),
        ((70.4, 85.4), 100.0, True),  # each 15 s, and due in 0.4 s
        ((70.4, 85.4), 98.0, False),
        ((70.4, 85.4), 101.0, False),
        ((85.4,), 100.0, False),  # one interval does not repeat
        ((70.4, 75.0, 85.4, 90.0), 100.0, True),  # two scrapers, each 15 s
        ((70.4, 75.0, 85.4, 90.0), 104.5, True),
        ((70.4, 75.0, 85.4, 90.0), 102.0, False),
        (tuple(x / 100 for x in range(9000, 10000)), 100.0, True),  # without a pause
        ((70.4, 85.4), 400.0, False),
    ],
)
def test_page_is_expected_after_two_equal_intervals(times: tuple[float, ...], now: float, expected: bool):
    assert (list(schedule_after(*times).expected(now, 1.0)) == ["page"]) is expected


def test_pages_have_separate_scrapers():
    scrapes = schedule_after(10.0, 20.0)
    scrapes.asked("other", 25.0)
    assert list(scrapes.expected(29.5, 1.0)) == ["page"]


def test_old_requests_are_forgotten():
    scrapes = schedule_after(*range(10_000))
    assert sum(map(len, scrapes._requests.values())) <= 3 * 60 + 2
