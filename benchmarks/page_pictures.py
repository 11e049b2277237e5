"""The pictures of docs/run_page.md: first screen, curves and samples of a run with tools, and the table of a sweep.

python -m benchmarks.page_pictures runs/tools runs/sweep
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tests.tools.browser import launch_options
from tools.page.__main__ import Args as PageArgs
from tools.page.__main__ import main as write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[1] / "docs"


@dataclass
class Args:
    tools: Annotated[Path, tyro.conf.Positional]
    """the folder of the run of docs/multi_turn.md"""
    sweep: Annotated[Path, tyro.conf.Positional]
    """the folder of a sweep"""


def opened(browser: "Browser", run: Path, file: Path, scheme: str = "light") -> "Page":
    write_page(PageArgs((run,), output=file))
    page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
    page.goto(f"file://{file}")
    page.wait_for_selector("#first canvas" if scheme == "light" else "#groups canvas")
    return page


def picture(page: "Page", name: str, start: str | None = None) -> None:
    """start: the element at the top of the picture."""
    if start:
        page.locator(start).evaluate("element => element.scrollIntoView()")
    page.wait_for_timeout(500)  # charts draw when they come into view
    page.screenshot(path=DOCS / f"run_page_{name}.png")


def main(args: Args) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options())
        page = opened(browser, args.tools, Path(folder, "tools.html"))
        picture(page, "first")
        page.select_option("#f-kind", "train")
        page.select_option("#f-sort", "spread")
        page.locator("#samples").evaluate("element => element.scrollIntoView()")
        page.locator(".response .t").nth(12).hover()
        picture(page, "samples")

        page = opened(browser, args.tools, Path(folder, "dark.html"), "dark")
        page.select_option("#f-kind", "train")
        page.select_option("#f-sort", "spread")
        page.select_option("#colour", "advantage")
        picture(page, "turns", "#cards")

        page = opened(browser, args.sweep, Path(folder, "sweep.html"))
        picture(page, "sweep")
        picture(page, "curves", "#curves")
        browser.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
