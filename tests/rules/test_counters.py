"""Increases of counters within the window."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpumond.quantities.window import BUCKET_SECONDS, WINDOW_SECONDS, CounterHistory, combined, first

Observation = tuple[float, float | None]


def increases(observations: Sequence[Observation]) -> list[float | None]:
    """Increases at the times of the observations."""
    history: CounterHistory | None = None
    found = []
    for elapsed, count in observations:
        if history is None:
            history = first((count,), elapsed)
        elif history.due(elapsed):
            history = history.marked((count,), elapsed)
        found.append(history.increase(0, count, elapsed))
    return found


def test_increase_is_known_at_once_and_zero_after_a_full_window():
    assert increases([(0, 7), (1, 7), (2, 9)]) == [None, None, 2]
    steady = [(at, 7.0) for at in range(0, int(WINDOW_SECONDS) + 1, int(BUCKET_SECONDS))]
    assert increases(steady) == [None] * (len(steady) - 1) + [0]


def test_increase_leaves_the_window():
    counts = [(0.0, 7.0), *((float(at), 9.0) for at in range(30, 1201, 30))]
    found = dict(zip((at for at, _ in counts), increases(counts), strict=True))
    assert found[30] == found[WINDOW_SECONDS - BUCKET_SECONDS] == 2
    assert found[WINDOW_SECONDS + BUCKET_SECONDS] == 0


def test_increase_between_two_marks_is_counted_once():
    assert increases([(0, 0), (10, 1), (20, 3), (31, 4), (40, 4), (62, 5)]) == [None, 1, 3, 4, 4, 5]


def test_count_of_a_counter_that_was_reset_is_an_increase():
    assert increases([(0, 100), (30, 104), (60, 3), (90, 5)]) == [None, 4, 7, 9]


@pytest.mark.parametrize("counts", [(None, None), (5.0, None), (None, 5.0)])
def test_increase_of_an_unknown_count_is_unknown(counts: tuple[float | None, float | None]):
    assert increases([(0, counts[0]), (1, counts[1])])[-1] is None


def test_gap_does_not_lose_an_increase():
    assert increases([(0, 5), (30, None), (60, 8)])[-1] == 3


def test_counts_that_do_not_change_need_two_marks():
    history = first((7.0, None), 0.0)
    for at in range(30, 3600, 30):
        history = history.marked((7.0, None), float(at))
    assert len(history.marks) == 2
    assert history.marked((8.0, None), 3600.0).increase(0, 8.0, 3600.0) == 1


def test_increase_after_a_long_time_without_change_is_known():
    assert increases([*((float(at), 7.0) for at in range(0, 3600, 30)), (3600.0, 9.0)])[-1] == 2


def test_marks_are_bounded():
    history = first((0.0,), 0.0)
    for at in range(30, 36_000, 30):
        history = history.marked((float(at),), float(at))
    assert len(history.marks) <= WINDOW_SECONDS / BUCKET_SECONDS + 1


def test_sum_of_increases_ignores_unknown_ones():
    assert (combined((None, 2.0, 3.0)), combined((None, None))) == (5.0, None)
