"""Twenty-five silent bugs of RL trainers, each as a small change of a function, and the check that finds it.

A bug is planted by replacing text in the source of a function (`planting.planted`). `python -m tests.mutants.mutants`
plants all of them and writes the table of benchmarks/results/silent_bugs.md.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.common import ROOT

ENGINE, REWARDS = "lib.rollout.engine:add_responses", "lib.reward.scores:PendingScores._results"
STEP, SAMPLE = "lib.model.trained:TrainedModel.step", "lib.rollout.hf_engine:sample_tokens"
MASK = "sampled[i, :n] = 1 if masks is None"
UNLIKE = "            if after[end : end + 1] != character:\n                return "
PREFILL = "input_ids=ids, position_ids=positions, logits_to_keep=1"
GENERATION = '"add_generation_prompt": '
TILED = "group = group[np.arange(len(group)).reshape(-1, 4).T.ravel()]"
KEPT = "logits.masked_fill(logits < least_kept(logits, *sampling.truncation), NEVER)\n        cdf = "
COPY = ["--rollout-engine", f"{ROOT / 'tests/mutants/engines.py'}:CopyEngine"]
SMALL_MICRO_BATCHES = ["--micro-batch-tokens", "150"]
REJECTED = ["--rollout-engine", f"{ROOT / 'tests/mutants/engines.py'}:ApartEngine"]
REJECTED += ["--rollout-correction.level", "measure"]
REJECTED += ["--rollout-correction.reject", "seq_mean_k1=0.99995,1.00005"]  # every seventh row
SEVERAL = ["--num-mini-batches", "2", "--update-epochs", "2", "--lr", "1e-3"]


@dataclass
class Mutant:
    said: str
    """what it is | how it comes about in practice | faults/<check>, or a part of the message | at which step it is
    found, 0: before the first | variant: a second form of another bug"""
    changes: list[tuple[str, str, str]]
    """(module:function, text of its source, what stands there instead)"""
    flags: list[str] = field(default_factory=list)
    script: str = "grpo"
    prepare: Callable[[Path], list[str]] | None = None
    """makes files in a folder, and returns flags"""
    healthy: Callable[[Path], list[str]] | None = None
    """prepare of the run without the bug, if the bug is in these files"""

    def __post_init__(self):
        self.bug, self.arises, self.check, step, *variant = self.said.split(" | ")
        self.step, self.variant = int(step), variant == ["variant"]


def toy_copy(folder: Path, name: str = "toy") -> Path:
    copy = folder / "model"
    shutil.copytree(ROOT / "data" / name / "model", copy, dirs_exist_ok=True)
    return copy


def with_bos(folder: Path) -> list[str]:
    """The toy with a tokenizer that begins each text with <|im_start|>, as its template does."""
    copy = toy_copy(folder)
    special = "<|im_start|>"
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    id_ = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == special)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": special, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {special: {"id": special, "ids": [id_], "tokens": [special]}},
    }
    file.write_text(json.dumps(tokenizer))
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": special}))
    return ["--model", str(copy)]


def template_of_another_family(folder: Path) -> list[str]:
    copy = toy_copy(folder)
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    return ["--model", str(copy), "--max-prompt-length", "100"]


def tools(folder: Path) -> list[str]:
    """The toy with a calculator, and a template that leaves the calls out of earlier turns, as others do thoughts."""
    copy = toy_copy(folder, "toy_tools")
    file = copy / "chat_template.jinja"
    before, loop, rest = file.read_text().partition("{%- for call in message['tool_calls'] or [] %}")
    file.write_text(before + "{%- for call in [] %}" + rest)
    assert loop
    data = ["--train-files", str(ROOT / "data/toy_tools/val.jsonl"), "--max-prompt-length", "48"]
    return ["--model", str(copy), *data, "--multi-turn.tools", "calculator", "--max-response-length", "96"]


def plant(where: str, old: str, new: str) -> list[tuple[str, str, str]]:
    return [(where, old, new)]


MUTANTS = {
    "mask_shifted": Mutant(
        "mask shifted by one | the mask of the inputs used for the labels | tokens_not_trained | 1",
        plant("grpo:update", 'losses * t["loss_mask"]', 'losses * t["loss_mask"].roll(1, 1)'),
    ),
    "mask_shifted_in_the_batch": Mutant(
        "mask shifted by one, in the batch | the mask of the inputs used for the labels | "
        "mask_outside_response | 1 | variant",
        plant(ENGINE, MASK, "sampled[i, 1 : n + 1] = 1 if masks is None"),
    ),
    "before_temperature": Mutant(
        "log-probs before temperature | the engine returns raw log-probs | engine_apart | 1",
        plant(SAMPLE, "log_probs_of(logits, token)", "log_probs_of(logits * sampling.temperature, token)"),
        ["--temperature", "0.8"],
    ),
    "stale_weights": Mutant(
        "stale weights | the engine's version is not counted up, so that a sync has nothing to do | engine_apart | 2",
        plant("grpo:main", "rollouts.sync(actor, step - 1)", "rollouts.sync(actor, 0)"),
        COPY,
    ),
    "eos_untrained": Mutant(
        "eos untrained | the mask ends before the end token | end_not_trained | 1",
        plant(ENGINE, MASK, "sampled[i, : n - 1] = 1 if masks is None"),
    ),
    "eos_out_of_the_loss": Mutant(
        "eos untrained, in the loss | log-probs of tokens 1 to T against a mask of tokens 0 to T - 1 | "
        "tokens_not_trained | 1 | variant",
        plant("grpo:update", 'losses * t["loss_mask"]', 'losses * (t["loss_mask"] & t["loss_mask"].roll(-1, 1))'),
    ),
    "rewards_in_another_order": Mutant(
        "rewards in another order | scores are taken as they come from the workers | scores_of_other_rows | 1",
        plant(REWARDS, "self.calls[number]", "self.calls[-1 - number]"),
    ),
    "rows_sorted_after_submission": Mutant(
        "rows in another order than their rewards | rows are sorted for balance while they are scored | "
        "these are not the rows that were submitted | 1 | variant",
        plant("grpo:main", "actor.check_rows(batch)", "batch = batch[list(range(len(batch)))[::-1]]"),
    ),
    "groups_mixed": Mutant(
        "group ids mixed | tile and repeat confused in the estimator's group ids | group_ids | 1",
        plant("lib.data.balance:gather_rows", "return_inverse=True)", f"return_inverse=True)\n    {TILED}"),
    ),
    "uids_mixed": Mutant(
        "group ids mixed, in the batch | tile and repeat confused where prompts are repeated | "
        "group_of_two_prompts | 1 | variant",
        plant(
            "lib.rollout.stream:Rollouts.generate",
            "prompts.repeat(n, interleave=True)\n",
            "prompts.repeat(n, interleave=False)\n"
            '    rows.non_tensor_batch["uid"] = np.repeat(prompts.non_tensor_batch["uid"], n)\n',
        ),
    ),
    "kl_sign": Mutant(
        "sign of the KL | a penalty subtracted from a loss | kl_push | 2",
        plant("grpo:update", "losses + args.kl_coef * kl", "losses - args.kl_coef * kl"),
        ["--kl-coef", "0.001"],
    ),
    "kl_sign_in_the_reward": Mutant(
        "sign of the KL, in the reward | a penalty added to a reward | kl_is_paid | 2 | variant",
        plant("lib.core_algos.kl:apply_kl_penalty", "- beta * kl", "+ beta * kl"),
        script="ppo",
    ),
    "ratio_inverted": Mutant(
        "ratio inverted | pi_old / pi | loss_share | 1",
        plant("grpo:policy_loss", "(log_probs - old_log_probs)", "(old_log_probs - log_probs)"),
    ),
    "clip_bounds_swapped": Mutant(
        "clip bounds swapped | low and high confused, which shows only where they differ | tokens_not_clipped | 1",
        plant(
            "dapo:policy_loss",
            "1 - args.clip_ratio_low, 1 + args.clip_ratio_high",
            "1 - args.clip_ratio_high, 1 + args.clip_ratio_low",
        ),
        SEVERAL,
        script="dapo",
    ),
    "epsilon_too_large": Mutant(
        "epsilon too large | 20 % written as 20 | tokens_not_clipped | 1",
        plant("grpo:policy_loss", "1 + args.clip_ratio_high", "1 + 100 * args.clip_ratio_high"),
        [*SEVERAL, "--lr", "5e-4", "--update-epochs", "4"],
    ),
    "gradients_not_zeroed": Mutant(
        "gradients not zeroed | zero_grad left out, or called on another optimizer | gradients_left | 2",
        plant(STEP, "self.optimizer.zero_grad()", "pass"),
    ),
    "last_micro_batch_dropped": Mutant(
        "last micro-batch dropped | drop_last, or a range that ends one too early | rows_not_seen | 1",
        plant("lib.model.trained:micro_batches", "enumerate(micros)", "enumerate(micros[:-1])"),
        SMALL_MICRO_BATCHES,
    ),
    "denominators_local": Mutant(
        "denominators local | a mean within each micro-batch, then a sum or mean over micro-batches | loss_share | 1",
        plant("grpo:update", '"global_tokens": tokens, "global_rows": rows, ', ""),
        SMALL_MICRO_BATCHES,
    ),
    "padding_trained": Mutant(
        "padding trained | no mask after the end token where pad and end token are the same | "
        "mask_outside_response | 1",
        plant(ENGINE, MASK, "sampled[i, :] = 1 if masks is None"),
    ),
    "double_bos": Mutant(
        "double BOS | the template writes a BOS and the tokenizer adds another | "
        "is not what its chat template gives | 0",
        plant(
            "lib.data.dataset:RLHFDataset._prompt", "ids if templated or self.start == ids[: len(self.start)] else", ""
        ),
        prepare=with_bos,
    ),
    "wrong_template": Mutant(
        "wrong chat template | a template of another family, whose tokens this tokenizer does not have | "
        "no special token ends a turn in its chat template | 0",
        [],
        prepare=template_of_another_family,
        healthy=lambda folder: ["--model", str(toy_copy(folder))],
    ),
    "no_generation_prompt": Mutant(
        "chat template without generation prompt | add_generation_prompt forgotten | "
        "is not what its chat template gives | 0 | variant",
        plant("lib.data.dataset:RLHFDataset.__init__", f"{GENERATION}True", f"{GENERATION}False"),
    ),
    "thinking_dropped": Mutant(
        "template that drops thinking | the engine gets the conversation rendered anew, the trainer what was sampled | "
        "engine_apart | 1",
        [
            ("agent.multi_turn:glue", f"{UNLIKE}None", f"{UNLIKE}after[len(before) :].lstrip()"),
            ("agent.episode:Episode._sample_turn", "[*request.raw_context]", "settings.encode(request.rendered)"),
        ],
        prepare=tools,
    ),
    "lora_not_merged": Mutant(
        "LoRA not merged | the engine gets the weights without the adapters | weight sync to version 1 failed | 2",
        plant(
            "lib.distributed.sharding:merged_weight",
            'weight = (weight + layer.scaling["default"] * (B @ A)).to(weight.dtype)',
            "pass",
        ),
        [*COPY, "--lora-rank", "4"],
    ),
    "positions_off": Mutant(
        "position ids off | the response's positions begin at that of the prompt's last token | "
        "the log-probs of a row differ from those of the row alone | 1",
        plant(ENGINE, "torch.arange(1, T + 1, device=device)", "torch.arange(T, device=device)"),
    ),
    "scheduler_stuck": Mutant(
        "scheduler stuck | scheduler.step() left out: the learning rate stays at the first one of the warm-up | "
        "updates_ahead | 2",
        plant(STEP, "self.scheduler.step()", "pass"),
        ["--warmup-steps", "3"],
    ),
    "reference_trains": Mutant(
        "reference that trains | the reference is the policy's own module, not a copy | "
        "the reference's weights have changed | 2",
        plant("lib.setup.models:ModelFactory.reference", "if self.model.lora_rank:", "if True:"),
        ["--kl-coef", "0.001"],
    ),
    "critic_of_another_step": Mutant(
        "critic fed rewards of another step | a buffer that is one step behind | returns_without_reward | 2",
        plant(
            "ppo:add_advantages",
            'rows["advantages"], rows["returns"] = gae_advantages(args, rewards, rows["values"], valid_mask)',
            'rows["advantages"], now = gae_advantages(args, rewards, rows["values"], valid_mask)\n'
            '    before, args.returns = getattr(args, "returns", now), now\n'
            '    rows["returns"] = torch.nn.functional.pad(before, (0, now.shape[1] - before.shape[1]))',
        ),
        script="ppo",
    ),
    "dead_rows": Mutant(
        "advantages of dead rows | a rejected row counts in the mean of its group | dead_rows_count | 1",
        plant(
            "grpo:grpo_advantages",
            "mean = core_algos.group_mean(scores, valid_mask,",
            "mean = core_algos.group_mean(scores, torch.ones_like(valid_mask),",
        ),
        [*REJECTED, "--prompts-per-step", "32"],
    ),
    "critic_sign": Mutant(
        "critic fed rewards of another step: it unlearns them | a value loss with the sign of an objective | "
        "value_push | 1 | variant",
        plant("ppo:value_loss_of", "return loss, metrics", "return -loss, metrics"),
        script="ppo",
    ),
    "rejected_rows_trained": Mutant(
        "advantages of dead rows: they train | a row that is out of its group, but not out of the loss | "
        "gradient_outside_mask | 2 | variant",
        plant("grpo:update", 'losses * t["loss_mask"]', "losses"),
        [*REJECTED, "--kl-coef", "0.01"],
    ),
    "cached_prefix": Mutant(
        "cached prefix of old weights | the cache of prompts is not emptied at a sync | engine_apart | 2",
        plant("lib.rollout.hf_engine:HFEngine._prefill", f"self.model({PREFILL}", f"self.first_weights({PREFILL}"),
        COPY,
    ),
    "top_p_unaccounted": Mutant(
        "engine's top-p unaccounted | the engine's log-probs and the trainer's are those of the whole vocabulary | "
        "sampled_otherwise | 2",
        [
            (SAMPLE, f"logits = {KEPT}logits", f"kept = {KEPT}kept"),
            ("lib.model.trained:Policy.log_probs", "truncation=s.truncation", "truncation=None"),
        ],
        ["--top-p", "0.7", "--prompts-per-step", "32", "--group-size", "8"],
    ),
    "top_p_unaccounted_by_the_engine": Mutant(
        "engine's top-p unaccounted, by the engine alone | the engine's log-probs are those of the whole vocabulary | "
        "engine_apart | 1 | variant",
        plant(SAMPLE, f"logits = {KEPT}logits", f"kept = {KEPT}kept"),
        ["--top-p", "0.7"],
    ),
}
