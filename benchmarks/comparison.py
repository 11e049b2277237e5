"""Which estimators, losses and settings differ by more than seeds do, where right samples are rare (data/toy_rare.py).

    python -m benchmarks.comparison                      runs what benchmarks/results/comparison.json has not yet
    python -m benchmarks.comparison --names grpo rloo    runs these anew
    python -m benchmarks.comparison --rates              twelve of them at other learning rates; one run a line in
                                                         comparison_rates.jsonl, so that it goes on where it was stopped
    python -m benchmarks.comparison --long               those of LONG_SETTINGS on the long responses of
                                                         data/toy_long.py; likewise, in comparison_long.jsonl
    python -m benchmarks.comparison --draw               draws docs/comparison_curve.png, prints the tables

Each is a script with flags, run with five seeds, one thread a run (four and a half hours of a core for all). Of each
run counts the mean of its greedy accuracy on held-out sums over steps 0 to 100: who learns early has more. Verdicts are
those of tools/compare.py, with seeds as blocks and 99 % intervals.
"""

import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmarks.curves import ACCURACY, PANELS, ROOT, curve, plot, provenance, run_seed
from tools.compare import Difference, paired_difference

RECORD = ROOT / "benchmarks/results/comparison.json"
RATES_RECORD = ROOT / "benchmarks/results/comparison_rates.jsonl"
LONG_RECORD = ROOT / "benchmarks/results/comparison_long.jsonl"
SEEDS = (1, 2, 3, 4, 5)
CONFIDENCE = 0.99  # of 50 rows without a difference one in two tables has a verdict
TASK = "--config data/toy/preset.yaml --model data/toy_rare/model --total-steps 100 --val-every 5"
FOUR = "--num-mini-batches 4"
FEW = "--train-files data/toy_rare/few.jsonl"
LEFT = ("grpo", "ppo", "remax", "dapo", "maxrl", "4 updates: vanilla")
APART = "--rollout-gpus 1"
MEASURE = "--rollout-correction.level measure"
RATES = ("1e-4", "3e-4", "1e-3")  # RECORD has all settings at the first
AT_RATES = (
    "grpo",
    "4 updates: vanilla",
    "maxrl",
    "dapo",
    "grpo_passk",
    "rloo",
    "dr_grpo",
    "mean of each response",
    "--loss cispo",
    "--loss gspo",
    "remax",
    "ppo",
)
BASE = {  # of settings or their groups, where it is not grpo
    "ppo": "4 updates: vanilla",  # which are its default
    "dapo": "4 updates: vanilla",
    "four updates a step": "4 updates: vanilla",
    "256 prompts": "uniform",
    "asynchronous rollouts": "level 0",
}
LONG_TASK = (
    "--config data/toy/preset.yaml --model data/toy_long/model --train-files data/toy_long/train.jsonl "
    "--val-files data/toy_long/val.jsonl --max-prompt-length 40 --max-response-length 56 --total-steps 30 "
    "--val-every 5"
)
LONG_SOURCES = ("toy/add", "toy/subtract", "toy/double")
CLIPPED, KL = "actor/pg_clipfrac", "actor/ppo_kl"
LONG_KEYS = (ACCURACY, *(f"val/{source}/mean@1" for source in LONG_SOURCES), CLIPPED, KL)


class Setting(NamedTuple):
    group: str
    flags: str = ""
    script: str = "grpo"

    @property
    def ranks(self) -> int:
        return 2 if APART in self.flags else 1


