"""Copies off a CUDA device, on a recording stand-in that does what streams do: nothing until somebody waits for them."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from reflogp.scoring.torch_engine.device import Mark, copy_to_host


class Cuda:
    """A machine of several GPUs. Each has one stream, a list of work that is done when somebody waits for it."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, list] = {number: [] for number in range(4)}

    @contextlib.contextmanager
    def as_current(self, device):
        before, self.device = self.device, torch.device(device).index or 0
        try:
            yield
        finally:
            self.device = before

    def current_stream(self, device=None):
        return self.streams[self.device if device is None else torch.device(device).index or 0]

    def event(self, enable_timing=False):
        return Event(self, enable_timing)


class Event:
    def __init__(self, cuda: Cuda, enable_timing: bool) -> None:
        self._cuda, self._enable_timing = cuda, enable_timing
        self._before: tuple[list, int] = ([], 0)

    def record(self, stream=None) -> None:
        stream = self._cuda.current_stream() if stream is None else stream
        self._before = (stream, len(stream))

    def query(self) -> bool:
        return not self._before[0][: self._before[1]]

    def elapsed_time(self, end) -> float:
        assert self._enable_timing and end._enable_timing and self.query() and end.query()
        assert self._before[0] is end._before[0], "events of two streams"
        return 250.0

    def synchronize(self) -> None:
        stream, count = self._before
        for work in stream[:count]:
            work()
        del stream[:count]


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a GPU; its values lie here."""

    @staticmethod
    def __new__(cls, values, device, cuda):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)
        made.values, made.cuda = values, cuda
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.copy_.default, f"{function} is not a copy to the host"
        host, source, non_blocking = args
        assert non_blocking and type(host) is torch.Tensor
        source.cuda.streams[source.device.index].append(lambda: host.set_(source.values.clone()))
        return return_and_correct_aliasing(function, args, kwargs or {}, host)


@pytest.fixture
def cuda(monkeypatch):
    machine, empty = Cuda(), torch.empty
    monkeypatch.setattr(torch.cuda, "device", machine.as_current)
    monkeypatch.setattr(torch.cuda, "current_stream", machine.current_stream)
    monkeypatch.setattr(torch.cuda, "Event", machine.event)

    def pinned(*size, pin_memory=False, **keywords):
        return torch.full(*size, float("nan"), **keywords) if pin_memory else empty(*size, **keywords)

    monkeypatch.setattr(torch, "empty", pinned)
    return machine


@pytest.mark.parametrize("current", range(2))
@pytest.mark.parametrize("device", range(4))
def test_the_event_behind_a_copy_is_on_the_stream_of_the_device_that_has_the_values(device, current, cuda):
    values = torch.arange(5.0)
    with cuda.as_current(f"cuda:{current}"):
        began = Mark(torch.device(f"cuda:{device}"))
        host, copied = copy_to_host(OnDevice(values, f"cuda:{device}", cuda))
        assert host.isnan().all() and not copied.has_passed(), "nobody has waited for the copy"
        copied.wait()
        assert copied.has_passed() and copied.seconds_since(began) == 0.25
        assert torch.equal(host, values)
        assert cuda.device == current, "the caller's device is as it was"


def test_values_on_a_cpu_are_there_at_once():
    values = torch.arange(5.0)
    host, copied = copy_to_host(values)
    assert host is values and copied.has_passed() and copied.seconds_since(copied) == 0
