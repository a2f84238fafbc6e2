"""Builds what an instance needs for hand-offs: control connections, links, both roles."""

import secrets
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from headwater.cache import Namespace
from headwater.clock import Clock
from headwater.config import EngineConfig, PeersConfig, peer_token_from_environment
from headwater.disagg.exchange import Exchange
from headwater.disagg.handoff import HandoffConfig
from headwater.disagg.hands import Hands, Memory
from headwater.disagg.link import BlockMemory, Sender
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.registry import Links
from headwater.disagg.peers import PeerConfig, PeerService
from headwater.engine.client import EngineInfo
from headwater.engine.core import EngineCore
from headwater.errors import ConfigError
from headwater.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from headwater.device.kv import KVPool


class Blocks(BlockMemory, Memory, Protocol):
    """What links and the loop need of the device's memory."""


def open_peers(
    config: EngineConfig,
    core: EngineCore,
    scheduler: Scheduler,
    pool: "KVPool",
    info: EngineInfo,
    clock: Clock,
) -> EngineInfo:
    """Let `core` hand off, where that is asked for; `info` with where its peers reach it."""
    if config.peers is None or not _hands_off(config.peers):
        return info
    # Beside torch, which is imported by the time there is a pool.
    from headwater.device.blocks import PoolBlocks

    address = join_peers(config, core, scheduler, PoolBlocks(pool), clock)
    return replace(info, role=config.peers.role, peer_address=address)


def shares_blocks(config: EngineConfig) -> bool:
    """Whether peers on this machine are to read this instance's blocks where they lie."""
    return config.peers is not None and config.peers.link == "shm" and _hands_off(config.peers)


def _hands_off(peers: PeersConfig) -> bool:
    return peers.role != "mixed" or peer_token_from_environment() is not None


class _Unhurried:
    """A sender whose end the loop does not wait for."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.push = sender.push
        self.cancel = sender.cancel

    def close(self) -> None:
        """The outcomes of what was pushed still come."""
        Thread(target=self._sender.close, name="sender-close", daemon=True).start()


def _handoffs(peers: PeersConfig) -> HandoffConfig:
    """Everything that is waited for, in proportion to the lease."""
    lease_s = peers.lease_s
    return HandoffConfig(
        term_s=lease_s,
        margin_s=lease_s / 10,
        renew_s=lease_s / 5,
        resend_s=lease_s / 10,
        start_timeout_s=lease_s,
        reserve_timeout_s=lease_s,
        fence_wait_s=lease_s / 5,
        return_after_s=3 * lease_s,
        max_inflight=peers.max_inflight,
    )


def join_peers(
    config: EngineConfig,
    core: EngineCore,
    scheduler: Scheduler,
    memory: Blocks,
    clock: Clock,
    handoffs: HandoffConfig | None = None,
) -> str:
    """Connect `core` to its peers through `memory`; the address where they reach it."""
    peers, token = config.peers, peer_token_from_environment()
    if peers is None or token is None:
        raise ConfigError(
            "--splitwise-role needs a token that all instances share: set HEADWATER_PEER_TOKEN "
            "or give --peer-token-file"
        )
    handoffs = handoffs or _handoffs(peers)
    links = Links(
        LinkConfig(token=token.encode(), host=peers.host), memory, core.completions.post, clock
    )
    network = PeerService(
        PeerConfig(
            token=token.encode(),
            # The key that all of a deployment's keys are chained to says what its bytes are.
            identity=scheduler.cache.tree.scheme.root(Namespace()),
            block_bytes=memory.block_bytes,
            host=peers.host,
            port=peers.port,
        ),
        core.completions.post,
        clock,
    )
    hands = Hands(
        network=network,
        receiver=links.listen(peers.link),
        connect=lambda address: _Unhurried(links.connect(address)),
        memory=memory,
        new_id=lambda: secrets.randbits(63),
    )
    core.join(Exchange(scheduler, hands, handoffs, accepts=peers.role != "decode"))
    return network.address
