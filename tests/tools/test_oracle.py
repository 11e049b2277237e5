"""tools/oracle.py: what theory says of estimators, losses and corrections, and what the command writes and refuses.

Batches are enumerated, so that equations hold to the rounding of float64."""

import copy
import csv
import json

import pytest
import torch

from lib import setup
from tests.common import ROOT, one_line
from tools import oracle
from tools.oracle import MIXED, SUM, Batches, Cell, Measured, Step, Task, compare, make_batches

SCRIPT = oracle.load_script(str(ROOT / "grpo.py"))
EQUAL = {"abs": 1e-7, "rel": 0}  # epsilon, 1e-6, is added to a std of 0.5 or more
TWO = (0.2, 0.6)


@pytest.fixture(scope="module", autouse=True)
def own_process_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def step_of(task: Task, reward: float = 1.0, **flags) -> Step:
    """Flags are set, not parsed, which would take half a second each."""
    step = Step(SCRIPT, SUM, task, reward)
    step.args = copy.deepcopy(step.args)
    correction = flags.pop("correction", {})
    for name, value in flags.items():
        assert hasattr(step.args, name)
        setattr(step.args, name, value)
    for name, value in correction.items():
        setattr(step.args.rollout_correction, name, value)
    step.needs = setup.check(step.args, torch.device("cpu"))
    return step


def measured(n=3, staleness=0, kl="", **flags) -> Measured:
    task = Task(TWO, max_length=2, staleness=staleness, drift=0.5)
    batches = make_batches(task, 1, n, limit=10_000)
    assert batches.weights is not None
    step = step_of(task, reward=0.0 if kl else 1.0, **flags)
    found = step.gradients(batches, step.depends_on_others(batches))
    return compare(found, batches.weights, task.gradient(0.0 if kl else 1.0, kl).flatten())


