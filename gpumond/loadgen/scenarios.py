"""Every scenario: what it is, its shape, its options, and who writes it. Pure.

To add one: write a function that takes a `Script`, and add it to ``TABLE``. What an option does not give is
drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpumond.errors import ConfigError
from gpumond.loadgen import healthy, incidents, leaks, stress
from gpumond.loadgen.options import Option
from gpumond.loadgen.script import VIEWS, Script, View


@dataclass(frozen=True, slots=True)
class Scenario:
    """``views``: in which it can be told what it is. ``verdict``: what is right to say, empty for silence."""

    name: str
    alias: str
    summary: str
    verdict: str
    shape: tuple[str, ...]
    write: Callable[[Script], None]
    options: tuple[Option, ...] = ()
    views: tuple[View, ...] = VIEWS
    neighbours: bool = True


COMMON = (
    Option("size", "size", "80GiB", "the card that the plan is made for; engines scale it", 64 << 30),
    Option("duration", "duration", "three times as long as it may take to be seen", "how long it lasts", 1.0, 172800),
    Option("view", "word", "by the seed", "how much is seen in virtual time", words=VIEWS),
    Option("noise", "size", "32 MiB or 0.3 GiB", "standard deviation from sample to sample"),
    Option("gaps", "number", "0 or 1", "whether samples are missing", 0, 1),
    Option("neighbours", "number", "0 or 1", "whether other programs come and go on the device", 0, 1),
)

_KEPT, _PERIOD = "kept each time", "time from one to the next"

TABLE = (
    Scenario(
        "leak-per-epoch",
        "p1",
        "every epoch keeps a little, under a saw-tooth of 16 GiB",
        "leak",
        ("      /|/|/|", "  /|/|‾ ‾ ‾ ", "/|‾ ‾       "),
        leaks.per_epoch,
        (
            Option("step", "size", "4, 100 or 254 MiB", _KEPT, 1),
            Option("period", "duration", "1, 5 or 20 min", "one epoch", 10.0),
        ),
    ),
    Scenario(
        "leak-linear",
        "p2",
        "every iteration keeps a tensor that nobody needs",
        "leak",
        ("         ..·'", "    ..·''    ", "..·'         "),
        leaks.linear,
        (Option("rate", "size", "2, 8, 32, 128 or 512 MiB", "kept a minute", 1),),
    ),
    Scenario(
        "leak-load",
        "p3",
        "every request keeps a little; nothing grows while there are none",
        "leak",
        ("         _____", "    ____/     ", "___/          "),
        leaks.under_load,
        (
            Option("step", "size", "5, 50 or 150 MiB", "kept by a request", 1),
            Option("requests", "number", "0.02 to 1", "requests a second while busy", 1e-4, 100.0),
        ),
    ),
    Scenario(
        "leak-irregular",
        "p4",
        "0.2 to 2 GiB are kept at times that follow no rule",
        "leak",
        ("           |‾‾", "   |‾‾‾‾‾‾‾   ", "|‾‾           "),
        leaks.irregular,
        (Option("period", "duration", "20 min", "mean time between two", 1.0),),
    ),
    Scenario(
        "leak-compile-cache",
        "p5",
        "every new shape keeps 20 to 200 MiB of compiled code, in the pool or outside it",
        "leak",
        ("        _-‾   ", "    _-‾       ", "_-‾           "),
        leaks.compile_cache,
        (
            Option("period", "duration", "1 to 5 min", "from one new shape to the next", 1.0),
            Option("where", "word", "by the seed", "where it is kept", words=("pool", "outside")),
        ),
    ),
    Scenario(
        "fragmentation",
        "p6",
        "as much is live as ever, but the allocator holds more and more",
        "fragmentation",
        ("held      _.-'", "     _.-'     ", "live ---------"),
        incidents.fragmentation,
        (
            Option("share", "share", "42 to 50 %", "of the card that is live", 0.05, 0.5),
            Option("over", "duration", "1.5 to 2.5 h", "how long it takes", 60.0),
        ),
        ("agent",),
    ),
    Scenario(
        "orphan",
        "p7",
        "a program is killed and its memory stays, with nobody who owns it",
        "orphan",
        ("used ---------", "             ", "pid  ----x    "),
        incidents.orphan,
        (Option("as", "word", "by the seed", "what the driver still lists", words=incidents.ORPHANS),),
        ("agent", "process"),
    ),
    Scenario(
        "crash",
        "p8",
        "memory runs to the brim and the program dies, once or in a loop",
        "crash",
        ("    |‾|       ", "    / |    /‾|", "---'  |___/  |"),
        incidents.crash,
        (Option("times", "number", "1 or 4", "how often it dies", 1, 20),),
        neighbours=False,
    ),
    Scenario(
        "leak-at-eval",
        "p9",
        "an evaluation takes 20 to 28 GiB and gives back half",
        "leak",
        ("         |\\___", "   |\\____|    ", "___|          "),
        leaks.at_evaluation,
        (Option("period", "duration", "20 to 40 min", _PERIOD, 120.0),),
    ),
    Scenario(
        "warm-up",
        "n1",
        "grows towards a plateau, and stays there",
        "",
        ("     ______", "  .-'      ", " /         "),
        healthy.warm_up,
        (
            Option("time", "duration", "1 to 20 min", "time constant of the approach", 1.0),
            Option("share", "share", "30 to 85 %", "of the card, at the plateau", 0.12, 0.9),
        ),
    ),
    Scenario(
        "autotune",
        "n2",
        "large workspaces in the first minutes, then they are given back",
        "",
        (" |‾|       ", " | |       ", "/   ‾‾‾‾‾‾‾"),
        healthy.autotune,
        (Option("share", "share", "50 to 90 %", "of the card, at the peak", 0.1, 0.9),),
    ),
    Scenario(
        "preallocated",
        "n3",
        "one pool takes most of the card at the start and lasts",
        "",
        (" |‾‾‾‾‾‾‾‾‾", " |         ", "-'         "),
        healthy.preallocated,
        (Option("share", "share", "60 to 94 %", "of the card", 0.15, 0.95),),
    ),
    Scenario(
        "cache-saturates",
        "n4",
        "a cache grows with every request larger than all before; ever fewer are",
        "",
        ("       .--'‾", "   .-'      ", " /'         "),
        healthy.saturating_cache,
        (
            Option("time", "duration", "2 to 6 h", "until 95 % of it is there", 60.0),
            Option("requests", "number", "0.1 to 1", "requests a second", 1e-3, 100.0),
            Option("share", "share", "30 to 60 %", "of the card, in the end", 0.05, 0.6),
        ),
    ),
    Scenario(
        "periodic-eval",
        "n5",
        "an evaluation every so often takes more, and gives all of it back",
        "",
        ("   /|    /| ", "  / |   / | ", "-'  '--'  '-"),
        healthy.periodic_evaluation,
        (
            Option("period", "duration", "5 to 60 min", _PERIOD, 30.0),
            Option("step", "size", "5 to 20 GiB", "taken by an evaluation", 1),
        ),
    ),
    Scenario(
        "curriculum",
        "n6",
        "larger batches, hours apart, for good",
        "",
        ("         ___", "    ____|   ", "___|        "),
        healthy.curriculum,
        (
            Option("times", "number", "1 to 3", "how often", 1, 10),
            Option("step", "size", "2 to 20 GiB", _KEPT, 1),
        ),
    ),
    Scenario(
        "fleet",
        "n7",
        "programs on several devices follow one load: the hours of the day, and jumps",
        "",
        ("   _.-._|‾|_ ", " .'         '", "'            "),
        healthy.fleet,
        (
            Option("programs", "number", "4", "how many, each on a device of its own", 1, 64),
            Option("step", "size", "4 GiB", "the day's swing to either side", 1),
        ),
    ),
    Scenario(
        "steady",
        "",
        "works and stays as it is",
        "",
        ("            ", " .----------", "/           "),
        stress.steady,
    ),
    Scenario(
        "stress",
        "",
        "fills the card, holds it, and checks what it wrote",
        "pressure",
        (" .----------", " |          ", "/           "),
        stress.stress,
        (Option("fill", "share", "90 %", "of the card", 0.01, 0.99),),
        neighbours=False,
    ),
    Scenario(
        "flush-storm",
        "",
        "allocates and frees all the time, and is flushed again and again meanwhile",
        "",
        (" |\\ |\\|\\  |\\", " | \\|   \\|  ", "/           "),
        stress.flush_storm,
        (Option("period", "duration", "2 s", "from flush to flush", 0.05),),
        neighbours=False,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in TABLE}


def scenario(name: str) -> Scenario:
    """By name or alias (p1 to p9, n1 to n7). Raises ConfigError."""
    for one in TABLE:
        if name in (one.name, one.alias) and name:
            return one
    raise ConfigError(f"no scenario is called {name!r}; `gpumond load --list` shows those that there are")


def check(scenario: Scenario, given: Mapping[str, float | str]) -> dict[str, float | str]:
    """The options in base units. Raises ConfigError for one that the scenario does not have, or a bad value."""
    known = {option.name: option for option in (*scenario.options, *COMMON)}
    own = ", ".join(f"--{option.name}" for option in scenario.options) or "none of its own"
    for name in given:
        if name not in known:
            raise ConfigError(f"option --{name}: {scenario.name} has no such option; it has {own}")
    return {name: known[name].value(value) for name, value in given.items()}
