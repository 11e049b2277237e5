"""Metrics against brute force, by hand, and on 1 versus 2 forked gloo ranks."""

import math
from itertools import combinations

import numpy as np
import psutil
import pytest
import torch

from lib.data_proto import DataProto
from lib.distributed import (
    Max,
    Mean,
    Min,
    Std,
    Sum,
    add_metrics,
    reduce_metrics,
    start_step,
    step_timing,
    timed,
    token_means,
)
from lib.log import data_metrics, extra_metrics, mismatch_metrics, row_metrics
from lib.log.alerts import alerts_of_run, alerts_of_step
from lib.log.metrics import merge_metrics, peak_tflops, throughput_metrics
from lib.run.validation import (
    Validated,
    best_at_k,
    confidence_interval,
    maj_at_k,
    pass_at_k,
    validated_rows,
    validation_metrics,
)
from tests.common import one_line, run_ranks

# ---- pass@k and maj@k ----------------------------------------------------------------------------


def majority_by_hand(preds, scores, subset):
    by_answer = {}
    for i in subset:
        if preds[i] is not None:
            by_answer.setdefault(preds[i], []).append(scores[i])
    most = max(map(len, by_answer.values()), default=0)
    leaders = [np.mean(s) for s in by_answer.values() if len(s) == most]
    return np.mean(leaders or [scores[i] for i in subset])


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_best_and_maj_at_k_are_means_over_all_subsets(n):
    rng = np.random.default_rng(n)
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        for right in range(n + 1):
            expected = np.mean([min(subset) < right for subset in subsets])
            assert pass_at_k(n, right, k) == pytest.approx(expected, rel=1e-14, abs=1e-15)
        for _ in range(4):
            scores = rng.normal(size=n).round(1).tolist()
            preds = [["7", "8", "9", None][i] for i in rng.integers(0, 4, n)]
            best = np.mean([max(scores[i] for i in subset) for subset in subsets])
            assert best_at_k(scores, k) == pytest.approx(best, rel=1e-12, abs=1e-15)
            majority = np.mean([majority_by_hand(preds, scores, subset) for subset in subsets])
            assert maj_at_k(preds, scores, k) == pytest.approx(majority, rel=1e-12, abs=1e-15)


def test_estimators_do_not_overflow():
    exact = 1 - math.comb(9_990, 5_000) / math.comb(10_000, 5_000)
    assert pass_at_k(10_000, 10, 5_000) == pytest.approx(exact, rel=1e-12)
    assert best_at_k(list(range(2000)), 1000) == pytest.approx(1000 * 2001 / 1001 - 1)


def test_an_answer_is_whatever_json_holds_but_an_empty_text():
    assert maj_at_k(["7", "", ""], [1, 0, 0], 3) == 1.0  # verl's scorers write no answer so
    assert maj_at_k([[1, 2], [1, 2], {"a": 1}], [1, 1, 0], 3) == 1.0


def test_maj_at_k_samples_many_subsets():
    rng = np.random.default_rng(1)
    preds = [str(i) for i in rng.integers(0, 3, 14)]
    scores = [float(pred == "1") for pred in preds]
    exact = maj_at_k(preds, scores, 7, max_subsets=10**6)
    sampled = maj_at_k(preds, scores, 7, max_subsets=1000)
    assert sampled == maj_at_k(preds, scores, 7, max_subsets=1000)
    assert sampled != exact and abs(sampled - exact) < 4 * 0.5 / math.sqrt(1000)


# ---- validation ----------------------------------------------------------------------------------
def validated(sources, prompts, scores, answers=None, truncated=None, **keys) -> list[Validated]:
    """Rows of these columns; a score of None is a response without one, a key of None one that its scorer left out."""
    rows = []
    for i, score in enumerate(scores):
        numbers = {"score": score} | {key: column[i] for key, column in keys.items()}
        numbers = {} if score is None else {key: x for key, x in numbers.items() if x is not None}
        answer, cut = answers[i] if answers else None, bool(truncated[i]) if truncated else False
        rows.append(Validated(prompts[i], sources[i], numbers, answer, cut))
    return rows


