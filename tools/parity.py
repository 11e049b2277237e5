"""Compares a batch of verl, TRL or OpenRLHF with what grpo.py makes of it: mask, advantages, ratio, loss, gradient.

    python -m tools.parity DUMP --framework trl --config settings.json

DUMP is a .safetensors, .npz or .json file with the framework's own tensors, and settings.json holds its own settings:
docs/diagnostics.md has ten lines per framework that write it. The settings are translated to flags of grpo.py, which
are printed; --ours runs/NAME/config.json takes those of a run instead. Each quantity is computed from the framework's
inputs, so an earlier difference does not spread. The first one that differs is named, with both formulas.

Exit code: 0 all compared quantities are equal, 1 one differs, 2 bad input.
"""

import json
import math
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import grpo
from lib import InputError, core_algos
from lib.cli.flags import parse_flags
from lib.cli.process import command_line
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES
from lib.run.run_config import read_json

MOST_BYTES = 2**32
AGGREGATED = {
    "token-mean": "sum over tokens / tokens of the mini-batch",
    "token-sum": "sum over tokens",
    "seq-mean-token-sum": "sum over tokens / rows with a token",
    "seq-mean-token-mean": "mean over each row's tokens, then over rows with a token",
    "seq-mean-token-sum-norm": "sum over tokens / rows with a token / loss_scale_factor",
}
UNLIMITED = "1e6"  # --clip-ratio-c of a framework without dual clip


@dataclass
class Args:
    dump: Annotated[Path, tyro.conf.Positional]
    """.safetensors, .npz or .json file with the tensors of one batch"""
    config: Path
    """JSON object with the framework's settings, by its own names"""
    framework: Literal["verl", "trl", "openrlhf"]
    """whose names they are"""
    ours: Path | None = None
    """config.json of a grpo.py run, in place of the settings' translation"""
    tolerance: float = 1e-5
    """relative to the largest value of the quantity: what two orders of summation in float32 differ by"""
    figure: Path | None = None
    """image to draw, such as parity.png: our values against theirs, a panel for each quantity"""


class Translation(NamedTuple):
    """Of a framework's settings."""

    flags: list[str]  # of grpo.py
    formulas: dict[str, str]  # the framework's, by quantity


class Compared(NamedTuple):
    quantity: str
    theirs: Tensor
    ours: Tensor

    def difference(self) -> Tensor:
        """|theirs - ours| relative to the largest value; infinite where one of them is not finite."""
        scale = max(float(self.theirs.abs().max()), float(self.ours.abs().max()), 1e-30)
        return ((self.theirs - self.ours).abs() / scale).nan_to_num(nan=math.inf, posinf=math.inf)


def main(args: Args) -> int:
    framework = FRAMEWORKS[args.framework]
    tensors = read_dump(args.dump, framework.columns)
    settings = read_settings(args.config, framework.settings)
    flags, formulas = framework.translate(settings, tensors)
    if args.ours is not None:
        flags = ["--config", str(args.ours)]
    own = parse_flags(grpo.Args, flags)
    print(f"ours: grpo.py {' '.join(flags)}")
    compared = quantities(own, settings, tensors)
    if not compared:
        known = ", ".join(framework.columns)
        raise InputError(f"{args.dump}: nothing to compare: it needs a result and what it is computed from, of {known}")
    if args.figure:
        draw(compared, args.framework, args.tolerance, args.figure)
    wrong = [row for row in compared if row.difference().max() > args.tolerance]
    for name in ("mask", "advantages", "ratio", "loss", "gradient"):
        row = next((row for row in compared if row.quantity == name), None)
        if row is None:
            print(f"{name:12} not compared: not in the dump")
        else:
            verdict = "DIFFERS" if row in wrong else "equal"
            print(f"{name:12} {verdict:8} largest difference {float(row.difference().max()):.1e} of the largest value")
    if not wrong:
        return 0
    quantity, theirs, ours = wrong[0]
    at = int(wrong[0].difference().argmax())
    place = ", ".join(f"{axis} {int(i)}" for axis, i in zip(("row", "token"), np.unravel_index(at, theirs.shape)))
    values = f"theirs {float(theirs.flatten()[at]):.8g}, ours {float(ours.flatten()[at]):.8g}"
    print(f"\n{quantity} is the first that differs{' at ' + place if place else ''}: {values}")
    print(f"  {args.framework + ':':10} {formulas[quantity]}\n  {'grpo.py:':10} {our_formulas(own)[quantity]}")
    return 1


