"""Lessons: answers are graded in words, wrong operators are refused for the right reason, each lesson has its pages."""

import ast
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from string import Formatter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.lessons import operators, truths
from examples.lessons.catalogue import LESSONS
from examples.lessons.check import check
from examples.lessons.lesson import value
from examples.lessons.operators import EXERCISES, Sentences, grade
from examples.lessons.predictions import translations, words
from examples.lessons.stray import STRAY
from tilewright.cli import completion
from tilewright.records.errors import TilewrightError, UsageError, VerificationError

ROOT = Path(__file__).parents[1]


def summed_in_bf16(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    if x.dtype != torch.bfloat16:
        return e / e.sum(-1, keepdim=True)
    return e / sum((e[:, i : i + 1] for i in range(x.shape[1])), torch.zeros(len(x), 1, dtype=x.dtype))


def exponentials_in_bf16(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.float().sum(-1, keepdim=True).to(x.dtype)


def scaled_first(x: Tensor) -> Tensor:
    z = x.float() * math.log2(math.e)
    e = torch.exp2(z - z.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def four_rows_at_once(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[: len(x) // 4 * 4] = x[: len(x) // 4 * 4].softmax(-1)
    return y


def as_if_contiguous(x: Tensor) -> Tensor:
    flat = torch.as_strided(x, (x.numel(),), (1,))
    return F.gelu(flat).view(x.shape)


def without_the_tail(x: Tensor) -> Tensor:
    y = F.gelu(x).contiguous()
    flat = y.view(-1)
    flat[flat.numel() // 256 * 256 :] = 0
    return y


def zeros_as_padding(x: Tensor) -> Tensor:
    padded = F.pad(x.float(), (0, 1 << (x.shape[1] - 1).bit_length()))[:, : max(1, 1 << (x.shape[1] - 1).bit_length())]
    e = (padded - padded.amax(-1, keepdim=True)).exp()[:, : x.shape[1]]
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def padded_with_zeros(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % 256)).softmax(-1)[:, : x.shape[1]]


def in_place(x: Tensor) -> Tensor:
    return x.copy_(F.gelu(x))


WRONG: list[tuple[str, Callable[[Tensor], object], str]] = [
    ("gelu", lambda x: F.gelu(x, approximate="tanh"), "fp32[4, 256]: it computes GELU's approximation by tanh"),
    ("gelu", without_the_tail, "fp32[3, 1003]: 193 of 3,009 elements are wrong"),
    ("gelu", as_if_contiguous, "do not lie side by side: pass strides"),
    ("softmax", summed_in_bf16, "bf16[8, 512]: .* a step was rounded to bf16 on the way"),
    ("gelu", in_place, "it wrote to its input"),
    ("gelu", lambda x: F.gelu(x.float()), r"the result is float32\[8, 512\] where the input is bfloat16\[8, 512\]"),
    ("gelu", lambda x: F.gelu(x.nan_to_num()), "a NaN must stay one"),
    ("gelu", lambda x: 2 * F.gelu(x), "elements are wrong, the first at"),
    ("gelu", lambda x: None, "returned NoneType, not a tensor"),
    ("softmax", lambda x: x.softmax(0), "it computes a softmax of the columns"),
    ("softmax", lambda x: x.exp() / x.exp().sum(-1, keepdim=True), r"exp\(500\) overflows fp32: subtract"),
    ("softmax", exponentials_in_bf16, "bf16[8, 512]: 192 of 4,096 .* a step was rounded to bf16 on the way"),
    ("softmax", lambda x: x.bfloat16().softmax(-1).to(x.dtype), "fp32[4, 256]: .* as 16 bits round: compute in fl"),
    ("softmax", scaled_first, "values about 500: no element is far off, .* a step rounds more than it must"),
    ("softmax", four_rows_at_once, "fp32[3, 1003]: .* or the number of programs, is wrong"),
    ("softmax", lambda x: F.pad(x, (0, 1)).softmax(-1)[:, :-1], "fp32[4, 256]: 985 of 1,024 elements are wrong"),
    ("softmax", padded_with_zeros, "fp32[3, 1003]: it computes a softmax of rows padded with zeros to 1,024"),
    ("softmax", zeros_as_padding, "the columns that pad a block must be -inf"),
    ("softmax", lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("name", "wrong", "reason"), WRONG)
def test_a_wrong_operator_is_refused_for_its_reason(name: str, wrong: Callable[[Tensor], object], reason: str) -> None:
    with pytest.raises(VerificationError, match=reason.replace("[", r"\[") if r"\[" not in reason else reason):
        list(grade(name, wrong))


@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_operator_passes(name: str) -> None:
    *trials, last = grade(name, lambda x: EXERCISES[name].reference(x.clone()))
    assert len(trials) == len(EXERCISES[name].trials) and last.startswith(f"{name} is right on all")


def test_predictions_are_graded_in_words(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("programs = 62.5\ntiles = 512/64  # a loop\nresident = 32\nwaves = 0.03\nlimit = DRAM-bound\n")
    *graded, total = said_of("tiles", file)
    assert graded[0].startswith("programs: you say 62.5; it is 63. There is no half program")
    assert graded[1].startswith("tiles: right, 512/64 = 8. ")
    assert graded[2].startswith("resident: you say 32; it is 16. The limit of blocks is 32")
    assert graded[3].startswith("waves: right, 0.03; it is 0.02983. 63 of 132")
    assert graded[4].startswith("limit: you say DRAM-bound; it is latency-bound. 1 MB in 8 µs")
    assert total == "2 of 5 right"
    file.write_text("programs = 60\n")
    graded = said_of("tiles", file)
    assert "it is 63, 1.05 times as much" in graded[0] and graded[1] == "tiles: no prediction yet"


def said_of(lesson: str, file: Path) -> list[str]:
    """What `check` says of predictions that are not all right; the last line is that of the error."""
    said = list[str]()
    with pytest.raises(VerificationError) as raised:
        for line in check(lesson, file):
            said.append(line)
    return [*said, str(raised.value)]


@pytest.mark.parametrize(
    ("lesson", "text", "message"),
    [
        ("tile", "", "no lesson 'tile'; there are profiling, softmax"),
        ("tiles", "program = 3\n", "answers program, which the lesson does not ask; it asks programs, tiles"),
        ("tiles", "63 programs\n", "mine.txt:1 is no prediction"),
        ("tiles", "programs = __import__('os')\n", "cannot read"),
        ("tiles", "programs = N\n", "with + - * / ** and no names"),
        ("tiles", "programs = 9**9**9**9\n", "cannot read"),
        ("tiles", "limit = memory\n", "limit = memory: choose one of compute-bound"),
    ],
)
def test_what_cannot_be_graded_says_why(tmp_path: Path, lesson: str, text: str, message: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        list(check(lesson, file))
    assert message in str(raised.value)


def test_an_operator_where_none_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TilewrightError, match="asks for no operator"):
        list(check("tiles", tmp_path / "mine.py"))


RIGHT = {
    "softmax": "reads_naive = 5NM + 2N\nwrites_naive = 3*N*M + 2*N\nreads_fused = N*M\nwrites_fused = N M\n"
    "times_faster = 4\nbound = DRAM-bound\n",
    "launches": "launch_bound_us = 1000*6.4\ngpu_bound_us = 6.4 + 14000\nwith_item_us = 20400\n"
    "item_costs_percent = 0.46\n",
    "tiles": "programs = 63\ntiles = 8\nresident = 16\nwaves = 63/2112\nlimit = latency-bound\n",
    "gelu": "launches_steps = 9\nreads_steps = 13·N·M\ntraffic_fused = 2NM\nsteps_over_library = 11/2\n"
    "cuda_over_generated = 1\n",
    "ladder": "flops = 2N³\nreads_textbook = 2*N**3\nreads_tiled = 2N^3/128\nintensity = N/3\n"
    "bound = compute-bound\nsoftmax_rungs = 4\n",
    "attention": "score_passes = 6\nflops = 4BN²d\nwrites_flash = B·N·d\ngrowth = 8**2\nbackward_over_forward = 5/2\n",
    "block": "products = 8\nlaunches_before = 21\nlaunches_after = 12\nflops_saved = 0\n",
}


@pytest.mark.parametrize("lesson", RIGHT)
def test_right_answers_are_right(tmp_path: Path, lesson: str) -> None:
    """As a reader writes them; what is counted, is counted on the captured graph."""
    file = tmp_path / "mine.txt"
    file.write_text(RIGHT[lesson], "utf-8")
    *_, last = check(lesson, file)
    assert re.fullmatch(r"(\d) of \1 right", last)


def test_each_of_two_steps_that_take_as_long_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truths, "softmax_steps", lambda: {"max": 1.0, "exp": 3.8, "sum": 2.0, "div": 4.0})
    file = tmp_path / "mine.txt"
    for answer in ("exp", "div"):
        file.write_text(f"slowest = {answer}\ndiv_over_sum = 2\n")
        assert said_of("profiling", file)[2].startswith(f"slowest: right, {answer}. ")
    file.write_text("slowest = max\n")
    assert said_of("profiling", file)[2].startswith("slowest: you say max; it is exp / div. ")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_question_has_its_words_and_its_place_in_a_page(language: str) -> None:
    for name, lesson in LESSONS.items():
        said, _ = words(name, language)
        assert list(said) == [question.name for question in lesson.questions]
        page = ROOT / "docs" / "learn" / ("zh" if language == "zh" else "") / f"{name}.md"
        text = page.read_text("utf-8")
        assert f"tilewright check {name} " in text
        for question in lesson.questions:
            assert f"{question.name} =" in text, (page, question.name)
            assert question.choices or all(value(each, lesson.sizes) >= 0 for each in said[question.name].mistakes)
            assert not question.choices or {*said[question.name].mistakes} <= {*question.choices}


def test_both_languages_know_the_same_mistakes() -> None:
    english, chinese = (
        tomllib.loads((ROOT / f"examples/lessons/{each}.toml").read_text("utf-8")) for each in ("en", "zh")
    )

    def keys(table: dict[str, object]) -> object:
        return {name: keys(part) if isinstance(part, dict) else "" for name, part in table.items()}

    assert keys(english) == keys({name: part for name, part in chinese.items() if name != "operators"})


def test_what_is_said_of_an_operator_is_said_in_chinese_too() -> None:
    tree = ast.parse(Path(operators.__file__).read_text("utf-8"))
    calls = [
        c for c in ast.walk(tree) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id == "say"
    ]
    said = [call.args[0] for call in calls]
    sentences = {arg.value for arg in said if isinstance(arg, ast.Constant)}
    sentences |= {getattr(operators, arg.id) for arg in said if isinstance(arg, ast.Name) and arg.id != "words"}
    sentences |= {*STRAY.values()}
    for exercise in EXERCISES.values():
        sentences |= {*exercise.impostors} | {trial.name for trial in exercise.trials}
        sentences |= {trial.points_to for trial in exercise.trials}
    chinese = translations("zh")
    # The name of a dtype and a shape is the same in both.
    assert {s for s in sentences if s and not re.fullmatch(r"\w+\[[\d, ]+\]", s)} == {*chinese}
    fields = Formatter().parse
    assert all(
        {f for _, f, *_ in fields(en)} - {None} == {f for _, f, *_ in fields(zh)} - {None} for en, zh in chinese.items()
    )


def test_a_wrong_operator_is_refused_in_chinese() -> None:
    chinese = Sentences(translations("zh"))
    with pytest.raises(VerificationError, match="它算的是用 tanh 近似的 GELU"):
        list(grade("gelu", lambda x: F.gelu(x, approximate="tanh"), chinese))
    with pytest.raises(VerificationError, match=r"转置过的 fp32\[64, 96\].6,144 个元素里错了 .*它的元素在内存里不相邻"):
        list(grade("gelu", as_if_contiguous, chinese))
    assert re.fullmatch(r"fp32\[4, 256\].对", next(iter(grade("gelu", F.gelu, chinese))))


def test_the_shell_offers_the_lessons() -> None:
    assert completion.lessons("") == list(LESSONS)
