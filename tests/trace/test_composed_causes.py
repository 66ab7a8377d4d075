"""Causes that more than one event makes: models called without a backward, orders of products, checkpoints, loops."""

from __future__ import annotations

import pytest

from tests.trace.kineto import HOST, Trace
from tests.trace.test_host_time import lines, verdict
from tests.trace.test_verdict import stepped
from tilewright.trace.verdict.candidate import Candidate, Step
from tilewright.trace.verdict.sentences import advice_on

BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x1>"


def _trained(evaluated: str, *, within: str = "") -> Trace:
    """A step that trains nn.Module Net_0 in 100 µs, and calls a module for 700 µs that nothing differentiates."""
    trace = stepped(1)
    trace.frame("nn.Module: Net_0", 10, 50)
    trace.operator("aten::addmm", 15, 45)
    trace.frame(BACKWARD, 60, 100)
    trace.operator("AddmmBackward0", 65, 95)
    trace.flow("fwdbwd", 1, (15, HOST), (65, HOST))
    if within:
        trace.frame(within, 150, 850)
    trace.frame(f"nn.Module: {evaluated}", 150, 850)
    trace.operator("aten::addmm", 155, 845)
    lines(trace, (0, 2), (9, 5), (59, 6), (149, 7), (851, 8))
    return trace


def test_a_model_that_is_evaluated_in_every_step() -> None:
    slow, why, action = verdict(_trained("Net_0"))
    assert slow == "Calling the model without a backward takes 70 % of the step, 0.7 ms of 1 ms at train.py:7."
    assert "once in a step without a gradient" in why and action.startswith("Evaluate every 100th step")


@pytest.mark.parametrize(("module", "within"), [("Teacher_0", ""), ("Net_0", BACKWARD)])
def test_a_teacher_and_a_forward_that_backward_repeats_are_no_evaluation(module: str, within: str) -> None:
    assert not any("without a backward" in sentence for sentence in verdict(_trained(module, within=within)))


@pytest.mark.parametrize(
    ("first", "between", "second", "times"),
    [
        # 700³ + 700² by 2·700², and its mirror image; one without a cheaper order, and one with an operator between.
        ([[700, 700], [700, 700]], "aten::t", [[700, 700], [700, 1]], 350),
        ([[700, 700], [700, 700]], "aten::t", [[1, 700], [700, 700]], 350),
        ([[700, 700], [700, 1]], "aten::t", [[700, 700], [700, 1]], 0),
        ([[700, 700], [700, 700]], "aten::relu", [[700, 700], [700, 1]], 0),
    ],
)
def test_the_order_of_two_products(first: list[list[int]], between: str, second: list[list[int]], times: int) -> None:
    trace = stepped(1)
    trace.operator("aten::mm", 100, 800, dims=first)
    trace.operator(between, 805, 810)
    trace.operator("aten::mm", 820, 900, dims=second)
    lines(trace, (0, 2), (99, 5), (901, 6))
    said = verdict(trace)
    if times:
        assert said[0].startswith("Multiplying matrices in a costly order takes 78 %") and "train.py:5." in said[0]
        assert f"{times} × fewer" in said[1] and "multi_dot" in said[2]
    else:
        assert not any("costly order" in sentence for sentence in said)


def test_forward_that_backward_computes_again() -> None:
    trace = stepped(1)
    trace.frame("torch/utils/checkpoint.py(9): checkpoint", 100, 200)
    trace.operator("aten::addmm", 110, 190)
    trace.frame(BACKWARD, 300, 900)
    trace.frame("torch/utils/checkpoint.py(99): recompute_fn", 310, 610)
    trace.operator("aten::addmm", 320, 600)
    lines(trace, (0, 2), (99, 5), (299, 6), (901, 7))
    slow, _, action = verdict(trace)
    assert slow.startswith("Computing forward again in backward (checkpoint) takes 30 %") and "train.py:5." in slow
    assert "Checkpoint only" in action


def test_gradients_that_a_loop_fills_with_zeros() -> None:
    trace = stepped(1)
    for at in (100, 400):
        trace.frame("<built-in method zero_ of Tensor object at 0x7f>", at, at + 290)
        trace.operator("aten::zero_", at + 1, at + 289)
    lines(trace, (0, 2), (99, 5), (901, 6))
    slow, _, action = verdict(trace)
    assert slow.startswith("Filling tensors (.zero_()) takes 58 %") and "optimizer.zero_grad()" in action


@pytest.mark.parametrize(
    ("what", "names", "action"),
    [
        ("item", "aten::item aten::linalg_vector_norm", "torch.nn.utils.clip_grad_norm_"),
        ("aten::mul_", "aten::mul_", "torch._foreach_mul_ takes a list"),
        ("item", "aten::item aten::select", "Read all elements at once with .tolist()"),
    ],
)
def test_loops_over_parameters(what: str, names: str, action: str) -> None:
    cause = Candidate(0, "loop", "train.py:5", what, 5.0, 200, names, None, 100.0)
    assert action in advice_on(cause, Step(10.0)).action


def test_a_loader_that_starts_its_workers_in_each_step() -> None:
    cause = Candidate(0, "data", "train.py:5", "DataLoader", 8.0, 1, None, None, None)
    advice = advice_on(cause, Step(10.0, has_workers=True, restarts=True))
    assert "persistent_workers=True" in advice.action and advice.win_ms < 8.0
