"""What the verdict says of steps made by hand: a cause that repeats, with its line, and not what chance delayed."""

from __future__ import annotations

import threading
from importlib.resources import files

import pytest

from tests.cli.commands import documented_keys
from tests.trace.kineto import AUTOGRAD, Trace, analysed
from tests.trace.loading import rows
from tests.trace.test_host_time import lines, verdict
from tilewright.measure.recording.processor_time import ProcessorClock
from tilewright.trace.verdict.candidate import Candidate, Step
from tilewright.trace.verdict.sentences import advice_on

RECORDED = """
    INSERT INTO recording BY NAME
    SELECT 0 AS file_id, 3 AS steps_asked, 3 AS steps_kept, 9 AS steps_seen, 9 AS step_events, 9 AS events,
           9 AS most_events, false AS cut, 1.0 AS seconds_kept, 1.0 AS seconds, 1e3 AS bare_us, [] AS timed_us,
           300.0 AS thread_us, 950.0 AS other_us, 'Thread-1 at load.py:7' AS other, 0 AS workers, true AS shapes,
           true AS stacks, true AS memory"""


def stepped(count: int = 3) -> Trace:
    """So many steps of a millisecond, in a loop of line 2."""
    trace = Trace()
    for number in range(count):
        trace.step(number, 1000 * number, 1000 * (number + 1))
    trace.frame("train.py(1): main", 0, 1000 * count)
    return trace


@pytest.mark.parametrize("times", [1, 3])
def test_what_only_one_step_has_is_chance(times: int) -> None:
    """A thread that loses its processor to another program is in some line then."""
    trace = stepped()
    for step in range(3):
        until = 1000 * step + (900 if step < times else 105)
        trace.operator("aten::mm", 1000 * step, 1000 * step + 100)
        trace.frame("metrics.py(9): update", 1000 * step + 100, until)
        trace.operator("aten::mm", until, 1000 * step + 1000)
    said = verdict(trace)
    if times == 3:
        assert said[0].startswith("Python takes ") and "metrics.py:9" in said[0]
    else:
        assert len(said) == 1 and said[0].startswith("Nothing stands out")


def test_an_operator_that_one_call_of_equal_ones_delayed_wins_what_its_median_does() -> None:
    trace = stepped()
    for step, took in enumerate((100, 100, 900)):
        trace.operator("aten::add", 1000 * step, 1000 * step + took, dims=[[64, 64], [64, 64]])
    found = trace.rows("SELECT device_ns, typical_ns FROM operator_distance WHERE operator = 'aten::add'")
    assert found == [(1_100_000, 300_000)]


def test_a_loop_over_small_batches_is_one_cause_with_its_two_lines() -> None:
    trace = stepped(1)
    reached = [(0.0, 2)]
    for at in range(0, 960, 60):
        trace.frame("torch/nn/modules/module.py(9): __call__", at, at + 30)
        for place in range(7):
            trace.operator("aten::addmm", at + 4 * place + 1, at + 4 * place + 4)
        trace.frame("<built-in method run_backward of torch._C._EngineBase object at 0x1>", at + 31, at + 59)
        for place in range(7):
            trace.operator("MmBackward0", at + 32 + 4 * place, at + 35 + 4 * place)
        reached += [(at, 5), (at + 31, 6)]
    lines(trace, *reached, (961, 9))
    slow, why, action = verdict(trace)
    assert slow.startswith("A loop of small calls takes 9") and slow.endswith((" at train.py:5.", " at train.py:6."))
    assert why.startswith("A step makes 224 small calls, such as ") and "as addmm" in why.replace("aten::", "")
    assert "batch instead of a loop" in action
    columns = {name for name, *_ in trace.rows("DESCRIBE cause")}
    assert columns == documented_keys("a row of `causes`")
    assert {name for name, *_ in trace.rows("DESCRIBE host_account")} == documented_keys("a row of `host`")
    # Once for all sixteen.
    assert trace.rows("SELECT round(win_ms_per_step / ms_per_step, 3) FROM cause WHERE kind = 'loop'") == [(0.938,)]


