"""Whom a request waits for: those before it in line, a reservation, the daemon."""

from __future__ import annotations
