"""Requests for hand-offs, and prompts that share prefixes."""

from dataclasses import replace

from headwater.scheduler.request import Request
from headwater.testing.tiers import make_echo_request


def make_prompt(num_tokens: int, *, family: int = 0) -> list[int]:
    """The same tokens each time; prompts of one family start alike, of two do not."""
    return [(family * 7 + at * (family + 3)) % 50 for at in range(num_tokens)]


def make_handoff(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 6,
    prefill: str = "p",
    computes_here: bool = True,
    cache_salt: str = "",
) -> Request:
    """A request whose prompt the instance `prefill` computes."""
    request = make_echo_request(name, tokens, max_tokens=max_tokens, cache_salt=cache_salt)
    return replace(request, prefill=prefill, computes_here=computes_here)
