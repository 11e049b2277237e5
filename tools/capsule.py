"""Packs one recorded step of a run into a file for a bug report, and replays it elsewhere.

    python -m tools.capsule runs/NAME --step 120     # writes NAME-step-120.capsule.zip
    python -m tools.capsule NAME-step-120.capsule.zip     # opens it, and prints the command that replays the step
    python -m tools.capsule NAME-step-120                 # after that: compares the metrics with the recorded ones

The run needs --record. A capsule has the step's recording, flags, metrics, script, git diff and versions. Keys,
passwords, paths and the machine's name are redacted. It replays without the data files, the scorers, the engine and
the tokenizer: prompts are stored as token ids, and the model gets a tokenizer of ids. See docs/diagnostics.md.
"""

import ast
import itertools
import json
import math
import re
import shlex
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import torch
import tyro
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from lib import InputError
from lib.cli.process import command_line
from lib.cli.secrets import FORMS, redact, secret_in
from lib.data import local_copy
from lib.data_proto import DataProto
from lib.declared import ADV_ESTIMATORS
from lib.log.tracking import read_rows
from lib.manifest import entry, why_altered, why_incomplete, write_manifest
from lib.model import load_model, load_tokenizer
from lib.rollout.replay import BATCH, recorded_steps
from lib.run.checkpoint import step_folders
from lib.run.run_config import read_json
from tools import export

ROOT = Path(__file__).parent.parent
VERSION = 1  # of the format
MEMBERS = re.compile(
    r"capsule\.json|prompts\.jsonl|script/[\w-]+\.py|script/diff\.patch|script/code/\d+-[\w-]+\.py"
    r"|model/(?:config\.json|[\w-]+\.safetensors|model\.safetensors\.index\.json)"
    r"|recording/step_000001/rank_\d+_of_\d+/(?:manifest\.json|\w+\.safetensors)",
    re.ASCII,
)
MOST_FILES = 10_000
MOST_JSON = 2**26  # bytes
MOST_PARAMETERS, MOST_MODULES = 2 * 10**8, 5000  # of a tiny model
MOST_CODE = 2**20  # characters of a scorer's file: the parser takes about a hundred times as many bytes
LARGEST_COUNT, LARGEST_SIZE = 2**20, 2**12  # in a model's config: of tokens and positions, of anything else
COUNTED = re.compile("vocab|token|position|window|context|n_ctx|eos|bos|pad")
# keys of a model's config with a text or more, by which transformers finds kernels, code and weights, some on the hub
LOADS = re.compile("_implementation|quantiz|kernel|backbone|pretrained|adapter|name_or_path|custom|weights|_files")
# Absolute paths up to the name of the file. In code, `/` divides, and begins routes and regular expressions: a path
# begins with a folder that / usually has, or has here.
SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr"}
TOP = {"home", "Users", "root", "mnt", "media", "srv", "opt", "tmp", "var", "data", "datasets", "work", "workspace"}
TOP |= {"scratch", "shared", "nfs", "fsx", "lustre", "Volumes", *(path.name for path in Path("/").iterdir())} - SYSTEM
NAMED = r"[^\s/'\",:;]+"  # a file or folder
BEFORE = r"(?P<before>file:/{0,2}[\w.-]*|(?<![\w-])-\w+|(?<=\\[nrt])|(?<![\w/.*)\]}]))"  # -I, a line break in code
IN_HOME = rf"(?:~|\$\{{?HOME\}}?)/{NAMED}/"
IN_TOP = rf"(?:/|(?<!:)//)(?:(?:home|Users)/{NAMED}/?|(?:{'|'.join(map(re.escape, sorted(TOP)))})/(?=\S))"
ANY = rf"(?<!<)(?!//|/dev/null)/(?:{NAMED}/(?=\S|$)|(?:{NAMED}/){{2}})"
PATH_IN_CODE = re.compile(f"(?:{IN_HOME}|{BEFORE}{IN_TOP})(?:{NAMED}/)*")
PATH = re.compile(rf"(?:{IN_HOME}|~[\w-]+/|{BEFORE}(?:{IN_TOP}|{ANY}))(?:{NAMED}/)*")
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4, "num_local_experts": 4, "n_embd": 64}
TINY |= {"num_experts_per_tok": 2, "n_layer": 2, "n_head": 4, "n_inner": 96, "max_window_layers": 2}
# what of a row is neither a text nor made of one
NO_TEXT = {"uid", "data_source", "finish_reason", "max_response_length", "num_turns", "segments", "agent_metrics"}
NO_TEXT |= {"tool_rewards"}
EMPTY: dict[str, Any] = {"raw_prompt": [], "messages": [], "reward_model": {"ground_truth": ""}, "answer": ""}
EMPTY |= {"extra_info": {}, "tools_kwargs": {}, "interaction_kwargs": {}, "index": 0, "tool_errors": []}
# flags that a replay does not take over: they decide nothing of the step's mathematics, or would run something
DROPPED = {"keep_best", "stop_when", "track", "plan", "trust_remote_code", "train_weights"}
DROPPED |= {"dataset_class", "columns", "prompt_template", "system_prompt", "chat_template_kwargs"}
DROPPED |= {"max_train_samples", "max_val_samples"}
DROPPED |= {"loader_workers", "prompt_sampling", "rollout_engine", "rollout_gpus"}
DROPPED |= {"agent", "agent_kwargs"}
DROPPED |= {"rollout_tensor_parallel_size", "gpu_memory_utilization", "vllm_kwargs", "max_mismatch"}
DROPPED |= {"async_level", "async_order", "reward_kwargs", "shadow_reward", "val_every", "val_reward"}
DROPPED |= {"attn_implementation", "compile", "cpu_offload", "use_liger_kernel", "lr_schedule", "warmup_steps"}
DROPPED |= {"kl_target", "entropy_target", "contents", "history", "start", "effective", "no_effect", "recorded_by"}
DROPPED |= {"record", "replay", "keep_checkpoints"}
CHANGED: dict[str, Any] = {"total_steps": 1, "save_every": 0, "export_model": False, "chat_template": "none"}
CHANGED |= {"allow_special_tokens": True, "overlong_prompts": "error", "shuffle": False, "sandbox_level": "none"}
CHANGED |= {"val_files": ["none"], "val_before_train": False}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
OF_THE_MACHINE = re.compile(r"step$|timing_|perf/|prompts/|training/epoch")  # or of the place in the run
OF_THE_RECORDING = re.compile(
    r"reward/|response_length/|prompt_length/|source/|agent/|advantages/|training/rows_in|training/tokens"
    r"|rollout/canary_logp_diff|rollout/dead_rows"
)


