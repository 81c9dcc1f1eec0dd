"""What the machine does beside the GPUs: CPU, memory, disk and network, as rates since the look before."""

from __future__ import annotations

import os
import time


class Host:
    """Looks at the machine; the first look knows no rates."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float, float] | None = None

    def look(self) -> dict[str, float | int | None]:
        """CPU in percent, memory in bytes, disk and network in bytes per second; None = unknown."""
        import psutil

        memory = psutil.virtual_memory()
        disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
        now = (
            time.monotonic(),
            *((disk.read_bytes, disk.write_bytes) if disk else (float("nan"), float("nan"))),
            *((network.bytes_recv, network.bytes_sent) if network else (float("nan"), float("nan"))),
        )
        before, self._before = self._before, now
        rates = [_rate(before, now, place) for place in (1, 2, 3, 4)]
        return {
            "cpu_percent": psutil.cpu_percent() if before else None,
            "cpu_count": os.cpu_count(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "disk_read_bytes_per_second": rates[0],
            "disk_write_bytes_per_second": rates[1],
            "network_received_bytes_per_second": rates[2],
            "network_sent_bytes_per_second": rates[3],
        }


def _rate(before: tuple[float, ...] | None, now: tuple[float, ...], place: int) -> float | None:
    if before is None or now[0] <= before[0]:
        return None
    rate = (now[place] - before[place]) / (now[0] - before[0])
    return round(rate) if rate >= 0 else None  # NaN, or a counter that began anew
