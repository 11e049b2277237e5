"""The training samples that a run keeps: every column against the step's batch, for each script; which groups; the text
of each token; what a full disk, an early end and a rewind do."""

import json
import math
import time
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lib.run.run as run_module
from lib.args import RunArgs, ValidationArgs
from lib.data import response_texts
from lib.distributed import World
from lib.log.rollouts import kept_rows, rollout_file, rollouts_table, token_texts
from lib.log.tracking import Tracker
from lib.model import load_tokenizer
from lib.run import Run
from lib.run.resume import cut_logs
from tests.common import (
    ROOT,
    SEVERAL_UPDATES,
    SMALL,
    TOY_MODEL,
    fork,
    full_disk,
    one_line,
    ran,
    rollout_batch,
    with_slow,
)

TOOLS = [
    *("--model", str(ROOT / "data/toy_tools/model"), "--train-files", str(ROOT / "data/toy_tools/val.jsonl")),
    *("--max-prompt-length", "32", "--max-response-length", "48", "--micro-batch-tokens", "400"),
    *("--multi-turn.tools", "calculator", "--multi-turn.max-turns", "3", "--multi-turn.reward-coef", "0.5"),
]

# ---- every column, against the batch of a real step ----------------------------------------------
RECORDER = """
from pathlib import Path
import torch
from lib.data import RLHFDataset as Rows
from lib.model.trained import Policy
from lib.run.run import Run

seen = {}  # log_probs and entropy of each row, in the last call
compute, save = Policy.log_probs, Run.save_rollouts

def compute_and_record(self, micro):
    outputs = compute(self, micro)
    seen.update((int(row), (a.detach(), b.detach())) for row, a, b in zip(micro.batch["row"], *outputs))
    return outputs

def save_and_record(self, step, batch, outputs, tokenizer):
    batch.meta_info.clear()
    torch.save((batch, dict(seen)), Path(__file__).with_name(f"{step}.pt"))
    seen.clear()
    save(self, step, batch, outputs, tokenizer)

Policy.log_probs, Run.save_rollouts = compute_and_record, save_and_record

def score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str[-1:] in "478":
        raise ValueError("no score")
    result = {"score": float(len(solution_str) % 2), "pred": solution_str, "parts": [1, "é"]}
    return result | ({"even": True} if len(solution_str) % 2 == 0 else {})
"""
CASES = {
    "grpo": ("grpo", SEVERAL_UPDATES),
    "grpo, several turns": ("grpo", [*TOOLS, "--total-steps", "1"]),
    "ppo, the critic alone in step 1": ("ppo", ["--critic-warmup-steps", "1", "--total-steps", "2"]),
    "dapo, with groups left over": ("dapo", ["--group-size", "2", "--total-steps", "3"]),
}