def flat(groups: dict[str, dict]) -> dict:
    return {f"{group}/{name}": value for group, numbers in groups.items() for name, value in numbers.items()}


def without_intervals(metrics: dict) -> dict:
    return {key: value for key, value in metrics.items() if "/ci_" not in key and not key.endswith("/lower_bound")}


def test_validation_metrics_by_hand():
    sources = ["a", "b", "a", "a", "b", "a"]  # rows of prompts are interleaved; "b" has one sample a prompt
    prompts = [0, 1, 2, 0, 3, 2]
    scores = [1.0, 1.0, 0.0, 0.0, 0.5, 0.0]
    answers = ["1", "1", None, None, "2", "3"]
    cut, given = [1, 0, 0, 0, 1, 0], [1, None, 1, 0, None, 1]
    metrics = validation_metrics(validated(sources, prompts, scores, answers, cut, format=given))
    of_a = {"unscored": 0, "clip_ratio": 0.25, "mean@2": 0.25, "best@2": 0.5}
    of_a |= {"pass@1": 0.25, "pass@2": 0.5, "maj@1": 0.25, "maj@2": 0.5}
    # of those that voted, where the other has no answer
    of_format = {"mean@2": 0.75, "best@2": 1.0, "maj@1": 0.75, "maj@2": 1.0}
    of_b = {"unscored": 0, "clip_ratio": 0.5, "mean@1": 0.75, "maj@1": 0.75, "pass@1": 0.5}  # 0.5 is not above 0.5
    expected = {"val": {"unscored": 0}, "val/a": of_a, "val/a/format": of_format, "val/b": of_b}
    assert without_intervals(metrics) == flat(expected)
    ends = tuple(metrics[f"val/a/mean@2/ci_{end}"] for end in ("low", "high"))
    assert ends == confidence_interval([[1.0, 0.0], [0.0, 0.0]])
    rows = validated(sources, prompts, scores)
    assert validation_metrics(rows, correct_above=0.4)["val/b/pass@1"] == 1.0
    without_answers = validation_metrics(validated(sources, prompts, scores, [None, "", "", None, "2", None]))
    assert {key for key in without_answers if "maj" in key} == {"val/b/maj@1"}
    three = validation_metrics(validated(["a"] * 3, [0] * 3, [1, 0, 0]))
    assert [key for key in three if "pass" in key] == ["val/a/pass@1", "val/a/pass@2", "val/a/pass@3"]
    with pytest.raises(ValueError, match=r"a: prompts with \[1, 2\] samples"):
        validation_metrics(validated(["a"] * 3, [0, 0, 1], [1, 0, 0]))


@pytest.mark.parametrize("key", ["acc", "math_dapo.compute_score/acc"])
def test_what_a_scorer_calls_acc_is_the_accuracy(key):
    """math_dapo's scores are 1 and -1: their mean is no accuracy, and its -1 is as wrong as another's 0."""
    scores, acc, answers = [1.0, -1.0, -1.0, 5.0], [1, 0, 0, 0], ["7", "8", "8", "9"]
    metrics = validation_metrics(validated(["aime"] * 4, [0, 0, 1, 1], scores, answers, **{key: acc}))
    assert metrics["val/aime/mean@2"] == 1.0 and metrics["val/aime/maj@2"] == 1.0
    assert metrics[f"val/aime/{key}/mean@2"] == 0.25 and metrics[f"val/aime/{key}/maj@2"] == 0.25
    assert metrics[f"val/aime/{key}/best@2"] == metrics["val/aime/pass@2"] == 0.5  # not the 5
    assert [name for name in metrics if name.endswith("ci_low")] == [f"val/aime/{key}/mean@2/ci_low"]


