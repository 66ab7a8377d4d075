"""Targets `file.py:name` and `package.module:name`, and the error for each mistake."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewright.case_names import load_case
from tilewright.measure.inputs import make_inputs
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import InputError, TargetError, TilewrightError, UsageError

MODEL = """\
import torch
from torch import nn
from tilewright.records.case import Case, InputSpec

def double(x):
    return 2 * x

def add(x, y, *, alpha=1.0):
    return x + alpha * y

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x

net = Net()
doubled = Case("doubled", lambda: double, [InputSpec.parse("fp32[N=4]")], training=False)

def factory(n=5):
    return Case("made", lambda: double, [InputSpec.parse(f"fp32[N={n}]")])

def annotated(n: int = 5) -> "Case":
    return factory(n)

def made_net():
    return Net(4)

def broken():
    return [].pop()

def optional(x=None):
    if x is None:
        raise RuntimeError("must never be called without inputs that are there")
    return x

def script() -> None:
    raise RuntimeError("must never be called")

width = 3

class Plain:
    pass
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading prepends folders to `sys.path`; no test sees those of another."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path}/model.py"


def message(error: type[TilewrightError], target: str, inputs: str | None = None) -> str:
    """The message of `load_case`; the error is of exactly this class, which sets the exit code."""
    with pytest.raises(TilewrightError) as raised:
        load_case(target, inputs)
    assert type(raised.value) is error
    return str(raised.value)


