"""Runs CudaDeviceCopies without a GPU: streams work late, in any order that is allowed.

Work waits until an event that follows it must have happened; by chance some of it is done earlier.
So a missing event between two streams gives wrong bytes for some seeds. The work of other threads
is done at once, as if it were launched on a stream that is waited for.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from baton.kvtransfer.connector.handoffs import cuda_device_copies

# Functions that are launched on a stream.
_LAUNCHED = {
    torch.index_select,
    torch.Tensor.copy_,
    torch.Tensor.index_copy_,
}


class Stream:
    """Work in its order: calls, and waits for other streams.

    Attributes:
        weight: How often its work is done before that of others.
    """

    def __init__(self, gpu: SimulatedGpu, weight: float) -> None:
        self._gpu, self.weight = gpu, weight
        self.queue = deque[Callable[[], None] | tuple["Stream", int]]()
        self.num_launched = self.num_done = 0

    def launch(self, work: Callable[[], None] | tuple[Stream, int]) -> None:
        with self._gpu.lock:
            self.queue.append(work)
            self.num_launched += 1
            self._gpu.run_some()

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "the event was never recorded"
        self._gpu.num_calls += 1
        self.launch((event.stream, event.position))

    def record_event(self) -> Event:
        event = Event(self._gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.run_until(self, self.num_launched)


class Event:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu, self.stream, self.position = gpu, None, 0

    def record(self, stream: Stream) -> None:
        self._gpu.num_calls += 1
        self.stream, self.position = stream, stream.num_launched

    def synchronize(self) -> None:
        assert self.stream is not None, "the event was never recorded"
        self._gpu.run_until(self.stream, self.position)


class SimulatedGpu(TorchFunctionMode):
    """One GPU; the module under test sees it as torch.

    Args:
        seed: Chooses the order of the work.
        pins: Whether host memory can be pinned.

    Attributes:
        num_calls: Kernels, copies and events launched so far.
    """

    def __init__(self, seed: int, *, pins: bool = True) -> None:
        super().__init__()
        self.lock, self.num_calls = threading.RLock(), 0
        self._random, self._here = random.Random(seed), threading.local()
        # Some GPUs do most work at once, others nearly none before it is waited for.
        self._eagerness = self._random.choice([0.0, 0.05, 0.4])
        self._streams, self._owned = list[Stream](), set[int]()
        self._here.stream = self._new_stream(None)
        result = SimpleNamespace(value=0 if pins else 1)
        runtime = SimpleNamespace(
            cudaHostRegister=lambda *_: result,
            cudaHostUnregister=lambda *_: None,
            cudaGetErrorString=lambda _: "no memory can be pinned",
        )
        self.cuda = SimpleNamespace(
            Stream=self._new_stream,
            Event=lambda blocking=False: Event(self),
            current_stream=lambda _: self._current(),
            stream=self._on,
            device=lambda _: contextlib.nullcontext(),
            set_device=lambda _: None,
            cudart=lambda: runtime,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype)

    def empty(self, size: int, *, dtype: torch.dtype, **where: Any) -> torch.Tensor:
        # Memory holds what somebody else left there.
        made = torch.full((size,), 0x5A, dtype=dtype)
        if "device" in where:
            self.own(made)
        return made

    def own(self, *tensors: torch.Tensor) -> None:
        """Takes the memory of these tensors for memory of the GPU."""
        self._owned |= {one.untyped_storage().data_ptr() for one in tensors}

    def _has(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._owned

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stream = self._current()
        if func not in _LAUNCHED or not any(map(self._has, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        self.num_calls += 1
        stream.launch(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])

    def launch(self, work: Callable[[], None]) -> None:
        """Launches a kernel of the model on the stream that this thread uses."""
        self._current().launch(work)

    def synchronize(self) -> None:
        """Waits for all work."""
        for stream in self._streams:
            stream.synchronize()

    def run_some(self) -> None:
        """Does a random part of the work that may be done."""
        while self._random.random() < self._eagerness and (ready := self._ready()):
            self._do_one_of(ready)

    def run_until(self, stream: Stream, position: int) -> None:
        with self.lock:
            while stream.num_done < position:
                ready = self._ready()
                assert ready, "streams wait for each other"
                self._do_one_of(ready)

    def _ready(self) -> list[Stream]:
        return [one for one in self._streams if one.queue and self._may_be_done(one.queue[0])]

    @staticmethod
    def _may_be_done(work: Callable[[], None] | tuple[Stream, int]) -> bool:
        return not isinstance(work, tuple) or work[0].num_done >= work[1]

    def _do_one_of(self, streams: list[Stream]) -> None:
        (stream,) = self._random.choices(streams, [one.weight for one in streams])
        work = stream.queue.popleft()
        if not isinstance(work, tuple):
            with torch._C.DisableTorchFunction():
                work()
        stream.num_done += 1

    def _new_stream(self, _: Any) -> Stream:
        self._streams.append(Stream(self, self._random.choice([0.01, 0.3, 1.0])))
        return self._streams[-1]

    def _current(self) -> Stream:
        stream: Stream = self._here.stream
        return stream

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self._current(), stream
        try:
            yield
        finally:
            self._here.stream = before


@contextlib.contextmanager
def simulated_gpu(seed: int, *, pins: bool = True) -> Iterator[SimulatedGpu]:
    """Lets this thread's CudaDeviceCopies use a simulated GPU, whose memory is host memory."""
    with pytest.MonkeyPatch.context() as patch, SimulatedGpu(seed, pins=pins) as gpu:
        patch.setattr(cuda_device_copies, "torch", gpu)
        # Its memory is not freed while a stream uses it.
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        yield gpu
