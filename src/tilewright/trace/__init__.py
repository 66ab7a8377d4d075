"""Loads traces into a run and analyses them. Needs no torch."""

from tilewright.trace.analysis import analyse
from tilewright.trace.load import Loaded, load_traces, trace_run

__all__ = ["Loaded", "analyse", "load_traces", "trace_run"]
