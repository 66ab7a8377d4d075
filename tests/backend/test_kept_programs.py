"""Programs that an earlier process compiled: found again where nothing has changed, compiled anew where something has.

Those of dynamic sizes are found with the plans of the sizes that were met.

Most tests stay in one process: `torch._dynamo.reset` forgets what was compiled, so that it is looked up on disk.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.backend.compiling import (
    assert_same,
    compare_steps,
    compiled,
    deterministic,
    differentiate,
    retained_after_one_that_was_not,
    twin,
    with_grad,
)
from tests.processes import start
from tests.waiting import HANG_S
from tilewright.backend import _Compiler
from tilewright.capture import program_cache
from tilewright.compile import identity
from tilewright.compile.stages import rewrite
from tilewright.hardware.target import Target
from tilewright.launch.executor import EXTENSION
from tilewright.records import eviction, outcomes
from tilewright.records.errors import CompilerError
from tilewright.records.outcomes import Outcome

pytestmark = pytest.mark.usefixtures("kept_programs")


def programs(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{program_cache.SUFFIX}"))


def again() -> None:
    """Forget what this process compiled."""
    torch._dynamo.reset()
    program_cache.counts.clear()


def run(function: Callable[..., Any], *inputs: Any, backward: bool = False, **options: Any) -> list[Any]:
    """Results and gradients of a compiled call from one state of the generator."""
    mine = [twin(x) for x in inputs]
    torch.manual_seed(3)
    result = compiled(function, **options)(*mine)
    if backward:
        roots = [x for x in (result if isinstance(result, tuple) else (result,)) if x.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    return [result, mine, [getattr(x, "grad", None) for x in mine], torch.randn(1)]


def is_found(function: Callable[..., Any], *inputs: Any, backward: bool = False) -> None:
    """The second compilation loads what the first one kept, and gives the same to the last bit."""
    first = run(function, *inputs, backward=backward)
    assert program_cache.counts == {"compiled": 1, "kept": 1}, program_cache.counts
    again()
    second = run(function, *inputs, backward=backward)
    assert program_cache.counts == {"loaded": 1}, program_cache.counts
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def chain(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * 2 + x


def drops(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.gelu(x), 0.3) + F.dropout(x, 0.1)


def writes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y[:3] = F.gelu(x)[:3]
    y.add_(1)
    return y.sum(), x.t()


def shows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = F.gelu(x) * 2
    return h, h.t(), h[1:], x.view(-1), x.t()


def holds_constants(x: torch.Tensor) -> torch.Tensor:
    return (F.gelu(x) * torch.tensor([1.0, 2.0, 3.0])).where(torch.arange(3) != 1, -0.0)


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(("function", "backward"), [(chain, False), (chain, True), (drops, True), (shows, False)])
def test_a_program_is_found_again(function: Callable[..., Any], backward: bool) -> None:
    x = with_grad(40, 200) if backward else torch.randn(40, 200)
    is_found(function, x, backward=backward)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 3


class Quadrupled(Tripled):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 4


# Dynamo instantiates the class.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_autograd_function_is_found_by_its_forward_and_its_backward() -> None:
    x = with_grad(4, 9)
    is_found(lambda x: Tripled.apply(x) * 2, x, backward=True)
    again()
    _, _, (gradient,), _ = run(lambda x: Quadrupled.apply(x) * 2, x, backward=True)
    assert program_cache.counts == {"compiled": 1, "kept": 1}
    torch.testing.assert_close(gradient, 8 * x.detach().cos())


def test_an_input_that_is_written_is_written_by_the_program_that_was_found() -> None:
    is_found(writes, torch.randn(5, 7), torch.randn(5, 7))


def test_constants_and_attention_are_found_again() -> None:
    is_found(holds_constants, with_grad(5, 3), backward=True)
    again()
    is_found(attends, with_grad(2, 4, 16, 8), with_grad(2, 4, 16, 8), with_grad(2, 4, 16, 8), backward=True)


def test_a_module_finds_its_own_parameters() -> None:
    for number in range(2):
        again()
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
        compare_steps(model, [torch.randn(3, 8)], lambda run, x: differentiate(run(x)))
        assert program_cache.counts == ({"loaded": 1} if number else {"compiled": 1, "kept": 1})


def loss_and_logits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.gelu(x) * 3
    return logits.square().sum(), logits


def all_gradients_after_those_of_the_loss(run: Callable[..., Any], x: torch.Tensor) -> None:
    run(x)[0].backward()
    loss, logits = run(x)
    (loss + logits.sum()).backward()
    # No leaf, and of no loss's history at the first call.
    run(x * 2)[1].sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "step"),
    [(loss_and_logits, all_gradients_after_those_of_the_loss), (chain, retained_after_one_that_was_not)],
)
def test_backward_of_a_program_that_was_found(
    function: Callable[..., Any], step: Callable[..., None], dynamic: bool
) -> None:
    for _ in range(2):
        again()
        compare_steps(function, [with_grad(40, 50)], step, dynamic=dynamic)
    assert program_cache.counts["loaded"] and not {"compiled", "sizes planned"} & program_cache.counts.keys()


def test_a_backward_that_cannot_be_packed_leaves_gradients_out_too() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.complex(x, x.sin())  # the backward conjugates it
        return x.mean(0), (z * z).real

    def step(run: Callable[..., Any], x: torch.Tensor) -> None:
        for used in (2, 1):
            torch.cat([result.flatten() for result in run(x)[:used]]).sum().backward()

    compare_steps(function, [with_grad(3, 6)], step)
    assert program_cache.counts == {"compiled": 1, "not kept: its backward cannot be packed": 1}


def test_compiled_autograd_traces_the_backward_of_a_program_that_was_found() -> None:
    x = with_grad(40, 20)
    run(chain, x, backward=True)
    again()
    y = twin(x)
    result = compiled(chain)(x)
    assert program_cache.counts == {"loaded": 1}
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        result.sum().backward()
    chain(y).sum().backward()
    assert_same(x.grad, y.grad)


@pytest.mark.parametrize("sizes", [(40,), (30, 20, 40)])
def test_a_program_that_was_found_is_called_by_the_executor(sizes: tuple[int, ...]) -> None:
    EXTENSION.module()
    assert EXTENSION.wait()
    x = with_grad(40, 20)
    for _ in range(2):
        again()
        call = compiled(chain, dynamic=len(sizes) > 1)
        for size in (*sizes, sizes[-1]):
            result = call(x[:size])
    assert program_cache.counts["loaded"] == 1 and not program_cache.counts["compiled"], program_cache.counts
    assert not isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction)
    y = twin(x)
    result.sum().backward(retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        result.sum().backward()
    (2 * chain(y)).sum().backward()
    assert_same(x.grad, y.grad)


OTHERS: dict[str, Callable[[], object]] = {
    "strides": lambda: run(chain, torch.randn(200, 40).t()),
    "shape": lambda: run(chain, torch.randn(40, 201), dynamic=False),
    # `run` copies its inputs, to where they begin at their storage.
    "offset": lambda: compiled(chain)(torch.randn(41, 200)[1:]),
    "dtype": lambda: run(chain, torch.randn(40, 200, dtype=torch.float64)),
    "requires_grad": lambda: run(chain, with_grad(40, 200)),
    "constant": lambda: run(lambda x: F.gelu(x) * 2.0000001 + x, torch.randn(40, 200)),
    "options": lambda: run(chain, torch.randn(40, 200), options={"hand_written": False}),
}


def test_another_program_is_not_found() -> None:
    run(chain, torch.randn(40, 200))
    for name, other in OTHERS.items():
        again()
        other()
        assert program_cache.counts["compiled"] == 1 and not program_cache.counts["loaded"], name


def test_other_modes_and_settings_are_other_programs() -> None:
    x = torch.randn(40, 200)
    run(chain, x)
    contexts: list[Callable[[], Any]] = [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: torch._functorch.config.patch(treat_parameters_as_free_to_save=False),
        deterministic,
    ]
    for number, context in enumerate(contexts):
        again()
        with context():
            run(chain, x)
        assert program_cache.counts["compiled"] == 1, (number, program_cache.counts)


def test_other_versions_and_other_code_are_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 200)
    run(chain, x)
    again()
    monkeypatch.setattr(identity.sources, "digest", lambda *folders: "other code")
    run(chain, x)
    assert program_cache.counts == {"compiled": 1, "kept": 1}


def test_another_outcome_of_a_race_plans_anew(kept_programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raced on a CPU here: a rewrite of the test asks for an outcome."""

    def ask(graph: fx.Graph, target: Target) -> None:
        outcomes.lookup("race")

    monkeypatch.setattr(rewrite("pad_products"), "run", ask)
    x = torch.randn(40, 200)
    run(chain, x)
    (path,) = programs(kept_programs)
    program = program_cache.load(path.stem)
    assert program is not None and program.looked_up == {"race": None}
    again()
    run(chain, x)
    assert program_cache.counts == {"loaded": 1}
    again()
    outcomes.keep("race", Outcome({"ours": 10.0, "theirs": 1.0}))
    run(chain, x)
    assert program_cache.counts == {"compiled": 1, "kept": 1}
    again()
    run(chain, x)
    assert program_cache.counts == {"loaded": 1}


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_damaged_entry_is_made_again(kept_programs: Path, damage: str) -> None:
    x = torch.randn(40, 200)
    first = run(chain, x)
    (path,) = programs(kept_programs)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if damage == "cut off" else content)
    for expected in ({"compiled": 1, "kept": 1}, {"loaded": 1}):
        again()
        torch.testing.assert_close(run(chain, x), first, rtol=0, atol=0)
        assert program_cache.counts == expected