@pytest.mark.parametrize("late_us", [0, 400])
def test_a_collective_that_moves_data_and_one_that_waits(late_us: int) -> None:
    """Of two ranks one comes that much later to each collective, of which the data takes 500 µs."""
    traces = []
    for rank in (0, 1):
        trace = Trace(4000 + rank, rank)
        trace.frame("train.py(1): main", 0, 3000)
        for number, at in enumerate((0, 1000, 2000)):
            begin = at + 90 + rank * late_us
            trace.step(number, at, at + 1000)
            trace.operator("aten::mm", at, begin - 1)
            trace.frame("<built-in method wait of pybind11_builtins.x object at 0x7f>", begin, at + 590 + late_us)
            dims = {"Input Dims": [[1000, 250]], "Input type": ["c10::BFloat16"]}
            trace.slice("user_annotation", "gloo:all_reduce", begin, at + 590 + late_us, AUTOGRAD, **dims)
        lines(trace, (0, 2))
        traces.append(trace)
    connection = analysed(traces)
    waits = {(0, 1000 * late_us): 3} if late_us else {}
    found = rows(connection, "SELECT rank, waited_ns, count(*) FROM collective WHERE waited_ns > 0 GROUP BY ALL")
    assert {(rank, waited): count for rank, waited, count in found} == waits
    assert rows(connection, "SELECT rank, caused_ms FROM straggler WHERE caused_ms > 0") == [(1, 1.2)] * bool(late_us)
    causes = "SELECT file_id, kind, round(ms_per_step, 6) FROM cause WHERE kind <> 'Python' ORDER BY ALL"
    moves = [(0, "exchange", 0.5), (1, "exchange", 0.5)]
    assert rows(connection, causes) == ([(0, "communication", 0.4), *moves] if late_us else moves)
    (slow,), (why,), (action,) = rows(connection, "SELECT sentence FROM verdict ORDER BY place")
    assert slow.endswith("Communication takes 50 % of the step, 0.5 ms of 1 ms at train.py:2.")
    assert why.startswith("All ranks have come, and one collective moves 0.5 MB") and "bf16" in action


def test_garbage_that_one_step_collects_is_chance() -> None:
    trace = stepped()
    for step in range(3):
        until = 1000 * step + (101 if step else 900)
        trace.operator("aten::mm", 1000 * step, 1000 * step + 100)
        trace.slice("user_annotation", "garbage collection of generation 2", 1000 * step + 100, until)
        trace.operator("aten::mm", until, 1000 * step + 1000)
    assert verdict(trace)[0].startswith("Nothing stands out")


@pytest.mark.parametrize("collected", [0, 9000])
def test_what_one_step_collects_hides_no_cause_of_all_steps(collected: int) -> None:
    """In each step 600 of 1000 µs are a line of Python, and in one the collector runs for 9 ms."""
    trace, begin = Trace(), 0
    for number in range(3):
        ends = begin + 1000 + collected * (number == 1)
        trace.step(number, begin, ends)
        trace.frame("tree.py(9): grow", begin, begin + 600)
        trace.operator("aten::mm", begin + 600, begin + 1000)
        if ends > begin + 1000:
            trace.slice("user_annotation", "garbage collection of generation 2", begin + 1000, ends)
        begin = ends
    trace.frame("train.py(1): main", 0, begin)
    assert verdict(trace)[0].startswith("Python takes 60 % of the step") and "tree.py:9" in verdict(trace)[0]


@pytest.mark.parametrize("known", ["", "thread", "queue"])
def test_what_another_program_took_is_known_by_the_threads_clock(known: str) -> None:
    """A step takes 400 µs of products and 600 of Python, and another program comes for 500 within a product of each."""
    trace, begin = Trace(), 0
    for number in range(3):
        trace.step(number, begin, begin + 1500)
        trace.frame("tree.py(9): grow", begin, begin + 600)
        at = begin + 600
        for product in range(5):
            ends = at + 80 + 500 * (product == number)
            trace.operator("aten::mm", at, ends)
            at = ends
        begin += 1500
    trace.frame("train.py(1): main", 0, begin)
    lines(trace, *((1500 * number + 600, 5) for number in range(3)))
    ran, queued = [1000.0] * 3 * bool(known), [500.0] * 3 * (known == "queue")
    clock = f"1000.0 AS thread_us, {ran} AS recorded_thread_us, {queued} AS recorded_queued_us"
    recorded = RECORDED.replace("300.0 AS thread_us", clock)
    schema = files("tilewright.trace").joinpath("schema.sql").read_text("utf-8")
    connection = trace.analysed(schema, recorded.replace("950.0 AS other_us", "0.0 AS other_us"))
    sentences = [text for (text,) in rows(connection, "SELECT sentence FROM verdict ORDER BY place")]
    assert ("Python takes 60 % of the step, 0.6 ms of 1 ms at train.py:5" in sentences[0]) == bool(known), sentences
    assert rows(connection, "SELECT sum(stopped) FROM host_time") == [(1_500_000 * bool(known),)]


