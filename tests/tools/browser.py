"""The browser of the tests of pages: Debian's Chromium, or the one that `playwright install chromium` has brought.

`python -m tests.tools.browser` fails and says why if there is none.
"""

import shutil
import sys
from pathlib import Path
from typing import Any


def launch_options() -> dict[str, Any]:
    """For playwright's chromium.launch."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return {"executable_path": found, "args": ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}


def why_no_browser() -> str | None:
    """Why pages cannot be tested here; None if they can."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        return f"playwright is not installed: {error}"
    if launch_options()["executable_path"]:
        return None
    with sync_playwright() as playwright:
        if Path(playwright.chromium.executable_path).exists():
            return None
    return "no Chromium: apt-get install chromium, or playwright install chromium"


if __name__ == "__main__":
    sys.exit(why_no_browser())
