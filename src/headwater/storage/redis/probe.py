"""Checks a Redis server when it is opened.

A problem that prevents its use is an error that says what to change; a limitation of the cache
is a warning. Nothing here runs while requests are served.
"""

import uuid
from collections.abc import Mapping

from headwater.errors import ConfigError
from headwater.storage.calls import Deadline
from headwater.storage.redis.resp import ReplyError, RespConnection, command

_SENTENCES = {
    "cluster": "it is a node of a Redis cluster, which is not supported; use one server without "
    "cluster mode, or Mooncake for several machines",
    "sentinel": "it is a Redis Sentinel, which holds no data; give the address of the primary",
}


def check_server(
    link: RespConnection, *, prefix: bytes, has_ttl: bool, deadline: Deadline
) -> list[str]:
    """The limitations of the cache on this server, one sentence each. Raises ConfigError if it
    cannot work."""
    info = _read_info(link, deadline)
    sentence = _SENTENCES.get(info.get("redis_mode", ""))
    if sentence is not None:
        raise ConfigError(f"storage backend 'redis': {link.address}: {sentence}")
    is_replica = info.get("role") == "slave"
    _check_rights(link, prefix, has_ttl, deadline)
    warnings = [_eviction_warning(info, has_ttl), _type_warning(link, prefix, deadline)]
    if is_replica:
        warnings.insert(0, "it is a read-only replica: blocks are read and none is written")
    return [warning for warning in warnings if warning]


def _read_info(link: RespConnection, deadline: Deadline) -> dict[str, str]:
    """The server's INFO; empty if this user may not read it."""
    link.send([command(b"INFO")], deadline)
    try:
        text = link.value(deadline).decode(errors="replace")
    except ReplyError as error:
        if "NOPERM" not in str(error):
            raise
        return {}
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _check_rights(
    link: RespConnection, prefix: bytes, has_ttl: bool, deadline: Deadline
) -> None:
    """Try once each command that is used later, with a name that no block has."""
    name = prefix + b"probe:" + uuid.uuid4().hex.encode()
    commands = {
        "EXISTS": command(b"EXISTS", name),
        "SET": command(b"SET", name, b"probe", b"NX", b"PX", b"1000"),
        "GETRANGE": command(b"GETRANGE", name, b"0", b"1"),
        "GETEX" if has_ttl else "GET": (
            command(b"GETEX", name, b"PX", b"1000") if has_ttl else command(b"GET", name)
        ),
        "UNLINK": command(b"UNLINK", name),
        "SCAN": command(b"SCAN", b"0", b"COUNT", b"1"),
    }
    denied = []
    for verb, words in commands.items():
        link.send([words], deadline)
        try:
            link.skip_reply(deadline)
        except ReplyError as error:
            if "NOPERM" in str(error):
                denied.append(verb)
            elif "unknown command" in str(error):
                raise ConfigError(
                    f"storage backend 'redis': {link.address} does not know {verb}; Redis 6.2 or "
                    "newer is needed with ttl_s, 4.0 or newer without"
                ) from error
            # READONLY, OOM and similar errors describe the server's state, not the rights of
            # this user.
    if denied:
        user = link.address.user or "default"
        grants = " ".join(f"+{verb.lower()}" for verb in denied)
        raise ConfigError(
            f"storage backend 'redis': user {user!r} of {link.address} may not run "
            f"{', '.join(denied)} on keys that begin with {prefix.decode()!r}; allow it: "
            f"ACL SETUSER {user} {grants} ~{prefix.decode()}*"
        )


def _eviction_warning(info: Mapping[str, str], has_ttl: bool) -> str:
    policy, limit = info.get("maxmemory_policy", ""), info.get("maxmemory", "")
    if limit == "0" and not has_ttl:
        return (
            "it has no memory limit and blocks have no ttl_s: it grows until the machine is out "
            "of memory; set maxmemory with maxmemory-policy allkeys-lru"
        )
    if limit in ("", "0"):
        return ""
    if policy == "noeviction":
        return (
            "its maxmemory-policy is noeviction: when it is full, new blocks are refused; "
            "allkeys-lru replaces old ones"
        )
    if policy.startswith("volatile") and not has_ttl:
        return (
            f"its maxmemory-policy {policy} evicts only keys with a time to live, and ttl_s is "
            "not set: when it is full, new blocks are refused; set ttl_s or use allkeys-lru"
        )
    return ""


def _type_warning(link: RespConnection, prefix: bytes, deadline: Deadline) -> str:
    """Whether other programs keep values of other types under our prefix, from a sample of
    names."""
    words = (b"SCAN", b"0", b"MATCH", prefix + b"*", b"COUNT", b"100")
    try:
        _, names = link.scan(words, deadline)
        for name in names:
            link.send([command(b"TYPE", name)], deadline)
            kind = link.reply(deadline)
            if kind not in (b"+string", b"+none"):
                shown = name.decode(errors="replace")
                return (
                    f"{shown!r} is a {kind[1:].decode(errors='replace')}: another program uses "
                    "this key_prefix; choose another one"
                )
    except ReplyError:
        return ""  # this user may not query types
    return ""
