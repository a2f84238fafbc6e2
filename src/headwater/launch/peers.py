"""Builds what an instance needs for hand-offs: control connections, links, and both sides."""

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from threading import Thread

from headwater.cache import Namespace
from headwater.clock import Clock
from headwater.config import EngineConfig, PeersConfig, peer_token_from_environment
from headwater.disagg.handoff.controller import HandoffController
from headwater.disagg.handoff.resources import HandoffDependencies, Memory
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.interface import Deliver, DeviceMemory, LinkMaker, Sender
from headwater.disagg.links.registry import Links
from headwater.disagg.links.self_test import check_link, check_peer
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.peering.service import PeerConfig, PeerService
from headwater.disagg.protocol.config import HandoffConfig
from headwater.engine.client import EngineInfo
from headwater.engine.core import EngineCore
from headwater.errors import ConfigError
from headwater.launch.host_memory import HostMemory
from headwater.scheduler.scheduler import Scheduler

OpenLinks = Callable[[LinkConfig, Deliver], LinkMaker]
"""Makes the links of one instance; they deliver their events to the given callable."""

log = logging.getLogger(__name__)


def open_peers(
    config: EngineConfig,
    core: EngineCore,
    scheduler: Scheduler,
    host: HostMemory,
    info: EngineInfo,
    clock: Clock,
) -> EngineInfo:
    """Let `core` take part in hand-offs if that is configured; return `info` with its address
    for peers."""
    if config.peers is None or not _hands_off(config.peers):
        return info
    is_in_place = host.pool.device.type == "cpu" and not host.has_ranks
    memory, open_links = (_in_place if is_in_place else _staged)(host, clock)
    _check_mapping(config.peers.link, memory)
    address, warnings = _join_peers(config, core, scheduler, memory, open_links, clock)
    return replace(info, role=config.peers.role, peer_address=address, warnings=warnings)


def _in_place(host: HostMemory, clock: Clock) -> tuple[Memory, OpenLinks]:
    """Memory and links for blocks in main memory, which links read and write in place."""
    # Imported here: torch is already imported when a pool exists.
    from headwater.device.blocks import PoolBlocks

    memory = PoolBlocks(host.pool)
    return memory, lambda links, deliver: Links(links, memory, deliver, clock)


def _staged(host: HostMemory, clock: Clock) -> tuple[Memory, OpenLinks]:
    """Memory and links for blocks on a device or on several ranks. The blocks pass through
    staging buffers, unless a link maps the device's memory."""
    memory, device = _device_blocks(host)
    return memory, lambda links, deliver: StagedLinks(
        links,
        memory.block_bytes,
        lambda slab: host.open_copier(slab, for_links=True),
        deliver,
        clock,
        for_ranks=host.has_ranks,
        device=device,
    )


def _device_blocks(host: HostMemory) -> tuple[Memory, DeviceMemory | None]:
    """The blocks for hand-offs, and the device memory that peers may map; None if they may map
    none."""
    if host.copies is not None:
        from headwater.device.parallel.copier import RankedBlocks

        return RankedBlocks(host.pool, host.copies.ranks), None
    from headwater.device.gpu.peer_blocks import CudaBlocks

    memory = CudaBlocks(host.pool)
    return memory, memory


def _check_mapping(link: str, memory: Memory) -> None:
    """Raise ConfigError if the link `cuda` was requested and blocks cannot be mapped. With
    `auto`, such an instance sends them by `tcp`."""
    if link == "cuda" and isinstance(memory, DeviceMemory) and memory.file is None:
        raise ConfigError(
            "peers cannot map the KV blocks of this GPU (the log says why); use "
            "--cache-transfer-protocol auto"
        )


def shares_blocks(config: EngineConfig, device_type: str) -> bool:
    """Whether peers on this machine may map the pool of this instance."""
    peers, link = config.peers, "shm" if device_type == "cpu" else "cuda"
    return peers is not None and peers.link in (link, "auto") and _hands_off(peers)


def _hands_off(peers: PeersConfig) -> bool:
    return peers.role != "mixed" or peer_token_from_environment() is not None


class _SenderClosedInThread:
    """A sender that is closed in a thread of its own, so that the loop does not wait for it."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.push = sender.push
        self.extend = sender.extend
        self.cancel = sender.cancel

    def close(self) -> None:
        """Close without waiting. The outcomes of pushes are still reported."""
        Thread(target=self._sender.close, name="sender-close", daemon=True).start()


def _handoffs(peers: PeersConfig) -> HandoffConfig:
    """All timeouts of hand-offs, in proportion to the lease."""
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
) -> tuple[str, tuple[str, ...]]:
    """Connect `core` to its peers; return its address for peers, and warnings about it."""
    peers, token = config.peers, peer_token_from_environment()
    if peers is None or token is None:
        raise ConfigError(
            "--splitwise-role needs a token that all instances share: set HEADWATER_PEER_TOKEN "
            "or give --peer-token-file"
        )
    link_config = _link_config(peers, token.encode())
    links = open_links(link_config, core.completions.post)
    with ExitStack() as opened:
        receiver = links.listen(peers.link)
        opened.callback(receiver.close)
        warnings = [check_link(receiver.address, link_config, memory.block_bytes, clock)]
        # The root key of a deployment identifies the format of its blocks.
        identity = scheduler.cache.scheme.root(Namespace())
        peer_config = _peer_config(peers, token.encode(), identity, memory.block_bytes)
        network = PeerService(peer_config, core.completions.post, clock)
        opened.callback(network.close)
        warnings.append(check_peer(network.address, link_config))
        opened.pop_all()  # both belong to the core from now on
    dependencies = HandoffDependencies(
        network=network,
        receiver=receiver,
        connect=lambda address: _SenderClosedInThread(links.connect(address)),
        memory=memory,
        new_id=lambda: secrets.randbits(63),
    )
    core.join(
        HandoffController(
            scheduler, dependencies, _handoffs(peers), accepts=peers.role != "decode"
        )
    )
    found = tuple(warning for warning in warnings if warning is not None)
    for warning in found:
        log.warning("peers may be unable to reach this instance: %s", warning)
    return network.address, found


def _link_config(peers: PeersConfig, token: bytes) -> LinkConfig:
    return LinkConfig(
        token=token,
        host=peers.link_host or peers.host,
        port=peers.link_port,
        advertised_host=peers.link_advertise_host or peers.advertise_host,
        advertised_port=peers.link_advertise_port,
        ssl_certfile=peers.ssl_certfile,
        ssl_keyfile=peers.ssl_keyfile,
        ssl_ca_certs=peers.ssl_ca_certs,
    )


def _peer_config(
    peers: PeersConfig, token: bytes, identity: bytes, block_bytes: int
) -> PeerConfig:
    return PeerConfig(
        token=token,
        identity=identity,
        block_bytes=block_bytes,
        host=peers.host,
        port=peers.port,
        advertised_host=peers.advertise_host,
        advertised_port=peers.advertise_port,
        ssl_certfile=peers.ssl_certfile,
        ssl_keyfile=peers.ssl_keyfile,
        ssl_ca_certs=peers.ssl_ca_certs,
    )
