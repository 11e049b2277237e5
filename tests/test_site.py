"""The documents as a site: built as `make docs` does, and read in a browser."""

import re
from functools import partial
from http.server import SimpleHTTPRequestHandler

import pytest
from playwright.sync_api import sync_playwright

import dapo
import grpo
import ppo
import remax
from lib.cli.flags import as_flag, walk
from lib.core_algos import estimate_advantages
from tests.common import ROOT, fork_module, http_server, parse_flags, ran
from tests.tools.browser import launch_options, why_no_browser

PAGES = ("index", "grpo", "reading_a_run", "reference/flags", "code/grpo.py")


class Quiet(SimpleHTTPRequestHandler):
    log_message = lambda *_: None  # noqa: E731


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """--strict fails for a page that is in no menu, and for a link to no page or no heading."""
    folder = tmp_path_factory.mktemp("site")
    built = ran(fork_module("mkdocs", "build", "--strict", "-f", str(ROOT / "docs/dev/mkdocs.yml"), "-d", str(folder)))
    assert "excluded from the built site" not in built.stderr + built.stdout
    return folder


@pytest.fixture(scope="module")
def browser(site):
    """(opens a page of the site: its URL's end -> page, all that pages asked for)."""
    if why := why_no_browser():
        pytest.skip(why)
    asked: list[str] = []
    with http_server(partial(Quiet, directory=site)) as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**launch_options())

        def visit(end: str, **options):
            page = chromium.new_page(viewport={"width": 1280, "height": 900}, **options)
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: asked.append(f"error: {error}"))
            page.goto(end if end.startswith("file:") else f"{url}/{end}")
            return page

        yield visit, asked
        chromium.close()


def test_it_is_small_and_has_every_flag_every_formula_and_the_quoted_code(site):
    """Pages of code are plain: with the theme and colours they took 43 MB. Formulas are drawn without a script."""
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < 20_000_000
    read = lambda name: (site / f"{name}.html").read_text()  # noqa: E731
    assert "unpkg.com" not in read("index") and estimate_advantages.__name__ in read("reference/kernels")
    flags = read("reference/flags")
    for script in (grpo, ppo, remax, dapo):
        names = [as_flag(name) for name, *_ in walk(parse_flags(script.Args, []))]
        assert [name for name in names if f"<code>{name}</code>" not in flags] == []
    for name in ("grpo", "ppo", "remax", "dapo", "multi_turn", "papers/distill"):
        assert read(name).count("<math") > 1 and "arithmatex" not in read(name), name
    [number] = re.findall(r'code/grpo\.py\.html#L(\d+)"><code>def grpo_advantages\(', read("grpo"))
    assert f'<span id="L{number}"></span>def grpo_advantages(' in read("code/grpo.py")
    assert (ROOT / "grpo.py").read_text().splitlines()[int(number) - 1].startswith("def grpo_advantages(")


def test_pages_fit_and_ask_nobody_else(browser):
    visit, asked = browser
    for name in PAGES:
        page = visit(f"{name}.html")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width, name
        page.close()
    here = ("http://127.0.0.1:", "data:", "blob:http://127.", "file:")
    assert {url for url in asked if not url.startswith(here)} == set()


@pytest.mark.parametrize("place", ["index.html", "file://{site}/index.html"], ids=["server", "disk"])
def test_search_finds_a_flag_and_not_the_code(browser, site, place):
    page = browser[0](place.format(site=site))
    page.locator("input.md-search__input").press_sequentially("zero-variance")  # it listens to keys
    page.locator(".md-search-result__link").first.wait_for(timeout=120_000)
    found = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert any("flags" in url for url in found) and not any("/code/" in url for url in found)
