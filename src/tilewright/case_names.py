"""Loads the case that a user names as `file.py:name` or `package.module:name`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from tilewright.records.case import Case, CopyOf
from tilewright.records.errors import InputError, TargetError, UsageError
from tilewright.records.input_grammar import parse_arguments

if TYPE_CHECKING:
    from torch import nn

_PACKAGE = Path(__file__).parent
EXAMPLES = _PACKAGE / "examples" if (_PACKAGE / "examples").is_dir() else _PACKAGE.parents[1] / "examples"
"""In a wheel inside of the package, in a checkout beside `src`. Targets `examples/...` are found from any folder."""
_MISSING = object()
_SHOWN_NAMES = 8


def load_case(target: str, inputs: str | None = None, *, training: bool | None = None) -> Case:
    """The case that `target` names.

    `target` is `path/file.py:name` or `package.module:name`; `name` is a `Case`, a function that
    returns a `Case` when called without arguments, or, with `inputs` such as
    `"bf16[B=16,S=1024,D=768], i64[S]<32000"` (`docs/inputs.md`), an `nn.Module` (class, instance, or a function without
    arguments that makes one) or a function. `training` says whether the backward pass belongs to the case. By default
    a `Case` keeps its own setting, and anything else is for inference.

    The user's file is executed, as `import` would do, with its folder on `sys.path`.

    Raises `UsageError` (malformed target or `inputs`; `inputs` missing, or given for a `Case`), `TargetError`
    (no such file, module or name; a file that fails on import; a name that is none of the above) or
    `InputError` (more or fewer inputs than the module or function takes).
    """
    case = _case_from(load_object(target), target.rpartition(":")[2], target, inputs)
    return case if training is None else dataclasses.replace(case, training=training)


def load_object(target: str) -> object:
    """The object that `target` names, of any type. Runs the user's file and raises like `load_case`."""
    place, colon, name = target.rpartition(":")
    if not colon and target.endswith(".py") and Path(target).is_file():
        names = _target_names(_load_file(Path(target)))
        raise UsageError(f"target {target} lacks a name: write {target}:NAME; it has {names}")
    if not (colon and place and name):
        raise UsageError(f"target {target!r} is not of the form file.py:NAME or package.module:NAME")
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(Path(place)) if is_file else _load_module(place)
    found = getattr(module, name, _MISSING)
    if found is _MISSING:
        raise TargetError(_no_such_name(module, place, name))
    return found


def _load_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise TargetError(
            f"{str(path)!r} is a folder; name a file in it, or for a package its module, package.module:NAME"
        )
    if path.is_symlink() and not path.exists():
        raise TargetError(f"{str(path)!r} is a symbolic link to a file that does not exist")
    if not path.is_file() and path.parts[:1] == ("examples",) and (EXAMPLES.parent / path).is_file():
        path = EXAMPLES.parent / path
    if not path.is_file():
        siblings = path.parent.glob("*.py") if path.parent.is_dir() else ()
        near = get_close_matches(path.name, [sibling.name for sibling in siblings], n=3)
        hint = "; did you mean " + " or ".join(str(path.parent / name) for name in near) + "?" if near else ""
        raise TargetError(f"no file {str(path)!r} (looked in {Path.cwd()}){hint}")
    path = path.resolve()
    # The hash keeps the file from shadowing a module of the same name (`attention.py`, `types.py`).
    module_name = re.sub(r"\W", "_", path.stem) + "_" + hashlib.sha256(bytes(path)).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{str(path)!r} is not a Python file; a file target ends with .py")
    _prepend_to_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    # Dynamo, pickle and dataclasses find a function's module in sys.modules.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise TargetError(f"{path} failed on import {error_location(error)}") from error
    return module


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is not a module name; a target is file.py:NAME or package.module:NAME")
    _prepend_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"no module {error.name!r} (looked in {Path.cwd()} and the installed packages); "
                "to name a file, write path/file.py:NAME"
            ) from error
        raise TargetError(f"module {name!r} failed on import {error_location(error)}") from error


def _prepend_to_path(folder: Path) -> None:
    """As `python file.py` and `python -m module` do, so that the user's imports work."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def error_location(error: BaseException) -> str:
    """`at model.py:12: x = y`, the innermost line of the user's code, and below it the error."""
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return f"at {error.filename}:{error.lineno}: {line}\n  {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if is_user_file(frame.filename)), frames[-1])
    return f"at {frame.filename}:{frame.lineno}: {frame.line}\n  {type(error).__name__}: {' '.join(str(error).split())}"


