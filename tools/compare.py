"""Says whether one setting scores more than another in validation, by more than seeds and prompts differ.

    python -m tools.compare runs/a* runs/b*                    the last validation of each run
    python -m tools.compare runs/a* runs/b* --step mean        the mean over all validations: who learns early has more
    python -m tools.compare runs/a* runs/b* --output found     compare.md, compare.json, compare.png

The runs have two settings, each with the same seeds: they are told apart by their flags. Scores are compared prompt by
prompt and seed by seed. docs/results.md describes the interval and what it assumes. Needs no torch.
"""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from lib import InputError
from lib.cli.process import command_line
from tools.page.read import read_lines, read_run
from tools.page.samples import VALIDATED

POWER = 0.8  # of the seeds that the verdict asks for
MOST_SEEDS = 1000  # that it asks for
ALL = "all"  # data sources together
Scores = dict[int, dict[tuple[str, str], float]]
"""step -> (data source, row hash) -> mean score of a prompt's samples"""


@dataclass
class Args:
    """Flags of the command."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders of runs, such as runs/a* runs/b*; the setting of the first one is compared with the other"""
    step: int | Literal["last", "mean"] = "last"
    """the validation to compare: the last, that after so many steps, or the mean over all"""
    confidence: float = 0.95
    """of the interval"""
    output: Path | None = None
    """folder for compare.md, compare.json and compare.png"""


# ---------------------------------------------------------------------------------------- statistics


class Difference(NamedTuple):
    """mean, with its interval (NaN with one seed); verdict: more, less, or how many more seeds are needed."""

    mean: float
    low: float
    high: float
    verdict: str


def paired_difference(differences: np.ndarray, confidence: float = 0.95) -> Difference:
    """The mean of differences (S, P) of S seeds at P prompts, both drawn at random, with its confidence interval.

    Model: D[s, p] = mean + seed[s] + prompt[p] + rest[s, p]. The variance of the mean is that between seeds and that
    between prompts, by the mean squares of the two-way analysis of variance; each has a Student's t of its own, since
    the first has few degrees of freedom. With P = 1 this is the paired t-test over seeds.
    """
    seeds, prompts = differences.shape
    mean = float(differences.mean())
    if seeds == 1:
        return Difference(mean, math.nan, math.nan, "at least 1 more seed needed")
    by_seed = differences.mean(1, keepdims=True) - mean  # (S, 1)
    by_prompt = differences.mean(0, keepdims=True) - mean  # (1, P)
    of_seeds = prompts * float((by_seed**2).sum()) / (seeds - 1)  # the mean squares
    of_prompts = of_rest = 0.0
    if prompts > 1:
        of_prompts = seeds * float((by_prompt**2).sum()) / (prompts - 1)
        of_rest = float(((differences - mean - by_seed - by_prompt) ** 2).sum()) / ((seeds - 1) * (prompts - 1))
    parts = (of_seeds, seeds - 1), (max(of_prompts - of_rest, 0.0), max(prompts - 1, 1))
    squares = (t_quantile((1 + confidence) / 2, freedom) ** 2 * part for part, freedom in parts)
    half = math.sqrt(sum(squares) / differences.size)
    low, high = mean - half, mean + half
    if low > 0 or high < 0:
        return Difference(mean, low, high, "more" if low > 0 else "less")
    of_all_seeds, of_all_prompts = of_seeds / prompts, max(of_prompts - of_rest, 0.0) / differences.size
    return Difference(mean, low, high, more_seeds(mean, seeds, of_all_seeds, of_all_prompts, confidence))


def more_seeds(mean: float, seeds: int, of_seed: float, of_prompts: float, confidence: float) -> str:
    """How many more seeds find a difference of this size in 80 % of cases.

    of_seed: variance of the mean with one seed, which falls with their number; of_prompts: that which does not."""

    def shows(count: int) -> bool:
        quantiles = t_quantile((1 + confidence) / 2, count - 1) + t_quantile(POWER, count - 1)
        return quantiles * math.sqrt(of_seed / count + of_prompts) < abs(mean)

    most = seeds + MOST_SEEDS
    if not shows(most):
        return f"more than {MOST_SEEDS} more seeds needed"
    needed = bisect_left(range(seeds + 1, most), True, key=shows) + 1
    return f"{needed} more seed{'s' * (needed > 1)} needed"


