"""C++ built in the background: one build for many callers, and one clear line where there can be none."""

from pathlib import Path

import pytest

from tilewright.launch.extension import Extension
from tilewright.records import cxx
from tilewright.records.errors import CompilerError

SOURCE = """
#include <Python.h>
namespace {
PyObject* seven(PyObject*, PyObject*) { return PyLong_FromLong(7); }
PyMethodDef methods[] = {{"seven", seven, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilewright_small", nullptr, -1, methods};
}
PyMODINIT_FUNC PyInit_tilewright_small() { return PyModule_Create(&module); }
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tilewright.records.errors._warned", set())


def small(folder: Path, text: str = SOURCE) -> Extension:
    source = folder / "small.cpp"
    source.write_text(text)
    return Extension(source, "calls cost more")


def test_a_module_comes_once_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small(tmp_path)
    assert not made.wait(0)
    assert made.module() is None or made.found
    assert made.wait()
    module = made.module()
    assert module is not None and module.seven() == 7
    monkeypatch.setattr(cxx, "compile_to", lambda *_: pytest.fail("it is in the cache"))
    other = small(tmp_path)
    other.module()
    assert other.wait()


def test_without_a_compiler_python_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    made = small(tmp_path)
    for _ in range(2):
        assert made.module() is None
        assert not made.wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tilewright: calls cost more: no C++ compiler: ")


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match=r"failed with exit code 1: .*none"):
        small(tmp_path, "int x = none;\n").built()
    monkeypatch.setenv("TILEWRIGHT_COMPILE_LIMIT", "0.001")
    with pytest.raises(CompilerError, match="was stopped"):
        small(tmp_path).built()


def test_a_damaged_entry_is_built_again(tmp_path: Path) -> None:
    path = small(tmp_path).built()
    path.write_bytes(path.read_bytes()[:-100])
    made = small(tmp_path)
    made.module()
    assert made.wait() and made.found is not None and made.found.seven() == 7


def test_what_is_no_module_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = small(tmp_path, "int x;\n")
    made.module()
    assert not made.wait()
    assert "calls cost more: " in capsys.readouterr().err
