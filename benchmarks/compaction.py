"""Context compaction on lists that are longer than the context window: with and without, five seeds.

    python -m benchmarks.compaction             ten runs, one at a time (five minutes of one core), then draws; what
                                                benchmarks/results/compaction_curve.json has is not run again
    python -m benchmarks.compaction --table     prints the table of the record

Accuracy is that of one sample of each held-out list at temperature 1: the answer to the question at its end.
"""

import json
import sys
from statistics import mean

from matplotlib.figure import Figure

from benchmarks.curves import ACCURACY, RESULTS, ROOT, curve, load_records, plot, provenance, run_seed

FLAGS = (
    "--config data/toy/preset.yaml --model data/toy_list/model "
    "--train-files data/toy_list/train.jsonl --val-files data/toy_list/val.jsonl "
    "--max-prompt-length 16 --max-response-length 256 --prompts-per-step 8 --lr 5e-4 --lr-schedule linear "
    "--total-steps 16 --val-temperature 1 --reward --multi-turn.interaction data/toy_list.py:List "
    "--multi-turn.max-turns 12 --multi-turn.max-turn-tokens 4 --multi-turn.context-window 96"
)
ARMS = {
    "with summaries": "--multi-turn.compact-at 72 --multi-turn.compact-prompt summary",
    "without": "",
}
SEEDS = (1, 2, 3, 4, 5)
SHOWN = (0, 4, 8, 12, 16)  # steps of the table


def draw(records: dict[str, dict]) -> None:
    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    figure.suptitle("lists of 176 tokens, a window of 96, grpo.py: mean and range of the seeds")
    panels = {ACCURACY: "accuracy on held-out lists", "reward/mean": "reward of the samples"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items()):
        for (name, record), color in zip(records.items(), ("tab:blue", "grey")):
            plot(axes, *curve(record["runs"], key), color, f"{name}, {len(record['runs'])} seeds")
        axes.set(xlabel="step", ylabel=label, ylim=(-0.03, 1.03))
        axes.legend(frameon=False, loc="center right")
    figure.savefig(ROOT / "docs/compaction_curve.png")


def table(records: dict[str, dict]) -> str:
    """Mean and range of the seeds."""
    head = ["", *(f"step {step}" for step in SHOWN), "CPU of a run, s", "seeds"]
    lines = [head, ["---"] * len(head)]
    for arm, record in records.items():
        runs = record["runs"]
        cells = [[dict(run["curves"][ACCURACY])[step] for run in runs] for step in SHOWN]
        shown = [f"{mean(x):.3f} ({min(x):.3f}-{max(x):.3f})" for x in cells]
        lines.append([arm, *shown, f"{mean([run['cpu_seconds'] for run in runs]):.0f}", str(len(runs))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    records = load_records("compaction")
    for seed, arm in ((seed, arm) for seed in SEEDS for arm in ARMS):
        flags = f"{FLAGS} {ARMS[arm]}".strip()
        record = records.setdefault(arm, {"command": f"python grpo.py {flags}", **provenance(jobs=1), "runs": []})
        if seed not in [run["seed"] for run in record["runs"]]:
            record["runs"].append(run_seed("grpo", flags, seed))
            (RESULTS / "compaction_curve.json").write_text(json.dumps(records) + "\n")
    draw(records)


if __name__ == "__main__":
    print(table(load_records("compaction"))) if "--table" in sys.argv else main()
