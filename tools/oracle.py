"""Measures bias and variance of a script's gradient on a task whose true gradient is known exactly.

    python -m tools.oracle                                         all tables of docs/algorithms.md
    python -m tools.oracle --tables losses corrections --output found
    python -m tools.oracle --script my_grpo.py --settings "--adv-estimator rloo" "--loss gspo"

The task: prompts with responses of at most --max-length tokens out of a, b and an end token; right are those with more
a than b. The policy is a table of logits, one row for each prompt and prefix, in float64. So every response, every
group and, up to --groups, every batch can be enumerated, and the expectation of the gradient is a finite sum. Larger
sets are sampled, and the table shows the standard error. The gradient is that of the script's own add_advantages and
update: a copy with your loss is measured the same way.
"""

import contextlib
import csv
import importlib.util
import io
import itertools
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lib import InputError, setup
from lib.args import groups as names
from lib.cli.flags import parse_flags
from lib.cli.process import command_line
from lib.columns import COLUMNS
from lib.core_algos import AdaptiveKLController, at_last_token
from lib.data_proto import DataProto
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES

ROOT = Path(__file__).parent.parent
A, B, END = range(3)
BLOCKS = 20  # of batches, for the jackknife's standard errors
ALONE = 16  # batches that show whether a batch's advantages depend on it alone
SAME = 1e-9  # of a sum in float64


# ---------------------------------------------------------------------------------------- the task


class Task:
    """M prompts with the same N responses, and the policies at them. S prefixes, T tokens at most, V = 3 tokens.

    pass_rates: of the current policy, one for each prompt. staleness: updates between sampler and current policy; each
    moves a prompt's logits by `drift`, in equal parts along its true gradient and in a random direction."""

    def __init__(self, pass_rates: Sequence[float], max_length: int = 3, staleness: int = 0, drift: float = 0.3):
        # by reward and length, so that groups that are the same to an outcome's estimator have equal columns
        responses = sorted(_responses(max_length), key=lambda r: (_is_right(r), len(r)))
        prefixes = [*_prefixes(max_length)]
        number = {prefix: i for i, prefix in enumerate(prefixes)}
        padding = [[0] * (max_length - len(response)) for response in responses]
        self.tokens = torch.tensor([[*response, *pad] for response, pad in zip(responses, padding)])  # (N, T)
        self.mask = torch.tensor([[1] * len(r) + pad for r, pad in zip(responses, padding)])  # (N, T)
        self.states = torch.tensor(
            [[number[r[:t]] for t in range(len(r))] + pad for r, pad in zip(responses, padding)]
        )  # (N, T): the prefix before each token
        self.rewards = torch.tensor([_is_right(r) for r in responses], dtype=torch.float64)  # (N,)
        noise = torch.Generator().manual_seed(0)
        shape = len(pass_rates), len(prefixes), 3
        base, away, drifts = (torch.randn(shape, generator=noise, dtype=torch.float64) for _ in range(3))
        self.logits = torch.stack([self._with_pass_rate(0.7 * own, rate) for own, rate in zip(base, pass_rates)])
        self.reference = self.logits + 0.5 * away
        ascent = self.gradient()
        direction = sum(x / x.norm(dim=(1, 2), keepdim=True) for x in (ascent, drifts)) / math.sqrt(2)
        self.sampler = self.logits - staleness * drift * direction

    def _with_pass_rate(self, logits: Tensor, rate: float) -> Tensor:
        """The logits (S, V) of a prompt, shifted between a and b by bisection until the pass rate is `rate`."""
        low, high = -30.0, 30.0
        for _ in range(100):
            middle = (low + high) / 2
            shifted = logits + middle * torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
            right = self.log_probs(shifted[None]).sum(-1).exp()[0] @ self.rewards
            low, high = (middle, high) if right < rate else (low, middle)
        return shifted

    def log_probs(self, logits: Tensor) -> Tensor:
        """(M, S, V) -> the log-probs of all tokens of all responses (M, N, T), 0 in the padding."""
        return logits.log_softmax(-1)[:, self.states, self.tokens] * self.mask

    def gradient(self, reward: float = 1.0, kl: Literal["", "response", "token"] = "") -> Tensor:
        """The gradient (M, S, V) of the mean over prompts of reward x E[R] - KL(policy, reference).

        kl "response": the KL of whole responses; "token": the sum over tokens of the KL of the next token, with the
        distribution of the prefixes as a constant."""
        logits = self.logits.clone().requires_grad_()
        log_probs = self.log_probs(logits)
        probs = log_probs.sum(-1).exp()  # (M, N)
        objective = reward * probs @ self.rewards
        if kl == "response":
            objective = objective - (probs * (log_probs - self.log_probs(self.reference)).sum(-1)).sum(-1)
        elif kl == "token":
            policy, reference = logits.log_softmax(-1), self.reference.log_softmax(-1)
            divergence = (policy.exp() * (policy - reference)).sum(-1)  # (M, S)
            objective = objective - (probs.detach() * (divergence[:, self.states] * self.mask).sum(-1)).sum(-1)
        (found,) = torch.autograd.grad(objective.mean(), logits)
        return found

    def values(self) -> Tensor:
        """E[R] from each prefix on (M, N, T): a perfect critic."""
        probs = self.log_probs(self.logits).sum(-1).exp()
        start = self.states.flatten().expand(len(probs), -1)
        weights = (probs[:, :, None] * self.mask).flatten(1)
        reached, won = (
            torch.zeros(self.logits.shape[:2], dtype=torch.float64).scatter_add(1, start, x)
            for x in (weights, weights * self.rewards[:, None].expand(self.mask.shape).flatten())
        )
        return (won / reached)[:, self.states] * self.mask

    def rows(self, prompts: Tensor, responses: Tensor) -> dict[str, Tensor]:
        """Columns of a batch for prompts (B,) and responses (B,) by their numbers."""
        policy = self.logits.log_softmax(-1)
        now, sampled, ref = (self.log_probs(x) for x in (self.logits, self.sampler, self.reference))
        squared = policy.exp().square().sum(-1)[:, self.states]  # (M, N, T)
        by_state = {
            "policy_log_probs": now,
            "rollout_log_probs": sampled,
            "ref_log_prob": ref,
            "entropys": -(policy.exp() * policy).sum(-1)[:, self.states] * self.mask,
            "squared_score": (1 - 2 * now.exp() + squared) * self.mask,
            "values": self.values(),
        }
        mask, greedy = self.mask[responses], now.sum(-1).argmax(-1)
        columns = {name: values[prompts, responses] for name, values in by_state.items()}
        scores = self.rewards[responses]
        return columns | {
            "prompts": prompts[:, None],
            "responses": self.tokens[responses],
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask], 1),
            "token_level_scores": at_last_token(scores, mask),
            "reward_baselines": self.rewards[greedy][prompts],
            "truncated": torch.zeros(len(mask), dtype=torch.bool),
        }


