"""The page at /dashboard in a real Chromium, over a live server that requires a key."""

import pytest

from headwater.testing.ports import free_port
from tests.e2e.browser import Watch, chromium
from tests.e2e.live import LiveServer

pytestmark = pytest.mark.slow

KEY = "open-sesame"
AUTH = {"authorization": f"Bearer {KEY}"}
PROMPT = "A river begins where rain stays long enough to find its way. " * 8


def start(port):
    flags = ("--api-key", KEY, "--port", str(port), "--swap-space", "0.02")
    return LiveServer(*flags, "--write-policy", "write_through").wait_ready()


def complete(server, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0} | fields
    answer = server.post("/v1/completions", body, headers=AUTH)
    assert answer.status_code == 200, answer.text


def cache(server):
    return server.get("/cache", headers=AUTH).json()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server():
    server = start(free_port())
    for ending in ("First.", "Second.", "Third."):
        complete(server, PROMPT + ending * 20)
    complete(server, "zebra crossing " * 30, cache_salt="tenant-7")
    yield server
    if server.process.poll() is None:  # the last test stops it
        assert server.stop() == 0, server.errors


@pytest.fixture
def watch(browser, server):
    watch = Watch(browser).open(server.url, KEY)
    watch.wait_for("live")
    yield watch
    watch.context.close()
    assert watch.complaints == []
    assert all(url.startswith(server.url) for url in watch.asked)


def shown_is_true(watch, state):
    for tier in ("device", "host"):
        for field in ("held", "cached", "evictable", "free", "evicted"):
            watch.wait_number(f"{tier}.{field}", state["tiers"][tier][field])
    for reason, number in state["ledger"]["misses"].items():
        watch.wait_number(f"miss.{reason}", number)


def test_the_page_shows_what_cache_says_and_goes_on_with_it(watch, server):
    """Every number of the tiers and misses is right, before and after another request."""
    shown_is_true(watch, cache(server))

    complete(server, "Something new entirely. " * 30, request_id="the-new-one")

    shown_is_true(watch, cache(server))
    watch.page.wait_for_function("() => document.body.innerText.includes('the-new-one')")
    assert "headwater-tiny" in watch.text("#model")
    watch.page.click("[data-request^='the-new-one']")
    ledger = watch.text("#recent-detail")
    assert "no more because: never seen" in ledger
    assert "waited" in ledger


def test_a_reload_shows_the_same_history(watch, server):
    """The server keeps the points of the charts, so they are there after a reload."""
    page = watch.page
    num_points = "() => document.querySelector('#c-output .line')?.getAttribute('d').split('L').length ?? 0"
    page.wait_for_function(f"() => ({num_points})() >= 3")
    before = page.evaluate(num_points)

    page.reload()
    watch.wait_for("live")

    assert page.evaluate(num_points) >= before
    assert "10 min" in page.text_content("#c-prompt")


def test_failures_and_losses_are_red_and_have_their_reasons(watch):
    """The page shows failed transfers and failing storage, and tokens after a lost block
    separately from new text."""

    def with_failures(route):
        answer = route.fetch()
        body = answer.json()
        body["cache"]["links"]["device_to_host"]["failures"] = {"timed_out": 3}
        body["cache"]["storage"] = {
            "backend": "file",
            "breaker": "open",
            "write_breaker": "open",
            "used_bytes": 10,
            "capacity_bytes": 20,
            "num_blocks": 1,
            "blocks_read": 0,
            "blocks_written": 1,
            "reasons": {"no_space": 2},
        }
        body["totals"]["prompt_tokens_computed_total"] |= {"evicted_device": 640}
        body["cache"]["ledger"]["misses"] |= {"evicted_device": 5}
        route.fulfill(response=answer, json=body)

    page = watch.page
    page.route("**/stats", with_failures)
    page.wait_for_function("() => document.querySelectorAll('#links .fault').length > 0")

    assert watch.text("#links .fault") == "3 failed: timed out 3"
    assert "2 faults: no space 2" in watch.text("#tiers")
    assert "nothing is written for now" in watch.text("#tiers")
    assert "after a lost block 640" in watch.text("#misses")
    assert "evicted device" in watch.text("#misses")
    assert watch.number("miss.evicted_device") == 5
    watch.picture("dashboard-faults")
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_selector("#recent.more-right")
    watch.picture("dashboard-faults-390")
    page.unroute("**/stats")


def test_the_tree_is_walked_by_keyboard_and_shows_no_tenant(watch, server):
    """Arrows move, Enter opens, Escape leaves; salted tenants are one sum."""
    page = watch.page
    page.wait_for_selector("#tree .run.device")
    page.focus("#tree [tabindex='0']")
    page.keyboard.press("ArrowDown")
    assert "blocks" in watch.text("#tree-detail").lower()
    first = page.evaluate("document.activeElement.dataset.key")
    page.keyboard.press("Enter")
    assert page.locator("#tree-path button").count() == 2
    page.keyboard.press("Escape")
    assert page.locator("#tree-path button").count() == 0
    assert page.evaluate("document.activeElement.dataset.key") == first
    assert "1 salted tenants" in page.get_attribute("#tree .run.apart", "aria-label")
    everything = page.content()
    for secret in ("tenant-7", "zebra", "river begins"):
        assert secret not in everything


