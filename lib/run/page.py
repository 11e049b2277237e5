"""The run page is tools/page."""

import sys

if __name__ == "__main__":
    print("error: the command is now: python -m tools.page", file=sys.stderr)
    sys.exit(2)
