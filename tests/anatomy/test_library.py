"""A kernel as the profiler's trace tells it."""

from __future__ import annotations

import torch

from tilewright.anatomy.library import generated_cpp, keeping_code


def test_inductor_s_switches_are_set_back() -> None:
    from torch._inductor import config

    before = config.force_disable_caches
    with keeping_code():
        assert config.force_disable_caches is True
    assert config.force_disable_caches == before


def test_what_inductor_generates_for_a_cpu_is_shown() -> None:
    compiled = torch.compile(lambda x: (x.exp() + 1).sum(-1), dynamic=False)
    (launch, *_) = generated_cpp(lambda: compiled(torch.randn(8, 16)))
    assert launch.language == "cpp" and "exp" in launch.source and "for(" in launch.source
