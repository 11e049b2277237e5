r"""Finds the answer in a response: the last \boxed{...} or <answer>...</answer>. Takes time linear in the length."""

import re

BRACES = re.compile(r"(\\boxed\{)|\\(?!\\boxed\{).|([{}])", re.DOTALL)  # \{ and \} are not groups


def last_boxed(text: str) -> str | None:
    r"""What stands in the last closed \boxed{...}, braces matched: r"\boxed{\frac{1}{2}}." -> r"\frac{1}{2}"."""
    opened: list[int | None] = []  # where the content of a \boxed{ begins; None for any other {
    start, end = -1, -1
    for token in BRACES.finditer(text):
        boxed, brace = token.groups()
        if boxed or brace == "{":
            opened.append(token.end() if boxed else None)
        elif brace == "}" and opened:
            content = opened.pop()
            if content is not None and content > start:
                start, end = content, token.start()
    return text[start:end].strip() if start >= 0 else None


def last_tagged(text: str) -> str | None:
    """What stands in the last closed <answer>...</answer>, stripped."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    return text[start + len("<answer>") : text.find("</answer>", start)].strip()
