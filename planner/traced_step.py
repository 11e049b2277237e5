"""python -m planner --trace: runs the script's own step without values, and prints what it allocates.

`main` of the user's script runs as it is, on rank 0 of N ranks of an accelerator that does not exist (trace.py).
Models have no weights; stand-ins take the place of rollouts, rewards and the run's folder. The step has only
the rows of two or three full micro-batches, with prompts of the greatest length, and ends with the first update."""

import copy
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.testing._internal.distributed.fake_pg import FakeStore

from lib import InputError, setup
from lib import model as models
from lib.args import ScriptArgs, Sizes, step_sizes, training_ranks
from lib.data_proto import DataProto
from lib.distributed import World, accelerator, current_stage
from lib.distributed.device import VISIBLE
from lib.model import load, log_probs
from lib.model.load import decoder_layers
from lib.model.trained import LanguageModel, TrainedModel
from lib.model.update_checks import UpdateChecks
from lib.model.vision import family_of
from lib.rollout import Rollouts
from lib.rollout.replay import NoRecorder
from lib.setup import Inputs
from planner.fake_gpu import register_fake_gpu
from planner.images import images_that_fill
from planner.memory import GIB, Moments
from planner.meta import replaced
from planner.roofline import H100, HOST_LAYER_S, Kernel, Peaks, Speed, fuse, predict, seconds_by_kind
from planner.trace import Trace

MOMENTS = ("log-probs", "advantages", "forward", "loss", "backward", "last layer", "vision", "critic", "optimizer")


class _Updated(Exception):
    """The first update is done: the step ends."""


class Traced(NamedTuple):
    """What a trace says of rank 0."""

    memory: Moments  # at each moment's peak
    kernels: list[Kernel]
    tokens: list[int]  # of each micro-batch of the update
    layers: int
    flops: float  # of the models, in these micro-batches (lib/model/flops.py)
    sharding: str  # zero1 or fsdp2

    def speed(self, ranks: int, sharding: str = "", peaks: Peaks = H100) -> Speed:
        """On so many ranks: the layers' weights are gathered from more of them. sharding: "": the trace's."""
        host = HOST_LAYER_S[sharding or self.sharding]
        return predict(self.kernels, self.tokens, self.layers, self.flops, ranks, host, peaks)


def trace_step(args: ScriptArgs, inputs: Inputs | None = None) -> Traced:
    """A step of the script that `args`' class is of, on --dry-run ranks. Call it before any backward pass of the
    process: torch counts accelerators at the first. Raises InputError for what a trace does not follow."""
    check_traceable(args)
    ranks, script = training_ranks(args), sys.modules[type(args).__module__]
    args, tokens = rows_of_trace(args, ranks)
    step = _Step(args, ranks, tokens, inputs)
    with step.stands_in(script), _group_of(ranks), step.trace, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        with suppress(_Updated):
            script.main(args)
    peaks = step.trace.peaks()
    memory = {moment: peaks[moment] for moment in MOMENTS if moment in peaks}
    kernels = fuse(step.trace.kernels, layers=args.model.compile)
    return Traced(memory, kernels, step.tokens, step.layers, step.flops, args.shard.chosen)


def check_traceable(args: ScriptArgs) -> None:
    shard = args.shard
    untraced = {
        "--tensor-parallel-size": shard.tensor_parallel_size > 1,
        "--sequence-parallel-size": shard.sequence_parallel_size > 1,
        "--cpu-offload of a model": bool({*shard.cpu_offload} - {"activations"}),
        "--reward-model": bool(args.reward.reward_model),
        "a .gguf model": args.model.model.endswith(".gguf"),
    }
    if found := [what for what, given in untraced.items() if given]:
        raise InputError(f"--trace does not follow {found[0]}: drop one of them")
    if (device := accelerator()) is not None and device.type != "gpu":
        raise InputError(f'--trace needs a process without a GPU: hide the machine\'s with {VISIBLE}=""')
    if dist.get_world_size() > 1:
        raise InputError("--trace runs in one process: start it without torchrun")


