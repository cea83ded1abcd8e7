"""The page to chat at: its files, and the page itself where there is a Chromium."""

import json
import re

import browser
import httpx
import pytest
from live_server import KEY, running
from sampling import every

from penstock.server.pagefiles import PATHS


@pytest.mark.parametrize("path", PATHS)
def test_files_name_no_other_server_and_forbid_all_others(live, path):
    answer = httpx.get(live.url + path)
    assert answer.headers["content-type"].startswith(PATHS[path][1])
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    if "min." not in path:
        assert not re.findall(r"https?:|//\w", re.sub(r"^//.*$", "", answer.text, flags=re.MULTILINE))


def test_every_field_has_a_label(live):
    text = httpx.get(live.url).text
    fields = re.findall(r'<(?:input|textarea|select) id="(\w+)"', text)
    assert len(fields) == 9
    assert sorted(fields) == sorted(re.findall(r'<label for="(\w+)"', text))


def text_of(name):
    return f"document.getElementById('{name}').textContent"


@pytest.fixture
def page():
    if browser.found() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with browser.page() as page:
        yield page
        assert page.problems() == []
        assert len({url.split("/")[2] for url in page.requests() if not url.startswith(("data:", "about:"))}) == 1


def opened(page, live, *deltas, hold=False):
    """Open the page. With deltas, they are its answers, and the last one does not end with ``hold``."""
    if deltas:
        pieces = [{"choices": [{"delta": one, "finish_reason": None}]} for one in deltas]
        script = """const real = window.fetch; window.fetch = (path, options) => {
          if (!path.includes("completions")) return real(path, options);
          window.sent = JSON.parse(options.body);
          return Promise.resolve(new Response(new ReadableStream({start(control) {
            const write = (text) => control.enqueue(new TextEncoder().encode(`data: ${text}\\n\\n`));
            options.signal.addEventListener("abort", () => control.error(options.signal.reason));
            for (const one of PIECES) write(JSON.stringify(one));
            if (!HOLD) { write("[DONE]"); control.close(); }
          }})));
        };"""
        script = script.replace("PIECES", json.dumps(pieces)).replace("HOLD", json.dumps(hold))
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.call("Page.navigate", url=live.url)
    page.wait("document.getElementById('model')?.value === 'tiny'")


def ask(page, text="Hello"):
    page.run("document.getElementById('prompt').focus()")
    page.write(text)
    page.press("Enter", "\r")
    page.wait(f"/complete|cut/.test({text_of('status')})")


def test_a_chat_with_the_keyboard(page, live):
    opened(page, live)
    assert page.run("document.activeElement.id") == "prompt"
    page.run("document.getElementById('max_tokens').value = 3")
    ask(page)
    assert page.run("document.querySelector('article.user p').textContent") == "Hello"
    answer = page.run("document.querySelector('article.assistant .markdown').textContent")
    assert page.run(text_of("spoken")) == answer
    assert page.run("document.activeElement.id") == "prompt"
    page.run("document.getElementById('max_tokens').value = 4000")
    page.write("More")
    page.press("Enter", "\r")
    page.wait("document.querySelectorAll('article').length === 4")
    page.press("Escape")
    page.wait(f"/stopped|complete/.test({text_of('status')})")
    live.settles()
    page.run("document.getElementById('max_tokens').value = 5000")
    page.run("document.getElementById('prompt').value = 'Again'")
    page.press("Enter", "\r")
    page.wait(f"{text_of('error')}.includes('max_tokens must be at most 4096')")
    assert page.run("document.getElementById('prompt').value") == "Again"
    page.run("document.getElementById('max_tokens').value = 0")
    page.press("Enter", "\r")
    page.wait("!document.getElementById('settings').hidden")
    page.run("document.getElementById('clear').click()")
    assert page.run("document.querySelectorAll('article').length") == 0


