"""Sentences on a snapshot of PyTorch's CUDA allocator: its peak and who holds it, or why an allocation failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.trace.memory import memory
from tilewright.trace.verdict.candidate import at, share

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_FRAGMENTED = 0.2
"""Of what is reserved: less in no use is what an allocator needs."""
_JOINED = "PYTORCH_ALLOC_CONF=expandable_segments:True makes one growing segment of them, in which free pieces join"
_STATE = """
SELECT device, sum(memory_segment.bytes), coalesce(any_value(free.bytes), 0), coalesce(any_value(free.pieces), 0),
       coalesce(any_value(free.largest), 0)
FROM memory_segment LEFT JOIN (
    SELECT memory_segment.file_id, device, sum(memory_block.bytes) AS bytes, count(*) AS pieces,
           max(memory_block.bytes) AS largest
    FROM memory_block JOIN memory_segment ON memory_segment.id = segment_id WHERE state = 'inactive' GROUP BY ALL
) AS free USING (file_id, device)
GROUP BY memory_segment.file_id, device ORDER BY sum(memory_segment.bytes) DESC LIMIT 1"""


def snapshot_sentences(connection: DuckDBPyConnection) -> list[str]:
    """On the last allocation that failed, else on the device with the most memory; none without a snapshot."""
    if not connection.execute("FROM duckdb_tables() WHERE table_name = 'memory_segment'").fetchall():
        return []
    state = connection.execute(_STATE).fetchone()
    failed = connection.execute(
        "SELECT device, bytes, device_free, allocated, reserved, source FROM out_of_memory ORDER BY ts DESC LIMIT 1"
    ).fetchone()
    if failed:
        return _failed(connection, *failed)
    if state is None:
        return []
    device, reserved, free, pieces, largest = state
    holder, peak = _holder(connection, device)
    first = f"GPU {device} holds {_size(peak)} at the peak; " if peak else f"GPU {device}: "
    said = f"{first}{_size(reserved)} are reserved in the end, and {share(free, reserved)} of that is in no use."
    pieces_said = f"What is in no use is in {pieces:,} pieces, of which the largest has {_size(largest)}."
    if free >= _FRAGMENTED * reserved and largest < free / 2:
        return [said, f"{holder} {pieces_said}".strip(), f"{_JOINED}."]
    return [said, *filter(None, [holder])]


def _failed(
    connection: DuckDBPyConnection, device: int, asked: int, left: int | None, allocated: int, reserved: int,
    source: str | None,
) -> list[str]:  # fmt: skip
    unused = reserved - allocated
    rest = "" if left is None else f", and the driver had {_size(left)} left"
    first = f"GPU {device} is out of memory: {_size(asked)} could not be allocated{at(source)}."
    why = f"{_size(reserved)} were reserved, of which {_size(unused)} in no use{rest}."
    if unused >= asked:
        return [first, f"{why} No piece of it is large enough: the memory is fragmented.", f"{_JOINED}."]
    holder, _ = _holder(connection, device)
    missing = asked - max(left or 0, 0)
    action = f"{_size(missing)} less are needed: a smaller batch, checkpoints (torch.utils.checkpoint), or bf16"
    return [first, f"{why} {holder}".strip(), f"{action}."]


def _holder(connection: DuckDBPyConnection, device: int) -> tuple[str, int]:
    """A sentence on who holds most of a device's peak, and the peak in bytes; nothing where no history is known."""
    found = next((each for each in memory(connection) if each.device == f"GPU {device}"), None)
    if found is None or not found.peak_bytes or not found.holders:
        return "", 0
    most = found.holders[0]
    part = f"{_size(most.bytes)}, {share(most.bytes, found.peak_bytes)} of the peak"
    return f"Most is held by {most.operator} ({part}, {most.phase}).", found.peak_bytes


def _size(nbytes: int) -> str:
    """
    >>> _size(3_500_000_000), _size(12_000_000), _size(512)
    ('3.5 GB', '12 MB', '0.512 kB')
    """
    value, unit = (nbytes / 1e9, "GB") if nbytes >= 1e9 else (nbytes / 1e6, "MB")
    if nbytes < 1e6:
        value, unit = nbytes / 1e3, "kB"
    return f"{value:.3g} {unit}"