def draw(compared: list[Compared], framework: str, tolerance: float, file: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(3.2 * len(compared), 3.2), dpi=100, layout="constrained")
    for axes, row in zip(np.atleast_1d(figure.subplots(1, len(compared))), compared):
        differs = row.difference() > tolerance
        for some, color in ((~differs, "tab:blue"), (differs, "tab:red")):
            axes.plot(row.theirs[some], row.ours[some], ".", color=color)
        axes.axline((float(row.theirs.mean()), float(row.theirs.mean())), slope=1, color="grey", linewidth=0.5)
        axes.set(title=f"{row.quantity}: {int(differs.sum())} of {differs.numel()} differ", xlabel=framework)
    figure.supylabel("grpo.py")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise InputError(f"--figure {file}: cannot be written: {error}") from error


# ---- what is read --------------------------------------------------------------------------------


def read_dump(file: Path, columns: dict[str, str]) -> dict[str, Tensor]:
    """The columns by our names, in float64 where they are not integers. Raises InputError; runs no code of the file."""
    advice = "write it as docs/diagnostics.md shows"
    if file.suffix not in (".safetensors", ".npz", ".json"):
        what = (
            "a pickle may run code when it is loaded" if file.suffix in (".pt", ".pth", ".pkl", ".bin") else "unknown"
        )
        raise InputError(f"{file}: {what}: give .safetensors, .npz or .json; {advice}")
    try:
        if (size := unpacked_bytes(file)) > MOST_BYTES:
            raise InputError(f"{file}: {size:,} bytes, more than {MOST_BYTES:,}: dump fewer rows")
        if file.suffix == ".safetensors":
            found: dict[str, Any] = load_file(file)
        elif file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: torch.as_tensor(arrays[name]) for name in arrays.files}
        else:
            found = {name: torch.tensor(values) for name, values in dict(json.loads(file.read_text())).items()}
    except InputError:
        raise
    except (OSError, ValueError, TypeError, SafetensorError, zipfile.BadZipFile, RecursionError, RuntimeError) as error:
        raise InputError(f"{file}: not readable: {str(error).partition(chr(10))[0][:200]}; {advice}") from error
    if unknown := found.keys() - columns.keys():
        raise InputError(f"{file}: {', '.join(sorted(unknown))}: no name of the framework; it has {', '.join(columns)}")
    named = {columns[name]: x if not x.is_floating_point() else x.double() for name, x in found.items()}
    shapes = {name: tuple(x.shape) for name, x in named.items() if x.dim()}
    shape = shapes.get("response_mask")
    if shape is None or len(shape) != 2:
        raise InputError(f"{file}: no mask (rows, tokens) in it; {advice}")
    for name, own in shapes.items():
        if own not in (shape, shape[:1]):
            raise InputError(f"{file}: {name} has shape {own}, the mask {shape}: dump the tensors of the same rows")
    mask = named["response_mask"].bool()
    for name, x in named.items():  # masked positions may hold anything
        named[name] = x.masked_fill(~mask, 0) if x.shape == mask.shape and name != "responses" else x
    return named | {"response_mask": mask}


def unpacked_bytes(file: Path) -> int:
    if file.suffix != ".npz":
        return file.stat().st_size
    with zipfile.ZipFile(file) as arrays:
        return sum(member.file_size for member in arrays.infolist())


