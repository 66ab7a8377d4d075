"""A profile in the terminal: what was sampled is said, and nothing of a trace moves the cursor."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.printing import printed
from tests.trace.kineto import Trace
from tilewright.measure.recording.recorder import Recording, RecordingPlan
from tilewright.report.profile import loss_words, recorded_words, show_profile
from tilewright.store.query import reading
from tilewright.trace import trace_run
from tilewright.trace.operators.operator_table import read_operator_table

PLAN = RecordingPlan(active=200, events=200_000)
RECORDING = Recording(
    PLAN, events=131_000, steps_seen=9, steps_kept=1, step_events=130_000, seconds_kept=0.12, seconds=1.5
)


WHOLE = RecordingPlan(whole=True)
CUT = replace(RECORDING, cut=True, steps_kept=0)


@pytest.mark.parametrize(
    ("recording", "figures"),
    [
        (RECORDING, ("1 of 200 steps: 131,000 events", "about 130,000", "limit is 200,000 (--events raises it)")),
        (
            replace(RECORDING, plan=RecordingPlan(active=1), bare_us=1000.0, recorded_us=1100.0),
            ("1 step: 131,000 events", "1.00 ms bare and 1.10 ms while recorded (+10 %)"),
        ),
        (replace(RECORDING, step_events=900, steps_kept=7), ("7 steps of 200, then the program ended",)),
        (replace(CUT, step_events=5_000_000), ("first 0.12 s of one step of 200", "about 5,000,000")),
        (replace(CUT, step_events=0, plan=WHOLE), ("first 0.12 of 1.5 s", "limit of 200,000 stopped it")),
        (replace(RECORDING, step_events=0, steps_kept=0, plan=WHOLE), ("all of it: 0.12 s, 131,000 events",)),
    ],
)
def test_what_was_sampled_is_said(recording: Recording, figures: tuple[str, ...]) -> None:
    (said,) = recorded_words([recording])
    assert all(figure in said for figure in figures), said


def test_each_process_says_its_own() -> None:
    lines = recorded_words([RECORDING, RECORDING])
    assert [line.split(":")[0] for line in lines] == ["process 0", "process 1"]


@pytest.mark.usefixtures("home")
def test_shows_shares_losses_and_what_happened_once(tmp_path: Path) -> None:
    trace = Trace()
    for number, begin in ((1, 0), (2, 1000)):
        trace.step(number, begin, begin + 500)
        trace.frame("model.py(7): forward", begin, begin + 100)
        trace.operator("aten::mm\x1b[2J", begin + 10, begin + 90)
        trace.launch(begin + 20, begin + 120, begin + 150)
    trace.call("cudaDeviceSynchronize", 300, 400)
    trace.call("cudaLaunchKernel", 450, 451)
    run, _ = trace_run([trace.write(tmp_path)], command="test", tell=lambda _: None)
    with reading(run) as connection:
        table = read_operator_table(connection)
    text = printed(show_profile(run, table, [RECORDING]))
    (line,) = [line for line in text.splitlines() if line.startswith("aten::mm")]
    assert re.split(r"\s{2,}", line.strip())[2:] == [
        *("2", "158 µs", "15.8 %", "160 µs", "80.0 µs", "60.0 µs", "100.0 %", "60.0 µs", "30.0 µs", "model.py:7"),
    ]
    assert loss_words(table) == ["lost: 1 launches whose work on the device is missing, of 3"]
    assert loss_words(table)[0] in text and "\x1b[2J" not in text
    assert text.index("Once, not in every step") < text.index("cudaDeviceSynchronize")
