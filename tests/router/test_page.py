"""The router's page in a real Chromium: who is registered, and when one goes."""

import pytest

from tests.e2e.browser import Watch, chromium
from tests.e2e.live import LiveServer
from tests.router.live import LiveRouter

pytestmark = pytest.mark.slow


def test_instances_come_and_go_on_the_page(monkeypatch):
    """A pair for prefill and decode with its states; an instance that stops is gone."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", "between-us")
    with chromium() as browser:
        router = LiveRouter()
        watch = Watch(browser).open(router.url)
        watch.wait_for("live")
        assert "No instance has registered" in watch.text("#instances")
        flags = ("--router", router.url, "--max-model-len", "2048")
        servers = [
            LiveServer(*flags, "--splitwise-role", role, blocks=64)
            for role in ("prefill", "decode")
        ]
        for server in servers:
            server.wait_ready()
            name = server.url.removeprefix("http://")
            watch.page.wait_for_selector(f'[data-instance="{name}"]')
        assert router.post().status_code == 200
        watch.page.wait_for_function(
            "() => ['prefill', 'decode'].every((role) => document.getElementById('t-roles')"
            ".textContent.includes(`1 ${role}`))"
        )
        watch.picture("router-1280-light")
        own = Watch(browser).open(servers[1].url)
        own.wait_for("live")
        own.page.wait_for_selector("#handoffs-card:not([hidden])")
        assert "leases now" in own.text("#handoffs")
        watch.page.wait_for_function(
            "() => document.getElementById('t-load').textContent.endsWith(' 0 leases')"
        )
        own.picture("dashboard-decode")
        assert own.complaints == []

        assert servers[0].stop() == 0, servers[0].errors

        gone = servers[0].url.removeprefix("http://")
        watch.page.wait_for_selector(
            f'[data-instance="{gone}"]', state="detached", timeout=20_000
        )
        assert watch.complaints == []
        assert all(url.startswith(router.url) for url in watch.asked)
        assert servers[1].stop() == 0, servers[1].errors
        assert router.stop() == 0