SETTINGS = {
    "grpo": Setting("scripts"),
    "ppo": Setting("scripts", script="ppo"),
    "remax": Setting("scripts", script="remax"),
    "dapo": Setting("scripts", script="dapo"),
    **{
        name: Setting("estimators", f"--adv-estimator {name}")
        for name in (
            "maxrl",
            "rloo",
            "opo",
            "gpg",
            "grpo_passk",
            "grpo_leave_one_out",
            "grpo_batch_std",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "optimal_token_baseline",
        )
    },
    "dr_grpo": Setting("estimators", "--adv-estimator dr_grpo --loss-agg-mode seq-mean-token-sum-norm"),
    "4 updates: vanilla": Setting("four updates a step", FOUR),
    "clip higher": Setting("four updates a step", f"{FOUR} --clip-ratio-high 0.28"),
    **{
        f"--loss {loss}": Setting("four updates a step", f"{FOUR} --loss {loss}")
        for loss in ("cispo", "reinforce", "gpg", "dppo_tv", "dppo_kl", "two_sided", "clip_cov", "kl_cov")
    },
    **{
        f"--loss {loss}": Setting("four updates a step", f"{FOUR} --loss {loss} --loss-agg-mode seq-mean-token-mean")
        for loss in ("gspo", "sapo", "geo_mean")
    },
    "--loss dro": Setting("four updates a step", f"{FOUR} --loss dro --loss-kwargs dro_beta=0.1"),
    "--async-level 2": Setting("four updates a step", f"{APART} --async-level 2 {FOUR}"),
    "--async-level 2: measure": Setting("four updates a step", f"{APART} --async-level 2 {FOUR} {MEASURE}"),
    "KL 0.001": Setting("settings", "--kl-coef 0.001"),
    "KL 0.04": Setting("settings", "--kl-coef 0.04"),
    "entropy bonus 0.001": Setting("settings", "--entropy-coef 0.001"),
    "entropy bonus 0.01": Setting("settings", "--entropy-coef 0.01"),
    "zero variance: drop": Setting("settings", "--zero-variance drop_from_denominator"),
    "mean of each response": Setting("settings", "--loss-agg-mode seq-mean-token-mean"),
    "64 groups of 4": Setting("settings", "--prompts-per-step 64 --group-size 4"),
    "16 groups of 16": Setting("settings", "--prompts-per-step 16 --group-size 16"),
    "learning rate x 1/3": Setting("settings", "--lr 3.3e-5"),
    "learning rate x 3": Setting("settings", "--lr 3e-4"),
    "uniform": Setting("256 prompts", FEW),
    "skip": Setting("256 prompts", f"{FEW} --prompt-sampling skip"),
    "variance": Setting("256 prompts", f"{FEW} --prompt-sampling variance"),
    "level 0": Setting("asynchronous rollouts", APART),
    "level 1": Setting("asynchronous rollouts", f"{APART} --async-level 1"),
    "level 1: measure": Setting("asynchronous rollouts", f"{APART} --async-level 1 {MEASURE}"),
    "level 2": Setting("asynchronous rollouts", f"{APART} --async-level 2"),
    "level 2: measure": Setting("asynchronous rollouts", f"{APART} --async-level 2 {MEASURE}"),
    "level 2: sequence": Setting(
        "asynchronous rollouts", f"{APART} --async-level 2 --rollout-correction.level sequence"
    ),
}

ONE, FOUR_UPDATES, SIXTEEN = "one update a step, 3e-4", "4 updates a step, 1e-4", "16 updates a step, 1e-4"
GROUPS, ROWS = "--prompts-per-step 16", "--prompts-per-step 128"  # 128 responses a step
OFTEN = f"{GROUPS} --lr 1e-4 --num-mini-batches 4 --update-epochs 4"  # ratios leave 1
LONG_SETTINGS = {  # each is compared with the first of its group
    "grpo": Setting(ONE, f"{GROUPS} --lr 3e-4"),
    "maxrl": Setting(ONE, f"{GROUPS} --lr 3e-4 --adv-estimator maxrl"),
    "rloo": Setting(ONE, f"{GROUPS} --lr 3e-4 --adv-estimator rloo"),
    "remax": Setting(ONE, f"{ROWS} --lr 3e-4", "remax"),
    "4 updates: vanilla": Setting(FOUR_UPDATES, f"{GROUPS} --lr 1e-4 {FOUR}"),
    "dapo": Setting(FOUR_UPDATES, f"{GROUPS} --lr 1e-4", "dapo"),
    "ppo": Setting(FOUR_UPDATES, f"{ROWS} --lr 1e-4", "ppo"),
    "16 updates: vanilla": Setting(SIXTEEN, OFTEN),
    **{
        f"--loss {loss}": Setting(SIXTEEN, f"{OFTEN} --loss {loss}")
        for loss in ("reinforce", "cispo", "gspo", "sapo", "geo_mean", "dppo_tv", "two_sided")
    },
    "--loss gspo, bounds 0.01": Setting(
        SIXTEEN, f"{OFTEN} --loss gspo --loss-kwargs cliprange_low=0.01 cliprange_high=0.01"
    ),
}


def results() -> dict[str, dict]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(name: str, record: dict) -> None:
    RECORD.write_text(json.dumps(results() | {name: record}) + "\n")


def mean_accuracy(run: dict) -> float:
    return statistics.mean(value for _, value in run["curves"][ACCURACY])


def compared(records: dict[str, dict]) -> dict[str, tuple[list[float], list[float]]]:
    """For each setting that has run, in the order of SETTINGS: (its mean accuracies, those of its BASE). A BASE itself
    is compared with grpo."""
    scores = {name: [mean_accuracy(run) for run in records[name]["runs"]] for name in SETTINGS if name in records}
    return {name: (own, scores[base_of(name)]) for name, own in scores.items()}


def base_of(name: str) -> str:
    base = BASE.get(name, BASE.get(SETTINGS[name].group, "grpo"))
    return "grpo" if base == name else base


def difference(own: list[float], base: list[float]) -> Difference | None:
    """By seed; None for what is compared with itself."""
    return None if own is base else paired_difference(np.subtract(own, base)[:, None], CONFIDENCE)


