"""What has one right answer and is shared by the four scripts. What a paper might change is in the scripts."""


class InputError(ValueError):
    """The user's input is wrong. The message is one line: what, where (file, row, flag), and what to do about it."""
