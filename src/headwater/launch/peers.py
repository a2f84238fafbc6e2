"""Builds what an instance needs for hand-offs: control connections, links, both roles."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING

from headwater.cache import Namespace
from headwater.clock import Clock
from headwater.config import EngineConfig, PeersConfig, peer_token_from_environment
from headwater.disagg.handoff.controller import HandoffController
from headwater.disagg.handoff.dependencies import HandoffDependencies, Memory
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.interface import Deliver, LinkMaker, Sender
from headwater.disagg.links.registry import Links
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.peering.service import PeerConfig, PeerService
from headwater.disagg.protocol.config import HandoffConfig
from headwater.engine.client import EngineInfo
from headwater.engine.core import EngineCore
from headwater.errors import ConfigError
from headwater.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from headwater.device.kv import KVPool


OpenLinks = Callable[[LinkConfig, Deliver], LinkMaker]
"""Makes the links of one instance, which deliver their events there."""


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
    open_memory = _in_place if pool.device.type == "cpu" else _staged
    memory, open_links = open_memory(pool, clock)
    address = _join_peers(config, core, scheduler, memory, open_links, clock)
    return replace(info, role=config.peers.role, peer_address=address)


def _in_place(pool: "KVPool", clock: Clock) -> tuple[Memory, OpenLinks]:
    """Blocks in main memory, which links read and write where they are."""
    # Beside torch, which is imported by the time there is a pool.
    from headwater.device.blocks import PoolBlocks

    memory = PoolBlocks(pool)
    return memory, lambda links, deliver: Links(links, memory, deliver, clock)


def _staged(pool: "KVPool", clock: Clock) -> tuple[Memory, OpenLinks]:
    """Blocks on a device, which pass through buffers."""
    from headwater.device.blocks import DeviceBlocks
    from headwater.device.open import open_copier

    memory = DeviceBlocks(pool)
    return memory, lambda links, deliver: StagedLinks(
        links, memory.block_bytes, lambda slab: open_copier(pool, slab, clock), deliver, clock
    )


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
        self.extend = sender.extend
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


def _join_peers(
    config: EngineConfig,
    core: EngineCore,
    scheduler: Scheduler,
    memory: Memory,
    open_links: OpenLinks,
    clock: Clock,
) -> str:
    """Connect `core` to its peers; the address where they reach it."""
    peers, token = config.peers, peer_token_from_environment()
    if peers is None or token is None:
        raise ConfigError(
            "--splitwise-role needs a token that all instances share: set HEADWATER_PEER_TOKEN "
            "or give --peer-token-file"
        )
    links = open_links(LinkConfig(token=token.encode(), host=peers.host), core.completions.post)
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
    dependencies = HandoffDependencies(
        network=network,
        receiver=links.listen(peers.link),
        connect=lambda address: _Unhurried(links.connect(address)),
        memory=memory,
        new_id=lambda: secrets.randbits(63),
    )
    core.join(
        HandoffController(
            scheduler, dependencies, _handoffs(peers), accepts=peers.role != "decode"
        )
    )
    return network.address
