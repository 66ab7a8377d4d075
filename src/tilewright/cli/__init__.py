"""The command line, one file a verb: wiring only."""

from tilewright.cli.app import main

__all__ = ["main"]
