"""A real Chromium with a page of a live server, and everything that went wrong there."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

OUTPUT = Path(__file__).parents[2] / "test-output"
"""Screenshots for people; ignored by git."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium():
    """A browser, or a skip with the reason."""
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium; on Debian: apt-get install chromium")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


class Watch:
    """A page, its requests and its errors."""

    def __init__(self, browser, *, width=1280, height=900, scheme="light", is_phone=False):
        """A phone has a touch screen and no mouse."""
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            has_touch=is_phone,
            is_mobile=is_phone,
        )
        self.page = self.context.new_page()
        self.asked: set[str] = set()
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._listen)

    def _listen(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, url, key=None):
        """Open a page. A `key` is used as if a user had typed it in."""
        if key is not None:
            self.page.add_init_script(f"sessionStorage.setItem('headwater-key', '{key}')")
        self.page.goto(url + "/dashboard")
        return self

    def wait_for(self, state):
        """Wait until the page shows `live`, `paused` or `lost`."""
        self.page.wait_for_selector(f"#state[data-state={state}]", timeout=30_000)

    def number(self, name):
        """The number shown for `name`."""
        return int(self.page.inner_text(f'[data-value="{name}"]').replace(",", ""))

    def wait_number(self, name, value):
        """Wait until that number is `value`; fails with the last number."""
        selector = f'[data-value="{name}"]'
        self.page.wait_for_function(
            "([at, wanted]) => document.querySelector(at)?.textContent.replaceAll(',', '') === wanted",
            arg=[selector, str(value)],
            timeout=15_000,
        )

    def text(self, selector):
        return self.page.inner_text(selector)

    def swipe(self, selector, *, left=0, up=0):
        """Move a finger over an element, this many pixels."""
        self.page.locator(selector).scroll_into_view_if_needed()
        box = self.page.locator(selector).bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + min(box["height"], 200) / 2
        finger = self.context.new_cdp_session(self.page)

        def touch(kind, *points):
            touched = [{"x": at_x, "y": at_y} for at_x, at_y in points]
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})

        touch("touchStart", (x, y))
        for part in range(1, 11):
            touch("touchMove", (x - left * part / 10, y - up * part / 10))
        touch("touchEnd")

    def picture(self, name):
        OUTPUT.mkdir(exist_ok=True)
        self.page.screenshot(path=str(OUTPUT / f"{name}.png"), full_page=True)
