"""What root does to lock files whose directory is the daemon's already is done to these files and to no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from brokered import KEEPER

from gpuguard.claims.directory import lock_directory, open_lock
from gpuguard.cli import setup_broker


@pytest.mark.root
def test_a_lock_file_that_is_replaced_by_a_link_has_root_write_into_nothing_else(tmp_path, monkeypatch):
    """By the user of the daemon, say, who may write there from the first setup on."""
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    directory, victim, real = lock_directory(str(tmp_path / "claims")), tmp_path / "victim", os.fchmod
    os.close(open_lock(directory, "GPU-a"))
    os.close(open_lock(directory, "gate"))
    victim.write_text("root's")
    path = Path(directory.lock_path("GPU-a"))

    def chmod_and_replace(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            path.unlink()
            path.symlink_to(victim)

    monkeypatch.setattr(os, "fchmod", chmod_and_replace)
    setup_broker.change(directory.path, KEEPER.pw_name, brokered=True)

    assert victim.read_text() == "root's"