def test_unscored_responses_are_in_no_number_but_their_own():
    """Left out they lower no mean, and raise none of negative scores; a prompt without a score is not there at all."""
    scores = [-1.0, -1.0, None, None, 1.0, None]
    answers, truncated = ["7", "7", "8", "8", "9", None], [1, 0, 1, 1, 0, 1]
    metrics = validation_metrics(validated(["a"] * 6, [0, 0, 1, 1, 2, 2], scores, answers, truncated))
    of_a = {"unscored": 3, "clip_ratio": 1 / 3, "mean@2": 0.0, "maj@1": 0.0, "pass@1": 0.5}
    of_a |= {"best@2": -1.0, "maj@2": -1.0, "pass@2": 0.0}  # of the prompt that has two
    assert without_intervals(metrics) == flat({"val": {"unscored": 3}, "val/a": of_a})
    nothing = validation_metrics(validated(["a"] * 2, [0, 1], [None, None]))
    assert nothing == {"val/unscored": 2, "val/a/unscored": 2}


def test_validated_rows_take_what_a_scorer_gave():
    batch = batch_of([row("a", -1.0, 2, 6, 6, "length"), row("a", 2.0, 2, 3, 3), row("b", 5.0, 2, 3, 0)])
    batch.non_tensor_batch["data_source"] = np.array(["x", "y", "x"], dtype=object)
    extras = {"pred": [3, None, "4"], "acc": [True, 0.5, 1], "text": ["a", "b", "c"], "big": [10**400, math.nan, 1]}
    assert validated_rows(batch, extras, [4, 4, 5]) == [
        Validated(4, "x", {"score": -1.0, "acc": 1.0}, 3, True),
        Validated(4, "y", {"score": 2.0, "acc": 0.5}, None, False),
        Validated(5, "x", {}, "4", False),
    ]


# ---- the batch of a step -------------------------------------------------------------------------
def batch_of(rows: list[dict]) -> DataProto:
    """Rows of {uid, score, prompt, response, trained, finish, advantage} (lengths in tokens), P = 4, T = 6. The KL
    takes 0.25 of a row's reward; returns are 2 and values 3 times the advantage."""
    width_p, width_t = 4, 6
    prompt = torch.tensor([[0] * (width_p - r["prompt"]) + [1] * r["prompt"] for r in rows])
    response = torch.tensor([[1] * r["response"] + [0] * (width_t - r["response"]) for r in rows])
    trained = torch.tensor([[1] * r["trained"] + [0] * (width_t - r["trained"]) for r in rows])
    scores = torch.zeros(len(rows), width_t)
    for i, r in enumerate(rows):
        scores[i, max(r["response"] - 1, 0)] = r["score"]
    valid_mask = trained.bool() & torch.tensor([[r["uid"] != "d"] for r in rows])  # d is rejected
    advantages = torch.tensor([[r["advantage"]] * width_t for r in rows])
    tensors = {
        "prompts": torch.zeros(len(rows), width_p, dtype=torch.long),
        "responses": torch.zeros(len(rows), width_t, dtype=torch.long),
        "attention_mask": torch.cat([prompt, response], 1),
        "response_mask": trained,
        "token_level_scores": scores,
        "token_level_rewards": scores - torch.tensor([0.25, 0, 0, 0, 0, 0]),
        "advantages": advantages,
        "returns": 2 * advantages,
        "values": 3 * advantages,
        "valid_mask": valid_mask,
        "loss_mask": valid_mask,
        "group": torch.tensor([ord(r["uid"]) for r in rows]),
        "position_ids": torch.cat([prompt, response], 1).cumsum(1) - 1,
    }
    objects = {"uid": [r["uid"] for r in rows], "finish_reason": [r["finish"] for r in rows]}
    return DataProto.from_dict(tensors, objects)


