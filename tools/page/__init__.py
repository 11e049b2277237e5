"""The page of one run or several: one HTML file without a network, by `python -m tools.page`. Reads runs, never
writes to their files, and imports no torch."""