def test_random_numbers_have_no_verdict_but_their_part_of_what_operators_could_win() -> None:
    trace = stepped(1)
    trace.operator("aten::bernoulli_", 10, 990, dims=[[64, 64], []], types=["float", "Scalar"])
    lines(trace, (0, 5))
    rates = ", ".join(f"('A CPU', '{kind}', '', 1000, 'GB/s', 'measured')" for kind in ("copy", "read", "write"))
    connection = trace.analysed(f"INSERT INTO ceiling VALUES {rates}")
    ((said,),) = rows(connection, "SELECT sentence FROM verdict ORDER BY place")
    assert said.startswith("Nothing stands out") and "of the step, aten::bernoulli_ at train.py:5 alone 9" in said


def test_a_part_of_a_step_has_no_verdict() -> None:
    trace = stepped(1)
    trace.frame("<built-in function sleep>", 100, 900)
    recorded = RECORDED.replace("3 AS steps_kept", "0 AS steps_kept")
    schema = files("tilewright.trace").joinpath("schema.sql").read_text("utf-8")
    sentences = rows(trace.analysed(schema, recorded), "SELECT sentence FROM verdict ORDER BY place")
    assert sentences[0] == ("No step was recorded whole: the program ended after 9 steps.",)
    assert "--wait" in sentences[-1][0]


@pytest.mark.parametrize(
    ("stands_out", "counted", "made", "advised"),
    [(True, 300_000, "", 0), (False, 300_000, "300,000", 600_000), (False, 0, "more than 200,000", 800_000)],
)
def test_a_step_of_more_events_than_are_recorded(stands_out: bool, counted: int, made: str, advised: int) -> None:
    trace = stepped(1)
    trace.frame("<built-in function sleep>" if stands_out else "<built-in function linear>", 100, 900)
    trace.operator("aten::linear", 101, 899)
    lines(trace, (0, 2), (99, 5))
    recorded = RECORDED.replace("3 AS steps_kept", "0 AS steps_kept").replace("false AS cut", "true AS cut")
    recorded = recorded.replace("9 AS step_events", f"{counted} AS step_events").replace("9 AS most", "200_000 AS most")
    recorded = recorded.replace("950.0 AS other_us", "0.0 AS other_us")
    schema = files("tilewright.trace").joinpath("schema.sql").read_text("utf-8")
    slow, why, action = (
        text for (text,) in rows(trace.analysed(schema, recorded), "SELECT sentence FROM verdict ORDER BY place")
    )
    if stands_out:
        assert slow == "time.sleep takes 80 % of the recorded part of a step, 0.8 ms of 1 ms at train.py:5."
    else:
        assert slow == "Nothing stands out in the part of a step that was recorded."
        assert why == f"A step makes {made} events, and 200,000 are recorded."
        assert f"--events {advised}" in action and "--no-stacks" in action


def test_many_collectives_are_too_many() -> None:
    trace = stepped(1)
    for at in range(100, 900, 20):
        trace.frame("<built-in method wait of torch._C._distributed_c10d.Work object at 0x7f>", at, at + 20)
    lines(trace, (0, 2), (99, 5), (901, 9))
    slow, why, action = verdict(trace)
    assert slow == "Communication takes 80 % of the step, 0.8 ms of 1 ms at train.py:5."
    assert why.startswith("It makes 40 collectives a step") and "buckets" in action