@pytest.fixture(scope="module", params=with_slow(CASES, "grpo", "ppo, the critic alone in step 1"))
def recorded(request, tmp_path_factory):
    """(case, run, {step: (batch, {row: (log_probs, entropy) of the last pass})})."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "recorder.py").write_text(RECORDER)
    script, args = CASES[request.param]
    args = [*SMALL, *args, "--dataset-class", f"{folder}/recorder.py:Rows", "--reward", f"{folder}/recorder.py:score"]
    ran(fork(script, folder, *args, "--save-rollouts", "all", "--run-name", "run"))
    return request.param, folder / "run", {int(f.stem): torch.load(f, weights_only=False) for f in folder.glob("*.pt")}


def read(run: Path) -> list[dict]:
    files = sorted(str(file) for file in (run / "rollouts").glob("*.parquet"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", run / "cache")
        return list(datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(run / "cache")))


def test_every_column_is_what_the_step_had(recorded):
    case, run, steps = recorded
    rows = read(run)
    assert [row["step"] for row in rows] == [step for step in sorted(steps) for _ in range(len(steps[step][0]))]
    tokenizer = load_tokenizer(str(ROOT / "data/toy_tools/model") if "turns" in case else TOY_MODEL)
    moved, uids = 0.0, {step: [*dict.fromkeys(row["group"] for row in rows if row["step"] == step)] for step in steps}
    for row in rows:
        batch, last_pass = steps[row["step"]]
        i = np.flatnonzero(batch.non_tensor_batch["uid"] == row["group"])[row["sample"]]
        t, columns = {k: v[i] for k, v in batch.batch.items()}, {k: v[i] for k, v in batch.non_tensor_batch.items()}
        P, attended = len(t["prompts"]), t["attention_mask"].bool()
        own = attended[P:]
        assert row["prompt_ids"] + row["response_ids"] == t["input_ids"][attended].tolist()
        assert len(row["prompt_ids"]) == attended[:P].sum()
        for name in ("response_mask", "loss_mask"):
            assert row[name] == t[name].bool()[own].tolist()
        of_batch = {name: name for name in ("rollout_log_probs", "old_log_probs", "advantages", "values")}
        for name, key in (of_batch | {"ref_log_probs": "ref_log_prob", "weight_versions": "weight_versions"}).items():
            assert row[name] == (t[key][own].tolist() if key in t else None), name
        assert row["tool_rewards"] == columns.get("tool_rewards")
        if row["turns"] is not None:
            assert "".join(turn["text"] for turn in row["turns"]) == row["response"]
            by_policy = [turn["by"] == "policy" for turn in row["turns"] for _ in range(turn["tokens"])]
            assert len(by_policy) == own.sum()
            assert by_policy == row["response_mask"] or not any(row["response_mask"])
        if last_pass:
            for name, value in zip(("log_probs", "entropy"), last_pass[i]):
                assert row[name] == value[own].tolist()
            old = row["old_log_probs"] or row["log_probs"]
            log_ratio = np.array(row["log_probs"], np.float64) - np.array(old, np.float64)
            # the difference and its exponential, each rounded to float32
            assert row["ratio"] == pytest.approx(np.exp(log_ratio).tolist(), rel=1e-6)
            moved = max(moved, *abs(log_ratio))
        else:
            assert row["log_probs"] is row["entropy"] is row["ratio"] is None
        assert "".join(row["tokens"]) == row["response"] == tokenizer.decode(row["response_ids"])
        assert row["prompt"] == tokenizer.decode(row["prompt_ids"])
        assert columns["raw_prompt"][0]["content"] in row["prompt"]
        assert row["data_source"] == columns["data_source"]
        assert row["ground_truth"] == columns["reward_model"]["ground_truth"]
        assert row["finish_reason"] == columns["finish_reason"]
        runs = groupby(zip(row["response_ids"], row["response_mask"]), itemgetter(1))
        turns = response_texts(tokenizer, [[token for token, _ in run] for own, run in runs if own])
        solution = "\n".join(filter(None, turns))
        if any(row["response_mask"]):
            even = {"even": True} if len(solution) % 2 == 0 else {}
            assert json.loads(row["rewards"]) == {"pred": solution, "parts": [1, "é"], **even}  # of its own scorer call
            by_turns = sum(turn["reward"] for turn in row["turns"] or [])
            assert row["score"] == pytest.approx(len(solution) % 2 + 0.5 * by_turns)
        else:
            assert row["score"] is None and json.loads(row["rewards"]) == {}
    with_turns = case == "grpo, several turns"
    assert {row["turns"] is not None for row in rows} == {with_turns}
    assert any(row["tool_rewards"] for row in rows) == with_turns
    numbers = {step: [int(uid.split("-")[1]) for uid in of_step] for step, of_step in uids.items()}
    assert (moved > 1e-3) != with_turns  # of one update
    assert any(row["score"] is None for row in rows) and {row["score"] for row in rows} >= {0.0, 1.0}
    assert all(step_numbers == sorted(step_numbers) for step, step_numbers in numbers.items()) or "dapo" in case
    if case == "dapo, with groups left over":
        of_earlier = [row for row in rows if int(row["group"].split("-")[0]) < row["step"]]
        assert of_earlier and all(row["old_log_probs"] == row["rollout_log_probs"] for row in of_earlier)


# ---- the text of each token ----------------------------------------------------------------------
def byte_level() -> PreTrainedTokenizerFast:
    """As of GPT-2, Llama 3 and Qwen: a token is any bytes."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary | {"Ġt": 256, "âĤ": 257}, [("Ġ", "t"), ("â", "Ĥ")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As of Llama 2: a text loses its first space, and bytes are for what has no token."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁t", "t", "h", "e", "▁the", "é", "▁3"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    of_llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(of_llama)
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback(), "toy": load_tokenizer(TOY_MODEL)}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_texts_of_tokens_make_up_the_response(name, data):
    """Of random tokens too, many of which are pieces of characters that never come."""
    tokenizer = TOKENIZERS[name]
    rows = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30), max_size=3))
    rows = [np.array(ids, np.int64) for ids in rows]
    for ids, (text, texts) in zip(rows, token_texts(tokenizer, rows), strict=True):
        assert "".join(texts) == text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert len(texts) == len(ids)


