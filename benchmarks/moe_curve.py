"""Does routing replay help? The embedded mixture of experts, sampled in bfloat16 and trained in float32.

    nice -n 19 python benchmarks/moe_curve.py       runs what benchmarks/results/moe_curve.json lacks, then draws
    python benchmarks/moe_curve.py --draw-only      draws docs/moe_curve.png from the record

Each run has four updates a step, so that old_log_probs and the update differ too. Its prompts are the same with every
--routing-replay.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.curves import ACCURACY, PANELS, RESULTS, plot, provenance  # noqa: E402
from lib.distributed import iter_full_params  # noqa: E402
from lib.model.load import load_model  # noqa: E402
from lib.rollout import HFEngine  # noqa: E402

FILE = RESULTS / "moe_curve.json"
MODES = {"none": "grey", "R2": "tab:blue", "R3": "tab:red"}
FLAGS = "--config data/toy/preset.yaml --model data/toy_moe/model --rollout-engine benchmarks/moe_curve.py:BF16Engine"
FLAGS += " --prompts-per-step 16 --num-mini-batches 4 --lr 1e-4 --total-steps 20 --val-every 4"
FLAGS += " --save-every 0 --save-rollouts 0 --no-export-model"
KEYS = {ACCURACY: PANELS[ACCURACY], "reward/mean": PANELS["reward/mean"]}
KEYS["actor/ppo_kl"] = "k1 between old and new policy (nats)"
KEYS["rollout/k3"] = "k3 between engine and trainer (nats)"
KEPT = (*KEYS, "actor/pg_clipfrac", "router/differing_experts", "rollout/logp_diff_mean", "actor/grad_norm")


class BF16Engine(HFEngine):
    """The hf engine with a copy of the weights, rounded to bfloat16 whenever it samples. The check of a sync
    allows a float32 trainer no such engine, so there is none."""

    shares_weights = takes_weights = False

    def __init__(self, model, tokenizer, **settings):
        super().__init__(load_model(model.name_or_path, dtype=torch.bfloat16), tokenizer)
        self.trained = model

    @contextmanager
    def session(self):
        own = self.model.state_dict()
        for name, weight in iter_full_params(self.trained):
            own[name].copy_(weight)
        with super().session():
            yield


def run(mode: str, seed: int, folder: str) -> None:
    """In a process of its own."""
    os.chdir(ROOT)
    os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = ["grpo.py", *FLAGS.split(), "--routing-replay", mode, "--seed", str(seed)]
    sys.argv += ["--output-dir", folder, "--run-name", "run"]
    runpy.run_path("grpo.py", run_name="__main__")


def measured(mode: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        process = FORKSERVER.Process(target=run, args=(mode, seed, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(Path(folder, "log").read_text()[-3000:])
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    curves = {key: [(row["step"], row[key]) for row in rows if key in row] for key in KEPT}
    print(mode, seed, curves[ACCURACY][-1], flush=True)
    return {"seed": seed, "curves": curves}


def draw(records: dict) -> None:
    figure = Figure(figsize=(13, 3.4), dpi=110, layout="constrained")
    figure.suptitle("2 of 8 experts a token, sampled in bfloat16, trained in float32: mean and range of the seeds")
    for axes, (key, label) in zip(figure.subplots(1, len(KEYS)), KEYS.items()):
        for mode, color in MODES.items():
            curves = torch.tensor([run["curves"][key] for run in records[mode]["runs"]])  # (seeds, N, 2)
            plot(axes, curves[0, :, 0].numpy(), curves[:, :, 1].numpy(), color, f"{mode}, {len(curves)} seeds")
        axes.set(xlabel="step", ylabel=label)
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs/moe_curve.png")


def main(seeds: tuple[int, ...] = (1, 2, 3, 4, 5), draw_only: bool = False) -> None:
    records = json.loads(FILE.read_text()) if FILE.exists() else {}
    how = provenance(1)
    for seed in () if draw_only else seeds:
        for mode in MODES:
            command = f"python grpo.py {FLAGS} --routing-replay {mode}"
            record = records.setdefault(mode, {"command": command, **how, "runs": []})
            if seed not in [run["seed"] for run in record["runs"]]:
                record["runs"].append(measured(mode, seed))
                FILE.write_text(json.dumps(records) + "\n")
    draw(records)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    FORKSERVER = multiprocessing.get_context("forkserver")
    FORKSERVER.set_forkserver_preload(["grpo", "benchmarks.moe_curve"])
    tyro.cli(main)
