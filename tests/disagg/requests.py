"""Requests for hand-offs, prompts that share prefixes, and a storage backend."""

from dataclasses import replace

from headwater.scheduler.request import Request
from headwater.storage.codec import BlockFormat
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.tiers import make_echo_request


def make_prompt(num_tokens: int, *, family: int = 0) -> list[int]:
    """The same tokens each time. Prompts of one family share their beginning."""
    return [(family * 7 + at * (family + 3)) % 50 for at in range(num_tokens)]


def make_handoff(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 6,
    prefill: str = "p",
    local_fallback: bool = True,
    cache_salt: str = "",
) -> Request:
    """A request whose prompt the instance `prefill` computes."""
    request = make_echo_request(name, tokens, max_tokens=max_tokens, cache_salt=cache_salt)
    return replace(request, prefill=prefill, local_fallback=local_fallback)


def make_storage() -> MemoryStorage:
    """Storage with room for all blocks that echo engines of four tokens per block write."""
    return MemoryStorage(MemoryConfig(), BlockFormat(fingerprint=bytes(32), block_bytes=32))
