"""Programs that read runs, recordings and configs: `python -m tools.NAME --help`. lib/ never imports them."""

import lib  # noqa: F401  outside the environment it says what to do
