"""Compares the gradients that other flags would have given in the updates of a recorded run.

    python grpo.py --num-mini-batches 4 --record kept          records (docs/diagnostics.md)
    python -m tools.lens kept --losses gspo cispo --adv-estimators rloo --choices "--loss-agg-mode seq-mean-token-mean"

The run is replayed with its own flags. At the weights of each of its updates, the script computes the gradient of the
mini-batch once more for each choice of flags, without a step. It prints the cosine with the gradient as recorded, the
ratio of norms, and the tokens on which a choice disagrees most: by d loss / d log-prob, each scaled to norm 1 over the
mini-batch.
"""

import contextlib
import copy
import json
import math
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest import mock

import torch
import tyro
from torch import Tensor
from transformers import AutoTokenizer

from lib import InputError, setup
from lib.cli.flags import parse_flags
from lib.cli.process import command_line
from lib.data import local_copy, split_mini_batches
from lib.data_proto import DataProto
from lib.distributed import full_tensor, reduce_gradients
from tools.oracle import ROOT, load_script, run_quietly
from tools.page.lens import most_apart

RECORDED = "as recorded"
SHOWN = 24  # tokens of context


@dataclass
class Args:
    """Flags of the command."""

    recording: Annotated[str, tyro.conf.Positional]
    """folder that --record wrote"""
    losses: tuple[str, ...] = ()
    """values of --loss"""
    adv_estimators: tuple[str, ...] = ()
    """values of --adv-estimator"""
    loss_agg_modes: tuple[str, ...] = ()
    """values of --loss-agg-mode"""
    choices: tuple[str, ...] = ()
    """any other flags of the script, one text for each choice"""
    flags: str = ""
    """flags with which the run is replayed, where they are not those recorded, such as "--num-mini-batches 4" """
    script: str = ""
    """the script, or a copy of it; empty: the one that recorded"""
    steps: int = 5
    """most steps to replay"""
    tokens: int = 5
    """tokens to show for each choice"""
    output: str = ""
    """folder for lens.json, lens.md and lens.png; in that of a run, such as runs/NAME, its page shows them"""


class _Probe:
    """A policy whose step keeps the gradient and changes nothing."""

    def __init__(self, model: Any):
        self.model, self.gradient = model, Tensor()
        self.rows = Tensor()  # of the micro-batch, in the mini-batch
        self.by_log_prob: dict[int, Tensor] = {}  # row of the mini-batch -> (T,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def begin_update(self, mini_batch: DataProto) -> None: ...

    def log_probs(self, micro: DataProto) -> tuple[Tensor, ...]:
        outputs = self.model.log_probs(micro)
        outputs[0].retain_grad()
        self.output = outputs[0]
        return outputs

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        reduce_gradients(self.model.module)
        gradient = torch.zeros_like(self.output) if self.output.grad is None else self.output.grad
        self.by_log_prob |= dict(zip(self.rows.tolist(), gradient.cpu()))

    def step(self) -> dict:
        gradients = [full_tensor(p.grad) if p.grad is not None else torch.zeros(0) for p in self.model.parameters]
        self.gradient = torch.cat([gradient.flatten().cpu() for gradient in gradients])
        self.model.optimizer.zero_grad()
        return {}


class _NoCritic(_Probe):
    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> dict:
        return {}


class _Replayed(Exception):
    """So many steps were enough."""


