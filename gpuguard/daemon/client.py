"""For programs that were started before an upgrade, which look for these here when they need them."""

from gpuguard.claims.daemon_client import exchange as exchange
from gpuguard.claims.daemon_client import own_events as own_events
