"""Whether a command will ask the driver: then its sampler starts before all else is loaded.

The driver's library loads on another core while this process still imports argparse; and the sampler is as small as it
can be: what `gpuguard top` loads from here on is 4 MiB.
"""

from __future__ import annotations

import os

_AT_ONCE = ("run", "select")
_UNLESS_A_DAEMON_TELLS = ("who", "top", "metrics")
_ELSEWHERE = ("--hosts", "--help", "-h")


def is_due(words: list[str]) -> bool:
    """Whether the command line *words* will have this machine's driver asked."""
    nvml = (os.environ.get("GPUGUARD_BACKEND") or "nvml") == "nvml" and not any(
        word.startswith("--backend") for word in words
    )
    if not nvml or not words or words[0] in _AT_ONCE:
        return nvml and bool(words)
    if words[0] not in _UNLESS_A_DAEMON_TELLS or any(word.startswith(_ELSEWHERE) for word in words):
        return False
    return "--fresh" in words or not _a_daemon_tells(words)


def _a_daemon_tells(words: list[str]) -> bool:
    from gpuguard.claims.lockfiles import lock_directory
    from gpuguard.errors import GpuguardError
    from gpuguard.state import was_written_lately

    named = [
        word.partition("=")[2] or after
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if word.startswith("--dir")
    ]
    where = named[-1] if named else os.environ.get("GPUGUARD_DIR") or None
    try:
        return was_written_lately(lock_directory(where, make=False))
    except GpuguardError:
        return True  # it will be said; and who cannot find the claims need not be quick
