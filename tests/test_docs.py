"""The documents: each linked line says what the text says of it, each metric and flag that is named exists.

`python tests/test_docs.py` writes the present line numbers into the documents.
"""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
CODE_LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)")


def line_of(doc: Path, file: str, code: str) -> int:
    lines = (doc.parent / file).resolve().read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if code in line]
    assert found, f"{doc.name}: no line of {file} has {code!r}"
    return found[0]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_linked_lines_hold_the_code_that_is_quoted(doc):
    for code, file, line in CODE_LINK.findall(doc.read_text()):
        assert line_of(doc, file, code) == int(line), f"{code!r} moved: run python tests/test_docs.py"


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_linked_files_exist(doc):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", doc.read_text()):
        assert (doc.parent / target).exists(), target


def test_flags_in_the_documents_exist():
    from grpo import Args

    flags = {field.name for field in dataclasses.fields(Args)}
    for doc in [ROOT / "README.md", ROOT / "docs/grpo.md"]:
        text = doc.read_text()
        named = re.findall(r"`--([a-z-]+)", text)  # in a sentence or a table
        for line in re.findall(r"(?:grpo\.py|^    )(.* --.*)$", text, flags=re.M):  # in a command
            named += re.findall(r"(?<!\S)--([a-z-]+)", line)
        assert len(named) > 5
        for flag in named:
            assert flag.replace("-", "_").removeprefix("no_") in flags | {"help"}, (doc.name, flag)


def test_every_estimator_and_loss_stands_in_the_table_and_in_the_help():
    from grpo import Args
    from lib.advantages import ADV_ESTIMATORS
    from lib.policy_losses import POLICY_LOSSES

    advantages, losses, _ = re.split(r"^## (?=Policy|Tested)", (ROOT / "docs/algorithms.md").read_text(), flags=re.M)
    source = Path(inspect.getsourcefile(Args)).read_text()
    for text, table, field in ((advantages, ADV_ESTIMATORS, "adv_estimator"), (losses, POLICY_LOSSES, "loss")):
        assert set(re.findall(r"^\| `(\w+)`", text, flags=re.M)) == set(table)
        docstring = re.search(rf'^    {field}: str[^\n]*\n    """(.*?)"""', source, flags=re.M | re.S)[1]
        assert [name for name in table if not re.search(rf"\b{name}\b", docstring)] == []


if __name__ == "__main__":
    for doc in DOCS:
        text = CODE_LINK.sub(
            lambda m, doc=doc: f"[`{m[1]}`]({m[2]}#L{line_of(doc, m[2], m[1])})",
            doc.read_text(),
        )
        doc.write_text(text)
