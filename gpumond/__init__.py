"""GPU memory accounting, alerts and flushes with a receipt."""

__version__ = "0.1.0"


def revision() -> str:
    """Return the commit of this build, or of the checkout that is imported; empty if it is unknown.

    A build from changed files ends with ``-modified``. Changes in a checkout after its commit are not seen.
    """
    import os

    package = os.path.dirname(os.path.abspath(__file__))
    git = os.path.join(os.path.dirname(package), ".git")
    try:
        if stated := _first_line(package, "REVISION"):  # written by hatch_build.py
            return stated
        if os.path.isfile(git):  # a worktree
            git = os.path.join(os.path.dirname(git), _first_line(git).removeprefix("gitdir: "))
        head = _first_line(git, "HEAD")
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = os.path.join(git, _first_line(git, "commondir"))
        if found := _first_line(common, name):
            return found
        with open(os.path.join(common, "packed-refs"), encoding="utf-8") as file:
            return next((line[:40] for line in file if line[40:].strip() == name), "")
    except (OSError, ValueError):
        return ""


def _first_line(*path: str) -> str:
    """Return the first line of a file; empty if there is no such file."""
    import os

    try:
        with open(os.path.join(*path), encoding="utf-8") as file:
            return file.readline().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
