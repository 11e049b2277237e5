"""Puts the page together: the template, its style and script, and the data of runs."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

HERE = Path(__file__).parent
UPLOT = HERE / "vendor/uplot-1.6.32"
TROUBLESHOOTING = HERE.parents[1] / "docs/troubleshooting.md"


def render(title: str, data: dict[str, Any] | None, chunks: dict[str, bytes]) -> str:
    """The HTML. data: None leaves data and chunks out: the page asks its server for them (--serve)."""
    style = "\n".join(file.read_text() for file in (UPLOT / "uPlot.min.css", HERE / "page.css"))
    own = "\n".join(
        (HERE / f"script/{name}.js").read_text() for name in ("base", "curves", "samples", "results", "page")
    )
    scripts = [(UPLOT / "uPlot.iife.min.js").read_text(), own]
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "connect-src": "'none'" if data is not None else "'self'",
        "img-src": "data:" if data is not None else "data: 'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").render(
        title=title,
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        style=style,
        scripts=scripts,
        sections=sections(TROUBLESHOOTING.read_text()) if TROUBLESHOOTING.exists() else {},
        data=None if data is None else as_script(data),
        chunks={key: base64.b64encode(chunk).decode() for key, chunk in chunks.items()},
    )


def as_script(value: Any) -> str:
    """JSON that may stand in a <script> element: no text in it can end the element or begin a comment."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def sections(markdown: str) -> dict[str, str]:
    """{anchor: HTML} of the parts under each heading of a document. Links to other files become text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    found: dict[str, list[Token]] = {}
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            found[anchor(tokens[i + 1].content)] = []
        elif found and token.type != "heading_close" and tokens[i - 1].type != "heading_open":
            list(found.values())[-1].append(token)
    for token in (token for part in found.values() for token in part):
        for inner in token.children or ():
            if inner.type == "link_open" and "://" not in str(inner.attrs["href"]):
                inner.attrs = {"title": inner.attrs["href"]}
    return {name: parser.renderer.render(part, parser.options, {}) for name, part in found.items()}


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", html.unescape(heading).lower()).replace(" ", "-")
