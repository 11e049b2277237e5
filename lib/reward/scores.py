"""From responses to scores: decodes a response, calls the scorers, and adds up their scores, those of a reward model,
tools and interactions, on its last token.

A scorer is the user's own code, so it runs in other processes (supervisor.py). If it fails, its
response gets failure_score, the failure is counted, and the run goes on. With workers=0 it runs in
this process, and an exception stops the run: this is for breakpoint()."""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import chain, count, groupby, islice
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lib import InputError
from lib.cli.secrets import redact
from lib.core_algos import ROUNDING, at_last_token
from lib.data import response_texts
from lib.data_proto import DataProto
from lib.distributed import Max, Mean, Metric, Sum, add_metrics, all_gather_lists, reduce_metrics, timed
from lib.model import reward_model_scores
from lib.reward.pool import Pool
from lib.reward.scorer import ARGUMENTS, LARGEST_SCORE, OF, Scorer, call, checked, load_scorer, text_hash
from lib.rollout import NoRecorder
from lib.sampling import seeded

SHADOW = "shadow/"  # begins the names of values that nothing is trained on
ALWAYS = 16  # a scorer that failed on its first responses, this many over all ranks, stops the run
Answer = tuple[int, list, float]  # index of the call, [kind, value] of each of its rows, seconds


