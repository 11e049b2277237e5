"""The main function of a script, on responses that a test gives it, and a model of two matrices in float64: what
tests/reference_step.py computes by loops. No engine, no scorer, no file."""

import copy
from collections.abc import Iterator
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from lib import setup
from lib.data_proto import DataProto
from lib.distributed import World, full_tensor, make_mesh, reduce_metrics, shard_model
from lib.log.metrics import merge_metrics
from lib.model import Critic, ForwardConfig, Policy, Reference, load_critic, load_model
from lib.reward.scores import Rewards
from lib.rollout import truncated_rows
from lib.rollout.stream import Rollouts
from tests.common import float64_norms
from tests.reference_step import Row

VOCAB, WIDTH, T = 10, 4, 6
LR = 0.5


@cache
def module(name: str):
    """A decoder without layers, and a head on top: of the actor, the reference and the critic."""
    kind, load = (Qwen2ForTokenClassification, load_critic) if name == "critic" else (Qwen2ForCausalLM, load_model)
    torch.manual_seed({"actor": 0, "reference": 1, "critic": 2}[name])
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
    labels = {"num_labels": 1} if name == "critic" else {}
    model = kind(Qwen2Config(vocab_size=VOCAB, num_hidden_layers=0, tie_word_embeddings=False, **sizes, **labels))
    for p in model.parameters():
        p.data = torch.randn_like(p)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = float64_norms(load(folder, dtype=torch.float64))
    model.requires_grad_(name != "reference")
    return model, {key: w.clone() for key, w in model.state_dict().items()}


def on_ranks(name: str, world: World):
    """The module with the weights that it began with; of one rank, without FSDP, which takes most of a step's time."""
    model, weights = module(name)
    model.load_state_dict(weights)
    if world.size == 1:
        return model
    return shard_model(copy.deepcopy(model), make_mesh(world), torch.float64)


def weights_of(name: str) -> dict[str, torch.Tensor]:
    return module(name)[1]


class StubRollouts:
    """Gives every step its rows: each rank its groups."""

    loader = None

    def __init__(self, args, steps: Iterator[list[list[Row]]]):
        self.group_size, self.steps, self.multi_turn = args.group_size, steps, args.multi_turn.enabled
        self.sampling = args.rollout.sampling()

    def sync(self, actor, version):
        self.batches, self.version, actor.sampled_since = iter(next(self.steps)), version, version
        return {}

    def sleep(self):
        pass

    close = sleep

    def metrics(self, batch, step):
        return {}

    def batch_metrics(self, batch):
        return {}

    def prompts(self):
        return None

    def generate(self, prompts, n=1, sampling=None) -> DataProto:
        if sampling is not None:
            return self.greedy()
        whole = next(self.batches)
        groups = [whole[i : i + self.group_size] for i in range(0, len(whole), self.group_size)]
        own = groups[dist.get_rank() :: dist.get_world_size()]
        self.batch = as_batch([row for group in own for row in group], self.multi_turn)
        self.batch.batch["policy_version"] += self.version
        return self.batch

    def greedy(self) -> DataProto:
        rows = self.batch.non_tensor_batch["row"][:: self.group_size]
        own = {"turn_rewards": [], "reward_model": 0.0}
        return as_batch([Row(**vars(row) | own | {"score": row.greedy_score}) for row in rows])

    def balanced(self, actor, batch, *others):
        return batch, *others, {}

    def record_scores(self, batch):
        pass

    all_gather, own_rows = Rollouts.all_gather, Rollouts.own_rows


class StubRun:
    """Keeps what it is to log."""

    tracker = None

    def __init__(self, steps: int, pool: DataProto):
        self.number, self.pool, self.logged, self.step = steps, pool, [], 0

    def load(self, models, stateful):
        return {"pool": self.pool}

    def steps(self):
        return range(1, self.number + 1)

    def log(self, step, metrics):
        self.logged.append(reduce_metrics(merge_metrics(metrics)))
        return self.logged[-1]

    def ignore(self, *args, **kwargs):
        pass

    validate = record = save_rollouts = save = export = close = ignore


