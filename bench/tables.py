"""Summaries of ``bench.peers``, and the table of its results for the documentation. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OUR_NAME = "gpumond"
NO_COST = "cpu_of_other_programs_s"
"""CPU time of programs that are not measured: a busy machine makes every figure larger."""
LINE_TITLES = {
    "CPU time per minute, s": "{cpu_s:.2f}",
    "scrape, p50 / p99, ms": "{kept_p50_ms:.2f} / {kept_p99_ms:.2f}",
    "size of a scrape, plain / gzip, kB": "{page_bytes:.0f} / {page_gzip_bytes:.1f}",
    "memory (PSS), MiB": "{pss_mib:.1f}",
    "time from the start to the first complete scrape, s": "{first_data_s:.2f}",
}
"""Lines of a comparison, each formatted with the measures of an exporter."""
SCALES = {"page_gzip_bytes": 1e-3, "page_bytes": 1e-3}


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
                for ours, theirs in zip(found[OUR_NAME], rounds, strict=True)
            ]
        )
        for peer, rounds in found.items()
        if peer != OUR_NAME
    }


def peers_table(figures: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown table, after a line about the run."""
    names = list(figures["values"])
    rows = [[line, *(peers_cell(line, name, figures) for name in names)] for line in LINE_TITLES]
    head = [caption(figures), "", f"| {figures['setting']} | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def memory_ratio(figures: Mapping[str, Any]) -> str:
    """Return gpumond's memory divided by nvitop-exporter's: of the medians, so it agrees with the values beside it."""
    values = figures["values"]
    return f"{values[OUR_NAME]['pss_mib'] / values['nvitop-exporter']['pss_mib']:.1f}"


def caption(figures: Mapping[str, Any]) -> str:
    text = f"The values are medians of {figures['rounds']} rounds. CPU time was measured for "
    text += f"{60 * figures['minutes']:.0f} s in each round. Versions: {', '.join(figures['versions'].values())}."
    return text + "".join(f" Not measured: {name} ({reason})." for name, reason in figures["absent"].items())


def peers_cell(line: str, name: str, figures: Mapping[str, Any]) -> str:
    values = {key: value * SCALES.get(key, 1) for key, value in figures["values"][name].items()}
    return LINE_TITLES[line].format_map(values)
