"""The choice of a pair of instances for a request."""

from typing import Any

from headwater.clock import VirtualClock
from headwater.disagg.routing import BACKLOG_TOKENS
from headwater.metrics.kv_events import BlockStored, EventBatch
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.prompts import PromptPath, PromptPaths
from headwater.server.router.route_selector import RouteSelector
from tests.router.registrations import make_registration, make_registry

LONG = PromptPath(num_tokens=1000)


class KnownInstances:
    """A registry and a selector over it."""

    def __init__(self, **roles: str) -> None:
        self.clock = VirtualClock()
        config = RouterConfig(peer_token="between-us")
        self.registry = make_registry(self.clock, config)
        self.selector = RouteSelector(config, self.registry, self.clock)
        self.entries = {name: self.add(name, role) for name, role in roles.items()}

    def add(self, name: str, role: str, **changes: Any) -> Instance:
        told = make_registration(
            name,
            port=len(self.registry.instances) + 1,
            role=role,
            peer_address=f"{name}:1",
            **changes,
        )
        return self.registry.register(told)

    def paths(self, path: PromptPath) -> PromptPaths:
        """One path, the same in every group."""
        return PromptPaths(by_group={e.group: path for e in self.registry.instances})

    def pair(self, path: PromptPath = LONG, tried=()) -> tuple[str, str] | None:
        route = self.selector.choose(self.paths(path), tried)
        if route is None:
            return None
        return route.server.name, "" if route.prefill is None else route.prefill.name


def test_a_long_prompt_gets_a_pair_and_a_short_one_does_not():
    """The tokens that the decode instance has not cached decide."""
    known = KnownInstances(p="prefill", d="decode")

    assert known.pair() == ("d", "p")
    assert known.pair(PromptPath(num_tokens=256)) == ("d", "")
    assert known.pair(PromptPath()) == ("d", "p")  # a prompt that cannot be tokenized here


def test_an_overloaded_prefill_instance_is_helped_by_one_with_less_work():
    """Lesson 56: the overloaded instance keeps its work, and gets more when it has caught
    up."""
    known = KnownInstances(p="prefill", d="decode")
    known.entries["p"].outstanding_tokens = BACKLOG_TOKENS + 1

    assert known.pair() == ("d", "")
    known.entries["d"].outstanding_tokens = 1000
    assert known.pair() == ("d", "p")


def test_another_prefill_instance_comes_before_help():
    """The prefill instance with less to do is chosen first."""
    known = KnownInstances(p="prefill", q="prefill", d="decode")
    known.entries["p"].outstanding_tokens = BACKLOG_TOKENS + 1

    assert known.pair() == ("d", "q")


def test_tried_draining_and_silent_instances_are_skipped():
    """Instances of either role are skipped; without an instance that can serve there is no
    route."""
    known = KnownInstances(p="prefill", q="prefill", d="decode", e="decode")
    known.registry.drain("p")

    assert known.pair(tried=[known.entries["d"]]) == ("e", "q")
    known.entries["q"].has_failed = True
    assert known.pair(tried=[known.entries["d"]]) == ("e", "")
    known.clock.advance(6.0)
    assert known.pair() is None


def test_the_last_prefill_instance_may_be_replaced():
    """Lesson 56: if the last prefill instance refuses, no other one is left."""
    known = KnownInstances(p="prefill", q="prefill", d="decode")
    both = known.selector.choose(known.paths(LONG), ())
    last = known.selector.choose(known.paths(LONG), [known.entries["p"]])

    assert both is not None
    assert last is not None
    assert not both.is_last_prefill
    assert last.is_last_prefill


def test_a_prefill_instance_of_another_group_is_never_asked():
    """KV of other weights cannot be used by the decode instance."""
    known = KnownInstances(d="decode")
    other = known.add("q", "prefill", fingerprint="other weights")

    assert known.pair() == ("d", "")
    same = known.add("p", "prefill")
    assert known.pair() == ("d", "p")
    assert other.group != same.group


def test_instances_of_another_program_version_are_another_group():
    """The protocol of two versions may differ, so they do not hand off to each other."""
    known = KnownInstances(d="decode")
    known.add("q", "prefill", software="9.9.9")

    assert known.pair() == ("d", "")


def test_each_group_is_matched_with_its_own_hashes():
    """A prompt has other block hashes in another group; views are never used across groups."""
    known = KnownInstances(old="mixed")
    new = known.add("new", "mixed", fingerprint="other weights")
    old = known.entries["old"]
    for entry, first in ((old, 1), (new, 101)):
        stored = BlockStored(
            block_hashes=[*range(first, first + 50)],
            parent_block_hash=None,
            token_ids=[],
            block_size=16,
            medium="GPU",
        )
        entry.view.apply(0, EventBatch(ts=0.0, events=[stored]))
    hashes = {old.group: [*range(1, 31)], new.group: [*range(1, 31)]}
    paths = PromptPaths(
        by_group={g: PromptPath(num_tokens=500, hashes=h) for g, h in hashes.items()}
    )

    route = known.selector.choose(paths, ())

    assert route is not None
    assert (route.server, route.cached_tokens) == (old, 480)
    alone = known.selector.choose(paths, [old])
    assert alone is not None
    assert (alone.server, alone.cached_tokens, alone.uncached_tokens) == (new, 0, 500)


def test_a_stream_that_has_begun_stays_in_its_group():
    """The weights of another group would continue the stream with another text."""
    known = KnownInstances(old="mixed")
    known.add("new", "mixed", fingerprint="other weights")
    old = known.entries["old"]

    assert known.selector.choose(known.paths(LONG), [old], group=old.group) is None
    assert known.selector.choose(known.paths(LONG), [old]) is not None


def test_a_request_goes_to_the_group_that_serves_its_model():
    """Two names are served; a request with an unknown name goes to any instance and gets its
    404."""
    known = KnownInstances(old="mixed")
    new = known.add("new", "mixed", model="m-2", fingerprint="other weights")

    for name, wanted in (("m", {"old"}), ("m-2", {"new"}), ("m-3", {"old", "new"})):
        paths = PromptPaths(model=name)
        found = set()
        for _ in range(4):
            route = known.selector.choose(paths, ())
            assert route is not None
            found.add(route.server.name)
            route.server.num_alive += 1
        assert found == wanted
    assert new.num_alive
