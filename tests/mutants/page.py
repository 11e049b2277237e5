"""python -m tests.mutants.page > benchmarks/results/silent_bugs.md: the planted bugs, from their record."""

import json
from textwrap import shorten

from lib.log.alerts import FAULTS
from tests.mutants.mutants import MUTANTS
from tests.mutants.record import FILE

HEAD = """\
# Planted bugs, and the checks that find them

Bugs planted one at a time, by a change of one function ([mutants.py](../../tests/mutants/mutants.py)), in a run on the
embedded task. {found} of {bugs} are found within {last} steps, {variants} of them in a second form; before the
checks, {before} were. {healthy} healthy runs, {steps} steps in all, have no alert.
[troubleshooting.md](../../docs/troubleshooting.md#silent-bugs) explains the checks.

| bug | how it comes about | first message | step | before |
|---|---|---|---|---|
"""

TAIL = """
"before": the step of the first alert about the bug without these checks (commit {before_commit}); "-": none within
five steps. Alerts that follow from the damage do not count. Step 0 is before the first step.

Healthy runs: {runs}.

Record: [silent_bugs.json](silent_bugs.json), made at commit {commit} by `tests/mutants/record.py` on 2 CPU cores, in
float32 unless the run says otherwise. Runs have 8 prompts of 4 responses a step unless they say otherwise.
"""


def shown(mutant: str, row: dict) -> str:
    """The message that the mutant's check gave."""
    check = MUTANTS[mutant].check
    text = FAULTS.get(check, check).partition("{")[0] or FAULTS[check].partition("}")[2]
    message = next(alert for alert in row["alerts"] if text.strip() in alert)
    return f"`{shorten(message, 120, placeholder=' ...')}`".replace("|", "/")


def page(record: dict) -> str:
    found = {row["mutant"]: row for row in record["mutants"]}
    lines = []
    for name, mutant in MUTANTS.items():
        before = record["before"].get(name)
        message = shown(name, found[name])
        lines.append(f"| {mutant.bug} | {mutant.arises} | {message} | {found[name]['step']} | {before or '-'} |\n")
    first = {name: mutant for name, mutant in MUTANTS.items() if not mutant.variant}
    runs = record["healthy"]
    numbers = {
        "bugs": len(first),
        "variants": len(MUTANTS) - len(first),
        "found": sum(found[name]["step"] is not None for name in first),
        "last": max(found[name]["step"] for name in MUTANTS),
        "before": sum(name in record["before"] for name in first),
        "healthy": sum(not run["alerts"] for run in runs),
        "steps": sum(run["steps"] for run in runs),
    }
    names = "; ".join(f"{run['run']} ({run['steps']} steps)" for run in runs)
    tail = TAIL.format(runs=names.replace("|", "/"), commit=record["commit"], before_commit=record["before_commit"])
    return HEAD.format(**numbers) + "".join(lines) + tail


if __name__ == "__main__":
    print(page(json.loads(FILE.read_text())), end="")
