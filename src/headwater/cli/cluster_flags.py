"""The flags of `serve` for roles, peers, links and KV events."""

from argparse import ArgumentParser, _ArgumentGroup

from headwater.cli.values import help_text, number_value
from headwater.config import LINKS, ROLES, PeersConfig

_PEERS = PeersConfig()


def add_cluster_flags(parser: ArgumentParser) -> None:
    """Add the flags of an instance that works with others."""
    group = parser.add_argument_group("among other instances")
    group.add_argument(
        "--splitwise-role",
        choices=ROLES,
        help="role in a cluster: prefill for other instances, decode, or both (mixed)",
    )
    group.add_argument(
        "--cache-transfer-protocol",
        choices=LINKS,
        default=_PEERS.link,
        help=help_text("how blocks come to this instance"),
    )
    group.add_argument(
        "--peer-host",
        metavar="ADDRESS",
        default=_PEERS.host,
        help=help_text("address to listen on for control messages of peers"),
    )
    group.add_argument(
        "--peer-port",
        type=int,
        metavar="PORT",
        default=_PEERS.port,
        help=help_text("port for control messages; 0 takes a free one"),
    )
    _add_address(group, "--peer-advertise", "control messages", "--peer-host and --peer-port")
    group.add_argument(
        "--link-host",
        metavar="ADDRESS",
        help="address to listen on for KV blocks of peers (default: that of --peer-host)",
    )
    group.add_argument(
        "--link-port",
        type=int,
        metavar="PORT",
        default=_PEERS.link_port,
        help=help_text("port for KV blocks; 0 takes a free one"),
    )
    _add_address(group, "--link-advertise", "KV blocks", "--link-host and --link-port")
    group.add_argument(
        "--peer-lease",
        type=number_value,
        metavar="SECONDS",
        default=_PEERS.lease_s,
        help=help_text("how long room for a peer's blocks is kept without a heartbeat"),
    )
    group.add_argument(
        "--max-inflight-prefill",
        type=int,
        metavar="N",
        default=_PEERS.max_inflight,
        help=help_text(
            "maximum number of prompts computed at once for other instances; more are refused"
        ),
    )
    group.add_argument(
        "--router",
        metavar="URL",
        action="append",
        default=[],
        help="URL of a router to register at; may be given several times",
    )
    group.add_argument(
        "--instance-name",
        metavar="NAME",
        help="name of this instance at the router (default: its host and port)",
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="publish KV events over ZMQ; {} uses the defaults of docs/routing.md",
    )


def _add_address(group: _ArgumentGroup, prefix: str, what: str, default: str) -> None:
    """Add two flags for an address that is told to peers."""
    text = f"address that peers are given for {what}, behind NAT (default: {default})"
    group.add_argument(f"{prefix}-host", metavar="ADDRESS", help=text)
    group.add_argument(
        f"{prefix}-port",
        metavar="PORT",
        type=int,
        help=f"port that peers are given for {what}, behind NAT",
    )