def rows_of_trace(args: ScriptArgs, ranks: int) -> tuple[ScriptArgs, int]:
    """(args with the fewest rows whose mini-batches have two or three full micro-batches, or as many as args allow;
    tokens of a response). A full one has --micro-batch-tokens, prompts counted once where rows share them."""
    args, sizes = copy.deepcopy(args), step_sizes(args, ranks)
    P, T = args.data.max_prompt_length, args.rollout.max_response_length
    M, G, prompts = args.optimizer.micro_batch_limit, args.group_size, sizes.local_prompts // args.num_mini_batches
    shared = args.model.shares_prompts
    per_row, per_group = (0, P) if shared else (P, 0)
    full = 2 if args.shard.reduce_each_micro_batch else 3  # micro-batches: one before, and one after, the worst
    if G * (T + per_row) + per_group >= M:  # a group fills a micro-batch
        rows = -(-(M - per_group) // (T + per_row))  # of a micro-batch
        length = min(T, (M - per_group) // rows - per_row)
        args.group_size = min(G, max(rows, 2))
        wanted = -(-full * rows // args.group_size)
    else:
        groups = -(-M // (G * (T + per_row) + per_group))  # of a micro-batch
        length = min(T, (M // groups - per_group) // G - per_row) if prompts >= groups else T
        wanted = full * groups
    args.prompts_per_step = ranks * args.num_mini_batches * min(prompts, wanted)
    args.run.dry_run = 0
    return args, length


class _Step:
    """One step of a script's main, and what stands in for what is not traced."""

    def __init__(self, args: ScriptArgs, ranks: int, length: int, inputs: Inputs | None):
        self.args, self.length, self.inputs = args, length, inputs
        self.device = register_fake_gpu()
        self.world = World(0, ranks, self.device)
        self.sizes = step_sizes(args, ranks)
        self.trace = Trace(self.moment)
        self.phase = "forward"  # of the update
        self.sharded: list[Any] = []
        self.tokens: list[int] = []  # of the micro-batches of the update
        self.layers, self.flops = 1, 0.0
        self.open: set[str] = set()  # names of models whose update has begun

    def moment(self) -> str:
        stage = current_stage()
        if "after" in stage:
            return "other"
        name = stage.rpartition(" ")[2]
        return self.phase if name == "update" else name.replace("_", "-")

    @contextmanager
    def stands_in(self, script: Any) -> Iterator[None]:
        step, begin, backward, update = self, TrainedModel.begin_update, TrainedModel.backward, TrainedModel.step
        shard_model, after_backward, of_logits = (
            setup.models.shard_model,
            UpdateChecks.after_backward,
            log_probs.with_logits,
        )

        def shard(model, *more, **options):
            step.prepare(model)
            step.sharded.append(shard_model(model, *more, **options))
            if step.args.model.fuses_layers:
                models.fuse_layers(model)
            return model

        def begun(model, mini_batch):
            if not step.open:
                step.trace.name_live("batch", None)
            step.open.add(model.name)
            begin(model, mini_batch)

        def traced_backward(model, loss):
            step.trace.name_live("activations", None)
            step.trace.forward = False
            backward(model, loss)
            step.trace.forward, step.trace.in_layer = True, False
            step.trace.name_live("gradients", "gathered weights")  # what FSDP2 keeps from now on

        def checks(checks, factor):
            step.trace.in_layer = False
            after_backward(checks, factor)

        def stepped(model):
            step.phase = "optimizer"
            step.trace.name("gradients", (p.grad for p in model.parameters if p.grad is not None))
            step.flops += float(model.computed.total)
            metrics = update(model)
            step.open.discard(model.name)
            if not step.open:
                raise _Updated
            return metrics

        with (
            ExitStack() as self.exit,
            replaced(
                (setup, "start", lambda args: (step.world, setup.check(args, step.device, step.sizes), step.inputs)),
                (setup.needs, "has_flash_attention", lambda _, dtype: dtype != torch.float32),  # as on an H100
                (script, "open_run", lambda *_, **__: _Run(step)),
                (setup, "make_rollouts", lambda *_: _Rollouts(step)),
                (setup, "make_rewards_and_validation", lambda *_: (_Rewards(step), None)),
                (load, "_meta_model", model_without_weights),
                (models, "compile_layers", lambda _: None),
                *self.fused_kernels(),
                (setup.models, "shard_model", shard),
                (LanguageModel, "checked", True),
                (TrainedModel, "begin_update", begun),
                (TrainedModel, "backward", traced_backward),
                (TrainedModel, "step", stepped),
                (UpdateChecks, "after_backward", checks),
                (log_probs, "with_logits", partial(step.trace.as_compiled, of_logits)),
            ),
        ):
            yield

    def fused_kernels(self) -> list[tuple[Any, str, Any]]:
        if not self.args.model.fuses_layers:
            return []
        from triton.runtime.jit import JITFunction  # its import takes a second, and not every machine has it

        return [(JITFunction, "run", lambda function, *args, **_: self.trace.launched(args))]

    def prepare(self, model: Any) -> None:
        """Puts the model's tensors on the accelerator, and hooks that tell the phases of an update."""
        placed: dict[int, torch.Tensor] = {}

        def on_device(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in placed:  # tied weights stay one
                placed[id(x)] = empty = torch.empty(x.shape, dtype=x.dtype, device=self.device)
                self.trace.forget(empty)
                if isinstance(x, torch.nn.Parameter):
                    placed[id(x)] = torch.nn.Parameter(empty, x.requires_grad)
            return placed[id(x)]

        kept = [x for module in model.modules() for x in (*module._parameters.values(), *module._buffers.values())]
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: on_device(x) for name, x in tensors.items() if x is not None})
        del kept  # until here, so that no two tensors have the same id
        critic, layers = hasattr(model, "token_values"), decoder_layers(model)

        def to(phase: str) -> None:
            self.phase = "critic" if critic else phase

        def layers_go_back(_: Any) -> None:
            to("backward")
            self.trace.in_layer = True

        def ends(module: Any, args: Any, output: Any) -> None:
            to("loss")
            if not critic and current_stage().endswith(" update"):
                self.tokens.append(output.last_hidden_state[..., 0].numel())
            if output.last_hidden_state.requires_grad:
                output.last_hidden_state.register_hook(layers_go_back)

        def first_layer_ends(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _: to("last layer"))

        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model

        def tower_goes_back(_: Any, args: Any, given: dict) -> None:
            to("forward")
            if (embeds := given.get("inputs_embeds")) is not None and embeds.requires_grad:
                embeds.register_hook(lambda _: to("vision"))

        decoder.register_forward_pre_hook(tower_goes_back, with_kwargs=True)
        if (family := family_of(model.config)) is not None:
            model.get_submodule(family.tower).register_forward_pre_hook(lambda *_: to("forward"))
        decoder.register_forward_hook(ends)
        layers[0].register_forward_hook(first_layer_ends)
        if not critic:
            self.layers = len(layers)
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: setattr(self.trace, "in_layer", True))
            layer.register_forward_hook(lambda *_: setattr(self.trace, "in_layer", False))

    def batch(self, group_size: int) -> DataProto:
        """A batch as rollouts give it: prompts of max_prompt_length, responses of `length` tokens."""
        args, rows = self.args, self.sizes.local_prompts * group_size
        P, T = args.data.max_prompt_length, args.rollout.max_response_length
        number = torch.arange(rows) // group_size  # of the prompt
        sampled = (torch.arange(T) < self.length).long().expand(rows, T).contiguous()
        ids = (1 + number % 50)[:, None].expand(rows, P + T).contiguous()
        ids[:, 0] = number % 97
        tensors = {"prompts": ids[:, :P].clone(), "responses": ids[:, P:].clone(), "input_ids": ids}
        tensors |= {"attention_mask": torch.cat([torch.ones(rows, P, dtype=torch.long), sampled], 1)}
        tensors |= {
            "position_ids": torch.arange(P + T).expand(rows, P + T).contiguous(),
            "response_mask": sampled.clone(),
        }
        tensors |= {"rollout_log_probs": torch.zeros(rows, T), "policy_version": torch.zeros(rows, dtype=torch.long)}
        if args.rollout.async_level:
            tensors["weight_versions"] = torch.zeros(rows, T, dtype=torch.long)
        objects: dict[str, list] = {"uid": [f"0-{n}" for n in number.tolist()], "finish_reason": ["stop"] * rows}
        if family_of((model := self.sharded[0]).config) is not None:
            images, count = images_that_fill(model, P - 2, args.data.vision_limits.max_pixels)
            tensors["multi_modal_hash"] = number
            for name in ("prompts", "input_ids"):
                tensors[name][:, 1 : 1 + count] = model.config.image_token_id
            objects["multi_modal_inputs"] = [images] * rows
        tensors = {name: x.to(self.device) for name, x in tensors.items()}
        return DataProto.from_dict(tensors, {name: np.array(x, dtype=object) for name, x in objects.items()})


def model_without_weights(auto_class: Any, path: str, config: Any, **options: Any) -> tuple[Any, set[str]]:
    """In place of load.py's _meta_model: it needs the config only."""
    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, **options)
    model.tie_weights()
    return model, set()


class _Rollouts(Rollouts):
    def __init__(self, step: _Step):
        self.step, self.sizes, self.world, self.loader, self.recorder = step, step.sizes, step.world, None, NoRecorder()
        self.sampling = step.args.rollout.sampling()

    def sync(self, *_: Any) -> dict[str, Any]:
        return {}

    def prompts(self) -> DataProto:
        return DataProto()

    def generate(self, prompts: DataProto, n: int = 1, **_: Any) -> DataProto:
        return self.step.batch(n)

    def sleep(self) -> None:
        pass

    def balanced(self, actor: Any, *batches: DataProto) -> tuple:
        return *batches, {}


class _Rewards:
    def __init__(self, step: _Step):
        self.step = step

    def submit(self, batch: DataProto, step: int = 0) -> "_Rewards":
        return self

    def add_to(self, batch: DataProto, reward_keys: tuple[str, ...] = ()) -> tuple[dict, dict]:
        """Rows of a group have different scores, so that none is refilled."""
        rows, T = batch.batch["responses"].shape
        scores = torch.zeros(rows, T)
        scores[:, self.step.length - 1] = torch.arange(rows).float()
        batch.batch["token_level_scores"] = scores.to(self.step.device)
        if reward_keys:
            batch.batch["reward_components"] = (
                torch.arange(rows * len(reward_keys)).view(rows, -1).float().to(self.step.device)
            )
        return {}, {}


class _Run:
    """In place of the run: it keeps nothing."""

    step, recorder = 0, NoRecorder()

    def __init__(self, step: _Step):
        self.traced = step

    def load(self, models: dict[str, TrainedModel], stateful: dict[str, Any]) -> dict[str, Any]:
        """Gives the optimizers their state, as any step but the first has it, and names what is held."""
        trace = self.traced.trace
        for name, model in models.items():
            prefix = "" if name == "actor" else f"{name} "
            for p in model.parameters:
                p.grad = torch.zeros_like(p)
            model.optimizer.step()
            model.optimizer.zero_grad()
            states = model.optimizer.state.values()
            trace.name(f"{prefix}weights", iter([*model.module.parameters(), *model.parameters]))
            trace.name(f"{prefix}Adam", (x for state in states for x in state.values()))
        trained = [model.module for model in models.values()]
        for module in self.traced.sharded:
            if not any(module is other for other in trained):
                trace.name("reference", module.parameters())
        return {}

    def validate(self, *_: Any) -> None:
        pass

    def steps(self) -> list[int]:
        return [self.traced.args.run.total_steps]

    def record(self, batch: DataProto) -> None:
        pass


@contextmanager
def _group_of(ranks: int) -> Iterator[None]:
    """In the block this process is rank 0 of so many, in a group whose collectives do nothing."""
    before = os.environ["WORLD_SIZE"]
    dist.destroy_process_group()
    try:
        os.environ["WORLD_SIZE"] = str(ranks)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        yield
    finally:
        dist.destroy_process_group()
        os.environ["WORLD_SIZE"] = before
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def trace_table(traced: Moments, estimated: Moments) -> str:
    """GiB per kind and moment, and the estimate of each moment."""
    kinds = list(dict.fromkeys(kind for sizes in traced.values() for kind in sizes))
    sums = [sum(sizes.values()) for sizes in traced.values()]
    expected = [sum(estimated[name].values()) if name in estimated else None for name in traced]
    rows: list[tuple[str, list[int | None]]] = [(kind, [t.get(kind) for t in traced.values()]) for kind in kinds]
    rows = [(kind, sizes) for kind, sizes in rows if max(n or 0 for n in sizes) >= 0.005 * GIB]
    lines = ["GiB, traced".ljust(18) + "".join(f"{name:>12}" for name in traced)]
    rows += [("sum", [*sums]), ("estimate", expected)]
    for kind, sizes in rows:
        lines.append(kind.ljust(18) + "".join(f"{'-' if n is None else f'{n / GIB:.2f}':>12}" for n in sizes))
    ratios = ("-" if e is None else f"{e / s - 1:+.1%}" for s, e in zip(sums, expected))
    return "\n".join([*lines, "estimate / trace".ljust(18) + "".join(f"{ratio:>12}" for ratio in ratios)])


def predict_update(args: ScriptArgs, sizes: Sizes, traced: Traced, ranks: int) -> tuple[float, float]:
    """Seconds of (the updates of a step, one pass over its rows without gradients) where all rows are as long as they
    may be. A rank runs its micro-batches as fast as those of the trace."""
    shared = args.model.shares_prompts
    prompts = sizes.local_prompts if shared else sizes.local_rows
    tokens = sizes.local_rows * args.rollout.max_response_length + prompts * args.data.max_prompt_length
    speed = traced.speed(ranks)
    update = tokens * sizes.update_epochs * speed.update + sizes.updates_per_step * speed.optimizer
    return update, tokens * speed.log_probs


def speed_table(args: ScriptArgs, sizes: Sizes, traced: Traced, ranks: int) -> str:
    """Predicted seconds and MFU, and where the time of an update goes."""
    speeds = {sharding: traced.speed(ranks, sharding) for sharding in HOST_LAYER_S}
    speed, (update, log_probs) = traced.speed(ranks), predict_update(args, sizes, traced, ranks)
    lines = [
        f"predicted by the roofline of {ranks} x H100: {update:.1f} s for the updates of a step, {log_probs:.1f} s for "
        f"a pass without gradients; a full micro-batch has {speed.tokens} tokens and {speed.kernels:.3f} s of kernels",
        *(f"with {name}: {own.host:.3f} s of the host, MFU {own.mfu:.2f}" for name, own in speeds.items()),
        f"{speed.launches:.0f} launches a layer, forward and backward, besides FSDP's; seconds a micro-batch by kind:",
    ]
    by_kind = seconds_by_kind(traced.kernels, ranks)
    lines += [f"{kind:>20}{n / len(traced.tokens):9.4f}" for kind, n in by_kind.items()]
    return "\n".join(lines)
