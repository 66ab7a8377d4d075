"""A kernel as the profiler's trace tells it."""

from tilewright.pytorch.compiler import keeping_code


def test_inductor_s_switches_are_set_back() -> None:
    from torch._inductor import config

    before = config.force_disable_caches
    with keeping_code():
        assert config.force_disable_caches is True
    assert config.force_disable_caches == before
