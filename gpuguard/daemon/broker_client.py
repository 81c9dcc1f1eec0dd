"""For programs that were started before an upgrade, which look for these here when they need them."""

from gpuguard.queue.broker_client import refuse_without_daemon as refuse_without_daemon
from gpuguard.queue.broker_client import request_grant as request_grant
