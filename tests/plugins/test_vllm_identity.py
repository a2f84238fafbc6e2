"""The connector's identity of vLLM's blocks, and the deployments that it refuses."""

from types import SimpleNamespace

import pytest

from headwater.errors import ConfigError
from headwater.plugins.settings import PluginConfig
from headwater.plugins.vllm.connector_config import ConnectorConfig, KVShape
from headwater.plugins.vllm.identity import identify_worker

LONGROPE = {"rope_type": "longrope"}


def make_layer(backend="CPU_ATTN", **attributes):
    """An attention layer of vLLM; on a CPU it also has `isa`."""
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: named, **attributes)


def make_config(model, **changes):
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            hf_overrides={},
            hf_text_config=SimpleNamespace(rope_parameters={"rope_type": "default"}),
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            kv_cache_layout="NHD",
            block_size=16,
        ),
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        compilation_config=SimpleNamespace(static_forward_context={"l0": make_layer()}),
        lora_config=None,
        weight_transfer_config=None,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        target = config
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return config


def identify(config, rank=0, **settings):
    given = PluginConfig.read(settings, "HeadwaterConnector")
    pages = "(2, 16, 1, 64)"
    return identify_worker(config, ["l0"], pages, rank, given, "0.32.0").fingerprint()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_config__dtype", "torch.float16"),
        ("model_config__quantization", "fp8"),
        ("model_config__hf_overrides", {"rope_parameters": {"factor": 4.0}}),
        ("cache_config__cache_dtype", "fp8"),
        ("cache_config__kv_cache_layout", "HND"),
        ("cache_config__block_size", 32),
        ("cache_config__prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config__world_size", 2),
        ("parallel_config__tensor_parallel_size", 2),
        ("parallel_config__pipeline_parallel_size", 2),
        ("parallel_config__decode_context_parallel_size", 2),
        ("parallel_config__cp_kv_cache_interleave_size", 16),
        ("compilation_config__static_forward_context", {"l0": make_layer("FLASH_ATTN")}),
        ("compilation_config__static_forward_context", {"l0": make_layer(isa="amx")}),
    ],
)
def test_a_server_that_computes_or_stores_other_values_has_another_identity(model, name, value):
    """The same weights, in a folder of the same name, have another identity when they are
    served with one other option."""
    assert identify(make_config(model)) != identify(make_config(model, **{name: value}))


def test_the_element_type_of_the_model_counts_beside_that_of_the_cache(model):
    """Two models in fp8 caches, computed in bfloat16 and in float16, differ."""
    ours, theirs = (
        make_config(model, cache_config__cache_dtype="fp8", model_config__dtype=dtype)
        for dtype in ("torch.bfloat16", "torch.float16")
    )

    assert identify(ours) != identify(theirs)


def test_another_rank_seed_or_content_of_the_weights_has_another_identity(model, monkeypatch):
    """Blocks of one rank are never those of another, nor those of other weights."""
    first = identify(make_config(model))
    other_rank = identify(make_config(model), rank=1)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = identify(make_config(model))
    monkeypatch.delenv("PYTHONHASHSEED")
    (model / "model.safetensors").write_bytes(b"other weights")
    changed = identify(make_config(model))

    assert len({first, other_rank, seeded, changed}) == 4


def test_the_longest_request_counts_only_where_it_changes_the_model(model):
    """vLLM chooses between LongRoPE's factors by `max_model_len`; other models ignore it."""
    plain = [make_config(model, model_config__max_model_len=size) for size in (4096, 8192)]
    long_ = [make_config(model, model_config__max_model_len=size) for size in (4096, 8192)]
    for config in long_:
        config.model_config.hf_text_config.rope_parameters = LONGROPE

    assert identify(plain[0]) == identify(plain[1])
    assert identify(long_[0]) != identify(long_[1])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lora_config", object(), '"adapters": "named"'),
        ("cache_config__prefix_caching_hash_algo", "xxhash", "use sha256"),
        ("model_config__hf_overrides", lambda config: config, "hf_overrides is a function"),
        ("model_config__model", "org/name", "revision of the weights"),
    ],
)
def test_what_cannot_be_identified_is_refused(model, monkeypatch, name, value, message):
    """The message says what to change."""
    monkeypatch.setenv("HF_HUB_CACHE", str(model / "empty"))
    with pytest.raises(ConfigError, match=message):
        identify(make_config(model, **{name: value}))


def test_named_adapters_are_allowed(model):
    """The operator promises that names are unique."""
    assert identify(make_config(model, lora_config=object()), adapters="named")


def test_storage_is_refused_where_weights_change_while_vllm_runs(model):
    """Storage would serve blocks of the old weights; a host tier alone is emptied by vLLM."""
    shape = KVShape(
        layer_names=["l0"], page_bytes=1, block_tokens=16, num_blocks=1, num_ranks=1, rank=0
    )
    config = make_config(model, weight_transfer_config=object())
    with_storage, without = (
        ConnectorConfig.read(
            SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy="recompute")
        )
        for extra in ({"config": {"path": "/kv"}}, {})
    )

    with pytest.raises(ConfigError, match="weight_transfer_config"):
        with_storage.identify(config, shape, "pages")
    assert without.identify(config, shape, "pages")


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "MambaSpec", "RSWASpec"])
def test_attention_whose_blocks_vllm_takes_away_is_refused(kind):
    """vLLM puts one block without content in the place of those outside a window."""
    spec = type(kind, (), {})()
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["l0"])

    with pytest.raises(ConfigError, match=f"kind {kind}.*use HeadwaterTier"):
        KVShape.of(SimpleNamespace(), SimpleNamespace(kv_cache_groups=[group]))


def test_settings_of_storage_that_could_have_no_effect_are_refused():
    """A bound below one write would drop every write."""
    with pytest.raises(ConfigError, match="at least 16"):
        PluginConfig.read({"max_waiting_writes": 8}, "connector")
    with pytest.raises(ConfigError, match="adapters has no effect in HeadwaterTier"):
        PluginConfig.read({"adapters": "named"}, "HeadwaterTier", unused=["adapters"])