def test_a_program_that_a_full_cache_lost_is_compiled_anew(
    kept_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(chain, torch.randn(40, 200))
    for path in kept_programs.glob("??/*"):
        os.utime(path, (1, 1))
    again()
    monkeypatch.setenv(eviction.VARIABLE, "1K")
    eviction._trimmed.clear()
    run(drops, torch.randn(40, 200))
    (kept_last,) = programs(kept_programs)
    assert kept_last.stat().st_mtime > 1
    for expected in ({"compiled": 1, "kept": 1}, {"loaded": 1}):
        again()
        x = first[1][0]
        torch.testing.assert_close(run(chain, x)[0], first[0], rtol=0, atol=0)
        assert program_cache.counts == expected


@pytest.mark.usefixtures("lenient")
def test_what_cannot_be_used_is_compiled_anew_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: _Compiler, plan: Any) -> Any:
        raise CompilerError("no such luck")

    x = torch.randn(40, 200)
    first = run(chain, x)
    monkeypatch.setattr(_Compiler, "compile_planned", fails)
    again()
    torch.testing.assert_close(run(chain, x), first, rtol=0, atol=0)
    assert program_cache.counts == {"compiled": 1, "kept": 1}
    assert "cannot be used, and is compiled anew: no such luck" in capsys.readouterr().err


