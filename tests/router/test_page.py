"""The router's page in a real Chromium: instances come, work, leave and get lost."""

import signal

import pytest

from tests.e2e.browser import Watch, chromium
from tests.e2e.live import LiveServer
from tests.router.live import LiveRouter

pytestmark = pytest.mark.slow


def check_the_page_of_a_prefill_instance(browser, server):
    """The page counts the prompt that was handed to the instance, although no client sent it
    directly."""
    own = Watch(browser).open(server.url)
    own.wait_for("live")
    own.page.wait_for_function(
        "() => document.getElementById('t-hit-all').textContent.startsWith('0 of 1')"
    )
    assert own.number("miss.never_seen") == 1
    assert "were computed here" in own.text("#misses")
    assert own.text("#model").endswith("prefill instance")
    own.picture("dashboard-prefill")
    assert own.complaints == []


def test_instances_come_and_go_on_the_page(monkeypatch):
    """The page shows a prefill and a decode instance with rates and a hand-off between them. An
    instance that stops disappears; one that is killed is shown as lost."""
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
        assert router.post(prompt="where does it begin? " * 60).status_code == 200
        watch.page.wait_for_function(
            "() => document.querySelectorAll('#handoffs .flow').length === 1"
            " && document.getElementById('handoffs').textContent.includes('MB sent')"
        )
        watch.page.wait_for_function(
            "() => parseFloat(document.getElementById('t-out').textContent) > 0"
        )
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
        check_the_page_of_a_prefill_instance(browser, servers[0])

        assert servers[0].stop() == 0, servers[0].errors

        gone = servers[0].url.removeprefix("http://")
        watch.page.wait_for_selector(
            f'[data-instance="{gone}"]', state="detached", timeout=20_000
        )
        assert watch.complaints == []
        assert all(url.startswith(router.url) for url in watch.asked)
        name = servers[1].url.removeprefix("http://")
        servers[1].process.send_signal(signal.SIGKILL)
        row = f'[data-instance="{name}"]'
        watch.page.wait_for_selector(f"{row} .pill.bad", timeout=20_000)
        assert watch.text(row).split()[:4] == [name, "decode", "lost", "\u2013"]  # no old rates
        assert watch.text("#t-load") == "0 running, 0 waiting, 0 leases"
        assert watch.text("#t-out") == "0"
        watch.page.wait_for_selector(f'[data-lost="{name}"]', timeout=40_000)
        assert "1 lost" in watch.text("#t-roles")
        assert router.stop() == 0
