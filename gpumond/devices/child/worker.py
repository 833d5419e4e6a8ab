"""The child process that owns the driver: it answers each request line with one response line.

``python -m gpumond.devices.child.worker POSITION SOURCE``, where POSITION is the descriptor of a DevicePosition. It
exits when stdin closes, after closing the driver in order: killing a process during a driver call may make the driver
unusable.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

from gpumond.devices import NO_INDEX, ReadProgress, load_source
from gpumond.devices.child.pipe import DevicePosition, ReadingCodec, ReadRequest, ReadResponse
from gpumond.devices.process.metadata import ProcessMetadata
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.messages import from_json, printable_text, to_json
from gpumond.host.machine import raise_descriptor_limit, reduce_garbage_collection

PR_SET_PDEATHSIG = 1


def main(position_descriptor: int, source_name: str) -> int:
    os.set_inheritable(position_descriptor, False)
    raise_descriptor_limit()  # each process with device memory needs a descriptor
    _continue_without_parent()
    position = DevicePosition(position_descriptor)
    progress = ReadProgress(position.set_index)
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the driver library must not mix with the responses

    def answer(value: ReadResponse) -> None:
        responses.write(to_json(value) + b"\n")
        responses.flush()

    try:
        source = load_source(source_name, progress)
        source.open()
        answer(ReadResponse())
        metadata, codec = ProcessMetadata(), ReadingCodec()
        reduce_garbage_collection()
        for line in sys.stdin.buffer:
            request = from_json(ReadRequest, line)
            progress.excluded = {device.index: device.uuid for device in request.leave_out}
            progress.limit_changes = request.limit_changes
            reading = source.read()
            position.set_index(NO_INDEX)
            answer(ReadResponse(*codec.encode(metadata.complete(reading, progress.process_stats))))
        source.close()
    except SourceUnavailable as error:
        answer(ReadResponse(reason=error.reason, message=printable_text(error)))
        return 1
    except BrokenPipeError:
        with suppress(BrokenPipeError):
            responses.close()  # Python 3.14 prints the error if the buffer isn't empty at the end
        return 1
    return 0


def _continue_without_parent() -> None:
    """Request SIGCONT from the kernel when the parent exits, so a stopped child reads the end of its stdin and
    exits.

    Nothing terminates it during a driver call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
