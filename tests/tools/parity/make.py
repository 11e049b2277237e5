"""Writes the dumps of this folder with the real packages, as the files dump_of_*.py do. They are no dependencies:

    pip install --no-deps --target /tmp/verl verl==0.9.1 ray msgpack omegaconf hydra-core orjson codetiming \\
        antlr4-python3-runtime==4.9.3 torchdata pylatexenc
    pip install --no-deps --target /tmp/trl trl==1.16.0
    pip install --no-deps --target /tmp/openrlhf openrlhf==0.11.2
    rm -r /tmp/verl/tests /tmp/openrlhf/tests     # they would hide ours
    PYTHONPATH=/tmp/verl python -m tests.tools.parity.make verl       # and so on
"""

import contextlib
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.common import TOY_MODEL

FOLDER = Path(__file__).parent
EOS, B, T, GROUP = 9, 8, 10, 4
LEARNING_RATE = 3e-5  # at 3e-4 k3 exceeds 10 at a token, where grpo.py bounds it and TRL does not
SETTINGS: dict[str, dict[str, Any]] = {
    "verl": {"clip_ratio_high": 0.28, "loss_agg_mode": "seq-mean-token-mean", "eos_token_id": EOS},
    "trl": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04},
    "openrlhf": {"advantage_estimator": "group_norm", "eps_clip_high": 0.28},
}


def batch() -> dict[str, torch.Tensor]:
    """Two groups of four responses; the policy has moved far enough for clips."""
    torch.manual_seed(0)
    lengths = torch.tensor([10, 3, 7, 1, 10, 5, 8, 2])
    mask = torch.arange(T) < lengths[:, None]
    responses = torch.randint(10, 30, (B, T))
    ended = lengths < T
    responses[ended, lengths[ended] - 1] = EOS
    old = -2 * torch.rand(B, T)
    log_probs = old + 0.3 * torch.randn(B, T)
    rewards = torch.tensor([1.0, 0, 0.5, 0, 1, 1, 0, 0.25])
    found = {"mask": mask, "responses": responses * mask, "old": old, "new": log_probs}
    return found | {"rewards": rewards, "group": torch.arange(B) // GROUP}


def verl(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """verl 0.9.1: advantages by its estimator, the loss by the function that its actor calls."""
    import numpy as np
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    b = batch()
    mask, log_prob = b["mask"].long(), b["new"].requires_grad_()
    rewards = torch.zeros(B, T)
    rewards[torch.arange(B), mask.sum(1) - 1] = b["rewards"]
    estimator = core_algos.get_adv_estimator_fn(settings.get("adv_estimator", "grpo"))
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=np.array(b["group"].tolist()))
    known = {key: settings[key] for key in ("clip_ratio_low", "clip_ratio_high", "loss_agg_mode") if key in settings}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=B, ppo_mini_batch_size=B, **known)
    policy_loss = core_algos.get_policy_loss_fn(settings.get("loss_mode", "vanilla"))
    inputs = {"old_log_prob": b["old"], "log_prob": log_prob, "advantages": advantages, "response_mask": mask}
    loss, metrics = policy_loss(**inputs, loss_agg_mode=config.loss_agg_mode, config=config)
    [gradient] = torch.autograd.grad(loss, log_prob)
    batch_of_verl = {"responses": b["responses"], "response_mask": mask, "token_level_rewards": rewards}
    batch_of_verl |= {"advantages": advantages, "group": b["group"], "old_log_probs": b["old"]}
    logged = {"ppo_kl": torch.tensor(metrics["actor/ppo_kl"])} if metrics else {}  # gpg logs nothing
    return batch_of_verl | {"log_prob": log_prob, "loss": loss, "gradient": gradient} | logged


def trl(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """TRL 1.16: the second update of GRPOTrainer on a generation, when the ratios have left 1."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from tests.tools.parity.dump_of_trl import Dumping

    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}"}]} for a, b in ((5, 7), (55, 72))]
    answers = iter([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25] * 9)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sizes = {"per_device_train_batch_size": B, "num_generations": GROUP, "max_completion_length": T}
        where = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
        config = GRPOConfig(num_iterations=2, max_steps=2, learning_rate=LEARNING_RATE, **sizes, **where, **settings)
        trainer = Dumping(
            TOY_MODEL,
            lambda completions, **_: [next(answers) for _ in completions],
            config,
            Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(TOY_MODEL, padding_side="left"),
        )
        trainer.train()
        return load_file("trl.safetensors")  # of the last update


def openrlhf(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """OpenRLHF 0.11: its PolicyLoss alone, since the package needs deepspeed; the advantages' line is repeated here."""
    [folder] = importlib.util.find_spec("openrlhf").submodule_search_locations
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [f"{folder}/models"]
    sys.modules["openrlhf.models"] = package  # without its __init__
    sys.modules.setdefault("deepspeed", types.ModuleType("deepspeed"))  # imported, and not used by the loss
    from openrlhf.models.loss import PolicyLoss

    b = batch()
    log_probs = b["new"].requires_grad_()
    grouped = b["rewards"].view(-1, GROUP)
    rows = ((grouped - grouped.mean(-1, keepdim=True)) / (grouped.std(-1, keepdim=True) + 1e-9)).flatten()
    advantages = rows[:, None] * b["mask"]
    policy_loss = PolicyLoss(clip_eps_low=0.2, clip_eps_high=settings["eps_clip_high"])
    loss, _, ppo_kl, *_ = policy_loss(log_probs, b["old"], advantages, b["mask"])
    [gradient] = torch.autograd.grad(loss, log_probs)
    inputs = {"action_mask": b["mask"], "rewards": b["rewards"], "group": b["group"], "advantages": advantages}
    inputs |= {"action_log_probs": log_probs, "old_action_log_probs": b["old"]}
    return inputs | {"loss": loss, "gradient": gradient, "ppo_kl": ppo_kl}


MAKERS = {"verl": verl, "trl": trl, "openrlhf": openrlhf}


def write(folder: Path, name: str, settings: dict[str, Any]) -> None:
    tensors = {key: x.detach().contiguous().clone() for key, x in MAKERS[name](settings).items()}
    save_file(tensors, folder / f"{name}.safetensors")
    if name == "trl":
        settings = settings | {"max_completion_length": T}
    (folder / f"{name}.json").write_text(json.dumps(settings) + "\n")


if __name__ == "__main__":
    write(FOLDER, sys.argv[1], SETTINGS[sys.argv[1]])