class Lens:
    """Takes the place of add_advantages, update and micro_batches of a script, and calls them.

    choices: {name: args}, those of the replay first. updates: for each of the replay's updates, {choice: found}."""

    def __init__(self, script: ModuleType, choices: dict[str, Any], steps: int, tokens: int, tokenizer: Any):
        self.script, self.choices, self.steps, self.tokens, self.tokenizer = script, choices, steps, tokens, tokenizer
        self.add_advantages, self.update = script.add_advantages, script.update
        self.micro_batches = script.micro_batches
        self.updates: list[dict[str, Any]] = []
        self.probe: _Probe | None = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        mine: dict[str, Any] = {
            "add_advantages": self._add_advantages,
            "update": self._update,
            "micro_batches": self._micro_batches,
        }
        with mock.patch.multiple(self.script, **mine):
            yield

    def _add_advantages(self, args, batch, needs, kl_control, step):
        self.step, self.before, self.kl_control = step, batch.select(), copy.deepcopy(kl_control)
        return self.add_advantages(args, batch, needs, kl_control, step)

    def _update(self, *args: Any, **more: Any):
        given = signature(self.update).bind(*args, **more).arguments
        sizes = given["needs"].sizes
        self.given, self.number = given, 0
        self.mini_batches = {
            name: split_mini_batches(self._batch_of(own, given["actor"], sizes), sizes.num_mini_batches)
            for name, own in self.choices.items()
        }
        result = self.update(**given)
        if self.step >= self.steps:
            raise _Replayed
        return result

    def _batch_of(self, args: Any, actor: Any, sizes: Any) -> DataProto:
        """The step's batch with the advantages and masks of these flags."""
        batch, needs = self.before.select(), setup.check(args, actor.world.device, sizes)
        if args.old_log_probs == "rollout":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif needs.log_probs and (
            self.given["args"].old_log_probs == "rollout" or not {*needs.log_probs} <= {*batch.batch.keys()}
        ):
            batch.batch.update(actor.batched_log_probs(batch, needs.log_probs))
        self.add_advantages(args, batch, needs, copy.deepcopy(self.kl_control), self.step)
        return batch

    def _micro_batches(self, mini_batch: DataProto, *models: Any) -> Iterator:
        if self.probe is None:
            self._look()
            yield from self.micro_batches(mini_batch, *models)
            return
        for micro in self.micro_batches(mini_batch, *models):
            self.probe.rows = micro.batch["row"] - mini_batch.batch["row"][0]
            yield micro

    def _look(self) -> None:
        """The gradients of all choices at the weights of this update."""
        found = {}
        for name, args in self.choices.items():
            mini_batches = self.mini_batches[name]
            own = mini_batches[self.number % len(mini_batches)].select()
            own.batch.pop("mini_batch", None)  # it is all of this update
            self.probe = _Probe(self.given["actor"])
            given = self.given | {"actor": self.probe, "batch": own.select(), "args": _once(args)}
            sizes = replace(given["needs"].sizes, num_mini_batches=1, update_epochs=1)
            given["needs"] = setup.check(args, given["actor"].world.device, sizes)
            if "critic" in given:
                given["critic"] = _NoCritic(given["critic"])
            self.update(**given)
            found[name] = self.probe, own
        self.probe, self.number = None, self.number + 1
        first = found[RECORDED][0]
        compared = {name: self._compare(probe, first, own) for name, (probe, own) in found.items()}
        self.updates.append({"step": self.step, "update": self.number, "choices": compared})

    def _compare(self, probe: _Probe, first: _Probe, batch: DataProto) -> dict[str, Any]:
        """cosine and ratio are None where a gradient is 0."""
        norm, recorded = (float(p.gradient.double().norm()) for p in (probe, first))
        both = float(probe.gradient.double() @ first.gradient.double())
        found = {"cosine": both / (norm * recorded) if norm * recorded else None, "norm": norm}
        return found | {"ratio": norm / recorded if recorded else None, "tokens": self._tokens(probe, first, batch)}

    def _tokens(self, probe: _Probe, first: _Probe, batch: DataProto) -> list[dict[str, Any]]:
        """The tokens whose coefficients, scaled to norm 1, differ most from those as recorded."""
        own, recorded = (torch.stack([p.by_log_prob[i] for i in range(len(batch))]) for p in (probe, first))  # (B, T)
        own, recorded = (x.double() / max(float(x.norm()), 1e-300) for x in (own, recorded))
        difference = (own - recorded).abs() * batch.batch["response_mask"].cpu()
        ids, found = batch.batch["responses"].cpu(), []
        for flat in difference.flatten().argsort(descending=True, stable=True)[: self.tokens].tolist():
            row, at = divmod(flat, difference.shape[1])
            if difference[row, at] > 1e-6:  # rounding
                context = self.tokenizer.decode(ids[row, max(0, at - SHOWN) : at])
                prompt = self.tokenizer.decode(batch.batch["prompts"][row].cpu(), skip_special_tokens=True)
                token = {"row": row, "position": at, "token": self.tokenizer.decode(ids[row, at : at + 1])}
                token |= {"context": context, "prompt": prompt[-200:], "difference": float(difference[row, at])}
                found.append(token | {"coefficient": float(own[row, at]), "recorded": float(recorded[row, at])})
        return found


def _once(args: Any) -> Any:
    args = copy.copy(args)
    args.update_epochs = 1
    return args


def choices_of(args: Args) -> dict[str, str]:
    """{name: flags} of the choices."""
    named = {"loss": args.losses, "adv-estimator": args.adv_estimators, "loss-agg-mode": args.loss_agg_modes}
    found = [f"--{flag} {value}" for flag, values in named.items() for value in values] + [*args.choices]
    if not found:
        raise InputError("nothing to compare: give --losses, --adv-estimators, --loss-agg-modes or --choices")
    return {RECORDED: ""} | {flags: flags for flags in found}


