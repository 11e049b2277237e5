"""docs/papers.md: papers, flags and what differs, held to the code."""

import re
from pathlib import Path

from lib.columns import COLUMNS
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES, TOKEN_MASKS
from tests.common import ROOT

PAPER = re.compile(r"\b[12]\d{3}\.\d{5}\b")
PAGE = (ROOT / "docs/papers.md").read_text()
CODE = [
    *(ROOT / f"{name}.py" for name in ("grpo", "ppo", "remax", "dapo")),
    *(p for room in ("lib", "agent", "servers", "planner") for p in (ROOT / room).rglob("*.py")),
]


def papers(files: list[Path]) -> set[str]:
    return {paper for file in files for paper in PAPER.findall(file.read_text())}


def test_the_paper_index_is_that_of_the_code():
    methods = papers([*ROOT.glob("papers/*.md"), ROOT / "docs/your_own.md"])
    assert papers(CODE) - {*PAPER.findall(PAGE)} == set(), "a paper that the code names has no row in docs/papers.md"
    named = papers(CODE) | methods | papers([ROOT / "docs/multi_turn.md"])
    assert {*PAPER.findall(PAGE)} - named == set(), "docs/papers.md has a paper that nothing else names"


def test_every_estimator_loss_and_mask_has_a_row():
    flags = {" ".join(words) for words in re.findall(r"(--[\w.-]+)(?: (\w+))?", PAGE)}
    rest = PAGE.split("## Without a paper")[1]
    for name in ADV_ESTIMATORS:
        assert f"--adv-estimator {name}" in flags or f"`{name}`" in rest, name
    for name in POLICY_LOSSES:
        assert f"--loss {name}" in flags or f"`{name}`" in rest, name
    for name in TOKEN_MASKS.keys() - COLUMNS.keys():
        assert f"--token-masks {name}" in flags, name


def test_links_name_the_paper_that_they_open():
    links = re.findall(r"\[([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", PAGE)
    assert links and all(text == target for text, target in links)
