"""What went wrong in a step and in a run, by its metrics. No torch: the run page needs it at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Alarm(NamedTuple):
    """What is wrong with a step where a metric `is_bad`."""

    text: str
    metric: str
    is_bad: Callable[[float], bool]
    section: str
    """the anchor of a heading of docs/troubleshooting.md"""
    on_line: bool = True
    """whether the console line of a step shows it"""
    of_run: bool = True
    """whether the notes of a run count it"""


class Trouble(NamedTuple):
    """What went wrong in some steps of a run."""

    text: str
    section: str
    """the anchor of a heading of docs/troubleshooting.md"""
    steps: list[int]


OFTEN = 0.1  # the share of a run's steps that makes a note of what no line of a step shows
MISMATCH = 0.1
"""Nats of rollout/logp_diff_mean. Healthy engines differ by 2e-6 in fp32 and by 0.01 to 0.04 in bf16; with the weights
of an older step it was 0.2 (docs/troubleshooting.md has the sources). Ten times the one, half of the other."""
ALARMS = (
    Alarm("gradient 0", "actor/grad_norm", lambda norm: norm == 0, "the-gradient-is-0"),
    Alarm("the critic's gradient 0", "critic/grad_norm", lambda norm: norm == 0, "the-gradient-is-0"),
    Alarm(
        "equal scores in every group",
        "reward/zero_variance",
        lambda share: share == 1,
        "groups-have-equal-scores",
        of_run=False,
    ),
    Alarm(
        "equal scores in more than 90 % of the groups",
        "reward/zero_variance",
        lambda share: share > 0.9,
        "groups-have-equal-scores",
        on_line=False,
    ),
    Alarm(
        "more than half of the responses cut off",
        "response_length/clip_ratio",
        lambda share: share > 0.5,
        "responses-are-cut-off",
    ),
    Alarm("no row trained", "training/rows_trained", lambda rows: rows == 0, "rows-are-dropped"),
    Alarm(
        f"engine and trainer more than {MISMATCH} nats apart",
        "rollout/logp_diff_mean",
        lambda nats: nats > MISMATCH,
        "engine-and-trainer-disagree",
    ),
    Alarm(
        "idle for more than 20 % of the step",
        "perf/idle",
        lambda share: share > 0.2,
        "a-stage-is-slow-or-ranks-are-idle",
        on_line=False,
    ),
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
DROPPED = "training/rows_dropped/"


def troubles(metrics: Mapping[str, float]) -> list[str]:
    """Short warnings about a step for the console; mostly none."""
    bad = [alarm.text for alarm in ALARMS if alarm.on_line and alarm.is_bad(metrics.get(alarm.metric, math.nan))]
    return bad + [f"{text}: {metrics[key]:,.0f}" for text, (key, _) in COUNTS.items() if metrics.get(key)]


def trouble_of_run(rows: Sequence[Mapping]) -> list[Trouble]:
    """The same for all rows of metrics.jsonl; also the stages that dropped rows, and metrics that were not finite."""

    def column(key: str) -> dict[int, float]:
        return {row["step"]: row[key] for row in rows if row.get(key) is not None}

    found = []
    for alarm in ALARMS:
        values = column(alarm.metric)
        steps = [step for step, value in values.items() if alarm.is_bad(value)]
        if alarm.of_run and len(steps) > (0 if alarm.on_line else OFTEN * len(values)):
            found.append(Trouble(f"{alarm.text} in {len(steps)} of {len(values)} steps", alarm.section, steps))
    for text, (key, section) in COUNTS.items():
        values = column(key)
        if steps := [step for step, number in values.items() if number]:
            total = sum(values.values())
            found.append(Trouble(f"{text}: {total:,.0f}, in {len(steps)} of {len(values)} steps", section, steps))
    counted = {key for key, _ in COUNTS.values()}
    for key in dict.fromkeys(key for row in rows for key in row if key.startswith(DROPPED) and key not in counted):
        values = column(key)
        if steps := [step for step, number in values.items() if number]:
            lost, rows_in = sum(values.values()), sum(column("training/rows_in").values())
            text = f"rows dropped by {key.removeprefix(DROPPED)}: {lost:,.0f} of {rows_in:,.0f}"
            found.append(Trouble(text, "rows-are-dropped", steps))
    for key in dict.fromkeys(key for row in rows for key in row.get("nonfinite") or ()):
        steps = [row["step"] for row in rows if key in (row.get("nonfinite") or ())]
        text = f"{key} not finite in {len(steps)} of {len(rows)} rows of metrics.jsonl"
        found.append(Trouble(text, "a-number-is-not-finite", steps))
    return found
