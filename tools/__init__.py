"""Programs that read runs, recordings and configs: `python -m tools.NAME --help`. lib/ never imports them."""