def read_settings(file: Path, defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the framework's defaults where the file has none."""
    given = read_json(file)
    if given is None:
        raise InputError(f"--config {file}: no such file; give a JSON object with the framework's settings")
    for name, value in given.items():
        if name not in defaults:
            raise InputError(f"--config {file}: {name} is not compared; the settings are {', '.join(defaults)}")
        if isinstance(value, dict | list):
            raise InputError(f"--config {file}: {name} is {json.dumps(value)[:100]}: give a plain value")
    return defaults | given


# ---- ours ----------------------------------------------------------------------------------------


def quantities(args: grpo.Args, settings: dict[str, Any], t: dict[str, Tensor]) -> list[Compared]:
    """What the dump has results of, and what they are computed from."""
    compared, mask = list[Compared](), t["response_mask"]
    if "responses" in t and settings["eos_token_id"] is not None:
        compared.append(Compared("mask", mask.double(), until_eos(t["responses"], settings["eos_token_id"]).double()))
    if {"advantages", "rewards", "group"} <= t.keys():
        rewards = t["rewards"]
        rewards = core_algos.at_last_token(rewards, mask) if rewards.dim() == 1 else rewards
        ours, _ = grpo.grpo_advantages(args, rewards, mask, t)
        compared.append(Compared("advantages", by_token(t["advantages"], mask), ours.masked_fill(~mask, 0)))
    if "log_probs" not in t:
        return compared
    log_probs = t["log_probs"].clone().requires_grad_()
    old_log_probs = t.get("old_log_probs", log_probs.detach())
    log_ratio = (log_probs - old_log_probs).detach().clamp(-20, 20)
    if "ratio" in t:
        compared.append(Compared("ratio", t["ratio"], log_ratio.exp().masked_fill(~mask, 0)))
    elif "ppo_kl" in t:  # -mean log ratio
        compared.append(Compared("ratio", t["ppo_kl"].view(()), core_algos.masked_mean(-log_ratio, mask)))
    if {"advantages", "loss"} <= t.keys():
        loss = our_loss(args, log_probs, old_log_probs, t | {"advantages": by_token(t["advantages"], mask)})
        [gradient] = torch.autograd.grad(loss, log_probs)
        compared.append(Compared("loss", t["loss"].view(()), loss.detach()))
        if "gradient" in t:
            compared.append(Compared("gradient", t["gradient"], gradient))
    return compared


def our_loss(args: grpo.Args, log_probs: Tensor, old_log_probs: Tensor, t: dict[str, Tensor]) -> Tensor:
    """The loss of one mini-batch, as in `update` of grpo.py."""
    mask = t["response_mask"]
    losses, _ = grpo.policy_loss(args, log_probs, old_log_probs, t)
    if args.kl_coef > 0 and args.kl_placement == "loss":
        if "ref_log_prob" not in t:
            raise InputError("the loss has a KL term, and the dump no log-probs of the reference")
        kl = core_algos.kl_penalty(log_probs, t["ref_log_prob"], args.kl_estimator or "k3+", mask, old_log_probs)
        losses = losses + args.kl_coef * kl
    counts = {"global_tokens": t["global_tokens"], "global_rows": mask.any(1).sum()} if "global_tokens" in t else {}
    scale = args.loss_scale_factor or args.rollout.max_response_length
    return core_algos.agg_loss(losses * mask, mask, args.loss_agg_mode, loss_scale_factor=scale, **counts)


def by_token(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) or (B, T) -> (B, T), 0 at masked positions."""
    return (values[:, None] if values.dim() == 1 else values).expand(mask.shape).masked_fill(~mask, 0)


def until_eos(responses: Tensor, eos: int) -> Tensor:
    """(B, T) bool: the tokens up to the first EOS, and that one."""
    ended = (responses == eos).long().cumsum(1)
    return (ended == 0) | ((ended == 1) & (responses == eos))


def our_formulas(args: grpo.Args) -> dict[str, str]:
    """By quantity."""
    epsilon = args.adv_settings.get("epsilon", 1e-6)
    advantages = f"A_i = (R_i - mean(R)) / (std(R) + {epsilon:g}), std with N - 1"
    if args.adv_estimator != "grpo":
        advantages = ADV_ESTIMATORS[args.adv_estimator].summary
    low, high, c = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
    loss = f"max(-A rho, -A clip(rho, 1 - {low:g}, 1 + {high:g})), where A < 0 at most -A {c:g}"
    if args.loss != "vanilla":
        loss = POLICY_LOSSES[args.loss].summary
    if args.kl_coef:
        loss += f" + {args.kl_coef:g} {args.kl_estimator or 'k3+'} (k3 at most 10)"
    loss += f"; {AGGREGATED[args.loss_agg_mode]}"
    return {
        "mask": "tokens up to the first EOS, and that one",
        "advantages": advantages,
        "ratio": "rho = exp(clamp(log pi - log pi_old, -20, 20))",
        "loss": loss,
        "gradient": f"d loss / d log pi, loss = {loss}",
    }


# ---- theirs --------------------------------------------------------------------------------------


def same_ratio(loss: str, **more: str) -> dict[str, str]:
    ratio = "rho = exp(log pi - log pi_old)"
    return {"mask": "as dumped", "ratio": ratio, "loss": loss, "gradient": f"d loss / d log pi, loss = {loss}"} | more


def of_verl(s: dict[str, Any], t: dict[str, Tensor]) -> Translation:
    """verl 0.9.1: verl/trainer/ppo/core_algos.py."""
    low, high = (s["clip_ratio"] if s[f"clip_ratio_{k}"] is None else s[f"clip_ratio_{k}"] for k in ("low", "high"))
    name, mode, agg = s["adv_estimator"], s["loss_mode"], s["loss_agg_mode"]
    same = {"grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "opo": "opo"}
    estimator = choose("adv_estimator", name, same)
    if estimator == "grpo" and not s["norm_adv_by_std_in_grpo"]:
        estimator = "dr_grpo"
    advantages = {
        "grpo": "A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with N - 1",
        "dr_grpo": "A_i = R_i - mean(R)",
        "rloo": "A_i = R_i n / (n - 1) - mean(R) n / (n - 1)",
        "opo": "A_i = R_i - sum(len R) / sum(len)",
    }[estimator]
    aggregated = choose("loss_agg_mode", agg, AGGREGATED)
    flags = ["--adv-estimator", estimator, "--loss-agg-mode", agg]
    clip = f"clip(rho, 1 - {low:g}, 1 + {high:g})"
    c = s["clip_ratio_c"]
    losses = {
        "vanilla": f"max(-A rho, -A {clip}), where A < 0 at most -A {c:g}",
        "gspo": f"max(-A s_t, -A clip(s_t, 1 - {low:g}, 1 + {high:g})), s_t = sg(s_i / pi_t) pi_t",
        "cispo": f"-sg({clip}) A log pi",
        "gpg": "-A log pi",
    }
    loss = choose("loss_mode", mode, losses)
    if mode == "vanilla":
        flags += ["--clip-ratio-low", f"{low}", "--clip-ratio-high", f"{high}", "--clip-ratio-c", f"{c}"]
    else:
        flags += ["--loss", mode]
        flags += ["--loss-kwargs", f"cliprange_low={low}", f"cliprange_high={high}"] * (mode != "gpg")
    if agg == "seq-mean-token-sum-norm":
        flags += ["--loss-scale-factor", f"{s['loss_scale_factor'] or t['response_mask'].shape[1]}"]
    if s["use_kl_loss"]:
        flags += ["--kl-coef", f"{s['kl_loss_coef']}", "--kl-estimator", s["kl_loss_type"]]
        loss += f" + {s['kl_loss_coef']:g} {s['kl_loss_type']}"
    return Translation(flags, same_ratio(f"{loss}; {aggregated}", advantages=advantages))


def of_trl(s: dict[str, Any], t: dict[str, Tensor]) -> Translation:
    """TRL 1.16: trl/trainer/grpo_trainer.py."""
    low, high = s["epsilon"], s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    kind, sequence = s["loss_type"], s["importance_sampling_level"] == "sequence"
    estimators = {
        "group": (["grpo", "--adv-kwargs", "epsilon=1e-4"], "A_i = (R_i - mean(R)) / (std(R) + 1e-4), std with N - 1"),
        "none": (["dr_grpo"], "A_i = R_i - mean(R)"),
        "batch": (["grpo_batch_std"], "A_i = (R_i - mean(R)) / (std of all R + 1e-4)"),
    }
    estimator, advantages = choose("scale_rewards", s["scale_rewards"], estimators)
    per_row = "mean over each row's tokens, then over all rows"
    modes = {  # ours, and theirs
        "grpo": ("seq-mean-token-mean", per_row),
        "sapo": ("seq-mean-token-mean", per_row),
        "bnpo": ("token-mean", "sum over tokens / tokens of the micro-batch"),
        "dapo": ("token-mean", "sum over tokens / (num_items_in_batch / updates of the generation)"),
        "cispo": ("token-mean", "sum over tokens / (num_items_in_batch / updates of the generation)"),
        "dr_grpo": ("seq-mean-token-sum-norm", "sum over tokens / (rows max_completion_length)"),
        "luspo": ("seq-mean-token-sum", "sum over tokens / rows"),
    }
    agg, their_agg = choose("loss_type", kind, modes)
    flags = ["--adv-estimator", *estimator, "--loss-agg-mode", agg]
    ratio = "s_i = exp(mean log rho)" if sequence else "rho"
    loss = f"-min({ratio} A, clip({ratio}, 1 - {low:g}, 1 + {high:g}) A)"
    if kind == "cispo":
        flags += ["--loss", "cispo", "--loss-kwargs", f"cliprange_high={high - 1}"]
        loss = f"-sg(min(rho, {high:g})) A log pi"
    elif kind == "sapo":
        flags += ["--loss", "sapo", "--loss-kwargs"]
        flags += [f"tau_{sign}={s[f'sapo_temperature_{sign}']}" for sign in ("pos", "neg")]
        loss = "-A 4 / tau sigmoid(tau (rho - 1))"
    elif sequence:
        flags += ["--loss", "gspo", "--loss-kwargs", f"cliprange_low={low}", f"cliprange_high={high}"]
    elif s["delta"] is not None:
        flags += ["--loss", "two_sided", "--loss-kwargs", f"cliprange_low={low}", f"cliprange_high={high}"]
        flags += [f"delta={s['delta']}"]
        loss = f"-min(min(rho, {s['delta']:g}) A, clip(rho, 1 - {low:g}, 1 + {high:g}) A)"
    else:
        flags += ["--clip-ratio-low", f"{low}", "--clip-ratio-high", f"{high}", "--clip-ratio-c", UNLIMITED]
    if kind == "dr_grpo":
        flags += ["--loss-scale-factor", f"{s['max_completion_length']}"]
    if s["beta"]:
        estimator_of_kl = "k3_unbiased" if s["use_bias_correction_kl"] else "k3"
        flags += ["--kl-coef", f"{s['beta']}", "--kl-estimator", estimator_of_kl]
        loss += f" + {s['beta']:g} {estimator_of_kl}"
    return Translation(flags, same_ratio(f"{loss}; {their_agg}", advantages=advantages))


def of_openrlhf(s: dict[str, Any], t: dict[str, Tensor]) -> Translation:
    """OpenRLHF 0.11: openrlhf/models/loss.py and openrlhf/trainer/ppo_utils/experience_maker.py."""
    estimators = {
        "group_norm": (["grpo", "--adv-kwargs", "epsilon=1e-9"], "A_i = (R_i - mean(R)) / (std(R) + 1e-9)"),
        "dr_grpo": (["dr_grpo"], "A_i = R_i - mean(R)"),
        "rloo": (["rloo"], "A_i = R_i - mean of the others' R"),
    }
    estimator, advantages = choose("advantage_estimator", s["advantage_estimator"], estimators)
    low, high, c = s["eps_clip_low"], s["eps_clip_high"], s["dual_clip"]
    kind = choose("policy_loss_type", s["policy_loss_type"], {"ppo": "vanilla", "gspo": "gspo"})
    agg = "token-mean" if s["token_level_loss"] and kind == "vanilla" else "seq-mean-token-mean"
    flags = ["--adv-estimator", *estimator, "--loss-agg-mode", agg]
    if kind == "vanilla":
        flags += ["--clip-ratio-low", f"{low}", "--clip-ratio-high", f"{high}", "--clip-ratio-c", f"{c or UNLIMITED}"]
    else:
        flags += ["--loss", "gspo", "--loss-kwargs", f"cliprange_low={low}", f"cliprange_high={high}"]
    ratio = "rho" if kind == "vanilla" else "s_i"
    loss = (
        f"-min({ratio} A, clip({ratio}, 1 - {low:g}, 1 + {high:g}) A){f', where A < 0 at least {c:g} A' if c else ''}"
    )
    return Translation(flags, same_ratio(f"{loss}; {AGGREGATED[agg]}", advantages=advantages))


def choose(setting: str, value: Any, known: dict[str, Any]) -> Any:
    if value not in known:
        raise InputError(f"{setting} {value!r} is not compared: only {', '.join(known)}")
    return known[value]


class Framework(NamedTuple):
    columns: dict[str, str]  # {its name: ours}
    settings: dict[str, Any]  # with its defaults
    translate: Callable[[dict[str, Any], dict[str, Tensor]], Translation]


COMMON = {"loss": "loss", "gradient": "gradient", "ratio": "ratio", "group": "group", "advantages": "advantages"}
VERL_COLUMNS = {"responses": "responses", "response_mask": "response_mask", "token_level_rewards": "rewards"}
VERL_COLUMNS |= {"log_prob": "log_probs", "old_log_probs": "old_log_probs", "ref_log_prob": "ref_log_prob"}
VERL: dict[str, Any] = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "loss_mode": "vanilla"}
VERL |= {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
VERL |= {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "eos_token_id": None}
VERL |= {"use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
TRL_COLUMNS = {"completion_ids": "responses", "completion_mask": "response_mask", "rewards": "rewards"}
TRL_COLUMNS |= {"per_token_logps": "log_probs", "old_per_token_logps": "old_log_probs"}
TRL_COLUMNS |= {"ref_per_token_logps": "ref_log_prob", "num_items_in_batch": "global_tokens"}
TRL: dict[str, Any] = {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": None}
TRL |= {"delta": None, "importance_sampling_level": "token", "beta": 0.0, "use_bias_correction_kl": True}
TRL |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "max_completion_length": 256, "eos_token_id": None}
OPENRLHF_COLUMNS = {"action_mask": "response_mask", "rewards": "rewards", "action_log_probs": "log_probs"}
OPENRLHF_COLUMNS |= {"old_action_log_probs": "old_log_probs", "ppo_kl": "ppo_kl"}
OPENRLHF: dict[str, Any] = {"advantage_estimator": "group_norm", "eps_clip_low": 0.2, "eps_clip_high": 0.2}
OPENRLHF |= {"dual_clip": None, "policy_loss_type": "ppo", "token_level_loss": True, "eos_token_id": None}
FRAMEWORKS = {
    "verl": Framework(VERL_COLUMNS | {"ppo_kl": "ppo_kl"} | COMMON, VERL, of_verl),
    "trl": Framework(TRL_COLUMNS | COMMON, TRL, of_trl),
    "openrlhf": Framework(OPENRLHF_COLUMNS | COMMON, OPENRLHF, of_openrlhf),
}


if __name__ == "__main__":
    with command_line():
        sys.exit(main(tyro.cli(Args, prog="python -m tools.parity", description=__doc__)))
