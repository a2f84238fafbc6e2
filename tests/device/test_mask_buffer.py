"""Each step samples with its own masks, in whatever order the device runs its two streams.

The device is a double: streams are queues, and one of them runs ahead of the other as far as
events allow. `test_gpu_sampling.py` does the same on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.engine.masks import StepMasks

pytest.importorskip("triton", reason="the kernel that sends masks is imported")

from headwater.device.gpu import mask_buffer

VOCAB, ROWS, STEPS = 70, 6, 12
IN_FLIGHT = 2


class Mark:
    """One recording of an event."""

    is_done = False


class Stream:
    def __init__(self) -> None:
        self.queue: list[Callable[[], None] | Mark] = []
        """Work, and marks that must be done before the work behind them."""

    def wait_event(self, event: "Event") -> None:
        if event.mark is not None:
            self.queue.append(event.mark)

    def advance(self) -> bool:
        """Run the next entry; False if there is none, or its mark is not done."""
        if not self.queue:
            return False
        entry = self.queue[0]
        if isinstance(entry, Mark):
            if not entry.is_done:
                return False
        else:
            entry()
        self.queue.pop(0)
        return True


class Event:
    mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = self.mark = Mark()

        def finish() -> None:
            mark.is_done = True

        stream.queue.append(finish)


class Staging:
    """The ring of pinned buffers, in ordinary memory."""

    def __init__(self, num_ints: int, *, num_buffers: int) -> None:
        self.buffers = [
            torch.full((ROWS * 3,), 7, dtype=torch.int32) for _ in range(num_buffers)
        ]

    def take(self, num_ints: int) -> tuple[Tensor, np.ndarray]:
        self.buffers.append(self.buffers.pop(0))
        return self.buffers[-1], self.buffers[-1].numpy()


class Device:
    """Two streams: that of the step, and the one that `MaskBuffer` makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream()
        self.streams = [self.main]
        cuda = SimpleNamespace(
            Stream=self.make_stream,
            Event=Event,
            stream=self.use,
            current_stream=lambda _: self.current,
        )
        fake = SimpleNamespace(zeros=torch.zeros, int32=torch.int32, cuda=cuda)
        monkeypatch.setattr(mask_buffer, "torch", fake)
        monkeypatch.setattr(mask_buffer, "Staging", Staging)
        monkeypatch.setattr(mask_buffer, "copy_ints", self.copy)

    def make_stream(self, *_: object, **__: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, source: Tensor, target: Tensor) -> None:
        def copy() -> None:
            target[: len(source)] = source

        self.current.queue.append(copy)

    def run(self, found: list[Tensor], count: int, *, eager: int) -> None:
        """Run until `count` steps have read their masks; stream `eager` goes on while it
        can."""
        streams = self.streams[eager:] + self.streams[:eager]
        while len(found) < count:
            assert any(stream.advance() for stream in streams), "both streams wait"


def masks_of(step: int) -> StepMasks:
    """Other rows and other words in each step; the rows between have late masks."""
    rows = list(range(step % 2, ROWS, 1 + step % 3))
    words = np.arange(len(rows) * 2, dtype=np.int32).reshape(-1, 2) + 1000 * (step + 1)
    return StepMasks(rows=rows, words=words)


@pytest.mark.parametrize("eager", [0, 1], ids=["step first", "masks first"])
def test_each_step_reads_its_own_masks(monkeypatch: pytest.MonkeyPatch, eager: int) -> None:
    """Masks are neither sent before the previous step has read its own, nor read before they
    are sent; and pinned memory is not written while it is being sent."""
    device = Device(monkeypatch)
    buffer = mask_buffer.MaskBuffer(ROWS, VOCAB, torch.device("cpu"), num_buffers=IN_FLIGHT + 1)
    found: list[Tensor] = []
    places: list[np.ndarray] = []
    for step in range(STEPS):
        device.run(found, step - IN_FLIGHT + 1, eager=eager)
        places.append(buffer.send(masks_of(step), ROWS))
        device.main.queue.append(lambda: found.append(buffer.words.clone()))
        buffer.mark_read()
    device.run(found, STEPS, eager=eager)

    for step in range(STEPS):
        masks = masks_of(step)
        late = sorted(set(range(ROWS)) - set(masks.rows))
        assert (places[step][late] == -1).all()
        words = found[step].numpy()[places[step][masks.rows]]
        assert (words[:, :2] == masks.words).all()
        assert (words[:, 2:] == 0).all()  # the logits have more tokens than the vocabulary


def test_a_step_without_masks_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its rows are sampled without a mask, and the step waits for nothing."""
    device = Device(monkeypatch)
    buffer = mask_buffer.MaskBuffer(ROWS, VOCAB, torch.device("cpu"), num_buffers=3)
    num_queued = [len(stream.queue) for stream in device.streams]
    none = StepMasks(words=np.zeros((0, 2), dtype=np.int32), late=[0, 1])
    for masks in (None, none):
        assert buffer.send(masks, ROWS).tolist() == [-1] * ROWS
    assert [len(stream.queue) for stream in device.streams] == num_queued
