"""Part `several` (--ranks N): runs of grpo.py on N ranks, with each kind of parallelism, against one rank; servers
with a sync by NCCL; a resume on half of the ranks; the end of a job of which a rank was killed; seconds of a step."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from benchmarks.gpu_check.common import shape
from benchmarks.gpu_check.rows import ROOT, Options, attempt, claim, row, skipped
from benchmarks.gpu_check.scripts import command_of, environment_of, run_script
from benchmarks.gpu_check.stages import REST, save_model

TOY = (
    *("--config", str(ROOT / "data/toy/preset.yaml"), "--train-files", str(ROOT / "data/toy/val.jsonl")),
    *("--prompts-per-step", "16", "--lr", "1e-5"),  # so small that rounding makes no other samples
    *("--total-steps", "2", "--val-every", "0", "--no-val-before-train", "--reward-workers", "0"),
)
HF, VLLM = "--rollout-engine hf --save-every 0", "--rollout-engine vllm --save-every 0"
KINDS = {  # of parallelism: (claim, flags, what one rank has for it)
    "FSDP2": ("M1", f"{HF} --sharding fsdp2", HF),
    "ZeRO-1": ("M2", f"{HF} --sharding zero1", HF),
    "HSDP": ("M3", f"{HF} --dp-replicate-size 2", HF),
    "sequence parallelism": ("M4", f"{HF} --sequence-parallel-size 2", HF),
    "tensor parallelism": ("M5", f"{VLLM} --tensor-parallel-size 2", VLLM),
}
SERVERS = {  # flags with --rollout-gpus: its claim
    "--async-level 0": "M6",
    "--async-level 1": "M7",
}
COMPARED = ("actor/grad_norm", "actor/entropy", "actor/pg_loss", "reward/mean")
LIMIT = 0.02  # relative difference: one sample of 256 that rounding has changed is within it
SIZES = "--max-prompt-length 64 --max-response-length 1024 --group-size 8"
ENDS_S = 60  # within which a job ends of which a rank was killed


def check(options: Options, device: torch.device) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        alone: dict[str, list[dict]] = {}
        for name in KINDS:
            yield from attempt(name, partial(parallel, options, device, folder, name, alone))
        for flags in SERVERS:
            yield from attempt(f"servers {flags}", partial(servers, options, device, folder, flags))
        yield from attempt("resume on other ranks", partial(resume, options, device, folder))
        yield from attempt("a killed rank", partial(killed, options, device, folder))
        if not options.tiny:
            yield from attempt("seconds of a step", partial(speed, options, device, folder))


def launcher(ranks: int) -> tuple[str, ...]:
    if ranks == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def train(options: Options, folder: str, name: str, flags: str, ranks: int) -> list[dict]:
    """The metrics of two steps."""
    name = name.replace(" ", "_")
    return run_script(options, "grpo", folder, name, *TOY, "--no-export-model", *flags.split(), run=launcher(ranks))


def parallel(
    options: Options, device: torch.device, folder: str, name: str, alone: dict[str, list[dict]]
) -> Iterator[dict]:
    number, flags, of_one = KINDS[name]
    if of_one == VLLM and not find_spec("vllm"):
        yield skipped(name, "vLLM is not installed")
        return
    if of_one not in alone:
        alone[of_one] = train(options, folder, f"one_{len(alone)}", of_one, 1)
    metrics = train(options, folder, name, flags, options.ranks)
    yield from compared(f"{name}, {options.ranks} ranks against one", device, number, metrics, alone[of_one])


def compared(check: str, device: torch.device, number: str, ours: list[dict], theirs: list[dict]) -> Iterator[dict]:
    """Of the last step."""
    different = {key: abs(ours[-1][key] - theirs[-1][key]) / max(abs(theirs[-1][key]), 1e-3) for key in COMPARED}
    most = max(different.values())
    claims = claim(device, number, most < LIMIT, f"{check}: metrics differ by at most {most:.2g}")
    yield row(f"{check}: largest relative difference", most, "", most < LIMIT, claims, of=different)


def servers(options: Options, device: torch.device, folder: str, flags: str) -> Iterator[dict]:
    if not find_spec("vllm"):
        yield skipped(f"servers {flags}", "vLLM is not installed")
        return
    gpus = options.ranks // 2
    given = f"--save-every 0 --rollout-gpus {gpus} {flags}"
    last = train(options, folder, f"servers {SERVERS[flags]}", given, options.ranks)[-1]
    k3, sync = last["rollout/k3"], last["timing_s/weight_sync"]
    check = f"{gpus} of {options.ranks} ranks are servers, {flags}"
    claims = claim(device, SERVERS[flags], k3 < 0.01, f"{check}: k3 {k3:.2g} nats, a sync takes {sync:.2g} s")
    yield row(f"{check}: mismatch k3", k3, "nats", k3 < 0.01, claims)
    yield row(f"{check}: sync", sync, "s")


def resume(options: Options, device: torch.device, folder: str) -> Iterator[dict]:
    flags = "--rollout-engine hf --save-every 1 --keep-checkpoints 0"
    whole = train(options, folder, "whole", flags, options.ranks)
    fewer = options.ranks // 2
    saved = Path(folder, "whole/checkpoints/step_000001")
    rest = train(options, folder, "resumed", f"{flags} --resume {saved}", fewer)
    yield from compared(f"saved on {options.ranks} ranks, resumed on {fewer}", device, "M8", rest, whole)


def killed(options: Options, device: torch.device, folder: str) -> Iterator[dict]:
    """The last rank dies in the middle of a run, with servers where there is vLLM: how long the others live."""
    flags = f"--rollout-gpus {options.ranks // 2}" if find_spec("vllm") else "--rollout-engine hf"
    more = [*TOY, "--total-steps", "100000", "--save-every", "0", *flags.split()]
    command = command_of("grpo", folder, "killed", *more, run=launcher(options.ranks))
    job = subprocess.Popen(command, cwd=ROOT, env=environment_of(options), stderr=subprocess.DEVNULL)
    metrics = Path(folder, "killed/metrics.jsonl")
    while job.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.1)
    ranks = [p for p in psutil.Process(job.pid).children() if "grpo.py" in p.cmdline()]
    ranks[-1].send_signal(signal.SIGKILL)
    start = time.perf_counter()
    code = job.wait()
    while left := processes_of(folder):
        if time.perf_counter() - start > ENDS_S:
            break
        time.sleep(0.1)
    seconds, fine = time.perf_counter() - start, code != 0 and not left
    claims = claim(device, "M9", fine, f"the job ended after {seconds:.0f} s, and {len(left)} processes are left")
    yield row("a rank was killed: until all processes are gone", seconds, "s", fine, claims, flags=flags, left=left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def processes_of(folder: str) -> list[int]:
    """All with the folder in their command."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(folder in word for word in p.info["cmdline"] or ())]