@lru_cache(maxsize=2**14)
def t_quantile(probability: float, freedom: float) -> float:
    """Student's t with `freedom` >= 1. As x = sqrt(freedom) tan(angle), its density is cos(angle)^(freedom - 1)."""
    freedom = min(freedom, 1000.0)  # where it is within 0.2 % of the normal distribution's
    edges = np.linspace(-math.pi / 2, math.pi / 2, 4001)
    density = np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1)
    below = np.concatenate([[0.0], density.cumsum() / density.sum()])
    return math.sqrt(freedom) * math.tan(np.interp(probability, below, edges))


# ---------------------------------------------------------------------------------------- runs


class Setting(NamedTuple):
    name: str
    """the flags in which it differs from the other"""
    runs: dict[int, Scores]
    """by seed"""


def read_scores(folder: Path) -> Scores:
    """Raises InputError if the run has no validation samples, or some that cannot be read."""
    notes: list[str] = []
    samples: dict[int, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_lines(folder, "samples.jsonl", VALIDATED, notes):
        if not row.get("row_hash"):
            raise InputError(f"{folder}/samples.jsonl has samples without row_hash, of an older version: run again")
        if row.get("score") is not None and math.isfinite(row["score"]):
            samples[row["step"]][row.get("data_source") or "", row["row_hash"]].append(row["score"])
    if notes:
        raise InputError(f"{folder}/{notes[0]}")
    if not samples:
        raise InputError(f"{folder} has no scored validation samples: run with --val-files and --val-every")
    return {step: {prompt: sum(x) / len(x) for prompt, x in by.items()} for step, by in sorted(samples.items())}


def read_settings(folders: Sequence[Path]) -> tuple[Setting, Setting]:
    """The two settings of the runs, that of the first run first. Raises InputError unless both have the same seeds."""
    families: dict[str, dict[int, Path]] = {}
    flags: dict[str, dict[str, str]] = {}
    for folder in dict.fromkeys(folders):
        run = read_run(folder)
        if run["seed"] is None:
            raise InputError(f"{folder}: config.json has no seed")
        flags[run["family"]] = run["all_flags"] | {"script": run["script"] or ""}
        other = families.setdefault(run["family"], {}).setdefault(run["seed"], folder)
        if other != folder:
            raise InputError(f"{folder} and {other} have the same flags and the same seed: leave one out")
    names = setting_names([*flags.values()])
    if len(families) != 2:
        said = f": {'; '.join(names)}" if len(names) > 1 else ""
        raise InputError(f"give runs of two settings, which differ in a flag; these have {len(names)}{said}")
    first, second = families.values()
    if unpaired := sorted(first.keys() ^ second.keys()):
        raise InputError(f"seeds are paired, and only one of {names[0]} and {names[1]} has seed {unpaired[0]}")
    one, two = ({seed: read_scores(folder) for seed, folder in sorted(own.items())} for own in (first, second))
    return Setting(names[0], one), Setting(names[1], two)


def setting_names(flags: Sequence[dict[str, str]]) -> list[str]:
    """What each has where they differ, as on a command line."""
    everything = dict.fromkeys(name for of in flags for name in of)
    ignored = {"seed", "run_name", "output_dir", "track"}
    differing = [name for name in everything if name not in ignored and len({of.get(name) for of in flags}) > 1]
    said = [" ".join(_flag(name, of.get(name)) for name in differing) for of in flags]
    return [name if name and said.count(name) == 1 else f"{name or 'setting'} ({i})" for i, name in enumerate(said, 1)]


def _flag(name: str, value: str | None) -> str:
    if name == "script":
        return str(value)
    return f"--{name.replace('_', '-')} {'(none)' if value is None else value or '(empty)'}"


class Compared(NamedTuple):
    """differences (S, P): score of the one setting minus that of the other, by seed and prompt."""

    source: str
    means: tuple[float, float]
    differences: np.ndarray
    result: Difference


def compare(one: Setting, other: Setting, step: int | str, confidence: float) -> list[Compared]:
    """A row for each data source, and one for all of them. Raises InputError if there is nothing to pair."""
    runs = [*one.runs.values(), *other.runs.values()]
    steps = chosen_steps(runs, step)
    prompts = set.intersection(*(set(run[at]) for run in runs for at in steps))
    every = set.union(*(set(run[at]) for run in runs for at in steps))
    if len(prompts) < 0.9 * len(every):  # a few may have no score
        raise InputError(f"the runs were validated on other prompts: only {len(prompts)} of {len(every)} are in all")
    sources = sorted({source for source, _ in prompts})
    rows = []
    for name in sources if len(sources) == 1 else [*sources, ALL]:
        own = sorted(prompt for prompt in prompts if name in (prompt[0], ALL))
        scores = [
            np.array([[np.mean([run[at][prompt] for at in steps]) for prompt in own] for run in of.runs.values()])
            for of in (one, other)
        ]  # (S, P) each
        differences = scores[0] - scores[1]
        means = float(scores[0].mean()), float(scores[1].mean())
        rows.append(Compared(name, means, differences, paired_difference(differences, confidence)))
    return rows


def chosen_steps(runs: Sequence[Scores], step: int | str) -> list[int]:
    """The steps of the validations to compare, which all runs must have."""
    validated = [[*run] for run in runs]
    if step == "last":
        if len({steps[-1] for steps in validated}) > 1:
            last = ", ".join(map(str, sorted({steps[-1] for steps in validated})))
            raise InputError(f"the runs' last validations are after steps {last}: give --step N, or let them end")
        return validated[0][-1:]
    if step == "mean":
        if any(steps != validated[0] for steps in validated):
            raise InputError("the runs were validated at different steps: give --step N, one that all have")
        return validated[0]
    both = set.intersection(*map(set, validated))
    if step not in both:
        raise InputError(f"--step {step}: all runs were validated at {', '.join(map(str, sorted(both))) or 'no step'}")
    return [int(step)]


# ---------------------------------------------------------------------------------------- table and figure


def table(one: Setting, other: Setting, rows: Sequence[Compared], confidence: float) -> list[list[str]]:
    """The heading and a row for each data source."""
    heading = ["data source", "prompts", "seeds", one.name, other.name, "difference"]
    cells = [[*heading, f"{confidence:.0%} interval".replace("%", " %"), "verdict"]]
    for row in rows:
        seeds, prompts = row.differences.shape
        mean, low, high, verdict = row.result
        interval = "–" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"
        scores = [f"{value:.3f}" for value in row.means]
        cells.append([row.source, str(prompts), str(seeds), *scores, f"{mean:+.3f}", interval, verdict])
    return cells


def markdown(cells: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]) + "\n"


