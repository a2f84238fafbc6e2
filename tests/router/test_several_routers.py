"""Several routers: instances register at all of them."""

import asyncio

import httpx
import pytest

from headwater.errors import ConfigError
from headwater.server.config import ServerConfig
from tests.router.harness import Harness, Instance, run

pytestmark = pytest.mark.slow


async def at_two_routers(harness):
    """A second router, and an instance that both routers know."""
    other = Harness()
    other.start()
    instance = Instance([harness.url, other.url])
    harness.instances.append(instance)
    await harness.ready(instance)
    await other.ready(instance)
    return other, instance


def test_an_instance_registers_at_every_router_and_leaves_every_one():
    """Both routers know the instance's cache from its events, whichever of them routed a
    request."""

    async def scenario(harness):
        other, instance = await at_two_routers(harness)

        assert (await harness.complete()).status_code == 200
        again = await other.complete()

        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        async with httpx.AsyncClient(base_url=instance.url) as direct:
            shown = (await direct.get("/health")).json()["routers"]
        assert {entry["url"] for entry in shown} == {harness.url, other.url}
        assert all(entry["registered"] for entry in shown)
        await instance.memberships.leave()
        for router in (harness, other):
            assert (await router.known())[instance.name]["state"] == "draining"
        await other.close()

    run(scenario)


def test_a_router_that_refuses_does_not_end_an_instance_that_another_accepts():
    """One router has another peer token: the instance serves through the other router, and
    reports the refusal."""

    async def scenario(harness):
        other = Harness(peer_token="another-secret")
        other.start()
        instance = Instance([other.url, harness.url])
        harness.instances.append(instance)
        await harness.ready(instance)

        async with asyncio.timeout(10):
            while other.url not in instance.service.router_health:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert instance.service.router_health[harness.url].registered
        assert not instance.service.router_health[other.url].registered
        assert not instance.membership.done()
        assert (await harness.complete()).status_code == 200
        await other.close()

    run(scenario)


def test_an_instance_that_every_router_refuses_ends():
    """The instance has a wrong setting, so it reports which router refused and why."""

    async def scenario(harness):
        other = Harness(peer_token="another-secret")
        other.start()
        instance = Instance([harness.url, other.url], token="a-third-secret")
        harness.instances.append(instance)

        async with asyncio.timeout(10):
            with pytest.raises(ConfigError, match="refuses this instance"):
                await instance.membership
        await other.close()

    run(scenario)


def test_a_client_that_retries_elsewhere_does_not_need_a_certain_router():
    """One router ends; the other one knows all instances and their caches."""

    async def scenario(harness):
        other, instance = await at_two_routers(harness)
        first = await other.complete()
        await other.close()

        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{other.url}/health")
        again = await harness.complete()

        assert again.json()["choices"] == first.json()["choices"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        async with asyncio.timeout(10):
            while instance.service.router_health[other.url].registered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert instance.service.router_health[harness.url].registered

    run(scenario)


def test_a_router_named_twice_is_a_mistake():
    """Two registrations of one instance at one router would conflict."""
    with pytest.raises(ConfigError, match="twice"):
        ServerConfig(routers=("http://127.0.0.1:1", "http://127.0.0.1:1"))