def is_verdict(found: Difference | None) -> bool:
    return found is not None and found.verdict in ("more", "less")


def table(records: dict[str, dict]) -> str:
    """One line a setting, with its difference from what it is compared with."""
    lines = [
        "| | mean accuracy of steps 0 to 100 | difference, 99 % interval | verdict | 90 % at step | in the end |",
        "|---|---|---|---|---|---|",
    ]
    for group, settings in groupby(compared(records).items(), lambda item: SETTINGS[item[0]].group):
        lines.append(f"| **{group}** | | | | | |")
        for name, (own, base) in settings:
            runs = records[name]["runs"]
            at = [run["first_step_at_90_percent"] for run in runs]
            if None in at:
                reached = f"{len(at) - at.count(None)} of {len(at)} runs"
            else:
                reached = " to ".join(map(str, sorted({min(at), max(at)})))
            ends = statistics.mean(run["accuracy_after"] for run in runs)
            spread = f"{statistics.mean(own):.2f} ({min(own):.2f} to {max(own):.2f})"
            lines.append(f"| {name} | {spread} | {_said(difference(own, base))} | {reached} | {ends:.2f} |")
    return "\n".join(lines)


def _said(found: Difference | None) -> str:
    """Two cells."""
    if found is None:
        return "| "
    interval = "" if math.isnan(found.low) else f" ({found.low:+.3f} to {found.high:+.3f})"  # one seed has none
    return f"{found.mean:+.3f}{interval} | {found.verdict}"


def _said_by_seed(own: dict[int, float], base: dict[int, float]) -> str:
    """Of the seeds that both have."""
    seeds = sorted(own.keys() & base.keys())
    if not seeds:
        return "not run yet | "
    return _said(difference([own[seed] for seed in seeds], [base[seed] for seed in seeds]))


def draw_all(records: dict[str, dict]) -> None:
    """Left: the curves of LEFT. Right: a dot for each run of each setting, over what it is compared with."""
    settings = compared(records)
    figure = Figure(figsize=(12, 1.5 + 0.22 * len(settings)), dpi=120, layout="constrained")
    figure.suptitle(f"right samples are rare: {PANELS[ACCURACY]}, five seeds")
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(filter(records.__contains__, LEFT)):
        plot(left, *curve(records[name]["runs"], ACCURACY), f"C{number}", name)
    left.set(xlabel="step", ylabel=PANELS[ACCURACY])
    left.legend(frameon=False, loc="lower right")
    for y, (own, base) in enumerate(settings.values()):
        right.fill_betweenx([y - 0.5, y + 0.5], min(base), max(base), color="grey", alpha=0.15, linewidth=0)
        right.plot(
            own, [y] * len(own), "o", markersize=4, color="tab:red" if is_verdict(difference(own, base)) else "tab:blue"
        )
    right.set(xlabel="mean over steps 0 to 100 (grey: what it is compared with)")
    right.set_yticks(range(len(settings)), settings, fontsize=8)
    right.invert_yaxis()
    figure.savefig(ROOT / "docs/comparison_curve.png")


