"""Records steps of a case: forward, backward and, if requested, an optimizer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.case_names import error_location
from tilewright.measure.recording.plan import RecordingPlan
from tilewright.measure.recording.recorder import Recorder
from tilewright.profiling.regions import marked_regions
from tilewright.profiling.saved import SavedProfile, save
from tilewright.records.case import Case
from tilewright.records.errors import CaptureError, InputError, UsageError

if TYPE_CHECKING:
    import torch

    from tilewright.verbs import Subject

IMPLS = ("eager", "inductor", "tilewright")
OPTIMIZERS = ("adamw", "adam", "sgd")
_MOST_PRICED_EVENTS = 20_000
"""Cases with more events per step are not priced: capturing 35,000 operators takes longer than a thousand runs."""


def profile_case(
    case: Case, plan: RecordingPlan, *, impl: str = "eager", optimizer: str = "", device: str = "cpu",
    command: str = "tilewright.profile", tell: Callable[[str], None] = lambda _: None,
) -> SavedProfile | None:  # fmt: skip
    """Run steps of `case` by a plan, and save the recording as a run with the case's cost.

    Returns None with `plan.nvtx`, where Nsight Systems records and this only makes ranges. `impl` is one of `IMPLS`,
    `optimizer` one of `OPTIMIZERS` or "" for steps without one.
    Raises UsageError for other names, InputError, TraceError or StoreError.
    """
    from tilewright.verbs import Subject

    if impl not in IMPLS:
        raise UsageError(f"no implementation {impl!r}; known: {', '.join(IMPLS)}")
    if optimizer and (optimizer not in OPTIMIZERS or not case.training):
        raise UsageError(
            f"no optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}"
            if case.training
            else "--optimizer is for training: leave out either it or --inference"
        )
    with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as folder:
        recorder = Recorder(plan, Path(folder))
        tell("compiling" if impl != "eager" else "warming up")
        subject = Subject(case, device)
        try:
            subject.call(impl)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{case.name} fails on its inputs {error_location(error)}") from error
        step = step_of(subject, impl, optimizer, recorder)
        tell("recording")
        with marked_regions(recorder):
            recorder.start()
            try:
                while not recorder.done and not (plan.whole and recorder.recording.steps_seen >= plan.active):
                    step()
                    recorder.step()
            finally:
                recording = recorder.stop()
        if plan.nvtx:
            return None
        priced = recording.step_events <= _MOST_PRICED_EVENTS
        program, ceilings = _costs(case, device, tell) if priced else (None, ())
        return save(
            [recording],
            name=case.name,
            command=command,
            target=case.name,
            dims=case.named_sizes(),
            program=program,
            ceilings=ceilings,
            tell=tell,
        )


def step_of(subject: Subject, impl: str, optimizer: str, recorder: Recorder) -> Callable[[], None]:
    """One step of a case as a function; the forward of a plain function gets `recorder`'s range."""
    import torch

    from tilewright.verbs import tensors_in

    function = subject.functions[impl]
    is_module = isinstance(function, torch.nn.Module)

    def forward() -> Any:
        # Hooks make the range of a module.
        if is_module:
            return function(*subject.inputs)
        with recorder.ranges.phase("forward"):
            return function(*subject.inputs)

    if not subject.case.training:

        def infer() -> None:
            with torch.no_grad():
                forward()

        return infer
    updates = _optimizer(subject, optimizer)

    def train() -> None:
        results = [tensor for tensor in tensors_in(forward()) if tensor.requires_grad]
        if results:
            torch.autograd.backward(results, subject.gradients)
        if updates:
            updates.step()
        for tensor in (*subject.inputs, *_parameters(subject)):
            tensor.grad = None

    return train


def _optimizer(subject: Subject, name: str) -> torch.optim.Optimizer | None:
    import torch

    parameters = [parameter for parameter in _parameters(subject) if parameter.requires_grad]
    if not name:
        return None
    if not parameters:
        raise UsageError(f"{subject.case.name} has no parameters for an optimizer to train")
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    made: torch.optim.Optimizer = kinds[name](parameters, lr=1e-4)
    return made


def _parameters(subject: Subject) -> list[torch.Tensor]:
    import torch

    return list(subject.model.parameters()) if isinstance(subject.model, torch.nn.Module) else []


def _costs(case: Case, device: str, tell: Callable[[str], None]) -> tuple[Any, Any]:
    """The case's program with costs (None if it is not one graph), and the ceilings of this machine."""
    from tilewright.compile.price import price_program
    from tilewright.hardware.profiles import local_profile
    from tilewright.hardware.target import Target
    from tilewright.verbs import ceilings_of

    tell("pricing every operator")
    profile = local_profile(device=device)
    try:
        program = price_program(case, Target(profile))
    except CaptureError:
        program = None
    return program, ceilings_of(profile)