def row(uid, score, prompt, response, trained, finish="stop", advantage=0.0):
    lengths = {"prompt": prompt, "response": response, "trained": trained}
    return {"uid": uid, "score": score, "finish": finish, "advantage": advantage} | lengths


ROWS = [
    row("a", 1.0, 2, 3, 3, advantage=0.5),
    row("a", 0.0, 2, 6, 4, "length", advantage=-0.5),
    row("a", 9.0, 4, 6, 0, "length", advantage=100.0),  # dead: in no mean, no group, no maximum
    row("b", 1.0, 3, 1, 1, advantage=0.1),
    row("b", 1.0, 3, 2, 2, advantage=0.1),
    row("c", 0.0, 1, 4, 4),
    row("c", 0.0, 1, 5, 5),
    row("d", 1.0, 1, 1, 1, advantage=100.0),  # alone in its group; rejected, so that its advantage does not count
]
OF_GROUPS = {"zero_variance": 2 / 3, "all_right": 1 / 3, "all_wrong": 1 / 3}
OF_LENGTH = {"mean": 22 / 7, "max": 6.0, "min": 1.0, "clip_ratio": 1 / 7}
OF_PROMPT = {"mean": 13 / 7, "max": 3.0, "min": 1.0, "clip_ratio": 0.0}
OF_REWARD = {"mean": 4 / 7, "max": 1.0, "min": 0.0} | OF_GROUPS
EXPECTED = flat({"reward": OF_REWARD, "response_length": OF_LENGTH, "prompt_length": OF_PROMPT})
EXPECTED["rollout/dead_rows"] = 1.0
OF_TRAINED = {
    f"{name}/{of}": times * value
    for name, times in {"advantages": 1, "returns": 2, "values": 3}.items()
    for of, value in {"mean": (3 * 0.5 - 4 * 0.5 + 3 * 0.1) / 19, "max": 0.5, "min": -0.5}.items()
}
OF_TRAINED |= {f"token_level_rewards/{of}": x - 0.25 for of, x in {"mean": 3 / 6, "max": 1.0, "min": 0.0}.items()}
OF_TRAINED |= {"training/prompt_tokens": 17.0, "training/response_tokens": 28.0, "training/tokens": 45.0 + 5.0}
OF_TRAINED |= {"training/rows_in": 8.0, "training/rows_trained": 6.0, "training/trained_share": 19 / 20}


def of_trained(rows: list[dict]) -> dict:
    """row_metrics without faults, of which some are about whole groups; with a row of 5 tokens sampled besides."""
    besides = [batch_of([row("a", 1.0, 1, 4, 4)])] if rows[0] is ROWS[0] else []
    return {key: value for key, value in row_metrics(batch_of(rows), *besides).items() if "faults/" not in key}


def test_zero_variance_of_several_rewards_is_that_of_each():
    """Of group b, which has equal scores, one reward differs."""
    batch = batch_of(ROWS)
    batch.batch["reward_components"] = torch.tensor([[row, 1.0] for row in (1, 0, 9, 1, 2, 0, 0, 1)])
    assert reduce_metrics(data_metrics(batch)) == pytest.approx(EXPECTED | {"reward/zero_variance": 1 / 3}, rel=1e-6)
    batch.batch["reward_components"][:, 0] = math.nan  # a reward that the scorer did not give: the other is equal
    assert reduce_metrics(data_metrics(batch))["reward/zero_variance"] == 1


def test_metrics_without_optional_keys_or_live_rows():
    batch = batch_of(ROWS)
    del batch.batch["values"]  # there is no critic
    assert not [key for key in row_metrics(batch) if key.startswith("values/")]
    batch.pop([], ["finish_reason"])
    expected = {k: v for k, v in EXPECTED.items() if k != "response_length/clip_ratio"}
    assert reduce_metrics(data_metrics(batch)) == pytest.approx(expected, rel=1e-6)
    assert reduce_metrics(data_metrics(batch_of(ROWS[2:3]))) == {"rollout/dead_rows": 1.0}
    full = [row("a", 1.0, 4, 3, 3), row("b", 1.0, 3, 3, 3), row("b", 1.0, 4, 3, 0)]
    assert reduce_metrics(data_metrics(batch_of(full)))["prompt_length/clip_ratio"] == 0.5


