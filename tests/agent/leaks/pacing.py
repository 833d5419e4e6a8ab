"""The pace of a program that leaks: a number of steps for each line of standard input."""

import sys

from gpumond.agent.allocators import torch_live_classes
from gpumond.agent.retainers import RetentionSearch


def steps():
    """Yield the numbers of steps; search between them in another thread, and print the result."""
    import json
    import threading
    from dataclasses import asdict

    import torch

    def in_thread(call):
        result = []
        thread = threading.Thread(target=lambda: result.append(call()))
        thread.start()
        thread.join()
        return result[0]

    yield from range(5)
    search = in_thread(lambda: RetentionSearch(lambda: torch_live_classes.tracked_tensors(torch, "cpu")))
    yield from range(5, 15)
    in_thread(search.advance)
    yield from range(15, 25)
    found = in_thread(search.advance)
    sys.stdout.write(json.dumps([asdict(one) for one in found]) + "\n")
    sys.stdout.flush()
