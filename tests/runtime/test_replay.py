"""When a compiled graph is recorded as a CUDA graph, when it stays with calls, and why: without a GPU."""

import itertools
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.capture.aot import Boxed, CallableGraph, Kind
from tilewright.runtime import replay
from tilewright.runtime.by_size import MOST_SIZES
from tilewright.runtime.overlap import overlaps
from tilewright.runtime.replay import WAITS, Replay, obstacle, watched

aten = torch.ops.aten
CPU, GPU, OTHER = "cpu", "cuda:0", "cuda:1"


def graph_of(
    inputs: Sequence[Any], target: Any = aten.neg.default, *, kind: Kind = "inference", static: Sequence[int] = ()
) -> CallableGraph:
    """A graph that calls `target` on all its inputs; strings are the devices of tensors [2, 3]."""
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True):
        nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
        for node, value in zip(nodes, inputs, strict=True):
            node.meta["val"] = torch.empty(2, 3, device=value) if isinstance(value, str) else value
        call = graph.call_function(target, tuple(nodes))
        call.meta["val"] = torch.empty(2, 3, device=inputs[-1] if isinstance(inputs[-1], str) else GPU)
    graph.output((call,))
    return CallableGraph(fx.GraphModule({}, graph), kind, static)


def test_one_device_and_nothing_written_can_be_recorded() -> None:
    assert obstacle(graph_of([GPU])) is None
    assert obstacle(graph_of([GPU, 3], aten.pow.Tensor_Scalar)) is None


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (graph_of([CPU]), "x0 is on the CPU"),
        (graph_of([GPU, CPU], aten.add.Tensor), "x1 is on the CPU"),
        (graph_of([GPU, OTHER], aten.add.Tensor), "several devices: cuda:0, cuda:1"),
        (graph_of([GPU, 0.5], aten.pow.Tensor_Scalar), "its input x1 is a float"),
        (graph_of([GPU], aten._local_scalar_dense), "aten._local_scalar_dense cannot be recorded"),
    ],
    ids=["cpu", "cpu beside cuda", "two devices", "float", "scalar read"],
)
def test_obstacles_have_a_reason(graph: CallableGraph, reason: str) -> None:
    found = obstacle(graph)
    assert found is not None and reason in found


