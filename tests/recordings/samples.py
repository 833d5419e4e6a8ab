"""Samples of the formats of recordings."""

from __future__ import annotations

import json
from typing import Any

from gpumond.facts.snapshot import Snapshot

HEADER = (
    "        Date        , GPU Clock [MHz] , GPU Temperature [\N{DEGREE SIGN}C] , Memory Used (Dedicated) [MB] , "
    "Memory Used (Dynamic) [MB] , GPU Load [%] , PerfCap Reason [] , System Memory Used [MB] ,\n"
)


ROWS = (
    "2024-01-14 18:41:07 ,          1785.0   ,             48.7   ,         3543   ,  88 ,   21   ,  16 ,  16041 ,\n"
    "2024-01-14 18:41:08 ,          1785.0   ,             48.7   ,         3600   ,  88 ,    -   ,  16 ,  16041 ,\n"
)


UUID = "GPU-5a3c9a52-6f1e-4e0c-9b0a-2f8f6f7d1c11"


WITH_UNITS = f"""\
timestamp, uuid, memory.used [MiB], memory.total [MiB], utilization.gpu [%]
2024/05/01 12:00:00.123, {UUID}, 500 MiB, 81559 MiB, 7 %
2024/05/01 12:00:01.123, {UUID}, 501 MiB, 81559 MiB, 8 %
"""


PROCESSES = """\
timestamp, gpu_uuid, pid, process_name, used_gpu_memory [MiB]
2024/05/01 12:00:00.100, GPU-a, 7, python, serve.py, 100 MiB
2024/05/01 12:00:00.101, GPU-a, 8, /usr/bin/x, 50 MiB
2024/05/01 12:00:01.100, GPU-a, 7, python, serve.py, 110 MiB
2024/05/01 12:00:02.100, GPU-a, 7, python, serve.py, 120 MiB
2024/05/01 12:00:02.101, GPU-a, 8, /usr/bin/x, 60 MiB
"""


def series(name: str, *values: float, **labels: str) -> dict[str, Any]:
    metric = {"__name__": name, **labels} if name else labels
    return {"metric": metric, "values": [[1000 + 15 * n, str(value)] for n, value in enumerate(values)]}


def answer(*result: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}, **fields})


DMON = """\
#Date       Time        gpu     fb   bar1   ccpm     sm    mem    enc    dec
#YYYYMMDD   HH:MM:SS    Idx     MB     MB     MB      %      %      %      %
 20240104   13:54:35      0    239      3      0      6      1      0      0
 20240104   13:54:35      1      -      3      0      -      1      0      0
 20240104   13:54:36      0    240      3      0      7      1      0      0
 20240104   13:54:36      1     17      3      0      0      1      0      0
"""


BAR = "+-----------------------------------------------------------------------------------------+\n"


def table(used: int, *processes: str, at: str = "", load: str = "29%") -> str:
    listed = processes or (
        "|  No running processes found                                                             |",
    )
    return (
        at
        + BAR
        + "| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |\n"
        + "|   0  NVIDIA A40                     On  |   00000000:31:00.0 Off |                    0 |\n"
        + f"|  0%   27C    P0             24W /  300W | {used:>7}MiB /  46068MiB | {load:>7}      Default |\n"
        + "|                                         |                        |                  N/A |\n"
        + "| Processes:                                                                              |\n"
        + "".join(f"{line}\n" for line in listed)
        + BAR
    )


def process(pid: int, used: str, name: str = "/opt/env/bin/python") -> str:
    return f"|    0   N/A  N/A {pid:>15}      C   {name} {used:>12} |"


def date(minute: int, second: int = 14) -> str:
    return f"Sat Jan 24 21:{minute:02}:{second:02} 2026       \n"


def processes(snapshot: Snapshot) -> list[tuple[int, int | None]] | None:
    (device,) = snapshot.devices
    return None if device.processes is None else [(each.pid, each.used_bytes) for each in device.processes]
