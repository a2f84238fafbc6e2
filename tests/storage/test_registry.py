"""Backends by name, settings by name, and error messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.storage import Opening, open_storage
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.storage.mooncake.config import mooncake_config
from headwater.storage.settings import parse_bytes
from headwater.testing.storage import make_format

OPENING = Opening(format=make_format())


class OwnStorage(MemoryStorage):
    """A plug-in."""

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> "OwnStorage":
        return cls(MemoryConfig(**settings), opening.format)


def test_a_third_party_backend_is_named_by_module_and_class() -> None:
    """No registration is needed."""
    path = f"{__name__}:OwnStorage"

    assert isinstance(open_storage(path, {"capacity_bytes": 9}, OPENING), OwnStorage)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("reddis", {}, "unknown storage backend 'reddis'; did you mean 'redis'"),
        ("tape", {}, "known: file, memory, mooncake, redis, or your own as 'module:Class'"),
        ("no.such:Thing", {}, "'no.such:Thing' cannot be imported"),
        ("json:Storage", {}, "'json' has no 'Storage'"),
        ("memory", {"capacity_byte": 1}, "did you mean 'capacity_bytes'"),
        ("memory", {"capacity_bytes": "many"}, "'many' is not a number of bytes"),
        ("memory", {"capacity_bytes": True}, "must be a number of bytes"),
        ("memory", {"capacity_bytes": 0}, "must be positive"),
        ("file", {}, "needs the setting path"),
        ("file", {"path": 3}, "path of storage backend 'file' must be of type str, got 3"),
        ("file", {"path": ""}, "needs the setting path"),
        ("file", {"path": "x", "num_threads": 0}, "num_threads must be positive"),
        ("file", {"path": "x", "slab_bytes": -1}, "slab_bytes must be positive"),
        ("file", {"path": "x", "reserve_bytes": -1}, "reserve_bytes not negative"),
        ("redis", {"url": "http://x"}, "is not a Redis URL"),
        ("redis", {"url": "redis://[::1"}, "is not a Redis URL"),
        ("redis", {"url": "redis://host/first"}, "must be a number, got 'first'"),
        ("redis", {"url": "redis://host:99999"}, "no valid port"),
        ("redis", {"ttl_s": -1}, "ttl_s must be positive"),
        ("redis", {"tls_ca_file": "/no/such", "url": "rediss://x"}, "tls_ca_file '/no/such'"),
        ("mooncake", {}, "needs a master"),
        ("mooncake", {"master": "x:1", "protocol": "pigeon"}, "tcp or rdma"),
    ],
)
def test_mistakes_in_settings_get_a_message(
    name: str, settings: dict[str, Any], sentence: str
) -> None:
    """The error is raised before serving starts, with what to change."""
    with pytest.raises(ConfigError) as caught:
        open_storage(name, settings, OPENING)
    assert sentence in str(caught.value)


def test_a_url_that_is_wrong_does_not_show_its_password() -> None:
    """Error messages end up in logs."""
    with pytest.raises(ConfigError) as caught:
        open_storage("redis", {"url": "rdis://user:secret@host"}, OPENING)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(4096, 4096), ("4096", 4096), ("512MiB", 1 << 29), ("16 GB", 16 << 30), ("1.5k", 1536)],
)
def test_sizes_are_written_as_people_write_them(text: str | int, num_bytes: int) -> None:
    """A unit is a power of 1024, whatever its name."""
    assert parse_bytes(text) == num_bytes


def test_mooncake_is_configured_in_its_own_words(tmp_path: Path) -> None:
    """Settings override the environment, which overrides the file of MOONCAKE_CONFIG_PATH."""
    file = tmp_path / "mooncake.json"
    file.write_text(
        '{"master_server_address": "file:1", "global_segment_size": "2gb", "device_name": "d",'
        ' "protocol": "rdma", "something_else": 1}'
    )
    environ = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_MASTER": "environment:1"}
    environ["MOONCAKE_LOCAL_BUFFER_SIZE"] = "1048576"

    config = mooncake_config({"protocol": "tcp", "local_buffer_size": 4096}, environ)

    assert (config.master, config.protocol, config.rdma_devices) == (
        "environment:1",
        "tcp",
        "d",
    )
    assert (config.segment_bytes, config.buffer_bytes) == (2 << 30, 4096)


def test_a_mooncake_file_that_cannot_be_read_is_named() -> None:
    """An unreadable file is not silently ignored."""
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH '/no/such'"):
        mooncake_config({}, {"MOONCAKE_CONFIG_PATH": "/no/such"})
