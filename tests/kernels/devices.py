"""Limits of GPUs that are not there, for schedules and machine code made without one."""

from tilewright.hardware.architectures import DeviceLimits, stated_limits


def limits(capability: str) -> DeviceLimits:
    """Limits of a device of this compute capability (`9.0`) with as many multiprocessors as an H200."""
    return stated_limits(capability, multiprocessors=132, l2_bytes=60 * 2**20)


H200 = limits("9.0")