def _rank_of_two(world, first) -> dict[str, float]:
    rank = world.rank
    rows = [row for i, row in enumerate(ROWS) if (i in first) == (rank == 0)]
    local = data_metrics(batch_of(rows)) | of_trained(rows)
    local |= {"actor/lr": 0.25, "x": [Sum(2), Sum(3)][rank], f"only/{rank}": Max(rank)}
    local |= {"empty": Mean(0, 0), "low": Min(5 - rank), "mean": Mean(10.0 * rank, 1 + rank)}
    local["std"] = Std(*[(2.0, 4.0, 1), (10.0, 52.0, 2)][rank])  # of 2; of 4 and 6
    extra = {"std": 2.0, "actor/lr": 0.25, "x": 5.0, "only/0": 0.0, "only/1": 1.0, "low": 4.0, "mean": 10 / 3}
    reduced = reduce_metrics(local)
    assert reduced == pytest.approx(EXPECTED | OF_TRAINED | extra, rel=1e-6)
    return {key: value for key, value in reduced.items() if key not in extra}


@pytest.mark.parametrize("rows_of_first", [(0, 1, 2, 5, 6, 7), (1, 3, 5, 7), (0, 2)])
def test_two_ranks_give_the_numbers_of_one(rows_of_first):
    """With whole groups and unequal counts; with each group on both ranks."""
    first, second = run_ranks(2, _rank_of_two, rows_of_first)
    assert first == second
    assert first == pytest.approx(reduce_metrics(data_metrics(batch_of(ROWS)) | of_trained(ROWS)), rel=1e-12)


def test_the_clock_adds_up_and_survives_an_exception(monkeypatch):
    ticks = iter([0.0, 1.0, 1.5, 6.0, 7.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr("lib.distributed.reduced.time.perf_counter", lambda: next(ticks))
    start_step(1)
    with timed("rollout"), timed("reward"):  # a stage within a stage is part of the outer one: 1 .. 1.5
        pass
    with pytest.raises(KeyError), timed("rollout"):  # 6 .. 7
        raise KeyError
    found = step_timing()
    memory = reduce_metrics({"resident": found.pop("perf/memory_resident_gib/rollout")})  # after the last rollout
    assert memory["resident"] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.2)
    assert found == {"timing_s/step": 9.0, "timing_s/rollout": 1.5}
    start_step(2)
    assert step_timing().keys() == {"timing_s/step"}


def test_memory_of_a_stage_is_that_of_the_accelerator(monkeypatch):
    """The peak is that of the stage alone, of each time that it ran."""
    peak = [7 * 2**30]  # of what was before the step
    monkeypatch.setattr("lib.distributed.device.accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**32)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    start_step(1)
    for used in (2**31, 2**30):  # of the actor's log-probs and the reference's: after the last
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda used=used: used)
        with timed("log_probs"):
            peak[0] = max(peak[0], 3 * used)
    memory = {key: value for key, value in step_timing().items() if key.startswith("perf/")}
    expected = {"allocated": Max(1.0), "reserved": Max(4.0), "peak": Max(6.0)}
    assert memory == {f"perf/memory_{kind}_gib/log_probs": n for kind, n in expected.items()}


def test_throughput():
    step = {"timing_s/step": 4.0, "timing_s/rollout": 1.0, "training/tokens": 800}
    numbers = {"time_per_step": 4.0, "tokens_per_s": 200.0, "tokens_per_s_per_device": 100.0, "idle": 0.0}
    assert throughput_metrics(step, n_devices=2) == {f"perf/{name}": x for name, x in numbers.items()}
    step |= {"training/prompt_tokens": 100, "training/response_tokens": 500, "timing_s/update": 1.2}
    speed = throughput_metrics(step, n_devices=2)  # of the 800 tokens 200 were sampled and not trained on
    per_token = {key: value for key, value in speed.items() if key.startswith("timing_per_token_ms/")}
    assert per_token == {"timing_per_token_ms/rollout": 2.0, "timing_per_token_ms/update": pytest.approx(2.0)}
    step["perf/update_tflops"] = 1000.0
    assert throughput_metrics(step, n_devices=2, peak=250.0)["perf/mfu"] == pytest.approx(1000 / (1.2 * 2 * 250))
    assert "perf/mfu" not in throughput_metrics(step, n_devices=2)


def test_idle_is_what_ranks_wait_for():
    seconds = {"step": 10.0, "reward": 1.0, "rollout": 3.0, "update": 5.0}
    timing = {f"timing_s/{stage}": s for stage, s in seconds.items()} | {"training/tokens": 1}
    for more, idle in (
        ({}, 0.1),  # of 10 s one is spent waiting for scores
        ({"perf/imbalance": 1.25}, 0.1 + 0.5 * 0.2),  # ranks have 80 % of the costliest one's work, in 5 s
        ({"perf/requests_resampled": 0.0}, 0.1 + 0.3),  # what was sampled elsewhere was waited for
    ):
        assert throughput_metrics(timing | more, n_devices=1)["perf/idle"] == pytest.approx(idle)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),  # slower than an A10
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak and peak_tflops(torch.device("cpu")) is None


