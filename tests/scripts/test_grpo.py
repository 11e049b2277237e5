"""grpo.py as a user runs it: processes, both engines, its flags, and every kind of bad input."""

import importlib
import json
import math
import os
import shutil
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import grpo
import remax
from lib import core_algos
from lib.setup import check
from tests.common import (
    FORKSERVER,
    ROOT,
    SMALL,
    TOY_MODEL,
    fork,
    metrics,
    off_policy,
    parse_flags,
    ran,
    skip_without_vllm,
    unexplained_metrics,
    with_slow,
)

# ---- it learns -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The default, cut to 6 of its 60 steps."""
    folder = tmp_path_factory.mktemp("runs")
    done = ran(fork("grpo", folder, "--run-name", "default", "--total-steps", "6", "--save-every", "3"))
    return folder / "default", done.stdout


def test_accuracy_rises_on_held_out_prompts(default_run):
    """6 steps take greedy accuracy from 0.31 to 0.95 where it was measured; 0.8 leaves room for other roundings."""
    accuracy = [
        row["val/toy/arithmetic/mean@1"] for row in metrics(default_run[0]) if "val/toy/arithmetic/mean@1" in row
    ]
    assert len(accuracy) == 3 and 0.2 <= accuracy[0] <= 0.4 and accuracy[-1] >= 0.8


def test_a_run_leaves_what_it_promises(default_run):
    run, printed = default_run
    assert "before" in printed and "after" in printed and str(run / "curve.png") in printed
    assert json.loads((run / "config.json").read_text())["total_steps"] == 6
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 256 and samples[0].keys() >= {"step", "prompt", "response", "score", "ground_truth"}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").chat_template
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(TOY_MODEL).parameters()
    )


def answers_by_vllm(model: Path, prompts: list[list[dict]]) -> list[str]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 28)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=16)
    return [o.outputs[0].text for o in llm.chat(prompts, greedy, use_tqdm=False)]


@pytest.mark.slow
def test_vllm_loads_the_exported_model(default_run):
    skip_without_vllm()
    rows = [json.loads(line) for line in (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:50]]
    with ProcessPoolExecutor(1, FORKSERVER) as elsewhere:
        answers = elsewhere.submit(answers_by_vllm, default_run[0] / "model", [row["prompt"] for row in rows]).result()
    right = [text.endswith("=" + row["reward_model"]["ground_truth"]) for text, row in zip(answers, rows)]
    assert sum(right) >= 40


def test_every_metric_is_explained(default_run):
    assert unexplained_metrics(default_run[0], "metrics.md") == []


