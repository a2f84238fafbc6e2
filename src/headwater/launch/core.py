"""Builds an engine core from settings: the model, its memory, the scheduler, the cache.

torch is imported only when a core is built.
"""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cache import CacheConfig, KeyScheme, Namespace, TieredCache
from headwater.clock import Clock, SystemClock
from headwater.config import EngineConfig
from headwater.engine.client import SERVER_ID_VARIABLE, EngineInfo
from headwater.engine.core import EngineCore, Runner
from headwater.engine.grammar import GrammarCompiler
from headwater.engine.key_hasher import KeyHasher
from headwater.engine.masks import MaskWorkers, num_groups_for
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import ConfigError
from headwater.launch.events import open_events
from headwater.launch.host_memory import HostMemory
from headwater.launch.kept_host import HostRecorder, KeptHost
from headwater.launch.limits import StepLimits, choose_limits
from headwater.launch.memory_claims import Claim, open_claims
from headwater.launch.peers import open_peers, shares_blocks
from headwater.launch.ranks import RankLauncher, check_ranks
from headwater.launch.reload import Parts, Reloader
from headwater.launch.tiers import describe_tiers, host_blocks, open_mover
from headwater.launch.weights import load_weights
from headwater.native import block_keys, slot_pool
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.pacing import ADAPTIVE_ITL, ItlTarget
from headwater.scheduler.scheduler import Scheduler
from headwater.transfer.layout import KVLayout
from headwater.transfer.slab import slot_bytes
from headwater.types import WritePolicy

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel

_BUILT_IN_NAME = "headwater-tiny"


def build_core(
    config: EngineConfig, model: "LoadedModel | None" = None, kept: KeptHost | None = None
) -> tuple[EngineCore, EngineInfo]:
    """Load the model, unless it is given, size the pool, and connect scheduler, cache and
    runner.

    With several ranks this process is rank 0, and the others are started here. `kept` is memory
    for the host tier that outlives this engine.
    """
    _limit_threads(config.num_threads, num_ranks=config.tensor_parallel_size)
    block_keys.prepare()
    slot_pool.prepare()
    clock = SystemClock()
    if config.tensor_parallel_size == 1:
        return _build(config, model, None, clock, kept)
    check_ranks(config)
    ranks = RankLauncher(config, clock)
    try:
        return _build(config, ranks.load(), ranks, clock, kept)
    except BaseException:
        ranks.close()
        raise


def _build(
    config: EngineConfig,
    model: "LoadedModel | None",
    ranks: RankLauncher | None,
    clock: Clock,
    kept: KeptHost | None,
) -> tuple[EngineCore, EngineInfo]:
    # Imported after the thread limits are set, because torch reads them once.
    from headwater.device.memory import free_bytes, num_blocks_that_fit
    from headwater.device.model import load
    from headwater.device.open import open_runner, prepare_device
    from headwater.device.runner import TorchRunner

    model = model or load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        has_fp8_kv=config.kv_cache_dtype == "fp8",
    )
    limits = choose_limits(
        config,
        device_type=model.device.type,
        free_bytes=free_bytes(model),
        token_bytes=model.token_bytes,
    )
    num_blocks = num_blocks_that_fit(
        model,
        block_tokens=config.block_tokens,
        utilization=config.memory_utilization,
        override=config.num_blocks_override,
        available_bytes=None if ranks is None else ranks.free_bytes,
        step_tokens=limits.max_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
    )
    layout = model.whole_layout(config.block_tokens)
    num_host_blocks, claim = _choose_host_tier(config, model, layout, kept)
    kept = kept if num_host_blocks else None
    cache = _cache(config, model, layout, num_blocks, num_host_blocks, is_kept=kept is not None)
    scheduler = _scheduler(config, limits, model, cache)
    if ranks is not None:
        ranks.meet(model, num_blocks, limits)
    own, pool = open_runner(
        model,
        num_blocks=num_blocks,
        block_tokens=config.block_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        shared=ranks is None and shares_blocks(config, model.device.type),
        masks=_masks(limits, model, clock),
        group=None if ranks is None else ranks.group,
    )
    runner: Runner = own if ranks is None else ranks.lead(own)
    memory = HostMemory(pool, runner, clock, None if ranks is None else ranks.copies, kept)
    info = EngineInfo(
        model_name=_model_name(config),
        model_dir=str(model.model_dir),
        max_model_len=scheduler.max_model_len,
        vocab_size=model.vocab_size,
        block_tokens=config.block_tokens,
        num_device_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        limits=_describe_limits(limits, scheduler.config.itl),
        fingerprint=model.fingerprint.hex(),
        eos_token_ids=model.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=_describe_device(config, model),
        num_host_blocks=num_host_blocks,
        block_bytes=layout.block_bytes,
        tiers=describe_tiers(config, layout, num_host_blocks),
        epoch=_epoch(),
        kv_format=layout.kv_format,
    )
    mover = open_mover(config, scheduler.cache, memory, clock)
    core = EngineCore(scheduler, runner, clock, mover)
    core.step_timeout_s = config.step_timeout_s
    if kept is not None:
        directory = kept.adopt(cache, layout.block_bytes, clock)
        recorder = HostRecorder(cache, directory, clock)
        mover.before_start, core.record_host = recorder.before_copies, recorder.record
    core.count_compilations = prepare_device(own, mover.copier)
    if claim is not None:
        claim.withdraw()  # the memory is pinned
    if ranks is not None:
        ranks.ranks.on_lost(core.fail)
    info = open_peers(config, core, scheduler, memory, info, clock)
    info = open_events(config, core, info, clock)
    needs_keys = info.kv_events is not None or kept is not None
    if needs_keys and not cache.config.storage:  # with storage, lookups compute the keys
        core.hasher = KeyHasher(cache)
    if config.peers is None and isinstance(runner, TorchRunner):
        parts = Parts(model=model, runner=runner, cache=scheduler.cache, mover=mover)
        core.allow_reload(Reloader(config, parts, info, clock).reload)
    return core, info


