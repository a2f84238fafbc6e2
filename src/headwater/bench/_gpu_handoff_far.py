"""The other process of `_gpu_handoff`: a sender with a pool and no model, or a prefill instance.

    python -m headwater.bench._gpu_handoff_far sender
    python -m headwater.bench._gpu_handoff_far prefill 8b

It reads commands from its input and answers each with a line of JSON: first the shape of the
sender's pool, `{"num_layers": …}`. It ends when its input ends.
"""

import json
import sys
from threading import Event, Thread
from typing import Any

import torch

from headwater.bench._gpu_engine import BLOCK_TOKENS, DEVICE, GpuEngine, make_model
from headwater.bench._gpu_handoff import CONFIG, handoff_engine, join_peers
from headwater.bench._gpu_handoff_ceilings import send_loopback
from headwater.clock import SystemClock
from headwater.device.gpu.peer_blocks import CudaBlocks
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.device.open import open_copier
from headwater.disagg.links.interface import Sender
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.protocol.push import BlockPiece, LinkEvent, Push, PushDone

_TIMEOUT_S = 60.0


class _Shape:
    """The part of a model that a pool needs."""

    has_fp8_kv = False
    planes, value_dim = 2, 0
    layout = LoadedModel.layout
    device, dtype = DEVICE, torch.bfloat16
    share = None

    def __init__(self, given: dict[str, int]) -> None:
        self.num_layers, self.kv_heads = given["num_layers"], given["kv_heads"]
        self.head_dim = given["head_dim"]


class _BareSender:
    """Pushes blocks of a pool."""

    def __init__(self, given: dict[str, int]) -> None:
        shape: Any = _Shape(given)
        num_blocks = given["num_blocks"]
        self._pool = pool = KVPool(
            shape, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, shared=True
        )
        self._clock = clock = SystemClock()
        self._links = StagedLinks(
            CONFIG,
            pool.block_bytes,
            lambda slab: open_copier(pool, slab, clock, for_links=True),
            self._deliver,
            clock,
            device=CudaBlocks(pool),
        )
        self._sender: Sender | None = None
        self._outcome: LinkEvent | None = None
        self._ended, self._stopped = Event(), Event()
        self._pushing: Thread | None = None
        self._num_pushed, self._seconds = 0, 0.0
        torch.cuda.synchronize()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Carry out a command and return its answer; None for `leases`, because `stop` answers
        for both."""
        if "address" in asked:
            self.close()
            self._sender = self._links.connect(asked["address"])
            return {"connected": True}
        if "port" in asked:
            send_loopback(asked["port"], asked["count"])
            return {"sent": True}
        if "leases" in asked:
            self._stopped.clear()
            self._pushing = Thread(target=self._push_at_pace, args=(asked,))
            self._pushing.start()
            return None
        if "stop" in asked:
            return self._stop()
        began_s = self._clock.now()
        outcome = self._push(asked["lease"], asked["num_blocks"])
        return {"began_s": began_s, "ended_s": self._clock.now(), "outcome": outcome}

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _push_at_pace(self, asked: dict[str, Any]) -> None:
        self._num_pushed = 0
        began_s = self._clock.now()
        for number, lease in enumerate(asked["leases"], 1):
            if self._push(lease, asked["num_blocks"]) != "PushDone":
                break
            self._num_pushed = number
            wait_s = began_s + number * asked["period_s"] - self._clock.now()
            if self._stopped.wait(max(wait_s, 0.0)):
                break
        self._seconds = self._clock.now() - began_s
        self._chunk_bytes = asked["num_blocks"] * self._pool.block_bytes

    def _stop(self) -> dict[str, Any]:
        self._stopped.set()
        assert self._pushing is not None
        self._pushing.join(_TIMEOUT_S)
        gb = self._num_pushed * self._chunk_bytes / 1e9
        return {"num_pushed": self._num_pushed, "gb_s": gb / self._seconds}

    def _push(self, lease: int, num_blocks: int) -> str:
        block_bytes = self._pool.block_bytes
        pieces = tuple(BlockPiece(at, at, block_bytes) for at in range(num_blocks))
        deadline_s = self._clock.now() + _TIMEOUT_S
        self._ended.clear()
        assert self._sender is not None
        self._sender.push(Push(job=lease, lease=lease, pieces=pieces, deadline_s=deadline_s))
        assert self._ended.wait(_TIMEOUT_S), "a push has no outcome"
        return "PushDone" if isinstance(self._outcome, PushDone) else repr(self._outcome)

    def _deliver(self, event: LinkEvent) -> None:
        self._outcome = event
        self._ended.set()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _send() -> None:
    sender = _BareSender(json.loads(sys.stdin.readline()))
    _say({"ready": True})
    for line in sys.stdin:
        told = sender.answer(json.loads(line))
        if told is not None:
            _say(told)
    sender.close()


def _prefill(shape: str) -> None:
    """Run an engine for each link that is asked for, one after the other, until the input
    ends."""
    model = make_model(shape)
    torch.cuda.synchronize()
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        if "link" not in asked:  # a stop of an engine that has failed
            _say({"stopped": True})
            continue
        try:
            _serve(handoff_engine(model), asked["link"])
            _say({"stopped": True})
        except Exception as error:  # noqa: BLE001 -- reported, and the other links are measured
            _say({"failed": repr(error)})


def _serve(engine: GpuEngine, link: str) -> None:
    """Serve hand-offs by this link until the next line of input."""
    try:
        _say({"peer_address": join_peers(engine, "prefill", link)})
        ended = Event()

        def await_end() -> None:
            sys.stdin.readline()
            ended.set()
            engine.core.completions.wake()

        Thread(target=await_end, daemon=True).start()
        while not ended.is_set():
            engine.core.wait()
            engine.core.step()
    finally:
        engine.close()


if __name__ == "__main__":
    if sys.argv[1] == "sender":
        _send()
    else:
        _prefill(sys.argv[2])