def test_a_case_is_used_as_it_is(model: str) -> None:
    case = load_case(f"{model}:doubled")
    assert (case.name, case.training) == ("doubled", False)
    assert case.inputs == [InputSpec("float32", (4,), ("N",))]
    assert torch.equal(case.build()(torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["doubled", "factory"])
def test_training_overrides_the_case(model: str, name: str, training: bool) -> None:
    assert load_case(f"{model}:{name}", training=training).training is training


@pytest.mark.parametrize("name", ["factory", "annotated"])
def test_a_factory_is_called(model: str, name: str) -> None:
    assert load_case(f"{model}:{name}").name == "made"


def test_a_function_with_inputs(model: str) -> None:
    case = load_case(f"{model}:add", "bf16[B=2,D=3], bf16[3]")
    assert case == Case(
        "add",
        case.build,
        (InputSpec("bfloat16", (2, 3), ("B", "D")), InputSpec("bfloat16", (3,), (None,))),
        training=False,
    )
    assert torch.equal(case.build()(torch.ones(2, 3), torch.ones(3)), torch.full((2, 3), 2.0))


def test_a_function_with_inputs_is_not_called_to_see_what_it_returns(model: str) -> None:
    assert load_case(f"{model}:optional", "fp32[N=4]").name == "optional"


@pytest.mark.parametrize(("name", "inputs"), [("double", "i64[N=4]"), ("double", "f32[N=4]"), ("Net", "f32[B=2,D=3]")])
def test_what_is_no_case_is_for_inference(model: str, name: str, inputs: str) -> None:
    assert not load_case(f"{model}:{name}", inputs).training
    assert load_case(f"{model}:{name}", inputs, training=True).training


def test_a_module_class_is_built_afresh(model: str) -> None:
    case = load_case(f"{model}:Net", "fp32[B=2,D=3]")
    torch.manual_seed(0)
    first = case.build()
    torch.manual_seed(0)
    second = case.build()
    assert isinstance(first, nn.Module) and isinstance(second, nn.Module)
    assert first is not second
    assert torch.equal(first.linear.weight, second.linear.weight)
    assert case.name == "Net"


def test_a_module_instance_is_copied(model: str) -> None:
    case = load_case(f"{model}:net", "fp32[B=2,D=3]")
    first, second = case.build(), case.build()
    assert isinstance(first, nn.Module) and isinstance(second, nn.Module)
    nn.init.zeros_(first.linear.weight)
    assert second.linear.weight.any()
    assert torch.equal(second.linear.weight, case.build().linear.weight)


def test_a_function_that_makes_a_module(model: str) -> None:
    case = load_case(f"{model}:made_net", "fp32[B=2,D=4]")
    first, second = case.build(), case.build()
    assert isinstance(first, nn.Module)
    assert torch.equal(first.linear.weight, second.linear.weight)
    assert first.linear.weight is not second.linear.weight
    with pytest.raises(UsageError, match=r"it needs --inputs .* for made_net\(x\)"):
        load_case(f"{model}:made_net")


def test_a_builtin_that_has_no_signature() -> None:
    case = load_case("torch.nn.functional:gelu", "fp32[N=4]")
    assert torch.equal(case.build()(torch.ones(4)), torch.nn.functional.gelu(torch.ones(4)))


def test_a_module_is_found_in_the_working_folder(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(model).parent / "pack_of_models"
    folder.mkdir()
    Path(model).rename(folder / "model.py")
    monkeypatch.chdir(folder.parent)
    importlib.invalidate_caches()
    assert load_case("pack_of_models.model:doubled").name == "doubled"


def test_a_file_imports_its_neighbours_and_shadows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour_of_string.py").write_text("from tilewright.records.case import Case\n")
    (tmp_path / "string.py").write_text("from neighbour_of_string import Case\ncase = Case('s', lambda: abs, [])\n")
    monkeypatch.chdir(tmp_path)
    assert load_case("./string.py:case").name == "s"
    assert sys.modules["string"].__file__ != str(tmp_path / "string.py")


def test_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    cases = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "model.py"
        file.write_text(f"LABEL = {folder!r}\n{MODEL}")
        cases.append(load_case(f"{file}:doubled"))
    labels = [sys.modules[case.build.__module__].LABEL for case in cases]
    assert labels == ["a", "b"]


def test_missing_file(model: str) -> None:
    said = message(TargetError, model.replace("model", "modle") + ":net")
    assert "no file" in said and f"did you mean {model}?" in said
    assert "looked in " in message(TargetError, "no/such/folder/model.py:net")


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    assert "not a Python file" in message(TargetError, f"{tmp_path}/model.txt:net")
    assert "is a folder" in message(TargetError, f"{tmp_path}/:net")


def test_a_file_with_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    assert message(TargetError, f"{tmp_path}/empty.py:net").endswith("it has no case, module or function")


@pytest.mark.parametrize(
    ("source", "line", "fault"),
    [
        ("x = 1\ny = x / 0\n", "2: y = x / 0", "ZeroDivisionError: division by zero"),
        ("import nowhere_at_all\n", "1: import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("def f(:\n", "1: def f(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)\n", "1: raise SystemExit(3)", "SystemExit: 3"),
        # The fault surfaces inside torch, inside the standard library, inside tilewright: still this line.
        ("import torch\ntorch.nn.Linear(-1, 2)\n", "2: torch.nn.Linear(-1, 2)", "RuntimeError: "),
        ("import json\njson.loads('[')\n", "2: json.loads('[')", "JSONDecodeError: "),
        (
            "from tilewright.records.case import InputSpec\nInputSpec.parse('fp32')\n",
            "2: InputSpec.parse('fp32')",
            "UsageError: input 'fp32' lacks the sizes of fp32",
        ),
    ],
)
def test_a_file_that_fails_on_import(tmp_path: Path, source: str, line: str, fault: str) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(source)
    said = message(TargetError, f"{file}:net")
    assert said.startswith(f"{file} failed on import at {file}:{line}\n  ")
    assert fault in said.splitlines()[1]
    assert not [name for name in sys.modules if name.startswith("faulty_")]


def test_a_module_that_fails_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_module.py").write_text("import nowhere_at_all\n")
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    said = message(TargetError, "faulty_module:net")
    assert f"failed on import at {tmp_path}/faulty_module.py:1: import nowhere_at_all" in said


def test_ctrl_c_during_import_is_no_fault_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_case(f"{tmp_path}/stopped.py:net")


NOT_A_TARGET = "not a Case, an nn.Module or a function"
THREE = "fp32[N=4], fp32[N=4], fp32[N=4]"


@pytest.mark.parametrize(
    ("target", "inputs", "error", "words"),
    [
        # Each `{m}` is the file.
        *(
            (target, None, UsageError, "file.py:NAME or package.module:NAME")
            for target in ("model", ":name", "", "a b:c")
        ),
        ("model.py:", None, UsageError, "file.py:NAME or package.module:NAME"),
        ("nowhere_at_all.model:net", None, TargetError, "no module 'nowhere_at_all'"),
        ("tilewright.nowhere:net", None, TargetError, "no module 'tilewright.nowhere'"),
        ("{m}:double_d", None, TargetError, "{m} has no 'double_d'; did you mean doubled"),
        ("{m}:xyzzy", None, TargetError, "it has double, add, Net, Wide, net, doubled, factory, annotated, …"),
        ("{m}", None, UsageError, "target {m} lacks a name: write {m}:NAME; it has double, add, Net"),
        ("{m}:width", None, TargetError, "{m}:width is of type int, " + NOT_A_TARGET),
        ("{m}:width", "fp32[N=4]", TargetError, "{m}:width is of type int, " + NOT_A_TARGET),
        ("{m}:Plain", None, TargetError, "{m}:Plain is the class Plain, " + NOT_A_TARGET),
        ("{m}:torch", "fp32[N=4]", TargetError, "{m}:torch is of type module, " + NOT_A_TARGET),
        ("{m}:Wide", "fp32[N=4]", TargetError, "needs arguments, Wide(width)"),
        ("{m}:add", None, UsageError, "for add(x, y, *, alpha=1.0), e.g. --inputs"),
        ("{m}:Net", None, UsageError, "for Net(x), e.g. --inputs"),
        ("{m}:net", None, UsageError, "for net(x), e.g. --inputs"),
        ("{m}:script", None, UsageError, "for script() -> None, e.g. --inputs"),
        ("{m}:doubled", "fp32[N=4]", UsageError, "leave out --inputs 'fp32[N=4]'"),
        ("{m}:annotated", "fp32[N=4]", UsageError, "leave out --inputs 'fp32[N=4]'"),
        ("{m}:double", "fp31[N=4]", UsageError, "fp31[N=4]"),
        *((f"{{m}}:{name}", THREE, InputError, f"not the 3 inputs {THREE!r}") for name in ("add", "Net", "net")),
        ("{m}:broken", None, TargetError, "{m}:broken() failed at {m}:"),
    ],
)
def test_a_mistake_is_named(
    model: str, target: str, inputs: str | None, error: type[TilewrightError], words: str
) -> None:
    assert words.format(m=model) in message(error, target.format(m=model), inputs)


def inputs_of(*specs: str, seed: int = 0, requires_grad: bool = False) -> list[torch.Tensor]:
    case = Case("inputs", lambda: abs, [InputSpec.parse(spec) for spec in specs])
    return make_inputs(case, seed=seed, device="cpu", requires_grad=requires_grad)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_floats_are_standard_normal(dtype: str) -> None:
    (x,) = inputs_of(f"{dtype}[N=211,M=509]")
    assert x.dtype is getattr(torch, InputSpec.parse(f"{dtype}[1]").dtype) and x.is_contiguous()
    exact = x.double()
    standard_error = (211 * 509) ** -0.5
    assert abs(exact.mean()) < 5 * standard_error
    assert abs(exact.var() - 1) < 5 * 2**0.5 * standard_error + torch.finfo(x.dtype).eps


@pytest.mark.parametrize("dtype", ["i64", "i32", "i8", "u8"])
@pytest.mark.parametrize(("bounds", "values"), [("", range(2)), ("<8", range(8)), (">=3<6", range(3, 6))])
def test_integers_cover_their_range(dtype: str, bounds: str, values: range) -> None:
    (x,) = inputs_of(f"{dtype}[N=999]{bounds}", requires_grad=True)
    assert x.unique().tolist() == list(values)
    assert not x.is_floating_point() and not x.requires_grad


def test_bools_are_fair() -> None:
    (x,) = inputs_of("bool[N=9999]")
    assert x.dtype is torch.bool
    assert abs(int(x.sum()) - 4999.5) < 5 * 9999**0.5 / 2


def test_the_seed_alone_decides() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = inputs_of("fp32[N=7]", "i64[N=7]", "fp32[N=7]", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = inputs_of("fp32[N=7]", "i64[N=7]", "fp32[N=7]", seed=3)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(first[0], inputs_of("fp32[N=7]", seed=4)[0])


@pytest.mark.parametrize("shape", ["", "0", "3,0,2", "1"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "i64", "bool"])
def test_any_shape(dtype: str, shape: str) -> None:
    (x,) = inputs_of(f"{dtype}[{shape}]", requires_grad=True)
    assert list(x.shape) == [int(size) for size in shape.split(",") if size]
    assert x.requires_grad is x.is_floating_point() and x.is_leaf