@dataclass(eq=False)
class RewardManager:
    """Scores batches by the scorers of load_scorers while the caller does something else. An aborted
    response (no trained token) is not scored and gets 0. Of an agent's episode the last answer is
    scored, unless the agent gave a reward."""

    scorers: list[Scorer]
    tokenizer: PreTrainedTokenizerBase
    workers: int = 2  # processes; 0: scorers run in this process
    timeout_s: float = 30.0  # for one response; a call with several has that times their number
    memory_mb: int = 2048  # MiB that a worker may take beyond what the scorers' imports took
    failure_score: float | None = None  # of a response whose scorer failed; None: NaN
    recorder: NoRecorder = field(default_factory=NoRecorder)
    seed: int = 0  # with a response's uid and number in the group, decides what a scorer draws
    log: Path | None = None  # for what scorers print in workers; None: it is dropped

    def __post_init__(self) -> None:
        self._pool: Pool | None = None
        self._functions: list[Callable] | None = None  # without workers
        if not self.recorder.replays:
            self._start()
        self._scored: set[str] = set()  # names of scorers that have given a score
        self._works: set[str] = set()  # those that have on any rank, the same on all ranks
        self._failures: Counter = Counter()  # counts by (name, kind)
        self._last_failure: dict[str, str] = {}  # by name
        self._numbers: set[str] = set()  # keys that scorers have given numbers for
        self._dropped_keys: set[tuple[str, str]] = set()  # (name, key)

    def submit(self, batch: DataProto, step: int = 0) -> "PendingScores":
        """Decodes the responses and hands them to the workers; without workers, scores them. step: for
        scorers that ask for it. A group scorer gets all rows of a uid."""
        mask, columns = batch.batch["response_mask"].cpu(), batch.non_tensor_batch
        rows = mask.any(1).nonzero().flatten().tolist()
        if "answer" in columns:  # of --agent
            rows = [i for i in rows if columns["answer"][i] is not None]
            texts = list(columns["answer"][rows])
        else:
            texts = self._texts(batch.batch["responses"].cpu()[rows], mask[rows])
        truths = [columns["reward_model"][i]["ground_truth"] for i in rows]
        sources, infos = columns["data_source"][rows], columns["extra_info"][rows]
        samples = {i: dict(zip(ARGUMENTS, row)) for i, *row in zip(rows, sources, texts, truths, infos)}

        uids = list(columns.get("uid", [""] * len(mask)))
        in_group: dict[str, count] = defaultdict(count)
        keys = [f"{self.seed} {uid} {next(in_group[uid])}" for uid in uids]
        on_request = self._on_request(mask, columns, step)
        calls, tasks = [], []
        for k, scorer in enumerate(self.scorers):
            for part in _parts(scorer.form, rows, uids):
                given = [samples[i] | {name: on_request[name](i) for name in scorer.requested} for i in part]
                calls.append((k, part))
                tasks.append((k, self.timeout_s * len(part), given, f"{keys[part[0]]} {scorer.name}"))
        answers = iter(()) if self.recorder.replaying else self._answers(tasks, step)
        return PendingScores(self, mask, batch.batch["response_mask"].device, samples, calls, answers)

    def _on_request(self, mask: torch.Tensor, columns: dict[str, Any], step: int) -> dict[str, Callable]:
        decode = lru_cache(lambda ids: self.tokenizer.decode(list(ids)))  # once for a group
        media = columns.get("multi_modal_data", [{}] * len(mask))
        return {
            "num_tokens": lambda i: int(mask[i].sum()),
            "response_length": lambda i: 1 + int(mask[i].nonzero().max()),
            "max_response_length": lambda i: columns["max_response_length"][i],
            "finish_reason": lambda i: columns["finish_reason"][i],
            "prompt": lambda i: columns["raw_prompt"][i],
            "full_prompt": lambda i: decode(tuple(columns["raw_prompt_ids"][i])),
            "images": lambda i: media[i].get("image", []),
            "step": lambda _: step,
        }

    def _texts(self, responses: torch.Tensor, mask: torch.Tensor) -> list[str]:
        """Only what was sampled, not the texts of tools and environments. What was sampled before
        and after such a text is on different lines."""
        turns_of_rows = []  # the token ids of each turn
        for ids, sampled in zip(responses.tolist(), mask.tolist()):  # lists decode faster
            runs = groupby(zip(ids, sampled), itemgetter(1))
            turns_of_rows.append([[token for token, _ in run] for is_turn, run in runs if is_turn])
        texts = iter(response_texts(self.tokenizer, list(chain.from_iterable(turns_of_rows))))
        return ["\n".join(filter(None, islice(texts, len(turns)))) for turns in turns_of_rows]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _start(self) -> None:
        """Starts the scorers' imports, which take seconds."""
        if self.workers:
            scorers = [asdict(scorer) | {"time_limit_s": self.timeout_s} for scorer in self.scorers]
            first = not dist.is_initialized() or dist.get_rank() == 0
            self._pool = Pool(scorers, self.workers, self.memory_mb, self.seed, self.log, shows=first)
        else:
            with seeded(str(self.seed)):  # an import may draw
                self._functions = [load_scorer(own.spec, own.modules, own.kwargs) for own in self.scorers]

    def _answers(self, tasks: list[tuple[int, float, list[dict], str]], step: int) -> Iterator[Answer]:
        """Starts scoring; the iterator waits for the answers."""
        if self._pool is None and self._functions is None:
            self._start()
        if self._pool is not None:
            return self._pool.collect(self._pool.submit(tasks, step))
        assert self._functions is not None
        functions = self._functions
        scored = [self._score_here(functions[k], k, samples, key) for k, _, samples, key in tasks]
        return ((number, answers, seconds) for number, (answers, seconds) in enumerate(scored))

    def _score_here(self, function: Callable, k: int, samples: list[dict], key: str) -> tuple[list, float]:
        start = perf_counter()
        try:
            with seeded(key):
                results = call(function, self.scorers[k].form, samples)
            answers = [["ok", checked(result, sample)] for result, sample in zip(results, samples)]
            return answers, perf_counter() - start
        except (Exception, SystemExit) as error:
            where = f"in scorer {self.scorers[k].name}, {_describe(samples[0])}"
            if isinstance(error, SystemExit):  # it would silently end the run
                raise RuntimeError(f"sys.exit({error.code!r}) {where}") from error
            error.add_note(where)
            raise

    def _failed(self, name: str, kind: str, sample: dict, text: str) -> None:
        text = redact(text)  # removes API keys: a judge's error may repeat the key that it refuses
        if not self._failures[name, kind]:
            where = f"scorer {name}, {_describe(sample)}"
            print(f"reward: {kind} in {where}; the next are only counted\n{text}", flush=True)
        self._failures[name, kind] += 1
        self._last_failure[name] = text

    def _stop_if_none_works(self) -> None:
        """Raises InputError, on all ranks, if a scorer has failed on all of its ALWAYS or more
        responses so far. A collective until each scorer has given a score on some rank."""
        names = [scorer.name for scorer in self.scorers]
        if self._works.issuperset(names):
            return
        ranks = all_gather_lists([(self._scored, self._failures, self._last_failure)])
        self._works = set.union(*(scored for scored, _, _ in ranks))
        for name in names:
            of_ranks = [sum(n for (of, _), n in failures.items() if of == name) for _, failures, _ in ranks]
            number = sum(of_ranks)
            if name not in self._works and number >= ALWAYS:
                text = next(last[name] for _, _, last in ranks if name in last)
                raise InputError(f"scorer {name} failed on all of its first {number} responses, one with\n{text}")

    def _dropped(self, name: str, key: str, value) -> None:
        if (name, key) not in self._dropped_keys and len(self._dropped_keys) < ALWAYS:
            what = f"reward: scorer {name}: {unfit(key, value)}"
            print(f"{what}; it is left out, the next are only counted", flush=True)
        self._dropped_keys.add((name, key))


