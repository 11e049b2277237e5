"""The recipes: their commands run as they stand, except for model, rows and sizes; their figures are those of today.

`python -m tests.test_recipes` writes the present figures into the page.
"""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

from agent import load_tools
from data import toy, toy_tools
from lib.cli.flags import parse_flags
from planner.estimate import H100, describe_needs, memory_of
from planner.memory import GIB, worst_moment
from tests.common import ROOT, fork, metrics, ran, save_tiny
from tests.test_docs import METRIC

PAGE = ROOT / "docs/recipes.md"
COMMAND = re.compile(
    r"^(?:accelerate launch --config_file tools/launch/accelerate_(\d+)\.yaml|python) (grpo|ppo|remax|dapo)\.py "
    r"(?:--config \S+ )?(.+)$",
    re.M,
)
DATA = re.compile(r"^python data/(\w+)\.py (.+)$", re.M)
FIGURES = re.compile(r"(?<=```\n)fits:.*?(?=```)", re.S)
WORST = re.compile(r"`--dry-run (\d+)((?: [^`]+)?)`: [\d.]+ GiB \([\w -]+\)")


class Command(NamedTuple):
    ranks: int
    script: str
    words: list[str]
    """its flags and their values"""


def commands(text: str) -> list[Command]:
    """All of the text that start a script; of --config, which names a run, the flags beside it."""
    found = COMMAND.findall(text.replace("\\\n", " "))
    return [Command(int(gpus or 1), script, shlex.split(flags)) for gpus, script, flags in found]


def trainings(text: str) -> list[Command]:
    """Those that start from a model."""
    return [run for run in commands(text) if "--model" in run.words]


SECTIONS = {text.split("\n")[0]: text for text in re.split(r"^(?=## )", PAGE.read_text(), flags=re.M)[1:]}
every_recipe = pytest.mark.parametrize("recipe", SECTIONS.values(), ids=[name[3:].lower() for name in SECTIONS])


def parsed(run: Command, *more: str) -> Any:
    return parse_flags(importlib.import_module(run.script).Args, [*run.words, *more])


# ---- figures -------------------------------------------------------------------------------------
def dry_run(run: Command, *more: str) -> Any:
    """The flags with --dry-run, from a config of the model's shape."""
    [size] = re.findall(r"Qwen2\.5-([\d.]+B)", run.words[run.words.index("--model") + 1])
    shape = str(ROOT / f"benchmarks/shapes/qwen2.5-{size.lower()}.json")
    rows = str(toy.FOLDER / "val.jsonl")
    there = ["--dry-run", str(run.ranks), "--model", shape, "--train-files", rows, "--val-files", rows]
    return parsed(run, *there, *more)


def figures(run: Command) -> str:
    """What --dry-run says below its table: the moment that needs most, and how long a step's FLOPs take."""
    said = describe_needs(dry_run(run), H100)
    return f"{said[said.index('fits: ') :]}\n"


def present(recipe: str) -> str:
    """The text with today's figures: of its training, and after `--dry-run 1 [more flags]`: 12.3 GiB (backward)."""
    [run] = trainings(recipe)

    def worst(found: re.Match) -> str:
        ranks = int(found[1])
        args = dry_run(run._replace(ranks=ranks), *shlex.split(found[2]))
        moment, size = worst_moment(memory_of(args, ranks, H100.memory))
        return f"`--dry-run {found[1]}{found[2]}`: {size / GIB:.1f} GiB ({moment})"

    return FIGURES.sub(lambda _: figures(run), WORST.sub(worst, recipe))


@every_recipe
def test_figures_are_those_of_today(recipe):
    assert len(FIGURES.findall(recipe)) == 1 and recipe == present(recipe), "run python -m tests.test_recipes"


# ---- commands ------------------------------------------------------------------------------------
def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbers(n: int) -> list[dict]:
    return [{"question": f"How much are {i} and 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"} for i in range(n)]


def problems(n: int) -> list[dict]:
    answers = {i: str(i + 2) for i in range(n)}
    return [{"problem": f"What is ${i}+2$?", "solution": rf"$\boxed{{{x}}}$", "answer": x} for i, x in answers.items()]


def of_dapo_math(i: int) -> dict:
    prompt = [{"role": "user", "content": f"What is {i}+2?"}]
    return {"prompt": prompt, "reward_model": {"ground_truth": str(i + 2)}, "extra_info": {"index": f"{i}"}}


def of_search_qa(i: int) -> dict:
    paragraphs = [[f"River number {i} flows to Port {i}."], ["A town."]]
    metadata = {"context": {"title": [f"River {i}", "Town"], "sentences": paragraphs}}
    return {"question": f"Where does river number {i} flow?", "golden_answers": [f"Port {i}"], "metadata": metadata}


def of_mbpp(i: int) -> dict:
    return {"task_id": i, "text": f"Add {i}.", "test_list": [f"assert add(1) == {i + 1}"], "test_setup_code": ""}


def of_taco(i: int) -> dict:
    return {"question": f"Task {i}: add 2.", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["3\n"]})}


