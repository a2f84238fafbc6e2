"""Storage for SGLang's HiCache: any Headwater backend below its host pool.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "headwater", "module_path": "headwater.plugins.sglang",
      "class_name": "HeadwaterHiCache", "interface_v1": 1, "config": {"path": "/var/lib/kv"}}'

SGLang calls it from its prefetch and backup threads. A write reads SGLang's host pages in place. A
read goes through staging memory: SGLang's pages are touched only before the call returns, so a call
that never ends costs a miss and not the prefetch thread.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from headwater.clock import SystemClock
from headwater.errors import ConfigError, StorageError
from headwater.plugins.identity import BlockIdentity, identify_weights, storage_keys
from headwater.plugins.settings import PluginConfig
from headwater.plugins.staging import StagedStorage
from headwater.plugins.versions import require_tested
from headwater.storage import BlockRead, BlockWrite, StorageStats
from headwater.types import BlockKey

_SLICE_BLOCKS = 32
_NUM_SLICES = 4

_NOT_OURS = {
    "backend_name",
    "class_name",
    "enable_metadata_cache",
    "hicache_storage_pass_prefix_keys",
    "interface_v1",
    "metadata_ttl",
    "module_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
}
"""Fields of `hicache-storage-backend-extra-config` that SGLang itself reads."""


class HeadwaterHiCache(HiCacheStorage):
    """Pages of SGLang's host pool in storage, by hash: bounded, checksummed, with breakers and
    deadlines."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ANN401 - SGLang's
        extra = dict(storage_config.extra_config or {})
        self._pieces_in_place = bool(extra.get("interface_v1", 0))
        ours = {name: value for name, value in extra.items() if name not in _NOT_OURS}
        unused = ["adapters", "max_waiting_writes"]
        self._config = PluginConfig.read(ours, "HeadwaterHiCache", unused=unused)
        self._version = require_tested("sglang", allow_untested=self._config.allow_untested)
        self._sizes = storage_config
        if storage_config.should_split_heads:
            raise ConfigError(
                "tp_lcm_size with another tensor parallel size divides pages between ranks; "
                "this is not supported, remove tp_lcm_size"
            )
        self._storage: StagedStorage | None = None
        self._identity = b""
        self._pieces = 1
        """Contiguous pieces of a page. Each is stored as a block."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - SGLang's
        """Open the storage. Only now are element type and layout known: the host pool has
        them."""
        self.mem_pool_host = mem_pool_host
        if self._pieces_in_place:
            first = range(mem_pool_host.page_size)
            pointers, lengths = mem_pool_host.get_page_buffer_meta(_Indices(first))
            self._pieces, block_bytes = len(pointers), int(lengths[0])
        else:
            page = mem_pool_host.get_dummy_flat_data_page()
            self._pieces, block_bytes = 1, page.numel() * page.element_size()
        self._identity = self._identify(mem_pool_host, block_bytes).fingerprint()
        guarded = self._config.open(
            self._identity, block_bytes, _pool_memory(mem_pool_host), SystemClock()
        )
        self._storage = StagedStorage(
            guarded, block_bytes, slice_blocks=_SLICE_BLOCKS, num_slices=_NUM_SLICES
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's
        """SGLang names every pool that a model needs. A prefix without all of them is of no
        use, so a model that needs other pools than that of the KV cache is refused at the
        start."""
        if str(host_pool_name) != "kv":
            raise ConfigError(
                f"the model keeps a pool {str(host_pool_name)!r} beside its KV cache, which this "
                "backend does not store; use another --hicache-storage-backend for it"
            )

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ANN401 - SGLang's
        """Leading pages that are complete in storage."""
        try:
            [found] = self.storage.contains(
                [self._names(keys)], timeout_s=self._config.lookup_timeout_s
            )
        except StorageError:
            return 0  # counted and logged where the call failed
        return found // self._pieces

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,  # noqa: ANN401 - a tensor
        extra_info: Any = None,  # noqa: ANN401 - SGLang's
    ) -> list[bool]:
        return self._read(keys, self._page_views(host_indices))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,  # noqa: ANN401 - a tensor
        extra_info: Any = None,  # noqa: ANN401 - SGLang's
    ) -> list[bool]:
        return self._write(keys, self._page_views(host_indices))

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,  # noqa: ANN401 - tensors
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> list[Any]:
        found = self._read(keys, [_tensor_view(tensor) for tensor in target_locations])
        return [
            tensor if is_read else None
            for tensor, is_read in zip(target_locations, found, strict=True)
        ]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:  # noqa: ANN401 - SGLang's
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,  # noqa: ANN401 - tensors
        target_locations: Any = None,  # noqa: ANN401 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> bool:
        kept = [value.contiguous() for value in values]
        return all(self._write(keys, [_tensor_view(value) for value in kept]))

    def set(
        self,
        key: str,
        value: Any = None,  # noqa: ANN401 - a tensor
        target_location: Any = None,  # noqa: ANN401 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> bool:
        return self.batch_set([key], [value])

    def clear(self) -> None:
        """Remove every page of this deployment that this process may remove."""
        self.storage.remove(None, timeout_s=self._config.write_timeout_s)

    def storage_stats(self) -> StorageStats:
        """Statistics of the storage backend."""
        return self.storage.stats()

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()

    @property
    def storage(self) -> StagedStorage:
        """The storage, which is open after SGLang has registered its host pool."""
        if self._storage is None:
            raise StorageError("SGLang has not registered its host pool yet")
        return self._storage

    def _identify(self, pool: Any, block_bytes: int) -> BlockIdentity:  # noqa: ANN401 - SGLang's
        sizes = self._sizes
        model = str(sizes.model_name)
        if self._config.weights is None and not Path(model).is_dir():
            raise ConfigError(
                f"SGLang does not pass the revision of {model!r} to a storage backend; serve a "
                'local directory, or set "weights" to its commit'
            )
        rank = "all ranks" if sizes.is_mla_model else f"rank {sizes.tp_rank} of {sizes.tp_size}"
        shape = ", ".join(
            f"{name} {getattr(pool, name)}"
            for name in ("layer_num", "head_num", "head_dim", "kv_cache_dim", "start_layer")
            if hasattr(pool, name)
        )
        return BlockIdentity(
            engine=f"sglang {self._version}",
            weights=identify_weights(model, None, self._config.weights),
            dtype=_dtype(pool),
            layout=f"{pool.layout} {self._pieces} x {block_bytes} bytes, {shape}",
            shard=(
                f"tp {rank}, pp {sizes.pp_rank} of {sizes.pp_size}, cp {sizes.attn_cp_rank} of "
                f"{sizes.attn_cp_size}, dcp {sizes.dcp_rank} of {sizes.dcp_size}"
            ),
            block_tokens=str(pool.page_size),
            hashing="sglang's page hash",
        )

    def _names(self, keys: Sequence[str]) -> list[BlockKey]:
        pieces = [f"{key}/{piece}".encode() for key in keys for piece in range(self._pieces)]
        return storage_keys(self._identity, pieces)

    def _page_views(self, host_indices: Any) -> list[memoryview]:  # noqa: ANN401 - a tensor
        pointers, lengths = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return [_view(int(at), int(size)) for at, size in zip(pointers, lengths, strict=True)]

    def _read(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[bool]:
        names = self._names(keys)
        good: list[bool] = []
        for at in range(0, len(names), _SLICE_BLOCKS):
            end = at + _SLICE_BLOCKS
            try:
                outcomes = self.storage.read(
                    names[at:end], views[at:end], timeout_s=self._config.read_timeout_s
                )
            except StorageError:
                break  # counted and logged where the call failed
            good += [outcome is BlockRead.READ for outcome in outcomes]
            if not all(good):
                break  # only leading pages are useful
        return self._pages(good, len(keys))

    def _write(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[bool]:
        names = self._names(keys)
        parents = [BlockKey(self._identity), *names[:-1]]
        try:
            outcomes = self.storage.write(
                names, views, parents=parents, timeout_s=self._config.write_timeout_s
            )
        except StorageError as error:
            _wait_until_quiet(error)
            outcomes = []
        return self._pages([one is not BlockWrite.REFUSED for one in outcomes], len(keys))

    def _pages(self, good: list[bool], num_pages: int) -> list[bool]:
        """For each page, whether all its pieces are good."""
        good = good + [False] * (num_pages * self._pieces - len(good))
        per = self._pieces
        return [all(good[page * per : (page + 1) * per]) for page in range(num_pages)]


class _Indices(list[int]):
    """Token indices, for code in which SGLang expects a tensor."""

    def tolist(self) -> list[int]:
        return list(self)


def _wait_until_quiet(error: StorageError) -> None:
    """SGLang reuses its pages when a write has returned, so wait until the pages are not read
    any more."""
    quiet = getattr(error, "quiet", None)
    if quiet is not None:
        quiet.wait()


def _view(address: int, size: int) -> memoryview:
    """The bytes at an address that SGLang keeps mapped."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _tensor_view(tensor: Any) -> memoryview:  # noqa: ANN401 - a contiguous CPU tensor
    return _view(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _dtype(pool: Any) -> str:  # noqa: ANN401 - SGLang's
    """Element type of a host pool; empty if the pool does not say."""
    dtype = getattr(pool, "dtype", None) or getattr(
        getattr(pool, "kv_buffer", None), "dtype", ""
    )
    return str(dtype)


def _pool_memory(pool: Any) -> memoryview | None:  # noqa: ANN401 - SGLang's
    """The whole host pool, for backends that register memory."""
    buffer = getattr(pool, "kv_buffer", None)
    if buffer is None or isinstance(buffer, list):
        return None
    return _tensor_view(buffer)
