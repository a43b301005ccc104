"""The page at / in a real browser, around a real server; without a browser these are skipped."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.page_support import CONTRAST, EVERY_PAIR, TOKENS_PER_PASS, save_six_letters
from tests.e2e.server_support import MODEL, PATIENCE_S, RunningServer, running_server, wait_until

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: make browser"
)
expect = playwright.expect

KEY = "sesame"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# What a browser would like to ask its makers when it starts.
QUIET = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    place = tmp_path_factory.mktemp("page")
    target, head = save_six_letters(place)
    keys = place / "keys"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    options = {"api_keys_file": str(keys), "max_queue": 0}
    with running_server(
        target, head, cache=place / "cache", engine=EVERY_PAIR, key=KEY, **options
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: make browser")
    # The browser's own sandbox does not start for root.
    arguments = [*QUIET, "--no-sandbox"] if os.geteuid() == 0 else QUIET
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, server: RunningServer) -> Iterator[Open]:
    """A page that is ready; what the browser complains about fails the test."""
    complaints: list[str] = []

    with ExitStack() as stack:

        def open_one(*, key: str | None = KEY, settings: str = "{}", **context: Any) -> Any:
            made = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
            stack.callback(made.close)
            made.set_default_timeout(1000 * PATIENCE_S)
            if key is not None:
                made.add_init_script(f"sessionStorage.setItem('fledge-key', '{key}')")
            made.add_init_script(f"sessionStorage.setItem('fledge-settings', '{settings}')")
            page = made.new_page()
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda note: note.type == "error" and complaints.append(note.text))
            page.goto(server.url)
            if key == KEY:
                expect(page.locator("#state")).to_have_attribute("data-state", "ready")
            return page

        yield open_one
    expected = re.compile("Failed to load resource")  # refusals that the page deals with
    assert [one for one in complaints if not expected.match(one)] == []


def ask(page: Any, text: str = "hello") -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def short(num_tokens: int, **more: str) -> str:
    values = "".join(f', "{name}": "{value}"' for name, value in more.items())
    return f'{{"max_tokens": "{num_tokens}", "temperature": "0"{values}}}'


expect.set_options(timeout=1000 * PATIENCE_S)


def test_a_chat_shows_how_every_token_came(open_page: Open, server: RunningServer) -> None:
    page = open_page(settings=short(31, system="Be brief."))
    ask(page, "<b>hello</b>")
    line = page.locator(".assistant .figures-line")
    expect(line).to_contain_text("31 tokens in 11 passes")
    expect(line).to_contain_text(f"{TOKENS_PER_PASS:.2f} tokens a pass")
    expect(line).to_contain_text("65% drafted")
    assert page.locator(".user .body").inner_text() == "<b>hello</b>"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<b>hello</b>"},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 31, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**body, "return_draft_depths": True}).json()
    choice = answer["choices"][0]
    tokens = page.locator(".assistant .token")
    assert "".join(tokens.all_text_contents()) == choice["message"]["content"]
    depths = tokens.evaluate_all("all => all.map((one) => one.dataset.depths)")
    assert depths == [str(token["draft_depth"]) for token in choice["tokens"]]
    assert depths == ["0", *["1", "2", "0"] * 10]
    expect(tokens.nth(1)).to_have_class(re.compile("drafted"))
    expect(tokens.nth(3)).to_have_class(re.compile("own"))
    tokens.nth(2).hover()
    expect(tokens.nth(2)).to_have_attribute("title", "drafted at depth 2, accepted")
    # The conversation goes on, and a new one begins.
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "more")
    assert [one["role"] for one in asked.value.post_data_json["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    expect(page.locator("#send")).to_be_visible()
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)


def test_stop_by_key_and_by_button_frees_the_engine(open_page: Open, server: RunningServer) -> None:
    page = open_page(settings=short(8000))
    for press in (lambda: page.keyboard.press("Escape"), lambda: page.click("#stop")):
        ask(page)
        expect(page.locator(".assistant .token").nth(20)).to_be_attached()
        expect(page.locator("#running")).to_have_text("1 of 2")
        press()
        expect(page.locator(".assistant .ended").last).to_have_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        server.wait_until_idle()
        page.click("#new-chat")


def test_a_comparison_says_that_the_texts_are_identical(open_page: Open) -> None:
    page = open_page(settings=short(24))
    page.check("#compare")
    ask(page)
    statement = page.locator(".statement")
    expect(statement).to_have_text("The texts are identical: 24 characters, 24 tokens.")
    with_head, plain = page.locator(".comparison article").all()
    assert with_head.locator(".tokens").inner_text() == plain.locator(".tokens").inner_text()
    assert with_head.locator(".drafted").count() == 16
    assert plain.locator(".drafted").count() == 0
    expect(plain.locator(".figures-line")).to_contain_text("24 tokens in 24 passes")
    expect(page.locator(".speeds dd:last-child")).to_have_text([re.compile(r"[\d.]+ tokens/s")] * 2)
    expect(page.locator("#announcer")).to_contain_text("The texts are identical")


def test_figures_are_live_and_rest_in_a_hidden_tab(open_page: Open) -> None:
    page = open_page(settings=short(12))
    ask(page)
    expect(page.locator(".depths .share")).to_have_text([re.compile(r"\d+%")] * 2)
    expect(page.locator("#plan-depth")).to_have_text("2")
    expect(page.locator("#plan-nodes")).to_have_text("42")
    expect(page.locator("#waiting")).to_have_text("0")
    expect(page.locator("#running-meter")).to_have_attribute("aria-valuemax", "2")
    expect(page.locator("#fact-context")).to_have_text("8,192 tokens")
    with page.expect_request("**/v1/speculation"):
        pass
    asked: list[str] = []
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(300)  # what was under way may end
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []
    with page.expect_request("**/v1/speculation"):
        page.evaluate(hide, False)


def test_keys_full_servers_and_lost_ones_are_explained(
    open_page: Open, server: RunningServer
) -> None:
    page = open_page(key=None, settings=short(6))
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key-why")).to_contain_text("This server wants an API key")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-why")).to_contain_text("not one of this server's")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#state-text")).to_have_text("ready")
    assert page.evaluate("sessionStorage.getItem('fledge-key')") == KEY
    long = {"model": MODEL, "prompt": "Go on", "stream": True, "max_tokens": 8000}
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.http.stream("POST", "/v1/completions", json=long))
        wait_until(lambda: server.stats()["num_running"] == 2, "the server is full")
        ask(page)
        waiting = page.locator(".waiting")
        expect(waiting).to_have_text(re.compile(r"The server is full; asking again in \d+ s"))
    expect(page.locator(".assistant .figures-line")).to_contain_text("6 tokens in")
    page.context.set_offline(True)
    expect(page.locator("#banner")).to_contain_text("The server does not answer")
    ask(page)
    expect(page.locator(".failure")).to_contain_text("The server does not answer.")
    page.context.set_offline(False)
    expect(page.locator("#banner")).to_be_hidden()
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".failure")).to_have_count(0)
    expect(page.locator(".assistant .figures-line").last).to_contain_text("6 tokens in")


@pytest.mark.slow
def test_an_engine_that_dies_is_told_of_and_waited_for(
    open_page: Open, server: RunningServer
) -> None:
    page = open_page(settings=short(8000))
    ask(page)
    expect(page.locator(".assistant .token").nth(20)).to_be_attached()
    facts = server.service.supervisor.facts
    assert facts is not None
    os.kill(facts.process_id, signal.SIGKILL)
    expect(page.locator(".failure")).to_contain_text("The engine stopped while it was answering")
    expect(page.locator("#banner")).to_have_text(re.compile("started again|is loading"))
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    expect(page.locator("#fact-restarts")).to_have_text("1")


def test_without_a_head_there_is_nothing_to_compare(open_page: Open) -> None:
    """The server's own figures, as they are without a head."""
    page = open_page()

    def without_head(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "head": None})

    page.route("**/v1/speculation", without_head)
    expect(page.locator("#figures-note")).to_contain_text("No head is loaded")
    for hidden in ("#compare-label", "#acceptance-card", "#controller-card", "#accept-card"):
        expect(page.locator(hidden)).to_be_hidden()
    page.unroute_all(behavior="ignoreErrors")