def test_another_thread_that_holds_the_interpreter() -> None:
    """Of 1 ms the thread of the steps runs 0.3 ms and sleeps 0.1 ms; another one runs all the time."""
    trace = stepped(1)
    trace.operator("aten::mm", 10, 890)
    trace.frame("<built-in function sleep>", 890, 990)
    schema = files("tilewright.trace").joinpath("schema.sql").read_text("utf-8")
    connection = trace.analysed(schema, RECORDED)
    (slow,), (why,), _ = rows(connection, "SELECT sentence FROM verdict ORDER BY place")
    assert slow == "Waiting for another thread to let go of Python takes 60 % of the step, 0.6 ms of 1 ms at load.py:7."
    assert why.startswith("Thread-1 runs Python meanwhile")


def test_the_clock_tells_a_busy_thread_from_one_that_waits() -> None:
    clock, done, ended = ProcessorClock(), threading.Event(), threading.Event()

    def busy() -> None:
        sum(range(1_000_000))
        done.set()
        ended.wait()

    threads = [threading.Thread(target=target, name=target.__name__) for target in (ended.wait, busy)]
    for thread in threads:
        thread.start()
    done.wait()
    found = clock.taken(2)
    ended.set()
    for thread in threads:
        thread.join()
    assert found.other.startswith("busy at test_verdict.py:") and found.thread_us > 0
    # A million additions take more than a millisecond anywhere.
    assert found.other_us > 500 and found.workers == 0


WAITING = Candidate(1, "data", "train.py:5", "__next__", 90.0, 1, None, None, None)


@pytest.mark.parametrize(
    ("workers", "computing_ms", "cores", "action", "win"),
    [
        # A worker takes 2 × 100 ms for a batch, and the step 10 ms without its wait.
        (2, 0.0, 2, "num_workers=8", 100 - 200 / 8),
        (2, 190.0, 16, "num_workers=16", 100 - 200 / 16),
        (2, 190.0, 2, "there is no core for another worker", 90),
        (0, 0.0, 2, "more workers (num_workers=)", 90),
    ],
)
def test_workers_that_do_not_keep_up(workers: int, computing_ms: float, cores: int, action: str, win: float) -> None:
    step = Step(100.0, has_workers=True, cores=cores, workers=workers, workers_ms=computing_ms)
    advice = advice_on(WAITING, step)
    assert action in advice.action and advice.win_ms == pytest.approx(win)


@pytest.mark.parametrize(
    ("reason", "action"),
    [
        ("tensor 'x' size mismatch at index 0. expected 3, actual 4", "dynamic=True"),
        ("self.calls == 9  # self.calls += 1", "Pass the number that changes as a tensor"),
        ("self.calls == 9 (HINT: allow_unspec_int_on_nn_module = True)", "allow_unspec_int_on_nn_module = True, or"),
        ("___check_type_id(x, 7)", "what the guard names"),
    ],
)
def test_a_recompilation_by_its_guard(reason: str, action: str) -> None:
    cause = Candidate(1, "compilation", "train.py:5", "compilation", 90.0, 1, None, None, None)
    advice = advice_on(cause, Step(100.0, reason=f"{reason}\nUser stack trace:\n  File 'x.py'"))
    assert action in advice.action and "User stack" not in advice.why and "\n" not in advice.why


@pytest.mark.parametrize(
    ("what", "names", "action"),
    [
        ("item", "aten::item aten::linalg_vector_norm", "torch.nn.utils.clip_grad_norm_"),
        ("aten::mul_", "aten::mul_", "torch._foreach_mul_ takes a list"),
        ("item", "aten::item aten::select", "Read all elements at once with .tolist()"),
        ("aten::select", "aten::fill_ aten::select", "torch.arange"),
        ("aten::mm", "AddmmBackward0 aten::mm aten::pow grad", "torch.func.vmap(torch.func.grad(loss)"),
        ("aten::mm", "AddmmBackward0 aten::mm aten::sigmoid aten::tanh", "nn.LSTM and nn.GRU take all steps"),
        ("aten::pow", "PowBackward0 aten::pow", "weight_decay= of the optimizer"),
        ("aten::select", "aten::copy_ aten::maximum aten::select", "in one operation on a whole tensor"),
    ],
)
def test_loops_over_parameters(what: str, names: str, action: str) -> None:
    cause = Candidate(0, "loop", "train.py:5", what, 5.0, 200, names, None, 100.0)
    assert action in advice_on(cause, Step(10.0)).action


