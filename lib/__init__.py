"""What has one right answer and is shared by the four scripts. What a paper might change is in the scripts."""

import os


class InputError(ValueError):
    """The user's input is wrong. The message is one line: what, where (file, row, flag), and what to do about it."""


def is_first_on_node() -> bool:
    """True on one rank of each node, also before the process group exists."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
