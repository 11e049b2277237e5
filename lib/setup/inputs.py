"""Tokenizer, data, tools and scorers, checked against each other before a model loads."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError, is_first_on_node
from lib import model as models
from lib.args import DataArgs, ModelArgs, ScriptArgs, check_read
from lib.args.data import columns_of
from lib.args.run import Epochs
from lib.cli.flags import parse_json, with_line_breaks
from lib.cli.process import accept_sandbox
from lib.data import PromptDataset, RLHFDataset, load_dataset_class, local_copy
from lib.data.chat_template import check_template_kwargs, end_of_turn, set_chat_template
from lib.data.vision import Vision
from lib.reward.scorer import Scorer, check_keywords, load_scorers
from lib.rollout import check_capabilities, check_engine_import
from lib.run.goals import check_names

if TYPE_CHECKING:
    from agent.multi_turn import MultiTurn


@dataclass
class Inputs:
    """What is loaded before the models. train_data is None, and val_data empty, if the run does not need it."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # None: a text model
    multi_turn: "MultiTurn | None"
    train_data: PromptDataset | None
    val_data: list[PromptDataset]  # one for each of ValidationArgs.sets
    scorers: list[Scorer]
    val_scorers: list[Scorer]  # empty: those of training
    shadow_scorers: list[Scorer]

    @property
    def processor(self) -> PreTrainedTokenizerBase | ProcessorMixin:
        """What is saved beside the model: its processor, of a text model the tokenizer."""
        return self.tokenizer if self.vision is None else self.vision.processor


def load_inputs(args: ScriptArgs) -> Inputs:
    """Loads tokenizer, tools, data and scorers, and checks them against each other. Turns a
    --total-steps in epochs into steps. Raises InputError."""
    model, data = args.model, args.data
    check_engine_and_models(args)
    accept_sandbox(args.reward.sandbox_level)
    tokenizer = models.load_tokenizer(model.model, trust_remote_code=model.trust_remote_code)
    set_chat_template(tokenizer, data.chat_template)
    vision = load_vision(model, data)
    check_read(args, vision=vision is not None)
    episodes = args.multi_turn.enabled or bool(args.rollout.agent)
    if not args.run.replay:
        check_capabilities(args.rollout.engine, vision is not None, episodes, model.routing_replay == "R3")
    if args.rollout.agent and vision is not None:
        raise InputError(f"--agent takes text only, and --model {model.model} reads images: take a text model")
    template, multi_turn, row_template = parse_json("chat_template_kwargs", data.chat_template_kwargs), None, None
    if not data.dataset_class:  # your own class may read others
        check_template_kwargs(tokenizer, template)
    if not tokenizer.chat_template and (episodes or vision is not None):
        what = "turns" if episodes else "images"
        raise InputError(f"--model {model.model}: {what} need a chat template; give one with --chat-template FILE")
    if episodes:
        from agent import load_agent, load_multi_turn  # 0.1 s, which other runs do not need

        agent = load_agent(args.rollout, args.multi_turn.parser) if args.rollout.agent else None
        multi_turn = load_multi_turn(args.multi_turn, tokenizer, template, data.max_prompt_length, vision, agent)
        row_template = multi_turn.row_template
        if multi_turn.schemas:
            template = template | {"tools": multi_turn.schemas}
    train_data, val_data = load_data(args, tokenizer, template, vision, row_template)
    if isinstance(epochs := args.run.total_steps, Epochs) and train_data is not None:
        if data.train_weights:
            why = "each source has epochs of its own: give a number of steps"
            raise InputError(f"--total-steps {epochs}epochs with --train-weights: {why}")
        args.run.total_steps = math.ceil(epochs * len(train_data) / args.prompts_per_step)
        args.run.check_profile_steps()
    trained = [train_data] if train_data is not None else []
    scorers = load_all_scorers(args, trained, val_data)
    exact = vision is None and not data.dataset_class and data.overlong_prompts == "drop"
    if exact and tokenizer.chat_template:
        check_template(tokenizer, template, trained + val_data, row_template)
    return Inputs(tokenizer, vision, multi_turn, train_data, val_data, *scorers)


def check_engine_and_models(args: ScriptArgs) -> None:
    """Raises InputError for an engine that cannot be imported, and for models that cannot be split as asked."""
    model, rollout, trust = args.model, args.rollout, {"trust_remote_code": args.model.trust_remote_code}
    known = rollout.auto_engine or rollout.rollout_gpus  # that it imports; only engine ranks need vLLM
    if not args.run.replay and (rollout.engine_args or not known):
        check_engine_import(rollout.engine, rollout.engine_args)
    for path in (model.model, args.critic_model, args.reward.reward_model):
        local_copy(path or "", weights=False)  # here, as one rank alone estimates the memory of a step
    for flag, path in {"--model": model.model, "--critic-model": args.critic_model}.items():
        if path:
            models.check_sequence_parallel(path, args.shard.sequence_parallel_size, flag=flag, **trust)
            models.check_tensor_parallel(path, args.shard.tensor_parallel_size, flag=flag, **trust)
    if model.routing_replay != "none":
        models.check_routing_replay(model.model, **trust)


