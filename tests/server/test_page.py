"""The page in a browser: one server with the bundled pair on two ranks, and one page for all tests, in order."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import LIMIT_MS, Watched, browser
from support.commands import ROOT, wait_for
from support.servers import DRAFT, Serving, server

KEY = "right"
FILES = sorted(path.name for path in (ROOT / "ggpipe" / "server" / "page").iterdir())
ANSWER = "article.assistant"
TEXT = f"{ANSWER} > .text"

expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with server(
        "-md", str(DRAFT), "--mpi-layer-split", "0.5,0.5", "--exact", "-c", "4096", "-np", "2", "--api-key", KEY,
        "-n", "24", "-s", "5", "--ignore-eos", "--sse-ping-interval", "1", "--mode", "speculative",
    ) as own:  # fmt: skip
        own.wait_until_ready()
        yield own


@pytest.fixture(scope="module")
def watched(serving: Serving) -> Iterator[Watched]:
    with browser(serving.url) as own:
        own.page.goto(serving.url)
        own.page.get_by_label("Key", exact=True).fill(KEY)
        own.page.keyboard.press("Enter")
        expect(own.page.locator("#pipeline .state")).to_have_text("ready")
        own.errors.clear()  # caused by the responses with 401
        yield own


@pytest.fixture
def page(watched: Watched) -> Iterator[Page]:
    """The page, with a new conversation."""
    watched.page.get_by_role("button", name="New", exact=True).click()
    yield watched.page
    watched.check()


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_end(page: Page, limit_ms: float = LIMIT_MS) -> None:
    """Wait until the answer is complete."""
    expect(page.locator(ANSWER).last).to_have_attribute("aria-busy", "false", timeout=limit_ms)
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send")


def set_up(page: Page, **values: str) -> None:
    """Change settings of the conversation."""
    page.get_by_role("button", name="System prompt and sampling").click()
    page.locator("#settings details").evaluate("more => { more.open = true; }")
    for name, value in values.items():
        page.locator(f"#setting-{name}").fill(value)
    page.get_by_role("button", name="Apply").click()


def test_the_page_needs_no_key_and_its_data_do(serving: Serving) -> None:
    status, text, headers = serving.ask("GET", "/")
    assert status == 200
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
    assert set(re.findall(r'(?:src|href)="page/([^"]+)"', text)) <= set(FILES)
    for name in FILES:
        status, _, headers = serving.ask("GET", f"/page/{name}")
        assert (status, headers["x-content-type-options"]) == (200, "nosniff")
        assert serving.ask("GET", f"/page/{name}", headers={"If-None-Match": headers["etag"]})[0] == 304
    for path in ("/page/", "/page/no", "/page/../keys.py", "/page/%2e%2e%2fkeys.py", "/page/..%5ckeys.py"):
        assert serving.ask("GET", path)[0] == 404
    assert [serving.ask("GET", path)[0] for path in ("/live", "/props")] == [401, 401]


def test_a_chat_and_the_pipeline_beside_it(page: Page) -> None:
    send(page, "Tell me of a king.")
    wait_for_end(page)
    expect(page.locator(TEXT)).not_to_be_empty()
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("24 tokens")
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("acceptance")
    pipeline = page.locator("#pipeline")
    expect(pipeline.locator(".ranks b")).to_have_text(["rank 0", "rank 1", "draft 0"])
    expect(pipeline.locator("dd").nth(2)).to_contain_text("%")
    page.get_by_label("in the text").check()
    colours = page.locator(f"{TEXT} span")
    classes = set(colours.evaluate_all("all => all.map(one => one.className)"))
    assert {"own", "drafted draft"} <= classes <= {"own", "drafted draft", "drafted ngram", "drafted several"}
    plain = page.locator(TEXT).inner_text()
    page.get_by_label("in the text").uncheck()
    assert page.locator(TEXT).inner_text().split() == plain.split()


def test_stop_regenerate_edit_and_go_back(page: Page) -> None:
    set_up(page, max_tokens="-1", seed="-1")
    send(page, "Tell me of a queen.")
    expect(page.locator(TEXT)).not_to_be_empty()
    page.keyboard.press("Escape")
    wait_for_end(page)
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("stopped")
    stopped = page.locator(TEXT).inner_text()
    set_up(page, max_tokens="12", seed="7")
    page.get_by_role("button", name="Regenerate").click()
    wait_for_end(page)
    expect(page.locator(f"{ANSWER} .versions")).to_have_text("2/2")
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("12 tokens")
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(TEXT)).to_have_text(stopped, use_inner_text=True)
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Tell me of a fox.")
    page.keyboard.press("Enter")
    wait_for_end(page)
    expect(page.locator("article.user > .text")).to_have_text("Tell me of a fox.")
    expect(page.locator("article.user .versions")).to_have_text("2/2")
    expect(page.locator(ANSWER)).to_have_count(1)


def test_conversations_outlive_a_reload(page: Page, watched: Watched) -> None:
    name = {"name": "tale.txt", "mimeType": "text/plain", "buffer": b"A <b>fox</b>.\n```\n"}
    page.locator("#chooser").set_input_files(name)  # type: ignore[arg-type]
    expect(page.locator("#files")).to_contain_text("tale.txt")
    send(page, "What is in the file?")
    wait_for_end(page)
    answer = page.locator(TEXT).inner_text()
    page.reload()
    expect(page.locator(TEXT)).to_have_text(answer, use_inner_text=True)
    expect(page.locator("article.user .file pre")).to_have_text("A <b>fox</b>.\n```\n")
    row = page.locator("#conversations li.current")
    for title in ("Of foxes", "Of wolves", "Of geese", "Of owls", "Of hares"):
        row.hover()
        row.get_by_role("button", name="Rename").click()
        page.get_by_label("Title").fill(title)
        page.keyboard.press("Enter")
        page.reload()  # immediately; nothing may be lost
        expect(page.locator("#title")).to_have_text(title)
    row.hover()
    n_conversations = page.locator("#conversations li").count()
    row.get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations li")).to_have_count(n_conversations - 1)
    page.reload()
    expect(page.locator("#pipeline .state")).to_have_text("ready")
    expect(page.locator("#conversations li")).to_have_count(n_conversations - 1)


def test_what_the_model_writes_is_text(page: Page) -> None:
    html = "<script>window.broken=1</script><img src=x onerror=window.broken=1>"
    bad = "javascript:window.broken=1"
    link = f"[go]({bad}) [go](java&#115;cript:window.broken=1) <{bad}> ![go]({bad})"
    set_up(page, grammar=f'root ::= "{html}\\n\\n{link} [out](https://example.org/) **bold**\\n\\n```\\n{html}\\n```"',
           max_tokens="400")  # fmt: skip
    send(page, "Break it.")
    wait_for_end(page)
    text = page.locator(TEXT)
    expect(text.locator("p").first).to_have_text(html)
    expect(text.locator("pre")).to_have_text(html)
    expect(text.locator("strong")).to_have_text("bold")
    assert text.locator("a").evaluate_all("all => all.map(one => one.href)") == ["https://example.org/"]
    assert text.locator("script, img").count() == 0
    assert page.evaluate("window.broken") is None
    set_up(page, grammar="", max_tokens="")


def test_markdown(page: Page) -> None:
    text = (
        "# One\n\nTwo ~~three~~ `a<b`\n*four* &amp; <b>five</b> _six\n\n- [x] seven\n- eight\n  1. nine\n\n"
        "| a | b |\n| - | -: |\n| 1 | `x\\|y` |\n\n> ten\n\n```py\nprint(1)\n```\n\n" + 100 * "> " + "deep"
    )
    html, keeps_nodes = page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("./page/markdown.js");
          const place = document.createElement("div");
          const view = new MarkdownView(place);
          view.show("# One\\n\\nTwo");
          const first = place.firstChild;
          view.show(text);
          return [place.innerHTML, first === place.firstChild];
        }""",
        text,
    )
    assert keeps_nodes
    for part in (
        '<h3 class="h1">One</h3><p>Two <del>three</del> <code>a&lt;b</code><br><em>four</em> &amp;',
        "&amp; &lt;b&gt;five&lt;/b&gt; _six</p>",
        '<ul><li class="task"><input type="checkbox" disabled="" checked="">seven</li>',
        "<li>eight<ol><li>nine</li></ol></li></ul>", '<th class="right">b</th></tr></thead><tbody>',
        '<tr><td>1</td><td class="right"><code>x|y</code></td></tr></tbody></table>',
        "<blockquote><p>ten</p></blockquote>", "<span>py</span>", '<pre tabindex="0"><code>print(1)</code></pre>',
        "&gt; deep",
    ):  # fmt: skip
        assert part in html