def test_a_metric_that_is_logged_twice_is_an_error():
    """Such as by a second policy with the first one's name: one value would be lost."""
    merged = merge_metrics([{"actor/lr": 1.0}, {}, {"critic/lr": 2.0}])
    assert merged == {"actor/lr": 1.0, "critic/lr": 2.0}
    with one_line("two metrics of one step are called 'actor/lr': rename one"):
        merge_metrics([merged, {"actor/lr": 1.0}])


def test_numbers_of_two_data_sources_never_share_a_name():
    """The later one would win, and --keep-best would keep by it."""
    rows = [Validated(0, "a", {"score": 0.0, "b": 1.0}, None, False), Validated(1, "a/b", {"score": 0.0}, None, False)]
    with one_line("^two metrics of one step are called 'val/a/b"):
        validation_metrics(rows)


# ---- alerts --------------------------------------------------------------------------------------
def test_each_alert_counts_the_steps_in_which_it_holds():
    rows = [
        {
            "step": step,
            "reward/zero_variance": 0.8 + step / 100,  # above 0.9 from step 11
            "response_length/clip_ratio": [0.5, 0.51][step == 7],
            "rollout/logp_diff_mean": [0.04, 0.2][step in (3, 4)],
            "perf/idle": [0.1, 0.5][step in (1, 2)],
        }
        for step in range(1, 21)
    ]
    rows += [{"step": 20, "val/unscored": 2.0}, {"step": 20, "reward/mean": None, "nonfinite": {"reward/mean": "nan"}}]
    assert [(alert.text, alert.steps) for alert in alerts_of_run(rows)] == [
        ("equal scores in more than 90 % of the groups in 10 of 20 steps", [*range(11, 21)]),
        ("more than half of the responses cut off in 1 of 20 steps", [7]),
        ("engine and trainer more than 0.1 nats apart in 2 of 20 steps", [3, 4]),
        ("unscored in validation: 2, in 1 of 1 steps", [20]),
        ("reward/mean not finite in 1 of 22 rows of metrics.jsonl", [20]),
    ]  # two idle steps of twenty are not enough for a note