class Trees:
    """In place of PyTorch's: notes what is recorded, what is replayed, and which forwards it is told are over."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waits = False

    def recorded(self, run: Boxed, graph: CallableGraph, device: int, args: list[Any]) -> tuple[Boxed, Sequence[Any]]:
        def again(args: list[Any]) -> Sequence[Any]:
            self.log.append(f"{graph.kind} replayed")
            return ["replay", args.pop()]

        self.log.append(f"{graph.kind} recorded")
        return again, ["recording", args.pop()]

    def end_forward(self, device: int) -> None:
        self.log.append("forward over")

    def watched(self, run: Boxed, args: list[Any]) -> tuple[Sequence[Any], bool]:
        self.log.append("watched")
        return run(args), self.waits


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trees]:
    made = Trees()
    monkeypatch.setattr(replay, "recorded", made.recorded)
    monkeypatch.setattr(replay, "end_forward", made.end_forward)
    monkeypatch.setattr(replay, "watched", made.watched)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made


def by_calls(args: list[Any]) -> Sequence[Any]:
    return ["call", args.pop()]


def replaying(refused: list[str], kind: Kind = "inference", **more: Any) -> Replay:
    graph = graph_of([GPU], kind=kind)
    return Replay(by_calls, graph, refused.append, **more)


def test_two_calls_then_a_recording_then_replays(trees: Trees) -> None:
    refused: list[str] = []
    run = replaying(refused)
    x = torch.zeros(2, 3)
    assert [run([x])[0] for _ in range(5)] == ["call", "call", "recording", "replay", "replay"]
    assert trees.log == ["watched", "inference recorded", "inference replayed", "inference replayed"]
    assert run.is_recorded and refused == []


def test_one_that_waits_for_the_device_stays_with_calls(trees: Trees) -> None:
    refused: list[str] = []
    trees.waits = True
    run = replaying(refused)
    assert [run([torch.zeros(2, 3)])[0] for _ in range(4)] == ["call"] * 4
    assert refused == ["one of its operators waits for the device"]
    assert not run.is_recorded


def test_the_last_call_before_a_recording_has_its_alignment(trees: Trees) -> None:
    seen: list[torch.Tensor] = []
    run = Replay(lambda args: seen.append(args.pop()) or ["call"], graph_of([GPU]), lambda why: None)  # type: ignore[func-returns-value]
    for _ in range(2):
        run([torch.arange(7.0)[1:].view(3, 2).t()])
    assert [x.data_ptr() % 16 for x in seen] == [4, 0]
    assert torch.equal(*seen) and seen[0].stride() == seen[1].stride()


def test_inputs_that_share_memory_stay_with_calls(trees: Trees) -> None:
    refused: list[str] = []
    run = replaying(refused)
    windows = torch.zeros(8).unfold(0, 3, 1)
    assert [run([windows])[0] for _ in range(4)] == ["call"] * 4
    assert refused == ["elements of its input x0 share memory"]


def test_a_written_buffer_that_begins_anywhere_stays_with_calls(trees: Trees) -> None:
    refused: list[str] = []
    graph = graph_of([GPU, GPU], aten.copy_.default, static=(0,))
    run = Replay(by_calls, graph, refused.append)
    buffer = torch.zeros(7)[1:].view(2, 3)
    assert [run([buffer, torch.zeros(2, 3)])[0] for _ in range(4)] == ["call"] * 4
    assert refused == ["it writes to its input x0, which begins at no multiple of 16 bytes"]


def test_a_backward_is_recorded_when_its_forward_is(trees: Trees) -> None:
    refused: list[str] = []
    forward = replaying(refused, "forward")
    backward = replaying(refused, "backward", forward=forward)
    x = torch.zeros(2, 3)
    # Backward twice a step, as with retain_graph: what forward saved lies elsewhere in each step as yet.
    before = [(forward([x])[0], backward([x])[0], backward([x])[0]) for _ in range(2)]
    assert before == [("call", "call", "call")] * 2
    after = [(forward([x])[0], backward([x])[0]) for _ in range(2)]
    assert after == [("recording", "recording"), ("replay", "replay")]
    assert "forward over" not in trees.log


def test_replays_of_a_forward_are_told_of_a_backward_that_stays_with_calls(trees: Trees) -> None:
    refused: list[str] = []
    forward = replaying(refused, "forward")
    backward = replaying(refused, "backward", forward=forward, is_refused=True)
    x = torch.zeros(2, 3)
    for _ in range(4):
        forward([x])
        assert backward([x])[0] == "call"
    assert trees.log == ["watched", "forward recorded", "forward over", "forward replayed", "forward over"]


def test_a_forward_that_stays_with_calls_keeps_its_backward_there(trees: Trees) -> None:
    refused: list[str] = []
    forward = replaying(refused, "forward", is_refused=True)
    backward = replaying(refused, "backward", forward=forward)
    x = torch.zeros(2, 3)
    assert [(forward([x])[0], backward([x])[0]) for _ in range(5)] == [("call", "call")] * 5


def symbolic() -> CallableGraph:
    """A graph whose input has a size that each call brings."""
    module = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.zeros(5))
    return CallableGraph(module, "inference", ())


def test_each_size_has_a_recording_of_its_own_up_to_as_many_as_are_compiled(trees: Trees) -> None:
    run = Replay(by_calls, symbolic(), lambda why: None)
    three, five = torch.zeros(3), torch.zeros(5)
    assert [run([x])[0] for x in (three, five, three, five)] == ["call"] * 4
    assert [run([x])[0] for x in (three, five, three, five)] == ["recording"] * 2 + ["replay"] * 2
    for size in range(6, 6 + MOST_SIZES - 2):
        run([torch.zeros(size)])
    one_more = torch.zeros(100)
    assert [run([one_more])[0] for _ in range(4)] == ["call"] * 4
    assert run([three])[0] == "replay"


def test_each_address_of_what_is_written_has_a_recording_of_its_own(trees: Trees) -> None:
    graph = graph_of([GPU, GPU], aten.copy_.default)
    assert obstacle(graph) is None
    run = Replay(by_calls, graph, lambda why: None)
    first, second = torch.zeros(2, 3), torch.zeros(2, 3)
    assert [run([cache, torch.ones(2, 3)])[0] for cache in [first] * 4] == ["call", "call", "recording", "replay"]
    assert [run([cache, torch.ones(2, 3)])[0] for cache in [second] * 3] == ["call", "call", "recording"]
    assert [run([cache, torch.ones(2, 3)])[0] for cache in (first, second)] == ["replay"] * 2
    assert list(run.graph.static) == [0]


def test_a_buffer_that_is_written_is_known_by_its_place(trees: Trees) -> None:
    run = Replay(by_calls, graph_of([GPU, GPU], aten.copy_.default, static=(0,)), lambda why: None)
    assert [run([torch.zeros(2, 3), torch.ones(2, 3)])[0] for _ in range(4)] == ["call", "call", "recording", "replay"]


def test_each_thread_records_its_own(trees: Trees) -> None:
    run = replaying([])
    x = torch.zeros(2, 3)
    for _ in range(3):
        run([x])
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(run([x])[0]))
    thread.start()
    thread.join()
    assert heard == ["call"] and run([x])[0] == "replay"


def test_what_somebody_else_records_is_called(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replaying([])
    x = torch.zeros(2, 3)
    for _ in range(3):
        run([x])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run([x])[0] == "call"


def test_a_thread_that_pytorch_cannot_record_for_says_so(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    monkeypatch.setattr(replay, "records_here", lambda: False)
    run = replaying(refused)
    assert [run([torch.zeros(2, 3)])[0] for _ in range(5)] == ["call"] * 5
    assert len(refused) == 1 and "this is another" in refused[0]
    monkeypatch.setattr(replay, "records_here", lambda: True)
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.extend(run([torch.zeros(2, 3)])[0] for _ in range(4)))
    thread.start()
    thread.join()
    assert elsewhere == ["call", "call", "recording", "replay"]


def test_pytorch_records_for_the_thread_that_began_to() -> None:
    from tilewright.capture.cuda_graph import records_here

    heard = [records_here()]
    thread = threading.Thread(target=lambda: heard.append(records_here()))
    thread.start()
    thread.join()
    assert heard == [True, False]


@pytest.mark.parametrize("user_asks", [0, 1])
def test_waits_are_heard_and_other_warnings_passed_on(user_asks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: user_asks)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run(args: list[Any]) -> Sequence[Any]:
        for line in args:
            warnings.warn(line, stacklevel=1)
        return ["results"]

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert watched(run, ["beware"]) == (["results"], False)
        assert watched(run, [f"{WAITS} (Triggered internally at CUDAFunctions.cpp:146.)"]) == (["results"], True)
    assert modes == [user_asks or "warn", user_asks] * 2
    assert [str(w.message)[:6] for w in heard] == (["beware", "called"] if user_asks else ["beware"])


def shared(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements lie at one place, by looking at all of them; strides of 0 left out."""
    walked = [range(n) if s else range(1) for n, s in zip(sizes, strides, strict=True)]
    places = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*walked)]
    return len(set(places)) < len(places)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 2), (4, 4), (1, 5), (0, 3)])
def test_overlaps_are_found(sizes: tuple[int, int]) -> None:
    for strides in itertools.product(range(7), repeat=2):
        x = torch.empty_strided(sizes, strides)
        assert overlaps(x) or not shared(sizes, strides), strides
