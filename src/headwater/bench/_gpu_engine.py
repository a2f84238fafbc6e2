"""An engine on the GPU in this process, with random weights of real shapes."""

import gc
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headwater.bench._gpu_shapes import SHAPES
from headwater.cache import CacheConfig, Namespace, TieredCache
from headwater.clock import SystemClock
from headwater.device.attention.base import ATTENTION, register
from headwater.device.gpu.copier import CudaCopier
from headwater.device.gpu.runner import CudaRunner
from headwater.device.latent import use_latents
from headwater.device.model import LoadedModel, kv_shape
from headwater.engine.collector import settle_collector
from headwater.engine.core import EngineCore
from headwater.errors import ConfigError
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SamplingParams
from headwater.scheduler.scheduler import Scheduler
from headwater.storage.base import Opening
from headwater.storage.codec import BlockFormat
from headwater.storage.registry import open_storage
from headwater.transfer.mover import Mover, TransferConfig
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import StorageWorkers
from headwater.types import RequestId, Tokens, WritePolicy

BLOCK_TOKENS = 64
DEVICE = torch.device("cuda", 0)
_POLL_S = 0.02


def require_gpu() -> None:
    """Raise ConfigError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs an NVIDIA GPU, and torch finds none")


def gpu_name() -> str:
    """The name of the GPU, as its driver reports it."""
    return str(torch.cuda.get_device_name(DEVICE))


def make_model(name: str) -> LoadedModel:
    """A model of random weights on the GPU, in bfloat16; no files are read."""
    return random_model(SHAPES[name]())


def random_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:  # noqa: ANN401
    """A model of random weights on the GPU, for any configuration of transformers."""
    register()
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    maker: Any = AutoModelForCausalLM
    with torch.device("meta"):
        module = maker.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    module.to_empty(device=DEVICE)
    module.tie_weights()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
            else:
                # A bias of ones would be most of every row: all rows would go to the same
                # experts.
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    for name, values in module.named_buffers():
        # Computed buffers are lost on the meta device.
        if name.endswith("embed_scale"):
            values.fill_(config.hidden_size**0.5)
        elif name.endswith("correction_bias"):
            values.zero_()
    rotary = type(module.model.rotary_emb)
    module.model.rotary_emb = rotary(config).to(DEVICE)
    use_latents(module)
    return LoadedModel(
        module=module.eval(),
        model_dir=Path(),
        fingerprint=bytes(32),
        device=DEVICE,
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        **kv_shape(config),
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=(),
    )


def release_memory() -> None:
    """Free the device memory of unused objects."""
    gc.collect()
    torch.cuda.empty_cache()


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of weights that a decode step reads: all except unused embedding rows."""
    module: Any = model.module
    whole = sum(weight.nbytes for weight in module.parameters())
    for part in module.modules():
        whole += getattr(part, "packed_bytes", 0)
    embedding: int = module.model.embed_tokens.weight.nbytes
    return int(whole if module.config.tie_word_embeddings else whole - embedding)


@dataclass(slots=True)
class GpuRun:
    """The results of some requests."""

    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    """Per request: seconds to its first token, in the order of those tokens."""

    steps_s: list[float] = field(default_factory=list)
    """Seconds between collected steps while every request was decoding and none began or
    ended."""

    device_steps_s: list[float] = field(default_factory=list)
    """The steps of `steps_s`, measured on the device."""

    output_tokens: int = 0
    found: dict[str, int] = field(default_factory=dict)
    """Cached prompt tokens, by tier."""


class MarkingRunner(CudaRunner):
    """Marks the end of each step on the device. `last_mark` is the end of the last collected
    step."""

    def __init__(self, model: LoadedModel, **limits: Any) -> None:  # noqa: ANN401 -- passed on
        super().__init__(model, **limits)
        self._marks: deque[torch.cuda.Event] = deque()
        self.last_mark: torch.cuda.Event | None = None

    def submit(self, batch: ScheduledBatch) -> None:
        """Submit the step, then mark its end on the device."""
        super().submit(batch)
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        mark.record()
        self._marks.append(mark)

    def collect(self) -> StepResult:
        """Collect the oldest step and its mark."""
        result = super().collect()
        self.last_mark = self._marks.popleft()
        return result