def test_everything_can_be_reached_by_keyboard_and_on_a_phone(open_page: Open) -> None:
    page = open_page(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True, settings=short(40)
    )
    assert page.evaluate("document.activeElement.id") == "prompt"
    ask(page)
    expect(page.locator(".assistant .figures-line")).to_contain_text("40 tokens in")
    page.check("#compare")
    ask(page)
    expect(page.locator(".statement")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    boxes = [article.bounding_box() for article in page.locator(".comparison article").all()]
    assert boxes[0]["x"] == boxes[1]["x"], "one above the other"
    page.focus(".skip")
    order = []
    for _ in range(10):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none" or (
            order[-1] == "prompt"  # its frame shows the focus
        )
        page.keyboard.press("Tab")
    assert order[:5] == ["skip", "new-chat", "open-key", "theme", "open-figures"]
    assert order[5:] == ["show-origins", "prompt", "send", "open-settings", "compare"]
    page.focus("#open-figures")
    page.keyboard.press("Enter")
    expect(page.locator("#figures")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "close-figures"
    page.keyboard.press("Escape")
    expect(page.locator("#figures")).to_be_hidden()
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    page.fill("#temperature", "0.5")
    page.keyboard.press("Enter")
    expect(page.locator("#settings-dialog")).to_be_hidden()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page)
    assert asked.value.post_data_json["temperature"] == 0.5
    expect(page.locator(".statement")).to_have_count(2)


