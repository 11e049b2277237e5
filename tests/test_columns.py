"""The table of columns: batches of all scripts have its names, shapes and dtypes; the code names no others."""

import re

import pytest
import torch

import grpo
from lib.columns import COLUMNS, Column, page
from lib.data import gather_rows
from lib.data_proto import DataProto
from lib.distributed import World
from lib.log.rollouts import rollouts_table, taken_out
from lib.model import load_tokenizer
from lib.rollout import fit_columns
from lib.setup import read_columns
from planner.estimate import gathered_bytes_per_token
from tests.common import ROOT, SMALL, TOY_MODEL, fork, parse_flags, ran, run_ranks
from tests.log.test_rollouts import TOOLS, trained_batch

SAVE_BATCH = """
from pathlib import Path
import torch
from lib.data import RLHFDataset as Rows
from lib.log.rollouts import add_outputs
from lib.run.run import Run

def save(self, step, batch, outputs, tokenizer):
    add_outputs(batch, outputs)
    kinds = {key: type(values[0]).__name__ for key, values in batch.non_tensor_batch.items()}
    torch.save((dict(batch.batch.items()), kinds), Path(__file__).with_name("batch.pt"))

Run.save_rollouts = save
"""
OTHERS = "--adv-estimator optimal_token_baseline --rollout-correction.level token --loss clip_cov"
WITH_TOOLS = " ".join([*TOOLS, "--prompt-sampling skip --adv-estimator gigpo"])
CASES = {  # flags that add columns, and some of these
    "grpo": (OTHERS, "squared_score"),
    "ppo": ("--loss kl_cov", "values ref_log_prob cov_pick"),
    "remax": ("--kl-coef 0.01", "reward_baselines ref_log_prob"),
    "dapo": ("--overlong-filtering", "truncated is_fresh policy_version"),
    "grpo with tools": (WITH_TOOLS, "turn_rewards anchor_states turn_numbers num_turns data_row"),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_of_a_step_are_in_the_table(case, tmp_path):
    (tmp_path / "rows.py").write_text(SAVE_BATCH)
    flags, expected = CASES[case]
    args = ["--total-steps", "1", "--dataset-class", f"{tmp_path}/rows.py:Rows", "--run-name", "run"]
    ran(fork(case.split()[0], tmp_path, *SMALL, *flags.split(), *args))
    tensors, kinds = torch.load(tmp_path / "batch.pt")
    assert {*expected.split()} <= {*tensors, *kinds} <= {*COLUMNS}
    sizes = {"B": len(tensors["prompts"]), "P": tensors["prompts"].shape[1], "T": tensors["responses"].shape[1]}
    sizes |= {"L": sizes["P"] + sizes["T"], "4": 4}
    for name, tensor in tensors.items():
        shapes = [tuple(sizes[size] for size in shape.split(", ")) for shape in COLUMNS[name].shape.split(" or ")]
        assert tensor.shape in shapes, name
        assert str(tensor.dtype) == f"torch.{COLUMNS[name].dtype}", name
    for name, kind in kinds.items():
        assert COLUMNS[name].dtype in (kind, "object"), name


def test_code_reads_columns_of_the_table():
    of_batch = re.compile(r'\b(?:batch|non_tensor_batch|micro|t)(?:\.get\(|\[)"(\w+)"')
    others = {"rank", "_lengths", "scores", "ratio"}  # of two exchanges, a reward model's answers, the samples
    scripts = [ROOT / f"{name}.py" for name in ("grpo", "ppo", "remax", "dapo")]
    files = [*scripts, *(p for room in ("lib", "agent", "servers", "planner") for p in (ROOT / room).rglob("*.py"))]
    for file in files:
        text = file.read_text().replace("rows", "t") if file in scripts else file.read_text()
        unknown = {*of_batch.findall(text)} - {*COLUMNS} - others
        assert not unknown, f"{file}: {unknown}: not in lib/columns.py"


READ = {  # what a run declares, besides the columns that are always gathered
    "": "",
    "--adv-estimator optimal_token_baseline": "squared_score",
    "--adv-estimator rloo --kl-coef 0.1 --kl-placement reward": "old_log_probs ref_log_prob",
    "--kl-coef 0.1": "",
    "--rollout-correction.level token --token-masks top_entropy=0.5": "rollout_log_probs old_log_probs entropys",
    "--loss clip_cov": "old_log_probs",
}


@pytest.mark.parametrize("flags", READ)
def test_estimator_correction_masks_and_kl_declare_what_they_read(flags):
    args = parse_flags(grpo.Args, flags.split())
    names, _ = read_columns(args, args.rollout_correction.settings(), updates_per_step=1)
    assert [*names] == READ[flags].split()
    default = parse_flags(grpo.Args, [])
    assert gathered_bytes_per_token(args) == gathered_bytes_per_token(default) + 4 * len(names)


def gathered(world: World, batch: DataProto, *names: str) -> dict[str, torch.Tensor]:
    return gather_rows(batch[2 * world.rank : 2 * world.rank + 2], names)


def test_only_columns_that_are_read_are_gathered():
    batch = trained_batch()
    t = batch.batch
    always = {"response_mask": t["response_mask"].bool(), "token_level_scores": t["token_level_scores"]}
    always |= {"row": torch.arange(4), "group": torch.tensor([1, 1, 0, 0])}
    for names in ((), ("rollout_log_probs",)):
        expected = always | {name: batch.batch[name] for name in names}
        for t in run_ranks(2, gathered, batch, *names):
            assert t.keys() == expected.keys() and all(t[name].equal(expected[name]) for name in t)


def test_a_line_of_the_table_pads_gathers_and_saves_a_column(monkeypatch):
    of_tokens = Column("teacher", "B, T", "float32", "", "", "always", ": float", -7)
    of_candidates = Column("top_k", "B, T, K", "float32", "", "", "always", fill=-7)
    for column in (of_tokens, of_candidates, Column("lr", "B", "float32", "", saved=": float")):
        monkeypatch.setitem(COLUMNS, column.name, column)
    batch = trained_batch()  # its responses have 4, 2, 0 and 5 tokens
    batch.batch["teacher"], batch.batch["lr"] = torch.rand(4, 5), torch.rand(4)
    batch.batch["top_k"] = torch.stack([batch.batch["teacher"]] * 3, -1)
    narrow = batch[:2].select(["attention_mask", "prompts", "responses", "response_mask", "teacher", "top_k"], [])
    narrow.batch.update({name: narrow.batch[name][:, :-1] for name in narrow.batch.keys() - {"prompts"}})
    fitted, _ = fit_columns([narrow, batch])
    assert fitted.batch["teacher"].equal(torch.cat([batch.batch["teacher"][:2, :4], torch.full((2, 1), -7.0)], 1))
    assert fitted.batch["top_k"].equal(torch.stack([fitted.batch["teacher"]] * 3, -1))
    assert run_ranks(2, gathered, batch)[0]["teacher"].equal(batch.batch["teacher"])
    rows = rollouts_table(1, taken_out(batch, [0, 1, 2, 3]), load_tokenizer(TOY_MODEL)).to_pylist()
    for row, teacher, lr, n in zip(rows, batch.batch["teacher"], batch.batch["lr"], (4, 2, 0, 5)):
        assert row["teacher"] == teacher[:n].tolist() and row["lr"] == lr.item()


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/columns.md").read_text() == page(), "python -m lib.columns"