class StubScorers:
    """The scores that rows have, for the real `Rewards`, which adds those of tools and of a reward model."""

    tokenizer, scorers = None, ()
    recorder = SimpleNamespace(record=lambda name, compute: compute(), replaying=False)

    def submit(self, batch: DataProto, step: int):
        rows = batch.non_tensor_batch["row"]
        scores = torch.zeros(len(rows), T, dtype=torch.float64)
        for i, row in enumerate(rows):
            if any(row.sampled):
                last = max(t for t, s in enumerate(row.sampled) if s)
                scores[i, last] = torch.nan if row.score is None else row.score
        extras = {key: [row.components[key] for row in rows] for key in rows[0].components} if len(rows) else {}
        return SimpleNamespace(get=lambda: (scores, dict(extras), {}), time_metrics=dict)

    def close(self):
        pass


class StubRewardModel(SimpleNamespace):
    def scores(self, batch, tokenizer):
        values = [row.reward_model for row in batch.non_tensor_batch["row"]]
        return DataProto.from_dict({"scores": torch.tensor(values, dtype=torch.float64)})


def as_batch(rows: list[Row], multi_turn: bool = False) -> DataProto:
    def padded(name: str, dtype: torch.dtype) -> torch.Tensor:
        columns = [list(getattr(row, name)) for row in rows]
        return torch.tensor([column + [0] * (T - len(column)) for column in columns], dtype=dtype)

    prompts, responses = torch.tensor([row.prompt for row in rows]), padded("response", torch.long)
    present = torch.tensor([[t < len(row.response) for t in range(T)] for row in rows]).long()
    attention = torch.cat([torch.ones_like(prompts), present], 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": attention.cumsum(1) - 1,
        "response_mask": padded("sampled", torch.long),
        "rollout_log_probs": padded("rollout_log_probs", torch.float64),
        "policy_version": torch.zeros(len(rows), dtype=torch.long),
    }
    if multi_turn:
        tensors["turn_rewards"] = padded("turn_rewards", torch.float64)
        tensors |= {name: padded(name, torch.long) for name in ("anchor_states", "turn_numbers")}
    reasons = ["length" if row.truncated else "stop" for row in rows]
    columns = {"uid": [row.uid for row in rows], "finish_reason": reasons, "row": rows}
    objects = {name: np.fromiter(values, object, count=len(rows)) for name, values in columns.items()}
    return DataProto.from_dict(tensors, objects)


def run_script(script, args, steps: list[list[list[Row]]], world: World, pool: list[Row] = ()):
    """-> metrics of each step, gradients of each update, both as the script has them. steps: for each step, the rows of
    each batch that may be sampled."""
    names = ("actor", "reference", "critic") if hasattr(args, "gamma") else ("actor", "reference")
    modules = {name: on_ranks(name, world) for name in names}
    forward = ForwardConfig(args.optimizer.micro_batch_limit, args.rollout.sampling(), None, torch.float64)
    updates: list[dict[str, torch.Tensor]] = []

    def trained(kind, name):
        optimizer = torch.optim.SGD(modules[name].parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        model = kind(name, modules[name], optimizer, schedule, world, forward, args.optimizer.max_grad_norm, False)
        model.checked = True  # of rows: a matter of the attention, which there is none of
        optimizer.register_step_pre_hook(
            lambda *_: updates.append({k: full_tensor(p.grad).clone() for k, p in modules[name].named_parameters()})
        )
        return model

    factory = SimpleNamespace(
        policy=lambda name, *_: trained(Policy, name),
        critic=lambda name, *_: trained(Critic, name),
        reference=lambda actor: Reference(modules["reference"], forward),
    )
    model = StubRewardModel(coef=args.reward.reward_model_coef) if args.reward.reward_model else None
    rewards = Rewards(StubScorers(), model, args.multi_turn.reward_coef)
    left_over = DataProto()
    if pool:
        left_over = as_batch(pool, args.multi_turn.enabled)
        rewards.submit(left_over, 0).add_to(left_over, args.reward_keys)
        left_over.batch["truncated"] = truncated_rows(left_over)
        left_over.batch["policy_version"] -= 1
    run, validate = StubRun(len(steps), left_over), SimpleNamespace(close=lambda: None)
    inputs = SimpleNamespace(tokenizer=None, processor=None)
    of_setup = {
        "start": lambda args: (world, setup.check(args, world.device), inputs),
        "ModelFactory": lambda *_: factory,
        "make_rollouts": lambda *_: StubRollouts(args, iter(steps)),
        "make_rewards_and_validation": lambda *_: (rewards, validate),
    }
    with patch.multiple(setup, **of_setup), patch.object(script, "open_run", lambda *_: run):
        script.main(args)
    return run.logged, updates