def _parts(form: str, rows: list[int], uids: Sequence[str]) -> list[list[int]]:
    """The rows of each call of a scorer of this form."""
    if form == "response":
        return [[row] for row in rows]
    groups: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        groups[uids[row] if form == "group" else ""].append(row)
    return list(groups.values())


def unfit(key: str, value) -> str:
    """Why a value that a scorer returned besides its score is rejected; "" if it is accepted."""
    shown = f"{key[:40]!r}: {str(value)[:40]}"
    if key == "reward_model" or key.startswith(SHADOW):
        return f"{shown} has the name of another score"
    if not (key.isprintable() and 0 < len(key) <= 100):
        return f"{shown} has no name that can be logged"
    if key == "pred" and isinstance(value, list | dict):
        return f"{shown} is a {type(value).__name__}; an answer is a text or a number"
    if isinstance(value, int | float) and not abs(value) <= LARGEST_SCORE:
        return f"{shown} is no number up to {LARGEST_SCORE:g}"
    return ""


def scorer_seconds(name: str, seconds: float, responses: int) -> dict[str, Metric]:
    """The mean of a response and the maximum of a call, of one call."""
    return {
        f"perf/scorer_seconds/{name}/mean": Mean(seconds, responses),
        f"perf/scorer_seconds/{name}/max": Max(seconds),
    }


def _describe(sample: dict) -> str:
    return f"data_source {sample['data_source']!r}, response {sample['solution_str'][:200]!r}"


