"""What the agent does: says who it is, reports once a second, and flushes when a trusted daemon asks.

Everything that has arrived is read before anything is done: a program that was stopped finds the daemon's
Cancel behind its Flush, and leaves its memory alone.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from gpumond import __version__
from gpumond.agent.adapters import AllocatorAdapter, host_pools
from gpumond.agent.commands import CommandHandler, answers
from gpumond.agent.distributed import is_rank
from gpumond.agent.ending import ending
from gpumond.agent.instrument.oom import OOMS
from gpumond.agent.program_report import look, told
from gpumond.agent.registry import REGISTRY
from gpumond.agent.transport import Transport
from gpumond.protocol.messages import (
    SERVICE_SOCKET,
    AgentRequest,
    Bye,
    Cancel,
    FlushCommand,
    FlushResult,
    Hello,
    Report,
    clean,
    own_socket,
)

if TYPE_CHECKING:
    from gpumond.agent.thread import AgentThread

REPORT_SECONDS = 1.0
MAX_ASKED = 16


class Still:
    """What changes seldom, as it was at the last look for allocators."""

    def __init__(self, adapters: list[AllocatorAdapter]) -> None:
        cuda = sys.modules.get("gpumond.agent.cuda")  # it came with the first adapter that asks the driver, or never
        if cuda is not None:
            cuda.stay_beside_captures()
        self.adapters = adapters
        self.frameworks = tuple(clean(adapter.framework()) for adapter in adapters)
        self.host_pools = host_pools(adapters)
        self.distributed = is_rank()


class Session:
    """Belongs to the agent's thread; only `step` is called from another."""

    def __init__(self, loop: AgentThread) -> None:
        self._loop = loop
        self._link = Transport()
        self._said: tuple[object, ...] = ()
        self._report_at = 0.0
        self._orders: dict[str, tuple[FlushCommand, float]] = {}
        self._answers: deque[FlushResult] = deque()
        self._asked: deque[AgentRequest] = deque(maxlen=MAX_ASKED)
        self._asks = CommandHandler()
        self._still: Still | None = None
        self.flushing = False

    def turn(self) -> None:
        """Waits for something to do, until the next report at the latest, and does it."""
        self._connect()
        arrived = self._wait()
        now = time.monotonic()
        for message in self._link.receive(now) if arrived else ():
            if isinstance(message, FlushCommand):
                self._orders[message.id] = (message, now + message.timeout_seconds)
            elif isinstance(message, Cancel):
                self._cancel(message.id)
            elif isinstance(message, AgentRequest):
                self._asked.append(message)
        if not self._link.connected:
            self._orders.clear()
            self._loop.waiting.clear()
            self._asked.clear()
        self._obey()
        self._answer()
        self._give_up(time.monotonic())
        self._report()
        self._link.push(time.monotonic())

    def step(self) -> None:
        """In the program's own thread: the flushes that waited for this moment."""
        for name, (order, deadline) in list(self._loop.waiting.items()):
            if time.monotonic() < deadline and self._loop.waiting.pop(name, None) is not None:
                try:
                    answer = REGISTRY.obey(order, self._loop.hooks, self._loop.main_thread)
                except BaseException as error:
                    self._answers.append(FlushResult(order.id, "failed", clean(f"interrupted: {error!r}")))
                    raise
                self._answers.append(answer)
                self._report_at = 0.0
                self._loop.wake.set()

    def _cancel(self, name: str) -> None:
        """Every order is answered, this one too: the daemon then knows that it is over."""
        if self._orders.pop(name, None) or self._loop.waiting.pop(name, None):
            self._link.send(FlushResult(name, "deferred", "the daemon waited no longer; nothing was done"))

    def close(self) -> None:
        """Sends a last report and a goodbye, which says how the program ends."""
        self._report_at = 0.0
        try:
            self._report()
        except Exception:  # the program is about to end, and its libraries with it
            pass
        self._link.push(0.0)
        self._link.send(Bye(ending() if self._loop.exiting else None))
        self._link.push(0.0)
        self._link.renew()

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's socket, silently."""
        self._link.renew()

    def _connect(self) -> None:
        said = (self._loop.socket, self._loop.workload, self._loop.allow_limit)
        if self._link.connected:
            if said == self._said:
                return
            self._link.renew()
        now = time.monotonic()
        if now >= self._link.retry_at and self._link.connect(self._loop.socket or _socket_path(), now):
            self._said = said
            allowed = answers(self._loop.allow_limit)
            self._link.send(Hello(self._loop.workload, __version__, sys.version.split()[0], allowed))
            self._report_at = now

    def _wait(self) -> bool:
        """Whether the daemon has sent something, or is gone."""
        now = time.monotonic()
        until = [self._report_at, *(deadline for _, deadline in list(self._loop.waiting.values()))]
        if not self._link.connected:
            until.append(self._link.retry_at)
        poll = select.poll()
        wake, link = self._loop.wake.fileno(), self._link.fileno()
        for descriptor, events in (
            (wake, select.POLLIN),
            (link, select.POLLIN | select.POLLOUT if self._link.unsent else select.POLLIN),
        ):
            if descriptor >= 0:
                poll.register(descriptor, events)
        seconds = 0.0 if self._orders else max(0.0, min(until) - now)
        seen = dict(poll.poll(1000 * min(seconds, REPORT_SECONDS)))
        if wake in seen:
            self._loop.wake.clear()
        return bool(seen.get(link, 0) & ~select.POLLOUT)

    def _obey(self) -> None:
        """At most one flush: what arrives during it is read before the next."""
        policy = self._loop.flush_policy
        for name in list(self._orders):
            order, deadline = self._orders.pop(name)
            if policy == "never":
                self._link.send(FlushResult(order.id, "refused", "this program's flush_policy is never"))
            elif policy == "step":
                self._loop.waiting[name] = (order, deadline)
            elif time.monotonic() >= deadline:
                self._link.send(FlushResult(order.id, "timeout", "its time was over before it began; nothing was done"))
            else:
                self.flushing = True
                try:
                    self._link.send(REGISTRY.obey(order, self._loop.hooks, self._loop.main_thread))
                finally:
                    self.flushing = False
                self._report_at = 0.0
                return

    def _answer(self) -> None:
        while self._asked:
            ask = self._asked.popleft()
            self._link.send(self._asks.answer(ask, self._loop.workload, self._loop.allow_limit))

    def _give_up(self, now: float) -> None:
        for name, (order, deadline) in list(self._loop.waiting.items()):
            if now >= deadline and self._loop.waiting.pop(name, None) is not None:
                reason = f"no step() was reached in {order.timeout_seconds:g} s; nothing was done"
                self._link.send(FlushResult(order.id, "deferred", reason))
        while self._answers:
            self._link.send(self._answers.popleft())

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + REPORT_SECONDS
        adapters = REGISTRY.known()
        if self._loop.observe_ooms:
            OOMS.observe()
        if self._link.connected:
            pools = REGISTRY.read()
            if pools is not None:
                still = self._still
                if still is None or still.adapters is not adapters:
                    still = self._still = Still(adapters)
                look(pools)
                program = told(still.distributed, self._link.refusals + REGISTRY.refusals)
                self._link.send(Report(self._loop.flush_policy, still.frameworks, pools, program, still.host_pools))


def _socket_path() -> str:
    path, own = os.environ.get("GPUMOND_SOCKET"), own_socket()
    if not path and own and os.path.exists(own):
        path = own
    return path or SERVICE_SOCKET
