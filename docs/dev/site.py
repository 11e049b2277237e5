"""Hooks of mkdocs.yml: what the site has besides the files of docs/, links to it, and formulas without a script.

The code that pages link to comes along as plain HTML, so that a quoted line is one click away, at the version of the
text."""

import inspect
import json
import re
import warnings
from functools import cache
from html import escape, unescape
from pathlib import Path
from posixpath import relpath

import latex2mathml.converter
import tyro
from mkdocs.structure.files import File

import dapo
import grpo
import ppo
import remax
from lib import core_algos

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[(?P<text>`[^`]+`|[^\]]*)\]\((?!https?:|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<text>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
NAMED = {  # pages that are not called as their file in docs/
    "index.md": ROOT / "README.md",
    "contents.md": ROOT / "docs/index.md",
    "first_run.md": ROOT / "docs/first_run.ipynb",
    "reading_a_run.md": ROOT / "docs/reading_a_run.ipynb",
    "CONTRIBUTING.md": ROOT / ".github/CONTRIBUTING.md",
}
NAMED |= {f"papers/{file.name}": file for file in sorted(ROOT.glob("papers/*.md"))}
PAGE_OF = {file: page for page, file in NAMED.items()}
CODE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>
<style>
:root {{ color-scheme: light dark }} body {{ margin: 1rem; font: 14px sans-serif }} pre {{ overflow-x: auto }}
span {{ counter-increment: line }} span:target::before {{ background: #f5c842; color: #000; opacity: 1 }}
span::before {{ content: counter(line); display: inline-block; width: 4ch; margin-right: 1ch; opacity: 0.5 }}
</style>
<a href="{home}">plainrl</a> / {name}
<pre>{lines}</pre>
"""
LARGEST_CODE = 200_000  # bytes of a page
RECORDS = ROOT / "benchmarks/results"  # of which only the tables are pages


# ---- pages ---------------------------------------------------------------------------------------
def on_files(files, config):
    """Adds what is made here: {page: text}."""
    files.remove(files.get_file_from_path("index.md"))
    pages = {name: of_notebook(file) if file.suffix == ".ipynb" else file.read_text() for name, file in NAMED.items()}
    pages |= {"reference/flags.md": flags_page(), "reference/kernels.md": kernels_page()}
    texts = pages | {file.src_uri: file.content_string for file in files.documentation_pages()}
    linked = {target(place_of(name), link) for name, text in texts.items() for link in LINK.finditer(text)}
    pages |= {code_page(path): of_code(path) for path in linked if path and is_code(path)}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def place_of(page: str) -> Path:
    """The file that a page of the site was made of: its links start there."""
    return NAMED.get(page, ROOT / "docs" / page)


def target(place: Path, link: re.Match) -> Path | None:
    """The file or folder that a link of this file names."""
    path = (place.parent / link["path"]).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def is_code(path: Path) -> bool:
    """Whether it becomes a page that no other page is."""
    record = path.is_relative_to(RECORDS) and path.suffix != ".md"
    inside = path.is_relative_to(ROOT / "docs") or path in PAGE_OF or record
    return not inside and path.is_file() and path.stat().st_size < LARGEST_CODE


def code_page(path: Path) -> str:
    return f"code/{path.relative_to(ROOT)}.html"


def of_code(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    lines = enumerate(escape(path.read_text()).splitlines(), 1)
    text = "\n".join(f'<span id="L{number}"></span>{line}' for number, line in lines)
    return CODE.format(name=name, home=relpath("index.html", Path(code_page(path)).parent), lines=text)


def of_notebook(path: Path) -> str:
    """Its cells and their outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += [of_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def of_output(output: dict) -> str:
    """An image, a table or text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if image := data.get("image/png"):
        return f'<img alt="" src="data:image/png;base64,{"".join(image).strip()}">'
    if table := data.get("text/html"):  # without pandas' class a wide table scrolls
        return re.sub(r"<style.*?</style>|(?<=<table)[^>]*", "", "".join(table), flags=re.DOTALL)
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def flags_page() -> str:
    """All flags of the four scripts, from their dataclasses; one of several scripts is listed once."""
    of: dict[tuple[str, str, str, str], list[str]] = {}  # (group, flag, values, text): the scripts
    for script in (grpo, ppo, remax, dapo):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            parser = tyro.extras.get_parser(script.Args)
        for group in parser._action_groups:
            for action in group._group_actions:
                values = str(action.metavar or "").replace("|", ", ").replace(",", ", ")
                title = (group.title or "").removesuffix(" options").replace("options", "algorithm")
                row = (title, "`, `".join(action.option_strings), values, " ".join((action.help or "").split()))
                if "--help" not in row[1]:
                    of.setdefault(row, []).append(script.__name__)
    lines = ["# Flags", "", "Made from the scripts' dataclasses. `(default: ...)` is the default for a model of yours;"]
    lines += ["the embedded task has its own: [defaults.md](../defaults.md)."]
    for title in dict.fromkeys(group for group, *_ in of):
        lines += ["", f"## {title}", "", "| flag | values | meaning | scripts |", "|---|---|---|---|"]
        for (group, flag, values, text), scripts in of.items():
            if group == title:
                of_scripts = "all" if len(scripts) == 4 else " ".join(scripts)
                cells = [f"`{flag}`", f"`{values}`" if values else "", cell(text), of_scripts]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def kernels_page() -> str:
    """Signature and docstring of each function of lib/core_algos."""
    lines = ["# Kernels", "", "The functions of [lib/core_algos](../algorithms.md), with their own words."]
    for name, function in sorted(vars(core_algos).items()):
        if inspect.isfunction(function) and function.__doc__:
            lines += ["", f"## `{name}`", "", "```python", f"{name}{inspect.signature(function)}", "```", ""]
            lines += ["```text", inspect.getdoc(function) or "", "```"]
    return "\n".join(lines)


# ---- links and formulas --------------------------------------------------------------------------
def on_page_markdown(markdown, page, **_):
    """Links from the place that the page has in the site. A link that quotes code leads to the line."""
    place, name = place_of(page.file.src_uri), page.file.src_uri

    def linked(link: re.Match) -> str:
        path, anchor = target(place, link), link["anchor"] or ""
        if path is None:
            return link[0]
        if is_code(path):
            to, anchor = code_page(path), line_of(path, link["text"].strip("`"))
        elif path in PAGE_OF or path.is_relative_to(ROOT / "docs"):
            to = PAGE_OF.get(path) or str(path.relative_to(ROOT / "docs"))
        else:
            return link["text"]  # a folder, or a record
        return f"[{link['text']}]({relpath(to, str(Path(name).parent))}{anchor})"

    return "".join(part if part.startswith("```") else LINK.sub(linked, part) for part in FENCE.split(markdown))


@cache
def line_of(path: Path, code: str) -> str:
    lines = path.read_text().splitlines()
    found = next((number for number, line in enumerate(lines, 1) if code in line), None)
    return "" if found is None else f"#L{found}"


def on_page_content(html, **_):
    """Formulas as MathML, which browsers draw without a script."""

    def mathml(formula: re.Match) -> str:
        display = "inline" if formula["tag"] == "span" else "block"
        return latex2mathml.converter.convert(unescape(formula["text"]), display=display)

    return FORMULA.sub(mathml, html)
