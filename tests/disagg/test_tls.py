"""Mutual TLS between instances: control connections and the tcp link."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from headwater.clock import SystemClock
from headwater.disagg.links.registry import Links
from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.protocol.messages import Ask, HandoffDone, Reason
from headwater.disagg.protocol.push import Push, PushFailed, PushFailure
from headwater.errors import ConfigError
from headwater.testing.link_contract import CHECKS, LinkHarness, open_harness
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.test_peers import Instance
from tests.disagg.wire import CONFIG, pieces_of


class Files(NamedTuple):
    """PEM files of one instance."""

    ssl_certfile: str
    ssl_keyfile: str
    ssl_ca_certs: str


def make_cluster(folder: Path) -> Files:
    """A certificate authority and a certificate that it signed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test")
    folder.mkdir()
    curve = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)

    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key"]
    names = ["-subj", "/CN=instance", "-keyout", "instance.key", "-out", "instance.pem"]
    openssl("req", "-x509", *curve, *signing, *names)
    paths = ("instance.pem", "instance.key", "ca.pem")
    return Files(*(str(folder / name) for name in paths))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Files:
    return make_cluster(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Files:
    """Files of another cluster."""
    return make_cluster(tmp_path_factory.mktemp("tls") / "other")


@pytest.fixture
def harness(ours) -> Iterator[LinkHarness]:
    config = replace(CONFIG, **ours._asdict())
    make = lambda memory, deliver: Links(config, memory, deliver)  # noqa: E731
    with open_harness(make, "tcp", 4096 * 3 + 40) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_encrypted_link_keeps_the_contract(harness, check):
    """The rules are the same as without TLS: order, one outcome per push, and fences."""
    check(harness)


def test_large_blocks_arrive_whole_over_tls(ours):
    """Each block spans many TLS records, and arrives unchanged."""
    config = replace(CONFIG, **ours._asdict())
    make = lambda memory, deliver: Links(config, memory, deliver)  # noqa: E731
    with open_harness(make, "tcp", 3 << 20) as harness:
        harness.receiver.open(1, range(8))
        harness.sender().push(harness.push(1, 1, range(8)))

        assert harness.done(1) == 8 * (3 << 20)
        assert (harness.target.rows[:8] == harness.source.rows[:8]).all()


def test_peers_exchange_messages_over_tls(ours):
    """Messages go in both directions of one connection."""
    files = ours._asdict()
    with closing(Instance(**files)) as p, closing(Instance(**files)) as d:
        for number in range(20):
            d.service.send(p.service.address, Ask(number))
        arrived = [p.event() for _ in range(20)]
        assert all(isinstance(event, PeerMessage) for event in arrived)
        p.service.send(arrived[0].peer, HandoffDone(1))  # type: ignore[attr-defined]

        assert [event.message for event in arrived] == [Ask(n) for n in range(20)]  # type: ignore[attr-defined]
        answered = d.event()
        assert isinstance(answered, PeerMessage)
        assert answered.message == HandoffDone(1)


def test_a_peer_of_another_cluster_is_refused(ours, other):
    """The peer has the token, and a certificate that another authority signed."""
    with closing(Instance(**ours._asdict())) as p, closing(Instance(**other._asdict())) as d:
        number = d.service.send(p.service.address, Ask(1))

        assert d.event() == PeerLost(p.service.address, Reason.DENIED, number)
        assert p.all_events() == []


def test_a_peer_without_tls_is_refused(ours):
    """The peer's bytes are not a TLS handshake; nothing of it is processed."""
    with closing(Instance(**ours._asdict())) as p, closing(Instance()) as d:
        d.service.send(p.service.address, Ask(1))

        assert isinstance(d.event(), PeerLost)
        assert p.all_events() == []


def test_a_sender_of_another_cluster_pushes_nothing(ours, other):
    """The push fails with a reason; the receiver's memory is untouched."""
    target, log = BlockArray(1, 4096), EventLog()
    receiver = Links(replace(CONFIG, **ours._asdict()), target, EventLog()).listen("tcp")
    receiver.open(1, [0])
    source = BlockArray(1, 4096, seed=1)
    sender = Links(replace(CONFIG, **other._asdict()), source, log).connect(receiver.address)
    deadline_s = SystemClock().now() + 10.0
    sender.push(Push(job=1, lease=1, pieces=pieces_of([0], 4096), deadline_s=deadline_s))

    assert log.outcome(1) == PushFailed(1, PushFailure.REFUSED)
    assert not target.rows.any()
    sender.close()
    receiver.close()


def test_incomplete_or_unreadable_files_are_refused_at_start(ours, tmp_path):
    """The message names the flags."""
    config = replace(CONFIG, ssl_certfile=ours.ssl_certfile)
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        Links(config, BlockArray(1, 64), EventLog())
    broken = replace(CONFIG, **ours._replace(ssl_keyfile=str(tmp_path / "none"))._asdict())
    with pytest.raises(ConfigError, match="--ssl-keyfile"):
        Links(broken, BlockArray(1, 64), EventLog())
