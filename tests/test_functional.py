"""`tilewright.functional`: every name is there, documented, and computes what PyTorch computes."""

import pytest

import tilewright
from tests import processes
from tilewright import functional


def test_the_package_lists_what_it_offers() -> None:
    assert set(dir(tilewright)) == {*tilewright.__all__, "__version__"}
    assert tilewright.functional is functional and set(dir(functional)) == set(functional.__all__)
    assert all(getattr(tilewright, name) is not None for name in dir(tilewright))


@pytest.mark.parametrize("name", functional.__all__)
def test_every_name_is_a_documented_function(name: str) -> None:
    function = getattr(functional, name)
    assert callable(function)
    assert function.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sotfmax'"):
        _ = functional.sotfmax


@pytest.mark.parametrize("modules", ["tilewright.functional", "tilewright.store", "tilewright.report.page"])
def test_importing_loads_nothing_heavy(modules: str) -> None:
    heavy = "{'torch', 'duckdb', 'sympy', 'jinja2', 'triton', 'tilewright.kernels'} & set(sys.modules)"
    assert processes.run(["-c", f"import sys, {modules}; print(sorted({heavy}))"])[0] == "[]\n"
