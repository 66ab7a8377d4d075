"""The lessons of docs/learn, by the name that `tilewright check` takes; en.toml and zh.toml have their words."""

from __future__ import annotations

from .lesson import Lesson, Question
from .truths import (
    bound,
    counted,
    floor_ratio,
    launches,
    products,
    recorded_ratio,
    resident,
    score_passes,
    slowest_softmax_steps,
    softmax_steps,
)

_SOFTMAX = "naive_softmax.py:softmax"
_GELU = "manual_gelu.py:gelu"
_ATTENTION = "attention.py:attention"
_BLOCK = "transformer_block.py:block_no_dropout"
_STEPS = ("max", "sub", "exp", "sum", "div")
_BOUNDS = ("compute-bound", "DRAM-bound", "cache-bound", "latency-bound", "launch-bound")
LAUNCH_US, SHORT_US, LONG_US = 6.4, 2, 14
"""A launch of an H200's host, and two kernels."""

LESSONS = {
    "profiling": Lesson(
        (
            Question("operators", lambda: len(launches(_SOFTMAX, "before"))),
            Question("calls", lambda: 200.0 * len(launches(_SOFTMAX, "before"))),
            Question("slowest", slowest_softmax_steps, choices=_STEPS),
            Question("div_over_sum", lambda: softmax_steps()["div"] / softmax_steps()["sum"], factor=2.5),
        )
    ),
    "softmax": Lesson(
        (
            Question("reads_naive", counted(_SOFTMAX, "before", "reads")),
            Question("writes_naive", counted(_SOFTMAX, "before", "writes")),
            Question("reads_fused", counted(_SOFTMAX, "after", "reads")),
            Question("writes_fused", counted(_SOFTMAX, "after", "writes")),
            Question("times_faster", lambda: floor_ratio(_SOFTMAX), factor=1.05),
            Question("bound", lambda: bound(_SOFTMAX, "exp"), choices=_BOUNDS),
        ),
        {"N": 4000, "M": 5000},
        operator="softmax",
    ),
    "launches": Lesson(
        (
            Question("launch_bound_us", lambda: 1000 * LAUNCH_US),
            Question("gpu_bound_us", lambda: LAUNCH_US + 1000 * LONG_US),
            Question("with_item_us", lambda: 1000 * (LAUNCH_US + LONG_US)),
            Question("item_costs_percent", lambda: 100 * LAUNCH_US / (100 * LONG_US), factor=1.1),
        )
    ),
    "tiles": Lesson(
        (
            Question("programs", lambda: -(-1000 // 16)),
            Question("tiles", lambda: 512 // 64),
            Question("resident", lambda: resident(threads=128, registers=32, shared=32)),
            Question("waves", lambda: 63 / (132 * resident(threads=128, registers=32, shared=32)), factor=1.02),
            Question("limit", lambda: ("latency-bound",), choices=_BOUNDS),
        )
    ),
    "gelu": Lesson(
        (
            Question("launches_steps", counted(_GELU, "before", "launches")),
            Question("reads_steps", counted(_GELU, "before", "reads")),
            Question("traffic_fused", lambda: counted(_GELU, "after", "reads")() + counted(_GELU, "after", "writes")()),
            Question("steps_over_library", recorded_ratio("gelu", "16384x16384 bf16", "eager", "torch"), factor=1.3),
            Question(
                "cuda_over_generated",
                recorded_ratio("gelu", "16384x16384 bf16", "tilewright-cuda", "tilewright"),
                factor=1.1,
            ),
        ),
        {"N": 4096, "M": 4096},
        operator="gelu",
    ),
    "ladder": Lesson(
        (
            Question("flops", lambda: 2 * 4096.0**3),
            Question("reads_textbook", lambda: 2 * 4096.0**3),
            Question("reads_tiled", lambda: 2 * 4096.0**3 / 128),
            Question("intensity", lambda: 2 * 4096.0**3 / (3 * 4096.0**2 * 2)),
            Question("bound", lambda: ("compute-bound",), choices=_BOUNDS),
            Question("softmax_rungs", recorded_ratio("softmax", "32768x8192 bf16", "torch", "tilewright"), factor=1.3),
        ),
        {"N": 4096},
    ),
    "attention": Lesson(
        (
            Question("score_passes", lambda: score_passes(_ATTENTION)),
            Question("flops", lambda: sum(row.cost.flops for row in products(_ATTENTION))),
            Question("writes_flash", counted(_ATTENTION, "after", "writes"), factor=1.02),
            Question("growth", lambda: 64.0),
            Question("backward_over_forward", lambda: 2.5),
        ),
        {"B": 32, "N": 1024, "d": 128},
    ),
    "block": Lesson(
        (
            Question("products", lambda: len(products(_BLOCK))),
            Question("launches_before", counted(_BLOCK, "before", "launches"), factor=1.15),
            Question("launches_after", counted(_BLOCK, "after", "launches"), factor=1.15),
            Question("flops_saved", lambda: 0.0),
        )
    ),
}
