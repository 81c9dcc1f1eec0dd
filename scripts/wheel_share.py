"""Puts man pages and completions into the wheel, as share/ of the environment it is installed to: a hook of hatchling.

pipx links the pages from there; an editable installation has none.  See scripts/build-man, scripts/build-completions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Share(BuildHookInterface[Any]):
    """What pyproject.toml names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write them to a place of their own, and have them packed."""
        if version == "editable":
            return
        self._place = tempfile.TemporaryDirectory(prefix="gpuguard-share-")
        share = Path(self._place.name)
        # Without a date in the pages where none is given: the same sources give the same wheel on any day.
        environment = {"SOURCE_DATE_EPOCH": "", **os.environ, "PYTHON": sys.executable}
        for script, target in (("build-man", share / "man/man1"), ("build-completions", share)):
            subprocess.run(["bash", Path(self.root, "scripts", script), target], env=environment, check=True)
        for path in sorted(share.rglob("*")):
            if path.is_file():
                path.chmod(0o644)
                build_data["shared_data"][str(path)] = f"share/{path.relative_to(share)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if version != "editable":
            self._place.cleanup()
