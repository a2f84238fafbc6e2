"""Two instances of the tiny model in one process, with real connections and links."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import numpy as np

from headwater.clock import SystemClock
from headwater.config import EngineConfig, PeersConfig
from headwater.engine.core import EngineCore
from headwater.launch.core import build_core
from headwater.scheduler.request import Request, SamplingParams, Usage
from headwater.types import RequestId

TOKEN = "a-token-for-tests"
BLOCK_TOKENS = 16


class RealPair:
    """A prefill and a decode instance; needs HEADWATER_PEER_TOKEN in the environment."""

    def __init__(
        self,
        link: str = "tcp",
        tiers: dict[str, object] | None = None,
        *,
        prefill: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        """`tiers` are settings of the decode instance, `prefill` those of the other one."""
        self.prefill, info = self._build("prefill", link, settings | (prefill or {}))
        self.decode, _ = self._build("decode", link, settings | (tiers or {}))
        self.address = info.peer_address
        self.block_bytes = info.block_bytes
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.usages: dict[str, Usage] = {}

    def __enter__(self) -> "RealPair":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.prefill.close()
        self.decode.close()

    def serve(self, *requests: Request, handed_off: bool = True) -> list[list[int]]:
        """The tokens of each, computed with a hand-off or by D alone."""
        for request in requests:
            where = self.address if handed_off else ""
            self.decode.add(replace(request, prefill=where, local_fallback=False))
        names = [request.request_id for request in requests]
        clock = SystemClock()
        end_s = clock.now() + 60.0
        while any(name not in self.reasons for name in names):
            assert clock.now() < end_s, f"stuck: {names}, {self.decode.stats()}"
            self._turn()
        return [self.tokens[name] for name in names]

    def converse(self, plain: "RealPair", chance: random.Random) -> None:
        """Conversations of three turns, three at a time: each answer by hand-off equals the one
        that D of `plain` computes alone."""
        history = {number: _tokens(chance, 40) for number in range(3)}
        for turn in range(3):
            for tokens in history.values():
                tokens += _tokens(chance, chance.randrange(1, 50))
            requests = [
                make_real_request(f"{turn}-{number}", tokens, seed=turn)
                for number, tokens in history.items()
            ]
            got = self.serve(*requests)
            assert got == plain.serve(*requests, handed_off=False)
            for number, tokens in enumerate(got):
                history[number] += tokens
        self.settle()

    def until(self, reached: Callable[[], bool]) -> None:
        """Turn both loops until a condition holds."""
        end_s = SystemClock().now() + 10.0
        while not reached():
            assert SystemClock().now() < end_s, "it never came to that"
            self._turn()

    def settle(self) -> None:
        """Run both loops until P knows that everything has ended."""
        self.until(lambda: not self.prefill.stats().handoffs["prefill"].in_flight)
        self.prefill.check()
        self.decode.check()

    def _turn(self) -> None:
        for core in (self.prefill, self.decode):
            if not core.has_work:
                core.completions.wait(0.001)
            for output in core.step() if core.has_work else ():
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)
                if output.usage is not None:
                    self.usages[output.request_id] = output.usage
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason

    def _build(self, role: str, link: str, settings: dict[str, object]):
        chosen: dict[str, object] = {
            "num_blocks_override": 128,
            "block_tokens": BLOCK_TOKENS,
            "max_batched_tokens": 64,
            "max_num_seqs": 8,
            "num_threads": 1,
            "peers": PeersConfig(role=role, link=link),  # type: ignore[arg-type]
            **settings,
        }
        core: EngineCore
        core, info = build_core(EngineConfig(**chosen))  # type: ignore[arg-type]
        return core, info


def make_real_request(
    name: str, tokens: list[int], *, seed: int = 0, **params: object
) -> Request:
    """A request of the tiny model; sampled, so that every token depends on all before it."""
    chosen: dict[str, object] = {
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        **params,
    }
    return Request(
        request_id=RequestId(name),
        tokens=np.array(tokens, dtype=np.int32),
        params=SamplingParams(**chosen),  # type: ignore[arg-type]
        arrival_s=SystemClock().now(),
    )


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(256) for _ in range(count)]
