"""python -m tests.mutants.page > docs/silent_bugs.md: the page of the planted bugs, from their record."""

import json
from textwrap import shorten

from lib.log.alerts import CHECKS, FAULTS
from tests.mutants.mutants import MUTANTS
from tests.mutants.record import FILE

HEAD = """\
# Silent bugs, and the checks that find them

A bug of an RL trainer seldom raises an exception: the reward still rises, only less. So each step checks
itself, in every run, with no flag.
What a check finds ends the console's line of the step, is counted at the end of the run and on its page, and is
in `metrics.jsonl` as
`faults/<name>`. [troubleshooting.md](troubleshooting.md#{section}) says what to look at.

To know what the checks are worth, we planted {bugs} bugs, {variants} of them in a second form, one at a time,
by a change of one function
([`MUTANTS = {{`](../tests/mutants/mutants.py)), and ran the script on the embedded task. **{found} of {bugs}
are found within {last} steps; before
these checks, {before} were.** {healthy} healthy runs, {steps} steps in all, have no alert.
[test_mutants.py](../tests/mutants/test_mutants.py) repeats
it: each bug is found by the check of the table, at its step, and the same runs without the bugs are silent.

| bug | how it comes about | first message | step | before |
|---|---|---|---|---|
"""

TAIL = """
"before": the step of the first alert that was about the bug, without these checks (commit {before_commit}); "-": none
within five steps. Alerts
that follow from the damage (equal scores in every group, a gradient of 0) do not count. Step 0 is before the
first step.

Found elsewhere: transformers divided each micro-batch by its own number of tokens until 2024
([gradient accumulation](https://huggingface.co/blog/gradient_accumulation)); vLLM returns log-probs before
temperature and top-p unless
`--logprobs-mode processed_logprobs` is given; TRL's issue 5312 shows stale weights; verl's pull requests 6362
and 6452 are about the scores of
rejected rows in a group's mean.

## How the checks work

Few of them know a bug. They are what holds for every loss:

- **The gradient of the loss with respect to each log-prob**
  ([update_checks.py](../lib/model/update_checks.py)). Where the ratio is 1, it is
  -advantage x weight, and the weights add up as `--loss-agg-mode` says: on a healthy run to 1.000. A sign, a
  ratio upside down, a
  denominator of one rank or of one micro-batch, and a missing mask change this number. Off policy, tokens have
  a gradient exactly where the
  clip range of the flags says so. The gradient of the reference's log-probs shows the sign of the KL alone.
- **Log-probs of engine and trainer** agree to rounding. This is the check for stale or unmerged weights,
  caches, positions, temperature.
- **log p + entropy** is 0 on average over tokens that were sampled from p, whatever p is. It is the check that
  needs no log-prob of the engine.
- **The batch after the update** ([batch_checks.py](../lib/log/batch_checks.py)): masks lie within each other,
  responses end with a trained token,
  a group has one prompt and one number, and the return of a last token is its reward.
- **Scores** come back with a hash of their response; a prompt's tokens are compared with its chat template
  before the model loads.

They cost {cost}.

## What is not found

- **In bfloat16**, engine and trainer differ by 0.03 nats anyway. Only differences above 0.1 are found, and
  sampling that makes log p + entropy
  larger than three times the rounding. To look for a bug of an engine, run ten steps with `--compute-dtype float32`.
- **Asynchronous rollouts, and what dapo.py keeps from earlier steps**: tokens of older weights are left out of
  these two checks.
- A denominator, or weights in the loss, that are wrong by less than a factor of 1.5. A loss of your own may
  weigh its tokens.
- The clip range of other losses than `--loss vanilla`, and with an unbiased KL in the loss.
- Sampling from a flatter distribution than the trainer's, if the engine's log-probs do not show it.
- Numbers that are only too large or too small: the epsilon of a standard deviation or of Adam, a learning rate,
  a coefficient.
- A chat template of another model whose tokens this tokenizer has too; an end token that the engine removes
  from its responses.
- A scorer that is wrong, a batched scorer that returns its scores in another order, and data that is wrong.
- Positions of models with mrope.

## The healthy runs

{runs}

Record: [silent_bugs.json](../benchmarks/results/silent_bugs.json), made at commit {commit} by
`tests/mutants/record.py` on 2 CPU cores in float32 unless the
run says otherwise. Runs have 8 prompts of 4 responses a step unless they say otherwise.
"""

COST = "4 ms of a step of the embedded task on a CPU, less than 1 % of it, and one small all-reduce an update"


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
        "section": CHECKS,
        "bugs": len(first),
        "variants": len(MUTANTS) - len(first),
        "found": sum(found[name]["step"] is not None for name in first),
        "last": max(found[name]["step"] for name in MUTANTS),
        "before": sum(name in record["before"] for name in first),
        "healthy": sum(not run["alerts"] for run in runs),
        "steps": sum(run["steps"] for run in runs),
    }
    names = "; ".join(f"{run['run']} ({run['steps']} steps)" for run in runs)
    tail = TAIL.format(
        runs=names.replace("|", "/"), commit=record["commit"], before_commit=record["before_commit"], cost=COST
    )
    return HEAD.format(**numbers) + "".join(lines) + tail


if __name__ == "__main__":
    print(page(json.loads(FILE.read_text())), end="")