PIECES = {  # (text, its tokens) of "the é€ t漢字😀<|end|>"
    "byte level": [*zip("the é€", (1, 1, 1, 1, 2, 2)), (" t", 1), *zip("漢字😀", (3, 3, 4)), ("<|end|>", 1)],
    "byte fallback": [("", 1), *zip("the é€ t漢字😀", (1, 1, 1, 1, 1, 3, 1, 1, 3, 3, 4)), ("<|end|>", 1)],
}


@pytest.mark.parametrize("name", PIECES)
def test_a_character_of_several_tokens_stands_at_its_last(name):
    ids = TOKENIZERS[name].encode("the é€ t漢字😀<|end|>", add_special_tokens=False)
    [(_, texts)] = token_texts(TOKENIZERS[name], [np.array(ids)])
    assert texts == [text for piece, tokens in PIECES[name] for text in [""] * (tokens - 1) + [piece]]


# ---- which groups, and how they are written ------------------------------------------------------
@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 4), st.randoms())
def test_each_rank_keeps_its_share_of_the_groups_of_lowest_number(ranks, wanted, groups, random):
    kept = []
    for rank in range(ranks):
        numbers = [(step, ranks * n + rank) for step in (9, 10) for n in range(groups)]
        random.shuffle(numbers)
        uids = [f"{step}-{number}" for step, number in numbers for _ in range(2)]
        rows = kept_rows(uids, wanted, World(rank, ranks, None))
        share = math.ceil(max(0, wanted - rank) / ranks)
        assert [uids[row] for row in rows] == [f"{s}-{n}" for s, n in sorted(numbers)[:share] for _ in range(2)]
        kept += rows
        assert sorted(kept_rows(uids, "all", World(rank, ranks, None))) == [*range(len(uids))]
    assert len(kept) == 2 * min(wanted, len(kept) // 2) and (wanted > 2 * groups or len(kept) == 2 * wanted)


def trained_batch():
    batch = rollout_batch([3, 2, 3, 4], [4, 2, 0, 5])
    zeros = torch.zeros(4, 5)
    names = ("token_level_scores", "rollout_log_probs", "log_probs", "entropy", "advantages")
    batch.batch.update({name: zeros.clone() for name in names} | {"loss_mask": batch.batch["response_mask"].bool()})
    columns = {
        "uid": ["1-1", "1-1", "1-0", "1-0"],
        "data_source": ["toy"] * 4,
        "raw_prompt": [[{"role": "user", "content": "half \ud83d of a pair"}]] * 4,
        "reward_model": [{"ground_truth": truth} for truth in ("6", 7, None, ["é", {"a": 1}])],
        "finish_reason": ["stop", "stop", "abort", "length"],
        "reward_extra_info": [{"pred": "\ud83d", "acc": True}, {}, {}, {"why": "é"}],
    }
    batch.non_tensor_batch |= {key: np.fromiter(values, object, count=4) for key, values in columns.items()}
    return batch


def test_values_that_a_file_cannot_hold_as_they_are(tmp_path):
    batch = trained_batch()
    batch.batch["log_probs"][0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    rows = rollouts_table(7, batch, load_tokenizer(TOY_MODEL)).to_pylist()
    assert [row["ground_truth"] for row in rows] == ["6", "7", None, '["é", {"a": 1}]']
    assert json.loads(rows[0]["rewards"])["pred"] == "\ud83d"
    assert rows[3]["rewards"] == '{"why": "é"}' and [row["sample"] for row in rows] == [0, 1, 0, 1]
    assert str(rows[0]["log_probs"][:3]) == "[nan, inf, -inf]" and str(rows[0]["ratio"][:2]) == "[nan, nan]"
    assert rows[2]["response_ids"] == rows[2]["tokens"] == [] and rows[2]["response"] == ""
    assert [row["score"] for row in rows] == [0, 0, None, 0]


def run_in(folder: Path, **flags) -> Run:
    tracker = Tracker(folder, {}, total_steps=9, enabled=False)
    return Run("run", folder, RunArgs(**flags), ValidationArgs(), World(0, 1, torch.device("cpu")), tracker)


def test_one_group_none_and_all(tmp_path):
    for wanted, groups in ((1, ["1-0"] * 2), (0, None), ("all", ["1-0"] * 2 + ["1-1"] * 2)):
        run = run_in(tmp_path / str(wanted), save_rollouts=wanted)
        run.save_rollouts(1, trained_batch(), [], load_tokenizer(TOY_MODEL))
        run.close()
        files = [*(run.folder / "rollouts").glob("*")]
        assert files == ([run.folder / "rollouts/step_000001-rank_0.parquet"] if groups else [])
        if groups:
            assert files[0].stat().st_mode & 0o777 == 0o600
            assert pq.read_table(files[0])["group"].to_pylist() == groups


def test_a_full_disk_is_said_at_the_next_step_and_at_the_end(tmp_path):
    tokenizer, run = load_tokenizer(TOY_MODEL), run_in(tmp_path)
    said = "step_000001-rank_0.parquet: the step's samples could not be written: .*GiB were free.* --save-rollouts 0"
    with full_disk():
        run.save_rollouts(1, trained_batch(), [], tokenizer)
        with one_line(said):
            run.save_rollouts(2, trained_batch(), [], tokenizer)
    with one_line(said):
        run.close()
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_a_run_that_ends_early_has_the_file_of_its_last_step(tmp_path, monkeypatch):
    write = run_module.write_rollouts
    monkeypatch.setattr(run_module, "write_rollouts", lambda *args: (time.sleep(0.3), write(*args)))
    run = run_in(tmp_path)
    run.save_rollouts(1, trained_batch(), [], load_tokenizer(TOY_MODEL))
    run.end_early(interrupted=False)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001-rank_0.parquet"]


BAD_ROWS = {
    "of two processes": b'{"step": 1, "a{"step": 2}',
    "a list": b"[5]",
    "a step that is none": b'{"step": true}',
    "nested": b'{"step": 1, "a": ' + b"[" * 100_000 + b"}",
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_row_that_no_run_has_written_is_said_in_one_line(bad, tmp_path):
    """At a resume, which then has nothing moved; the end of the run, which reads the rows too, adds no error to it."""
    run = run_in(tmp_path)
    run.tracker = Tracker(tmp_path, {}, total_steps=9)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "a": null, "nonfinite": {"a": "nan"}}\n' + BAD_ROWS[bad] + b'\n{"step": 2}\n')
    for read in (lambda: cut_logs(tmp_path, 1), run.tracker.notes, lambda: run.tracker.reread(1)):
        with one_line("metrics.jsonl, line 2: not a row of a run: fix or delete it$"):
            read()
    run.end_early(interrupted=False)
    assert not run.tracker.enabled  # its trackers are closed


def test_samples_of_steps_that_run_again_are_removed_whatever_ranks_wrote_them(tmp_path, capsys):
    files = [rollout_file(tmp_path, step, rank) for step, rank in ((2, 0), (3, 0), (3, 1), (1_000_000, 7))]
    files[0].parent.mkdir()
    for file in files:
        file.write_text(file.name)
    rollout_file(tmp_path, 3, 2).with_suffix(".tmp").write_text("kill -9 in the middle of a file")
    for _ in range(2):
        cut_logs(tmp_path, 2)
        assert [*(tmp_path / "rollouts").iterdir()] == files[:1]
    assert capsys.readouterr().out == "removed what came after step 2: 4 files of rollouts\n"
    cut_logs(tmp_path, 0)  # a start from the start
    assert [*(tmp_path / "rollouts").iterdir()] == []
