"""A race of attention kernels is run once, kept on disk, and followed; what it compares is one formula."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tilewright.choose import attention_race
from tilewright.choose.attention_race import Bias, Raced
from tilewright.kernels.attention import reference
from tilewright.kernels.attention.request import Mask, Request
from tilewright.kernels.offer import THEIRS
from tilewright.passes.attention.library import CUDNN, FLASH, ON_CPU, OWN, PREFIX, WINDOWS, options_of
from tilewright.passes.attention.written_out import WRITTEN_OUT
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome

STRIDES = (7 * 3 * 16, 16, 3 * 16, 1)
REQUEST = Request(
    torch.device("cuda:0"), torch.bfloat16, 2, 3, 3, 7, 7, 16, 16, STRIDES, STRIDES, STRIDES, True, 0.25, None, 0
)  # fmt: skip
RACED = Raced(REQUEST, FLASH, causal=True, bias=None, training=False, others=(OWN,))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(outcomes, "_unsaved", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("tilewright.launch.race.is_captured", lambda device: False)
    yield tmp_path / "cache"


def test_a_race_is_run_once_for_a_request_and_a_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    times = Outcome({THEIRS: 20.0, OWN.name: 30.0})

    def fixed(alternatives: object, device: torch.device, *limits: float) -> Outcome:
        runs.append(device)
        return times

    def outcome(raced: Raced, direction: int = 0, measure: bool = False) -> Outcome | None:
        return attention_race.races_of(raced)[direction].outcome(measure=measure)

    monkeypatch.setattr("tilewright.launch.race.run", fixed)
    raced = RACED._replace(training=True)
    assert outcome(raced) is None
    assert outcome(raced, 0, True) == outcome(raced, 0, True) == outcome(raced) == times
    assert len(runs) == 1 and outcome(raced, 1) is None and outcome(RACED) is None
    assert outcome(raced._replace(request=REQUEST._replace(right=None))) is None
    assert outcome(raced._replace(others=(OWN, CUDNN))) is None
    # The same call on another GPU of the same kind.
    assert outcome(raced._replace(request=REQUEST._replace(device=torch.device("cuda:1")))) == times
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert outcome(raced) is None


LIES = [((7, 7), (7, 1)), ((2, 3, 7, 7), (0, 0, 16, 1)), ((2, 1, 7, 7), (49, 0, 1, 7))]


@pytest.mark.parametrize(
    ("mask", "lies", "window"),
    in_turn(itertools.product(["none", "boolean", "additive"], LIES), [((None, None), (None, 0)), ((3, 0), (1, 2))]),
)
def test_all_alternatives_of_a_race_compute_one_formula(
    mask: Mask, lies: tuple[tuple[int, ...], tuple[int, ...]], window: tuple[int | None, int | None]
) -> None:
    """The operands lie as the request says; PyTorch's kernel gets the window and the mask in one bias."""
    (left, right), cpu = window, torch.device("cpu")
    request = REQUEST._replace(device=cpu, mask=mask, left=left, right=right, dtype=torch.float32)
    q, k, v = attention_race._operands(request)
    assert q.stride() == k.stride() == v.stride() == STRIDES
    given = attention_race._mask(request)
    assert (given is None) == (mask == "none")
    expected, lse = reference.attention(
        *(x.double() for x in (q, k, v)), scale=request.scale, window=(left, right), mask=given
    )
    raced = Raced(request, ON_CPU, causal=False, bias=Bias(*lies, request.dtype), training=True, others=())
    ((name, kernels),) = attention_race._runnable(raced).items()
    saved = kernels.attend()
    assert name == THEIRS
    torch.testing.assert_close(saved.out.double(), expected, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(saved.lse.double(), lse, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 3])
def test_our_kernels_of_a_race_compute_the_formula_too(groups: int) -> None:
    """Where nothing hides keys, few queries go through the kernel that splits the keys, windows through theirs, and
    attention may be written out."""
    request = REQUEST._replace(device=torch.device("cpu"), dtype=torch.float32, kv_heads=groups, right=None)
    q, k, v = attention_race._operands(request)
    repeated = (x.double().repeat_interleave(3 // groups, 1) for x in (k, v))
    expected, _ = reference.attention(q.double(), *repeated, scale=request.scale, window=(None, None), mask=None)
    others = (PREFIX, WINDOWS, WRITTEN_OUT)[: 1 + 2 * (groups == 3)]
    raced = Raced(request, ON_CPU, causal=False, bias=None, training=False, others=others)
    kernels = attention_race._runnable(raced)
    assert list(kernels) == [THEIRS, *(peer.name for peer in others)]
    for one in kernels.values():
        torch.testing.assert_close(one.attend().out.double(), expected, rtol=0.0, atol=1e-6)


def test_what_inference_does_not_give_is_not_read() -> None:
    """cuDNN gives no log-sum-exp then."""
    operators: list[object] = []

    def perform(operator: object, wanted: object, *args: object, **kwargs: object) -> Sequence[object]:
        operators.append(operator)
        return "out", None, "seed", "offset"

    options = options_of("q", "k", "v", None, (7, 7), training=False, causal=True, scale=0.25)
    assert CUDNN.attend(perform, options)[:2] == ("out", None) and operators == [CUDNN.forward]


def test_a_library_that_refuses_the_operands_is_left_out() -> None:
    """cuDNN has no kernel for a CPU."""
    request = REQUEST._replace(device=torch.device("cpu"))
    raced = Raced(request, ON_CPU, causal=True, bias=None, training=True, others=(CUDNN,))
    assert list(attention_race._backwards(raced)) == [THEIRS]


def test_what_pytorch_would_not_run_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels for GPUs take no tensors of a CPU."""
    monkeypatch.setattr(attention_race, "_runs", lambda one, training: pytest.fail("it was run"))
    request = REQUEST._replace(device=torch.device("cpu"))
    raced = Raced(request, ON_CPU, causal=True, bias=None, training=True, others=(CUDNN, FLASH))
    assert list(attention_race._runnable(raced)) == [THEIRS]