def speed(options: Options, device: torch.device, folder: str) -> Iterator[dict]:
    """The second step with random weights: 7B where eight GPUs share them, else 1.5B."""
    name = "qwen2.5-7b" if options.ranks >= 8 else "qwen2.5-1.5b"
    save_model(shape(options, name), device, Path(folder, name))
    torch.cuda.empty_cache()
    found: dict[str, float] = {}
    for sharding in ("fsdp2", "zero1"):
        flags = [*SIZES.split(), *REST.split(), "--prompts-per-step", str(8 * options.ranks), "--sharding", sharding]
        flags += ["--config", str(ROOT / "data/toy/preset.yaml"), "--model", f"{folder}/{name}"]
        flags += ["--train-files", str(ROOT / "data/toy/val.jsonl")]

        def step(flags: list[str] = flags, sharding: str = sharding) -> Iterator[dict]:
            last = run_script(options, "grpo", folder, f"speed_{sharding}", *flags, run=launcher(options.ranks))[-1]
            found[sharding] = last["timing_s/update"]
            label = f"grpo.py, {name}, {options.ranks} ranks, {sharding}"
            kept = {key: value for key, value in last.items() if key.startswith(("timing_s/", "perf/"))}
            said = f"{label}: {last['timing_s/step']:.3g} s a step, {last['perf/tokens_per_s']:,.0f} tokens/s"
            yield row(f"{label}: a step", last["timing_s/step"], "s", of=kept, summary={"stages": said})

        yield from attempt(f"{name}, {sharding}", step)
    if len(found) == 2:
        ratio = found["zero1"] / found["fsdp2"]
        said = f"an update by ZeRO-1 takes {ratio:.2f} times as long as by FSDP2"
        yield row(f"{name}: ZeRO-1 / FSDP2, update", ratio, "", None, claim(device, "M10", ratio < 1, said))