SEARCHES = ("nq/train", "nq/test", "hotpotqa/train", "hotpotqa/dev")
COPIES: dict[str, dict[str, list[dict]]] = {  # data script: {file: some rows like those on the hub}
    "gsm8k": dict.fromkeys(("train", "test"), numbers(4)),
    "math": dict.fromkeys(("train", "test"), problems(8)),
    "math_val": dict.fromkeys(("math500/test", "aime24/train", "aime25/test"), problems(2)),
    "dapo_math": {"dapo-math-17k": [of_dapo_math(i) for i in range(8)]},
    "countdown": {"train": [{"target": 10 + i, "nums": [4, 5, 1 + i]} for i in range(8)]},
    "search_qa": {name: [of_search_qa(i) for i in range(4)] for name in SEARCHES},
    "mbpp": {split: [of_mbpp(i) for i in range(4)] for split in ("train", "test")},
    "taco": {"train": [of_taco(i) for i in range(6)]},
}
SMALLER_DATA = {"countdown": ["--test-size", "2"], "taco": ["--test-size", "2"]}


def in_folder(words: list[str], folder: Path) -> list[str]:
    """The words with data/ in that folder."""
    return [re.sub(r"(?<![\w/])data/", f"{folder}/data/", word) for word in words]


def make_data(recipe: str, folder: Path) -> None:
    """Runs its data commands on small copies."""
    for script, flags in DATA.findall(recipe):
        copy = folder / "copies" / script
        for name, rows in COPIES[script].items():
            write(copy / f"{name}.jsonl", rows)
        words = in_folder(shlex.split(flags, comments=True), folder)
        main = importlib.import_module(f"data.{script}").main
        tyro.cli(main, args=[*words, "--local-dir", str(copy), *SMALLER_DATA.get(script, [])])


def tiny_chat_model(folder: Path) -> str:
    """Random weights, with a tokenizer that spells any text; its path."""
    ids = {"eos_token_id": 3, "pad_token_id": 0, "bos_token_id": None}
    toy.make_tokenizer(toy.ROLES, toy_tools.CHAT_TEMPLATE).save_pretrained(folder)
    return save_tiny(folder, cls=LlamaForCausalLM, config=LlamaConfig, max_position_embeddings=4096, **ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


def smaller(args: Any, model: str) -> list[str]:
    """Flags that replace model, engine and sizes; the number of mini-batches and all others stay."""
    group_size, val_samples = min(args.group_size, 4), min(*args.validation.val_samples, 2)
    words = f"--model {model} --rollout-engine hf --total-steps 1 --save-every 0"
    words += f" --no-export-model --reward-workers 1 --val-samples {val_samples} --micro-batch-tokens 4000"
    words += f" --prompts-per-step {args.num_mini_batches} --group-size {group_size}"
    words += " --max-prompt-length 1500 --max-response-length 16"
    if args.max_gen_batches:  # dapo.py
        words += " --overlong-buffer 4 --max-gen-batches 2"
    return words.split()


OF_VLLM = ("--gpu-memory-utilization", "--rollout-tensor-parallel-size")  # hf samples here


def without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """The words without these flags and the one value of each."""
    left_out = {at + i for at, word in enumerate(words) if word in flags for i in (0, 1)}
    return [word for at, word in enumerate(words) if at not in left_out]


@every_recipe
def test_commands_run(recipe, model, tmp_path):
    make_data(recipe, tmp_path)
    known: set[str] = set()  # metrics
    for number, run in enumerate(commands(recipe)):
        run = run._replace(words=in_folder(run.words, tmp_path))
        args = parsed(run, "--dry-run", str(run.ranks))
        if "--model" not in run.words:  # it goes on with the flags of another
            continue
        words = [*without(run.words, OF_VLLM), *smaller(args, model), "--run-name", str(number)]
        done = ran(fork(run.script, tmp_path, *words, preset=[]))
        rows = metrics(tmp_path / str(number), timings=True)
        logged = {key: value for row in rows for key, value in row.items()}
        least = args.num_mini_batches * min(args.group_size, 4)
        assert logged["step"] == 1 and logged["training/rows_in"] >= least, done.stdout
        assert logged["actor/grad_norm"] >= 0, done.stdout
        assert logged["val/unscored"] == logged["reward/error_count"] == 0, done.stdout
        known |= logged.keys()
    assert set(METRIC.findall(recipe)) - known == set()


def test_the_corpus_of_the_page_answers_its_questions(tmp_path):
    make_data(SECTIONS["## Search"], tmp_path)
    [run] = trainings(SECTIONS["## Search"])
    [spec] = parsed(run._replace(words=in_folder(run.words, tmp_path)), "--dry-run", "8").multi_turn.tools
    [tool] = load_tools((spec,)).values()
    assert "flows to Port 3" in tool.function(query="Where does river number 3 flow?")


if __name__ == "__main__":
    for recipe in SECTIONS.values():
        PAGE.write_text(PAGE.read_text().replace(recipe, present(recipe)))
