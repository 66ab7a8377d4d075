"""Arguments of the kernels' functions that are of another kind than these take."""

from __future__ import annotations

import torch


def expect_tensors(function: str, **arguments: object) -> None:
    """Raise TypeError for the first argument that is no tensor; None stands for one that is not given.

    >>> expect_tensors("softmax", x=[1.0, 2.0])
    Traceback (most recent call last):
        ...
    TypeError: softmax takes a tensor for x, not list
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{function} takes a tensor for {name}, not {type(value).__name__}")


def expect_numbers(function: str, **arguments: object) -> None:
    """Raise TypeError for the first argument that is no number; None stands for one that is not given."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"{function} takes a number for {name}, not {type(value).__name__}")