def test_light_and_dark_stand_out_enough(open_page: Open) -> None:
    page = open_page(color_scheme="dark", reduced_motion="reduce", settings=short(12))
    ask(page)
    expect(page.locator(".assistant .figures-line")).to_contain_text("12 tokens in")
    backgrounds = set()
    # As the system, which is dark; light; dark.
    for name in ("as the system", "light", "dark"):
        expect(page.locator("#theme")).to_have_attribute("aria-label", f"Theme: {name}")
        page.evaluate("document.getElementById('welcome').hidden = false")
        weak = [what for ratio, what in page.evaluate(CONTRAST) if ratio < 4.5]
        assert weak == []
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
    assert len(backgrounds) == 2
    page.uncheck("#show-origins")
    token = page.locator(".assistant .drafted").first
    assert token.evaluate("(one) => getComputedStyle(one).textDecorationLine") == "none"


RENDER = """async (tokens) => {
    const { Answer } = await import("/page/answer.js");
    const answer = new Answer("x");
    for (const [text, depth, reasoning] of tokens) {
        answer.take({ choices: [{ tokens: [{ text, draft_depth: depth, reasoning }] }] });
    }
    answer.finish();
    document.getElementById("log").append(answer.root);
    return {
        spans: [...answer.body.querySelectorAll(".token")].map(
            (one) => [one.textContent, one.className.replace("token ", ""), one.dataset.depths]
        ),
        code: [...answer.body.querySelectorAll("pre")].map(
            (one) => [one.dataset.language ?? "", one.textContent]
        ),
        elements: [...new Set([...answer.body.querySelectorAll("*")].map((one) => one.tagName))],
        text: answer.text,
    };
}"""


def test_what_the_target_says_stays_text(open_page: Open) -> None:
    """No markup is obeyed; parts of a character are shown as one; code stands in blocks."""
    page = open_page()
    evil = '<img src=x onerror="window.bad = 1"><script>window.bad = 1</script>'
    shown = page.evaluate(RENDER, [[evil, 1], ["</p>", 0]])
    assert [text for text, _, _ in shown["spans"]] == [evil, "</p>"]
    assert shown["elements"] == ["DIV", "P", "SPAN"]
    assert page.evaluate("window.bad") is None
    tokens = [["a", 0], ["", 1], ["", 2], ["🦅", 3], ["", 4], ["ü", 0], ["", 0], ["", 1, "hm"]]
    shown = page.evaluate(RENDER, tokens)
    assert shown["spans"] == [
        ["hm", "own first", "0 1"],
        ["a", "own first", "0"],
        ["🦅", "drafted first", "1 2 3"],
        ["ü", "own", "4 0"],  # half of it is the target's own
    ]
    page.evaluate("document.getElementById('log').replaceChildren()")
    tokens = [["See:\n`", 0], ["``py", 1], ["thon\nx = '```'\n", 2], ["```", 0], ["\nDone", 1]]
    shown = page.evaluate(RENDER, tokens)
    assert shown["code"] == [["python", "x = '```'\n"]]
    assert page.locator("#log .tokens > p").all_text_contents() == ["See:\n", "Done"]


def test_files_of_the_page_are_kept_and_checked(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as anyone:
        front = anyone.get("/")
        assert front.status_code == 200
        assert front.headers["content-type"] == "text/html; charset=utf-8"
        paths = re.findall(r'(?:src|href)="(/page/[\w.]+)"', front.text)
        assert {Path(path).suffix for path in paths} == {".css", ".js", ".svg"}
        assert not re.search(r"(?:src|href)=\"(?!/page/|#)|style=|<script>", front.text)
        for path in ("/", *paths):
            response = anyone.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy
            again = anyone.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert anyone.get("/page/secret").status_code == 401
        assert anyone.get("/v1/speculation").status_code == 401