def draw(one: Setting, other: Setting, confidence: float, file: Path) -> None:
    """The difference at each validation that all runs have: its interval, and a dot for each seed."""
    from matplotlib.figure import Figure  # slow to import

    runs = [*one.runs.values(), *other.runs.values()]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    rows = [compare(one, other, step, confidence)[-1] for step in steps]
    low, high = (np.array([getattr(row.result, end) for row in rows]) for end in ("low", "high"))
    axes = (figure := Figure(figsize=(7, 4), dpi=100, layout="constrained")).subplots()
    axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, label=f"{confidence:.0%} interval")
    axes.plot(steps, [row.result.mean for row in rows], ".-", label="mean")
    for number, seed in enumerate(one.runs):
        axes.plot(steps, [row.differences[number].mean() for row in rows], "o", markersize=3, label=f"seed {seed}")
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(xlabel="step", ylabel="difference in score", title=f"{one.name}\nminus {other.name}")
    axes.title.set_fontsize(9)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def main(args: Args) -> None:
    if not 0.5 <= args.confidence < 1:
        raise InputError(f"--confidence {args.confidence:g}: give at least 0.5 and less than 1, such as 0.95")
    one, other = read_settings(args.runs)
    rows = compare(one, other, args.step, args.confidence)
    text = markdown(table(one, other, rows, args.confidence))
    print(text, end="")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "compare.md").write_text(text)
        (args.output / "compare.json").write_text(json.dumps(as_json(one, other, rows)) + "\n")
        draw(one, other, args.confidence, args.output / "compare.png")


def as_json(one: Setting, other: Setting, rows: Sequence[Compared]) -> dict[str, Any]:
    """by_seed: {seed: difference}; low and high are null with one seed."""
    found = [
        {"source": row.source, "means": row.means, **row.result._asdict()}
        | {"by_seed": dict(zip(one.runs, row.differences.mean(1).tolist()))}
        for row in rows
    ]
    clean = [{key: None if value != value else value for key, value in row.items()} for row in found]
    return {"settings": [one.name, other.name], "rows": clean}


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.compare", description=__doc__))
