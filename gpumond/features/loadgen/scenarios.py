"""Table of all scenarios with their shapes, options and functions. Pure.

To add one: write a function that takes a `Script`, and add it to ``TABLE``. The values of options that are not
given are drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import GIB, level, seconds
from gpumond.features.loadgen import healthy, incidents, leaks, serving
from gpumond.features.loadgen.script import VIEWS, Script, View

Unit = Literal["size", "duration", "share", "number", "word"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option with bounds. ``drawn`` describes the value that is used if the option is not given."""

    name: str
    unit: Unit
    drawn: str
    meaning: str
    least: float = 0.0
    most: float = float("inf")
    words: tuple[str, ...] = ()

    def value(self, given: float | str) -> float | str:
        """Return the checked value in base units. Raises ConfigError."""
        try:
            return self._parsed(given)
        except ValueError as error:
            raise ConfigError(f"option --{self.name} {given!r}: {error}") from None

    def _parsed(self, given: float | str) -> float | str:
        if self.unit == "word":
            if given not in self.words:
                raise ValueError(f"expected one of {', '.join(self.words)}")
            return given
        value = seconds(given) if self.unit == "duration" else level(given)
        if not self.least <= value <= self.most:
            raise ValueError(f"expected {self._range()}")
        return value

    def _range(self) -> str:
        example = {"size": "32MiB", "duration": "20m", "share": "80%", "number": "4", "word": ""}[self.unit]
        bounds = f"at least {self.least:g}" + ("" if self.most == float("inf") else f" and at most {self.most:g}")
        return f"a {self.unit} of {bounds}, such as {example}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. ``views``: those in which it can be diagnosed. ``verdict``: the expected one, empty for none.

    ``size_bytes``: size of the device that the plan is made for, unless an option states it.
    """

    name: str
    alias: str
    summary: str
    verdict: str
    shape: tuple[str, ...]
    write: Callable[[Script], None]
    options: tuple[Option, ...] = ()
    views: tuple[View, ...] = VIEWS
    neighbours: bool = True
    size_bytes: int = 80 * GIB


COMMON = (
    Option(
        "size",
        "size",
        "80GiB, for serving 48GiB",
        "size of the device that the plan is made for; engines scale it",
        64 << 30,
    ),
    Option("duration", "duration", "three times the time allowed for detection", "length of the plan", 1.0, 172800),
    Option("view", "word", "by the seed", "what is observed in virtual time", words=VIEWS),
    Option("noise", "size", "32 MiB or 0.3 GiB", "standard deviation from sample to sample"),
    Option("gaps", "number", "0 or 1", "1: samples are missing", 0, 1),
    Option("neighbours", "number", "0 or 1", "1: other programs start and end on the device", 0, 1),
)

_PERIOD = "time between two evaluations"
_INJECTED = Option("rate", "size", "no leak", "leaked per minute")

TABLE = (
    Scenario(
        "leak-per-epoch",
        "p1",
        "every epoch leaks a small block, below a sawtooth of 16 GiB",
        "leak",
        ("      /|/|/|", "  /|/|‾ ‾ ‾ ", "/|‾ ‾       "),
        leaks.per_epoch,
        (
            Option("step", "size", "4, 100 or 254 MiB", "leaked by each epoch", 1),
            Option("period", "duration", "1, 5 or 20 min", "duration of an epoch", 10.0),
        ),
    ),
    Scenario(
        "leak-linear",
        "p2",
        "every iteration keeps a tensor that is not needed",
        "leak",
        ("         ..·'", "    ..·''    ", "..·'         "),
        leaks.linear,
        (Option("rate", "size", "2, 8, 32, 128 or 512 MiB", "leaked per minute", 1),),
    ),
    Scenario(
        "leak-load",
        "p3",
        "every request leaks a small block; there is no growth without requests",
        "leak",
        ("         _____", "    ____/     ", "___/          "),
        leaks.under_load,
        (
            Option("step", "size", "5, 50 or 150 MiB", "leaked per request", 1),
            Option("requests", "number", "0.02 to 1", "requests per second while busy", 1e-4, 100.0),
        ),
    ),
    Scenario(
        "leak-irregular",
        "p4",
        "0.2 to 2 GiB are leaked at random times",
        "leak",
        ("           |‾‾", "   |‾‾‾‾‾‾‾   ", "|‾‾           "),
        leaks.irregular,
        (Option("period", "duration", "20 min", "mean time between two leaks", 1.0),),
    ),
    Scenario(
        "leak-compile-cache",
        "p5",
        "every new shape keeps 20 to 200 MiB of compiled code, in the pool or outside it",
        "leak",
        ("        _-‾   ", "    _-‾       ", "_-‾           "),
        leaks.compile_cache,
        (
            Option("period", "duration", "1 to 5 min", "time between two new shapes", 1.0),
            Option("where", "word", "by the seed", "place of the compiled code", words=("pool", "outside")),
        ),
    ),
    Scenario(
        "fragmentation",
        "p6",
        "live memory is constant, but the allocator holds more and more",
        "fragmentation",
        ("held      _.-'", "     _.-'     ", "live ---------"),
        incidents.fragmentation,
        (
            Option("share", "share", "42 to 50 %", "share of the device that is live", 0.05, 0.5),
            Option("over", "duration", "1.5 to 2.5 h", "time until the device is full", 60.0),
        ),
        ("agent",),
    ),
    Scenario(
        "orphan",
        "p7",
        "a program is killed and its memory stays allocated without an owner",
        "orphan",
        ("used ---------", "             ", "pid  ----x    "),
        incidents.orphan,
        (Option("as", "word", "by the seed", "entry that the driver still lists", words=incidents.ORPHANS),),
        ("agent", "process"),
    ),
    Scenario(
        "crash",
        "p8",
        "memory runs out and the program crashes, once or in a loop of restarts",
        "crash",
        ("    |‾|       ", "    / |    /‾|", "---'  |___/  |"),
        incidents.crash,
        (Option("times", "number", "1 or 4", "number of crashes", 1, 20),),
        neighbours=False,
    ),
    Scenario(
        "leak-at-eval",
        "p9",
        "an evaluation allocates 20 to 28 GiB and frees half of it",
        "leak",
        ("         |\\___", "   |\\____|    ", "___|          "),
        leaks.at_evaluation,
        (Option("period", "duration", "20 to 40 min", _PERIOD, 120.0),),
    ),
    Scenario(
        "leak-serving",
        "p10",
        "a serving program as in serving-bimodal leaks",
        "leak",
        ("        _.|'||", "   _|''|| |  ", "||'| |        "),
        serving.leak,
        (Option("rate", "size", "16, 32, 64, 128 or 256 MiB", "leaked per minute", 1),),
        neighbours=False,
        size_bytes=serving.DEVICE_BYTES,
    ),
    Scenario(
        "warm-up",
        "n1",
        "memory grows to a plateau and stays there",
        "",
        ("     ______", "  .-'      ", " /         "),
        healthy.warm_up,
        (
            Option("time", "duration", "1 to 20 min", "time constant of the approach", 1.0),
            Option("share", "share", "30 to 85 %", "share of the device at the plateau", 0.12, 0.9),
        ),
    ),
    Scenario(
        "autotune",
        "n2",
        "large workspaces are allocated in the first minutes, then released",
        "",
        (" |‾|       ", " | |       ", "/   ‾‾‾‾‾‾‾"),
        healthy.autotune,
        (Option("share", "share", "50 to 90 %", "share of the device at the peak", 0.1, 0.9),),
    ),
    Scenario(
        "preallocated",
        "n3",
        "one pool takes most of the device at the start and keeps it",
        "",
        (" |‾‾‾‾‾‾‾‾‾", " |         ", "-'         "),
        healthy.preallocated,
        (Option("share", "share", "60 to 94 %", "share of the device", 0.15, 0.95),),
    ),
    Scenario(
        "cache-saturates",
        "n4",
        "a cache grows with each request that is larger than all previous ones; such requests become rare",
        "",
        ("       .--'‾", "   .-'      ", " /'         "),
        healthy.saturating_cache,
        (
            Option("time", "duration", "2 to 6 h", "time until the cache has 95 % of its size", 60.0),
            Option("requests", "number", "0.1 to 1", "requests per second", 1e-3, 100.0),
            Option("share", "share", "30 to 60 %", "share of the device at the end", 0.05, 0.6),
        ),
    ),
    Scenario(
        "periodic-eval",
        "n5",
        "a periodic evaluation allocates more, and frees all of it",
        "",
        ("   /|    /| ", "  / |   / | ", "-'  '--'  '-"),
        healthy.periodic_evaluation,
        (
            Option("period", "duration", "5 to 60 min", _PERIOD, 30.0),
            Option("step", "size", "5 to 20 GiB", "allocated by an evaluation", 1),
        ),
    ),
    Scenario(
        "curriculum",
        "n6",
        "the batch size grows permanently, in steps that are hours apart",
        "",
        ("         ___", "    ____|   ", "___|        "),
        healthy.curriculum,
        (
            Option("times", "number", "1 to 3", "number of steps", 1, 10),
            Option("step", "size", "2 to 20 GiB", "added by each step", 1),
        ),
    ),
    Scenario(
        "fleet",
        "n7",
        "programs on several devices share one load: a daily cycle, and sudden changes",
        "",
        ("   _.-._|‾|_ ", " .'         '", "'            "),
        healthy.fleet,
        (
            Option("programs", "number", "4", "number of programs, each on its own device", 1, 64),
            Option("step", "size", "4 GiB", "amplitude of the daily cycle", 1),
        ),
    ),
    Scenario(
        "serving-bimodal",
        "n8",
        "a serving program rests at one level and is busy at others, which change by gigabytes within minutes",
        "",
        ("‾‾‾| |‾‾| ‾‾", "   ||  |'|  ", "    |    |  "),
        serving.bimodal,
        (_INJECTED,),
        neighbours=False,
        size_bytes=serving.DEVICE_BYTES,
    ),
    Scenario(
        "serving-nightly",
        "n9",
        "a serving program is busy by day, and rests most of the night",
        "",
        ("‾|'|||'|‾‾‾‾", " ||||||     ", "  | |       "),
        serving.nightly,
        (_INJECTED,),
        neighbours=False,
        size_bytes=serving.DEVICE_BYTES,
    ),
    Scenario(
        "model-loads",
        "n10",
        "models are loaded and unloaded, and stay for tens of minutes to hours",
        "",
        ("   ___    __", "  |   |  |  ", "__|   |__|  "),
        serving.model_loads,
        (_INJECTED,),
        neighbours=False,
        size_bytes=serving.DEVICE_BYTES,
    ),
    Scenario(
        "slow-fragmentation",
        "n11",
        "live memory is constant, and the allocator holds slowly more, up to a limit",
        "",
        ("held   __..--", "  __--''     ", "live ---------"),
        serving.slow_fragmentation,
        (
            Option(
                "step", "size", "0.5 to 1.6 GiB", "growth of the held memory in six hours", 1, serving.DRIFT_BYTES[1]
            ),
            Option("over", "duration", "6 to 15 h", "time until the growth ends", 60.0, serving.MAX_DRIFT_SECONDS),
            _INJECTED,
        ),
        neighbours=False,
        size_bytes=serving.DEVICE_BYTES,
    ),
    Scenario(
        "steady",
        "",
        "steady work, constant memory",
        "",
        ("            ", " .----------", "/           "),
        healthy.steady,
    ),
    Scenario(
        "stress",
        "",
        "fill the device, hold the memory, and verify its contents",
        "pressure",
        (" .----------", " |          ", "/           "),
        incidents.stress,
        (Option("fill", "share", "90 %", "share of the device", 0.01, 0.99),),
        neighbours=False,
    ),
    Scenario(
        "flush-storm",
        "",
        "allocate and free continuously, with repeated flushes",
        "",
        (" |\\ |\\|\\  |\\", " | \\|   \\|  ", "/           "),
        incidents.flush_storm,
        (Option("period", "duration", "2 s", "time between two flushes", 0.05),),
        neighbours=False,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in TABLE}


def scenario(name: str) -> Scenario:
    """Return a scenario by name or alias (p1 to p10, n1 to n11). Raises ConfigError."""
    for one in TABLE:
        if name in (one.name, one.alias) and name:
            return one
    raise ConfigError(f"no scenario is named {name!r}; `gpumond load --list` shows all scenarios")


def check(scenario: Scenario, given: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the options in base units. Raises ConfigError for an unknown option or an invalid value."""
    known = {option.name: option for option in (*scenario.options, *COMMON)}
    own = ", ".join(f"--{option.name}" for option in scenario.options) or "no options"
    for name in given:
        if name not in known:
            raise ConfigError(f"option --{name}: {scenario.name} has no such option; it has {own}")
    return {name: known[name].value(value) for name, value in given.items()}