def test_everything_can_be_reached_with_the_tab_key(watch):
    """Theme, tree and both lists can be used without a mouse."""
    reached = set()
    for _ in range(14):
        watch.page.keyboard.press("Tab")
        reached.add(
            watch.page.evaluate(
                "document.activeElement.closest('#tree')?.id || document.activeElement.id"
            )
        )
    assert {"theme", "tree", "live", "recent"} <= reached


def test_the_page_fits_wide_and_narrow_windows_in_light_and_dark(watch, server):
    """Nothing overflows; the pictures are kept for review."""
    page = watch.page
    page.wait_for_selector("#tree .run")
    complete(server, PROMPT + "A picture, please. " * 5)
    page.wait_for_selector("#c-output .line")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width, height in ((1280, 900), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            watch.picture(f"dashboard-{width}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            # The box of a table is a head and whole rows high, so rows have one height.
            heights = "[...document.querySelectorAll('.scroll tbody tr')].map((row) => row.getBoundingClientRect().height)"
            assert set(page.evaluate(heights)) == {31}
    page.set_viewport_size({"width": 1280, "height": 900})
    card = "getComputedStyle(document.querySelector('.card')).backgroundColor"
    dark = page.evaluate(card)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(card) != dark


def test_the_page_is_used_by_touch_on_a_phone(browser, server):
    """Fingers scroll a table in both directions, open and leave the tree, and open a request.
    The scroll position stays when the page shows the next answer."""
    watch = Watch(browser, width=390, height=844, is_phone=True).open(server.url, KEY)
    watch.wait_for("live")
    page = watch.page
    page.wait_for_selector("#recent.more-right")
    assert page.locator("#recent + .hint").is_visible()
    scrolled = "document.getElementById('recent').scrollLeft"

    watch.swipe("#recent", left=150)

    page.wait_for_function(f"() => {scrolled} > 50")
    before, age = page.evaluate(scrolled), page.inner_text("#foot")
    page.wait_for_function(
        "(age) => document.getElementById('foot').innerText !== age", arg=age
    )
    assert page.evaluate(scrolled) == before
    watch.swipe("#recent", left=2000)
    page.wait_for_selector("#recent:not(.more-right)")
    assert not page.locator("#recent + .hint").is_visible()
    top = page.evaluate("scrollY")
    watch.swipe("#tiers", up=300)
    page.wait_for_function("(top) => scrollY !== top", arg=top)

    page.tap("#tree .run.device")
    assert page.locator("#tree-path button").count() == 2
    assert "blocks" in watch.text("#tree-detail").lower()
    page.tap("#tree-path button")
    assert page.locator("#tree-path button").count() == 0
    page.tap("#recent tbody tr >> nth=0")
    page.wait_for_function("() => document.getElementById('recent-detail').textContent.length")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    watch.picture("dashboard-phone")
    assert watch.complaints == []
    watch.context.close()


def test_a_wrong_key_gets_a_message_and_the_right_one_is_accepted(browser, server):
    """The page itself needs no key; its data does."""
    watch = Watch(browser).open(server.url)
    watch.page.wait_for_selector("#key-form:not([hidden])")
    watch.page.fill("#key", "wrong")
    watch.page.press("#key", "Enter")
    watch.page.wait_for_function(
        "() => document.getElementById('key-error').textContent.length > 0"
    )
    watch.page.fill("#key", KEY)
    watch.page.press("#key", "Enter")

    watch.wait_for("live")

    # The browser itself notes each 401 in its console; nothing else may be there.
    assert all("401" in complaint for complaint in watch.complaints)
    watch.context.close()


def test_a_restarted_server_is_found_again(browser, server):
    """The page shows that it waits, and continues with the new server's numbers."""
    watch = Watch(browser).open(server.url, KEY)
    watch.wait_for("live")
    shown_is_true(watch, cache(server))
    assert watch.number("device.cached") > 0
    assert server.stop() == 0, server.errors
    watch.wait_for("lost")
    assert "waiting for the server" in watch.text("#state-text")
    server = start(int(server.url.rpartition(":")[2]))

    watch.wait_for("live")

    shown_is_true(watch, cache(server))
    assert watch.number("device.cached") == 0
    complete(server, PROMPT)
    shown_is_true(watch, cache(server))
    assert server.stop() == 0, server.errors
    # A refused connection is noted by the browser; the page itself complains of nothing.
    assert all("ERR_" in complaint or "503" in complaint for complaint in watch.complaints)
    watch.context.close()
