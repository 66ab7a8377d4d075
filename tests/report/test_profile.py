"""A profile in the terminal: what was sampled is said, and nothing of a trace moves the cursor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.report.printing import printed
from tilewright.measure.recording.recorder import Recording, RecordingPlan
from tilewright.report.profile import loss_words, recorded_words, show_profile
from tilewright.trace.operators.operator_table import OperatorTable, OperatorTime

PLAN = RecordingPlan(active=200, events=200_000)
RECORDING = Recording(
    PLAN, events=131_000, steps_seen=9, steps_kept=1, step_events=130_000, seconds_kept=0.12, seconds=1.5
)


@pytest.mark.parametrize(
    ("recording", "said"),
    [
        (
            RECORDING,
            "recorded 1 of 200 steps: 131,000 events; a step makes about 130,000, and the limit is 200,000 "
            "(--events raises it)",
        ),
        (
            replace(RECORDING, plan=RecordingPlan(active=1), bare_us=1000.0, recorded_us=1100.0),
            "recorded 1 step: 131,000 events; a step takes 1.00 ms bare and 1.10 ms while recorded (+10 %)",
        ),
        (
            replace(RECORDING, step_events=900, steps_kept=7),
            "recorded 7 steps of 200, then the program ended: 131,000 events",
        ),
        (
            replace(RECORDING, cut=True, steps_kept=0, step_events=5_000_000),
            "recorded the first 0.12 s of one step of 200 asked for: 131,000 events; a step makes about 5,000,000, "
            "and the limit is 200,000 (--events raises it)",
        ),
        (
            replace(RECORDING, cut=True, steps_kept=0, step_events=0, plan=RecordingPlan(whole=True)),
            "recorded the first 0.12 of 1.5 s: 131,000 events, where the limit of 200,000 stopped it "
            "(--events raises it)",
        ),
        (
            replace(RECORDING, step_events=0, steps_kept=0, plan=RecordingPlan(whole=True)),
            "recorded all of it: 0.12 s, 131,000 events",
        ),
    ],
)
def test_what_was_sampled_is_said(recording: Recording, said: str) -> None:
    assert recorded_words([recording]) == [said]


def test_each_process_says_its_own() -> None:
    lines = recorded_words([RECORDING, RECORDING])
    assert [line.split(":")[0] for line in lines] == ["process 0", "process 1"]


def test_shows_shares_losses_and_what_happened_once() -> None:
    rows = [
        OperatorTime("aten::mm\x1b[2J", "operator", 4, 400, 900, 600, 600, 4, 2, "model.py:7", False),
        OperatorTime("ProfilerStep*", "range", 2, 500, 1000, 0, 600, 0, 2, None, False),
        OperatorTime("cudaDeviceSynchronize", "call", 1, 100, 100, 0, 0, 0, 1, None, True),
    ]
    table = OperatorTable(rows, [], 1000, 600, [("events that never ended", 3, 40)], 2, 1000, 2, 1000, 600)
    text = printed(show_profile(table, [RECORDING]))
    assert loss_words(table) == ["lost: 3 events that never ended, of 40"] and "lost: 3 events" in text
    assert "\x1b[2J" not in text and "40.0 %" in text and "100.0 %" in text and "model.py:7" in text
    assert text.index("once, not in every step") < text.index("cudaDeviceSynchronize")