def is_user_file(filename: str) -> bool:
    """Whether a file is outside Python's library, installed packages and tilewright."""
    others = (sysconfig.get_path("stdlib"), "<frozen", str(Path(__file__).parent))
    return not filename.startswith(others) and not re.search(r"/(site|dist)-packages/", filename)


def _no_such_name(module: ModuleType, place: str, name: str) -> str:
    near = get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=3)
    if near:
        return f"{place} has no {name!r}; did you mean {' or '.join(near)}?"
    return f"{place} has no {name!r}; it has {_target_names(module)}"


def _target_names(module: ModuleType) -> str:
    """The names in a module that can be targets, at most eight."""
    from torch import nn

    names = [
        key
        for key, value in vars(module).items()
        if isinstance(value, Case | nn.Module)
        or (callable(value) and getattr(value, "__module__", None) == module.__name__)
    ]
    listed = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
    return listed or "no case, module or function"


def _case_from(found: object, name: str, target: str, inputs: str | None) -> Case:
    from torch import nn

    if isinstance(found, Case):
        return _without_inputs(found, target, inputs)
    if isinstance(found, nn.Module):
        return _case_of_module(found, name, target, inputs)
    if isinstance(found, type):
        if not issubclass(found, nn.Module):
            raise TargetError(_wrong_kind(found, target))
        if not accepts(found, ()):
            raise TargetError(
                f"{target} is a module that needs arguments, {name}{signature_of(found)}; "
                "name an instance of it, or a function that returns a Case"
            )
        forward = functools.partial(found.forward, None)  # None stands for `self`
        return _with_inputs(found, forward, name, target, inputs)
    if not callable(found):
        raise TargetError(_wrong_kind(found, target))
    if _is_factory(found, target, inputs):
        made = _call_factory(found, target)
        if isinstance(made, Case):
            return _without_inputs(made, target, inputs)
        if isinstance(made, nn.Module):
            return _case_of_module(made, name, target, inputs)
    return _with_inputs(lambda: found, found, name, target, inputs)


def _case_of_module(module: nn.Module, name: str, target: str, inputs: str | None) -> Case:
    return _with_inputs(CopyOf(module), module.forward, name, target, inputs)


def _without_inputs(case: Case, target: str, inputs: str | None) -> Case:
    if inputs is not None:
        raise UsageError(f"{target} is a case, which has its own inputs; leave out --inputs {inputs!r}")
    return case


def _with_inputs(
    build: Callable[[], Callable[..., Any]], call: Callable[..., Any], name: str, target: str, inputs: str | None
) -> Case:
    """A case for a module or function; the inputs must fit the signature of `call`."""
    if inputs is None:
        raise UsageError(
            f'{target} is not a case, so it needs --inputs "DTYPE[NAME=SIZE,...]" for '
            f'{name}{signature_of(call)}, e.g. --inputs "bf16[B=16,S=1024,D=768]"'
        )
    positional, keywords = _parsed(inputs, target)
    if not accepts(call, positional, keywords):
        count = len(positional) + len(keywords)
        raise InputError(
            f"{target} takes {name}{signature_of(call)}, not the {count} input{'s' * (count > 1)} {inputs!r}"
        )
    return Case(name, build, positional, training=False, keywords=keywords)


def _parsed(inputs: str, target: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments that `inputs` describes; `@name` is a value of the target's file."""
    place = target.rpartition(":")[0]
    return parse_arguments(inputs, lambda name: load_object(f"{place}:{name}"))


def _is_factory(found: Callable[..., object], target: str, inputs: str | None) -> bool:
    """Whether to call `found` for its case or module.

    It is annotated to return a case, or does not take the `inputs`, or there are none and no annotation.
    """
    if not accepts(found, ()):
        return False
    if inputs is not None and not accepts(found, *_parsed(inputs, target)):
        return True
    try:
        returns = inspect.signature(found).return_annotation
    except ValueError:
        return False
    if returns is inspect.Signature.empty:
        return inputs is None
    return returns is Case or (isinstance(returns, str) and returns.rpartition(".")[2] == "Case")


def _call_factory(factory: Callable[[], object], target: str) -> object:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target}() failed {error_location(error)}") from error


def accepts(
    function: Callable[..., object], arguments: Iterable[object], keywords: Mapping[str, object] = MappingProxyType({})
) -> bool:
    """Whether `function(*arguments, **keywords)` fits its signature; built-in functions without one accept all."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def signature_of(function: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(...)"


def _wrong_kind(found: object, target: str) -> str:
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
    return f"{target} is {kind}, not a Case, an nn.Module or a function"
