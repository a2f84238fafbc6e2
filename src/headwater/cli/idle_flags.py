"""Notes about flags that have no effect in a configuration."""

from headwater.config import EngineConfig

_TIER_FLAGS = (
    *("--write-policy", "--load-policy", "--load-timeout"),
    *("--save-preempted", "--no-save-preempted"),
    *("--prefetch-sessions", "--no-prefetch-sessions"),
)
_PEER_FLAGS = (
    *("--peer-host", "--peer-port", "--peer-advertise-host", "--peer-advertise-port"),
    *("--link-host", "--link-port", "--link-advertise-host", "--link-advertise-port"),
    *("--peer-lease", "--max-inflight-prefill"),
)
_SWAP_FLAGS = frozenset({"--swap-space", "--kv-offloading-size"})


def idle_settings(engine: EngineConfig, given: frozenset[str]) -> list[str]:
    """One sentence for each flag in `given` that does nothing in this configuration."""
    sentences = []
    if "--gpu-memory-utilization" in given and engine.num_blocks_override is not None:
        sentences.append(
            "--gpu-memory-utilization does nothing here: --num-gpu-blocks-override fixes the blocks"
        )
    if "--enable-output-caching" in given and not engine.prefix_caching:
        sentences.append("--enable-output-caching does nothing here: prefix caching is off")
    if "--eviction-weights" in given and engine.eviction != "session":
        sentences.append(
            "--eviction-weights does nothing here: only --eviction session uses weights"
        )
    sentences += _idle_tiers(engine, given)
    if engine.peers is None:
        sentences += [
            f"{flag} does nothing here: without --splitwise-role there are no hand-offs"
            for flag in ("--cache-transfer-protocol", *_PEER_FLAGS)
            if flag in given
        ]
    return sentences


def _idle_tiers(engine: EngineConfig, given: frozenset[str]) -> list[str]:
    if not engine.may_have_host_tier:
        return [
            f"{flag} does nothing here: there is no host tier (--swap-space)"
            for flag in _TIER_FLAGS
            if flag in given
        ]
    sentences = []
    if given & _SWAP_FLAGS and not engine.prefix_caching:
        sentences.append("--swap-space does nothing here: prefix caching is off")
    if given & _SWAP_FLAGS and engine.write_policy == "none" and not engine.save_preempted:
        sentences.append(
            "--swap-space does nothing here: --write-policy none and --no-save-preempted leave "
            "nothing that would fill the host tier"
        )
    if engine.load_policy == "wait" and "--load-timeout" in given:
        sentences.append("--load-timeout does nothing here: --load-policy wait has no timeout")
    return sentences
