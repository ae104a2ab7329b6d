"""Makes the pictures in docs/pictures/ from the recorded answers: `python tests/page/pictures.py`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright
from stub import RECORDED, Stub

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
LIST, CODE = RECORDED["streams"]


def main() -> None:
    from test_page import BROWSER  # the one that the tests take

    PICTURES.mkdir(exist_ok=True)
    with Stub() as stub, sync_playwright() as playwright:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=BROWSER)

        def show(width: int, height: int, scheme: Any, scale: float) -> Page:
            viewport: Any = {"width": width, "height": height}
            page = browser.new_page(viewport=viewport, color_scheme=scheme, device_scale_factor=scale)
            page.goto(stub.url)
            expect(page.locator("#send")).to_be_enabled()
            return page

        def ask(page: Page, question: str) -> None:
            page.fill("#question", question)
            page.press("#question", "Enter")
            expect(page.locator("#send")).to_have_text("Send")

        def save(page: Page, name: str) -> None:
            page.evaluate("document.activeElement.blur()")
            page.screenshot(path=PICTURES / f"{name}.png")

        page = show(1280, 800, "light", 1.5)
        ask(page, CODE)
        page.locator("#inspector").get_by_role("slider").fill(str(finest(CODE)))
        save(page, "page")

        page = show(1280, 800, "light", 1.5)
        page.get_by_role("link", name="Side by side").click()
        page.fill("#race-question", LIST)
        page.press("#race-question", "Enter")
        expect(page.locator("#verdict")).to_be_visible()
        save(page, "page-race")

        page = show(390, 800, "dark", 2)
        ask(page, LIST)
        page.get_by_role("button", name="Rounds").click()
        page.locator("#inspector").get_by_role("slider").fill(str(finest(LIST)))
        save(page, "page-phone")
        browser.close()
        stub.shutdown()


def finest(question: str) -> int:
    """The round, counted from 1, that shows most: some accepted tokens, and many places where branches part."""
    chunks = RECORDED["streams"][question][RECORDED["info"]["default_drafter"]]
    rounds = [c["dartspec"]["round"] for c in chunks if "dartspec" in c]
    return max(rounds, key=lambda r: min(r["num_accepted"], 3) + forks(r["tree"]["parents"]))["index"] + 1


def forks(parents: list[int]) -> int:
    return sum(parents.count(i) > 1 for i in range(len(parents)))


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
