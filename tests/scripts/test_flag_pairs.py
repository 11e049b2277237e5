"""Every pair of values of the algorithm's flags: it is rejected with a reason, or a script's step with it equals the
loop of tests/reference_step.py, in loss, metrics and the gradient of every update.

FLAGS has some values of each flag. allpairspy makes cases that contain the pairs of values; a case that a script
rejects is cut down to the flags that do not go together, and its other pairs get further cases, until every pair is one
or the other. Float64: the two sides differ by the order of their sums, by some 1e-15 of numbers of size 1 (whitening
and a division by a small standard deviation make it 1e-12). Two columns are float32 by design, the overlong penalty and
the rewards of gdpo's reward_keys: here their numbers are sums of powers of two.
"""

import copy
import math
import os
import random
import re
from functools import cache
from itertools import combinations, islice
from unittest.mock import patch

import pytest
import torch
from allpairspy import AllPairs

import dapo
import grpo
import ppo
import remax
from lib import InputError, core_algos, setup
from lib.cli import flags as cli
from lib.distributed import World
from tests.common import ROOT, TOY_MODEL, run_ranks
from tests.reference_step import Bigram, Row, Trainer, at_tokens, sample_groups
from tests.scripts.one_step import LR, VOCAB, T, run_script, weights_of

SCRIPTS = {script.__name__: script for script in (grpo, dapo, ppo, remax)}
TOLERANCE = 1e-9
PROMPTS = 4
BASE = f"--prompts-per-step {PROMPTS} --max-prompt-length 2 --max-response-length 16".split()
BASE += ["--model", TOY_MODEL, "--train-files", str(ROOT / "data/toy/val.jsonl")]

