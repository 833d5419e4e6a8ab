"""A small program on a real device, for ``bench.peers``: it holds memory, and works ten times a second.

python -m bench.cuda_program NUMBER

It uses CuPy, or PyTorch if CuPy is not installed, and the device NUMBER modulo the number of devices. It reports to the
daemon of ``GPUMOND_SOCKET``, and writes a line when it holds its memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from gpumond import agent

HELD_BYTES, MAX_BYTES = 64 << 20, 32 << 20
STEPS_PER_SECOND = 10


def with_cupy(number: int) -> Callable[[int], object]:
    import cupy

    cupy.cuda.Device(number % cupy.cuda.runtime.getDeviceCount()).use()
    held = cupy.zeros(HELD_BYTES, cupy.uint8)

    def step(size: int) -> object:
        held.fill(0)
        return cupy.zeros(size, cupy.uint8)

    return step


def with_torch(number: int) -> Callable[[int], object]:
    import torch

    device = torch.device("cuda", number % torch.cuda.device_count())
    held = torch.zeros(HELD_BYTES, dtype=torch.uint8, device=device)

    def step(size: int) -> object:
        held.zero_()
        return torch.zeros(size, dtype=torch.uint8, device=device)

    return step


def main() -> None:
    number = int(sys.argv[1])
    agent.start()
    step = with_cupy(number) if find_spec("cupy") else with_torch(number)
    step(1)
    print("ready", flush=True)
    count = 0
    while True:
        count += 1
        step(1 + count * (1 << 20) % MAX_BYTES)
        time.sleep(1 / STEPS_PER_SECOND)


if __name__ == "__main__":
    main()