def load_data(
    args: ScriptArgs, tokenizer, template: dict, vision: Vision | None, row_template: Callable | None
) -> tuple[PromptDataset | None, list[PromptDataset]]:
    """(training data, one data set for each of ValidationArgs.sets), without what the run does not need."""
    data, validation = args.data, args.validation
    settings: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_prompt_length": data.max_prompt_length,
        "truncation": "error" if data.overlong_prompts == "drop" else data.overlong_prompts,
        "filter_overlong_prompts": data.overlong_prompts == "drop",
        "chat_template_kwargs": template,
        "allow_special_tokens": data.allow_special_tokens,
    }
    # your own class need not know of what a run does not use
    form = {"columns": columns_of(data.columns), "prompt_template": with_line_breaks(data.prompt_template)}
    form["system_prompt"] = data.system_prompt
    settings |= {name: value for name, value in form.items() if name in args.given}
    settings |= {"vision": vision} if vision is not None else {}
    settings |= {"row_template": row_template} if row_template else {}
    make = load_dataset_class(data.dataset_class) if data.dataset_class else RLHFDataset

    def load(files: tuple[str, ...], max_samples: int | None) -> PromptDataset:
        limit: dict[str, Any] = {"max_samples": max_samples} if max_samples else {}
        return make(list(files), **settings, **limit)

    train_data = None if validation.val_only else load(data.train_files, data.max_train_samples)
    sets = validation.sets() if validation.enabled else []
    return train_data, [load(val_set.files, validation.max_val_samples) for val_set in sets]


def load_all_scorers(
    args: ScriptArgs, trained: list, validated: list
) -> tuple[list[Scorer], list[Scorer], list[Scorer]]:
    """The scorers of training, of --val-reward and of --shadow-reward. Raises InputError for names of metrics that
    validation does not have (--keep-best, --stop-when)."""
    reward, validation = args.reward, args.validation
    if args.run.keep_best or args.run.stop_when:  # a data set of your own need not know its data sources
        sets = zip(validation.sets(), validated)
        check_names(args.run, {source: n.samples for n, rows in sets for source in getattr(rows, "data_sources", ())})
    seen = next(filter(None, (getattr(rows, "with_images", None) for rows in [*trained, *validated])), None)
    if reward.reward_model and seen:
        raise InputError(f"{seen} has images: --reward-model reads text only")
    kwargs = parse_json("reward_kwargs", reward.reward_kwargs)
    scored = trained if validation.val_reward else [*trained, *validated]
    scorers = load_scorers(reward.reward, scored, kwargs, reward.reward_weights)
    val_scorers = load_scorers(validation.val_reward, validated, kwargs)
    shadow_scorers = load_scorers(reward.shadow_reward, [*trained, *validated], kwargs)
    check_keywords([*scorers, *val_scorers, *shadow_scorers], kwargs)
    return scorers, val_scorers, shadow_scorers


def check_template(
    tokenizer: PreTrainedTokenizerBase, kwargs: dict, data: list[PromptDataset], row_template: Callable | None = None
) -> None:
    """Raises InputError if the first prompt's tokens are not the chat template's: two BOS tokens, no generation prompt.
    Says so if no special token ends the assistant's turn in it. row_template: as in RLHFDataset."""
    kwargs = {"add_generation_prompt": True} | kwargs
    for row in (rows[0] for rows in data):
        kwargs |= row_template(row["extra_info"])[0] if row_template else {}
        wanted = tokenizer.apply_chat_template(row["raw_prompt"], **kwargs, return_dict=True)["input_ids"]
        if row["raw_prompt_ids"] != wanted:
            got = tokenizer.decode(row["raw_prompt_ids"])
            raise InputError(f"the prompt {got!r} is not what its chat template gives: {tokenizer.decode(wanted)!r}")
    if end_of_turn(tokenizer) is None and is_first_on_node():
        name = tokenizer.name_or_path
        print(f"note: {name}: no special token ends a turn in its chat template: is it this model's?", flush=True)


def load_vision(model: ModelArgs, data: DataArgs) -> Vision | None:
    """How the images of prompts become inputs of --model; None for a text model. Raises InputError."""
    trust = model.trust_remote_code
    if (processor := models.load_processor(model.model, trust_remote_code=trust)) is None:
        return None
    set_chat_template(processor, data.chat_template)  # it is saved with the model
    return Vision(
        processor,
        AutoConfig.from_pretrained(local_copy(model.model, weights=False), trust_remote_code=trust),
        **asdict(data.vision_limits),
    )
