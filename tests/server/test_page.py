"""The page to chat at: its files, and the page itself where there is a Chromium."""

import re

import browser
import httpx
import pytest
from live_server import KEY, running


@pytest.mark.parametrize(("path", "media"), [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")])
def test_files_name_no_other_server_and_forbid_all_others(live, path, media):
    answer = httpx.get(live.url + path)
    assert answer.headers["content-type"].startswith(media)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"https?:|//\w", re.sub(r"^//.*$", "", answer.text, flags=re.MULTILINE))


def test_every_field_has_a_label(live):
    text = httpx.get(live.url).text
    fields = re.findall(r'<(?:input|textarea|select) id="(\w+)"', text)
    assert len(fields) == 8
    assert sorted(fields) == sorted(re.findall(r'<label for="(\w+)"', text))


def text_of(name):
    return f"document.getElementById('{name}').textContent"


@pytest.fixture
def page():
    if browser.found() is None:
        pytest.skip("no Chromium")
    with browser.page() as page:
        yield page


def test_a_chat_with_the_keyboard(page, live):
    page.call("Page.navigate", url=live.url)
    page.wait(f"document.getElementById('model') && {text_of('model')} === 'tiny'")
    assert page.run("document.activeElement.id") == "prompt"
    page.run("document.getElementById('max_tokens').value = 3")
    page.write("Hello")
    page.press("Enter", "\r")
    page.wait(f"/complete|cut/.test({text_of('status')})")
    assert page.run("document.querySelector('article.user p').textContent") == "Hello"
    answer = page.run("document.querySelector('article.assistant p').textContent")
    assert answer
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
    page.wait("document.querySelector('details').open")
    page.run("document.getElementById('clear').click()")
    assert page.run("document.querySelectorAll('article').length") == 0


def test_a_chat_with_a_key_and_without_a_template(page, model):
    with running(model, api_key=KEY, template=None) as live:
        page.call("Page.navigate", url=live.url)
        page.wait(f"document.getElementById('status') && {text_of('status')}.includes('API key')")
        page.run(f"document.getElementById('key').value = '{KEY}'")
        page.run("document.getElementById('max_tokens').value = 3")
        page.write("Hello")
        page.press("Enter", "\r")
        page.wait(f"{text_of('error')}.includes('must have a chat template')")
        page.press("Enter", "\r")  # the page has changed to texts
        page.wait(f"/complete|cut/.test({text_of('status')})")
