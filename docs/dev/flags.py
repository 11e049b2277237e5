"""`python -m docs.dev.flags` writes the end of docs/defaults.md: which flags and columns a run reads, from the code."""

from pathlib import Path

from lib.args.reads import DECLARED, FACTS, TABLE, Row
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES, TOKEN_MASKS, Setting, settings_of_loss

FILE = Path(__file__).parents[2] / "docs/defaults.md"
TITLE = "## Which flags a run reads\n"
HEAD = """
A choice is a flag's value (`loss vanilla`) or a flag that is on (`lora_rank`); "no" negates it. A flag in several rows
is read under any of them. Names are as in `config.json`: `multi_turn.tools` is `--multi-turn.tools`.

A flag on the command line that nothing reads is an error if it would change the loss or the samples. Other such flags
are named in a line at the start, "no effect here", and in `config.json` under `no_effect`.

The table is [`TABLE: tuple`](../lib/args/reads.py); `python -m docs.dev.flags` writes this section. Your own script's
flags need no row.

| choice | flags that it reads | [columns](columns.md) that it reads |
|---|---|---|
"""

OF_DECLARED = """
### Losses, estimators and token masks

Hyper-parameters are given as NAME=VALUE in `--loss-kwargs` and `--adv-kwargs`, here with defaults; a token mask takes
its only one as `--token-masks m2po=0.04`. Those with a star have no effect while the ratio is 1, as with one update per
step. Formulas: [algorithms.md](algorithms.md).

| choice | hyper-parameters | columns that it reads |
|---|---|---|
"""


def page() -> str:
    """The text from TITLE on."""
    rows: dict[str, tuple[dict, dict]] = {}
    for row in TABLE[: -len(DECLARED)]:
        choice = FACTS.get(row.when) or row.when.replace("|", ", ") or "always"
        for names, more in zip(rows.setdefault(choice, ({}, {})), (row.flags, f"{row.columns} {row.update}")):
            names |= dict.fromkeys(f"`{name}`" for name in more.split())
    table = "".join(
        f"| {when} | {' '.join(flags)} | {' '.join(columns)} |\n" for when, (flags, columns) in rows.items()
    )
    return TITLE + HEAD + table + OF_DECLARED + "".join(map(_declared_row, DECLARED))


def _declared_row(row: Row) -> str:
    kind, name = row.when.split()
    declared = {"loss": POLICY_LOSSES, "adv_estimator": ADV_ESTIMATORS, "token_masks": TOKEN_MASKS}[kind][name]
    settings = settings_of_loss(name) if kind == "loss" else declared.settings
    words = [_word(parameter, setting) for parameter, setting in settings.items()]
    columns = [f"`{column}`" for column in dict.fromkeys(f"{row.columns} {row.update}".split())]
    return f"| {row.when} | {', '.join(words)} | {' '.join(columns)} |\n" if words or columns else ""


def _word(name: str, setting: Setting) -> str:
    value = setting.default
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"`{name}={default}`" + (" \\*" if setting.of_ratio else "")


if __name__ == "__main__":
    FILE.write_text(FILE.read_text().partition(TITLE)[0] + page())
