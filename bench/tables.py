"""Summaries of ``bench.peers`` and ``bench.scaling``, and tables of results for the documentation. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OURS = "gpumond"
NO_COST = "cpu_of_other_programs_s"
"""CPU time of programs that are not measured: a busy machine makes every figure larger."""
LINES = {
    "CPU time, s a minute": "{cpu_s:.2f}",
    "scrape, gzip, p50 / p99, ms": "{kept_gzip_p50_ms:.2f} / {kept_gzip_p99_ms:.2f}",
    "size of a scrape, gzip / plain, kB": "{page_gzip_bytes:.1f} / {page_bytes:.0f}",
    "memory (PSS), MiB": "{pss_mib:.1f}",
    "CPU time of other programs, s a minute": "{cpu_of_other_programs_s:.1f}",
}
"""Lines of a comparison. Each is formatted with the measures of an exporter, and absent if the exporter has none."""
FIRST = {line: text.partition("{")[2].partition(":")[0] for line, text in LINES.items()}
"""The measure whose ratio a line shows."""
SCALES = {"page_gzip_bytes": 1e-3, "page_bytes": 1e-3}

SUPER_LINEAR = 1.1
LEAST_GROWTH = 1.5
"""Below this ratio of the largest to the smallest value, noise decides the exponent."""
EXPONENTS = [step / 20 for step in range(1, 61)]
SWEEP_MEASURES = {
    "cpu_ms": "CPU time, ms a second",
    "pss_mib": "memory (PSS), MiB",
    "scrape_ms": "scrape, ms",
    "tick_ms": "tick, ms",
}


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each measure over the rounds that have it."""
    names = dict.fromkeys(name for own in rounds for name in own)
    return {name: round(statistics.median(own[name] for own in rounds if name in own), 4) for name in names}


def ratios(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return, by peer, the median over the rounds of gpumond's value divided by the peer's in the same round."""
    return {
        peer: medians(
            [
                {
                    name: ours[name] / value
                    for name, value in theirs.items()
                    if value and name in ours and name != NO_COST
                }
                for ours, theirs in zip(found[OURS], rounds, strict=True)
            ]
        )
        for peer, rounds in found.items()
        if peer != OURS and OURS in found
    }


def peers_table(figures: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown table, after a line about the run.

    A number in brackets is gpumond's value divided by the peer's.
    """
    names = list(dict.fromkeys(name for one in figures["settings"].values() for name in one["values"]))
    lines = [caption(figures), "", f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for setting, one in figures["settings"].items():
        lines.append(f"| **{setting}** |" + " |" * len(names))
        for line in LINES:
            cells = [peers_cell(line, name, one) for name in names]
            if any(cells):
                lines.append(f"| {line} | {' | '.join(cells)} |")
    return "\n".join(lines)


def caption(figures: Mapping[str, Any]) -> str:
    text = f"Medians of {figures['rounds']} rounds, CPU time over {60 * figures['minutes']:.0f} s in each; "
    text += ", ".join(figures["versions"].values()) + "."
    return text + "".join(f" Not measured: {name} ({reason})." for name, reason in figures["absent"].items())


def peers_cell(line: str, name: str, one: Mapping[str, Any]) -> str:
    """Return a line's text for an exporter; "" if it has no such measure."""
    values, ratio = one["values"].get(name, {}), one["ratios"].get(name, {}).get(FIRST[line])
    if FIRST[line] not in values:
        return ""
    text = LINES[line].format_map({key: value * SCALES.get(key, 1) for key, value in values.items()})
    return text if ratio is None else f"{text} ({ratio:.3g})"


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return k of the fit y = a + b x^k with the least relative error, where a and b are not negative.

    With a = 0 this is the slope of log y over log x. None: y hardly changes.
    """
    values = [y for _, y in points]
    if min(values) <= 0 or max(values) < LEAST_GROWTH * min(values):
        return None
    return min(EXPONENTS, key=lambda k: _error(points, k))


def _error(points: Sequence[tuple[float, float]], k: float) -> float:
    """Return the sum of squared relative errors of the best a and b."""
    pairs = [(1 / y, x**k / y) for x, y in points]
    uu, uv, vv = (sum(u * u for u, _ in pairs), sum(u * v for u, v in pairs), sum(v * v for _, v in pairs))
    su, sv = sum(u for u, _ in pairs), sum(v for _, v in pairs)
    determinant = uu * vv - uv * uv
    a, b = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
    if a < 0:
        a, b = 0.0, sv / vv
    elif b < 0:
        a, b = su / uu, 0.0
    return sum((a * u + b * v - 1) ** 2 for u, v in pairs)


def exponents(points: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return the exponent of each measure of a sweep."""
    return {
        name: exponent([(point["x"], point[name]) for point in points])
        for name in SWEEP_MEASURES
        if all(name in point for point in points)
    }


def super_linear(sweeps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the sweeps and measures that grow faster than their size."""
    return [
        f"{sweep}: {name} {k}"
        for sweep, one in sweeps.items()
        for name, k in one["exponents"].items()
        if k is not None and k > SUPER_LINEAR
    ]


def scaling_table(figures: Mapping[str, Any]) -> str:
    """Return the sweeps as a Markdown table: values at the ends of each sweep, and the exponent between them."""
    lines = [f"| sweep | {' | '.join(SWEEP_MEASURES.values())} |", "|---|" + "---:|" * len(SWEEP_MEASURES)]
    for sweep, one in figures["sweeps"].items():
        first, last = one["points"][0], one["points"][-1]
        name = f"{sweep}: {first['x']:,.0f} to {last['x']:,.0f}"
        lines.append(f"| {name} | {' | '.join(_sweep_cells(first, last, one['exponents']))} |")
    return "\n".join(lines)


def _sweep_cells(
    first: Mapping[str, float], last: Mapping[str, float], fitted: Mapping[str, float | None]
) -> Iterator[str]:
    for name in SWEEP_MEASURES:
        if name not in fitted:
            yield ""
            continue
        k = fitted[name]
        yield f"{first[name]:.3g} → {last[name]:.3g} ({'constant' if k is None else f'x^{k:.2f}'})"
