"""Which pair a request goes to, as far as the router knows them."""

from headwater.clock import VirtualClock
from headwater.disagg.routing import BACKLOG_TOKENS
from headwater.server.router.config import RouterConfig
from headwater.server.router.prompts import PromptPath
from headwater.server.router.protocol import VERSION, Registration
from headwater.server.router.registry import Registry, RegistryObserver
from headwater.server.router.route_selector import RouteSelector

LONG = PromptPath(num_tokens=1000)


class Known:
    """A registry, and the choice over it."""

    def __init__(self, **roles: str) -> None:
        self.clock = VirtualClock()
        config = RouterConfig(peer_token="between-us")
        watch = RegistryObserver(joined=lambda entry: None, left=lambda entry: None)
        self.registry = Registry(config, self.clock, watch)
        self.chooser = RouteSelector(config, self.registry, self.clock)
        self.entries = {name: self.add(name, role) for name, role in roles.items()}

    def add(self, name: str, role: str):
        told = Registration(
            version=VERSION,
            instance_id=name,
            epoch="1",
            role=role,  # type: ignore[arg-type]
            url=f"http://127.0.0.1:{len(self.registry.instances) + 1}",
            peer_address=f"{name}:1",
            model="m",
            fingerprint="",
            block_tokens=16,
        )
        return self.registry.register(told)

    def pair(self, path: PromptPath = LONG, tried=()) -> tuple[str, str] | None:
        route = self.chooser.choose(path, tried)
        if route is None:
            return None
        return route.server.name, "" if route.prefill is None else route.prefill.name


def test_a_long_prompt_gets_a_pair_and_a_short_one_does_not():
    """Conditional disaggregation, by what the decode instance has not cached."""
    known = Known(p="prefill", d="decode")

    assert known.pair() == ("d", "p")
    assert known.pair(PromptPath(num_tokens=256)) == ("d", "")
    assert known.pair(PromptPath()) == ("d", "p")  # a prompt that cannot be read here


def test_a_swamped_prefill_instance_is_helped_by_who_has_less_to_do():
    """Lesson 56: it keeps what it has, and gets more when it has caught up."""
    known = Known(p="prefill", d="decode")
    known.entries["p"].outstanding_tokens = BACKLOG_TOKENS + 1

    assert known.pair() == ("d", "")
    known.entries["d"].outstanding_tokens = 1000
    assert known.pair() == ("d", "p")


def test_another_prefill_instance_comes_before_help():
    """The one with less to do is asked first."""
    known = Known(p="prefill", q="prefill", d="decode")
    known.entries["p"].outstanding_tokens = BACKLOG_TOKENS + 1

    assert known.pair() == ("d", "q")


def test_who_is_tried_draining_or_silent_is_passed_over():
    """Of either role; without anybody who serves there is no route."""
    known = Known(p="prefill", q="prefill", d="decode", e="decode")
    known.registry.drain("p")

    assert known.pair(tried=[known.entries["d"]]) == ("e", "q")
    known.entries["q"].has_failed = True
    assert known.pair(tried=[known.entries["d"]]) == ("e", "")
    known.clock.advance(4.0)
    assert known.pair() is None


def test_the_last_prefill_instance_may_be_replaced():
    """Lesson 56: where it refuses, nobody else is left to ask."""
    known = Known(p="prefill", q="prefill", d="decode")
    both = known.chooser.choose(LONG, ())
    last = known.chooser.choose(LONG, [known.entries["p"]])

    assert both is not None
    assert last is not None
    assert not both.is_last_prefill
    assert last.is_last_prefill
