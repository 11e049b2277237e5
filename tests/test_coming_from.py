"""docs/coming_from_trl.md and docs/coming_from_verl.md: their commands run as a user would run them, at toy size."""

import ast
import re
import runpy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.common import ROOT, fork, metrics, ran, rollouts
from tests.test_recipes import OF_VLLM, commands, in_folder, numbers, parsed, smaller, tiny_chat_model, without, write
from tools import export

PAGES = [ROOT / f"docs/coming_from_{peer}.md" for peer in ("trl", "verl")]
PYTHON = re.compile(r"^```python\n# (\w+\.py)(.*?)^```", re.M | re.S)
EXPORT = re.compile(r"^python -m tools\.export runs/(\w+) (.+)$", re.M)
SMALLER = {
    "1024": "8",
    "2048": "16",
    "max_response_length=1024,2048": "max_response_length=8,16",
    '{"overlong_buffer": 512}': '{"overlong_buffer": 8}',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


def scorers(page: Path, folder: Path) -> dict[str, dict]:
    """{file name: its names} of the page's Python files with a scorer, written to the folder."""
    files = {name: code for name, code in PYTHON.findall(page.read_text()) if "def compute_score" in code}
    for name, code in files.items():
        (folder / name).write_text(code)
    return {name: runpy.run_path(str(folder / name)) for name in files}


def write_files(folder: Path) -> None:
    """A copy of openai/gsm8k on the hub, and the files that verl's scripts would make of it, of DAPO-Math and AIME."""
    write(folder / "hub.jsonl", numbers(16))
    sources = {"gsm8k/train": "openai/gsm8k", "gsm8k/test": "openai/gsm8k", "dapo_math/train": "math_dapo"}
    for name, source in (sources | {"math_val/aime24": "math_dapo/aime24"}).items():
        rows = []
        for i, row in enumerate(numbers(16)):
            prompt = [{"role": "user", "content": row["question"]}]
            truth = {"style": "rule", "ground_truth": row["answer"].split()[-1]}
            more = {"ability": "math", "extra_info": {"split": "train", "index": i}}
            rows.append({"data_source": source, "prompt": prompt, "reward_model": truth, **more})
        path = folder / f"data/{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page, model, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks and all(ast.parse(block) for block in blocks)
    scorers(page, tmp_path)
    write_files(tmp_path)
    runs = commands(page.read_text())
    assert len(runs) == {"coming_from_trl": 2, "coming_from_verl": 4}[page.stem]
    for number, run in enumerate(runs):
        words = [re.sub(r"^(\w+\.py):", rf"{tmp_path}/\1:", word) for word in in_folder(run.words, tmp_path)]
        words = [str(tmp_path / "hub.jsonl") if word == "openai/gsm8k:main:train" else word for word in words]
        args = parsed(run._replace(words=words), "--dry-run", str(run.ranks))  # its flags as they stand
        words = [SMALLER.get(word, word) for word in without(words, OF_VLLM)]
        words += [*smaller(args, model), "--track"]  # no tracker
        done = ran(fork(run.script, tmp_path, *words, "--run-name", str(number), preset=[]))
        logged = {key: value for row in metrics(tmp_path / str(number)) for key, value in row.items()}
        assert logged["step"] == 1 and logged["training/rows_in"] >= args.num_mini_batches * min(args.group_size, 4)
        assert logged["reward/error_count"] == 0 and logged["actor/grad_norm"] >= 0, done.stdout
        samples = rollouts(tmp_path / str(number)).values()
        assert samples and all("How much are" in str(row["prompt"]) for row in samples)
        if "rewards/overlong.py:compute_score" in words:
            assert "reward/overlong_penalty/mean" in logged and any(key.startswith("shadow/") for key in logged)
            assert {"val/openai/gsm8k/acc/mean@1", "val/math_dapo/aime24/acc/mean@1"} <= logged.keys()
            assert "(val/openai/gsm8k/acc/mean@1 0.000, lower bound 0.000)" in done.stdout
    [(name, flags)] = EXPORT.findall(page.read_text())
    folder = next(str(i) for i, run in enumerate(runs) if run.words[run.words.index("--run-name") + 1] == name)
    export.main(tyro.cli(export.Args, args=[str(tmp_path / folder), *flags.split()]))
    [exported] = (tmp_path / folder / "export").iterdir()
    if "--adapter" in flags:
        base = AutoModelForCausalLM.from_pretrained(model)
        assert len(PeftModel.from_pretrained(base, exported).peft_config) == 1
    else:
        assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size


def test_reward_functions_of_trl_and_verl_are_ours(tmp_path):
    """TRL's with the adapter of the page, on the columns that a row has."""
    [names] = scorers(PAGES[0], tmp_path).values()
    row = {"question": "How much are 1 and 2?", "answer": "It is 3.\n#### 3"}
    texts = ["So #### 3", "#### 3 or #### 4", "3", "#### 4 then #### 3"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    as_in_trl = names["correct"](completions=messages, prompts=None, answer=[row["answer"]] * len(texts))
    assert as_in_trl == [1, 0, 0, 1]
    assert [names["compute_score"]("gsm8k", text, extra_info=row) for text in texts] == as_in_trl
    [names] = scorers(PAGES[1], tmp_path).values()
    scores = [names["compute_score"]("openai/gsm8k", text, "3", {})["score"] for text in ("#### 3", "#### 4")]
    assert scores == [1, 0]
