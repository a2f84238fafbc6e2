"""SGLang's own storage tests, host pool and cache controller, run against the backend.

Only where SGLang is installed; scripts/test-plugins does that. SGLang's tests are not copied: they are
imported from its package, with Headwater's backend in place of the one they were written for.
"""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.plugins.backends import SHARED
from tests.plugins.doubles.finder import is_real

pytestmark = pytest.mark.skipif(not is_real("sglang"), reason="sglang is not installed")

PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 32


def make_backend(config):
    """The backend, made by SGLang's factory as its cache controller does."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config.extra_config = {
        "backend_name": "headwater",
        "module_path": "headwater.plugins.sglang",
        "class_name": "HeadwaterHiCache",
        "interface_v1": 1,
        "weights": "of the test",
        "backend": "tests.plugins.backends:SharedMemory",
        "config": {"name": "store"},
    }
    return StorageBackendFactory.create_backend("dynamic", config, None)


def make_config(**changes):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "of/the-test",
    }
    return HiCacheStorageConfig(**{**fields, **changes})


def make_pool(layout, dtype=torch.bfloat16):
    """SGLang's own device and host pools, on CPU."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(
        size=8 * PAGE,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
    )
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    return pool


@pytest.mark.parametrize(
    ("is_mla", "rank", "size"),
    [(False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8)],
)
def test_sglangs_test_of_batches_passes(monkeypatch, is_mla, rank, size):
    """The four cases of SGLang's `test_batch_operation`, which it has for its Mooncake store,
    pass: pages with keys and values or one latent, first and later ranks."""
    SHARED.clear()
    name = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"
    tests = importlib.import_module(name)
    monkeypatch.setattr(tests, "MooncakeStore", make_backend)
    config = make_config(is_mla_model=is_mla, tp_rank=rank, tp_size=size)

    tests.test_batch_operation(config)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_sglangs_controller_moves_pages_of_its_own_host_pool(layout):
    """The controller's page functions move pages between two host pools, without a copy if the
    layout allows it."""
    from sglang.srt.managers.cache_controller import HiCacheController

    SHARED.clear()
    source, target = make_pool(layout), make_pool(layout)
    is_v1 = layout == "page_first"
    keys = [f"{n:064x}" for n in range(3)]
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False, increment=print)
    sides = []
    for pool in (source, target):
        backend = make_backend(make_config(is_page_first_layout=is_v1))
        backend._pieces_in_place = is_v1
        backend.register_mem_pool_host(pool)
        sides.append(
            SimpleNamespace(
                storage_backend=backend,
                storage_host_pool=pool,
                mem_pool_host=pool,
                page_size=PAGE,
            )
        )
    names = ("_page_set_zero_copy", "_page_get_zero_copy")
    names = names if is_v1 else ("_generic_page_set", "_generic_page_get")
    save, load = (partial(getattr(HiCacheController, name)) for name in names)

    assert save(sides[0], keys, torch.arange(3 * PAGE))
    assert sides[1].storage_backend.batch_exists([*keys, "f" * 64]) == 3
    into = torch.arange(4 * PAGE, 7 * PAGE)
    assert load(sides[1], operation, keys, into) == 3

    for n in range(3):
        expected = source.get_data_page(n * PAGE, flat=True)
        assert torch.equal(target.get_data_page((4 + n) * PAGE, flat=True), expected)
    for side in sides:
        side.storage_backend.close()
