"""Whether CUDA's devices are played by the CPU (tests/device/runtime/), and what such a device does on demand."""

import contextlib
import ctypes
from enum import IntEnum

import torch

import reef  # noqa: F401 - with it come the operators of a played device

PLAYED = torch.cuda.is_available() and torch.cuda.get_device_name(0) == "played device"


class Work(IntEnum):
    KERNEL = 0
    COPY = 1
    COMMUNICATION = 2


_runtime = ctypes.CDLL(None)
if PLAYED:
    _runtime.played_cuda_seed.argtypes = [ctypes.c_uint64]
    _runtime.played_cuda_delay_stream.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    _runtime.played_cuda_host_bytes.restype = ctypes.c_size_t
    _runtime.played_cuda_host_waits.restype = ctypes.c_uint64


@contextlib.contextmanager
def delays(seed, **mean_us):
    """Lets works wait before they begin, up to twice the mean of their kind: `delays(3, kernel=200, copy=1000)`."""
    _runtime.played_cuda_seed(seed)
    for kind, microseconds in mean_us.items():
        _runtime.played_cuda_delay(Work[kind.upper()], microseconds)
    try:
        yield
    finally:
        for kind in Work:
            _runtime.played_cuda_delay(kind, 0)


@contextlib.contextmanager
def slow_stream(stream, microseconds):
    """Lets each work of this stream wait so long."""
    _runtime.played_cuda_delay_stream(stream.cuda_stream, microseconds)
    try:
        yield
    finally:
        _runtime.played_cuda_delay_stream(stream.cuda_stream, 0)


@contextlib.contextmanager
def failing_allocations(succeed, fail=1 << 30, host=False):
    """Lets `succeed` allocations of device memory (or of page-locked memory) succeed, and `fail` of them fail."""
    set_refusals = _runtime.played_cuda_fail_host_allocations if host else _runtime.played_cuda_fail_allocations
    set_refusals(succeed, fail)
    try:
        yield
    finally:
        set_refusals(0, 0)


def host_bytes():
    """Bytes of page-locked memory that there are."""
    return _runtime.played_cuda_host_bytes()


def host_waits():
    """How often the program has waited for a stream, an event or a device."""
    return _runtime.played_cuda_host_waits()


def break_device(index, error=700):
    """Lets each call that concerns the device fail from now on, as after a fault in a kernel (cudaErrorIllegalAddress)."""
    _runtime.played_cuda_break(index, error)