@dataclass
class Args:
    source: Annotated[Path, tyro.conf.Positional]
    """folder of a run, to pack one of its steps; a capsule, to open it; or an opened capsule, to compare its replay"""
    step: int | None = None
    """the step to pack"""
    recording: Path | None = None
    """the run's --record, if it has moved"""
    weights: Literal["tiny", "step"] = "tiny"
    """tiny: random weights of the same architecture and vocabulary, made when the capsule is opened; step: the policy's
    weights before the step, of the checkpoint before it or of the start model, so that all metrics repeat"""
    redact_text: bool = False
    """random token ids in place of prompts and responses, and no messages and answers; scores and masks stay"""
    output: Path | None = None
    """file or folder to write, which must not exist"""
    max_gb: float = 4.0
    """largest capsule to open, unpacked"""
    tolerance: float = 1e-4
    """relative difference up to which metrics count as equal: kernels of another machine sum in another order"""


def main(args: Args) -> None:
    if args.step is not None:
        write(args, args.step)
    elif args.source.is_file():
        with one_line_errors(args.source):
            open_capsule(args.source, args.output or default_folder(args.source), args.max_gb)
    elif (args.source / "capsule.json").is_file():
        with one_line_errors(args.source):
            compare(args.source, args.tolerance)
    else:
        raise InputError(f"{args.source}: no capsule; to pack a step of a run give --step N")


# ---- packing -------------------------------------------------------------------------------------


