"""Grades a student's operator: the first input on which it is wrong, and what that points to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.measure.truth.contract import compare
from tilewright.records.errors import UsageError, VerificationError

from .stray import STRAY, StrayAccessError

Function = Callable[[Tensor], Tensor]
_ROUNDED = "no element is far off, but the error is more than twice PyTorch's: a step rounds more than it must"
_ROUNDED_TO_16_BITS = "{where}; errors of both signs and below 1 %, as 16 bits round: compute in float32 throughout"
_WRONG = "{count} of {all} elements are wrong, the first at {at}: {said} where {truth} is right"
_ONE_ROUNDING = 1.5
"""How many times PyTorch's error a result in bf16 may have: PyTorch rounds once, and a second rounding doubles it."""


@dataclass(frozen=True)
class Trial:
    """An input, and what a wrong result on it alone points to."""

    name: str
    make: Callable[[], Tensor]
    points_to: str
    is_a_layout: bool = False
    """What it points to also explains an exception."""


@dataclass(frozen=True)
class Exercise:
    """An operator to write: PyTorch's, and other functions that are taken for it."""

    reference: Function
    impostors: Mapping[str, Function]
    trials: Sequence[Trial] = field(default_factory=tuple)


def _normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


ORDINARY = Trial("fp32[4, 256]", lambda: _normal(4, 256), "")
RAGGED = Trial(
    "fp32[3, 1003]",
    lambda: _normal(3, 1003),
    "1,003 is no multiple of any block: the mask of the last block, or the number of programs, is wrong",
)
STRIDED = Trial(
    "a transposed fp32[64, 96]",
    lambda: _normal(96, 64).t(),
    "its elements do not lie side by side: pass strides, or call contiguous() first",
    is_a_layout=True,
)
NARROW = Trial(
    "bf16[8, 512]",
    lambda: _normal(8, 512, dtype=torch.bfloat16),
    "a step was rounded to bf16 on the way: convert to float32 first and round once, at the end",
)
EMPTY = Trial(
    "fp32[0, 16]", lambda: torch.zeros(0, 16), "no rows: a grid of zero programs cannot be launched", is_a_layout=True
)
EXERCISES = {
    "gelu": Exercise(
        torch.nn.functional.gelu,
        {
            "GELU's approximation by tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            "GELU's approximation by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
            "SiLU": torch.nn.functional.silu,
            "ReLU": torch.relu,
            "Φ(x), without the factor x": lambda x: 0.5 * (1 + torch.erf(x * math.sqrt(0.5))),
            "GELU with erf(x) in place of erf(x/√2)": lambda x: 0.5 * x * (1 + torch.erf(x)),
        },
        (
            ORDINARY,
            RAGGED,
            STRIDED,
            NARROW,
            Trial(
                "NaN among the values",
                lambda: torch.tensor([[1.0, math.nan, -1.0, 2.0]]),
                "a NaN must stay one: a maximum, a clamp or a comparison drops it",
            ),
            EMPTY,
        ),
    ),
    "softmax": Exercise(
        lambda x: torch.softmax(x, -1),
        {
            "a softmax of all elements together, not of each row": lambda x: x.flatten().softmax(0).view_as(x),
            "a softmax of the columns": lambda x: x.softmax(0),
            "log-softmax": lambda x: x.log_softmax(-1),
            "the exponentials, not divided by their sum": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
            "a softmax of rows padded with zeros to 1,024 columns: what pads a block must be -inf": lambda x: (
                torch.nn.functional.pad(x, (0, 1024 - x.shape[1])).softmax(-1)[:, : x.shape[1]]
            ),
        },
        (
            ORDINARY,
            Trial(
                "values about 500",
                lambda: 500 + _normal(4, 256),
                "exp(500) overflows fp32: subtract each row's maximum first",
            ),
            RAGGED,
            Trial(
                "values about -500",
                lambda: _normal(3, 100) - 500,
                "the columns that pad a block must be -inf, not 0: else 0 is the maximum, and exp(-500) vanishes",
            ),
            STRIDED,
            NARROW,
            Trial(
                "a row with -inf",
                lambda: torch.tensor([[0.0, -math.inf, 1.0, -math.inf]]),
                "a masked column has weight 0; -inf minus -inf is NaN",
            ),
            EMPTY,
        ),
    ),
}


