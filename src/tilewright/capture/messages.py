"""Calls that only print or log: logging, warnings, `print`. They end a graph where Dynamo meets them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

METHODS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor"}
"""Methods of loggers. Libraries add methods with such names, as Transformers adds `warning_once`."""
METRICS = logging.getLogger("torch._dynamo.metrics_context")
"""torch 2.11 logs an error here if it cannot sort the ignored functions."""


@contextmanager
def messages_ignored() -> Iterator[None]:
    """Programs captured in this block are one graph whatever they print; what they print is lost."""
    methods = {value for name, value in vars(logging.Logger).items() if name.partition("_")[0] in METHODS}
    functions: set[Callable[..., Any]] = {getattr(logging, name) for name in METHODS if hasattr(logging, name)}
    ignored = {print, warnings.warn, warnings.warn_explicit, *functions, *methods}
    before, METRICS.disabled = METRICS.disabled, True
    try:
        with torch._dynamo.config.patch(ignore_logging_functions=ignored):
            yield
    finally:
        METRICS.disabled = before
