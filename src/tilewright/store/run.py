"""A run: one DuckDB file, written atomically."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING

from tilewright.records.errors import StoreError, disk_is_full, first_line, with_advice
from tilewright.records.program import Decision, Fallback, MemoryPoint, Operator, Program, Region
from tilewright.store.query import reading
from tilewright.store.rows import Row, create_tables, insert, select, storable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_PARTIAL = "run.duckdb"
_PREFIX, _SUFFIX = ".run-", ".partial"
_ABANDONED_S = 86_400.0
"""A folder of an unfinished run that is older than a day is a killed process's: no run is written for so long."""


class Run:
    """A run being written. As a context manager it is committed at the end, or discarded after an exception:

        with Run.create(new_run_path("block"), command=..., target=..., case="block") as run:
            run.add_program(program)

    The database is written in a temporary folder beside `path`, readable by its owner only, and then
    renamed to `path`. A killed process leaves that folder; a run of a later day removes it.
    `read_rows` and `query` read a finished run.
    """

    def __init__(self, path: Path, folder: TemporaryDirectory[str], connection: DuckDBPyConnection) -> None:
        self.path = path
        self._folder = folder
        self._connection = connection

    @classmethod
    def create(
        cls, path: Path, *, command: str, target: str, case: str, dims: Mapping[str, int] | None = None,
        machine: Mapping[str, str] | None = None,
    ) -> Run:  # fmt: skip
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
        except (OSError, duckdb.Error) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise StoreError(
                f"cannot write a run in {path.parent}: {why}; set TILEWRIGHT_HOME to a folder that you can write"
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
        """For packages above that add tables; valid until the run is committed or discarded."""
        return self._connection

    def add_program(self, program: Program) -> None:
        """Append the program's operators, regions, decisions, memory and fallbacks."""
        self.add(program.operators)
        self.add(program.regions)
        self.add(program.decisions)
        self.add(program.memory)
        self.add(program.fallbacks)

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows of one kind: measurements, ceilings, verified tensors, or a part of a program."""
        with self._store_errors():
            insert(self._connection, rows)

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
        if error is not None and disk_is_full(error):
            raise StoreError(with_advice(f"cannot write the run {self.path}", error)) from error

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except (duckdb.Error, OSError) as error:
            raise StoreError(with_advice(f"cannot write the run {self.path}", error)) from error

    @contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        """Discard the run on any exception, Ctrl-C included."""
        try:
            with self._store_errors():
                yield
        except BaseException:
            self.discard()
            raise


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a kind in a finished run, as they were added; StoreError if it is missing, damaged, or no run."""
    with reading(path) as connection:
        return select(connection, kind)


def read_program(path: Path) -> Program:
    """The program in a finished run; StoreError as `read_rows`."""
    with reading(path) as connection:
        return Program(
            operators=select(connection, Operator),
            regions=select(connection, Region),
            decisions=select(connection, Decision),
            memory=select(connection, MemoryPoint),
            fallbacks=select(connection, Fallback),
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