FAKED = """() => {
  const fetch = window.fetch;
  window.fetch = async (path, options) => {
    if (path !== "v1/chat/completions") return fetch(path, options);
    const stream = new TransformStream();
    const writer = stream.writable.getWriter();
    const say = (chunk) => writer.write(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
    window.say = (delta, reason = null) => say({ choices: [{ index: 0, delta, finish_reason: reason }] });
    window.sayProgress = (prompt_progress) => say({ choices: [{ index: 0, delta: {} }], prompt_progress });
    window.end = () => { window.fetch = fetch; writer.close(); };
    return new Response(stream.readable);
  };
}"""
"""Replaces the next answer by events that the test sends."""


def test_progress_reasoning_and_calls(page: Page) -> None:
    page.evaluate(FAKED)
    send(page, "What is the weather?")
    status = page.locator(f"{ANSWER} .status")
    wait_for(lambda: page.evaluate("!!window.sayProgress"))
    page.evaluate("sayProgress({ total: 3000, cache: 1000, processed: 1500, time_ms: 9 })")
    expect(status).to_contain_text("1,500 of 3,000 tokens")
    expect(status.get_by_role("progressbar", name="Prompt")).to_have_js_property("position", 0.25)
    page.evaluate("say({ reasoning_content: 'I *look*.' })")
    expect(status.get_by_role("progressbar")).to_have_count(0)
    expect(page.locator(f"{ANSWER} .reasoning.now summary")).to_have_text("Reasoning")
    expect(page.locator(f"{ANSWER} .reasoning .text")).to_be_hidden()
    page.locator(f"{ANSWER} .reasoning summary").click()
    expect(page.locator(f"{ANSWER} .reasoning em")).to_have_text("look")
    begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    page.evaluate("call => say({ tool_calls: [call] })", begun)
    call = page.locator(f"{ANSWER} .call")
    expect(call.locator("summary")).to_have_text("Call of look")
    expect(page.locator(f"{ANSWER} .reasoning.now")).to_have_count(0)
    for part in ('{"place": ', '"<b>hall</b>"}'):
        page.evaluate("text => say({ tool_calls: [{ index: 0, function: { arguments: text } }] })", part)
    call.locator("summary").click()
    expect(call.locator("pre")).to_have_text('{ "place": "<b>hall</b>" }')
    expect(page.get_by_label("Result of look")).to_have_count(0)
    page.evaluate("say({}, 'tool_calls').then(end)")
    wait_for_end(page)
    page.reload()  # everything is saved
    expect(call.locator("pre")).to_contain_text("<b>hall</b>")
    page.get_by_label("Result of look").fill("It rains.")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send the result").click()
    wait_for_end(page)
    expect(page.get_by_label("Result of a call")).to_contain_text("It rains.")
    expect(page.get_by_label("Result of look")).to_have_count(0)
    body: Any = asked.value.post_data_json
    user, model, result = body["messages"]
    arguments = '{"place": "<b>hall</b>"}'
    assert model["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    ]
    assert (user["role"], model["reasoning_content"]) == ("user", "I *look*.")
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "It rains."}
    expect(page.locator(TEXT).last).not_to_be_empty()