def test_workers_that_compute_while_others_use_the_processors() -> None:
    """Both could run for 40 of 200 ms, and computed in 36 of them."""
    cause = Candidate(0, "data", "train.py:5", "DataLoader", 90.0, 1, None, None, None)
    step = Step(100.0, has_workers=True, cores=2, workers=2, workers_ms=36.0, workers_queued_ms=160.0)
    advice = advice_on(cause, step)
    assert "40 ms for one, 90 % of it computing" in advice.why and "no core for another worker" in advice.action


def test_more_workers_than_cores_that_wait_for_one() -> None:
    cause = Candidate(0, "data", "train.py:5", "DataLoader", 7.0, 1, None, None, None)
    step = Step(10.0, has_workers=True, cores=2, workers=8, workers_ms=12.0, workers_queued_ms=27.0)
    assert "no core for another worker" in advice_on(cause, step).action


@pytest.mark.parametrize(("threads", "win"), [(1, 30.0), (2, 15.0)])
def test_a_worker_that_computes_takes_a_core_from_the_step(threads: int, win: float) -> None:
    """Of two cores: 30 ms of 100 make the batch, and the other 70 are computed on one core, or on both."""
    cause = Candidate(0, "data", "train.py:5", "DataLoader", 30.0, 1, "Python", "data.py:3", 20.0)
    assert advice_on(cause, Step(100.0, cores=2, threads=threads)).win_ms == pytest.approx(win)


@pytest.mark.parametrize(
    ("beside", "action"), [("ThreadPoolExecutor-0_3", "ProcessPoolExecutor"), ("Thread-1", "several threads")]
)
def test_what_the_threads_that_are_waited_for_should_do(beside: str, action: str) -> None:
    cause = Candidate(0, "sleep and locks", "train.py:5", "result_iterator", 80.0, 8, None, None, None)
    advice = advice_on(cause, Step(100.0, beside=f"{beside} at words.py:7"))
    assert advice.slow == "Waiting in map" and action in advice.action


@pytest.mark.parametrize(("queued_ms", "win"), [(0.0, 20.0), (50.0, 0.0)])
def test_workers_that_have_no_processor(queued_ms: float, win: float) -> None:
    """Two of them need 200 ms for a batch, or 150 while nothing else runs, and the step's rest takes 80."""
    cause = Candidate(0, "data", "train.py:5", "DataLoader", 20.0, 1, None, None, None)
    assert advice_on(cause, Step(100.0, has_workers=True, workers=2, workers_queued_ms=queued_ms)).win_ms == win


def test_a_loader_that_starts_its_workers_in_each_step() -> None:
    cause = Candidate(0, "data", "train.py:5", "DataLoader", 8.0, 1, None, None, None)
    advice = advice_on(cause, Step(10.0, has_workers=True, restarts=True))
    assert "persistent_workers=True" in advice.action and advice.win_ms < 8.0


@pytest.mark.parametrize(
    ("threads", "cores", "said"),
    [
        (1, "2 of a CPU", "Operators run on 1 of 2 cores: torch.set_num_threads(2)"),
        (2, "2 of a CPU", ""),
        # A program that is bound to two processors of 64 cores uses both.
        (2, "64 (2 threads)", ""),
        (1, "64 (2 threads)", "Operators run on 1 of 2 cores: torch.set_num_threads(2)"),
        (4, "4 (8 threads)", ""),
    ],
)
def test_operators_on_fewer_threads_than_cores(threads: int, cores: str, said: str) -> None:
    trace = stepped(1)
    trace.operator("aten::mm", 10, 990)
    trace.header["tilewright threads"] = str(threads)
    run = f"""INSERT INTO run BY NAME SELECT now()::TIMESTAMP AS created, '' AS command, '' AS target, '' AS "case",
              MAP {{}}::MAP(VARCHAR, BIGINT) AS dims, MAP {{'cores': '{cores}'}} AS machine, '' AS tilewright"""
    first, *others = (text for (text,) in rows(trace.analysed(run), "SELECT sentence FROM verdict ORDER BY place"))
    assert first.startswith("Nothing stands out")
    assert "".join(others).startswith(said) and bool(others) == bool(said)
