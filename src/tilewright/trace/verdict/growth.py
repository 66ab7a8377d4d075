"""Memory that grows from step to step, as where losses are kept with the graphs that made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.trace.verdict.candidate import at

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LEAST_BYTES = 1_000_000
_UNEVEN = 1.2
"""Steps whose inputs have other sizes each time hold more or less, and not evenly more."""
_GROWTH = """
WITH steps AS (
    SELECT file_id, ts, ts + host_dur AS ended, row_number() OVER (PARTITION BY file_id ORDER BY ts DESC) AS from_last
    FROM operator_step WHERE id IS NOT NULL
),
event AS (
    SELECT process.file_id, memory_event.* FROM memory_event JOIN process USING (upid)
    WHERE file_id IN (SELECT file_id FROM steps GROUP BY file_id HAVING count(*) > 2)
),
held AS (
    SELECT steps.file_id, on_device.device, steps.ended, event.allocated
    FROM steps JOIN (SELECT DISTINCT file_id, device FROM event) AS on_device USING (file_id)
    ASOF JOIN event ON event.file_id = steps.file_id AND event.device = on_device.device AND steps.ended >= event.ts
),
grown AS (
    SELECT file_id, device, allocated - lag(allocated) OVER (PARTITION BY file_id, device ORDER BY ended) AS more
    FROM held
),
growth AS (
    SELECT file_id, device, avg(more) AS more FROM grown WHERE more IS NOT NULL GROUP BY file_id, device
    HAVING count(*) > 1 AND min(more) >= $least AND max(more) <= $uneven * min(more)
    ORDER BY more DESC LIMIT 1
),
-- What the last step but one allocated and nobody freed.
stays AS (
    SELECT event.file_id, event.ts, event.bytes
    FROM growth JOIN event USING (file_id, device)
    JOIN steps ON steps.file_id = event.file_id AND from_last = 2 AND event.ts BETWEEN steps.ts AND steps.ended
    WHERE event.bytes > 0 AND NOT EXISTS (
        FROM event AS freed WHERE freed.file_id = event.file_id AND freed.device = event.device
                              AND freed.address = event.address AND freed.bytes < 0 AND freed.ts > event.ts
    )
),
made AS (
    SELECT host_time.source, host_time.what, sum(stays.bytes) AS bytes
    FROM stays ASOF JOIN host_time ON host_time.file_id = stays.file_id AND stays.ts >= host_time.ts
    GROUP BY host_time.source, host_time.what
)
SELECT device, more, (SELECT source FROM made ORDER BY bytes DESC, source LIMIT 1),
       (SELECT what FROM made ORDER BY bytes DESC, source LIMIT 1),
       (SELECT max(bytes) / sum(bytes)::DOUBLE FROM made)
FROM growth"""


def growth_sentences(connection: DuckDBPyConnection) -> list[str]:
    """On the device whose memory grows most, by the same in each of three steps or more; none if there is none."""
    found = connection.execute(_GROWTH, {"least": _LEAST_BYTES, "uneven": _UNEVEN}).fetchone()
    if not found:
        return []
    device, more, source, what, part = found
    made = f" Most of what stays is made by {what or 'Python'}{at(source)} ({part:.0%})." if part else ""
    return [
        f"Memory of the {device} grows by {more / 1e6:,.3g} MB in each step.",
        f"Something keeps tensors of the steps before.{made}",
        "Keep numbers (loss.item()) or some tensors without a graph (x.detach()): a result of the model holds all that "
        "was saved for backward.",
    ]
