"""The agent's thread: its lifetime, and its behavior at fork, exec, signals and exit.

Its work is in session.py, which the thread imports after `START_DELAY_SECONDS`. A program that has ended by then, or a
child that has called exec, has only created one thread and one pipe.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
from gpumond.agent.interpreter import is_main_interpreter
from gpumond.agent.wakeup import WakeupPipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from gpumond.agent.session import AgentSession
    from gpumond.agent.settings import AgentSettings

FORK_WARNS_OF_THREADS = sys.version_info >= (3, 12)
"""Whether Python warns of a fork with threads."""
START_DELAY_SECONDS = 0.2
IMPORT_WAIT_SECONDS = 1.0
POLL_INTERVAL_SECONDS = 0.01
FORK_WAIT_SECONDS = 0.05
EXIT_WAIT_SECONDS = 0.1
OOM_EXIT_WAIT_SECONDS = 3.0
"""Longest wait at an exit with an out-of-memory error, whose record nothing else reports."""
PAUSE_AFTER_ERROR_SECONDS = 5.0


class AgentThread:
    """At most one thread in this process; in a forked child, the child's own."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._wakeup = WakeupPipe()
        self._is_exiting = False
        """True while the interpreter runs its exit handlers."""
        self._is_enabled = False
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._session: AgentSession | None = None
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
        )
        atexit.register(self._at_exit)

    def start(self) -> None:
        """Start the thread, or make a running one notice changed settings."""
        if not self._is_enabled and is_main_interpreter():
            self._is_enabled = True
            TORCH_OBJECTS.install()
            self._launch()
        self._wakeup.set()

    def stop(self) -> None:
        self._is_enabled = False
        self._finish(EXIT_WAIT_SECONDS)

    @property
    def has_waiting_commands(self) -> bool:
        """True while commands wait for `step`."""
        session = self._session  # the agent's own thread may remove it
        return session is not None and bool(session.waiting_for_step)

    def on_training_step(self) -> None:
        session = self._session
        if session is not None:
            session.on_training_step()

    def _at_exit(self) -> None:
        self._is_exiting, seconds = True, EXIT_WAIT_SECONDS
        try:
            if self._is_enabled and mentions_memory(getattr(sys, "last_value", None)):
                self._await_session()
            if self._session is not None and self._session.record_ending():
                seconds = OOM_EXIT_WAIT_SECONDS
        except Exception:  # the program and its libraries are about to end
            self._log()
        self._is_enabled = False
        self._finish(seconds)

    def _await_session(self) -> None:
        """Wait until the thread can record the error that ends the program, a short time after its start."""
        deadline = time.monotonic() + START_DELAY_SECONDS + IMPORT_WAIT_SECONDS
        while self._session is None and self._is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_SECONDS)

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _launch(self) -> None:
        self._stop_event = threading.Event()
        arguments = (self._stop_event, self._thread)
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
            self._stop_event.set()
            self._wakeup.set()
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self, stop_event: threading.Event, previous: threading.Thread | None) -> None:
        try:
            self._run_session(stop_event, previous)
        except Exception:  # a module of the program may have the name of one that is imported here
            self._log()
        finally:
            reregister_thread()

    def _run_session(self, stop_event: threading.Event, previous: threading.Thread | None) -> None:
        import signal

        # The program's threads receive the program's signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if previous is not None:
            previous.join()
        if self._session is None and stop_event.wait(START_DELAY_SECONDS):
            return
        while stop_event is self._stop_event and not stop_event.is_set():
            try:
                self._ensure_session().run_once()
            except Exception:  # no error may reach the program's threading.excepthook
                self._log()
                stop_event.wait(PAUSE_AFTER_ERROR_SECONDS)
        if self._session is not None and not self._is_enabled:
            self._session.close(self._is_exiting)
            self._session = None

    def _log(self) -> None:
        """Log only if the program has imported logging: an import here could conflict with logging's fork handlers."""
        logging = sys.modules.get("logging")
        if logging is not None:
            logging.getLogger("gpumond.agent").debug("the agent failed", exc_info=True)

    def _ensure_session(self) -> AgentSession:
        if self._session is None:
            from gpumond.agent.session import AgentSession

            self._session = AgentSession(self.settings, self._wakeup)
        return self._session

    def _before_fork(self) -> None:
        """Stop the thread: a lock that it holds at the fork would stay locked in the child for ever."""
        if self._session is None:
            self._finish(IMPORT_WAIT_SECONDS)
        elif not self._session.is_flushing:
            self._finish(FORK_WAIT_SECONDS)
        if FORK_WARNS_OF_THREADS and self._thread is not None and not self._thread.is_alive():
            wait_until_ended(self._thread)

    def _after_in_parent(self) -> None:
        if self._is_enabled and self._stop_event.is_set():
            call_after_fork(self._relaunch, sys._getframe(1))

    def _relaunch(self) -> None:
        if self._is_enabled and self._stop_event.is_set():
            self._launch()

    def _after_in_child(self) -> None:
        """Start again in the child, with its own socket and pipe."""
        self._stop_event = threading.Event()
        self._thread = None
        self._wakeup.renew()
        if self._session is not None:
            self._session.abandon()
            self._session = None
        if self._is_enabled:
            self._launch()


def mentions_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, may be an out-of-memory error; needs no import."""
    chain = [] if error is None else [error, error.__cause__, error.__context__]
    return any("memory" in f"{type(each).__name__} {each}".lower() for each in chain)


def reregister_thread() -> None:
    """Register this thread under its present ident: `gevent.monkey.patch_all()` gives a running thread another one, and
    `threading`, which removes the thread at its end, would write a KeyError to standard error.
    """
    active: dict[int, threading.Thread] = getattr(threading, "_active", {})
    native_id, ident = threading.get_native_id(), threading.get_ident()
    for old_ident, thread in [*active.items()]:
        if thread.native_id == native_id and old_ident != ident:
            active.pop(old_ident, None)
            active[ident] = thread


def wait_until_ended(thread: threading.Thread) -> None:
    """Wait until the system has also ended a thread that was joined: before 3.13 join() returned early."""
    deadline = time.monotonic() + FORK_WAIT_SECONDS
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0)


def call_after_fork(call: Callable[[], None], forking_frame: FrameType | None) -> None:
    """Call it when the fork in the frame is over; at once if there is no warning, or no other way.

    Python counts the threads after the at-fork functions have run, so such a function must not start one. The main
    thread starts it later, between two of its bytecodes (Py_AddPendingCall), when it has returned to or left the frame
    that forked.
    """
    if not FORK_WARNS_OF_THREADS or threading.current_thread() is not threading.main_thread():
        call()
        return
    from gpumond.agent.pending_calls import add_pending_call

    deadline = time.monotonic() + FORK_WAIT_SECONDS
    is_called = False

    def call_once() -> None:
        nonlocal is_called
        if not is_called and not (
            _is_called_from(forking_frame) and time.monotonic() < deadline and add_pending_call(call_once)
        ):
            is_called = True
            call()

    is_added = add_pending_call(call_once)
    # Twice: from 3.13 on, a call that is added by the last call in the queue is lost.
    if not (add_pending_call(call_once) or is_added):
        call()


def _is_called_from(frame: FrameType | None) -> bool:
    """Return whether the interrupted code was called from that frame, as at-fork functions are."""
    caller = sys._getframe(3)  # skips this frame, the pending call and its caller
    outer = caller.f_back
    while outer is not None and outer is not frame:
        outer = outer.f_back
    return outer is not None and caller is not frame