def test_the_key_is_asked_for_and_stored_nowhere(page, model):
    with running(model, api_key=KEY, template=None) as live:
        page.call("Page.navigate", url=live.url)
        page.wait("document.activeElement?.id === 'key'")
        page.write("wrong")
        page.press("Enter", "\r")
        page.wait(f"{text_of('key-reason')}.includes('does not know')")
        page.write(KEY)
        page.press("Enter", "\r")
        page.wait("document.getElementById('model').value === 'tiny'")
        page.run("document.getElementById('max_tokens').value = 3")
        page.run("document.getElementById('prompt').focus()")
        page.write("Hello")
        page.press("Enter", "\r")
        page.wait(f"{text_of('error')}.includes('must have a chat template')")
        page.press("Enter", "\r")  # the page has changed to texts
        page.wait(f"/complete|cut/.test({text_of('status')})")
        assert KEY not in page.run("JSON.stringify(localStorage)")


MARKDOWN = "# Title\n\n| a | b |\n|--|--:|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n\n- one\n- two\n\n[link][later]\n\n[later]: https://example.org\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_markdown(page, live, size):
    opened(page, live, *({"content": MARKDOWN[at : at + size]} for at in range(0, len(MARKDOWN), size)))
    ask(page)
    for selector in ("h1", "table td.right", ".code code", "ul li + li", "a[href='https://example.org'][rel~=noopener]"):
        assert page.run(f"document.querySelectorAll(`.markdown ${{{json.dumps(selector)}}}`).length") == 1, selector
    page.run("document.execCommand = () => true; navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.run("document.querySelector('[data-copy=code]').click()")
    assert page.run("window.copied") == "print(1)\n"
    page.run("document.querySelector('[data-copy=answer]').click()")
    assert page.run("window.copied") == MARKDOWN
    before = page.run("document.querySelector('.markdown').innerHTML.replaceAll('Copied', 'Copy')")
    page.call("Page.reload")
    page.wait("document.querySelectorAll('article').length === 2")
    assert page.run("document.querySelector('.markdown').innerHTML") == before
    page.run("document.getElementById('clear').click()")
    page.call("Page.reload")
    page.wait("document.getElementById('model')?.value === 'tiny'")
    assert page.run("document.querySelectorAll('article').length") == 0


HOSTILE = [
    "<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>", "<svg onload='window.hit = 1'></svg>",
    "[a](javascript:window.hit=1)",
    "[a](JaVaScript&colon;window.hit=1)", "[a](data:text/html,x)", "![a](https://example.org/x.png)", "<javascript:window.hit=1>",
    "```<img src=x onerror=window.hit=1>\n<svg>\n```", '[a](https://example.org "\\" onclick=window.hit=1")',
]  # fmt: skip


@pytest.mark.parametrize("text", every(3, HOSTILE))
def test_no_html_of_answers(page, live, text):
    opened(page, live, {"content": text})
    ask(page)
    assert page.run("document.querySelectorAll('.markdown :is(script, img, svg, iframe, [onclick], [onerror])').length") == 0
    assert page.run("[...document.querySelectorAll('.markdown a')].every((one) => /^https?:/.test(one.href))")
    assert page.run("window.hit") is None


def test_reasoning_and_calls_are_folded(page, live):
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}
    opened(page, live, {"reasoning_content": "So"}, {"content": "Yes"}, {"tool_calls": [call]}, {"tool_calls": [more]})
    ask(page)
    assert page.run("[...document.querySelectorAll('details')].map((one) => one.open)") == [False, False]
    assert page.run("[...document.querySelectorAll('summary')].map((one) => one.textContent)") == ["Reasoning", "Tool call: weather"]
    assert page.run("document.querySelector('.call pre').textContent") == '{"city": "Oslo"}'


def test_stop_keeps_what_came(page, live):
    opened(page, live, {"content": "Part"}, hold=True)
    page.write("Hello")
    page.press("Enter", "\r")
    page.wait("document.querySelector('.markdown')?.textContent.includes('Part')")
    page.run("document.getElementById('stop').click()")
    page.wait(f"{text_of('status')}.includes('stopped')")
    assert page.run("document.querySelector('.markdown').textContent.trim()") == "Part"


def test_a_phone(page, live):
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    opened(page, live, {"content": MARKDOWN + "x" * 500 + "\n\n```\n" + "y" * 500 + "\n```"})
    ask(page)
    page.run("document.getElementById('toggle').click()")
    assert page.run("document.documentElement.scrollWidth") == 360
    assert page.run("document.getElementById('messages').clientHeight") > 150
    assert page.run("document.getElementById('form').getBoundingClientRect().bottom") <= 640