class GpuEngine:
    """An engine core with a real runner and tiers, driven step by step by the benchmark."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        host_blocks: int = 0,
        storage: Path | None = None,
        **settings: Any,  # noqa: ANN401 -- typed by SchedulerConfig and CacheConfig
    ) -> None:
        policy = settings.pop("write_policy", "write_through")
        masks, shared = settings.pop("masks", None), settings.pop("shared", False)
        limits = {"max_num_seqs": 256, "max_batched_tokens": 8192, **settings}
        layout = model.layout(BLOCK_TOKENS)
        self.cache = TieredCache(
            CacheConfig(
                device_blocks=num_blocks,
                block_tokens=BLOCK_TOKENS,
                host_blocks=host_blocks,
                storage=storage is not None,
                write_policy=WritePolicy(policy),
                fingerprint=model.fingerprint,
                kv_format=layout.kv_format,
            )
        )
        self.clock = SystemClock()
        config = SchedulerConfig(max_model_len=model.max_model_len, **limits)
        self.runner = MarkingRunner(
            model,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            shared=shared,
            masks=masks,
        )
        self.block_bytes = layout.block_bytes
        self.slab = HostSlab(host_blocks, layout.block_bytes)
        self.copier: CudaCopier | None = None
        mover = Mover()
        if host_blocks:
            self.copier = CudaCopier(
                self.runner.pool, self.slab, self.clock, self.runner.arrivals
            )
            mover = Mover(
                self.copier, self._workers(storage), TransferConfig(read_timeout_s=60.0),
                block_bytes=layout.block_bytes,
            )  # fmt: skip
        self.scheduler = Scheduler(config, self.cache)
        self.core = EngineCore(self.scheduler, self.runner, self.clock, mover)
        settle_collector()
        self._numbers = itertools.count()
        self.last_found: Mapping[str, int] = {}
        self._vocab = model.vocab_size

    def prompt(self, num_tokens: int, seed: int) -> Tokens:
        """A prompt that shares no beginning with other seeds."""
        random = np.random.default_rng(seed)
        return random.integers(0, self._vocab, num_tokens).astype(np.int32)

    def add(self, prompt: Tokens, max_tokens: int, **sampling: Any) -> RequestId:  # noqa: ANN401
        """Add one request, starting now; greedy unless `sampling` is given."""
        name = RequestId(f"bench-{next(self._numbers)}")
        asked = {"temperature": 0.0, **sampling}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **asked)
        self.core.add(
            Request(request_id=name, tokens=prompt, params=params, arrival_s=self.clock.now())
        )
        return name

    def serve(
        self,
        prompts: list[Tokens],
        *,
        max_tokens: int,
        between: Callable[[], None] | None = None,
        sampling: Sequence[Mapping[str, Any]] = (),
    ) -> GpuRun:
        """Serve all requests at once; `between` is called after each step. Requests use the
        values of `sampling` in turn; without it all are greedy."""
        served, began_s = GpuRun(), self.clock.now()
        for number, prompt in enumerate(prompts):
            asked = sampling[number % len(sampling)] if sampling else {}
            self.add(prompt, max_tokens, **asked)
        waiting, last_s, last_mark = len(prompts), 0.0, self.runner.last_mark
        found, marks = dict.fromkeys(("device", "host", "storage"), 0), []
        while waiting:
            self.core.wait()
            outputs, now = self.core.step(), self.clock.now()
            if between is not None:
                between()
            is_all = len(outputs) == len(prompts)
            for output in outputs:
                served.output_tokens += len(output.tokens)
                if output.finish_reason is not None:
                    waiting -= 1
                    is_all = False
                if output.usage is not None:
                    served.first_s.append(now - began_s)
                    is_all = False
                    for tier in found:
                        found[tier] += output.usage.by_tier[tier]
            if is_all and last_s:
                served.steps_s.append(now - last_s)
                marks.append((last_mark, self.runner.last_mark))
            if outputs:
                last_s, last_mark = now, self.runner.last_mark
        served.seconds, served.found = self.clock.now() - began_s, found
        torch.cuda.synchronize(DEVICE)
        served.device_steps_s = [
            a.elapsed_time(b) / 1e3 for a, b in marks if a is not None and b is not None
        ]
        return served

    def tokens(self, prompt: Tokens, *, max_tokens: int) -> list[int]:
        """The output of one request; `last_found` is then where its prompt was found."""
        name, tokens, ended = self.add(prompt, max_tokens), list[int](), False
        while not ended:
            self.core.wait()
            for output in self.core.step():
                if output.request_id == name:
                    tokens += output.tokens
                    ended = output.finish_reason is not None
                    if output.usage is not None:
                        self.last_found = output.usage.by_tier
        return tokens

    def drain(self) -> None:
        """Run until all writes have ended."""
        self.core.drain(120.0)

    def await_pinned(self) -> None:
        """Wait until the whole slab is pinned; pinning slows serving meanwhile."""
        while self.copier is not None and self.copier.pinned_share < 1.0:
            self.core.completions.wait(_POLL_S)

    def clear_device(self) -> None:
        """Evict every unused block from the device, and from no other tier."""
        slots = self.cache.take(self.cache.num_available, now=self.clock.now())
        if slots is not None:
            self.cache.free(slots)

    def clear_host(self) -> None:
        """Forget everything in memory; storage is looked up again."""
        self.cache.reset()

    def close(self) -> None:
        """Release pool, slab and graphs."""
        self.drain()
        self.core.close()
        del self.runner, self.core, self.slab, self.copier
        gc.unfreeze()
        release_memory()

    def _workers(self, folder: Path | None) -> StorageWorkers | None:
        if folder is None:
            return None
        opening = Opening(
            format=BlockFormat(
                fingerprint=self.cache.scheme.root(Namespace()),
                block_bytes=self.slab.block_bytes,
            ),
            clock=self.clock,
            memory=self.slab.memory,
            environ={},
        )
        settings = {"path": str(folder), "capacity_bytes": 24 << 30}
        return StorageWorkers(open_storage("file", settings, opening), self.slab, self.clock)