@dataclass(frozen=True)
class Sentences:
    """The sentences of this file in another language, by the English ones; those without a translation as they are."""

    translated: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, sentence: str, **facts: object) -> str:
        return self.translated.get(sentence, sentence).format(**facts)


ENGLISH = Sentences()


def grade(name: str, function: object, say: Sentences = ENGLISH) -> Iterator[str]:
    """A line for each trial; VerificationError, which says what is wrong, at the first that fails."""
    if not callable(function):
        raise UsageError(f"{name} is not a function")
    exercise = EXERCISES[name]
    for trial in exercise.trials:
        x = trial.make()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = x.to(device)
        if fault := _fault(name, function, exercise, trial, x, say):
            raise VerificationError(say("{trial}: {fault}", trial=say(trial.name), fault=fault))
        yield say("{trial}: right", trial=say(trial.name))
    count = len(exercise.trials)
    yield say("{name} is right on all {count} inputs; `tilewright bench` says how fast it is", name=name, count=count)


def _fault(
    name: str, function: Callable[..., object], exercise: Exercise, trial: Trial, x: Tensor, say: Sentences
) -> str:
    before = x.clone()
    try:
        result = function(x)
    except Exception as error:
        # Triton's interpreter wraps what a kernel raises.
        cause = error.__cause__ or error
        if isinstance(cause, StrayAccessError):
            return say(STRAY[cause.does], line=cause.line, count=f"{cause.count:,}")
        said = str(cause).partition("\n")[0]
        return f"{type(cause).__name__}: {said}{_hint(trial, say) if trial.is_a_layout else ''}"
    if not isinstance(result, Tensor):
        return say("{name} returned {kind}, not a tensor", name=name, kind=type(result).__name__)
    if not torch.equal(x.nan_to_num(), before.nan_to_num()):
        return say("it wrote to its input, which the caller still needs: write to torch.empty_like(x)")
    if result.shape != x.shape or result.dtype != x.dtype:
        return say(
            "the result is {result} where the input is {x}: give it the input's shape and dtype (torch.empty_like(x))",
            result=_kind(result),
            x=_kind(x),
        )
    eager, truth = exercise.reference(before), exercise.reference(before.double())
    verified = compare(result, eager, truth)
    if verified.ok and (trial is not NARROW or verified.error <= _ONE_ROUNDING * verified.eager_error):
        return ""
    for words, impostor in exercise.impostors.items():
        if trial in (ORDINARY, RAGGED) and compare(result, impostor(before), impostor(before.double())).ok:
            return say("it computes {words}", words=say(words))
    where = _where(result, truth, say)
    if not where and trial is not NARROW:
        return say(_ROUNDED)
    if where and x.dtype == torch.float32 and _is_rounding(result, truth):
        return say(_ROUNDED_TO_16_BITS, where=where)
    where = where or say("the error is more than {times} times that of PyTorch", times=_ONE_ROUNDING)
    return f"{where}{_hint(trial, say)}"


def _is_rounding(result: Tensor, truth: Tensor) -> bool:
    """Whether all elements are off by as little as bf16 rounds, up and down alike."""
    error = ((result.double() - truth) / truth)[truth != 0]
    spread = float(error.square().mean().sqrt())
    return bool(error.isfinite().all()) and float(error.abs().max()) < 0.01 and float(error.mean().abs()) < spread / 4


def _hint(trial: Trial, say: Sentences) -> str:
    return say("; {hint}", hint=say(trial.points_to)) if trial.points_to else ""


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _where(result: Tensor, truth: Tensor, say: Sentences) -> str:
    """How many elements are wrong, and the first of them; nothing if none is far off."""
    share = 1e-2 if result.dtype.itemsize == 2 else 1e-4
    off = (result.double() - truth).abs() > share * truth.abs() + 1e-6
    off |= result.isnan() != truth.isnan()
    wrong = off.nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return say(
        _WRONG,
        count=f"{len(wrong):,}",
        all=f"{truth.numel():,}",
        at=list(at),
        said=f"{result[at].item():.6g}",
        truth=f"{truth[at].item():.6g}",
    )
