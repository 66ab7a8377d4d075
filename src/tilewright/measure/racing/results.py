"""Bench results: the environment of a measurement, its row, and the JSON-lines file of rows."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tilewright.measure.timing.benchmark import Timing
from tilewright.records.atomic_file import ensure_writable, write_document
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Direction, Measurement
from tilewright.records.sources import PROGRAMS, digest


@dataclass(frozen=True)
class Environment:
    """Device, software and date of a measurement: the last columns of a bench row."""

    device: str
    threads: int
    torch: str
    triton: str
    commit: str
    date: str
    """UTC, ISO 8601, to the second."""


def environment(device_name: str) -> Environment:
    """This process, on the device of that name (`NVIDIA H200`, `AMD EPYC 9654`, ...)."""
    import torch

    return Environment(
        device=device_name,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _commit() -> str:
    """The commit of tilewright's source, or "" if it is not a git checkout."""
    package = Path(__file__).parents[2]
    # HEAD:./__init__.py fails if the package is installed inside some other repository.
    command = ["git", "-C", str(package), "rev-parse", "HEAD", "HEAD:./__init__.py"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split()[0]


def measurement(
    timing: Timing, where: Environment, *, suite: str, case: str, impl: str, direction: Direction,
    nbytes: int | None = None, flops: int | None = None, predicted_us: float | None = None,
    peak_bytes: int | None = None, gpu_us: float | None = None, launches: int | None = None,
    first_call_us: float | None = None, of_ceiling: float | None = None, error: float | None = None,
    eager_error: float | None = None, note: str = "", made_from: Sequence[str] = (), package: str = "",
) -> Measurement:  # fmt: skip
    """A row of a bench result file; GB/s and TFLOP/s follow from `nbytes`, `flops` and the median.

    `made_from`: the sources of tilewright that were measured; `package`: the distribution that was, if it is a peer's.
    """
    return Measurement(
        suite=suite,
        case=case,
        impl=impl,
        direction=direction,
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        repeats=timing.repeats,
        predicted_us=predicted_us,
        host_us=timing.host_us,
        gpu_us=gpu_us,
        launches=launches,
        first_call_us=first_call_us,
        peak_bytes=peak_bytes,
        bytes=nbytes,
        flops=flops,
        GBps=None if nbytes is None else nbytes / timing.median_us / 1e3,
        TFLOPs=None if flops is None else flops / timing.median_us / 1e6,
        of_ceiling=of_ceiling,
        error=error,
        eager_error=eager_error,
        **asdict(where),
        sources=digest(*made_from) if made_from else "",
        package=f"{package} {_version(package)}" if package else "",
        note=note,
    )


def sources_of_programs(impl: str) -> Sequence[str]:
    """The sources that a row of a compiled program measures; none where another compiler made it."""
    return PROGRAMS if impl.startswith("tilewright") else ()


def write_results(path: Path, rows: Iterable[Measurement]) -> None:
    """Replace the file at `path` atomically by `rows` as sorted JSON lines.

    ValueError for a figure that is NaN or infinite, which JSON does not have.
    """
    lines = [as_line(row) + "\n" for row in sorted(rows, key=_subject)]
    write_document(path, "".join(lines), "results")


def as_line(row: Measurement) -> str:
    """A row as JSON, without empty texts and without figures that only whole models have where those are missing.

    ValueError for NaN and infinities.
    """
    fields = asdict(row)
    for name in ("note", "sources", "package", "gpu_us", "launches", "first_call_us"):
        if fields[name] in ("", None):
            del fields[name]
    return json.dumps(fields, allow_nan=False, ensure_ascii=False)


def check_results(path: Path) -> None:
    """Raise what `append_results` would raise for this file; call it before measuring."""
    ensure_writable(path, "results")
    if path.exists():
        read_results(path)


def append_results(
    path: Path, rows: Iterable[Measurement], *, gone: Callable[[Measurement], bool] = lambda _: False
) -> None:
    """Add `rows` to the file; a row replaces an older one of the same measurement.

    Old rows for which `gone` is true are removed: implementations that were now refused.
    """
    known = read_results(path) if path.exists() else []
    latest = {_subject(row): row for row in [*(row for row in known if not gone(row)), *rows]}
    write_results(path, latest.values())


def _subject(row: Measurement) -> tuple[str, str, str, str, str, int]:
    """The key of a measurement: rows with the same key replace each other, and files are sorted by it."""
    return row.suite, row.case, row.direction, row.impl, row.device, row.threads


def read_results(path: Path) -> list[Measurement]:
    """The rows of a result file; UsageError names a malformed line."""
    rows: list[Measurement] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read bench results in {path}: {why}") from error
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(Measurement(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}:{number} is not a bench result: {error}") from error
    return rows
