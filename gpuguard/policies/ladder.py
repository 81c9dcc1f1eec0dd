"""What is remembered from one sample to the next: since when a condition holds, and which step came last.

A Memory is not written to disk: after a restart every ladder begins at its first step.  Does not judge: see engine.
"""

from __future__ import annotations


class Memory:
    """Everything that evaluate() remembers; one per watchdog, and used by one thread at a time."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int | str], float] = {}

    def keep(
        self, until_clock: float, *, uid: int | None = None, claim: str | None = None, device: str | None = None
    ) -> None:
        """Leave a user, a claim or a device alone until the snapshots' clock passes *until_clock*."""
        for kind, name in (("uid", uid), ("claim", claim), ("device", device)):
            if name is not None:
                self.kept[kind, name] = until_clock
