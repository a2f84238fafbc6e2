"""SGLang's HiCache storage, created by its factory and called like its cache controller
does."""

import hashlib
from threading import Event

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from headwater.errors import ConfigError
from tests.plugins.backends import SHARED, end_hanging_calls

PAGE, LAYERS, HEADS, DIM, TOKENS = 16, 2, 2, 32, 256


class Pool:
    """A host pool in the layout `page_first`: keys and values of a page are one piece each."""

    page_size, layer_num, head_num, head_dim = PAGE, LAYERS, HEADS, DIM
    layout = "page_first"
    dtype = torch.bfloat16

    def __init__(self):
        self.kv_buffer = torch.zeros((2, TOKENS, LAYERS, HEADS, DIM), dtype=self.dtype)

    def get_page_buffer_meta(self, indices):
        size = LAYERS * HEADS * DIM * self.dtype.itemsize
        start, half = self.kv_buffer.data_ptr(), TOKENS * size
        first = [start + index * size for index in indices.tolist()[::PAGE]]
        pointers = [at for one in first for at in (one, one + half)]
        return pointers, [PAGE * size] * len(pointers)

    def get_dummy_flat_data_page(self):
        return torch.zeros(2 * PAGE * LAYERS * HEADS * DIM, dtype=self.dtype)


@pytest.fixture
def make_backend(model):
    backends = []
    SHARED.clear()

    def make(pool=None, *, v1=True, config=None, **settings):
        extra = {
            "backend_name": "headwater",
            "module_path": "headwater.plugins.sglang",
            "class_name": "HeadwaterHiCache",
            "interface_v1": int(v1),
            "prefetch_threshold": 64,
            "backend": "tests.plugins.backends:SharedMemory",
            "config": {"name": "store"},
            **settings,
        }
        fields = {"model_name": str(model), "tp_rank": 0, "tp_size": 1, **(config or {})}
        storage_config = HiCacheStorageConfig(
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            extra_config=extra,
            **fields,
        )
        pool = pool or Pool()
        backend = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
        backends.append(backend)
        backend.register_mem_pool_host(pool)
        return backend, pool

    yield make
    end_hanging_calls()
    for backend in backends:
        backend.close()


def hashes_of(count):
    return [hashlib.sha256(str(n).encode()).hexdigest() for n in range(count)]


def tokens_of(pages):
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])


def test_pages_move_in_place_between_two_instances(make_backend):
    """Pages written from one host pool are found and read into another's pages."""
    (first, source), (second, target) = make_backend(), make_backend()
    source.kv_buffer.copy_(torch.rand(source.kv_buffer.shape))
    keys = hashes_of(3)

    assert first.batch_set_v1(keys, tokens_of([0, 1, 2])) == [True] * 3
    assert second.batch_exists([*keys, "f" * 64]) == 3
    assert second.batch_get_v1(keys, tokens_of([5, 6, 7])) == [True] * 3

    expected = source.kv_buffer[:, : 3 * PAGE]
    assert torch.equal(target.kv_buffer[:, 5 * PAGE : 8 * PAGE], expected)
    assert first.exists(keys[0])


def test_flat_pages_come_back_where_the_zero_copy_interface_is_off(make_backend):
    """SGLang's generic interface has one tensor per page."""
    backend, pool = make_backend(v1=False)
    pages = [torch.rand(pool.get_dummy_flat_data_page().shape).to(pool.dtype) for _ in range(2)]
    keys = hashes_of(2)

    assert backend.batch_set(keys, pages)
    into = [pool.get_dummy_flat_data_page() for _ in range(3)]
    read = backend.batch_get([*keys, "f" * 64], into)

    assert torch.equal(read[0], pages[0])
    assert torch.equal(read[1], pages[1])
    assert read[2] is None


def test_a_damaged_page_and_those_after_it_are_not_used(make_backend):
    """The leading pages are used; SGLang computes the rest."""
    backend, pool = make_backend()
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    keys = hashes_of(3)
    backend.batch_set_v1(keys, tokens_of([0, 1, 2]))
    wanted = pool.kv_buffer[0, PAGE : 2 * PAGE].contiguous().view(torch.uint8).numpy().tobytes()
    damaged = next(v for v in SHARED["store"].values.values() if bytes(v[160:]) == wanted)
    damaged[160 + 7] ^= 4

    assert backend.batch_get_v1(keys, tokens_of([5, 6, 7])) == [True, False, True]


def test_storage_that_hangs_is_a_miss_and_leaves_pages_alone(make_backend):
    """The prefetch thread continues at the deadline."""
    backend, pool = make_backend(lookup_timeout_s=0.05, read_timeout_s=0.05)
    pool.kv_buffer[:, :PAGE] = 1
    keys = hashes_of(1)
    backend.batch_set_v1(keys, tokens_of([0]))
    store = SHARED["store"]
    store.hang = Event()

    assert backend.batch_get_v1(keys, tokens_of([5])) == [False]
    store.hang.set()

    assert not pool.kv_buffer[:, 5 * PAGE : 6 * PAGE].any()


@pytest.mark.parametrize(
    "change", [{"tp_size": 2}, {"tp_rank": 1, "tp_size": 2}, {"tp_size": 4}]
)
def test_another_rank_or_size_finds_nothing(make_backend, change):
    """Parallel sizes are part of every key."""
    first, _ = make_backend()
    other, _ = make_backend(config=change)
    keys = hashes_of(1)
    first.batch_set_v1(keys, tokens_of([0]))

    assert (first.batch_exists(keys), other.batch_exists(keys)) == (1, 0)


def test_another_element_type_or_layout_finds_nothing(make_backend):
    """SGLang's own file backend does not distinguish element types and layouts."""
    first, _ = make_backend()
    keys = hashes_of(1)
    first.batch_set_v1(keys, tokens_of([0]))
    pool = Pool()
    pool.layout = "page_first_direct"
    other, _ = make_backend(pool)

    assert other.batch_exists(keys) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": {"model_name": "org/name"}}, "does not pass the revision"),
        ({"config": {"should_split_heads": True}}, "tp_lcm_size"),
        ({"read_timeout": 1}, "did you mean 'read_timeout_s'"),
    ],
)
def test_unknown_and_unsupported_settings_are_refused(make_backend, settings, message):
    """Such settings are refused at the start, with what to do."""
    with pytest.raises(ConfigError, match=message):
        make_backend(**settings)


def test_a_model_with_another_pool_than_its_kv_cache_is_refused(make_backend):
    """Prefixes of such a model could never be restored, so SGLang fails at the start and not in
    a thread."""
    backend, pool = make_backend()

    backend.register_mem_host_pool_v2(pool, "kv")
    with pytest.raises(ConfigError, match="a pool 'mamba' beside its KV cache"):
        backend.register_mem_host_pool_v2(pool, "mamba")