def write(args: Args, step: int) -> None:
    run = args.source
    flags = read_json(run / "config.json")
    if flags is None:
        raise InputError(f"{run}: no config.json there: give the folder of a run, such as runs/NAME")
    recorded = find_recording(args, flags, step)
    script = run / "starts" / str(flags.get("start", 1))
    if not (script / "start.json").is_file():
        raise InputError(f"{script}/start.json is missing: the run's script and versions are not known")
    output = args.output or Path(f"{run.resolve().name}-step-{step}.capsule.zip")
    export.refuse_existing(output)
    if args.redact_text and args.weights != "tiny":
        raise InputError("--redact-text with --weights step: the weights would see random tokens; take tiny weights")
    if "max_gen_batches" in flags and step > 1 and metrics_of(run, step - 1).get("training/rows_left_over"):
        why = f"step {step - 1} of dapo.py left groups over for it, which its recording does not hold"
        raise InputError(f"--step {step}: {why}: take step 1, or one after a step whose training/rows_left_over is 0")
    tokenizer = load_tokenizer(flags["model"], trust_remote_code=flags["trust_remote_code"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
        hidden = RandomTokens(len(tokenizer), special) if args.redact_text else None
        sources: dict[str, str] = {}
        at = folder / "recording/step_000001"
        prompts = [pack_rank(rank, at / rank.name, hidden, sources) for rank in recorded]
        rows = [row for of_all in zip(*prompts, strict=True) for row in of_all]  # in the loader's order: rank by rank
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = pack_model(folder / "model", run, flags, step, args.weights)
        vocab = max(len(tokenizer), config.get_text_config().vocab_size)
        versions = pack_script(script, folder / "script")
        about = {
            "format": VERSION,
            "step": step,
            "ranks": len(recorded),
            "weights": args.weights,
            "text_redacted": args.redact_text,
            "tokens": {
                "vocab": vocab,
                "special": special,
                "eos": tokenizer.eos_token_id,
                "pad": tokenizer.pad_token_id,
            },
            "flags": flags,
            "metrics": {renamed(name, sources): value for name, value in metrics_of(run, step).items()},
            "versions": versions,
        }
        (folder / "capsule.json").write_text(json.dumps(clean(about), indent=1))
        for text in (folder / "capsule.json", *folder.glob("script/**/*.*")):
            if found := secret_in(text.read_text(errors="replace"), text.name):
                raise InputError(f"not written: {found}: remove it from the run's folder")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        print(contents(about, len(rows), recorded), flush=True)
        try:
            with zipfile.ZipFile(output, "x", zipfile.ZIP_DEFLATED) as capsule:
                for file in files:
                    capsule.write(file, file.relative_to(folder).as_posix())
        except FileExistsError as error:
            raise InputError(f"{output} exists: delete it, or give another --output") from error
        except OSError as error:
            output.unlink(missing_ok=True)
            raise InputError(f"{output}: not written: {error}") from error
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it with python -m tools.capsule {output}", flush=True)


def command_that_records(run: Path, flags: dict, step: int) -> str:
    """It resumes from the last checkpoint before the step, as a new run."""
    before = [path for path in step_folders(run / "checkpoints") if int(path.name.removeprefix("step_")) < step]
    name = f"{run.resolve().name}-recorded"
    words = ["python", str(flags.get("script")), "--config", str(run / "config.json"), "--run-name", name]
    words += ["--resume", str(before[-1])] if before else []
    words += ["--record", f"{name}-steps"]
    if flags.get("lr_schedule") == "constant":  # another depends on the number of steps
        words += ["--total-steps", str(step)]
    return shlex.join(words)


def find_recording(args: Args, flags: dict, step: int) -> list[Path]:
    """The folders of the step's ranks, in order. Raises InputError unless they are complete and as they were saved."""
    if args.recording is None and not flags.get("record"):
        again = f"repeat the step with: {command_that_records(args.source, flags, step)}"
        raise InputError(f"{args.source}: it ran without --record, so no step of it can be replayed; {again}")
    folder = args.recording or Path(flags["record"])
    steps = recorded_steps(folder)
    if not steps:
        raise InputError(f"{folder}: no recording there; give the folder of the run's --record as --recording")
    ranks = sorted((folder / f"step_{step:06d}").glob("rank_*_of_*"), key=lambda path: int(path.name.split("_")[1]))
    if not ranks or len(ranks) != int(ranks[0].name.rpartition("_")[2]):
        reason = "was not recorded" if not ranks else f"was cut off: it has {len(ranks)} rank(s)"
        raise InputError(f"--step {step} {reason}; {folder} has the steps {steps[0]} to {steps[-1]}")
    for rank in ranks:
        why = why_incomplete(rank, of=f"{rank.parent.name}/{rank.name}") or why_altered(rank, but=[BATCH])
        if why:
            raise InputError(f"{rank}: not as it was recorded: {why}")
    return ranks


class RandomTokens:
    """Random ids in place of ordinary ones. Special tokens stay. A prompt gets the same ids wherever it occurs."""

    def __init__(self, vocab: int, special: list[int]):
        self.special = torch.tensor(special)
        self.ordinary = torch.tensor(sorted({*range(vocab)} - {*special}))
        self.prompts: dict[tuple, list[int]] = {}
        self.salt = int(torch.randint(2**62, (), generator=self.new_generator()))

    def new_generator(self) -> torch.Generator:
        generator = torch.Generator()
        generator.seed()  # by chance, so that nobody draws the same ids again
        return generator

    def tokens(self, ids: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        drawn = self.ordinary[torch.randint(len(self.ordinary), ids.shape, generator=self.new_generator())]
        return torch.where(is_token.bool() & ~torch.isin(ids, self.special), drawn, ids)

    def prompt(self, ids: list[int]) -> list[int]:
        if tuple(ids) not in self.prompts:
            self.prompts[tuple(ids)] = self.tokens(torch.tensor(ids), torch.ones(len(ids))).tolist()
        return self.prompts[tuple(ids)]

    def hide(self, rows: DataProto) -> None:
        """Replaces the tokens of a rollout, and empties or drops its columns of text."""
        t, columns = rows.batch, rows.non_tensor_batch
        P = t["prompts"].shape[1]
        is_token = t["attention_mask"].bool()  # (B, P + T)
        for i, ids in enumerate(columns["raw_prompt_ids"]):
            columns["raw_prompt_ids"][i] = self.prompt(list(ids))
            t["prompts"][i, is_token[i, :P]] = torch.tensor(columns["raw_prompt_ids"][i])
        t["responses"] = self.tokens(t["responses"], is_token[:, P:])
        t["input_ids"] = torch.cat([t["prompts"], t["responses"]], dim=1)
        if "anchor_states" in t:  # hashes of texts
            t["anchor_states"] = torch.where(t["anchor_states"] == 0, 0, t["anchor_states"] ^ self.salt)
        for key in columns.keys() - NO_TEXT - {"raw_prompt_ids"}:
            if key in EMPTY:
                columns[key][:] = [None if value is None else EMPTY[key] for value in columns[key]]
            else:
                del columns[key]


def pack_rank(source: Path, folder: Path, hidden: RandomTokens | None, sources: dict[str, str]) -> list[dict]:
    """Writes a rank's files as those of step 1. Returns its prompts as rows of a data set. sources: gets the names of
    data sources, with what they are in the capsule."""
    folder.mkdir(parents=True)
    prompts: dict[str, dict] = {}
    for file in sorted(source.glob("*.safetensors")):
        if file.name == BATCH:
            continue  # a replay computes it
        data = DataProto.load_from_disk(file)
        if file.name.startswith("rollout_"):
            if "multi_modal_data" in data.non_tensor_batch:
                raise InputError(f"{file}: its prompts have images, which a capsule does not hold")
            if hidden is not None:
                hidden.hide(data)
            columns = data.non_tensor_batch
            sources |= {name: clean(name) for name in columns["data_source"]}
            for key in columns.keys() & {"data_source", *EMPTY}:
                columns[key][:] = [clean(value) for value in columns[key]]
            for uid, ids, name in zip(columns["uid"], columns["raw_prompt_ids"], columns["data_source"]):
                row = {"prompt": " ".join(map(word, ids)), "data_source": name}
                prompts.setdefault(uid, row | {"reward_model": {"ground_truth": "-"}})
        elif file.name.startswith("scores_"):
            data.meta_info = {
                "items": [
                    without_hashes(number, answers, hidden is not None) for number, answers in data.meta_info["items"]
                ]
            }
        data.save_to_disk(folder / file.name)
    entries = {file.name: entry(file) for file in folder.glob("*.safetensors")}
    write_manifest(folder, entries, of=f"{folder.parent.name}/{folder.name}")
    return [*prompts.values()]


def renamed(metric: str, sources: dict[str, str]) -> str:
    for name, cleaned in sources.items():
        metric = metric.replace(f"/{name}/", f"/{cleaned}/")
    return metric


def without_hashes(number: int, answers: list, no_text: bool) -> tuple[int, list]:
    """A scorer's answers without the hashes of the responses, of which a replay has other texts; no_text: and without
    any text."""
    kept: list = []
    for kind, value in answers:
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if k[0] != " " and not (no_text and not isinstance(v, int | float))}
        kept.append([kind, "" if no_text and isinstance(value, str) else clean(value)])
    return number, kept


def word(token: int) -> str:
    """The text of a token of the capsule's tokenizer. None is the beginning of another."""
    return f"t{token:07d}"


def pack_model(folder: Path, run: Path, flags: dict, step: int, weights: str) -> PreTrainedConfig:
    """Writes the config, with --weights step also the weights. Returns the config."""
    if weights == "step" and step > 1:
        others = {"a critic": "critic_model" in flags, "a reference": flags.get("kl_coef"), "LoRA": flags["lora_rank"]}
        for other in (name for name, has in others.items() if has):
            raise InputError(f"--weights step: the step has {other} too, which a capsule does not hold: take step 1")
        export.main(export.Args(run, step=step - 1, dtype="float32", output=folder))
        for file in folder.iterdir():
            if not MEMBERS.fullmatch(f"model/{file.name}"):
                file.unlink()  # the tokenizer
        return AutoConfig.from_pretrained(folder)
    source = local_copy(flags["model"], weights=weights == "step")
    config = AutoConfig.from_pretrained(source, trust_remote_code=flags["trust_remote_code"])
    if hasattr(config, "auto_map"):
        raise InputError(f"--model {flags['model']} comes with code of its own, which a capsule does not run")
    folder.mkdir()
    if weights == "step":
        load_model(source).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    else:
        (folder / "config.json").write_text(json.dumps(tiny(without_code(config.to_dict())), indent=1))
    return config


def without_code(config: Any) -> Any:
    """The model's config without what transformers would look up on the hub or the disk, and without texts that are no
    names. Raises ValueError for one that names code."""
    if isinstance(config, list):
        return [without_code(value) for value in config if not is_place(value)]
    if not isinstance(config, dict):
        return config
    if "auto_map" in config:
        raise ValueError("the model's config names code")
    kept = {key: value for key, value in config.items() if not (is_place(key) or is_place(value))}
    loading = {key for key, value in kept.items() if isinstance(value, str | dict | list) and LOADS.search(str(key))}
    return {key: without_code(value) for key, value in kept.items() if key not in loading}


def is_place(value: Any) -> bool:
    """Whether a text may be a path, a repository, or the escape codes of a terminal."""
    return isinstance(value, str) and not re.fullmatch(r"[^/\\\x00-\x1f\x7f-\x9f]*", value)


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The config with small sizes: the same architecture and vocabulary, few layers."""
    small = {key: min(value, TINY[key]) for key, value in config.items() if key in TINY and isinstance(value, int)}
    heads, kv = (config.get(key) or 1 for key in ("num_attention_heads", "num_key_value_heads"))
    if "num_key_value_heads" in small:  # grouped queries stay grouped
        small["num_key_value_heads"] = 4 if kv == heads else 2 if kv > 1 else 1
        small["num_attention_heads"] = 4
    if config.get("layer_types"):
        small["layer_types"] = config["layer_types"][: small["num_hidden_layers"]]
    parts = {key: tiny(value) for key, value in config.items() if key == "text_config" and isinstance(value, dict)}
    return {key: value for key, value in config.items() if key not in ("_name_or_path", "dtype")} | small | parts


def pack_script(start: Path, folder: Path) -> dict[str, Any]:
    """Writes the script, Python files of flags and the git diff. Returns the versions of start.json."""
    (folder / "code").mkdir(parents=True)
    for file in [*start.glob("*.py"), *start.glob("diff.patch"), *start.glob("code/*.py")]:
        target = folder / file.relative_to(start)
        if MEMBERS.fullmatch(f"script/{file.relative_to(start).as_posix()}"):
            target.write_text(clean(file.read_text(errors="replace"), PATH_IN_CODE))
    about = json.loads((start / "start.json").read_text())
    about["machine"] = about["machine"].partition(": ")[2]  # without its name
    return {key: value for key, value in about.items() if key not in ("untracked", "flags")}


def metrics_of(run: Path, step: int) -> dict[str, float]:
    """The step's line of metrics.jsonl; of a repeated step the last one."""
    file = run / "metrics.jsonl"
    found = [row for row in read_rows(file) if row and row["step"] == step and "training/rows_in" in row]
    if not found:
        raise InputError(f"{file}: no metrics of step {step}: the run ended in it, or before it")
    return found[-1]


def clean(value: Any, path: re.Pattern = PATH) -> Any:
    """The value with keys, passwords and folders redacted in all texts. Files keep their names."""
    if isinstance(value, dict):
        return {clean(key): clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = redact(value)
    for form in FORMS.values():
        value_of_key = r"[^\s&'\"]*" if form.endswith("=)") else ""
        text = re.sub(form + value_of_key, "***", text)
    return path.sub(lambda found: (found["before"] or "") + ".../", text)


def contents(about: dict, prompts: int, recorded: list[Path]) -> str:
    """What someone should know before the file leaves the machine."""
    held = f"{prompts} prompts and their responses"
    if about["text_redacted"]:
        held += ": random token ids of the same lengths; masks, log-probs, scores and names of data sources are kept"
    else:
        held += " as token ids (which are the text, for who has the tokenizer) and as messages, reference answers and "
        held += "scorers' answers; --redact-text leaves them out"
    model = "the policy's weights" if about["weights"] == "step" else "no weights: an opened capsule has random ones"
    rest = f"flags, metrics, script, git diff and versions without keys, passwords and folders; {model}"
    return f"step {about['step']}, {len(recorded)} rank(s): {held}; {rest}"


# ---- opening -------------------------------------------------------------------------------------


def open_capsule(file: Path, folder: Path, max_gb: float) -> None:
    """Writes the folder, and runs nothing of it. Raises InputError for a file that is no capsule, or a hostile one."""
    with export.new_folder(folder) as aside:
        unpack(file, aside, int(max_gb * 1e9))
        about = read_about(aside)
        make_model(aside / "model", about)
        write_scorers(aside, about)
        (aside / "recording/config.json").write_text(json.dumps(replay_flags(aside, folder, about), indent=1))
        commit = str(about["versions"].get("commit"))
    script = about["flags"]["script"]
    own = shlex.quote(f"{folder}/script/{script}")
    launcher = "python" if about["ranks"] == 1 else f"torchrun --nproc-per-node {about['ranks']}"
    run = f"{launcher} {script}" if (ROOT / script).is_file() else f"PYTHONPATH=. {launcher} {own}"
    at = shlex.quote(f"{folder}/recording")
    commit = commit if re.fullmatch("[0-9a-f]{7,64}", commit) else "unknown"
    print(f"{folder}: step {about['step']} of {script}, commit {commit}", flush=True)
    if note := foreign_code(folder, script):
        print(note, flush=True)
    print(f"replay it:  {run} --config {at}/config.json --replay {at} --run-name replay", flush=True)
    print(f"then:       python -m tools.capsule {shlex.quote(str(folder))}", flush=True)


def default_folder(file: Path) -> Path:
    """The capsule's name without .capsule.zip, in the working directory. Its sender may have chosen it."""
    name = file.name.removesuffix(".zip").removesuffix(".capsule")
    if not name.isprintable() or name[:1] in ("", ".", "-"):
        raise InputError(f"{file}: no name for a folder: give --output")
    return Path(name)


def printable(text: Any) -> str:
    """Without line breaks and the escape codes of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


@contextmanager
def one_line_errors(file: Path) -> Iterator[None]:
    """What a damaged or hostile capsule raises in the block becomes an InputError, whose line holds no escape codes."""
    try:
        yield
    except InputError as error:
        raise InputError(printable(error)) from error
    except (OSError, zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, UnicodeError) as error:
        raise InputError(printable(f"{file}: no capsule, a damaged one, or not written: {str(error)[:200]}")) from error
    except Exception as error:  # transformers may raise anything for a config
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        why = f"its capsule.json, its model's config or a scorer's file is not as it should be ({what})"
        raise InputError(printable(f"{file}: {why}")) from error


def unpack(file: Path, folder: Path, most: int) -> None:
    """Extracts the members that a capsule has, up to `most` bytes."""
    with zipfile.ZipFile(file) as capsule:
        members = capsule.infolist()
        names = [member.filename for member in members]
        for member in members:
            mode = stat.S_IFMT(member.external_attr >> 16)
            if not MEMBERS.fullmatch(member.filename) or mode not in (0, stat.S_IFREG):
                raise InputError(f"{file}: {member.filename[:100]!r} is no file of a capsule: it is not opened")
            if not member.filename.endswith(".safetensors") and member.file_size > MOST_JSON:
                raise InputError(f"{file}: {member.filename} has {member.file_size:,} bytes, more than {MOST_JSON:,}")
        if len({*names}) < len(names) or len(names) > MOST_FILES:
            raise InputError(f"{file}: {len(names)} files, some with the same name, or too many: it is not opened")
        size = sum(member.file_size for member in members)
        if size > most:
            raise InputError(
                f"{file}: {size / 1e9:.1f} GB unpacked, more than --max-gb; raise it if you trust the file"
            )
        for member in members:  # zipfile reads no more than file_size, and checks the CRC
            target = folder / PurePosixPath(member.filename)
            target.parent.mkdir(parents=True, exist_ok=True)
            with capsule.open(member) as source, target.open("xb") as copy:
                shutil.copyfileobj(source, copy)
    if "capsule.json" not in names or "model/config.json" not in names:
        raise InputError(f"{file}: a zip file, but no capsule: capsule.json or model/config.json is missing")


def read_about(folder: Path) -> dict[str, Any]:
    about = json.loads((folder / "capsule.json").read_text())
    if about["format"] != VERSION:
        raise InputError(
            f"a capsule of format {about['format']}, this is plainrl with format {VERSION}: take its commit"
        )
    tokens = about["tokens"]
    special = {*tokens["special"], tokens["eos"], tokens["pad"]} - {None}
    if not 0 < tokens["vocab"] <= LARGEST_COUNT or not all(0 <= token < tokens["vocab"] for token in special):
        raise ValueError(f"a vocabulary of {tokens['vocab']} tokens")
    if not re.fullmatch(r"[\w-]+\.py", about["flags"]["script"], re.ASCII):
        raise ValueError(f"script {about['flags']['script']!r}")
    ranks, step = about["ranks"], about["step"]
    recorded = {path.name for path in (folder / "recording/step_000001").iterdir()}
    if not (isinstance(step, int) and isinstance(ranks, int) and 0 < ranks <= MOST_FILES):
        raise ValueError(f"step {step!r} of {ranks!r} ranks")
    if recorded != {f"rank_{rank}_of_{ranks}" for rank in range(ranks)}:
        raise ValueError(f"{ranks} ranks, and a recording of {len(recorded)}")
    for name, value in about["metrics"].items():
        if not isinstance(value, int | float):
            raise ValueError(f"metric {name[:100]} is {str(value)[:100]}")
        float(value)  # an integer may be too large for it
    return about


def foreign_code(folder: Path, script: str) -> str:
    """A line about a script that is not this checkout's, and which of the two runs; "" if they are equal."""
    theirs, ours = folder / "script" / script, ROOT / script
    if not ours.is_file():
        return f"note: the command runs {theirs}, which is code of the capsule's author: read it first"
    if theirs.is_file() and theirs.read_text(errors="replace") == clean(ours.read_text(), PATH_IN_CODE):
        return ""
    return f"note: the command runs {script} of this checkout, and {theirs} differs from it"


def make_model(folder: Path, about: dict) -> None:
    """Writes the tokenizer of ids and, if the capsule has none, random weights."""
    config = without_code(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if not list(folder.glob("*.safetensors")):
        if large := list(large_sizes(config)):
            raise ValueError(f"not a tiny model: {large[0]}")
        parsed = AutoConfig.from_pretrained(folder)
        with torch.device("meta"), few_modules():
            model = AutoModelForCausalLM.from_config(parsed)
        number = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
        if number > MOST_PARAMETERS:
            raise ValueError(f"not a tiny model: {number:,} parameters")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(parsed).float().save_pretrained(folder)
    tokens = about["tokens"]
    tokenizer = Tokenizer(WordLevel({word(i): i for i in range(tokens["vocab"])}, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    eos, pad = (word(tokens[key]) for key in ("eos", "pad"))
    special = [word(token) for token in tokens["special"]]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, additional_special_tokens=special
    )
    fast.save_pretrained(folder)


@contextmanager
def few_modules() -> Iterator[None]:
    """Raises ValueError while a model with too many layers is made, which would take minutes."""
    made = itertools.count()

    def count(*_) -> None:
        if next(made) == MOST_MODULES:
            raise ValueError(f"not a tiny model: more than {MOST_MODULES:,} modules")

    hook = torch.nn.modules.module.register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def large_sizes(config: Any, name: str = "") -> Iterator[str]:
    """The sizes in a model's config, such as layers or experts, that would take long to build."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from large_sizes(value, key)
    elif isinstance(config, list):
        for value in config:
            yield from large_sizes(value, name)
    elif isinstance(config, int) and config > (LARGEST_COUNT if COUNTED.search(name) else LARGEST_SIZE):
        yield f"{name} {config}"


def write_scorers(folder: Path, about: dict) -> None:
    """Files with functions of the scorers' names and parameters, which raise: a replay reads what they answered. None
    of the capsule's code is imported."""
    for spec in about["flags"]["reward"]:
        if ":" not in spec:
            continue
        file, _, name = spec.rpartition(":")
        if not name.isidentifier() or not re.fullmatch(r"[\w-]+\.py", Path(file).name, re.ASCII):
            raise ValueError(f"--reward {spec[:100]!r}")
        code = next(folder.glob(f"script/code/*-{Path(file).name}"), None)
        stub = folder / "scorers" / Path(file).name
        stub.parent.mkdir(exist_ok=True)
        with stub.open("a") as target:
            target.write(f"def {name}({parameters(code, name)}):\n    raise RuntimeError('a replay scores nothing')\n")


def parameters(code: Path | None, name: str) -> str:
    """Those of the function in the file, without defaults that run; ** if it is not found. Raises ValueError for a file
    that does not parse."""
    text = code.read_text() if code is not None else ""
    if len(text) > MOST_CODE:
        raise ValueError(f"{code} has more than {MOST_CODE:,} characters")
    try:
        parsed = ast.parse(text)
    except (SyntaxError, MemoryError) as error:  # MemoryError: nested too deeply
        raise ValueError(f"{code} does not parse: {error}") from error
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            given = node.args
            for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
                if argument is not None:
                    argument.annotation = None
            given.defaults = [ast.Constant(None) for _ in given.defaults]
            given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
            return ast.unparse(given)
    return "data_source, solution_str, ground_truth, extra_info, **kwargs"


def replay_flags(folder: Path, final: Path, about: dict) -> dict[str, Any]:
    """The run's flags, as far as they decide the step, with the capsule's files in place of others. final: where the
    folder will be."""
    flags, metrics, at = about["flags"], about["metrics"], final.resolve()
    changed = CHANGED | {"model": f"{at}/model", "train_files": [f"{at}/prompts.jsonl"], "output_dir": str(at)}
    changed |= {name: changed["model"] for name in ("critic_model", "reward_model") if flags.get(name)}
    if about["weights"] == "tiny":  # with other layers and experts than these name
        changed |= {"freeze": "", "routing_replay": "none", "lora_target_modules": "all-linear"}
    turns = flags["multi_turn"]
    if flags["agent"] or turns["tools"] or turns["interaction"]:  # in a replay, none of them plays
        idle: dict[str, Any] = {"tools": [], "interaction": "reasoning_gym", "compact_at": None, "context_window": None}
        changed["multi_turn"] = turns | idle
        changed["chat_template"] = f"{at}/chat_template.jinja"
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    scorers = [spec.rpartition(":") for spec in flags["reward"]]
    changed["reward"] = [f"{at}/scorers/{Path(file).name}:{name}" if file else name for file, _, name in scorers]
    for flag in ("lr", "kl_coef", "entropy_coef"):  # that a schedule or a controller had changed by this step
        if f"actor/{flag}" in metrics:
            changed[flag] = metrics[f"actor/{flag}"]
    given, correction = flags["rollout_correction"], flags["effective"]["rollout_correction"]
    if isinstance(correction, dict) and given["level"] is None:  # a default of asynchronous runs
        own = {key: correction[key] for key in ("level", "bounds") if key in correction}
        changed["rollout_correction"] = given | own
    return {key: value for key, value in (flags | changed).items() if key not in DROPPED}


# ---- comparing -----------------------------------------------------------------------------------


def compare(folder: Path, tolerance: float) -> None:
    """Compares the replay's metrics with the recorded ones, in the order in which a step computes them."""
    about = read_about(folder)
    theirs, ours = about["metrics"], metrics_of(folder / "replay", 1)
    names = [name for name in theirs if not OF_THE_MACHINE.match(name)]
    left_out = ""
    if about["weights"] == "tiny":
        compared = [name for name in names if is_of_the_recording(name, about["flags"])]
        left_out = f"; {len(names) - len(compared)} depend on the weights, which are random here"
        names = compared
    for name in names:
        was, now = theirs[name], ours.get(name, math.nan)
        if not math.isclose(was, now, rel_tol=tolerance, abs_tol=1e-6) and not (math.isnan(was) and name in ours):
            differ = f"differs: {was} was recorded, {now} is replayed"
            print(f"{printable(name)} is the first of {len(names)} metrics that {differ}")
            return
    print(f"all {len(names)} compared metrics of step {about['step']} are as recorded{left_out}")


def is_of_the_recording(name: str, flags: dict) -> bool:
    """Whether the metric depends on no weight."""
    if not OF_THE_RECORDING.match(name):
        return False
    estimator = ADV_ESTIMATORS.get(flags.get("adv_estimator", ""))
    tensors = estimator.columns if estimator else ("values",)
    corrected = flags["effective"]["rollout_correction"] != "none"
    in_reward = flags.get("kl_coef") and flags.get("kl_placement") == "reward"
    return not name.startswith("advantages/") or not (tensors or corrected or in_reward)


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.capsule", description=__doc__))
