"""Checks of the types of arguments, for the public functions of the kernels."""

from __future__ import annotations

from collections.abc import Collection

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


def expect_whole_numbers(function: str, **arguments: object) -> None:
    """Raise TypeError for the first argument that is no int; None stands for one that is not given.

    >>> expect_whole_numbers("softmax", dim=1.5)
    Traceback (most recent call last):
        ...
    TypeError: softmax takes a whole number for dim, not float
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{function} takes a whole number for {name}, not {type(value).__name__}")


def expect_loss_options(
    function: str, reductions: Collection[str], ignore_index: int, label_smoothing: float, z_loss: float, reduction: str
) -> None:
    """Raise TypeError or ValueError for an option of a cross entropy that has the wrong type or value."""
    given = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    for name, value in given.items():
        if value is None:
            raise TypeError(f"{function} takes a number for {name}, not None")
    expect_whole_numbers(function, ignore_index=ignore_index)
    expect_numbers(function, label_smoothing=label_smoothing, z_loss=z_loss)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{function} takes label_smoothing in [0, 1], not {label_smoothing}")
    if not z_loss >= 0.0:
        raise ValueError(f"{function} takes z_loss of at least 0, not {z_loss}")
    if reduction not in reductions:
        raise ValueError(f"{function} takes one of {', '.join(reductions)} for reduction, not {reduction!r}")
