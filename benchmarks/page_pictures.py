"""The pictures of docs/reading_a_run.ipynb: first screen and samples of a run with tools, and the table of a sweep.

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
    """the folder of a run of docs/multi_turn.md"""
    sweep: Annotated[Path, tyro.conf.Positional]
    """the folder of a sweep"""


def opened(browser: "Browser", run: Path, file: Path) -> "Page":
    write_page(PageArgs((run,), output=file))
    page = browser.new_page(viewport={"width": 1200, "height": 960})
    page.goto(f"file://{file}")
    page.wait_for_selector("#first canvas, #first table")
    return page


def picture(page: "Page", name: str, start: str = "body", point_at: str | None = None) -> None:
    """start: the element at the top of the picture."""
    page.locator(start).first.evaluate("element => element.scrollIntoView()")
    page.wait_for_timeout(1000)  # charts are drawn when they come into view
    if point_at:
        page.locator(point_at).hover()
    page.screenshot(path=DOCS / f"run_page_{name}.png")


def choose(page: "Page", **options: str) -> None:
    for name, value in options.items():
        page.select_option(f"#f-{name}", value)
    page.locator("#cards").evaluate("element => element.scrollIntoView()")
    page.wait_for_selector("#cards .responses")  # drawn when they come into view


def main(args: Args) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options())
        page = opened(browser, args.tools, Path(folder, "tools.html"))
        picture(page, "first")
        choose(page, kind="train", sort="spread")
        picture(page, "samples", "#samples", "#cards .t >> nth=12")
        page = opened(browser, args.sweep, Path(folder, "sweep.html"))
        picture(page, "sweep")
        browser.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
