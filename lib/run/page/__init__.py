"""The page of one run or several: one HTML file without a network, by `python -m lib.run.page`. Reads runs, never
writes to their files, and does without torch."""
