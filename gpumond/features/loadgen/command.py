"""``gpumond loadgen``: generate a known pattern of memory use, and report the expected verdict."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpumond import agent
from gpumond.agent.settings import workload_name
from gpumond.cli.arguments import DONE, FAILED, add_option, option_type, parse_duration, positive_type
from gpumond.facts.errors import ConfigError, GpumondError
from gpumond.facts.units import parse_size_argument, parse_threshold, plural
from gpumond.features.loadgen.backends import BACKENDS, BackendSettings
from gpumond.features.loadgen.plan import COMMON_OPTIONS, SCENARIOS, LoadPlan, find_scenario, plan
from gpumond.features.loadgen.runner import (
    CompletedWork,
    ResultsFile,
    RunLimits,
    completed_result,
    failed_result,
    run_plan,
    summary,
)
from gpumond.features.loadgen.scenario_builder import CONTEXT_BYTES, Option, Scenario
from gpumond.sim.device import DeviceSpec, create, simulated_devices
from gpumond.view.text import size_or_dash

SIGNALS = (signal.SIGTERM, signal.SIGINT)
VIRTUAL_TIME_OPTIONS = ("size", "view", "gaps", "neighbors", "programs")
"""Options about the observation or about additional programs. Backends do not use them."""

OPTIONS_OF_COMMAND = ("duration", "fill")
DEFAULT_FILL_RATIO = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="scenario: a name or alias from --list")
    add_option(parser, "--list", "list all scenarios with their patterns and options")
    add_option(
        parser,
        "--backend",
        "what allocates the memory (default: sim, a simulated GPU)",
        choices=tuple(BACKENDS),
        default="sim",
    )
    add_option(parser, "--device N", "GPU index (default: 0)", type=int, default=0)
    add_option(parser, "--sim-device DIR", "with --backend sim: use the simulated GPU in this directory", type=Path)
    add_option(
        parser, "--duration DURATION", "how long to run, such as 10m (default: the scenario's)", type=parse_duration
    )
    add_option(parser, "--seed N", "seed for random values (default: 0)", type=int, default=0)
    add_option(parser, "--speed N", "run N times as fast (default: 1)", type=float, default=1.0)
    add_option(
        parser,
        "--fill FRACTION",
        "use at most this fraction of the GPU (default: 90%% for stress; for other scenarios, 80%%, or 100%% "
        "of a simulated GPU that this command creates)",
        type=option_type(_parse_fraction),
    )
    add_option(
        parser, "--max SIZE", "use at most this much memory, such as 8GiB", type=positive_type(parse_size_argument)
    )
    add_option(parser, "--workload NAME", "workload name to report (default: the scenario's name)")
    add_option(parser, "--no-agent", "run without the agent")
    add_option(parser, "--json", "print the result and the expected verdict as JSON")
    add_option(
        parser,
        "--report FILE",
        "append the result to this file and exit with 1 if it is worse than the previous result",
        type=Path,
    )
    group = parser.add_argument_group(
        "options of scenarios", "If a default lists several values, one is chosen at random (see --seed)."
    )
    for listed in _command_line_options():
        meanings: dict[str, list[str]] = {}
        for scenario in SCENARIOS.values():
            for option in (each for each in (*scenario.options, *COMMON_OPTIONS) if each.name == listed.name):
                meanings.setdefault(f"{option.meaning} (default: {option.default_text})", []).append(scenario.name)
        text = "; ".join(
            meaning if len(names) == len(SCENARIOS) else f"{', '.join(names)}: {meaning}"
            for meaning, names in meanings.items()
        )
        add_option(group, f"--{listed.name} {listed.unit.upper()}", text.replace("%", "%%"))


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        print(
            json.dumps([_scenario_entry(each) for each in SCENARIOS.values()], indent=2)
            if arguments.json
            else _scenario_list()
        )
        return DONE
    if arguments.scenario is None:
        raise ConfigError("no scenario given; to list all scenarios: gpumond loadgen --list")
    scenario = find_scenario(arguments.scenario)
    load_plan, limits = _plan(scenario, arguments), _limits(scenario, arguments)
    with ExitStack() as stack:
        report = None if arguments.report is None else stack.enter_context(closing(ResultsFile(arguments.report)))
        device_directory = (
            stack.enter_context(_simulated_device(arguments, load_plan)) if arguments.backend == "sim" else None
        )
        settings = BackendSettings(arguments.device, device_directory)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # before threads start, because they inherit it
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
        started_at = time.time()
        agent_context = partial(_running_agent, None if arguments.no_agent else _workload(arguments, scenario))
        try:
            runs = run_plan(load_plan, partial(BACKENDS[arguments.backend], settings), limits, agent_context)
        except GpumondError as error:
            if report is not None:
                report.add(failed_result(load_plan, arguments.backend, started_at, str(error)))
            raise
        answer = completed_result(load_plan, runs, arguments.backend, arguments.speed, started_at)
        answer |= report.add(answer) if report is not None else {}
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(answer) if arguments.json else _summary(answer))
    return FAILED if answer["wrong_words"] or answer.get("regressions") else DONE


def _command_line_options() -> Iterator[Option]:
    """Return the options of all scenarios, each name once."""
    seen = {*VIRTUAL_TIME_OPTIONS, *OPTIONS_OF_COMMAND}
    for listed in (each for scenario in SCENARIOS.values() for each in (*scenario.options, *COMMON_OPTIONS)):
        if listed.name not in seen:
            seen.add(listed.name)
            yield listed


def _plan(scenario: Scenario, arguments: argparse.Namespace) -> LoadPlan:
    given: dict[str, float | str] = {
        each.name: text for each in _command_line_options() if (text := getattr(arguments, each.name)) is not None
    }
    if not (math.isfinite(arguments.speed) and arguments.speed > 0):
        raise ConfigError(f"--speed {arguments.speed:g}: must be above 0, such as 60")
    if arguments.duration is not None:
        given["duration"] = arguments.duration * arguments.speed
    if arguments.fill is not None and _has_fill_option(scenario):
        given["fill"] = arguments.fill
    return plan(scenario.name, arguments.seed, **given)


def _limits(scenario: Scenario, arguments: argparse.Namespace) -> RunLimits:
    fill = arguments.fill
    if _has_fill_option(scenario):
        fill = None
    elif fill is None and not _creates_device(arguments):
        fill = DEFAULT_FILL_RATIO
    storm = scenario.name == "flush-storm" and not arguments.no_agent
    return RunLimits(
        pause=_pause,
        fill=fill,
        max_bytes=None if arguments.max is None else int(arguments.max),
        speed=arguments.speed,
        flush=_flush if storm else None,
        verify=scenario.name == "stress",
        progress=partial(_progress, scenario.name) if sys.stderr.isatty() else None,
    )


def _parse_fraction(text: str) -> float:
    share = parse_threshold(text)
    if not 0 < share <= 1:
        raise ValueError("must be above 0 and at most 100%, such as 50%")
    return share


def _has_fill_option(scenario: Scenario) -> bool:
    return any(option.name == "fill" for option in scenario.options)


def _workload(arguments: argparse.Namespace, scenario: Scenario) -> str:
    try:
        return workload_name(arguments.workload or scenario.name)
    except ValueError as error:
        raise ConfigError(f"--workload: {error}") from None


def _creates_device(arguments: argparse.Namespace) -> bool:
    return arguments.backend == "sim" and arguments.sim_device is None and not os.environ.get("GPUMOND_SIM_DIR")


@contextmanager
def _simulated_device(arguments: argparse.Namespace, load_plan: LoadPlan) -> Iterator[Path]:
    """Yield the directory of a simulated device: the one given, one of a running demo, or a temporary one."""
    if arguments.sim_device is not None:
        yield arguments.sim_device
    elif not _creates_device(arguments):
        root = os.environ["GPUMOND_SIM_DIR"]
        devices = simulated_devices(root)
        if not 0 <= arguments.device < len(devices):
            problem = f"GPUMOND_SIM_DIR={root} has {plural(len(devices), 'device')}"
            raise ConfigError(f"--device {arguments.device}: {problem}; the first one is 0")
        yield devices[arguments.device].directory
    else:
        with tempfile.TemporaryDirectory(prefix="gpumond-loadgen-") as directory:
            uuid = "GPU-10ad0000-0000-4000-8000-000000000001"
            spec = DeviceSpec(uuid, 0, "Simulated", load_plan.size_bytes, context_bytes=CONTEXT_BYTES)
            print(f"to monitor this load: GPUMOND_SIM_DIR={directory} gpumond serve --source sim", file=sys.stderr)
            yield create(Path(directory) / "card0", spec).directory


@contextmanager
def _running_agent(workload: str | None) -> Iterator[None]:
    if workload is None:
        yield
        return
    agent.start(workload=workload)
    try:
        yield
    finally:
        agent.stop()


def _pause(duration: float) -> bool:
    agent.step()
    return signal.sigtimedwait(SIGNALS, duration) is None


def _flush() -> int:
    return sum(receipt.released_bytes for receipt in agent.flush())


def _progress(name: str, seconds: float, work: CompletedWork) -> None:
    line = f"{name}  {_clock_text(seconds)}  allocated {work.takes}, freed {work.gives}"
    line += f"  peak {size_or_dash(work.peak_live_bytes)} live, {size_or_dash(work.peak_held_bytes)} held"
    print(f"\r{line[:100]:<100}", end="", file=sys.stderr, flush=True)


def _clock_text(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02}:{int(seconds % 60):02}"


def _summary(result: dict[str, Any]) -> str:
    expected_verdict = result["expected_verdict"]
    lines = [
        f"{result['scenario']} on {result['backend']}: {result['outcome']} after "
        f"{result['ended_at'] - result['started_at']:.1f} s",
        f"allocated {plural(result['takes'], 'block')}, freed {result['gives'] or 'none'}; "
        f"peak {size_or_dash(result['peak_live_bytes'])} live, {size_or_dash(result['peak_held_bytes'])} held; "
        "all memory is freed",
    ]
    if result["detail"]:
        lines.append(result["detail"])
    if result["flushes"]:
        lines.append(
            f"{plural(result['flushes'], 'flush')} released {size_or_dash(result['released_bytes'])} to the GPU"
        )
    if result["checked_bytes"]:
        lines.append(
            f"{size_or_dash(result['checked_bytes'])} checked, {plural(result['wrong_words'], 'incorrect word')}"
        )
    if "regressions" in result:
        lines.append(summary(result))
    form = f" ({expected_verdict['form']})" if expected_verdict["form"] else ""
    lines.append(f"expected verdict: {expected_verdict['kind'] or 'none'}{form}")
    return "\n".join(lines)


def _scenario_entry(scenario: Scenario) -> dict[str, Any]:
    return {
        "name": scenario.name,
        "alias": scenario.alias,
        "summary": scenario.summary,
        "verdict": scenario.verdict,
        "shape": list(scenario.shape),
        "options": {option.name: f"{option.meaning} (default: {option.default_text})" for option in scenario.options},
    }


def _scenario_list() -> str:
    blocks = []
    for scenario in SCENARIOS.values():
        title = f"{scenario.name} ({scenario.alias})" if scenario.alias else scenario.name
        text = [title, scenario.summary, f"expected verdict: {scenario.verdict or 'none'}{scenario.verdict_note}"]
        text += [f"--{option.name} {option.meaning} (default: {option.default_text})" for option in scenario.options]
        shape = [*scenario.shape, *[""] * len(text)]
        blocks.append("\n".join(f"  {line:<16}{words}".rstrip() for line, words in zip(shape, text, strict=False)))
    return "\n\n".join(blocks)
