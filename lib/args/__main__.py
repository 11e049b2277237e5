"""`python -m lib.args > docs/flags_read.md` writes the table of what a run reads."""

from lib.args.reads import DECLARED, FACTS, TABLE, Row
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES, TOKEN_MASKS, Setting, settings_of_loss

HEAD = """\
# Flags and what reads them

What a run reads, by choice: the flags that act where the choice is made, and the columns of the batch that it reads
([columns.md](columns.md)). A choice is the value of a flag (`loss vanilla`), or a flag that is on (`lora_rank`); with
"no" it is not made. A flag under several choices is read under any of them. A choice counts only if its own flag is
read. Names are those of `config.json`: `multi_turn.tools` is `--multi-turn.tools`.

A flag is given if it is on the command line, or if `--config` changes its default (data/toy/preset.yaml gives none).
If nothing reads a given flag that would change the loss or the samples, the start ends with an error. Other flags are
named in a line at the start, "no effect here", and in `config.json` under `no_effect`. So are those that have no
effect because `--val-only`, `--replay` or one update a step leaves out a part of the run.

The table is [`TABLE: tuple`](../lib/args/reads.py). A new flag is a name in one of its rows; a flag of a script of your
own need not be there. The rows of losses, estimators and token masks, and the second table, come from their signatures
([lib/declared.py](../lib/declared.py)). Regenerate this page: `python -m lib.args > docs/flags_read.md`.

| choice | flags that act on it | columns that it reads |
|---|---|---|
"""

OF_DECLARED = """
## Losses, estimators and token masks

What `lib/core_algos` declares. Hyper-parameters are words NAME=VALUE of `--loss-kwargs` and `--adv-kwargs`, here with
their defaults; a token mask is chosen by `--token-masks NAME=VALUE`, where the value is its only one. Those with a star
have no effect while the ratio pi / pi_old is 1, as with one update a step. Formulas: [algorithms.md](algorithms.md).

| choice | hyper-parameters | columns that it reads | what it is |
|---|---|---|---|
"""


def page() -> str:
    """The text of docs/flags_read.md."""
    rows: dict[str, tuple[dict, dict]] = {}
    for row in TABLE[: -len(DECLARED)]:
        choice = FACTS.get(row.when) or row.when.replace("|", ", ") or "always"
        for names, more in zip(rows.setdefault(choice, ({}, {})), (row.flags, f"{row.columns} {row.update}")):
            names |= dict.fromkeys(f"`{name}`" for name in more.split())
    table = "".join(
        f"| {when} | {' '.join(flags)} | {' '.join(columns)} |\n" for when, (flags, columns) in rows.items()
    )
    return HEAD + table + OF_DECLARED + "".join(map(_declared_row, DECLARED))


def _declared_row(row: Row) -> str:
    kind, name = row.when.split()
    declared = {"loss": POLICY_LOSSES, "adv_estimator": ADV_ESTIMATORS, "token_masks": TOKEN_MASKS}[kind][name]
    settings = settings_of_loss(name) if kind == "loss" else declared.settings
    words = [_word(parameter, setting) for parameter, setting in settings.items()]
    columns = [f"`{column}`" for column in dict.fromkeys(f"{row.columns} {row.update}".split())]
    summary = declared.summary.replace("|", "\\|").replace("*", "\\*")
    return f"| `{declared.choice}` | {', '.join(words)} | {' '.join(columns)} | {summary} |\n"


def _word(name: str, setting: Setting) -> str:
    value = setting.default
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"`{name}={default}`" + (" \\*" if setting.of_ratio else "")


if __name__ == "__main__":
    print(page(), end="")
