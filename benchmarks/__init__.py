import lib  # noqa: F401  outside the environment it says what to do