def _is_right(response: tuple) -> bool:
    return response.count(A) > response.count(B)


def _prefixes(max_length: int) -> Iterable[tuple]:
    return (p for length in range(max_length) for p in itertools.product((A, B), repeat=length))


def _responses(max_length: int) -> Iterable[tuple]:
    ended = ((*prefix, END) for prefix in _prefixes(max_length))
    return (*ended, *itertools.product((A, B), repeat=max_length))


class Batches(NamedTuple):
    """K batches of P prompts, each with n responses, by number; weights (K,): their probabilities, None if sampled."""

    prompts: Tensor  # (K, P)
    responses: Tensor  # (K, P, n)
    weights: Tensor | None

    def take(self, rows: Tensor) -> "Batches":
        return Batches(self.prompts[rows], self.responses[rows], None)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The prompt and the response of each row (K x P x n,)."""
        n = self.responses.shape[2]
        return self.prompts.repeat_interleave(n, 1).flatten(), self.responses.flatten()

    def draw(self, count: int, seed: int) -> "Batches":
        """So many of them, drawn by their weights."""
        if self.weights is None:
            return self.take(torch.arange(min(count, len(self.prompts))))
        noise = torch.Generator().manual_seed(seed)
        return self.take(torch.multinomial(self.weights, count, replacement=True, generator=noise))


def make_batches(task: Task, prompts: int, group_size: int, limit: int) -> Batches:
    """All batches if they have at most `limit` groups, else samples with so many. Prompts are drawn uniformly, with
    replacement, and responses from the sampler. Groups are multisets: no result depends on the order of a group."""
    probs = task.log_probs(task.sampler).sum(-1).exp()  # (M, N)
    M, N = probs.shape
    if (M * math.comb(N + group_size - 1, group_size)) ** prompts * prompts > limit:
        noise = torch.Generator().manual_seed(1)
        drawn = torch.randint(M, (limit // prompts, prompts), generator=noise)
        flat = torch.multinomial(probs[drawn.flatten()], group_size, replacement=True, generator=noise)
        return Batches(drawn, flat.view(*drawn.shape, group_size).sort(-1).values, None)
    groups = torch.tensor([*itertools.combinations_with_replacement(range(N), group_size)])  # (groups, n)
    counts = torch.nn.functional.one_hot(groups, N).sum(1).double()
    orders = (math.lgamma(group_size + 1) - torch.lgamma(counts + 1).sum(1)).exp()
    weights = (orders * (counts @ probs.log().T).T.exp() / M).flatten()  # (M x groups)
    chosen = torch.cartesian_prod(*[torch.arange(len(weights))] * prompts).view(-1, prompts)  # (K, P)
    return Batches(chosen // len(groups), groups[chosen % len(groups)], weights[chosen].prod(1))


# ---------------------------------------------------------------------------------------- the script's gradient


class _TablePolicy:
    """In place of the actor or critic: keeps the gradient of the loss by the log-probs."""

    def log_probs(self, micro: DataProto) -> tuple[Tensor, Tensor]:
        self.leaf = micro.batch["policy_log_probs"].clone().requires_grad_()
        return self.leaf, micro.batch["entropys"]

    def values(self, micro: DataProto) -> Tensor:
        self.leaf = micro.batch["values"].clone().requires_grad_()
        return self.leaf

    def backward(self, loss: Tensor) -> None:
        (self.by_output,) = torch.autograd.grad(loss, self.leaf)

    def step(self) -> dict:
        return {}


def load_script(path: str) -> ModuleType:
    """grpo.py or a copy of it, as a module. Raises InputError for what is none."""
    name = Path(path).stem
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("no .py file")
        script = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
    except (OSError, SyntaxError, ImportError) as error:
        raise InputError(f"--script {path}: cannot be imported: {error}") from error
    if missing := [x for x in ("Args", "add_advantages", "update", "micro_batches") if not hasattr(script, x)]:
        raise InputError(f"--script {path} has no {missing[0]}: give grpo.py, remax.py, ppo.py, dapo.py or a copy")
    return script


class Step:
    """One step of the script with these flags, on each of many batches of the task. reward: a factor."""

    def __init__(self, script: ModuleType, flags: str, task: Task, reward: float = 1.0):
        if not dist.is_initialized():  # the script's collectives, in a group of one
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        self.script, self.task, self.reward = script, task, reward
        self.args = args_of(script, flags)
        self.needs = setup.check(self.args, torch.device("cpu"))

    def depends_on_others(self, batches: Batches) -> bool:
        """Whether a batch's advantages and masks would be others if more batches were passed with it, as those of an
        estimator that whitens would. A batch must then be passed alone."""
        if self.args.mask_settings:  # a share of the tokens of the batch
            return True
        some = batches.draw(ALONE, seed=2)
        together, alone = self._with_advantages(some, False), self._with_advantages(some, True)
        return not all(
            torch.allclose(values.double(), alone.batch[name].double(), rtol=SAME, atol=SAME)
            for name, values in together.batch.items()
            if name not in ("row", "group")  # numbers
        )

    def gradients(self, batches: Batches, alone: bool) -> Tensor:
        """The direction of ascent (K, M x S x V), minus the gradient of the script's loss, of each batch as a step.

        alone: whether the batches are passed one by one to the script's add_advantages."""
        task, K, (P, n) = self.task, len(batches.prompts), batches.responses.shape[1:]
        whole = self._with_advantages(batches, alone)
        counted = whole.batch["denominator_mask"].view(K, P * n, -1)
        counts = torch.stack([counted.sum((1, 2)), counted.any(2).sum(1)], 1)  # (K, 2): tokens, rows
        _, kind = counts.unique(dim=0, return_inverse=True)
        by_log_prob = torch.zeros(counted.flatten(0, 1).shape, dtype=torch.float64)
        per_batch = torch.arange(K * P * n).view(K, P * n)
        for rows in (per_batch[kind == number] for number in range(int(kind.max()) + 1)):
            by_log_prob[rows.flatten()] = self._by_log_prob(whole.select_idxs(rows.flatten()), len(rows))
        # the gradient of log p(token | prefix) by the prefix's logits is onehot(token) - p
        (M, S, V), prompts, responses = task.logits.shape, *batches.rows()
        prefix = torch.arange(K).repeat_interleave(P * n) * M + prompts
        prefix = (prefix[:, None] * S + task.states[responses]).flatten()
        by_token = torch.zeros(K * M * S, V, dtype=torch.float64)
        by_token.index_put_((prefix, task.tokens[responses].flatten()), -by_log_prob.flatten(), accumulate=True)
        by_token = by_token.view(K, M, S, V)
        return (by_token - by_token.sum(-1, keepdim=True) * task.logits.softmax(-1)).flatten(1)

    def batch(self, batches: Batches) -> DataProto:
        """The rows of all batches, as they are before add_advantages."""
        columns, (K, P, n) = self.task.rows(*batches.rows()), batches.responses.shape
        columns["token_level_scores"] = self.reward * columns["token_level_scores"]
        stale = self.args.old_log_probs == "rollout"
        columns["old_log_probs"] = columns["rollout_log_probs" if stale else "policy_log_probs"]
        if self.args.reward_keys:
            columns["reward_components"] = columns["token_level_scores"].sum(1, keepdim=True)
        if "critic" not in signature(self.script.update).parameters:
            del columns["values"]
        columns["is_fresh"] = torch.ones(K * P * n, dtype=torch.bool)
        uids = np.repeat(np.arange(K * P).astype(str), n)
        return DataProto.from_dict(tensors=columns, non_tensors={"uid": uids.astype(object)})

    def kinds(self, batch: DataProto, K: int) -> Tensor:
        """(K,): batches with the same number have equal columns, as far as add_advantages reads them."""
        always = {name for name, column in COLUMNS.items() if column.gathered == "always"}
        read = sorted(always.union(self.needs.columns) & {*batch.batch.keys()})
        seen = torch.cat([batch.batch[name].double().reshape(K, -1) for name in read], 1)
        return seen.unique(dim=0, return_inverse=True)[1]

    def _with_advantages(self, batches: Batches, alone: bool) -> DataProto:
        """The rows of all batches, after the script's add_advantages has seen them, together or one batch at a time."""
        batch, (K, P, n) = self.batch(batches), batches.responses.shape
        if not alone:
            self._add_advantages(batch)
            return batch
        kind = self.kinds(batch, K)
        first = torch.full((int(kind.max()) + 1,), K).scatter_reduce(0, kind, torch.arange(K), "amin")  # of each kind
        split = batch.split(P * n)
        parts = [split[i].select() for i in first.tolist()]
        for part in parts:
            self._add_advantages(part)
        for name in parts[0].batch.keys() - batch.batch.keys():
            batch.batch[name] = torch.stack([part.batch[name] for part in parts])[kind].flatten(0, 1)
        return batch

    def _add_advantages(self, batch: DataProto) -> None:
        free: Any = mock.patch.object(self.script, "data_metrics", lambda batch: {})  # slow, and changes nothing
        control = AdaptiveKLController(self.args.kl_coef, self.args.kl_target, self.args.kl_horizon)
        with free:
            self.script.add_advantages(self.args, batch, self.needs, control, 1)

    def _by_log_prob(self, rows: DataProto, batches: int) -> Tensor:
        """The gradient of each batch's own loss by the log-probs of its rows (B, T). All have the same counts."""
        script, actor = self.script, _TablePolicy()
        given = {"actor": actor, "critic": _TablePolicy(), "batch": rows, "entropy_coef": 0.0, "warm_up": False}
        sizes = replace(self.needs.sizes, num_mini_batches=1, update_epochs=1)
        given |= {"args": self.args, "needs": replace(self.needs, sizes=sizes)}
        counts = lambda mask: (float(mask.sum()) / batches, float(mask.any(1).sum()) / batches)  # noqa: E731
        with mock.patch.multiple(script, micro_batches=_one_micro_batch, global_counts=counts):
            script.update(**{name: given[name] for name in signature(script.update).parameters})
        return actor.by_output


