"""Which interpreter this is. No import of typing: it would add to the cost of each start."""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def is_main_interpreter() -> bool:
    """Return whether this is the main interpreter. A subinterpreter that ends with a thread left aborts the program."""
    is_main: Callable[[], bool] | None = getattr(_thread, "_is_main_interpreter", None)  # since Python 3.13
    if is_main is not None:
        return is_main()
    try:
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]
    except ImportError:
        return True
    return bool(interpreters.get_current() == interpreters.get_main())
