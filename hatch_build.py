"""Build hook of hatchling: states the commit of the build in gpumond/REVISION, which `gpumond.revision` reads.

The commit is the variable GPUMOND_REVISION, or that of the checkout. Without both, the file is not written.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import subprocess
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RevisionHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.path.exists(os.path.join(self.root, "gpumond", "REVISION")):
            return  # the checkout states it, or the source archive
        commit = os.environ.get("GPUMOND_REVISION") or self._of_checkout()
        if commit:
            self._directory = tempfile.TemporaryDirectory()
            file = pathlib.Path(self._directory.name, "REVISION")
            file.write_text(f"{commit}\n", encoding="utf-8")
            build_data["force_include"][str(file)] = "gpumond/REVISION"

    def _of_checkout(self) -> str:
        commit: str = runpy.run_path(os.path.join(self.root, "gpumond", "__init__.py"))["revision"]()
        try:
            changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=self.root, capture_output=True).returncode
        except OSError:
            return commit
        return f"{commit}-modified" if commit and changed == 1 else commit
