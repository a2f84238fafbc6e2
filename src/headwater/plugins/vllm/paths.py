"""The keys of a request in the order of its tokens, as vLLM's offloading scheduler records them."""

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

GROUP_BYTES = 4
"""vLLM's offload key is a block hash and the number of its KV cache group."""


def group_of(key: OffloadKey) -> bytes:
    """The KV cache group of a key."""
    return bytes(key[-GROUP_BYTES:])


def positions(req_context: ReqContext) -> dict[OffloadKey, int]:
    """End token of every key of the request, stored or not."""
    ends: dict[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
    return ends


def group_paths(req_context: ReqContext) -> dict[bytes, list[OffloadKey]]:
    """The keys of each KV cache group, from the start of the prompt on."""
    ends = positions(req_context)
    paths: dict[bytes, list[OffloadKey]] = {}
    for key in sorted(ends, key=ends.__getitem__):
        paths.setdefault(group_of(key), []).append(key)
    return paths