@dataclass
class PendingScores:
    """The scores of a batch that was submitted."""

    manager: RewardManager
    mask: torch.Tensor  # (B, T), on the CPU
    device: torch.device
    samples: dict[int, dict]  # by row, without aborted ones
    calls: list[tuple[int, list[int]]]  # (scorer, rows)
    answers: Iterable[Answer]
    seconds: dict[int, float] = field(default_factory=dict)  # by call; empty in a replay

    def get(self) -> tuple[torch.Tensor, dict[str, list], dict[str, Metric]]:
        """Waits for the scores. Call it once. Returns token_level_scores (B, T), zero except at each
        row's last trained token; the scorers' other keys, B values each, None where a row has none;
        and metrics. Of several scorers each also gives its score as <name>, and its keys but "pred"
        as <name>/<key>. A collective. Raises InputError if a scorer has always failed."""
        manager, several = self.manager, len(self.manager.scorers) > 1
        results, counts = self._results()
        manager._stop_if_none_works()
        scores = torch.zeros(len(self.mask))
        extras: dict[str, list] = defaultdict(lambda: [None] * len(self.mask))
        dropped = 0
        for row in self.samples:
            given: dict = {}
            for k, scorer in enumerate(manager.scorers):
                result = results[k, row]
                score = result.pop("score")
                for key in [key for key, value in result.items() if unfit(key, value)]:
                    dropped += 1
                    manager._dropped(scorer.name, key, result.pop(key))
                scores[row] += scorer.weight * score
                if several:
                    result = {key if key == "pred" else f"{scorer.name}/{key}": result[key] for key in result}
                    result[scorer.name] = score
                given = result | given  # the first scorer's "pred" stays
            for key, value in given.items():
                extras[key][row] = value
                if isinstance(value, int | float):
                    manager._numbers.add(key)
        for key in manager._numbers:  # also keys that no row has this time
            extras.setdefault(key, [None] * len(self.mask))
        counts["reward/dropped_key_count"] = Sum(dropped)
        return at_last_token(scores, self.mask).to(self.device), dict(extras), counts

    def _results(self) -> tuple[dict[tuple[int, int], dict], dict[str, Metric]]:
        """(the result of each scorer for each row; how often they failed, by kind)."""
        manager, failed, of_others = self.manager, Counter(timeout=0, crash=0, error=0), 0
        failure_score = math.nan if manager.failure_score is None else manager.failure_score
        results: dict[tuple[int, int], dict] = {}
        recorded = manager.recorder.record("scores", lambda: DataProto(meta_info={"items": [*self._timed()]}))
        for number, answers in recorded.meta_info["items"]:
            k, rows = self.calls[number]
            name = manager.scorers[k].name
            for row, (kind, value) in zip(rows, answers):
                if kind == "ok":
                    response = text_hash(self.samples[row]["solution_str"])
                    of_others += value.pop(OF, response) != response  # a hostile worker may lack it
                    manager._scored.add(name)
                    results[k, row] = value
                else:
                    failed[kind] += 1
                    results[k, row] = {"score": failure_score}
                    manager._failed(name, kind, self.samples[row], value)
        counts: dict[str, Metric] = {f"reward/{kind}_count": Sum(count) for kind, count in failed.items()}
        if of_others:
            counts["faults/scores_of_other_rows"] = Max(of_others)
        return results, counts

    def _timed(self) -> Iterator[tuple[int, list]]:
        for number, answers, seconds in self.answers:
            self.seconds[number] = seconds
            yield number, answers

    def time_metrics(self, group: str = "") -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        for number, seconds in self.seconds.items():
            k, rows = self.calls[number]
            add_metrics(metrics, scorer_seconds(group + self.manager.scorers[k].name, seconds, len(rows)))
        return metrics

    def get_by_name(self) -> tuple[dict[str, list], dict[str, Metric]]:
        """get(), for scorers that are only logged. Returns {"shadow/<name>": B scores, None for a
        response without one}, and the metrics, under shadow/."""
        scores, extras, metrics = self.get()
        names = [scorer.name for scorer in self.manager.scorers]
        given = extras if len(names) > 1 else {names[0]: scores.sum(1).tolist()}
        of_name: dict[str, list] = {f"{SHADOW}{name}": [None] * len(scores) for name in names}
        for row in self.samples:
            for name in names:
                if not math.isnan(score := given[name][row]):
                    of_name[f"{SHADOW}{name}"][row] = score
        return of_name, {key.replace("reward/", SHADOW): metric for key, metric in metrics.items()}


# ---- with a reward model, and the rewards of turns ---------------------------------------------


@dataclass
class RewardModel:
    module: PreTrainedModel | None  # None in a replay, where the scores are recorded
    tokenizer: PreTrainedTokenizerBase | None
    coef: float
    micro_batch_tokens: int

    def scores(self, batch: DataProto, policy_tokenizer: PreTrainedTokenizerBase) -> DataProto:
        """`scores` (B,) of the conversations. A collective."""
        found = reward_model_scores(self.module, self.tokenizer, batch, policy_tokenizer, self.micro_batch_tokens)
        return DataProto.from_dict({"scores": found})


@dataclass
class Rewards:
    manager: RewardManager
    reward_model: RewardModel | None = None
    turn_coef: float = 1.0  # weight of the rewards that tools and interactions gave
    shadow: RewardManager | None = None  # of scorers that are logged and never trained on

    @timed("reward")
    def submit(self, batch: DataProto, step: int) -> "PendingRewards":
        """Starts the scorers, in other processes, on the responses of `batch`. A collective. Raises
        InputError if a scorer gets groups and one is not whole on a rank."""
        scorers = [*self.manager.scorers, *(self.shadow.scorers if self.shadow is not None else ())]
        if of_groups := [scorer.name for scorer in scorers if scorer.form == "group"]:
            uids_of_ranks = all_gather_lists([{*batch.non_tensor_batch["uid"]}])
            ranks_of_uid = Counter(uid for uids in uids_of_ranks for uid in uids)
            if split := sorted(str(uid) for uid, ranks in ranks_of_uid.items() if ranks > 1):
                why = f"{of_groups[0]} scores whole groups, and group {split[0]} has rows on two ranks"
                raise InputError(f"scorer {why}: keep the rows of a uid on one rank until submit(batch)")
        shadow = self.shadow.submit(batch, step) if self.shadow is not None else None
        scores = self.manager.submit(batch, step)
        return PendingRewards(self, scores, batch.batch["responses"], shadow)

    def close(self) -> None:
        self.manager.close()
        if self.shadow is not None:
            self.shadow.close()


