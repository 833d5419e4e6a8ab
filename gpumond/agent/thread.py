"""The agent's thread: its lifetime, and its behaviour at fork, exec, signals and exit.

Its work is in session.py, which the thread imports after `GRACE_SECONDS`. A program that has ended by then, or a child
that has called exec, has paid for one thread and one pipe only.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading

from gpumond.agent import POLICIES, check_workload
from gpumond.agent.fork import WARNS, call_soon, wait_until_ended
from gpumond.agent.wakeup import WakeupPipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumond.agent.allocator_flush import Hook
    from gpumond.agent.session import Session
    from gpumond.model.pools import FlushPolicy
    from gpumond.protocol.messages import FlushCommand

GRACE_SECONDS = 0.2
IMPORT_SECONDS = 1.0
FORK_SECONDS = 0.05
EXIT_SECONDS = 0.1
FAILED_SECONDS = 5.0


class AgentThread:
    """At most one thread in this process; in a forked child, the child's own."""

    def __init__(self, hooks: list[Hook]) -> None:
        self.workload = _workload(os.environ.get("GPUMOND_WORKLOAD", ""))
        self.flush_policy: FlushPolicy = _policy(os.environ.get("GPUMOND_FLUSH_POLICY", ""))
        self.socket: str | None = None
        self.main_thread = os.environ.get("GPUMOND_MAIN_THREAD") == "1"
        self.allow_limit = os.environ.get("GPUMOND_ALLOW_LIMIT") == "1"
        self.observe_ooms = os.environ.get("GPUMOND_OBSERVE_OOMS") == "1"
        self.hooks = hooks
        self.waiting: dict[str, tuple[FlushCommand, float]] = {}
        """Flushes that wait for `step`, each with its deadline."""
        self.wake = WakeupPipe()
        self.exiting = False
        """True while the interpreter runs its exit handlers."""
        self._enabled = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
        )
        atexit.register(self._at_exit)

    def start(
        self,
        workload: str | None,
        flush_policy: FlushPolicy | None,
        socket: str | None,
        main_thread: bool | None,
        allow_limit: bool | None,
        observe_ooms: bool | None,
    ) -> None:
        self.workload = self.workload if workload is None else workload
        self.flush_policy = self.flush_policy if flush_policy is None else flush_policy
        self.socket = self.socket if socket is None else socket
        self.main_thread = self.main_thread if main_thread is None else main_thread
        self.allow_limit = self.allow_limit if allow_limit is None else allow_limit
        self.observe_ooms = self.observe_ooms if observe_ooms is None else observe_ooms
        if not self._enabled and in_main_interpreter():
            self._enabled = True
            self._launch()
        self.wake.set()

    def stop(self) -> None:
        self._enabled = False
        self._finish(EXIT_SECONDS)

    def step(self) -> None:
        if self._session is not None:
            self._session.step()

    def _at_exit(self) -> None:
        self.exiting = True
        self.stop()

    def _launch(self) -> None:
        self._end = threading.Event()
        arguments = (self._end, self._thread)
        try:
            thread = threading.Thread(target=self._run, args=arguments, name="gpumond-agent", daemon=True)
            thread.start()
        except RuntimeError:  # the thread limit, or an interpreter that is about to exit
            return
        self._thread = thread

    def _finish(self, seconds: float) -> None:
        """Stop the thread, and wait for its end at most ``seconds``."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._end.set()
            self.wake.set()
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self, end: threading.Event, previous: threading.Thread | None) -> None:
        try:
            self._report(end, previous)
        except Exception:  # a module of the program may have the name of one that is imported here
            self._log()

    def _report(self, end: threading.Event, previous: threading.Thread | None) -> None:
        import signal

        # The program's threads receive the program's signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if previous is not None:
            previous.join()
        if self._session is None and end.wait(GRACE_SECONDS):
            return
        while end is self._end and not end.is_set():
            try:
                self._open().run_once()
            except Exception:  # no error may reach the program's threading.excepthook
                self._log()
                end.wait(FAILED_SECONDS)
        if self._session is not None and not self._enabled:
            self._session.close()
            self._session = None

    def _log(self) -> None:
        """Log only if the program has imported logging: an import here could conflict with logging's fork handlers."""
        logging = sys.modules.get("logging")
        if logging is not None:
            logging.getLogger("gpumond.agent").debug("the agent failed", exc_info=True)

    def _open(self) -> Session:
        if self._session is None:
            from gpumond.agent.session import Session

            self._session = Session(self)
        return self._session

    def _before_fork(self) -> None:
        """Stop the thread: a lock that it holds at the fork would stay locked in the child for ever."""
        if self._session is None:
            self._finish(IMPORT_SECONDS)
        elif not self._session.flushing:
            self._finish(FORK_SECONDS)
        if WARNS and self._thread is not None and not self._thread.is_alive():
            wait_until_ended(self._thread)

    def _after_in_parent(self) -> None:
        if self._enabled and self._end.is_set():
            call_soon(self._relaunch, sys._getframe(1))

    def _relaunch(self) -> None:
        if self._enabled and self._end.is_set():
            self._launch()

    def _after_in_child(self) -> None:
        """Start again in the child, with its own socket and pipe."""
        self._end = threading.Event()
        self._thread = None
        self.waiting.clear()
        self.wake.renew()
        if self._session is not None:
            self._session.abandon()
            self._session = None
        if self._enabled:
            self._launch()


def in_main_interpreter() -> bool:
    """Return whether this is the main interpreter. A subinterpreter that ends with a thread left would abort the
    program.
    """
    is_main: Callable[[], bool] | None = getattr(_thread, "_is_main_interpreter", None)  # since Python 3.13
    if is_main is not None:
        return is_main()
    try:
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]
    except ImportError:
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


def _workload(name: str) -> str:
    try:
        return check_workload(name)
    except ValueError:
        return ""


def _policy(name: str) -> FlushPolicy:
    for policy in POLICIES:
        if policy == name:
            return policy
    return "allow"
