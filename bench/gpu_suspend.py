"""On a real device: suspension and resumption of a PyTorch program, as the daemon does them.

Cycles of a program of ``--gib`` GiB: its tensors, an optimizer step and its random numbers must be the same, bit by
bit, as without suspensions. The driver's count while it is suspended, a program that takes the memory meanwhile, the
rates, and two bounds of them: the time in which the kernel provides host pages, and copies to pinned memory; ``pages``
has the seconds with huge pages. Then a rule that suspends an idle program, refusals on the device, who may suspend a
program in which namespaces, and how the driver reaches another process (``reach``, from strace).

    python -m bench.gpu_suspend [cycles] [bounds] [refusals] [rule] [pages] [rights] [reach] [--gib 60] [--cycles 20]

``pages``, ``rights`` and ``reach`` need root, and run only if they are named.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from bench.result import publish
from gpumond.facts.messages import to_json
from gpumond.features.suspend.checkpoint_process import CheckpointRequest, CudaDriver, carry_out
from gpumond.host.machine import read_start_ticks
from tests.helpers.namespaces import FIRST_UID, NEW_MOUNTS, NEW_PIDS, NEW_USER, isolated
from tests.helpers.running import RunningDaemon, until

GIB = 1 << 30
PROGRAM = """
import hashlib, sys, torch
import gpumond.agent
gpumond.agent.start(workload=sys.argv[1], suspendable=True)
gib, suspended = float(sys.argv[2]), sys.argv[3] == "suspended"
torch.manual_seed(7)
count = int(gib * 2**30 / 4 / 2**28)
kept = [torch.randn(2**28, device="cuda") for _ in range(max(0, count))]
model = torch.nn.Linear(4096, 4096, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
step()
torch.cuda.synchronize()
def digest():
    found = hashlib.sha256()
    for each in kept:
        found.update(each.view(torch.int32).to(torch.int64).sum().cpu().numpy().tobytes())
        found.update(each[:: 4096].cpu().numpy().tobytes())
    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    for each in [*model.parameters(), *states, torch.randn(1024, device="cuda"), torch.cuda.get_rng_state()]:
        found.update(each.detach().cpu().numpy().tobytes())
    return found.hexdigest()
print("ready", flush=True)
for line in sys.stdin:
    print(digest(), flush=True)
"""
HOLDER = """
import sys, torch
kept = torch.ones(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
REFUSED = {
    "managed memory": """
import cupy
cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
kept = cupy.ones(1 << 28)
""",
    "children": """
import subprocess, sys, torch
kept = torch.ones(1 << 20, device="cuda")
code = "import torch; a = torch.ones(1, device='cuda'); print(1, flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
""",
    "NCCL communicators": """
import os, torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
torch.distributed.init_process_group("nccl", rank=0, world_size=1)
kept = torch.ones(1 << 20, device="cuda")
torch.distributed.all_reduce(kept)
""",
    "shares GPU memory": """
import torch
from torch.multiprocessing.reductions import reduce_tensor
kept = torch.ones(1 << 20, device="cuda")
shared = reduce_tensor(kept)
""",
    "doesn't allow suspension": """
import torch
gpumond.agent.start(suspendable=False)
kept = torch.ones(1 << 20, device="cuda")
""",
}
OF_REFUSED = """
import gpumond.agent
gpumond.agent.start(workload="refused", suspendable=True)
{code}
print("ready", flush=True)
input()
"""
WITHOUT_ROOT = ("cycles", "bounds", "refusals", "rule")
RULE = {
    "name": "idle",
    "scope": "process",
    "value": "used_bytes",
    "above": "1GiB",
    "match": {"workload": "idle-*"},
    "action": {"suspend": True},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--gib", type=float, default=60.0)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="store the figures in bench/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory)) as daemon:
        parts: dict[str, Callable[[], Mapping[str, Any]]] = {
            "cycles": lambda: cycles(daemon, arguments.gib, arguments.cycles),
            "bounds": bounds,
            "pages": pages,
            "refusals": lambda: refusals(daemon),
            "rule": lambda: by_rule(daemon),
            "rights": rights,
            "reach": reach,
        }
        result: dict[str, Any] = {"gib": arguments.gib, "driver": daemon.get("status")["source"]["driver_version"]}
        result |= {name: parts[name]() for name in arguments.parts or WITHOUT_ROOT}
    publish("gpu_suspend", result)


@contextmanager
def serving(directory: Path) -> Iterator[RunningDaemon]:
    config = directory / "config.yaml"
    config.write_text(json.dumps({"rules": [RULE], "allow_suspend": True, "suspend_after_idle": "5s"}))
    with RunningDaemon(directory / "daemon", "--source", "nvml", "--config", str(config)) as daemon:
        until(lambda: daemon.request("/-/ready")[0] == 200, 60)
        yield daemon


@contextmanager
def running(daemon: RunningDaemon, code: str, *arguments: str) -> Iterator[Callable[[str], str]]:
    """Run a program; yield a function that sends it a line and returns its answer."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, env=daemon.environ, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def asked(line: str) -> str:
            stdin.write(line + "\n")
            stdin.flush()
            return stdout.readline().strip()

        try:
            assert stdout.readline() == "ready\n"
            yield asked
        finally:
            process.kill()


def ask(daemon: RunningDaemon, route: str, **body: Any) -> dict[str, Any]:
    """Suspend or resume, and return the receipt."""
    token = (daemon.directory / "token").read_text().strip()
    status, answer, _ = daemon.request(f"/api/v1/{route}", body, Authorization=f"Bearer {token}")
    content = json.loads(answer)
    return content["receipts"][0] if status == 200 else {"outcome": str(status), "reason": content.get("detail", "")}


def pid_of(daemon: RunningDaemon, workload: str) -> int:
    def found() -> int:
        agents = daemon.get("agents")
        return next((each["pid"] for each in agents if each["workload"] == workload and each["pools"]), 0)

    return int(until(found, 120))


def driver_bytes(daemon: RunningDaemon, pid: int) -> int | None:
    """Return the driver's count of a process, None if the driver does not list it."""
    listed = [each for device in daemon.get("devices") for each in device["processes"] or ()]
    return next((each["used_bytes"] for each in listed if each["pid"] == pid), None)


def cycles(daemon: RunningDaemon, gib: float, count: int) -> dict[str, Any]:
    """Suspend and resume a program, compare each of its answers with those of one without suspensions."""
    with running(daemon, PROGRAM, "reference", str(gib), "plain") as asked:
        reference = [asked("digest") for _ in range(count)]
    receipts: list[tuple[dict[str, Any], dict[str, Any]]] = []
    equal = gone = taken = 0
    with running(daemon, PROGRAM, "notebook", str(gib), "suspended") as asked:
        pid = pid_of(daemon, "notebook")
        for number in range(count):
            until(lambda: (driver_bytes(daemon, pid) or 0) > gib * GIB, 60)
            out = ask(daemon, "suspensions", target={"pid": pid})
            if out["outcome"] != "suspended":
                return {"failed": out, "at": number}
            gone += until(lambda: driver_bytes(daemon, pid) is None, 60)
            free = until(lambda: daemon.get("devices")[0]["free_bytes"], 60) / GIB
            with running(daemon, HOLDER, str(free - gib / 2)):
                taken += free - gib / 2 >= gib / 2
                if number == 0:
                    lacking = ask(daemon, "resumptions", target={"pid": pid})
            back = ask(daemon, "resumptions", target={"pid": pid}, wait_seconds=120)
            receipts.append((out, back))
            if back["outcome"] != "resumed":
                return {"failed": back, "at": number}
            equal += asked("digest") == reference[number]
    return {
        "cycles": count,
        "equal": equal,
        "count_was_0": gone,
        "memory_taken_meanwhile": taken,
        "refused_without_memory": lacking["reason"],
        "released_bytes": [out["released_bytes"] for out, _ in receipts],
        "host_bytes": [out["host_bytes"] for out, _ in receipts],
        "checkpoint_seconds": seconds_of(receipts, 0, "checkpoint"),
        "restore_seconds": seconds_of(receipts, 1, "restore"),
        "checkpoint_gib_per_second": rate(receipts, 0, "checkpoint"),
        "restore_gib_per_second": rate(receipts, 1, "restore"),
    }


def seconds_of(receipts: list[tuple[dict[str, Any], dict[str, Any]]], which: int, step: str) -> list[float]:
    return [round(dict(each[which]["steps"])[step], 2) for each in receipts]


def rate(receipts: list[tuple[dict[str, Any], dict[str, Any]]], which: int, step: str) -> float:
    times = seconds_of(receipts, which, step)
    return round(statistics.median(receipts[0][0]["expected_bytes"] / GIB / each for each in times), 2)


def bounds(gib: int = 8) -> Mapping[str, Any]:
    """GiB a second in which the kernel provides host pages, with and without huge ones, and of copies from and to
    pinned memory.
    """
    found: dict[str, Any] = {}
    for name, advice in (("pages", mmap.MADV_NOHUGEPAGE), ("huge_pages", mmap.MADV_HUGEPAGE)):
        with mmap.mmap(-1, gib * GIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(advice)
            began = time.perf_counter()
            for place in range(0, gib * GIB, 4096):
                memory[place] = 1
            with_loop = time.perf_counter() - began
            began = time.perf_counter()
            for place in range(0, gib * GIB, 4096):
                memory[place] = 1
            found[name] = round(gib / max(1e-9, with_loop - (time.perf_counter() - began)), 2)
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found["transparent_hugepage"] = path.read_text().strip() if path.exists() else None
    code = (
        "import json, time, torch\n"
        "host = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)\n"
        "device = torch.empty(4 << 30, dtype=torch.uint8, device='cuda')\n"
        "def rate(to, of):\n"
        "    to.copy_(of); torch.cuda.synchronize(); began = time.perf_counter(); to.copy_(of)\n"
        "    torch.cuda.synchronize(); return round(4 / (time.perf_counter() - began), 2)\n"
        "print(json.dumps({'to_pinned': rate(host, device), 'from_pinned': rate(device, host)}))"
    )
    copied = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found | json.loads(copied.stdout)


def refusals(daemon: RunningDaemon) -> Mapping[str, Any]:
    """Return for each case whether the suspension is refused for this reason, and what was answered."""
    return {name: refusal(daemon, name, code) for name, code in REFUSED.items()}


def refusal(daemon: RunningDaemon, reason: str, code: str) -> Any:
    """Return True if the suspension of a program is refused for this reason, else what was answered."""
    try:
        with running(daemon, OF_REFUSED.format(code=code)):
            pid = pid_of(daemon, "refused")
            until(lambda: driver_bytes(daemon, pid), 60)
            time.sleep(3.0)  # the next report
            receipt = ask(daemon, "suspensions", target={"pid": pid})
            return True if receipt["outcome"] == "refused" and reason in receipt["reason"] else receipt
    except AssertionError:
        return "the program did not start"


def by_rule(daemon: RunningDaemon) -> Mapping[str, Any]:
    """A rule suspends an idle program; return its count, and whether it is the same after its resumption."""
    with running(daemon, PROGRAM, "reference", "4", "plain") as asked:
        reference = asked("digest")
    with running(daemon, PROGRAM, "idle-notebook", "4", "suspended") as asked:
        pid = pid_of(daemon, "idle-notebook")
        until(lambda: [each for each in daemon.get("suspensions") if each["state"] == "suspended"], 180)
        gone = until(lambda: driver_bytes(daemon, pid) is None, 60)
        back = ask(daemon, "resumptions", target={"pid": pid}, wait_seconds=60)
        return {"count_is_0": gone, "resumed": back["outcome"], "equal": asked("digest") == reference}


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMALL = """
import sys, torch
kept = torch.arange(int(sys.argv[1]) << 27, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    print(int(kept[-1]), flush=True)
"""
PROGRAMS = {
    "root's program": (0, 0),
    "a user's program": (0, 65534),
    "a user's program in its own PID namespace": (NEW_MOUNTS | NEW_PIDS, 65534),
    "a program in a user namespace": (NEW_USER, 1000),
    "root's program in a user and a PID namespace": (NEW_USER | NEW_MOUNTS | NEW_PIDS, 0),
}
"""Flags of unshare(2), and the uid there."""


def isolated_program(flags: int, uid: int, gib: int = 1) -> AbstractContextManager[tuple[int, Callable[[], str]]]:
    return isolated(flags, uid, [sys.executable, "-c", SMALL, str(gib)])


AS_USER = """
import os, sys
from gpumond.features.suspend import checkpoint_process
uid = int(sys.argv[1])
if uid: os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
checkpoint_process.main(sys.argv[2:])
"""


def suspend_and_resume(pid: int, uid: int, caller: int = 0, prefix: Sequence[str] = ()) -> str:
    """Suspend and resume a program as this caller; return what failed. ``uid``: which the checkpoint process takes."""
    for action, state in (("suspend", "checkpointed"), ("resume", "running")):
        request = CheckpointRequest(action=action, pid=pid, start_ticks=read_start_ticks(pid) or 0, uid=uid)  # type: ignore[arg-type]
        command = [*prefix, sys.executable, "-c", AS_USER, str(caller), to_json(request).decode()]
        done = subprocess.run(command, capture_output=True, text=True)
        answer = json.loads(done.stdout or "{}")
        if answer.get("state") != state:
            return f"{action}: {answer.get('error') or answer.get('state') or done.stderr[-200:]}"
    return "suspended and resumed"


def rights() -> Mapping[str, Any]:
    """Who may suspend and resume a program, by its user and namespaces. Needs root."""
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    found: dict[str, Any] = {"ptrace_scope": yama.read_text().strip() if yama.exists() else None}
    for name, (flags, inside) in PROGRAMS.items():
        uid = inside + FIRST_UID if flags & NEW_USER else inside
        with isolated_program(flags, inside) as (pid, asked):
            found[name] = {
                "root": suspend_and_resume(pid, 0),
                "root, which takes the program's user": suspend_and_resume(pid, uid),
                "the program's user in the host's user namespace": suspend_and_resume(pid, uid, uid),
                "another user": suspend_and_resume(pid, uid, 65533),
            }
            found[name]["continues"] = asked() == str((1 << 27) - 1)
    return found


def reach() -> Mapping[str, Any]:
    """How checkpoint processes reach the program: paths in its /proc directory, and calls that Yama restricts."""
    calls = ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_open", "pidfd_getfd", "kcmp", "kill", "connect")
    with isolated_program(0, 65534) as (pid, _), tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "calls"
        state = suspend_and_resume(
            pid, 65534, 65534, ("strace", "-f", "-A", "-o", str(out), "-e", f"trace=%file,{','.join(calls)}")
        )
        lines = [line.partition(" ")[2].strip() for line in out.read_text().splitlines()]
    about = [line for line in lines if f"/proc/{pid}/" in line or line.startswith(calls)]
    return {"state": state, "calls": list(dict.fromkeys(line.replace(f"/{pid}/", "/PID/") for line in about))[:60]}


def pages(gib: int = 16) -> Mapping[str, Any]:
    """Seconds of checkpoint and restore by the machine's setting of huge pages, and with glibc's."""
    before = HUGE_PAGES.read_text().split("[")[1].partition("]")[0]
    found: dict[str, Any] = {}
    for name, setting, environ in (
        ("madvise", "madvise", ""),
        ("always", "always", ""),
        ("madvise, glibc.malloc.hugetlb=1", "madvise", "glibc.malloc.hugetlb=1"),
    ):
        HUGE_PAGES.write_text(setting)
        os.environ["GLIBC_TUNABLES"] = environ
        try:
            with isolated_program(0, 0, gib) as (pid, _):
                found[name] = [steps(pid) for _ in range(3)]
        finally:
            HUGE_PAGES.write_text(before)
            del os.environ["GLIBC_TUNABLES"]
    return {"gib": gib, **found}


def steps(pid: int) -> dict[str, float]:
    """Suspend and resume a program of this user, and return the seconds of each call."""
    found: dict[str, float] = {}
    for action in ("suspend", "resume"):
        request = CheckpointRequest(action=action, pid=pid, start_ticks=read_start_ticks(pid) or 0, uid=0)  # type: ignore[arg-type]
        answer = carry_out(request, CudaDriver())
        found |= {name: round(seconds, 2) for name, seconds in answer.steps}
        if answer.error:
            raise RuntimeError(answer.error)
    return found


if __name__ == "__main__":
    main()