IS_KEPT = """text => new Promise((resolve) => {
  const opened = indexedDB.open("ggpipe");
  opened.onsuccess = () => {
    const all = opened.result.transaction("conversations").objectStore("conversations").getAll();
    all.onsuccess = () => resolve(all.result.some(({ nodes }) => nodes.some(({ content }) => content === text)));
  };
})"""


def test_what_was_written_before_a_reload_is_kept(page: Page) -> None:
    page.evaluate(FAKED)
    send(page, "Tell me of a goose.")
    wait_for(lambda: page.evaluate("!!window.say"))
    page.evaluate("say({ content: 'The goose said' })")
    wait_for(lambda: page.evaluate(IS_KEPT, "The goose said"))
    page.reload()
    expect(page.locator(TEXT)).to_have_text("The goose said")
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("The page was closed")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_a_message_waits_until_the_model_is_loaded(watched: Watched, page: Page) -> None:
    error = '{"status": "loading", "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'
    urls = ("**/v1/chat/completions", "**/health")
    is_loading = True

    def answer(route: Route) -> None:
        if is_loading:
            route.fulfill(status=503, content_type="application/json", body=error)
        else:
            route.continue_()

    for url in urls:
        page.route(url, answer)
    with page.expect_response(urls[0]), page.expect_response(urls[1]):
        send(page, "Tell me of a hen.")
    with page.expect_response(urls[0]):
        expect(page.locator(ANSWER)).to_have_attribute("aria-busy", "true")
    is_loading = False  # requests under way hang if their route is removed
    wait_for_end(page)
    for url in urls:
        page.unroute(url)
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("24 tokens")
    watched.errors[:] = [error for error in watched.errors if "503" not in error]


def test_a_stream_that_breaks_is_gone_on_with(page: Page) -> None:
    chunk = '{"choices": [{"index": 0, "delta": {"content": "The wolf said"}, "finish_reason": null}]}'
    url = "**/v1/chat/completions"
    page.route(url, lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\n"))
    send(page, "Tell me of a wolf.")
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("ended early")
    page.unroute(url)
    page.get_by_role("button", name="Continue").click()
    wait_for_end(page)
    expect(page.locator(f"{ANSWER} .status")).to_contain_text("24 tokens")
    assert re.match("The wolf said.", page.locator(TEXT).inner_text(), re.DOTALL)


def test_a_killed_rank_costs_no_text(page: Page, serving: Serving) -> None:
    set_up(page, max_tokens="500")
    send(page, "Tell me of a castle.")
    wait_for_end(page)
    whole = page.locator(TEXT).inner_text()
    *_, rank = serving.ranks()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(TEXT)).not_to_be_empty()
    os.kill(rank, signal.SIGKILL)
    page.wait_for_function(  # looks at every frame; `expect` does twice a second, and the ranks may restart faster
        "css => document.querySelector(css).textContent.includes('The ranks are restarting')",
        arg=f"{ANSWER} .status",
        timeout=LIMIT_MS,
    )
    wait_for_end(page, 2 * LIMIT_MS)
    expect(page.locator(TEXT)).to_have_text(whole, use_inner_text=True)
    expect(page.locator("#pipeline .state")).to_have_text("ready")
    expect(page.locator("#pipeline dd").last).to_have_text("1")