def test_what_cannot_be_described_is_not_kept(kept_programs: Path) -> None:
    base = torch.randn(40, 200)
    with torch.library._scoped_library("tilewright_kept", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        cases: dict[str, tuple[Callable[..., Any], list[Any]]] = {
            "shares memory": (lambda a, b: F.gelu(a) + b, [base[:-1], base[1:]]),
            "is a TwoTensor": (lambda x: x * 2 + 1, [TwoTensor(base, base.clone())]),
            "a symbol that is no input": (
                lambda x: F.gelu(x).values(),
                [torch.nested.as_nested_tensor([base[:3], base[3:]], layout=torch.jagged)],
            ),
            "may be another function": (lambda x: F.gelu(torch.ops.tilewright_kept.twice(x)), [base]),
        }
        for reason, (function, inputs) in cases.items():
            again()
            compiled(function)(*inputs)
            assert any(reason in count for count in program_cache.counts), program_cache.counts
    assert not programs(kept_programs)


PROCESS = """
import json, os, sys
import torch
from torch.nn import functional as F
from tilewright.backend import backend
from tilewright.capture import program_cache

def loss(x, w):
    logits = F.dropout(F.gelu(x @ w), 0.2)
    return F.cross_entropy(logits, torch.arange(8)), logits

child = os.fork() if sys.argv[1:] == ["two"] else 0
torch.manual_seed(1)
x, w = torch.randn(8, 16), torch.randn(16, 10, requires_grad=True)
run = torch.compile(loss, backend=backend)
value, logits = run(x, w)
value.backward()
if child:
    os.waitpid(child, 0)
print(json.dumps([value.item(), logits.tolist(), w.grad.tolist(), torch.randn(1).item(), dict(program_cache.counts)]))
"""


def test_processes_find_what_others_compiled(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROCESS)
    # Two at once, by a fork; then one that has other hashes of words.
    printed = [start([str(script), *words]).communicate(timeout=HANG_S)[0] for words in (["two"], [])]
    results, (last,) = [[json.loads(line) for line in lines.splitlines()] for lines in printed]
    assert len(results) == 2 and results[0][:-1] == results[1][:-1] == last[:-1]
    assert all(result[-1].get("compiled") or result[-1].get("loaded") for result in results)
    assert last[-1] == {"loaded": 1}


def run_sizes(function: Callable[..., Any], sizes: list[int], *others: Any, backward: bool = False) -> list[Any]:
    """Results and gradients of one compiled function for inputs [n, 12], and of eager."""
    compiled_function = compiled(function)
    found = []
    for n in sizes:
        torch.manual_seed(n)
        x = with_grad(n, 12) if backward else torch.randn(n, 12)
        mine, plain = [twin(v) for v in (x, *others)], [twin(v) for v in (x, *others)]
        torch._dynamo.mark_dynamic(mine[0], 0)
        results = compiled_function(*mine), function(*plain)
        for result in results if backward else ():
            sum((r * r).sum() for r in (result if isinstance(result, tuple) else (result,))).backward()
        assert_same(results[0], results[1])
        assert_same([x.grad for x in mine], [x.grad for x in plain])
        assert_same(mine, plain)
        found.append([results[0], [x.grad for x in mine]])
    return found


def mixes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(x @ w).view(x.shape[0] * 2, 6)
    return F.layer_norm(h, (6,)) / x.shape[0] + torch.arange(x.shape[0] * 2)[:, None]


def shows_product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = F.gelu(x @ w)
    return h, h.t(), h[1:], x.view(-1), x.t()


def writes_shifted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x[1:] += F.gelu(x)[:-1]
    w.add_(x.sum())
    return x.t(), w * 2


def enlarged(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    # Sizes take part as floats.
    return F.interpolate((x @ w)[None, None], scale_factor=1.5, mode="bilinear") * x.shape[0] ** 0.5


@pytest.mark.parametrize("function", [mixes, shows_product, enlarged])
def test_training_finds_the_program_and_the_plans_of_its_sizes(function: Callable[..., Any]) -> None:
    w = with_grad(12, 12)
    first = run_sizes(function, [5, 8], w, backward=True)
    plans = program_cache.counts["sizes planned"]
    # One for each graph; that one program cannot serve all sizes is kept too, and found at the second size.
    found = Counter({"sizes loaded": 1} if function is enlarged else {})
    assert plans == 2 or function is enlarged
    assert program_cache.counts == {"compiled": 1, "kept": 1, "sizes planned": plans, "sizes kept": plans, **found}
    again()
    second = run_sizes(function, [5, 8], w, backward=True)
    assert program_cache.counts == {"loaded": 1, "sizes loaded": plans + found["sizes loaded"]}
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("function", [mixes, writes_shifted])
def test_inference_finds_the_program_and_its_plan_for_new_sizes_too(function: Callable[..., Any]) -> None:
    w = torch.randn(12, 12)
    run_sizes(function, [5, 8], w)
    assert program_cache.counts == {"compiled": 1, "kept": 1, "sizes planned": 1, "sizes kept": 1}
    again()
    run_sizes(function, [9, 5, 31, 1000], w)  # traced for 5 at first; 1000 is far from it
    assert program_cache.counts == {"loaded": 1, "sizes planned": 1, "sizes kept": 1, "sizes loaded": 1}


def test_a_program_of_two_symbols_is_found() -> None:
    def table(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)[:, None, :] * y[None, :, :]

    def call(rows: int, columns: int) -> None:
        x, y = torch.randn(rows, 12), torch.randn(columns, 12)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_same(compiled(table)(x, y), table(x, y))

    call(5, 8)
    for sizes in ((9, 4), (6, 6)):
        again()
        call(*sizes)
        assert program_cache.counts == {"loaded": 1, "sizes loaded": 1}


def test_other_ranges_are_other_programs() -> None:
    any_size: dict[str, int] = {}
    some = {"min": 4, "max": 100}
    for bounds, expected in ((any_size, "compiled"), (some, "compiled"), (some, "loaded"), (any_size, "loaded")):
        again()
        x = torch.randn(7, 12)
        torch._dynamo.mark_dynamic(x, 0, **bounds)
        compiled(mixes)(x, torch.randn(12, 12))
        assert program_cache.counts[expected] == 1, (bounds, program_cache.counts)


def test_conditions_on_sizes_are_checked_before_each_call(kept_programs: Path) -> None:
    w = torch.randn(12, 12)
    run_sizes(mixes, [5], w)
    (path,) = (
        p for p in kept_programs.rglob(f"*{program_cache.SUFFIX}") if getattr(program_cache.load(p.stem), "entry", b"")
    )
    program = program_cache.load(path.stem)
    assert program is not None
    program_cache.discard(path.stem)
    condition = "L['t0'] % 4 != 3"  # as if a rewrite had asked for it
    guards = f"{program.guards} and {condition}" if program.guards else condition
    program_cache.keep(path.stem, dataclasses.replace(program, guards=guards))
    again()
    run_sizes(mixes, [5, 6, 7], w)
    # 7 does not meet the condition: Dynamo asks for another program, and the kept one is not it.
    assert program_cache.counts["loaded"] == 1 and program_cache.counts["compiled"] == 1, program_cache.counts


def test_a_program_for_one_number_is_not_found_for_another() -> None:
    """AOTAutograd specialises a float where an operator takes no tensor instead, with a condition on its value."""

    def scaled(x: torch.Tensor, least: float) -> torch.Tensor:
        return F.gelu(x).clamp(min=least) * least

    x, function = torch.randn(40, 12), compiled(scaled)
    for least in (0.5, 0.25, 0.125):
        assert_same(function(x, least), scaled(x, least))


def test_the_plans_of_a_program_are_not_those_of_its_successor_with_other_conditions() -> None:
    def first(x: torch.Tensor, columns: int) -> torch.Tensor:
        return F.gelu(x)[:, :columns].sum(1)

    function = compiled(first)
    for columns in (2, 3, 0, 1, 5, 8, 9):
        mine = with_grad(6, 8)
        plain = twin(mine)
        for x, call in ((mine, function), (plain, first)):
            call(x, columns).sum().backward()
        assert_same(mine.grad, plain.grad)
