"""How busy the CPUs of the host are."""

from __future__ import annotations

import time
from pathlib import Path

SECONDS = 0.2
"""Time over which `idle_cpus` counts. A load average lags by a minute."""


def idle_cpus() -> float:
    """How many CPUs of the host were idle in a moment, by Linux's counters."""

    def counted() -> tuple[int, int, int]:
        lines = Path("/proc/stat").read_text().splitlines()
        user, nice, system, idle, waiting, *others = map(int, lines[0].split()[1:9])
        cpus = sum(line.startswith("cpu") and line[3] != " " for line in lines)
        return idle + waiting, user + nice + system + idle + waiting + sum(others), cpus

    idle, total, cpus = counted()
    time.sleep(SECONDS)
    later_idle, later_total, _ = counted()
    return cpus * (later_idle - idle) / max(later_total - total, 1)
