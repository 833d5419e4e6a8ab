"""The configuration file of a daemon, and the copy of its last content that could be loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpumond.config import Settings
from gpumond.config.loading import load
from gpumond.errors import ConfigError
from gpumond.host.files import read_text

log = logging.getLogger(__name__)

COPY = "last-configuration.yaml"
"""Name of the copy in the state directory. It may contain secrets, so only its owner can read it."""
FIRST_LINE = "# the last content of {} that could be loaded; gpumond replaces this file\n"


class Kept(NamedTuple):
    """Settings of the copy are in effect, because the file could not be loaded.

    ``error``: the reason. ``place``: that in the file, without values. ``loaded_at``: unix seconds at which the copy
    was written.
    """

    error: str
    place: str
    loaded_at: float


@dataclass(frozen=True, slots=True)
class ConfigurationFile:
    """``path``: the file, if there is one. ``flags`` are those of the command, which override the file."""

    path: Path | None
    flags: Mapping[str, Any]

    def load(self) -> Settings:
        """Load the file, and keep a copy. Raises ConfigError, also if the file's web configuration is invalid."""
        text = None
        if self.path is not None:
            try:
                text = read_text(self.path)
            except (OSError, ValueError):
                pass  # load states the reason
        settings = load(self.path, self.flags, content=text)
        settings.web()
        if text is not None:
            self._keep(settings.store_file().parent, text)
        return settings

    def load_or_keep(self) -> tuple[Settings, Kept | None]:
        """Load the file, or else its copy. Raises the ConfigError of the file if the copy cannot be used, either."""
        try:
            return self.load(), None
        except ConfigError as error:
            kept = self._of_copy()
            if kept is None:
                raise
            settings, written_at = kept
            return settings, Kept(str(error), error.place, written_at)

    def _keep(self, directory: Path, text: str) -> None:
        content = FIRST_LINE.format(self.path).encode() + text.encode()
        copy, temporary = directory / COPY, directory / f"{COPY}.new"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, copy)
        except OSError as error:
            log.warning("no copy of the configuration is kept: %s: %s", copy, error.strerror)

    def _of_copy(self) -> tuple[Settings, float] | None:
        """Return the settings of the copy and when it was written; None if there is no copy of this file.

        The state directory is that of the flags and the environment, because the file could not be loaded.
        """
        try:
            copy = load(None, self.flags).store_file().parent / COPY
            text = read_text(copy)
            if not text.startswith(FIRST_LINE.format(self.path)):
                return None
            settings = load(self.path, self.flags, content=text)
            settings.web()
            return settings, copy.stat().st_mtime
        except (ConfigError, OSError, ValueError):
            return None
