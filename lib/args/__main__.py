"""`python -m lib.args > docs/flags_read.md` writes the table of what a run reads."""

from lib.args.reads import FACTS, TABLE

HEAD = """\
# Flags and what reads them

What a run reads, by choice: the flags that act where the choice is made, and the columns of the batch that it reads
([columns.md](columns.md)). A choice is the value of a flag (`loss vanilla`), or a flag that is on (`lora_rank`); with
"no" it is not made. A flag under several choices is read under any of them. A choice counts only if its own flag is
read. Names are those of `config.json`: `loss_kwargs.cap` is `--loss-kwargs.cap`.

A flag is given if it is on the command line, or if `--config` changes its default (data/toy/preset.yaml gives none).
If nothing reads a given flag that would change the loss or the samples, the start ends with an error. Other flags are
named in a line at the start, "no effect here", and in `config.json` under `no_effect`. So are those that have no
effect because `--val-only`, `--replay` or one update a step leaves out a part of the run.

The table is [`TABLE = (`](../lib/args/reads.py). A new flag is a name in one of its rows; a flag of a script of your
own need not be there. Then regenerate this page: `python -m lib.args > docs/flags_read.md`.

| choice | flags that act on it | columns that it reads |
|---|---|---|
"""


def page() -> str:
    """The text of docs/flags_read.md."""
    rows: dict[str, tuple[dict, dict]] = {}
    for row in TABLE:
        choice = FACTS.get(row.when) or row.when.replace("|", ", ") or "always"
        for names, more in zip(rows.setdefault(choice, ({}, {})), (row.flags, f"{row.columns} {row.update}")):
            names |= dict.fromkeys(f"`{name}`" for name in more.split())
    return HEAD + "".join(
        f"| {when} | {' '.join(flags)} | {' '.join(columns)} |\n" for when, (flags, columns) in rows.items()
    )


if __name__ == "__main__":
    print(page(), end="")
