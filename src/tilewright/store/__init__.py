"""The run database: all that is known of one program, in one DuckDB file. Needs no torch."""

from tilewright.store.places import latest_run, new_run_path, runs_dir
from tilewright.store.query import query
from tilewright.store.run import Run, RunInfo, SavedRun

__all__ = ["Run", "RunInfo", "SavedRun", "latest_run", "new_run_path", "query", "runs_dir"]
