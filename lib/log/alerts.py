"""Alerts on a step and on a whole run, from its metrics. Without torch, for the run page."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Alert(NamedTuple):
    """A condition on a metric of one step that a user should know about."""

    text: str
    metric: str
    is_bad: Callable[[float], bool]
    section: str  # the anchor of a heading of docs/troubleshooting.md
    on_line: bool = True  # whether the console line of a step shows it
    of_run: bool = True  # whether the summary of a run counts it


class RunAlert(NamedTuple):
    """An alert over the steps of a run."""

    text: str
    section: str  # as in Alert
    steps: list[int]


OFTEN = 0.1  # share of steps above which the summary has an alert that is not printed per step
MISMATCH = 0.1
"""Nats of rollout/logp_diff_mean. Healthy engines differ by 2e-6 in fp32 and by 0.01 to 0.04 in bf16; with older
weights it was 0.2 (TRL's issue 5312)."""
NO_GRADIENT, EQUAL = "the-gradient-is-0", "groups-have-equal-scores"
IDLE = "a-stage-is-slow-or-ranks-are-idle"
CUT_OFF, DIFFERENT = "responses-are-cut-off", "engine-and-trainer-disagree"
APART = f"engine and trainer more than {MISMATCH} nats apart"
ALERTS = (
    Alert("gradient 0", "actor/grad_norm", lambda x: x == 0, NO_GRADIENT),
    Alert("the critic's gradient 0", "critic/grad_norm", lambda x: x == 0, NO_GRADIENT),
    Alert("equal scores in every group", "reward/zero_variance", lambda x: x == 1, EQUAL, of_run=False),
    Alert(
        "equal scores in more than 90 % of the groups", "reward/zero_variance", lambda x: x > 0.9, EQUAL, on_line=False
    ),
    Alert("more than half of the responses cut off", "response_length/clip_ratio", lambda x: x > 0.5, CUT_OFF),
    Alert("no row trained", "training/rows_trained", lambda x: x == 0, "rows-are-dropped"),
    Alert(APART, "rollout/logp_diff_mean", lambda x: x > MISMATCH, DIFFERENT),
    Alert("idle for more than 20 % of the step", "perf/idle", lambda x: x > 0.2, IDLE, on_line=False),
)
COUNTS = {  # the message, with the number, if a metric is above 0, and its section
    "skipped updates (gradient not finite)": ("training/skipped_updates", "a-number-is-not-finite"),
    "scorer errors": ("reward/error_count", "scorers-fail"),
    "scorer timeouts": ("reward/timeout_count", "scorers-fail"),
    "scorer crashes": ("reward/crash_count", "scorers-fail"),
    "keys of scorers left out": ("reward/dropped_key_count", "scorers-fail"),
    "tool exceptions": ("agent/tool_errors/exception", "tools-fail"),
    "tool timeouts": ("agent/tool_errors/timeout", "tools-fail"),
    "rows without a score or a token": ("training/rows_dropped/dead", "rows-are-dropped"),
    "unscored in validation": ("val/unscored", "scorers-fail"),
}
CHECKS = "a-check-of-a-step-failed"
FAULTS = {  # of faults/<name>: lib/model/update_checks.py, lib/log/metrics.py
    "gradients_left": "gradients of the update before were not zeroed",
    "updates_ahead": "the learning rate's schedule stands still ({:.0f} updates behind)",
    "gradient_outside_mask": "{:.0f} tokens outside the loss mask have a gradient",
    "tokens_not_trained": "{:.0f} tokens within the clip range have no gradient",
    "tokens_not_clipped": "{:.0f} tokens beyond the clip range have a gradient",
    "rows_not_seen": "{:.0f} rows are missing in an update, or are in it twice",
    "loss_share": "the weights of the tokens in the loss add up to {:.2f}, not 1",
    "value_push": "the critic's loss drives values away from returns",
    "kl_push": "the KL term drives the policy away from the reference",
    "engine_apart": "engine and trainer are {:.2g} nats apart, more than rounding",
    "sampled_otherwise": "sampled from a sharper distribution than the log-probs' (log p + entropy: {:.2g}, not 0)",
    "mask_outside_response": "{:.0f} tokens in a mask that nobody sampled",
    "end_not_trained": "{:.0f} responses end with a token that is not trained",
    "positions": "{:.0f} position ids do not count on",
    "group_of_two_prompts": "{:.0f} rows have another prompt than their group",
    "group_ids": "{:.0f} group ids differ from uids",
    "dead_rows_count": "{:.0f} groups or rows have advantages of rows that are not trained",
    "returns_without_reward": "{:.0f} returns of a last token are not its reward",
    "kl_is_paid": "the KL is added to the reward, not subtracted",
    "scores_of_other_rows": "{:.0f} scores belong to other responses",
}
DROPPED = "training/rows_dropped/"


def alerts_of_step(metrics: Mapping[str, float]) -> list[str]:
    shown = [alert for alert in ALERTS if alert.on_line]
    bad = [alert.text for alert in shown if alert.is_bad(metrics.get(alert.metric, math.nan))]
    for name, text in FAULTS.items():
        if found := metrics.get(f"faults/{name}"):
            bad.append(text.format(found))
    return bad + [f"{text}: {metrics[key]:,.0f}" for text, (key, _) in COUNTS.items() if metrics.get(key)]


def alerts_of_run(rows: Sequence[Mapping]) -> list[RunAlert]:
    """The same for all rows of metrics.jsonl; also rows dropped by each filter, and metrics that were not finite."""

    def column(key: str) -> dict[int, float]:
        return {row["step"]: row[key] for row in rows if row.get(key) is not None}

    found = []
    for alert in ALERTS:
        values = column(alert.metric)
        steps = [step for step, value in values.items() if alert.is_bad(value)]
        if alert.of_run and len(steps) > (0 if alert.on_line else OFTEN * len(values)):
            text = f"{alert.text} in {len(steps)} of {len(values)} steps"
            found.append(RunAlert(text, alert.section, steps))
    for name, text in FAULTS.items():
        if values := column(f"faults/{name}"):
            worst = text.format(max(values.values(), key=abs))
            found.append(RunAlert(f"{worst}, in {len(values)} steps", CHECKS, [*values]))
    for text, (key, section) in COUNTS.items():
        values = column(key)
        if steps := [step for step, number in values.items() if number]:
            text = f"{text}: {sum(values.values()):,.0f}, in {len(steps)} of {len(values)} steps"
            found.append(RunAlert(text, section, steps))
    counted = {key for key, _ in COUNTS.values()}
    for key in dict.fromkeys(key for row in rows for key in row if key.startswith(DROPPED)):
        values = {} if key in counted else column(key)
        if steps := [step for step, number in values.items() if number]:
            lost, rows_in = sum(values.values()), sum(column("training/rows_in").values())
            text = f"rows dropped by {key.removeprefix(DROPPED)}: {lost:,.0f} of {rows_in:,.0f}"
            found.append(RunAlert(text, "rows-are-dropped", steps))
    for key in dict.fromkeys(key for row in rows for key in row.get("nonfinite") or ()):
        steps = [row["step"] for row in rows if key in (row.get("nonfinite") or ())]
        text = f"{key} not finite in {len(steps)} of {len(rows)} rows of metrics.jsonl"
        found.append(RunAlert(text, "a-number-is-not-finite", steps))
    return found
