"""Starts the agent in an unmodified program: `gpumond run` puts this directory on PYTHONPATH.

Python imports one module of this name at every start. This module therefore imports the user's own, if there is one.
PYTHONPATH is unchanged, so Python programs started by this one have the agent too. Tools that the program calls
may run in a much older Python, so every line of this file must be valid there.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
sys.path[:] = [entry for entry in sys.path if entry != _HERE]

if os.environ.get("GPUMOND_AGENT") == "1" and sys.version_info >= (3, 10):
    try:
        from _frozen_importlib_external import PathFinder

        _spec = PathFinder.find_spec("gpumond")
        if _spec is None:
            # This environment has no gpumond: take the one that this file belongs to, and nothing else from there.
            sys.path.append(os.path.dirname(_PACKAGE))
            try:
                import gpumond.agent.autostart
            finally:
                sys.path.pop()
            gpumond.agent.autostart.start()
        else:
            # gpumond.py or a package of the program itself is not imported.
            _folder = next(iter(_spec.submodule_search_locations or [""]))
            if _folder == _PACKAGE or os.path.exists(os.path.join(_folder, "agent", "inject", "sitecustomize.py")):
                import gpumond.agent.autostart

                gpumond.agent.autostart.start()
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ):  # the program starts, whatever happens to the agent; a module of its own may end with SystemExit
        pass

_this_module = sys.modules.pop(__name__)  # the user's own is next; its errors are its own
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
finally:
    sys.modules.setdefault(__name__, _this_module)
