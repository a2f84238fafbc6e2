"""Engines without a model: the real loop, scheduler and cache over a runner that echoes.

`EchoEngine` is an `EngineClient` inside the caller's event loop, for tests of servers.
`python -m headwater.testing.engines ADDRESS` is the same core as an engine process, for
tests of the process split. Neither needs torch.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import Clock, SystemClock
from headwater.engine.client import ControlCall, EngineInfo, R
from headwater.engine.core import EngineCore
from headwater.engine.front import Mailbox, abort_output
from headwater.engine.process import run_engine
from headwater.engine.wire import EngineStart
from headwater.errors import EngineDead, ModelError, RequestError
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SequenceOutput
from headwater.scheduler.scheduler import Scheduler
from headwater.testing.runners import EchoRunner, HangingRunner

_SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

VOCAB_SIZE = 256
"""Echo engines sample only bytes, so that their text contains every kind of broken
character."""


def make_echo_core(
    *,
    num_blocks: int = 64,
    block_tokens: int = 16,
    max_num_seqs: int = 8,
    max_model_len: int = 512,
    clock: Clock | None = None,
    record_events: bool = False,
    runner_type: type[EchoRunner] = EchoRunner,
) -> EngineCore:
    """A whole engine core over an `EchoRunner`."""
    cache = TieredCache(
        CacheConfig(
            device_blocks=num_blocks,
            block_tokens=block_tokens,
            record_events=record_events,
            fingerprint=bytes(32),
        )
    )
    config = SchedulerConfig(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_batched_tokens=256
    )
    runner = runner_type(
        num_blocks=num_blocks, block_tokens=block_tokens, vocab_size=VOCAB_SIZE
    )
    return EngineCore(Scheduler(config, cache), runner, clock or SystemClock())


def make_echo_info(model_dir: str = "", **changes: Any) -> EngineInfo:  # noqa: ANN401 -- typed by EngineInfo
    """The description of an echo engine."""
    info = EngineInfo(
        model_name="echo",
        model_dir=model_dir,
        max_model_len=512,
        vocab_size=VOCAB_SIZE + len(_SPECIALS),
        block_tokens=16,
        num_device_blocks=64,
        max_num_seqs=8,
        fingerprint="00" * 32,
        eos_token_ids=(),
    )
    return replace(info, **changes)


def make_tokenizer_folder(folder: Path, *, template: str | None = _TEMPLATE) -> Path:
    """Write a byte-level tokenizer and a chat template, in the form of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    signs = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of_sign)
    fast = Tokenizer(
        models.BPE(vocab={sign: byte for byte, sign in enumerate(signs)}, merges=[])
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in _SPECIALS])
    fast.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"eos_token": _SPECIALS[0]}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class EchoEngine:
    """An `EngineClient` in the caller's event loop. It computes steps only while it is not
    held."""

    def __init__(self, core: EngineCore | None = None, info: EngineInfo | None = None) -> None:
        self.core = core or make_echo_core()
        self.info = info or make_echo_info()
        self.dead: str | None = None
        self.num_violations = 0
        self.num_restarts = 0
        self._mailboxes: dict[str, Mailbox] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop: asyncio.Task[None] | None = None

    def hold(self) -> None:
        """Stop stepping, like an engine in an endless step."""
        self._flowing.clear()

    def flow(self) -> None:
        """Continue to step after `hold`."""
        self._flowing.set()

    def die(self, reason: str) -> None:
        """End, and report it to all clients."""
        self.dead = reason
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineDead(reason))

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        self.check_alive()
        self.core.add(request)
        mailbox = self._mailboxes[request.request_id] = Mailbox()
        self._loop = self._loop or asyncio.create_task(self._run())
        has_ended = False
        try:
            while not has_ended:
                output = await mailbox.take()
                has_ended = output.finish_reason is not None
                yield output
        finally:
            if self._mailboxes.pop(request.request_id, None) is not None and not has_ended:
                self.core.abort(request.request_id)

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        wanted = list(self._mailboxes) if request_ids is None else request_ids
        alive = [name for name in wanted if name in self._mailboxes]
        for name in alive:
            output = abort_output(name)
            self.core.abort(output.request_id)
            self._mailboxes.pop(name).put(output)
        return len(alive)

    async def control(self, call: ControlCall[R]) -> R:
        self.check_alive()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def answer(result: R, refusal: RequestError | None) -> None:
            if refusal is None:
                future.set_result(result)
            else:
                future.set_exception(refusal)

        self.core.control(call, answer)
        self.core.publish()
        if self.core.has_work or not future.done():
            self._loop = self._loop or asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self.core.has_work and self.dead is None:
            await self._flowing.wait()
            for output in self.core.step():
                if (mailbox := self._mailboxes.get(output.request_id)) is not None:
                    mailbox.put(output)
            self.core.publish()
            await asyncio.sleep(0)
        self._loop = None

    def check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)


class ScriptedEngine(EchoEngine):
    """Answers every request with the same text, one byte per step, and then stops."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        rest = self.text.encode()[request.num_resumed_tokens :][: request.params.max_tokens]
        is_cut = request.num_resumed_tokens + len(rest) < len(self.text.encode())
        for at, byte in enumerate(rest, 1):
            reason = None if at < len(rest) else "length" if is_cut else "stop"
            yield SequenceOutput(
                request_id=request.request_id,
                tokens=[byte],
                logprobs=[],
                finish_reason=reason,
            )


def _byte_of_sign(sign: str) -> int:
    """The byte of a character of the byte-level alphabet."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    code = ord(sign)
    return code if code in shown else hidden[code - 256]


def _build(start: EngineStart) -> tuple[EngineCore, EngineInfo]:
    """Build from `{"fail": …, "raise": …, "hang_after_s": …}`, so that tests can request a
    failed start, or a device whose first step never ends and is given up after that time."""
    wanted: dict[str, str] = json.loads(bytes(start.settings))
    if "fail" in wanted:
        raise ModelError(wanted["fail"])
    if "raise" in wanted:
        raise ZeroDivisionError(wanted["raise"])
    if "hang_after_s" in wanted:
        core = make_echo_core(runner_type=HangingRunner)
        core.step_timeout_s = float(wanted["hang_after_s"])
    else:
        core = make_echo_core()
    return core, make_echo_info(wanted.get("model_dir", ""))


if __name__ == "__main__":
    sys.exit(run_engine(_build, sys.argv[1]))
