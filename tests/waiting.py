"""Waiting for what must happen, however busy the machine is."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

HANG_S = 600.0
"""A longer wait is a hang. No test has a shorter limit: a slow machine is no fault."""


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds; TimeoutError after `HANG_S`."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come about in {HANG_S:.0f} s")
        time.sleep(0.001)


def in_threads(jobs: list[Callable[[], object]]) -> None:
    """Runs all at once, in threads; what one raises is raised."""
    with ThreadPoolExecutor(len(jobs)) as executor:
        for future in [executor.submit(job) for job in jobs]:
            future.result(timeout=HANG_S)