def test_every_row_is_accounted_for_and_the_first_update_is_on_policy(default_run):
    """1e-4 nats: the fp32 sampler and the fp32 trainer differ by some 1e-6 (docs/grpo.md)."""
    steps = [row for row in metrics(default_run[0]) if "reward/mean" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    for row in steps:
        dropped = sum(v for k, v in row.items() if k.startswith("training/rows_dropped/"))
        assert row["training/rows_in"] == 256 == row["training/rows_trained"] + dropped
        assert row["rollout/logp_diff_max"] < 1e-4 and row["actor/pg_clipfrac"] == 0


def test_a_run_repeats_itself(tmp_path):
    args = [*SMALL, "--total-steps", "2", "--val-every", "2", "--max-val-samples", "16"]
    for name, seed in (("first", "1"), ("same", "1"), ("other", "2")):
        ran(fork("grpo", tmp_path, *args, "--run-name", name, "--seed", seed))
    first, same, other = (metrics(tmp_path / name) for name in ("first", "same", "other"))
    assert [row["step"] for row in first] == [1, 2, 2] and first == same
    assert other[0]["actor/entropy"] != first[0]["actor/entropy"]


# ---- vLLM ----------------------------------------------------------------------------------------


def test_a_run_with_vllm_trains_on_what_was_sampled(tmp_path):
    """An engine on each of two ranks: tests/servers/test_managed_servers.py. One that is split over them:
    test_scripts.py, tests/model/test_tensor_parallel.py. A second validation set has a limit of its own, above that of
    training."""
    skip_without_vllm()
    lines = (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:32]
    (tmp_path / "long.jsonl").write_text("\n".join(lines).replace('"toy/arithmetic"', '"toy/long"') + "\n")
    scorer = f"{ROOT / 'rewards/arithmetic.py'}:compute_score"
    args = [*SMALL, "--run-name", "run", "--rollout-engine", "vllm", "--total-steps", "2", "--val-every", "2"]
    (tmp_path / "val.jsonl").write_text("\n".join(lines) + "\n")
    args += ["--val-files", str(tmp_path / "val.jsonl"), str(tmp_path / "long.jsonl"), "--val-reward", scorer]
    args += ["--val-kwargs", "max_response_length=16,40", "--val-samples", "1", "2", "--val-temperature", "0", "2"]
    ran(fork("grpo", tmp_path, *args))
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    longest = {row["data_source"]: 0 for row in samples}
    for row in samples:
        tokens = len(tokenizer.encode(row["response"], add_special_tokens=False))
        longest[row["data_source"]] = max(longest[row["data_source"]], tokens)
    assert longest["toy/arithmetic"] <= 16 < longest["toy/long"] <= 40
    rows = metrics(tmp_path / "run")
    assert all(row["rollout/canary_logp_diff"] < 1e-4 for row in rows if "rollout/canary_logp_diff" in row)
    assert all(row["rollout/logp_diff_max"] < 1e-3 for row in rows if "reward/mean" in row)


@pytest.mark.slow
def test_lora_in_bf16_is_corrected_for_what_an_engine_of_its_own_cannot_hold(tmp_path):
    """Not with hf, which samples with the adapters."""
    args = [*SMALL, "--lora-rank", "4", "--compute-dtype", "bfloat16", "--total-steps", "2"]
    ran(fork("grpo", tmp_path, *args, "--run-name", "hf"))
    assert not any("rollout/is_weight" in row for row in metrics(tmp_path / "hf"))
    skip_without_vllm()
    ran(fork("grpo", tmp_path, *args, "--run-name", "vllm", "--rollout-engine", "vllm"))
    for row in metrics(tmp_path / "vllm"):
        assert row["rollout/logp_diff_mean"] > 0 and 0.9 < row["rollout/is_weight"] < 1.1


@pytest.mark.slow
def test_a_sync_that_is_skipped_stops_the_run_at_that_step(tmp_path):
    skip_without_vllm()
    (tmp_path / "skip.py").write_text(
        "import runpy, sys\n"
        "from lib.rollout.vllm_engine import VLLMEngine\n"
        "load = VLLMEngine.load_weights\n"
        "def load_all_but_the_third(engine, model, version):\n"
        "    if version == 2: engine.version = version\n"
        "    else: load(engine, model, version)\n"
        "VLLMEngine.load_weights = load_all_but_the_third\n"
        f"runpy.run_path({str(ROOT / 'grpo.py')!r}, run_name='__main__')\n"
    )
    args = [*SMALL, "--run-name", "run", "--rollout-engine", "vllm", "--total-steps", "4"]
    done = fork(str(tmp_path / "skip"), tmp_path, *args)
    assert done.returncode != 0 and "weight sync to version 2 failed" in done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


# ---- flags ---------------------------------------------------------------------------------------


def test_groups_without_signal_move_nothing(tmp_path):
    """All get the same reward: neither the entropy bonus nor the KL may act on them."""
    (tmp_path / "same.py").write_text("def score(**kwargs):\n    return 1.0\n")
    args = ["--reward", f"{tmp_path / 'same.py'}:score", "--zero-variance", "mask", "--total-steps", "2"]
    args += ["--entropy-coef", "0.1", "--kl-coef", "0.1", "--export-model", "--run-name", "run"]
    done = ran(fork("grpo", tmp_path, *SMALL, *args))
    assert done.stdout.count("| gradient 0 | equal scores in every group") == 2
    assert "note: gradient 0 in 2 of 2 steps\n" in done.stdout
    assert "note: rows dropped by zero_variance: 64 of 64\n" in done.stdout
    for row in metrics(tmp_path / "run"):
        assert row["training/rows_dropped/zero_variance"] == 32 and row["training/rows_trained"] == 0
        assert row["actor/grad_norm"] == 0 and row["actor/loss"] == 0
    after, start = (load_file(Path(path, "model.safetensors")) for path in (tmp_path / "run/model", TOY_MODEL))
    assert all(after[key].equal(start[key]) for key in start)


def two_rewards(folder: Path) -> str:
    """Of which the score, equal for all responses, says nothing."""
    (folder / "two.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None, *, longest):\n"
        "    right = float(solution_str.endswith('=' + ground_truth))\n"
        "    return {'score': 1.0, 'right': right, 'short': -len(solution_str) / longest}\n"
    )
    return f"{folder / 'two.py'}:score"


FLAGS = {
    "gdpo, decoupled, sequence mask, entropy target": (
        lambda t: [
            *f"--adv-estimator gdpo --reward {two_rewards(t)} --adv-kwargs reward_keys=right,short".split(),
            *("--reward-kwargs", '{"longest": 16}'),
            *["--zero-variance", "mask", "--prompt-sampling", "skip:1"],
            *("--loss", "decoupled", *off_policy(t)),
            *["--num-mini-batches", "2", "--token-masks", "off_policy_sequence=0.01"],
            *["--entropy-coef", "0.01", "--entropy-target", "9"],
        ],
        {
            "reward/right/mean": lambda x: 0 < x < 1,
            "reward/short/mean": lambda x: -1 <= x < 0,
            "advantages/mean": lambda x: abs(x) < 1e-6,  # whitened over all tokens, in fp32
            "advantages/max": lambda x: x > 0.5,
            "reward/zero_variance": lambda x: x < 0.5,
            "prompts/skipped": lambda x: x < 0.01,
            "actor/behave_ratio": lambda x: 0.5 < x < 1,
            "training/trained_share": lambda x: 0 < x < 1,
            "actor/entropy_coef": lambda x: x in (0.01, 0.01 + 0.005),
        },
    ),
    "correction: token weights and rejected rows": (
        lambda t: [
            *(*off_policy(t), "--num-mini-batches", "2", "--token-masks", "m2po=0.001"),
            *["--rollout-correction.level", "token", "--rollout-correction.bounds", "0", "2"],
            *["--rollout-correction.reject", "seq_mean_k1=0.95,1.05"],
        ],
        {
            "rollout/is_weight": lambda x: 0.5 < x <= 1,
            "rollout/rejected_rows": lambda x: 0 < x < 1,
            "training/rows_dropped/rollout_correction": lambda x: 0 < x < 32,
            "training/rows_trained": lambda x: 0 < x < 32,
            "training/trained_share": lambda x: 0 < x < 1,
        },
    ),
}


def test_a_truncated_policy_is_on_policy(tmp_path):
    """1e-4 nats as without truncation. Against the whole reference the KL of the first update, policy and reference
    being equal, is minus the log of the probability that was kept, with top-p at most -log(top_p)."""
    args = [*SMALL, "--top-p", "0.8", "--temperature", "1.3", "--total-steps", "2", "--entropy-coef", "0.01"]
    args += ["--kl-coef", "0.1", "--kl-estimator", "k1", "--old-log-probs", "recompute"]
    ran(fork("grpo", tmp_path, *args, "--run-name", "run"))
    rows = metrics(tmp_path / "run")
    assert 0.001 < rows[0]["actor/ref_kl"] < 0.223
    for row in rows:
        assert row["rollout/logp_diff_max"] < 1e-4 and row["actor/pg_clipfrac"] == row["rollout/outside_top_p"] == 0
        assert 0 < row["actor/entropy"] < math.log(9) and row["actor/grad_norm"] > 0


@pytest.mark.parametrize("case", FLAGS)
def test_flags_do_what_they_say(tmp_path, case):
    make, expected = FLAGS[case]
    ran(fork("grpo", tmp_path, *SMALL, *make(tmp_path), "--total-steps", "2", "--run-name", "run"))
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert {key: row[key] for key, holds in expected.items() if not holds(row[key])} == {}
        assert row["actor/grad_norm"] > 0


def test_the_reward_model_is_added_to_the_scorer(tmp_path):
    (tmp_path / "two.py").write_text("def score(**kwargs):\n    return 2.0\n")
    judge = tmp_path / "judge"  # the toy policy with a random head of one output
    AutoModelForSequenceClassification.from_pretrained(TOY_MODEL, num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(TOY_MODEL).save_pretrained(judge)
    args = ["--reward", f"{tmp_path / 'two.py'}:score", "--reward-model", str(judge), "--reward-model-coef", "0.5"]
    ran(fork("grpo", tmp_path, *SMALL, *args, "--total-steps", "1", "--run-name", "run"))
    [row] = metrics(tmp_path / "run")
    assert row["reward/mean"] == pytest.approx(2 + 0.5 * row["reward/reward_model/mean"])
    assert row["reward/min"] < row["reward/max"] and row["actor/grad_norm"] > 0


GRADIENTS = """
import hashlib, os, random, sys

if "torch" in sys.modules:  # the trainer, which imports this file to check it
    from torch.optim import optimizer

    def write(adam, *_):
        grads = [p.grad for group in adam.param_groups for p in group["params"] if p.grad is not None]
        digest = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in grads)).hexdigest()
        with open(os.environ["GRADIENTS"], "a") as file:
            file.write(f"{len(grads)} {digest}\\n")

    optimizer.register_optimizer_step_pre_hook(write)

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.count("1")) + random.random()

def shadow(data_source, solution_strs, ground_truth, extra_info=None):
    if random.random() < 0.5:
        raise ValueError("half of the groups")
    return [random.random() for _ in solution_strs]
"""


@pytest.mark.parametrize("workers", with_slow(["2", "0"], "0"))
def test_gradients_are_bit_identical_with_and_without_a_shadow_reward(tmp_path, monkeypatch, workers):
    file = tmp_path / "mine.py"
    # without workers an exception ends the run
    file.write_text(GRADIENTS if workers == "2" else GRADIENTS.replace("< 0.5", "< 0"))
    args = [*SMALL, "--total-steps", "2", "--num-mini-batches", "2", "--reward", f"{file}:score"]
    rows, gradients = {}, {}
    for name, more in {"plain": [], "shadowed": ["--shadow-reward", f"{file}:shadow"]}.items():
        monkeypatch.setenv("GRADIENTS", str(tmp_path / name))
        ran(fork("grpo", tmp_path, *args, *more, "--reward-workers", workers, "--run-name", f"run-{name}"))
        rows[name], gradients[name] = metrics(tmp_path / f"run-{name}"), (tmp_path / name).read_text().splitlines()
    assert gradients["plain"] == gradients["shadowed"] and len(set(gradients["plain"])) == 4
    for plain, shadowed in zip(rows["plain"], rows["shadowed"], strict=True):
        logged = {key: value for key, value in shadowed.items() if key.startswith("shadow/")}
        assert 0 < logged["shadow/mine.shadow/mean"] < 1 and abs(logged["shadow/mine.shadow/correlation"]) < 1
        assert (logged["shadow/error_count"] > 0) == (workers == "2") and shadowed["reward/error_count"] == 0
        clocks = ("timing_", "perf/")
        same = [{k: v for k, v in row.items() if not k.startswith((*clocks, "shadow/"))} for row in (plain, shadowed)]
        assert same[0] == same[1]


# ---- bad input: one line, exit code 2, nothing written -------------------------------------------


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {
    "prompt": [{"role": "user", "content": "123+456"}],
    "data_source": "toy/arithmetic",
    "reward_model": {"ground_truth": "579"},
}


def model_folder(path: Path, *, weights: bool = True, template: bool = True) -> str:
    shutil.copytree(TOY_MODEL, path)
    if not weights:
        (path / "model.safetensors").unlink()
    if not template:
        (path / "chat_template.jinja").unlink()
    return str(path)


@pytest.mark.parametrize("seed", range(5))
def test_the_scripts_loss_is_the_librarys(seed):
    """To the last bit, with gradients: grpo.py writes out what lib/core_algos has as `vanilla`."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(6, 9, generator=generator) * 3
    new = (old + torch.randn(6, 9, generator=generator)).requires_grad_()
    mask = (torch.rand(6, 9, generator=generator) < 0.8).long()
    t = {"advantages": torch.randn(6, 9, generator=generator) * mask, "response_mask": mask}
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
    ours, our_metrics = grpo.policy_loss(grpo.Args(**clips), new, old, t)
    names = {"cliprange_low": 0.1, "cliprange_high": 0.3, "clip_ratio_c": 1.5}
    theirs, their_metrics = core_algos.named_policy_loss("vanilla", names, old, new, t)
    assert torch.equal(ours * mask, theirs * mask) and ours.unique().numel() > 20
    for name, values in their_metrics.items():
        assert torch.equal(our_metrics[name] * mask, values * mask), name
    gradients = [torch.autograd.grad((losses * mask).sum(), new)[0] for losses in (ours, theirs)]
    assert torch.equal(*gradients)


def rewards_with_dead_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(rewards, NaN where the mask is 0; valid_mask; columns) of 5 groups of up to 4 rows, some of them without a valid
    token, one group with equal rewards and one with a single valid row."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(17, 6, generator=g) < 0.7
    mask[torch.tensor([1, 5])] = False
    group = torch.arange(17) // 4
    rewards = torch.randint(0, 3, (17, 6), generator=g).float()
    rewards[8:12] = mask[8:12] / mask[8:12].sum(1, keepdim=True).clamp(min=1)  # each row sums to 1, or to 0 if dead
    baselines = torch.randn(17, generator=g)
    return torch.where(mask, rewards, torch.nan), mask, {"group": group, "reward_baselines": baselines}


@pytest.mark.parametrize("singleton", ["raw", "zero"])
@pytest.mark.parametrize("script", ["grpo", "dapo"])
@pytest.mark.parametrize("seed", range(3))
def test_the_scripts_advantages_equal_the_loop(script, singleton, seed):
    """Against sums over rows in float64; and to the last bit what lib/core_algos computes."""
    rewards, mask, t = rewards_with_dead_rows(seed)
    module = importlib.import_module(script)
    advantages, returns = module.grpo_advantages(module.Args(adv_kwargs=(f"singleton={singleton}",)), rewards, mask, t)
    # thirds add up to 1 but for the rounding of float32, and such scores are equal
    scores = {i: round(sum(rewards[i, mask[i]].double().tolist()), 6) for i in range(17) if mask[i].any()}
    for i in range(17):
        others = [score for j, score in scores.items() if t["group"][j] == t["group"][i]]
        expected = 0.0
        if i in scores and len(others) == 1:
            expected = scores[i] / (1 + 1e-6) if singleton == "raw" else 0.0
        elif i in scores:
            expected = (scores[i] - statistics.mean(others)) / (statistics.stdev(others) + 1e-6)
        # rounded to float32; equal scores give exactly 0
        assert advantages[i].tolist() == pytest.approx([expected * valid for valid in mask[i].tolist()], rel=1e-6)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, t["group"], singleton=singleton)
    assert torch.equal(advantages, theirs) and advantages is returns


@pytest.mark.parametrize("seed", range(3))
def test_remax_advantages_equal_the_loop(seed):
    rewards, mask, t = rewards_with_dead_rows(seed)
    advantages, returns = remax.remax_advantages(rewards, t["reward_baselines"], mask)
    for i, row in enumerate(mask):
        for at in range(6):
            to_go = sum(rewards[i, k].item() for k in range(at, 6) if row[k])
            expected = to_go - t["reward_baselines"][i].item() if row[at] else 0.0
            assert advantages[i, at].item() == pytest.approx(expected, rel=1e-6)  # rounded to float32
            assert returns[i, at].item() == pytest.approx(to_go if row[at] else 0.0, rel=1e-6)
    theirs = core_algos.compute_remax_outcome_advantage(rewards, t["reward_baselines"], mask)
    assert torch.equal(advantages, theirs[0]) and torch.equal(returns, theirs[1])
    with pytest.raises(ValueError, match="one number a row"):
        core_algos.compute_remax_outcome_advantage(rewards, torch.ones(17, 1), mask)


@pytest.mark.parametrize("flags", [[], ["--rollout-correction.level", "measure"]])
@pytest.mark.parametrize("loss", ["decoupled", "vanilla"])
def test_the_importance_weight_is_in_the_gradient_once(loss, flags):
    """With --async-level, against the gradient written out in float64: the loss itself has the weight min(pi_old /
    pi_rollout, cap), or the correction has, unless it only measures. The clip is out of reach."""
    flags = ["--rollout-engine", "http://127.0.0.1:1", "--async-level", "1", "--loss", loss, *flags]
    args = parse_flags(grpo.Args, flags)
    correction = check(args, torch.device("cpu")).correction
    g = torch.Generator().manual_seed(0)
    old, drift, advantages = torch.randn(3, 4, 5, generator=g, dtype=torch.float64)
    new = (old + 0.01).requires_grad_()
    t = {"advantages": advantages, "response_mask": torch.ones(4, 5), "rollout_log_probs": old - drift}
    losses, _ = grpo.policy_loss(args, new, old, t)
    if correction:
        weights, *_ = core_algos.compute_rollout_correction(
            old, t["rollout_log_probs"], t["response_mask"], **correction
        )
        losses = losses if weights is None else losses * weights
    cap = {"decoupled": 5, "vanilla": math.inf if correction.get("level", "") is None else 2}[loss]
    weight = torch.ones(4, 5) if cap == math.inf else drift.exp().clamp(max=cap)
    expected = -advantages * math.exp(0.01) * weight
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), new)[0], expected.double(), rtol=1e-12, atol=0)


NO_VALIDATION = ["--val-files", "none"]


def trained_on(folder: Path, row: dict, *flags: str) -> list[str]:
    return ["--train-files", write(folder / "a.jsonl", row), *NO_VALIDATION, *flags]


BAD_INPUT = {  # beside the flags of tests/cli/test_args.py
    "missing column": (lambda t: trained_on(t, {"data_source": "x"}), "no column 'prompt'"),
    "no row left": (lambda t: trained_on(t, ROW, "--max-prompt-length", "3"), "too long for max_prompt_length=3"),
    "prompt too long": (
        lambda t: ["--overlong-prompts", "error", "--max-prompt-length", "3"],
        "max_prompt_length=3",
    ),
    "no scorer": (lambda t: trained_on(t, ROW | {"data_source": "mine"}), "no scorer for data_source 'mine'"),
    "no ground truth": (
        lambda t: [
            *("--val-files", write(t / "a.jsonl", ROW, ROW | {"reward_model": {"style": "rule"}}), "--val-every", "1")
        ],
        "a.jsonl row 1: 'reward_model' has no 'ground_truth'",
    ),
    "turns without a chat template": (
        lambda t: ["--model", model_folder(t / "m", template=False), "--multi-turn.tools", "calculator"],
        "turns need a chat template",
    ),
    "an agent without a chat template": (
        lambda t: ["--model", model_folder(t / "m", template=False), "--agent", "true"],
        "turns need a chat template",
    ),
    "an agent and images": (
        lambda t: ["--model", str(ROOT / "data/toy_vision/model"), "--agent", "true"],
        "--agent takes text only, and --model",
    ),
    "no such agent": (lambda t: ["--agent", "absent.py:solve"], "--agent absent.py:solve: there is no such file"),
    "no weights": (lambda t: ["--model", model_folder(t / "m", weights=False)], "no weights"),
    "estimator without the parameter": (
        lambda t: ["--adv-kwargs", "gamma=1"],
        "grpo takes no gamma, only epsilon, singleton",
    ),
    "entropy coefficient": (lambda t: ["--entropy-target", "0.2", "--entropy-coef", "-0.5"], "coef in 0..1"),
    "covariances between no bounds": (
        lambda t: ["--loss", "clip_cov", "--loss-kwargs", "cov_bounds=5,1"],
        "cov_bounds=5,1: give LOW,HIGH, LOW below HIGH",
    ),
    "a correction's bounds": (lambda t: ["--rollout-correction.bounds", "2", "3"], "needs bounds on r"),
    "images for a text model": (
        lambda t: ["--vision-kwargs", "max_images=2"],
        "--vision-kwargs has no effect without a --model that",
    ),
    "keyword of no template": (
        lambda t: ["--chat-template-kwargs", '{"enable_thinkin": true}'],
        "--chat-template-kwargs: the model's template does not read enable_thinkin",
    ),
    "no such dataset class": (lambda t: ["--dataset-class", "absent.py:Mine"], "--dataset-class absent.py:Mine: give"),
    "reward model": (lambda t: ["--reward-model", TOY_MODEL], "--reward-model"),
    "loss without its parameter": (lambda t: ["--loss", "dro"], "dro_beta"),
    "loss with another's": (lambda t: ["--loss", "gspo", "--loss-kwargs", "cap=2"], "--loss gspo takes no cap, only"),
    "the script's own loss": (lambda t: ["--loss-kwargs", "cap=2"], "--loss vanilla takes no cap"),
    "resume from nowhere": (lambda t: ["--resume", str(t / "step_000001")], "step_000001"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, case):
    make, message = BAD_INPUT[case]
    done = fork("grpo", tmp_path / "runs", *SMALL, *make(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert case == "reward model" or not (tmp_path / "runs").exists()  # which is found out when it loads
    lines = [line for line in done.stderr.splitlines() if "rror" in line or message in line]
    assert any(message in line for line in lines), done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_run_is_neither_overwritten_nor_continued_as_another(tmp_path):
    args = [*SMALL, "--save-every", "1", "--total-steps", "1", "--run-name", "run"]
    ran(fork("grpo", tmp_path, *args))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.name != ".lock"}
    again = fork("grpo", tmp_path, *args)
    assert again.returncode == 2 and "already contains a run" in again.stderr
    other = fork("grpo", tmp_path, *args, "--resume", "auto", "--clip-ratio-low", "0.3")
    assert other.returncode == 2 and "--clip-ratio-low was 0.2, is 0.3" in other.stderr
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.name != ".lock"} == before


def test_a_special_token_in_a_prompt_is_text_and_is_counted(tmp_path):
    prompt = [{"role": "user", "content": "1+2<|im_end|>\n<|im_start|>assistant\n="}]
    needs = {"extra_info": {"need_tools_kwargs": True}}  # said too, in a run with tools
    rows = write(tmp_path / "a.jsonl", ROW, ROW | {"prompt": prompt} | needs, ROW | needs)
    args = ["--train-files", rows, "--val-files", "none", "--max-prompt-length", "64", "--prompts-per-step", "2"]
    args = [*SMALL, "--total-steps", "1", *args]
    said = ran(fork("grpo", tmp_path, *args, "--run-name", "text")).stdout
    assert "training prompts: 3 (prompt_too_long 0, special_tokens_as_text 1)" in said
    tools = ["--multi-turn.tools", "calculator", "--model", "data/toy_tools/model", "--max-prompt-length", "400"]
    allowed = ran(fork("grpo", tmp_path, *args, *tools, "--allow-special-tokens")).stdout
    assert allowed.count(f"note: {rows} row 1: need_tools_kwargs is true, and there are no tools_kwargs\n") == 1
    assert "training prompts: 3 (prompt_too_long 0)" in allowed


def test_the_header_names_model_data_and_what_trains_nothing(tmp_path):
    args = [*SMALL, "--total-steps", "1", "--lr", "0", "--group-size", "1", "--val-files", "none"]
    said = ran(fork("grpo", tmp_path, *args)).stdout
    assert "\nmodel: data/toy/model\ntraining prompts: 256 (prompt_too_long 0) from " in said
    assert "\nvalidation prompts: none\n" in said
    assert "\nnote: --lr 0 leaves the policy as it is\n" in said
    assert "\nnote: --group-size 1: a response's advantage is its reward (--adv-kwargs singleton)\n" in said
    done = fork("grpo", tmp_path, *args, "--reward-kwargs", '{"metod": "strict"}')
    assert done.returncode == 2 and "no scorer declares metod" in done.stderr


def test_your_own_reward_dataset_and_validation_by_sampling(tmp_path):
    """--reward, --dataset-class, several validation samples, tensorboard and wandb."""
    (tmp_path / "mine.py").write_text(
        "from lib.data import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    pass\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    score = float(solution_str.endswith(ground_truth))\n"
        "    return {'score': score, 'pred': solution_str, 'chars': len(solution_str)}\n"
    )
    val = write(tmp_path / "val.jsonl", *[json.loads(x) for x in (ROOT / "data/toy/val.jsonl").open().readlines()[:10]])
    args = ["--run-name", "run", "--reward", f"{tmp_path / 'mine.py'}:score", "--val-files", val]
    args += ["--dataset-class", f"{tmp_path / 'mine.py'}:Mine", "--val-samples", "4", "--val-temperature", "1"]
    args += ["--total-steps", "1", "--track", "tensorboard", "wandb"]
    ran(fork("grpo", tmp_path, *SMALL, *args, "--val-every", "1"))
    train, val_row = metrics(tmp_path / "run")
    assert train["reward/chars/mean"] > 0
    assert {
        f"val/toy/arithmetic/{m}"
        for m in ("mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "best@4", "chars/mean@4", "clip_ratio")
    } <= val_row.keys()
    assert list((tmp_path / "run/tensorboard").iterdir()) and list((tmp_path / "run").glob("wandb*"))


PLUS_MINUS = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth) % 3 == 0:
        raise ValueError("no score")
    right = solution_str.endswith("=" + ground_truth)
    return {"score": 1 if right else -1, "acc": right, "mean": 7}
"""


def test_validation_shows_accuracy_and_what_is_unscored(tmp_path):
    """Against samples.jsonl. An unscored response counted as 0 would raise the mean of scores around -0.4."""
    (tmp_path / "mine.py").write_text(PLUS_MINUS)
    args = ["--val-only", "--val-reward", f"{tmp_path / 'mine.py'}:score", "--max-response-length", "6"]
    rows = [json.loads(line) for line in (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:64]]
    args += ["--val-temperature", "1", "--val-files", write(tmp_path / "val.jsonl", *rows)]
    done = ran(fork("grpo", tmp_path, *args, "--run-name", "run"))
    [row] = metrics(tmp_path / "run/val_only/1")
    samples = [json.loads(line) for line in (tmp_path / "run/val_only/1/samples.jsonl").read_text().splitlines()]
    assert [s["score"] is None for s in samples] == [int(s["ground_truth"]) % 3 == 0 for s in samples]
    scores = [s["score"] for s in samples if s["score"] is not None]
    name = "val/toy/arithmetic"
    assert row[f"{name}/mean@1"] == pytest.approx(sum(scores) / len(scores)) and row[f"{name}/mean@1"] < 0
    assert row[f"{name}/acc/mean@1"] == row[f"{name}/pass@1"] == pytest.approx(scores.count(1) / len(scores))
    assert row[f"{name}/mean/mean@1"] == 7 and 0 < row[f"{name}/clip_ratio"] < 1
    assert row["val/unscored"] == row[f"{name}/unscored"] == len(samples) - len(scores) > 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("step 0/")]
    shown = f"{name}/acc/mean@1 {row[f'{name}/acc/mean@1']:.3f} | unscored in validation: {row['val/unscored']:.0f}"
    assert line.partition(" | ")[2] == shown