def test_the_task_is_what_it_says():
    task = Task((0.1, 0.7), max_length=3, staleness=2)
    probs = task.log_probs(task.logits).sum(-1).exp()
    assert len(task.rewards) == 15 and sorted({*task.mask.sum(1).tolist()}) == [1, 2, 3]
    assert probs.sum(1).tolist() == pytest.approx([1, 1])
    assert (probs @ task.rewards).tolist() == pytest.approx([0.1, 0.7])
    start = task.states[:, 0]
    assert task.values()[:, start == start[0]][:, 0, 0].tolist() == pytest.approx([0.1, 0.7])
    move = 1e-5 * torch.randn(task.logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    up, down = (task.log_probs(task.logits + sign * move).sum(-1).exp() @ task.rewards for sign in (1, -1))
    assert float((up - down).mean() / 2) == pytest.approx(float((task.gradient() * move).sum()), rel=1e-6)


def test_all_batches_have_the_probability_one():
    task = Task(TWO, max_length=2, staleness=1)
    batches = make_batches(task, 2, 2, limit=10_000)
    assert float(batches.weights.sum()) == pytest.approx(1)
    won = (task.rewards[batches.responses].mean((1, 2)) * batches.weights).sum()
    assert float(won) == pytest.approx(float((task.log_probs(task.sampler).sum(-1).exp() @ task.rewards).mean()))


@pytest.mark.parametrize("n", [2, 4])
def test_rloo_is_unbiased_and_a_baseline_with_the_own_sample_scales_by_n_minus_1_over_n(n):
    rloo, dr_grpo = (measured(n=n, adv_estimator=name) for name in ("rloo", "dr_grpo"))
    summed = measured(n=n, adv_estimator="dr_grpo", loss_agg_mode="token-sum")
    for found, ratio in ((rloo, 1), (dr_grpo, (n - 1) / n), (summed, n - 1)):  # a step has n rows
        assert found.cosine == pytest.approx(1, **EQUAL) and found.ratio == pytest.approx(ratio, rel=1e-9)
    assert rloo.noise == pytest.approx(dr_grpo.noise)


def test_importance_weights_of_the_sequence_remove_the_bias_of_stale_samples_and_a_bound_brings_it_back():
    corrections = ("sequence", (0, 1e9)), ("sequence", (0, 1.1)), ("token", (0, 1e9))
    none, whole, bounded, token = (
        measured(staleness=2, adv_estimator="rloo", correction=correction)
        for correction in ({}, *({"level": level, "bounds": bounds} for level, bounds in corrections))
    )
    assert (whole.cosine, whole.ratio) == (pytest.approx(1, **EQUAL), pytest.approx(1, rel=1e-9))
    assert none.cosine < token.cosine < 1 - 1e-5  # token weights leave the distribution of the prefixes stale
    assert bounded.ratio < 1 - 1e-3 and bounded.cosine < 1 - 1e-6


def test_gradients_of_kl_estimators():
    for estimator, placement, exact_for in (
        ("k1", "reward", "response"),  # E[k1 grad log p] is the gradient: that of k1 itself is 0 on average
        *((k, "loss", "token") for k in ("k2", "k3+", "k3_unbiased")),
        ("k3", "loss", ""),  # the gradient of KL(ref, pi)
        ("k3", "reward", ""),
    ):
        kl = {"kl_coef": 1.0, "kl_estimator": estimator, "kl_placement": placement, "adv_estimator": "rloo"}
        for objective in ("response", "token"):
            found = measured(kl=objective, **kl)
            right = found.cosine > 1 - 1e-9 and abs(found.ratio - 1) < 1e-9
            assert right == (objective == exact_for), estimator
    found = measured(kl="response", kl_coef=1.0, kl_estimator="k1", adv_estimator="rloo")  # in the loss
    assert found.cosine is None and found.ratio == 0


def test_whitening_needs_each_batch_alone_and_equal_batches_are_computed_once():
    task = Task(TWO, max_length=2)
    batches = make_batches(task, 1, 3, limit=10_000)
    step = step_of(task, adv_estimator="reinforce_plus_plus_baseline")
    assert step.depends_on_others(batches)
    assert not step_of(task, adv_estimator="opo").depends_on_others(batches)
    kinds = step.kinds(step.batch(batches), len(batches.prompts))
    assert kinds.max() + 1 < len(kinds) / 4
    some = batches.draw(12, seed=0)
    one_by_one = torch.cat([step.gradients(some.take(torch.tensor([i])), False) for i in range(12)])
    assert step.gradients(some, True).allclose(one_by_one, rtol=0, atol=1e-12)
    assert not step.gradients(some, False).allclose(one_by_one, rtol=0, atol=1e-3)


def test_sampled_batches_agree_with_all_batches_within_their_errors():
    task = Task(TWO, max_length=2)
    everything, step = make_batches(task, 1, 3, limit=10_000), step_of(task, loss_agg_mode="seq-mean-token-mean")
    truth = task.gradient().flatten()
    exact = compare(step.gradients(everything, False), everything.weights, truth)
    sampled_batches = Batches(*everything.draw(4000, seed=5))
    sampled = compare(step.gradients(sampled_batches, False), None, truth)
    assert exact.ratio_error == 0 < sampled.ratio_error < 0.1
    for name in ("cosine", "ratio"):  # four standard errors; the draw is seeded
        assert abs(getattr(sampled, name) - getattr(exact, name)) < 4 * getattr(sampled, f"{name}_error")
    assert sampled.noise == pytest.approx(exact.noise, rel=0.2)


def test_a_sampled_gradient_that_is_lost_in_the_noise_is_not_an_exact_zero():
    draws = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, truth = torch.cat([draws, -draws]), torch.ones(2, dtype=torch.float64)  # of mean 0: its square is below 0
    sampled, exact = compare(found, None, truth), compare(found, torch.full((2000,), 1 / 2000).double(), truth)
    assert sampled.cosine is exact.cosine is None and (sampled.exact, exact.exact) == (False, True)
    of_cell = {"staleness": 0, "pass_rates": (0.5,)}
    lost, zero, right = (vars(cell) | of_cell for cell in (sampled, exact, Measured(1.0, 1.0, 1.0)))
    assert (oracle._cell(lost), oracle._cell(zero)) == ("~0", "0")
    assert oracle.verdict([lost]) == "lost in the noise" and oracle.verdict([zero, lost]) == "no gradient"
    assert oracle.verdict([lost, right]) == "unbiased" and oracle.verdict([zero, right]) != "unbiased"


def test_the_command_writes_table_and_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(oracle, "RATES", [])
    monkeypatch.setattr(oracle, "SIZES", [])
    oracle.main(oracle.Args(settings=(f"--adv-estimator rloo {SUM}",), max_length=2, output=str(tmp_path / "out")))
    assert "| unbiased on policy | 1.000, 1, " in capsys.readouterr().out
    record = json.loads((tmp_path / "out/oracle.json").read_text())
    assert (tmp_path / "out/oracle.md").read_text() == oracle.markdown(record)
    with (tmp_path / "out/oracle.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["staleness"] for row in rows] == ["0", "1", "2"] and float(rows[0]["ratio"]) == pytest.approx(1)
    assert (tmp_path / "out/oracle.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "args, error",
    [
        ({"script": "no.py"}, "--script no.py: cannot be imported"),
        ({"script": str(ROOT / "lib/sampling.py")}, "sampling.py has no Args"),
        ({"max_length": 9}, "--max-length 9: from 1 to 5"),
        ({"groups": 3}, "at least 1000"),
        ({"settings": ("--adv-estimator grop",)}, "grop"),
    ],
)
def test_bad_input_is_one_line(args, error):
    with one_line(error):
        oracle.main(oracle.Args(**args))


RECORD = json.loads((ROOT / "benchmarks/results/estimators.json").read_text())


def test_the_tables_of_the_document_are_those_of_the_record():
    assert oracle.markdown(RECORD).rstrip() in (ROOT / "benchmarks/results/estimators.md").read_text()
    assert [table["title"] for table in RECORD["tables"]] == [table.title for table in oracle.TABLES.values()]
    for table, recorded in zip(oracle.TABLES.values(), RECORD["tables"]):
        assert {row["name"]: row["flags"] for row in recorded["rows"]} == {
            name: f"{flags} {table.flags}".strip() for name, flags in table.settings.items()
        }


def test_the_recorded_cell_of_the_default_is_found_again():
    row = next(row for row in RECORD["tables"][0]["rows"] if row["name"] == "grpo")
    recorded = next(cell for cell in row["cells"] if cell["label"] == "mixed")
    task = Task(MIXED.pass_rates)
    batches = make_batches(task, 1, MIXED.group_size, limit=10_000)
    found = compare(step_of(task).gradients(batches, False), batches.weights, task.gradient().flatten())
    assert Cell(**{key: tuple(v) if isinstance(v := recorded[key], list) else v for key in vars(MIXED)}) == MIXED
    assert found.cosine == pytest.approx(recorded["cosine"], rel=1e-9)
    assert found.noise == pytest.approx(recorded["noise"])


def test_the_verdicts_of_the_page_are_those_of_the_record():
    rows = [row for table in RECORD["tables"][:2] for row in table["rows"]]
    lines = [line.split("|") for line in (ROOT / "docs/algorithms.md").read_text().splitlines()]
    shown = {cells[1].strip(" `"): cells for cells in reversed(lines) if len(cells) > 5}  # a loss may be named alike
    shown |= {"remax": shown["ReMax"], "gae, lambda 1": shown["GAE"], "gae, lambda 0.5": shown["GAE"]}
    for row in rows:
        assert f" {oracle.verdict(row['cells'])} " in shown[row["name"]], row["name"]
