"""Writes the places of a new loss or scorer, with tests that fail until its formula is in them.

    python -m tools.scaffold loss NAME      make new-loss NAME=x
    python -m tools.scaffold scorer NAME    make new-scorer NAME=x

`git diff` shows what it wrote.
"""

from keyword import iskeyword
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from lib import InputError
from lib.cli.process import command_line

ROOT = Path(__file__).parents[1]
TEMPLATES = {  # lines that go before the line of a file that begins so, or to its end
    "loss": '''
=== lib/core_algos/papers/losses.py


def NAME(old_log_prob, log_prob, advantages, response_mask) -> Loss:
    """NAME, arXiv 2601.00000: L = −A·ρ."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    return -advantages * _exp(log_ratio), _metrics(log_ratio)
=== tests/core_algos/test_policy_losses.py before     "kl_cov": {
    "NAME": {},
=== tests/reference_formulas.py before         losses[at], metrics["ppo_kl"][at] = loss,
            case "NAME":
                raise NotImplementedError("the loss of a token")
=== tests/scripts/test_flag_pairs.py before --loss-kwargs:cliprange_low: -
    NAME
=== docs/algorithms.md before | `dro` |
| `NAME` | -A rho | | [2601.00000](https://arxiv.org/abs/2601.00000) |
=== docs/papers.md before | DRO, [
| NAME, [2601.00000](https://arxiv.org/abs/2601.00000) | `--loss NAME` | none known |
''',
    "scorer": '''
=== rewards/NAME.py
"""Scorer for NAME: what it reads in the response, which truths it takes."""

from rewards.answers import answer_text, one_truth


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the answer or None}. Raises InputError for an empty truth."""
    truth, text = one_truth("NAME", data_source, ground_truth), answer_text(solution_str)
    pred = text[:0]  # the answer in the text, not yet read
    return {"score": float(pred == truth), "pred": pred or None}
=== rewards/__init__.py before     "code": "code",
    "NAME": "NAME",
=== tests/rewards/test_scorers.py before     "code": (["assert
    "NAME": ("7", "=7", "=8"),
=== tests/rewards/test_answer_forms.py before     "arithmetic": ("={}"
    "NAME": ("={}", "6", "6", "5"),
=== docs/rewards.md before | [format](
| [NAME](../rewards/NAME.py) | 1, 0 | `=7` | | |
''',
}


def main(kind: Positional[Literal["loss", "scorer"]], name: Positional[str]) -> None:
    """Writes a new part's places."""
    if not name.isidentifier() or iskeyword(name):
        raise InputError(f"{name}: not a name of a function: use letters, digits and _")
    texts: dict[Path, str] = {}
    for place in TEMPLATES[kind].rstrip().replace("NAME", name).split("\n=== ")[1:]:
        head, _, lines = place.partition("\n")
        file, _, anchor = head.partition(" before ")
        path = ROOT / file
        present = path.read_text() if path.exists() else ""
        words = f"def {name}(", f'"{name}"', f"`{name}`"
        if (path.stem == name and present) or any(w in present for w in words if not file.startswith("tests/")):
            raise InputError(f"{file} has {name} already: choose another name")
        text = texts.get(path, present)
        start = f"\n{text}".find(f"\n{anchor}") if anchor else len(text)
        if start < 0:
            raise InputError(f"{file}: no line begins with {anchor!r}, which tools/scaffold.py looks for")
        texts[path] = f"{text[:start]}{lines}\n{text[start:]}"
    for path, text in texts.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    with command_line():
        tyro.cli(main, prog="python -m tools.scaffold", description=__doc__)
