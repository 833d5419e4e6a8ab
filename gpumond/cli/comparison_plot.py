"""A chart of a comparison, drawn with matplotlib (the extra ``plot``). Not a verb."""

from __future__ import annotations

from pathlib import Path

from gpumond.baselines.statistics import Comparison, Difference
from gpumond.errors import ConfigError
from gpumond.model.units import GIB

FORMATS = (".svg", ".png")
COLOURS = ("#8da0cb", "#fc8d62")


def check(path: Path) -> None:
    """Check before a measurement that a chart can be written to ``path``. Raises ConfigError."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path}: expected a name that ends in {' or '.join(FORMATS)}")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'gpumond[plot]'") from None
    matplotlib.use("Agg")


def draw(comparison: Comparison, path: Path) -> None:
    """Draw before and after for each workload: bars for typical values, marks for peaks. Raises ConfigError."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "gpumond"  # equal comparisons give equal files
    matplotlib.rcParams["text.parse_math"] = False  # the name of a program may contain a $
    workloads = sorted({each.workload for each in comparison.differences})
    figure = Figure(figsize=(8, 1 + 3 * max(1, len(workloads))), layout="constrained")
    figure.suptitle(f"{comparison.name}: before and after")
    for place, workload in enumerate(workloads, 1):
        axes = figure.add_subplot(len(workloads), 1, place)
        own = {
            (each.measure, each.stat): each
            for each in comparison.differences
            if each.workload == workload and each.measure not in ("utilization", "retries")
        }
        measures = [measure for measure, stat in own if stat == "typical" and _has_values(own[measure, stat])]
        for side, label in enumerate(("before", "after")):
            at = [number + (side - 0.5) * 0.4 for number in range(len(measures))]
            typical = [(getattr(own[measure, "typical"], label) or 0.0) / GIB for measure in measures]
            peaks = [(getattr(own[measure, "peak"], label) or 0.0) / GIB for measure in measures]
            axes.bar(at, typical, 0.38, label=label, color=COLOURS[side])
            axes.plot(at, peaks, "k_", markersize=14)
        axes.set_title(workload, loc="left")
        axes.set_ylabel("GiB (bar: typical, line: peak)")
        axes.set_xticks(range(len(measures)), measures)
        axes.legend()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from None


def _has_values(each: Difference) -> bool:
    return bool(each.before or each.after)