def _choose_host_tier(
    config: EngineConfig, model: "LoadedModel", layout: KVLayout, kept: KeptHost | None
) -> tuple[int, Claim | None]:
    """Number of host blocks, and the claim on their memory until it is pinned. On a CPU memory is
    allocated when it is used, so there is no claim."""
    if model.device.type == "cpu":
        return _num_kept(config, model, layout, kept) or host_blocks(config, layout), None
    with open_claims() as claims:
        claimed = 0 if claims is None else claims.num_bytes
        num_blocks = _num_kept(config, model, layout, kept)
        num_blocks = num_blocks or host_blocks(config, layout, claimed_bytes=claimed)
        num_bytes = num_blocks * slot_bytes(layout.block_bytes)
        return num_blocks, None if claims is None else claims.add(num_bytes)


def _num_kept(
    config: EngineConfig, model: "LoadedModel", layout: KVLayout, kept: KeptHost | None
) -> int:
    """Blocks of a host tier of this model that an earlier engine left; 0 if there is none."""
    if kept is None or not config.may_have_host_tier:
        return 0
    scheme = KeyScheme(
        block_tokens=config.block_tokens,
        fingerprint=model.fingerprint,
        kv_format=layout.kv_format,
    )
    return kept.num_blocks(scheme.root(Namespace()), layout.block_bytes) or 0


def _model_name(config: EngineConfig) -> str:
    if config.model_name is not None:
        return config.model_name
    return Path(config.model).resolve().name if config.model else _BUILT_IN_NAME


def _describe_device(config: EngineConfig, model: "LoadedModel") -> str:
    if config.tensor_parallel_size == 1:
        return str(model.device)
    return f"{model.device} and {config.tensor_parallel_size - 1} more ranks"


def _describe_limits(limits: StepLimits, itl: ItlTarget | None) -> str:
    """The largest step, and where the limits come from."""
    chosen = " (chosen for this device)" if limits.is_chosen else ""
    text = (
        f"up to {limits.max_num_seqs:,} sequences and {limits.max_batched_tokens:,} tokens per step"
        f"{chosen}"
    )
    if itl is None:
        return text
    adaptive = f" or {itl.decode_steps:g} decode steps" if itl.decode_steps else ""
    return f"{text}, {1e3 * itl.min_s:g} ms{adaptive} between tokens while prompts are computed"


def _masks(limits: StepLimits, model: "LoadedModel", clock: Clock) -> MaskWorkers:
    compiler = GrammarCompiler(
        lambda: Tokenizer(model.model_dir).to_json(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    num_groups = num_groups_for(len(os.sched_getaffinity(0)))
    max_states = 2 * limits.max_num_seqs
    return MaskWorkers(compiler, clock, max_states=max_states, num_groups=num_groups)


def _cache(
    config: EngineConfig,
    model: "LoadedModel",
    layout: KVLayout,
    num_blocks: int,
    num_host_blocks: int,
    *,
    is_kept: bool,
) -> TieredCache:
    weights = load_weights(config.eviction_weights) if config.eviction == "session" else None
    return TieredCache(
        CacheConfig(
            device_blocks=num_blocks,
            block_tokens=config.block_tokens,
            host_blocks=num_host_blocks,
            storage=config.storage_backend is not None,
            write_policy=WritePolicy(config.write_policy),
            eviction=config.eviction,
            weights=weights,
            hint_share=config.hint_budget,
            fingerprint=model.fingerprint,
            kv_format=layout.kv_format,
            record_events=config.kv_events is not None and config.kv_events.is_on,
            record_host=is_kept,
        )
    )


def _scheduler(
    config: EngineConfig, limits: StepLimits, model: "LoadedModel", cache: TieredCache
) -> Scheduler:
    max_model_len = config.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {model.max_model_len} positions of "
            "the model; lower it"
        )
    settings = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        itl=_itl_target(config, model.device.type),
        policy=config.scheduling_policy,
        prefix_caching=config.prefix_caching,
        output_caching=config.output_caching,
        eos_token_ids=model.eos_token_ids,
        load_policy=config.load_policy,
        load_timeout_s=config.load_timeout_s,
        save_preempted=config.save_preempted,
        prefetch_sessions=config.prefetch_sessions,
    )
    return Scheduler(settings, cache)


def _itl_target(config: EngineConfig, device: str) -> ItlTarget | None:
    """The target for the time between tokens. On a CPU, prompt tokens are so slow that a target
    would delay first tokens; there it is used only if the operator sets one."""
    if config.max_itl_ms is not None:
        return ItlTarget(min_s=config.max_itl_ms / 1e3) if config.max_itl_ms else None
    return None if device == "cpu" else ADAPTIVE_ITL


def _limit_threads(num_threads: int | None, *, num_ranks: int = 1) -> None:
    """Set torch's threads before it is imported. Variables that the operator has set take
    precedence."""
    cores = len(os.sched_getaffinity(0))
    wanted = num_threads or max(1, (cores - 1) // num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(wanted))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Weights in huge pages make a small step a fifth faster. torch reads this only once.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _epoch() -> str:
    """The id of the server, which outlives its engines, and then an id of this engine alone."""
    server = os.environ.get(SERVER_ID_VARIABLE)
    own = secrets.token_hex(8)
    return own if server is None else f"{server}.{own}"