def test_the_line_of_a_step_shows_what_is_wrong_with_this_step_alone():
    bad = {"rollout/logp_diff_mean": 0.2, "response_length/clip_ratio": 1.0, "perf/idle": 0.9}
    said = ["more than half of the responses cut off", "engine and trainer more than 0.1 nats apart"]
    assert alerts_of_step(bad | {"reward/zero_variance": 0.99}) == said
    assert alerts_of_step({"reward/zero_variance": 1.0}) == ["equal scores in every group"]
    assert alerts_of_step({"actor/grad_norm": math.nan}) == []  # the tracker says so itself


# ---- micro-batches and the sampler's mismatch ---------------------------------------------------------------
@pytest.mark.parametrize("split", [[6], [1, 5], [1] * 6, [0, 6]])
def test_token_means_and_mismatch_equal_the_loop_however_they_are_split(split):
    g = torch.Generator().manual_seed(0)
    mask = torch.randint(0, 2, (6, 7), generator=g)
    rollout, train = (-3 * torch.rand(6, 7, dtype=torch.float64, generator=g) for _ in range(2))
    pairs = [(train[i, t].item(), rollout[i, t].item()) for i in range(6) for t in range(7) if mask[i, t]]
    ratios = [math.exp(a - b) for a, b in pairs]
    expected = {
        "loss": np.mean([a for a, _ in pairs]),
        "rollout/logp_diff_mean": np.mean([abs(a - b) for a, b in pairs]),
        "rollout/logp_diff_max": max(abs(a - b) for a, b in pairs),
        "training/rollout_probs_diff_mean": np.mean([abs(math.exp(a) - math.exp(b)) for a, b in pairs]),
        "training/rollout_probs_diff_std": np.std([abs(math.exp(a) - math.exp(b)) for a, b in pairs], ddof=1),
        "training/rollout_probs_diff_max": max(abs(math.exp(a) - math.exp(b)) for a, b in pairs),
        "rollout/k1": np.mean([b - a for a, b in pairs]),
        "rollout/k3": np.mean([r - 1 - math.log(r) for r in ratios]),
        "rollout/ratio_mean": np.mean(ratios),
        "rollout/ratio_max": max(ratios),
        "rollout/ratio_min": min(ratios),
        "rollout/chi2": np.mean([r * r - 1 for r in ratios]),
    }
    train, rollout = train.masked_fill(mask == 0, math.nan), rollout.masked_fill(mask == 0, math.inf)
    local, start = {}, 0
    for size in split:
        rows = slice(start, start + size)
        add_metrics(local, token_means({"loss": train[rows]}, mask[rows]))
        add_metrics(local, mismatch_metrics(train[rows], rollout[rows], mask[rows]))
        start += size
    assert reduce_metrics(local) == pytest.approx(expected, rel=1e-10)


def test_extras_of_the_scorer_are_averaged_where_they_are_numbers():
    extras = {"format": [1.0, None, 0], "pred": ["a", "b", None], "bad": [math.nan, 3, 1]}
    assert reduce_metrics(extra_metrics(extras)) == {"reward/format/mean": 0.5, "reward/bad/mean": 2.0}


def test_no_key_of_a_scorer_stands_for_another_metric():
    names = ["mean", "max", "zero_variance", "all_right", "baseline", "error_count", "mean/mean", ""]
    names += ["mean@1", "pass@1", "unscored", "clip_ratio", "mean@1/ci_low", "mean@1/lower_bound"]
    own = data_metrics(batch_of(ROWS)).keys() | {"reward/baseline", "reward/error_count"}
    extras = {name: [1.0] for name in names}
    assert len(extra_metrics(extras)) == len(names) and not own & extra_metrics(extras).keys()
    rows = [Validated(0, "a", {"score": 0.25} | given, "7", False) for given in ({}, dict.fromkeys(names, 1.0))]
    plain, more = (validation_metrics([row]) for row in rows)
    assert {key: more[key] for key in plain} == plain
    assert len(more) == len(plain) + 3 * len(names)  # mean@1, its bound, maj@1