@dataclass
class PendingRewards:
    rewards: Rewards
    scores: PendingScores
    responses: torch.Tensor  # (B, T), as submitted
    shadow: PendingScores | None

    @timed("reward")
    def add_to(self, batch: DataProto, reward_keys: Sequence[str] = ()) -> tuple[dict[str, list], dict[str, Metric]]:
        """Waits for the scores and adds token_level_scores (B, T), on each row's last token;
        reward_extra_info, a dict of the scorers' other values for each row; and with reward_keys,
        reward_components (B, K). A row without a score is masked out. Returns (other values by key,
        metrics). A collective. Raises InputError if these are not the submitted rows in their order."""
        if not torch.equal(batch.batch["responses"], self.responses):
            how = "sort or filter a batch before submit(batch)"
            raise InputError(f"these are not the rows that were submitted: {how}")
        manager = self.rewards.manager
        scores, extras, failures = self.scores.get()
        failures |= self.scores.time_metrics()
        unscored = scores.isnan().any(1)
        batch.batch["response_mask"][unscored] = 0
        scores[unscored] = 0
        if "turn_rewards" in batch.batch:
            scores = scores + self.rewards.turn_coef * batch.batch["turn_rewards"]
        if (model := self.rewards.reward_model) is not None:
            compute, start = partial(model.scores, batch, manager.tokenizer), perf_counter()
            values = manager.recorder.record("reward_model", compute).batch["scores"]
            scores = scores + model.coef * at_last_token(values, batch.batch["response_mask"])
            extras["reward_model"] = values.tolist()
            if not manager.recorder.replaying:
                failures |= scorer_seconds("reward_model", perf_counter() - start, len(batch))
        batch.batch["token_level_scores"] = scores
        if reward_keys:
            batch.batch["reward_components"] = reward_components(extras, reward_keys, scores)
        if self.shadow is not None:  # from here on nothing is trained on
            shadow_scores, shadow_metrics = self.shadow.get_by_name()
            rewards = scores.sum(1).tolist()
            rewards = [None if dead else value for dead, value in zip(unscored.tolist(), rewards)]
            for name, values in shadow_scores.items():
                shadow_metrics[f"{name}/correlation"] = correlation(values, rewards)
            extras |= shadow_scores
            add_metrics(failures, shadow_metrics | self.shadow.time_metrics(SHADOW))
        rows = ({key: x[i] for key, x in extras.items() if x[i] is not None} for i in range(len(batch)))
        batch.non_tensor_batch["reward_extra_info"] = np.array([*rows], dtype=object)
        return extras, failures


def reward_components(extras: Mapping[str, list], keys: Sequence[str], scores: torch.Tensor) -> torch.Tensor:
    """(B, K): the K rewards that a scorer gave each row besides its score; NaN where it gave none.
    A collective. Raises InputError on all ranks for a key without any numbers."""
    # if all values are None, extras has the key because an earlier step had numbers
    known = {key: any(value is None or is_number(value) for value in extras.get(key, ())) for key in keys}
    for key, anywhere in reduce_metrics({key: Max(float(here)) for key, here in known.items()}).items():
        if not anywhere:
            found = ", ".join(extras)
            raise InputError(f"--adv-kwargs reward_keys={key}: the scorers return no such number, only {found}")
    columns = [extras.get(key, [None] * len(scores)) for key in keys]
    values = [[float(x) if is_number(x) else math.nan for x in column] for column in columns]
    return torch.tensor(values, device=scores.device).T


def correlation(x: list, y: list) -> Metric:
    """Pearson's, over the responses of all ranks with numbers in both; without data where one does not
    vary. A collective."""
    pairs = all_gather_lists([pair for pair in zip(x, y) if all(map(is_number, pair))])
    columns = np.array(pairs, dtype=float).reshape(-1, 2).T  # (2, N)
    if not pairs or (np.ptp(columns, 1) <= ROUNDING * abs(columns).max(1)).any():
        return Mean(0.0, 0)
    return Mean(float(np.corrcoef(columns)[0, 1]), 1)


def is_number(value) -> bool:
    """True for a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
