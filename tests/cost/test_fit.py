"""The model of kernel times: fitted to kernels whose times are known, and where it must say "cheaper"."""

import random
from dataclasses import replace

import pytest

from tilewright.cost.fit import Timed, errors, fit
from tilewright.cost.work import Work, predicted_us, terms
from tilewright.hardware.kernel_times import UNFITTED
from tilewright.hardware.profiles import profile_for

H200 = profile_for("h200")
MIB = 1024**2


def timed(coefficients: tuple[float, ...], noise: float = 0.0) -> list[Timed]:
    """Kernels of one kind on a device of which the truth is known."""
    draw = random.Random(0)
    works = [
        Work("pointwise", size, size // 2, flops, size // 8)
        for size in (MIB // 4, 2 * MIB, 9 * MIB, 30 * MIB, 80 * MIB, 400 * MIB)
        for flops in (0, 40 * size, 400 * size)
    ]
    found = []
    for work in works:
        us = sum(c * term for c, term in zip(coefficients, terms(work, H200), strict=True))
        found.append(Timed("kernel", work, us * draw.uniform(1 - noise, 1 + noise)))
    return found


def test_a_fit_predicts_what_it_was_fitted_to() -> None:
    known = timed((3.0, 0.0, 1.7, 1.2, 0.9, 1.0, 1.0, 1.0, 0.0, 0.0))
    fitted = replace(H200, kernel_times=fit(known, H200))
    (_, middle, most) = errors(known, fitted)["pointwise"]
    assert middle < 0.01 and most < 0.03


def test_noise_of_the_times_does_not_get_into_the_coefficients() -> None:
    truth = (3.0, 0.0, 1.7, 1.2, 0.9, 1.0, 1.0, 1.0, 0.0, 0.0)
    fitted = replace(H200, kernel_times=fit(timed(truth, noise=0.1), H200))
    assert errors(timed(truth), fitted)["pointwise"][2] < 0.1


def test_no_coefficient_is_negative_and_few_kernels_are_not_fitted() -> None:
    fixed = [replace(one, measured_us=5.0) for one in timed((3.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0))]
    assert all(c >= 0 for c in fit(fixed, H200)["pointwise"])
    assert fit(fixed[:3], H200) == {}


@pytest.mark.parametrize("kind", ["pointwise", "rows, two passes", "columns", "no such kind", "tilewright.norm"])
def test_more_bytes_take_longer(kind: str) -> None:
    times = [predicted_us(Work(kind, size, size), H200) for size in (MIB, 16 * MIB, 64 * MIB, 512 * MIB)]
    assert times == sorted(times) and times[0] < times[-1] / 20


def test_a_kernel_that_reads_across_takes_longer_and_so_do_more_passes() -> None:
    along, across = (predicted_us(Work(f"rows, three passes{how}", MIB, MIB), H200) for how in ("", ", transposed"))
    short, long = (predicted_us(Work(f"{how}rows, three passes", 512 * MIB, MIB), H200) for how in ("", "long "))
    assert along < across and short < long


def test_a_call_on_a_cpu_starts_as_small_operators_were_measured_to() -> None:
    cpu, work = replace(H200, device="cpu", kernel_times={}, launch_us=15.0), Work("pointwise", 0, 4)
    assert predicted_us(work, cpu) == pytest.approx(15.0, rel=1e-3)
    assert predicted_us(work, cpu, with_start=False) < 0.1
    fitted = replace(cpu, kernel_times={"pointwise": (3.0, *UNFITTED[1:])})
    assert predicted_us(work, fitted) == pytest.approx(3.0, rel=1e-3)