def recorded_runs(record: Path) -> list[dict]:
    """Of a record with one run a line."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def append_run(
    record: Path, script: str, flags: str, seed: int, keys: tuple[str, ...] = (ACCURACY,), **labels: str
) -> None:
    """Runs it and appends the curves of `keys`, after the labels."""
    run = run_seed(script, flags, seed, keys=keys)
    run["curves"] = {key: run["curves"][key] for key in keys}
    run = {**labels, "command": f"python {script}.py {flags}", **provenance(1), **run}
    with record.open("a") as file:
        file.write(json.dumps(run) + "\n")


def rate_runs() -> dict[tuple[str, str], dict[int, dict]]:
    """For each setting of AT_RATES and learning rate: its runs by seed, as far as they exist."""
    recorded = {(name, RATES[0]): name for name in AT_RATES} | {("grpo", "3e-4"): "learning rate x 3"}
    found = {key: {run["seed"]: run for run in results()[name]["runs"]} for key, name in recorded.items()}
    for run in recorded_runs(RATES_RECORD):
        found.setdefault((run["setting"], run["lr"]), {})[run["seed"]] = run
    return found


def run_rates() -> None:
    """All settings and rates with the first seed, then the other seeds rate by rate."""
    done = rate_runs()
    for lr, seed, name in sorted(product(RATES, SEEDS, AT_RATES), key=lambda run: run[1] > SEEDS[0]):
        if seed not in done.get((name, lr), {}):
            setting = SETTINGS[name]
            append_run(RATES_RECORD, setting.script, f"{TASK} {setting.flags} --lr {lr}", seed, setting=name, lr=lr)


def rate_table() -> str:
    """One line a setting: its mean accuracy at each learning rate, and its difference from its BASE, each at the rate
    at which it has the highest mean."""
    runs = {key: {seed: mean_accuracy(run) for seed, run in by.items()} for key, by in rate_runs().items()}
    best = {
        name: max(RATES, key=lambda lr: statistics.mean(runs[name, lr].values()))
        for name in AT_RATES
        if all((name, lr) in runs for lr in RATES)
    }
    lines = [f"| learning rate | {' | '.join(RATES)} | difference at the best rates, 99 % interval | verdict |"]
    lines.append("|---" * (len(RATES) + 3) + "|")
    for name in AT_RATES:
        cells = [_mean_of(runs.get((name, lr), {})) for lr in RATES]
        base = base_of(name)
        if name == base:
            said = "| "
        elif name not in best or base not in best:
            said = "not run yet | "
        else:
            said = _said_by_seed(runs[name, best[name]], runs[base, best[base]])
        lines.append(f"| {name} | {' | '.join(cells)} | {said} |")
    return "\n".join(lines)


def _mean_of(scores: dict[int, float]) -> str:
    """With the number of seeds, if it is not that of all."""
    if not scores:
        return "–"
    return f"{statistics.mean(scores.values()):.2f}" + f" ({len(scores)} of 5 seeds)" * (len(scores) < len(SEEDS))


def long_runs() -> dict[str, dict[int, dict]]:
    """For each of LONG_SETTINGS: its runs by seed, as far as they exist."""
    found: dict[str, dict[int, dict]] = {name: {} for name in LONG_SETTINGS}
    for run in recorded_runs(LONG_RECORD):
        found[run["setting"]][run["seed"]] = run
    return found


def run_long() -> None:
    """All settings with one seed, then all with the next."""
    done = long_runs()
    for seed, (name, setting) in product(SEEDS, LONG_SETTINGS.items()):
        if seed not in done[name]:
            append_run(LONG_RECORD, setting.script, f"{LONG_TASK} {setting.flags}", seed, LONG_KEYS, setting=name)


def long_table() -> str:
    """One line a setting, with its difference from the first of its group. Clipped tokens and KL are means of all
    steps."""
    lines = [
        "| | mean accuracy of steps 0 to 30 | difference, 99 % interval | verdict | add, subtract, double in the end "
        "| clipped tokens | KL to the policy that sampled |",
        "|---|---|---|---|---|---|---|",
    ]
    runs_of = long_runs()
    scores = {name: {seed: mean_accuracy(run) for seed, run in runs.items()} for name, runs in runs_of.items()}
    for group, names in groupby(LONG_SETTINGS, lambda name: LONG_SETTINGS[name].group):
        lines.append(f"| **{group}** | | | | | | |")
        base, *_ = names = [*names]
        for name in names:
            own, runs = scores[name], runs_of[name]
            said = "| " if name == base else _said_by_seed(own, scores[base])
            ends = [_over(runs, key, lambda values: values[-1], ".2f") for key in LONG_KEYS[1:4]]
            moved = [_over(runs, key, statistics.mean, ".4f") for key in (CLIPPED, KL)]
            lines.append(f"| {name} | {_mean_of(own)} | {said} | {', '.join(ends)} | {' | '.join(moved)} |")
    return "\n".join(lines)


def _over(runs: dict[int, dict], key: str, of_curve: Callable[[list[float]], float], form: str) -> str:
    """The mean over the runs of `of_curve`, a function of a metric's values; "–" if no run has the metric."""
    curves = [[value for _, value in run["curves"][key]] for run in runs.values()]
    return format(statistics.mean(map(of_curve, curves)), form) if any(curves) else "–"


def main(
    names: tuple[str, ...] = (), draw: bool = False, jobs: int = 1, rates: bool = False, long: bool = False
) -> None:
    """names: of SETTINGS, which are run although they are in the record. jobs: runs at a time."""
    if rates:
        return run_rates()
    if long:
        return run_long()
    todo = names or tuple(name for name in SETTINGS if name not in results())
    with ThreadPoolExecutor(jobs) as pool:
        for name in () if draw else todo:
            setting = SETTINGS[name]
            flags, how = f"{TASK} {setting.flags}".strip(), provenance(jobs)
            runs = list(pool.map(partial(run_seed, setting.script, flags, ranks=setting.ranks), SEEDS))
            for run in runs:
                run["curves"] = {ACCURACY: run["curves"][ACCURACY]}
            launcher = "python" if setting.ranks == 1 else f"GPUS={setting.ranks} tools/launch/one_node.sh"
            write(name, {"command": f"{launcher} {setting.script}.py {flags}", **how, "runs": runs})
    draw_all(results())
    print(table(results()), rate_table(), long_table(), sep="\n\n")


if __name__ == "__main__":
    tyro.cli(main)