# Values of each flag, by lines; the first, -, is not to give the flag. A hyper-parameter, NAME=VALUE in a flag such as
# --loss-kwargs, has a line of its own: --loss-kwargs:cap.
FLAGS = """
--adv-estimator: - dr_grpo rloo opo gpg maxrl grpo_passk grpo_leave_one_out grpo_batch_std reinforce_plus_plus
    reinforce_plus_plus_baseline gdpo optimal_token_baseline tir_optimal_token_baseline gigpo mt_grpo
--adv-kwargs:epsilon: - 0.5
--adv-kwargs:norm_adv_by_std_in_grpo: - False
--adv-kwargs:gamma: - 0.9
--adv-kwargs:turn_coef: - 0.5
--adv-kwargs:f_norm: - 2
--adv-kwargs:reward_weights: - 1,0.5
--adv-kwargs:reward_keys: - a,b
--adv-kwargs:singleton: - zero
--zero-variance: - mask drop_from_denominator
--group-size: 3 1
--num-mini-batches: 2 1
--update-epochs: 1 2
--micro-batch-tokens: 60 12
--max-response-length: 6 8
--max-grad-norm: - 0.1
--loss: - gspo cispo geo_mean sapo gpg reinforce dppo_tv dppo_kl dro two_sided decoupled clip_cov kl_cov
--loss-kwargs:cliprange_low: - 0.05
--loss-kwargs:cliprange_high: - 0.05
--loss-kwargs:ratio_high: - 1.05
--loss-kwargs:tau_pos: - 2
--loss-kwargs:tau_neg: - 2
--loss-kwargs:delta_low: - 0.01
--loss-kwargs:delta_high: - 0.01
--loss-kwargs:dro_beta: - 0.5
--loss-kwargs:delta: - 1.3
--loss-kwargs:cap: - 1.1
--loss-kwargs:kl_coef: - 0.5
--clip-ratio-low: - 0.05
--clip-ratio-high: - 0.05
--clip-ratio-c: - 1.1
--loss-agg-mode: - token-sum seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm
--loss-scale-factor: - 9
--token-masks:top_entropy: - 0.8
--token-masks:m2po: - 0.06
--token-masks:off_policy_sequence: - 0.02
--loss-kwargs:cov_ratio: - 0.1
--loss-kwargs:cov_bounds: - 0.01,2
--entropy-coef: - 0.05 -0.05
--entropy-target: - 4
--old-log-probs: - recompute rollout
--rollout-correction.level: - token sequence geometric measure
--rollout-correction.action: - truncate mask
--rollout-correction.bounds: - 0.7,1.4
--rollout-correction.batch-normalize: - True False
--rollout-correction.reject: - token_k1=0.6,1.6 token_k2=0.15 token_k3=0.15 seq_sum_k1=0.4,2.5 seq_sum_k2=0.4
    seq_sum_k3=0.4 seq_mean_k1=0.8,1.25 seq_mean_k2=0.1 seq_mean_k3=0.1 seq_max_k1=0.5,2 seq_max_k2=0.2 seq_max_k3=0.2
--kl-coef: - 0.1
--kl-estimator: - k1 k2 k3 abs k1+ k3+ k1_unbiased k2_unbiased k3_unbiased
--kl-placement: - loss reward
--kl-target: - 0.5
--kl-horizon: - 100
--temperature: - 0.7
--top-p: - 0.8
--top-k: - 5
--min-p: - 0.1
--reward-model: - MODEL
--reward-model-coef: - 0.5
--multi-turn.tools: - calculator REWARDING
--multi-turn.reward-coef: - 0.5
"""
ADVANTAGES = ("--adv-estimator", "--adv-kwargs", "--zero-variance")
OF_WORDS = ("--adv-kwargs", "--loss-kwargs", "--token-masks")  # flags of words NAME=VALUE
OWN = {  # in place of the values above, or further flags
    "dapo": """
--zero-variance: - keep mask drop_from_denominator
--max-gen-batches: - 1
--overlong-buffer: - 0 4
--overlong-factor: - 0.5
--overlong-filtering: - GIVEN
""",
    "ppo": """
--gamma: - 0.9
--gae-lambda: - 0.8
--gae-lambda-policy: - 0.7
--length-adaptive-alpha: - 0.5
--critic-warmup-steps: - 1
--cliprange-value: - 0.1
--kl-coef: - 0.1 0
""",
}
REWARDING = "benchmarks/turn_credit.py:calculator"  # a tool that rewards calls
BY_STD = ["grpo_passk", "gigpo", "mt_grpo"]
WITH_GROUPS = ["-", "dr_grpo", "rloo", "opo", "gpg", "grpo_leave_one_out", "grpo_batch_std", "gdpo", "gigpo", "mt_grpo"]
WITH_GROUPS += ["reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"]
CLIPPED = ["cispo", "gspo", "geo_mean", "two_sided", "decoupled", "clip_cov"]
CORRECTION = "--rollout-correction.action, --rollout-correction.bounds, --rollout-correction.batch-normalize"
# What flags, or a value of one, need of another flag: without that it is rejected, which is checked.
NEEDS = {
    "--adv-kwargs:epsilon": ("--adv-estimator", ["-", *BY_STD, "grpo_leave_one_out", "grpo_batch_std"]),
    "--adv-kwargs:norm_adv_by_std_in_grpo": ("--adv-estimator", BY_STD),
    "--adv-kwargs:gamma": ("--adv-estimator", ["reinforce_plus_plus", "gigpo"]),
    "--adv-kwargs:turn_coef": ("--adv-estimator", ["gigpo", "mt_grpo"]),
    "--adv-kwargs:singleton": ("--adv-estimator", WITH_GROUPS),
    "--adv-kwargs:f_norm": ("--adv-estimator", ["gpg"]),
    "--adv-kwargs:reward_weights, --adv-kwargs:reward_keys": ("--adv-estimator", ["gdpo"]),
    "--adv-estimator gigpo, --multi-turn.reward-coef": ("--multi-turn.tools", ["calculator", "REWARDING"]),
    "--adv-estimator mt_grpo": ("--multi-turn.tools", ["REWARDING"]),
    "--adv-estimator gdpo": ("--adv-kwargs:reward_keys", ["a,b"]),
    "--loss dro": ("--loss-kwargs:dro_beta", ["0.5"]),
    "--loss-kwargs:cliprange_low, --loss-kwargs:cliprange_high": ("--loss", CLIPPED),
    "--loss-kwargs:ratio_high": ("--loss", ["reinforce", "dppo_tv", "dppo_kl"]),
    "--loss-kwargs:tau_pos, --loss-kwargs:tau_neg": ("--loss", ["sapo"]),
    "--loss-kwargs:delta_low, --loss-kwargs:delta_high": ("--loss", ["dppo_tv", "dppo_kl"]),
    "--loss-kwargs:dro_beta": ("--loss", ["dro"]),
    "--loss-kwargs:delta": ("--loss", ["two_sided"]),
    "--loss-kwargs:cap": ("--loss", ["decoupled"]),
    "--loss-kwargs:kl_coef": ("--loss", ["kl_cov"]),
    "--clip-ratio-low, --clip-ratio-high, --clip-ratio-c": ("--loss", ["-"]),
    "--loss-scale-factor": ("--loss-agg-mode", ["seq-mean-token-sum-norm"]),
    "--loss-kwargs:cov_ratio": ("--loss", ["clip_cov", "kl_cov"]),
    "--loss-kwargs:cov_bounds": ("--loss", ["clip_cov"]),
    CORRECTION: ("--rollout-correction.level", ["-", "token", "sequence", "geometric"]),
    "--kl-estimator, --kl-placement": ("--kl-coef", ["0.1"]),
    "--kl-target": ("--kl-placement", ["reward"]),
    "--kl-horizon": ("--kl-target", ["0.5"]),
    "--reward-model-coef": ("--reward-model", ["MODEL"]),
    "--overlong-factor": ("--overlong-buffer", ["-", "4"]),
    "--max-gen-batches": ("--zero-variance", ["-"]),
}
NEEDS = {option: need for options, need in NEEDS.items() for option in options.split(", ")}
NOT_DIVIDED = ["dr_grpo", "rloo", "opo", "gpg", "grpo_batch_std", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
NOT_DIVIDED += ["optimal_token_baseline", "tir_optimal_token_baseline"]
KL_IN_REWARD = {"--kl-placement reward": ("--adv-estimator", NOT_DIVIDED)}
OWN_NEEDS = {
    "grpo": KL_IN_REWARD,
    "ppo": {  # which has a KL in the reward by default
        "--kl-estimator": ("--kl-coef", ["-", "0.1"]),
        "--kl-placement": ("--kl-coef", ["-", "0.1"]),
        "--kl-target": ("--kl-placement", ["-", "reward"]),
    },
    "dapo": KL_IN_REWARD
    | {  # which has an overlong penalty and refills by default
        "--adv-estimator maxrl": ("--overlong-buffer", ["0"]),
        "--adv-kwargs:reward_keys a,b": ("--overlong-buffer", ["0"]),
        "--group-size 1": ("--zero-variance", ["keep"]),
    },
}
Option = tuple[str, str]  # a flag and its value
Pair = frozenset[Option]


# ---- flags ---------------------------------------------------------------------------------------
def flags_of(script) -> dict[str, list[str]]:
    """{flag: values} of the script."""
    lines = (FLAGS + OWN.get(script.__name__, "").lstrip()).replace("\n    ", " ").strip().splitlines()
    table = {flag: values.split() for flag, values in (line.split(": ") for line in lines)}
    if script in (ppo, remax):
        table = {flag: values for flag, values in table.items() if not flag.startswith(ADVANTAGES)}
    return table


def words_of(flag: str, value: str) -> list[str]:
    """As one types it."""
    if value in ("-", "GIVEN"):
        return [] if value == "-" else [flag]
    if flag.startswith(OF_WORDS):
        flag, _, name = flag.partition(":")
        return [flag, f"{name}={value}"]
    if flag == "--rollout-correction.reject":
        return [flag, value]
    return [flag, *value.replace("MODEL", TOY_MODEL).replace("REWARDING", REWARDING).split(",")]


def typed(flag: str) -> str:
    return flag.replace(":", " ") if flag.startswith(OF_WORDS) else flag


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@cache
def values_by_field(script) -> dict[tuple[str, ...], object]:
    """What tyro makes of the words of each option. Flags are independent of each other, so one line parses many."""
    table = {flag: v for flag, v in flags_of(script).items() if not flag.startswith(OF_WORDS)}
    values: dict[tuple[str, ...], object] = {}
    for n in range(max(map(len, table.values()))):
        given = [words_of(flag, v[n]) for flag, v in table.items() if n < len(v) and v[n] != "-"]
        args = cli.tyro.cli(script.Args, args=[word for words in given for word in words])
        found = {name: value for name, value, _ in cli.walk(args)}
        values |= {tuple(words): found[field_of(words[0])] for words in given}
    return values


@cache
def base_args(script):
    sizes = ["--group-size", "8", "--overlong-buffer", "2"] if script is dapo else []
    return cli.tyro.cli(script.Args, args=[*BASE, *sizes])


@cache
def group_of(script) -> dict[str, str]:
    """{field of a flag: the name of its group in Args}, without the script's own flags."""
    args = base_args(script)
    groups = {name: value for name, value in vars(args).items() if isinstance(value, cli.Group)}
    return {field: name for name, group in groups.items() for field, *_ in cli.walk(group)}


def set_field(args, group: str, field: str, value) -> None:
    *parents, last = [*([group] if group else []), *field.split(".")]
    for parent in parents:
        args = getattr(args, parent)
    setattr(args, last, value)


def parsed(script, case: dict[str, str]):
    """The Args of a case: the real checks of flags and of the algorithm, on values that tyro has made once. Raises
    InputError."""
    words = [words_of(flag, value) for flag, value in case.items()]
    args = copy.deepcopy(base_args(script))
    for given in filter(None, words):
        field = field_of(given[0])
        if given[0] in OF_WORDS:
            setattr(args, field, (*getattr(args, field), given[1]))
        else:
            set_field(args, group_of(script).get(field, ""), field, values_by_field(script)[tuple(given)])
    with patch.object(cli.tyro, "cli", lambda *_, **__: args):
        cli.parse_flags(script.Args, [*BASE, *(word for given in words for word in given)])
    setup.check(args, torch.device("cpu"))
    core_algos.AdaptiveEntropyController(args.entropy_coef, args.entropy_target)
    return args


@cache
def reason(script, options: tuple[Option, ...]) -> str:
    """Why the script rejects the case; "" if it does not."""
    try:
        parsed(script, dict(options))
    except InputError as error:
        return str(error)
    return ""


fields_of = cache(cli.fields)


@pytest.fixture(autouse=True, scope="module")
def quick_checks():
    """Without the search for secrets, which takes most of the time and is not about the algorithm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "get_type_hints", cache(cli.get_type_hints))
        patch.setattr(cli, "fields", lambda args: fields_of(args if isinstance(args, type) else type(args)))
        patch.setattr(cli, "secret_in", lambda *_: "")
        yield


# ---- the data ------------------------------------------------------------------------------------
FEW = 7  # the seed of a batch in which two groups have equal scores, one of them also equal components


@cache
def rows_of(seed: int, group_size: int, sampling) -> list[Row]:
    """Of four prompts, the first of which has equal scores; with tool output, failed scorers, a group with one live
    row (in a second step, with none), truncated responses, and an engine whose log-probs are off."""
    rng = random.Random(seed)
    rows = []
    for g in range(PROMPTS):
        greedy = None if g == 2 and seed % 2 else rng.choice([0.0, 0.5])
        for k in range(group_size):
            n = T if k == 0 else rng.randint(2, T)
            score = rng.choice([0.0, 0.5, 1.0, 2.0]) + k / 4
            components = {"a": rng.choice([0.0, 0.5, 1.0]), "b": float(k)}
            if g == 0 or (g == 3 and seed == FEW):
                score, components = 1.0, {"a": 0.5, "b": 1.0} if g == 0 else components
            dead = group_size > 1 and ((g == 1 and k == 2) or (g == 2 and (k > 0 or seed == 2)))
            row = Row(
                f"{seed}-{g}",
                prompt=[g, (3 * g + seed) % VOCAB],
                response=[rng.randrange(VOCAB) for _ in range(n)],
                sampled=[not (n > 4 and t == 1) for t in range(n)],
                rollout_log_probs=[0.0] * n,
                score=None if dead else score,
                components=components,
                turn_rewards=[rng.choice([0.0, 0.25]) for _ in range(n)],
                reward_model=rng.choice([1.0, 0.5]),
                greedy_score=greedy,
                truncated=n == T and g != 2,
            )
            rows.append(row)
    tokens = [(i, t) for i, row in enumerate(rows) for t, is_own in enumerate(row.sampled) if is_own]
    for (i, t), x in at_tokens(Bigram(weights_of("actor")), rows, tokens, sampling).items():
        rows[i].turn_rewards = [x * own for x, own in zip(rows[i].turn_rewards, rows[i].sampled)]
        rows[i].rollout_log_probs[t] = min(x.log_prob.item() + rng.gauss(0.05, 0.3), -0.01)
    return rows


def number_of_steps(args) -> int:
    """Two for what a step leaves to the next one."""
    return 1 + bool(args.entropy_target or args.kl_target or getattr(args, "critic_warmup_steps", 0))


def data_of(script, args, steps: int) -> tuple[list[Row], list[list[list[Row]]]]:
    """(rows left over from an earlier step, for each step the rows of each batch)."""
    rows = lambda seed: rows_of(seed, args.group_size, args.rollout.sampling())  # noqa: E731
    if script is not dapo:
        return [], [[rows(1)], [rows(2)]][:steps]
    stale = [Row(**vars(row) | {"uid": "old", "fresh": False}) for row in rows(9)[-args.group_size :]]
    return stale if args.zero_variance == "refill" else [], [
        [rows(FEW), rows(3), rows(5)],
        [rows(2), rows(4), rows(6)],
    ][:steps]


def by_script(script, args, world: World):
    """-> metrics of each step, gradients of each update."""
    pool, steps = data_of(script, args, number_of_steps(args))
    return run_script(script, args, steps, world, pool)


def by_loops(script, args, ranks: int = 1, steps: int = 0):
    pool, batches_of_steps = data_of(script, args, steps or number_of_steps(args))
    models = [Bigram(weights_of(name)) for name in ("actor", "reference")]
    critic = Bigram(weights_of("critic")) if script is ppo else None
    trainer, logged = Trainer(args, *models, critic, ranks, LR), []
    for batches in batches_of_steps:
        rows, sampled = batches[0], {}
        if script is dapo:
            rows, pool, sampled = sample_groups(args, pool, batches)
            pool = [Row(**vars(row) | {"fresh": False}) for row in pool]
        groups = [rows[i : i + args.group_size] for i in range(0, len(rows), args.group_size)]
        rows = [row for rank in range(ranks) for group in groups[rank::ranks] for row in group]
        logged.append(trainer.step(rows) | sampled)
    return logged, trainer.updates


# Metrics that no flag of the algorithm reaches: they describe the batch, the optimizer and the machine.
OTHERS = ("reward/", "response_length/", "prompt_length/", "perf/", "rollout/dead_rows", "training/tokens")
OTHERS += ("training/prompt_tokens", "training/response_tokens", "actor/lr", "critic/lr")
OTHERS += ("training/skipped_updates", "training/empty_updates")


def differences(got, expected) -> list[str]:
    """Where the script's step is not that of the loops."""
    found = []
    for step, (logged, metrics) in enumerate(zip(*(x[0] for x in (got, expected)), strict=True)):
        logged = {name: value for name, value in logged.items() if not name.startswith(OTHERS)}
        found += [f"step {step}: {name} only on one side" for name in logged.keys() ^ metrics.keys()]
        for name in logged.keys() & metrics.keys():
            if not math.isclose(logged[name], metrics[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                found.append(f"step {step}: {name} is {logged[name]}, by the loops {metrics[name]}")
    if len(got[1]) != len(expected[1]):
        return [*found, f"{len(got[1])} updates, by the loops {len(expected[1])}"]
    for n, (gradient, reference) in enumerate(zip(got[1], expected[1])):
        for (name, g), (_, r) in zip(gradient.items(), reference.items()):
            if not torch.allclose(g, r, rtol=TOLERANCE, atol=TOLERANCE):
                found.append(f"update {n}: gradient of {name} differs by {(g - r).abs().max():.1e}")
    return found


# ---- the cases -----------------------------------------------------------------------------------
def pair(*options: Option) -> Pair:
    return frozenset(options)


class Cover:
    """Which pairs are rejected, and why, and which are still open. A case: {flag: value} of all flags."""

    def __init__(self, script):
        self.script, self.flags = script, flags_of(script)
        self.default = {flag: values[0] for flag, values in self.flags.items()}
        options = [(flag, value) for flag, values in self.flags.items() for value in values]
        self.open = {pair(a, b) for a, b in combinations(options, 2) if a[0] != b[0]}
        self.rejected: dict[Pair, str] = {}
        self.acting: set[Pair] = set()  # in an equal case that names neither of the two flags as without effect
        self.unfit: dict[Option, set[Option]] = {option: set() for option in options}
        for option in options:
            for flag, values in self.needs(option):
                for value in set(self.flags[flag]) - set(values):
                    self.unfit[option].add((flag, value))
                    self.unfit[flag, value].add(option)

    def needs(self, option: Option) -> list[tuple[str, list[str]]]:
        """[(another flag, values of it that do)]"""
        flag, value = option
        table = NEEDS | OWN_NEEDS.get(self.script.__name__, {})
        found = [table.get(f"{flag} {value}"), None if value == self.flags[flag][0] else table.get(flag)]
        return [need for need in found if need and need[0] in self.flags]

    def reject(self, a: Option, b: Option, why: str) -> None:
        self.rejected[pair(a, b)] = why
        self.open.discard(pair(a, b))
        self.unfit[a].add(b)
        self.unfit[b].add(a)

    def small(self, *options: Option) -> dict[str, str]:
        """The case of these options, what they need, and defaults."""
        given, queue = dict(options), list(options)
        while queue:
            for flag, values in self.needs(queue.pop()):
                if flag not in given:
                    given[flag] = values[0]
                    queue.append((flag, values[0]))
        return self.default | given

    def reason(self, case: dict[str, str]) -> str:
        return reason(self.script, tuple(case.items()))

    def tried(self, *options: Option) -> tuple[dict[str, str], str]:
        """(a case with these options, "" or why it is rejected), after a try of each value of the flags that the
        reason names."""
        case = self.small(*options)
        why = self.reason(case)
        named = tuple(set(re.findall(r"--[a-z][a-z._-]+[a-z]", why)) - {flag for flag, _ in options})
        for flag in [flag for flag in self.flags if named and flag.startswith(named) and flag not in dict(options)]:
            for value in self.flags[flag]:
                if not self.reason(case | {flag: value}):
                    return case | {flag: value}, ""
        return case, why

    def without(self, case: dict[str, str], flag: str) -> dict[str, str]:
        """The case with the default of this flag, and of those that need what it was."""
        case = case | {flag: self.default[flag]}
        for other, value in case.items():
            if any(case[needed] not in values for needed, values in self.needs((other, value))):
                return self.without(case, other)
        return case

    def culprits(self, case: dict[str, str]) -> list[Option]:
        """Of a rejected case, options that are rejected on their own, none of which can be left out."""
        for flag, value in case.items():
            fewer = self.without(case, flag)
            if fewer[flag] != value and self.reason(fewer):
                case = fewer
        return [option for option in case.items() if option[1] != self.default[option[0]]]

    def repaired(self, case: dict[str, str], keep: tuple[Option, ...] = ()) -> dict[str, str] | None:
        """The case with defaults in place of what is rejected; None if that is no more than `keep`."""
        while why := self.reason(case):
            wrong = self.culprits(case)
            if len(wrong) == 2 and (why := self.tried(*wrong)[1]):
                self.reject(*wrong, why)
            free = [flag for flag, value in wrong if (flag, value) not in keep]
            if not free:
                return None
            case = self.without(case, free[-1])
        return case

    def check_needs(self) -> None:
        """What NEEDS says is enough for every value, and is so: with another value the case is rejected."""
        for option in self.unfit:
            assert not (why := self.reason(self.small(option))), f"{option} needs something: {why}"
            for flag, values in self.needs(option):
                for value in [value for value in self.flags[flag] if value not in values]:
                    why = self.reason(self.small(option) | {flag: value})
                    assert why, f"{option} does not need {flag} {values}: {value} is accepted"
                    self.reject(option, (flag, value), why)

    def cases(self):
        """Accepted cases, until every pair is in one of them or rejected. The caller adds what it finds."""
        names = list(self.flags)

        def fits(row):
            new = names[len(row) - 1], row[-1]
            return self.unfit[new].isdisjoint(zip(names, row[:-1]))

        for row in AllPairs(list(self.flags.values()), filter_func=fits):
            yield self.repaired(dict(zip(names, row)))
        small = {}
        for a, b in sorted(map(sorted, self.open)):
            small[a, b], why = self.tried(a, b)
            if why:
                self.reject(a, b, why)
        while left := [options for options in small if pair(*options) in self.open]:
            case = small[left[0]]
            given = {f for f, value in case.items() if value != self.default[f]} | {f for f, _ in left[0]}
            for options in left[1:]:
                more = {f: v for f, v in small[options].items() if v != self.default[f]} | dict(options)
                is_free = all(case[f] == v or f not in given for f, v in more.items())
                if is_free and all(self.unfit[option].isdisjoint((case | more).items()) for option in more.items()):
                    case, given = case | more, given | more.keys()
            yield self.repaired(case, keep=left[0]) or small[left[0]]

    def found_equal(self, case: dict[str, str], named: list[str]) -> None:
        """named: flags that the run says to have no effect."""
        self.open -= {pair(a, b) for a, b in combinations(case.items(), 2)}
        acting = {flag: value for flag, value in case.items() if flag not in named}
        self.acting |= {pair(a, b) for a, b in combinations(acting.items(), 2)}


def trains_alike(one: tuple, other: tuple) -> bool:
    """Of two results of by_loops: whether all gradients are equal."""
    return len(one[1]) == len(other[1]) and all(
        torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(one[1], other[1])
        for x, y in zip(a.values(), b.values())
    )


def shown(case: dict[str, str]) -> str:
    return " ".join(word for flag, value in case.items() for word in words_of(flag, value))


ALL = os.environ.get("PAIRS") == "all"
FIRST = {"grpo": 40, "dapo": 25, "ppo": 20, "remax": 10}  # cases of the suite; allpairs begins with those of most pairs


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_pair_is_rejected_or_equal(name, one_rank):
    """And a flag that the run names as without effect has none. PAIRS=all runs the cases of all pairs, some four
    minutes, and says how many there are."""
    script, cover = SCRIPTS[name], Cover(SCRIPTS[name])
    pairs, count, wrong, idle = len(cover.open), 0, [], 0
    cover.check_needs()
    for case in islice(cover.cases(), None if ALL else FIRST[name]):
        args = parsed(script, case)
        expected = by_loops(script, copy.deepcopy(args))
        if found := differences(by_script(script, args, one_rank), expected):
            wrong.append("\n  ".join([shown(case), *found[:5]]))
        idle += not any(g.any() for gradient in expected[1] for g in gradient.values())
        text = " ".join(args.no_effect)
        named = [flag for flag in case if re.search(rf"{re.escape(typed(flag))}\b(?![-.])", text)]
        for flag in named:
            without = cover.without(case, flag)
            if without != case | {flag: without[flag]}:  # others need it
                continue
            if not trains_alike(expected, by_loops(script, parsed(script, without))):
                wrong.append(f"{shown(case)}\n  {flag} has an effect")
        cover.found_equal(case, named)
        count += 1
    equal = pairs - len(cover.open) - len(cover.rejected)
    counts = f"{len(cover.rejected)} rejected, {equal} equal ({equal - len(cover.acting - cover.rejected.keys())} only "
    counts += f"where one is named as without effect), {len(cover.open)} not run"
    print(f"\n{name}: {pairs} pairs of {len(cover.unfit)} values in {count} cases: {counts}")
    assert not wrong, "\n".join([f"{len(wrong)} cases differ", *wrong[:10]])
    assert idle <= count / 20, f"{idle} of {count} cases train nothing, so that they prove little"
    assert not (ALL and cover.open)


# ---- two ranks -----------------------------------------------------------------------------------
ON_TWO_RANKS = {  # cases of each script
    "grpo": (
        "--loss gspo --loss-agg-mode seq-mean-token-mean --kl-coef 0.1 --zero-variance drop_from_denominator "
        "--adv-estimator gigpo --multi-turn.tools calculator",
        "--adv-estimator gdpo --adv-kwargs:reward_keys a,b --update-epochs 2 --micro-batch-tokens 12 "
        "--token-masks:m2po 0.06",
        "--adv-estimator optimal_token_baseline --rollout-correction.level sequence --token-masks:top_entropy 0.8",
        "--loss clip_cov --loss-kwargs:cov_ratio 0.1 --loss-kwargs:cov_bounds 0.01,2 --micro-batch-tokens 12",
        "--loss kl_cov --loss-kwargs:cov_ratio 0.1 --adv-estimator rloo --kl-coef 0.1 --kl-placement reward "
        "--kl-target 0.5",
        "--adv-estimator reinforce_plus_plus --rollout-correction.reject seq_mean_k1=0.8,1.25 --entropy-target 4",
        "--loss-agg-mode seq-mean-token-sum-norm --token-masks:m2po 0.06 --top-p 0.8 --entropy-coef 0.05 "
        "--adv-estimator grpo_batch_std",
    ),
    "dapo": (
        "--num-mini-batches 1 --overlong-filtering GIVEN --kl-coef 0.1",
        "--adv-estimator gdpo --adv-kwargs:reward_keys a,b --overlong-buffer 0",
        "--overlong-buffer 4 --loss cispo --loss-agg-mode seq-mean-token-sum --max-gen-batches 1",
    ),
    "ppo": (
        "--length-adaptive-alpha 0.5 --gamma 0.9 --critic-warmup-steps 1",
        "--cliprange-value 0.1 --update-epochs 2",
    ),
    "remax": ("--kl-coef 0.1 --kl-placement reward --loss geo_mean --rollout-correction.reject token_k1=0.6,1.6",),
}


def two_rank_cases():
    for name, lines in ON_TWO_RANKS.items():
        for line in lines:
            words = line.split()
            yield SCRIPTS[name], Cover(SCRIPTS[name]).default | dict(zip(words[::2], words[1::2]))


def steps_on_ranks(world: World) -> list:
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    return [by_script(script, parsed(script, case), world) for script, case in two_rank_cases()]


def test_two_ranks_take_the_same_step():
    """Each rank has every second group; FSDP shards the weights, and micro-batches differ between the ranks."""
    cases = list(two_rank_cases())
    loops = [by_loops(script, parsed(script, case), ranks=2) for script, case in cases]  # and what ranks then have
    ranks = run_ranks(2, steps_on_ranks)
    for n, ((script, case), expected) in enumerate(zip(cases, loops)):
        for results in ranks:
            found = differences(results[n], expected)
            assert not found, "\n  ".join([script.__name__, shown(case), *found[:9]])


# ---- mini-batches --------------------------------------------------------------------------------
SCORED, FAILED, EQUAL, REJECTED = {}, {"score": None}, {"score": 1.0}, {"rollout_log_probs": [-20.0] * T}


def of_groups(args, *changes: dict) -> list[Row]:
    """A group of each change, with scores that differ before it."""
    rows, size = rows_of(8, args.group_size, args.rollout.sampling()), args.group_size
    return [
        Row(**vars(rows[k]) | {"uid": f"{g}", "score": float(k), "sampled": [True] * len(rows[k].response)} | change)
        for g, change in enumerate(changes)
        for k in range(size)
    ]


def args_of(script, flags: str):
    words = f"--group-size 3 --max-response-length 6 --micro-batch-tokens 60 {flags}".split()
    words += ["--max-gen-batches", "1", "--overlong-buffer", "0"] if script is dapo else []
    return cli.parse_flags(script.Args, [*BASE, *words])


@pytest.mark.parametrize(
    ("script", "flags", "change"),
    [
        *((script, "", FAILED) for script in SCRIPTS.values()),
        (dapo, "", EQUAL),  # groups that fill the step
        (grpo, "--zero-variance mask", EQUAL),
        (grpo, "--rollout-correction.reject seq_mean_k1=0.2,5", REJECTED),
    ],
)
def test_an_update_without_a_trained_token_moves_nothing(one_rank, script, flags, change):
    """Momentum and weight decay would move the weights all the same. Of four mini-batches one has a token, or none."""
    args, models = args_of(script, f"--num-mini-batches 4 {flags}"), 2 if script is ppo else 1
    for other in SCORED, change:
        rows = of_groups(args, change, other, change, change)
        [logged], gradients = run_script(script, args, [[rows]], one_rank)
        empty = 4 - (other is SCORED)
        assert len(gradients) == models * (4 - empty) and logged["training/empty_updates"] == models * empty
        assert logged["training/skipped_updates"] == 0


@pytest.mark.parametrize(("old", "new"), [(0, 4), (1, 1), (3, 1), (2, 2), (0, 1), (1, 0), (3, 0)])
def test_dapo_deals_leftovers_and_fillers_out_to_the_mini_batches(one_rank, old, new):
    """Of the groups of a kind, each mini-batch has as many as any other, or one more. The first, at the weights that
    sampled, has one of this step, so each step measures the mismatch."""
    for parts in 2, 4:
        args = args_of(dapo, f"--num-mini-batches {parts}")
        rows = of_groups(args, *[SCORED] * (old + new), *[EQUAL] * (PROMPTS - new))
        leftovers, batch = rows[: old * args.group_size], rows[old * args.group_size :]
        [logged], gradients = run_script(dapo, args, [[batch]], one_rank, leftovers)
        assert "rollout/k3" in logged
        assert len(gradients) == min(old + new, parts)


# ---- every flag does something -------------------------------------------------------------------
ACTS_WITH = {  # where the flag alone, and what it needs, would change nothing here
    "--max-response-length 8": {"--loss-agg-mode": "seq-mean-token-sum-norm"},
    "--zero-variance mask": {"--kl-coef": "0.1"},
    "--loss two_sided": {"--loss-kwargs:delta": "1.3"},
}
ONLY = {  # what else than the training a value changes; nothing, where it is the default, or says how to compute
    "nothing": {"--micro-batch-tokens 12", "--old-log-probs recompute", "--kl-estimator k3+", "--kl-placement loss"},
    "metrics": {"--rollout-correction.level measure", "--kl-estimator k2", "--kl-estimator k1+"},
}


@cache
def loops_of(script, options: tuple[Option, ...], steps: int):
    """Most values are compared with the same default case."""
    return by_loops(script, parsed(script, dict(options)), steps=steps)


def changes(script, cover: Cover, option: Option) -> str:
    """What changes by this value of a flag: training, metrics or nothing."""
    flag, value = option
    case = cover.small(option) | ACTS_WITH.get(f"{flag} {value}", {})
    case |= {} if flag == "--update-epochs" else {"--update-epochs": "2"}
    both = case, cover.without(case, flag)
    steps = max(number_of_steps(parsed(script, x)) for x in both)
    given, without = (loops_of(script, tuple(x.items()), steps) for x in both)
    if not trains_alike(given, without):
        return "training"
    return "nothing" if given[0] == without[0] else "metrics"


@pytest.mark.parametrize("name", ["grpo", *OWN])
def test_every_value_of_a_flag_changes_the_training(name):
    """Values that go with no other flag here, which test_every_pair_is_rejected_or_equal has in some case."""
    cover = Cover(SCRIPTS[name])
    flags = [flag for flag in cover.flags if name == "grpo" or f"\n{flag}:" in OWN[name]]
    for flag in flags:
        for value in cover.flags[flag][1:]:
            expected = next((what for what, options in ONLY.items() if f"{flag} {value}" in options), "training")
            assert changes(SCRIPTS[name], cover, (flag, value)) == expected, f"{flag} {value}"


NOT_HERE = {"prompts_per_step", "critic_model", "critic_lr"}  # the number of rows; what the stubs stand for


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_the_algorithm_is_here(name):
    fields = {field for field, *_ in cli.walk(base_args(SCRIPTS[name]))} - group_of(SCRIPTS[name]).keys() - NOT_HERE
    here = {field_of(words_of(flag, value)[0]) for flag, (_, value, *_) in flags_of(SCRIPTS[name]).items()}
    fields = {field for field in fields if not field.startswith("multi_turn.")}
    assert fields <= here, fields - here
