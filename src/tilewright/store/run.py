"""A run: one DuckDB file, written atomically."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, cast

from tilewright.records.errors import StoreError
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import Decision, Fallback, MemoryPoint, Operator, Program, Region
from tilewright.store.query import first_line, reading
from tilewright.store.rows import Row, create_tables, insert, select, storable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_PARTIAL = "run.duckdb"
_PREFIX, _SUFFIX = ".run-", ".partial"
_ABANDONED_S = 86_400.0
"""A folder of an unfinished run that is older than a day is a killed process's: no run is written for so long."""


@dataclass(frozen=True)
class RunInfo:
    """The row of table `run`: the command, its target, and the machine."""

    created: datetime
    command: str
    target: str
    case: str
    dims: Mapping[str, int]
    machine: Mapping[str, str]
    tilewright: str


class Run:
    """A run being written. As a context manager it is committed at the end, or discarded after an exception:

        with Run.create(new_run_path("block"), command=..., target=..., case="block") as run:
            run.add_program(program)

    The database is written in a temporary folder beside `path`, readable by its owner only, and then
    renamed to `path`. A killed process leaves that folder; a run of a later day removes it.
    `SavedRun` reads a finished run.
    """

    def __init__(self, path: Path, folder: TemporaryDirectory[str], connection: DuckDBPyConnection) -> None:
        self.path = path
        self._folder = folder
        self._connection = connection

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        command: str,
        target: str,
        case: str,
        dims: Mapping[str, int] | None = None,
        machine: Mapping[str, str] | None = None,
    ) -> Run:
        """Begin the run `path`; its folder is created if missing, readable by its owner only.

        Raises:
            StoreError: the folder cannot be created or written.
        """
        import duckdb

        from tilewright import __version__

        path = path.absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sweep(path.parent)
            folder = TemporaryDirectory(prefix=_PREFIX, suffix=_SUFFIX, dir=path.parent)
            connection = duckdb.connect(f"{folder.name}/{_PARTIAL}")
        except OSError as error:
            raise StoreError(
                f"cannot write a run in {path.parent}: {error.strerror}; "
                "set TILEWRIGHT_HOME to a folder that you can write"
            ) from error
        run = cls(path, folder, connection)
        with run._discard_on_error():
            create_tables(run._connection)
            run._connection.execute(files("tilewright.store").joinpath("schema.sql").read_text("utf-8"))
            run._connection.execute(
                "INSERT INTO run VALUES (?, ?, ?, ?, "
                "map(CAST(? AS VARCHAR[]), CAST(? AS BIGINT[])), "
                "map(CAST(? AS VARCHAR[]), CAST(? AS VARCHAR[])), ?)",
                [
                    datetime.now(UTC).replace(tzinfo=None),
                    *map(storable, (command, target, case)),
                    list(map(storable, dims or {})),
                    list((dims or {}).values()),
                    list(map(storable, machine or {})),
                    list(map(storable, (machine or {}).values())),
                    __version__,
                ],
            )
        return run

    @property
    def connection(self) -> DuckDBPyConnection:
        """For rooms above that add tables; valid until the run is committed or discarded."""
        return self._connection

    def add_program(self, program: Program) -> None:
        """Append the program's operators, regions, decisions, memory and fallbacks."""
        self._add(Operator, program.operators)
        self._add(Region, program.regions)
        self._add(Decision, program.decisions)
        self._add(MemoryPoint, program.memory)
        self._add(Fallback, program.fallbacks)

    def add_measurements(self, measurements: Sequence[Measurement]) -> None:
        self._add(Measurement, measurements)

    def add_ceilings(self, ceilings: Sequence[Ceiling]) -> None:
        self._add(Ceiling, ceilings)

    def add_verified(self, verified: Sequence[Verified]) -> None:
        self._add(Verified, verified)

    def commit(self) -> Path:
        """Finish the file, rename it and return its path. Nothing can be added afterwards."""
        partial = Path(self._folder.name) / _PARTIAL
        with self._discard_on_error():
            self._connection.execute("CHECKPOINT")
            self._connection.close()
            partial.chmod(0o600)
            _sync(partial)
            os.replace(partial, self.path)
            _sync(self.path.parent)
        self._folder.cleanup()
        return self.path

    def discard(self) -> None:
        """Remove the unfinished file."""
        self._connection.close()
        self._folder.cleanup()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def _add(self, kind: type[Row], rows: Sequence[Row]) -> None:
        with self._store_errors():
            insert(self._connection, kind, rows)

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except (duckdb.Error, OSError) as error:
            raise StoreError(f"cannot write the run {self.path}: {first_line(error)}") from error

    @contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        """Discard the run on any exception, Ctrl-C included."""
        try:
            with self._store_errors():
                yield
        except BaseException:
            self.discard()
            raise


class SavedRun:
    """A finished run, read back as the dataclasses that were written.

    Raises:
        StoreError: the file is missing, damaged, or not a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info = self._info()

    def program(self) -> Program:
        return Program(
            operators=self._rows(Operator),
            regions=self._rows(Region),
            decisions=self._rows(Decision),
            memory=self._rows(MemoryPoint),
            fallbacks=self._rows(Fallback),
        )

    def measurements(self) -> list[Measurement]:
        return self._rows(Measurement)

    def ceilings(self) -> list[Ceiling]:
        return self._rows(Ceiling)

    def verified(self) -> list[Verified]:
        return self._rows(Verified)

    def _rows(self, kind: type[Row]) -> list[Row]:
        with reading(self.path) as connection:
            return select(connection, kind)

    def _info(self) -> RunInfo:
        with reading(self.path) as connection:
            row = connection.execute(
                'SELECT epoch_us(created), command, target, "case", dims, machine, tilewright FROM run'
            ).fetchone()
        if row is None:
            raise StoreError(f"run {self.path} is damaged: it has no row in table run")
        # Earlier runs have a timestamp with its time zone, which DuckDB returns only with pytz.
        created = datetime.fromtimestamp(row[0] / 1e6, UTC)
        command, target, case, dims, machine, version = row[1:]
        return RunInfo(
            created,
            command,
            target,
            case,
            cast("dict[str, int]", dims),
            cast("dict[str, str]", machine),
            version,
        )


def _sweep(parent: Path) -> None:
    """Remove the folders that killed processes left in `parent`."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        # It may belong to another user, or another process may be removing it.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder)


def _sync(path: Path) -> None:
    """Flush `path` to the disk: a file before it is renamed, its folder afterwards."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
