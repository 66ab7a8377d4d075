"""The run database: one DuckDB file per run of a program. Needs no torch."""

from tilewright.store.query import query
from tilewright.store.run import Run, read_program, read_rows
from tilewright.store.run_paths import latest_run, new_run_path, runs_dir

__all__ = ["Run", "latest_run", "new_run_path", "query", "read_program", "read_rows", "runs_dir"]