def replay(args: Args) -> list[dict[str, Any]]:
    """What the choices are in each update of the replay. Raises InputError."""
    recording = Path(args.recording)
    config = recording / "config.json"
    try:
        recorded = json.loads(config.read_text())
        recorder = Path(str(recorded["script"])).name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{recording}: no recording, it has no config.json: --record DIR writes one") from error
    script = load_script(args.script or str(ROOT / recorder))
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--output-dir", folder, "--run-name", "lens", "--val-files", "none", "--save-every", "0", "--track"]
        quiet += ["--no-export-model", "--save-rollouts", "0", "--stage-timeout", "0", "--val-every", "0"]
        base = ["--config", str(config), "--replay", str(recording), *quiet, *shlex.split(args.flags)]
        choices = {
            name: parse_flags(script.Args, [*base, *shlex.split(flags)]) for name, flags in choices_of(args).items()
        }
        own = choices[RECORDED]
        for name, other in choices.items():
            if other.kl_coef and not own.kl_coef:
                raise InputError(f"{name}: the replay has no reference model: add --flags '--kl-coef 1e-9'")
        tokenizer = AutoTokenizer.from_pretrained(local_copy(own.model.model))
        lens = Lens(script, choices, args.steps, args.tokens, tokenizer)
        with lens.in_place():
            run_quietly(script, own, _Replayed)
    return lens.updates


def summary(updates: list[dict]) -> list[dict]:
    """A row for each choice: the mean and extreme over the updates."""
    rows = []
    for name in updates[0]["choices"]:
        of = [update["choices"][name] for update in updates]
        cosines = [x["cosine"] for x in of if x["cosine"] is not None]
        ratios = [x["ratio"] for x in of if x["ratio"] is not None]
        mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
        rows.append({"choice": name, "cosine": mean(cosines), "lowest": min(cosines, default=math.nan)})
        rows[-1] |= {"ratio": mean(ratios), "norm": mean([x["norm"] for x in of])}
    return rows


def markdown(updates: list[dict], count: int) -> str:
    """The tables."""
    text = _rows(["choice", "cosine, mean", "lowest", "norm / norm as recorded", "norm"], heading=True)
    for row in summary(updates):
        numbers = [f"{row['cosine']:.4f}", f"{row['lowest']:.4f}", f"{row['ratio']:.3f}", f"{row['norm']:.3g}"]
        text += _rows([row["choice"], *numbers])
    for name in list(updates[0]["choices"])[1:]:
        tokens = most_apart(updates, name, count)
        text += f"\n{name}: {'the tokens that differ most' if tokens else 'no token differs'}\n\n"
        if tokens:
            where = "step, update, row, position"
            text += _rows([where, "token, after its context", "coefficient", "as recorded"], heading=True)
        for token in tokens:
            place = ", ".join(str(token[key]) for key in ("step", "update", "row", "position"))
            shown = f"{_quoted(token['context'])} **{_quoted(token['token'])}**"
            text += _rows([place, shown, f"{token['coefficient']:+.4f}", f"{token['recorded']:+.4f}"])
    return text


def _rows(cells: list[str], heading: bool = False) -> str:
    return f"| {' | '.join(cells)} |\n" + "|---" * len(cells) * heading + "|\n" * heading


def _quoted(text: str) -> str:
    """As JSON, which shows line breaks, in a cell of a table."""
    return "`" + json.dumps(text, ensure_ascii=False).replace("|", "\\|").replace("`", "'") + "`"


def draw(updates: list[dict], file: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(13, 3.6), dpi=80, layout="constrained")
    for axes, key, label in zip(figure.subplots(1, 2), ("cosine", "ratio"), ("cosine", "norm / norm as recorded")):
        for name in updates[0]["choices"]:
            values = [update["choices"][name][key] for update in updates]
            axes.plot(range(1, len(values) + 1), [math.nan if v is None else v for v in values], ".-", label=name)
        axes.set(xlabel="update", ylabel=label)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file)


def main(args: Args) -> None:
    if args.steps < 1 or args.tokens < 0:
        raise InputError("--steps must be at least 1, and --tokens at least 0")
    updates = replay(args)
    if not updates:
        raise InputError(f"{args.recording}: the replay had no update of the policy")
    text = markdown(updates, args.tokens)
    print(text)
    if args.output:
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lens.json").write_text(json.dumps(updates) + "\n")
        (folder / "lens.md").write_text(text)
        draw(updates, folder / "lens.png")


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.lens", description=__doc__))
