"""docs/papers.md: papers, flags and what differs, held to the code."""

import re
from pathlib import Path

from lib.columns import COLUMNS
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES, TOKEN_MASKS
from tests.common import ROOT

PAPER = re.compile(r"\b[12]\d{3}\.\d{5}\b")
PAGE = (ROOT / "docs/papers.md").read_text()
CODE = [path for room in ("lib", "agent", "servers", "planner") for path in (ROOT / room).rglob("*.py")]
CODE += [ROOT / f"{name}.py" for name in ("grpo", "ppo", "remax", "dapo")]


def papers(files: list[Path]) -> set[str]:
    return {paper for file in files for paper in PAPER.findall(file.read_text())}


def test_the_paper_index_is_that_of_the_code_and_links_open_what_they_name():
    of_page = {*PAPER.findall(PAGE)}
    assert papers(CODE) - of_page == set(), "a paper that the code names has no row in docs/papers.md"
    others = papers([*ROOT.glob("papers/*.md"), ROOT / "docs/your_own.md", ROOT / "docs/multi_turn.md"])
    assert of_page - papers(CODE) - others == set(), "docs/papers.md has a paper that nothing else names"
    links = re.findall(r"\[([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", PAGE)
    assert links and all(text == target for text, target in links)


def test_every_estimator_loss_and_mask_has_a_row():
    flags = {" ".join(words) for words in re.findall(r"(--[\w.-]+)(?: (\w+))?", PAGE)}
    rest = PAGE.split("## Without a paper")[1]
    named = [f"--adv-estimator {name}" for name in ADV_ESTIMATORS] + [f"--loss {name}" for name in POLICY_LOSSES]
    assert [flag for flag in named if flag not in flags and f"`{flag.split()[1]}`" not in rest] == []
    masks = {f"--token-masks {name}" for name in TOKEN_MASKS.keys() - COLUMNS.keys()}
    assert masks - flags == set()
