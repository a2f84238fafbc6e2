"""A KV connector for vLLM: a host tier and storage with Headwater's policies.

    --kv-transfer-config '{"kv_connector": "HeadwaterConnector",
      "kv_connector_module_path": "headwater.plugins.vllm.connector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"host_bytes": "8GiB", "config": {"path": "/var/lib/kv"}}}'

vLLM makes one connector in its scheduler, which decides (`HostTier`), and one in each worker,
which moves bytes (`ConnectorWorker`). The connector also works on a CPU. On GPUs prefer
`HeadwaterTier`: vLLM's own offloading overlaps copies with compute, this connector copies
between steps.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from headwater.clock import SystemClock
from headwater.plugins.storage_metrics import sample_storage, sample_writes
from headwater.plugins.vllm.connector_config import ConnectorConfig, KVShape
from headwater.plugins.vllm.connector_metrics import (
    ConnectorPromMetrics,
    ConnectorStats,
    StatsDelta,
)
from headwater.plugins.vllm.connector_worker import ConnectorWorker
from headwater.plugins.vllm.host_tier import HostTier
from headwater.plugins.vllm.messages import RankReport, StepOrders
from headwater.plugins.vllm.pages import KVPages

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HeadwaterConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps blocks that leave vLLM's KV cache in host memory and storage, and loads them
    back."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ConnectorConfig.read(self._kv_transfer_config)
        self._shape = KVShape.of(vllm_config, kv_cache_config)
        self._clock = SystemClock()
        self._tier: HostTier | None = None
        self._worker: ConnectorWorker | None = None
        self._live: dict[str, Request] = {}
        self._starts: dict[str, int] = {}
        """For each living request, how many of its blocks vLLM's own cache has."""
        self._num_slots = self._config.num_slots(self._shape)
        self._failed_blocks: set[int] = set()
        self._totals = StatsDelta()
        if role == KVConnectorRole.SCHEDULER:
            self._tier = HostTier(self._config.host_tier(self._shape), self._clock)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that was not saved is only a miss

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._shape.block_tokens
        hashes = self._hashes(request, (request.num_tokens - 1) // tokens)
        if not hashes or request.skip_reading_prefix_cache:
            return 0, False
        start = num_computed_tokens // tokens
        found = self.tier.match(request.request_id, hashes, start)
        if found is None:
            return None, False
        self._starts[request.request_id] = start
        return found * tokens, found > 0

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        count = num_external_tokens // self._shape.block_tokens
        start = self._starts[request.request_id]
        # vLLM's order: local blocks, then blocks to load, then room for the rest.
        block_ids = blocks.get_block_ids()[0][start : start + count]
        hashes = self._hashes(request, start + count)
        self.tier.load(request.request_id, hashes, start, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401 - vLLM's
        for new in scheduler_output.scheduled_new_reqs:
            self._save(new.req_id, new.num_computed_tokens, scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._save(name, computed, scheduler_output)
        orders = self.tier.take_orders()
        orders.computes = scheduler_output.total_num_scheduled_tokens > 0
        return orders

    def on_new_request(self, request: "Request") -> None:
        self._live[request.request_id] = request

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self.tier.receive(report)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._live.pop(request.request_id, None)
        self._starts.pop(request.request_id, None)
        self.tier.finish(
            request.request_id,
            request.num_prompt_tokens,
            request.num_tokens - request.num_prompt_tokens,
        )
        return False, None  # everything to be saved has been copied already

    def has_pending_push_work(self) -> bool:
        return self._tier is not None and self._tier.has_work

    def reset_cache(self) -> bool:
        """Forget the host tier. Storage keeps its blocks, which have the weights in their keys;
        a server that changes its weights while it runs is refused."""
        self.tier.reset()
        return True

    @property
    def tier(self) -> HostTier:
        """The host tier; only in vLLM's scheduler."""
        assert self._tier is not None, "the scheduler's side was called in a worker"
        return self._tier

    def _hashes(self, request: "Request", count: int) -> list[bytes]:
        return [bytes(block_hash) for block_hash in request.block_hashes[:count]]

    def _save(self, name: str, computed: int, scheduler_output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Save the blocks that are complete after this step. Hashes cover known tokens only, so
        tokens that are drafted or sampled in this step are not included."""
        request = self._live.get(name)
        if request is None or self._kv_cache_manager is None:
            return
        total = computed + scheduler_output.num_scheduled_tokens.get(name, 0)
        num_blocks = total // self._shape.block_tokens
        if num_blocks <= self.tier.num_saved(name):
            return  # most steps complete no block
        hashes = self._hashes(request, num_blocks)
        if hashes:
            block_ids = self._kv_cache_manager.get_block_ids(name)[0]
            self.tier.save(name, hashes, block_ids)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = {name: kv_caches[name] for name in self._shape.layer_names}
        pages = KVPages(layers, self._shape.num_blocks)
        self._shape.require_bytes(pages.block_bytes)
        self._worker = ConnectorWorker(
            pages,
            self._num_slots,
            self._config.identify(self._vllm_config, self._shape, pages.describe()),
            self._config.storage,
            self._clock,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        if self._worker is not None and isinstance(self._connector_metadata, StepOrders):
            self._worker.start(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads end before vLLM schedules their requests."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,  # noqa: ANN401 - a tensor
        attn_metadata: Any,  # noqa: ANN401 - vLLM's
        **kwargs: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """Nothing to do: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, StepOrders):
            self._worker.save(self._connector_metadata)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        arrivals = self._worker.take_arrivals()
        self._failed_blocks |= arrivals.failed_blocks
        return None, arrivals.requests or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> RankReport | None:
        return None if self._worker is None else self._worker.take_report()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Stats since the last call. vLLM adds those of the scheduler, where writes wait, to
        those of the workers."""
        if self._tier is not None:
            return self._totals.take(sample_writes(self._tier.waiting))
        if self._worker is None or not self._worker.take_changed():
            return None
        storage = self._worker.storage
        assert storage is not None, "only jobs of storage change its stats"
        block_bytes = self._worker.slab.block_bytes
        return self._totals.take(sample_storage(storage.stats(), storage.links, block_bytes))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