@cache  # it takes half a second
def args_of(script: ModuleType, flags: str) -> Any:
    """The script's Args. Raises InputError."""
    toy = ["--config", str(ROOT / "data/toy/preset.yaml"), "--num-mini-batches", "1", "--update-epochs", "1"]
    return parse_flags(script.Args, [*toy, *shlex.split(flags)])


def run_quietly(script: ModuleType, args: Any, end: type[Exception]) -> None:
    """The script's main, without what it prints, draws and records of its start, until it is over or raises `end`."""
    try:
        with (
            mock.patch("lib.log.tracking.Tracker.curve"),
            mock.patch("lib.run.opening.write_start"),  # it lists all installed packages
            mock.patch("atexit.register"),  # a tracker that is not closed would draw at the end
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.suppress(end),
        ):
            script.main(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _one_micro_batch(mini_batch: DataProto, *models: Any) -> list:
    return [mini_batch]


# ---------------------------------------------------------------------------------------- what is measured


@dataclass
class Cell:
    """Where a setting is measured."""

    label: str
    pass_rates: tuple[float, ...] = (0.1, 0.5, 0.9)
    group_size: int = 4
    prompts: int = 1  # of a batch
    staleness: int = 0
    kl: Literal["", "response", "token"] = ""  # the objective: minus this KL, without a reward


@dataclass
class Measured:
    """cosine of the expected and the true gradient, ratio of their norms, and noise: the variance of a batch's gradient
    over the square of the expected one's norm. cosine is None where the expected gradient is 0, or, of sampled batches,
    cannot be told from 0. Errors are standard errors, 0 where all batches were enumerated (exact)."""

    cosine: float | None
    ratio: float
    noise: float | None
    cosine_error: float = 0.0
    ratio_error: float = 0.0
    exact: bool = True


def compare(found: Tensor, weights: Tensor | None, truth: Tensor) -> Measured:
    """found (K, D), weights (K,) or None, truth (D,)."""
    if weights is not None:
        mean = weights @ found
        return _measured(mean, float(weights @ (found - mean).square().sum(1)), 0.0, truth)
    K = len(found)

    def of(total: Tensor, squares: Tensor, count: int) -> Measured:
        mean = total / count
        variance = (float(squares) - count * float(mean.square().sum())) / (count - 1)
        return _measured(mean, variance, variance / count, truth)

    totals = torch.stack([part.sum(0) for part in found.tensor_split(BLOCKS)])  # (BLOCKS, D)
    squares = torch.stack([part.square().sum() for part in found.tensor_split(BLOCKS)])
    sizes = [len(part) for part in found.tensor_split(BLOCKS)]
    whole = replace(of(totals.sum(0), squares.sum(), K), exact=False)
    left_out = [of(totals.sum(0) - totals[i], squares.sum() - squares[i], K - sizes[i]) for i in range(BLOCKS)]
    for name in ("cosine", "ratio"):
        values = [getattr(part, name) for part in left_out]
        if None not in values:
            deviation = torch.tensor(values, dtype=torch.float64).std(correction=0)
            setattr(whole, f"{name}_error", float(deviation) * math.sqrt(BLOCKS - 1))
    return whole


def _measured(mean: Tensor, variance: float, of_mean: float, truth: Tensor) -> Measured:
    """of_mean: the variance of `mean`, which makes its square too large."""
    square, norm = float(mean.square().sum()) - of_mean, float(truth.norm())
    if square <= (SAME * norm) ** 2:
        return Measured(None, 0.0, None)
    length = math.sqrt(square)
    return Measured(float(mean @ truth) / (length * norm), length / norm, variance / square)


@dataclass
class Table:
    title: str
    flags: str  # of all rows
    settings: dict[str, str]  # {name: flags}, or {name: script.py flags}
    cells: list[Cell]


SUM = "--loss-agg-mode seq-mean-token-sum"
PER_KL = "--kl-coef 1 --adv-estimator rloo " + SUM
CORRECTION = "--rollout-correction.level"
UNBOUNDED = "--rollout-correction.bounds 0 1e9"
RATES = [Cell(f"pass rate {rate}", (rate,)) for rate in (0.1, 0.5, 0.9)]
MIXED, EIGHT = Cell("mixed"), Cell("mixed, 8 prompts", prompts=8)
SIZES = [Cell(f"mixed, n = {n}", group_size=n) for n in (2, 8)]
STALE = [Cell(f"staleness {k}", staleness=k) for k in range(3)]
TURNS = ("gigpo", "mt_grpo", "tir_optimal_token_baseline")  # of several turns


def _estimators() -> dict[str, str]:
    more = {"gdpo": " --adv-kwargs reward_keys=score"}
    rows = {x: f"--adv-estimator {x}{more.get(x, '')}" for x in ADV_ESTIMATORS if x not in TURNS}
    rows["gae, lambda 1"] = "ppo.py --kl-coef 0"
    rows["gae, lambda 0.5"] = "ppo.py --kl-coef 0 --gae-lambda 0.5"
    return rows | {"remax": "remax.py"}


def _losses() -> dict[str, str]:
    stale = " --old-log-probs rollout"
    rows = {
        "vanilla, no clip": "--clip-ratio-low 1 --clip-ratio-high 1e9 --clip-ratio-c 1e9" + stale,
        "vanilla, 0.2 and 0.28": "--clip-ratio-high 0.28" + stale,
        "vanilla, 0.1": "--clip-ratio-low 0.1 --clip-ratio-high 0.1" + stale,
    }
    more = dict.fromkeys(POLICY_LOSSES, stale)
    more |= {"dro": " --loss-kwargs dro_beta=0.1" + stale, "gpg": "", "decoupled": " --old-log-probs recompute"}
    rows |= {name: f"--loss {name}{flags}" for name, flags in more.items()}
    return rows | {"reinforce, no bound": "--loss reinforce --loss-kwargs ratio_high=1e9" + stale}


def _corrections() -> dict[str, str]:
    rows = {"none": ""}
    for level, bounds in (("token", "0 2"), ("sequence", "0 2"), ("geometric", "0 2")):
        rows[f"{level}, unbounded"] = f"{CORRECTION} {level} {UNBOUNDED}"
        rows[f"{level}, truncate at 2"] = f"{CORRECTION} {level} --rollout-correction.bounds {bounds}"
    masked = f"{CORRECTION} token --rollout-correction.action mask --rollout-correction.bounds"
    rows["token, mask 0.5 to 2"] = f"{masked} 0.5 2"
    rows["sequence, mask 0.5 to 2"] = f"{masked} 0.5 2".replace("level token", "level sequence")
    rows["sequence, unbounded, divided by the mean"] = (
        f"{CORRECTION} sequence {UNBOUNDED} --rollout-correction.batch-normalize True"
    )
    rejected = f"{CORRECTION} measure --rollout-correction.reject"
    rows["reject rows, seq_mean_k1 0.8 to 1.25"] = f"{rejected} seq_mean_k1=0.8,1.25"
    rows["reject rows, seq_sum_k1 0.5 to 2"] = f"{rejected} seq_sum_k1=0.5,2"
    rows["reject tokens, token_k1 0.5 to 2"] = f"{rejected} token_k1=0.5,2"
    return rows | {"bypass, vanilla": "--old-log-probs rollout"}


KINDS = get_args(names.KLEstimator)
NORM = "--loss-agg-mode seq-mean-token-sum-norm --max-response-length 3"
MEAN = "--loss-agg-mode seq-mean-token-mean"
TableName = Literal["estimators", "aggregation", "zero_variance", "losses", "corrections", "kl", "recipes"]
TABLES: dict[str, Table] = {
    "estimators": Table("Advantage estimators", SUM, _estimators(), [*RATES, MIXED, *SIZES, EIGHT]),
    "aggregation": Table(
        "Aggregation",
        "--adv-estimator rloo --max-response-length 3",
        {x: f"--loss-agg-mode {x}" for x in get_args(names.AggMode)},
        [*RATES, MIXED, *SIZES, EIGHT],
    ),
    "zero_variance": Table(
        "Groups with equal scores",
        SUM,
        {
            f"{estimator}, {x}": f"--adv-estimator {estimator} --zero-variance {x}"
            for estimator in ("rloo", "grpo")
            for x in ("keep", "mask", "drop_from_denominator")
        },
        [*RATES, MIXED, *SIZES, EIGHT],
    ),
    "losses": Table("Policy losses and clip ranges", f"--adv-estimator rloo {SUM}", _losses(), STALE),
    "corrections": Table(
        "Rollout corrections", f"--adv-estimator rloo {SUM}", _corrections(), STALE
    ),
    "kl": Table(
        "KL estimators and placements",
        f"{PER_KL} --old-log-probs rollout",
        {f"{x}, {where}": f"--kl-estimator {x} --kl-placement {where}" for where in ("loss", "reward") for x in KINDS},
        [
            Cell(f"KL of the {kl}, staleness {k}", kl=kl, staleness=k)
            for kl in ("response", "token")
            for k in (0, 1)
        ],
    ),
    "recipes": Table(
        "Recipes",
        "",
        {
            "grpo.py": "",
            "GRPO (paper)": MEAN,
            "Dr. GRPO": f"--adv-estimator dr_grpo {NORM}",
            "RLOO": f"--adv-estimator rloo {SUM}",
            "DAPO without refill": "--zero-variance drop_from_denominator --clip-ratio-high 0.28",
            "REINFORCE++-baseline": "--adv-estimator reinforce_plus_plus_baseline",
            "MaxRL": "--adv-estimator maxrl",
        },
        [*RATES, MIXED, *SIZES, EIGHT],
    ),
}  # fmt: skip


class Oracle:
    """Measures settings; batches and true gradients are made once for each cell."""

    def __init__(self, script: str, max_length: int, drift: float, limit: int, alone_limit: int):
        self.script, self.max_length, self.drift = script, max_length, drift
        self.limit, self.alone_limit = limit, alone_limit
        self.scripts: dict[str, ModuleType] = {}
        self.cells: dict[str, tuple[Task, Batches, Tensor]] = {}

    def measure(self, flags: str, cell: Cell) -> Measured:
        """flags: of the script, or of another one whose name they begin with: "ppo.py --gae-lambda 0.5"."""
        first, _, rest = flags.strip().partition(" ")
        path, flags = (str(ROOT / first), rest) if first.endswith(".py") else (self.script, flags)
        if path not in self.scripts:
            self.scripts[path] = load_script(path)
        task, batches, truth = self._of(cell)
        step = Step(self.scripts[path], flags, task, reward=0.0 if cell.kl else 1.0)
        alone = step.depends_on_others(batches)
        if alone and step.kinds(step.batch(batches), len(batches.prompts)).max() >= self.alone_limit:
            batches = batches.draw(self.alone_limit, seed=3)
        return compare(step.gradients(batches, alone), batches.weights, truth)

    def _of(self, cell: Cell) -> tuple[Task, Batches, Tensor]:
        key = repr(cell)
        if key not in self.cells:
            task = Task(cell.pass_rates, self.max_length, cell.staleness, self.drift)
            batches = make_batches(task, cell.prompts, cell.group_size, self.limit)
            self.cells[key] = task, batches, task.gradient(0.0 if cell.kl else 1.0, cell.kl).flatten()
        return self.cells[key]


def verdict(cells: list[dict]) -> str:
    """What the cells of a row say together; one with sampled batches is right within three standard errors."""

    def holds(cell: dict, name: str) -> bool:
        return cell[name] is not None and abs(cell[name] - 1) <= max(1e-6, 3 * cell[f"{name}_error"])

    cells = [cell for cell in cells if cell["exact"] or cell["cosine"] is not None]
    if not cells:
        return "lost in the noise"
    if all(cell["cosine"] is None for cell in cells):
        return "no gradient"
    directions = [holds(cell, "cosine") for cell in cells]
    if all(directions):
        return "unbiased" if all(holds(cell, "ratio") for cell in cells) else "up to scale"
    fresh = [cell for cell in cells if not cell["staleness"]]
    if len(fresh) < len(cells) and all(holds(cell, "cosine") for cell in fresh):
        return f"{verdict(fresh)} on policy"
    single = [right for cell, right in zip(cells, directions) if len(cell["pass_rates"]) == 1]
    return "up to scale per prompt" if single and all(single) else "biased"


def markdown(record: dict) -> str:
    """The tables of a record."""
    text = ""
    for table in record["tables"]:
        labels = [cell["label"] for cell in table["rows"][0]["cells"]]
        kinds = list(dict.fromkeys(cell["kl"] for cell in table["rows"][0]["cells"]))
        text += f"### {table['title']}\n\n"
        text += f"Flags of all rows: `{table['flags']}`\n\n" if table["flags"] else ""
        text += f"| | | {' | '.join(map(_sampled, zip(*(row['cells'] for row in table['rows']))))} |\n"
        text += "|---" * (2 + len(labels)) + "|\n"
        for row in table["rows"]:
            said = [verdict([cell for cell in row["cells"] if cell["kl"] == kind]) for kind in kinds]
            verdicts = ", ".join(f"{kind}: {word}" if kind else word for kind, word in zip(kinds, said))
            text += f"| {row['name']} | {verdicts} | {' | '.join(map(_cell, row['cells']))} |\n"
        text += "\n"
    return text


def _cell(cell: dict) -> str:
    sampled = "" if cell["exact"] else "~"
    if cell["cosine"] is None:
        return f"{sampled}0"
    return f"{sampled}{min(cell['cosine'], 1):.3f}, {cell['ratio']:.3g}, {cell['noise']:.3g}"


def _sampled(column: Sequence[dict]) -> str:
    """The head of a column, with its largest standard errors."""
    errors = [max(cell[f"{name}_error"] for cell in column) for name in ("cosine", "ratio")]
    return column[0]["label"] + (f" (~ ± {errors[0]:.1g}, {errors[1]:.1g})" if any(errors) else "")


def draw(record: dict, file: Path) -> None:
    """The angle between the expected and the true gradient, in the column "mixed", else in the last one."""
    from matplotlib.figure import Figure  # slow to import

    tables = record["tables"]
    heights = [len(table["rows"]) + 3 for table in tables]
    figure = Figure(figsize=(9, 1 + 0.19 * sum(heights)), dpi=80, layout="constrained")
    for axes, table in zip(np.atleast_1d(figure.subplots(len(tables), 1, height_ratios=heights)), tables):
        shown = [next((c for c in row["cells"] if c["label"] == "mixed"), row["cells"][-1]) for row in table["rows"]]
        angles = [math.degrees(math.acos(max(-1.0, min(cell["cosine"] or 0, 1)))) for cell in shown]
        bars = axes.barh([row["name"] for row in table["rows"]], angles, color="tab:blue")
        axes.bar_label(bars, [f"{angle:.1f}°, length x {c['ratio']:.2g}" for angle, c in zip(angles, shown)], padding=3)
        axes.set(title=f"{table['title']} ({shown[0]['label']})", xlim=(0, max(*angles, 1.0) * 1.3))
        axes.invert_yaxis()
    figure.supxlabel("degrees between the expected and the true gradient")
    figure.savefig(file)


def rows_of(record: dict) -> Iterable[dict]:
    """One flat row for each number of the tables."""
    for table in record["tables"]:
        for row in table["rows"]:
            for cell in row["cells"]:
                rates = " ".join(map(str, cell["pass_rates"]))
                yield {"table": table["title"], "name": row["name"], "flags": row["flags"], **cell, "pass_rates": rates}


@dataclass
class Args:
    """Flags of the command."""

    tables: tuple[TableName, ...] = get_args(TableName)
    """which tables to measure"""
    script: str = str(ROOT / "grpo.py")
    """grpo.py or a copy of it"""
    settings: tuple[str, ...] = ()
    """flags of the script, one text for each row: measures them instead of the tables"""
    max_length: int = 3
    """tokens of the longest response"""
    drift: float = 0.3
    """distance that an update moves the logits of a prompt, for staleness"""
    groups: int = 10000
    """most groups: if all possible batches have more, batches with so many are sampled"""
    batches_alone: int = 1000
    """most batches in settings that need each batch alone, as with whitening"""
    output: str = ""
    """folder for oracle.json, oracle.md, oracle.csv and oracle.png"""


def main(args: Args) -> None:
    """Measures, and prints the tables."""
    if not 1 <= args.max_length <= 5:
        raise InputError(f"--max-length {args.max_length}: from 1 to 5, or there are too many responses")
    if min(args.groups, args.batches_alone) < 1000:
        raise InputError("--groups and --batches-alone: at least 1000")
    oracle = Oracle(args.script, args.max_length, args.drift, args.groups, args.batches_alone)
    tables = [TABLES[name] for name in args.tables]
    if args.settings:
        cells = [*RATES, MIXED, *SIZES, *STALE[1:]]
        tables = [Table(Path(args.script).name, "", {flags or "no flags": flags for flags in args.settings}, cells)]
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True)
    record: dict[str, Any] = {"command": shlex.join(["python", "-m", "tools.oracle", *sys.argv[1:]])}
    record |= {"commit": commit.stdout.decode().strip(), "tables": []}
    for table in tables:
        rows = []
        for name, flags in table.settings.items():
            flags = f"{flags} {table.flags}".strip()
            found = [(cell, oracle.measure(flags, cell)) for cell in table.cells]
            cells_of = [asdict(cell) | asdict(m) for cell, m in found]
            rows.append({"name": name, "flags": flags, "cells": cells_of})
        record["tables"].append({"title": table.title, "flags": table.flags, "rows": rows})
        print(markdown({"tables": record["tables"][-1:]}), flush=True)
    if args.output:
        write(record, Path(args.output))


def write(record: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "oracle.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "oracle.md").write_text(markdown(record))
    with (folder / "oracle.csv").open("w", newline="") as file:
        rows = [*rows_of(record)]
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    draw(record, folder / "oracle.png")


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.oracle", description=__doc__))
