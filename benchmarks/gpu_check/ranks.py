"""Part `ranks`: an update of two ranks is that of one; what a weight sync gathers; time limits of the mesh's groups.

Two GPUs: NCCL. One GPU, or none: gloo, on one GPU with CUDA tensors, which go through the host. Each rank is a process
of its own.
"""

import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.common import random_batch, random_model, shape
from benchmarks.gpu_check.measure import timed
from benchmarks.gpu_check.rows import Options, claim, row, skipped
from lib.distributed import World, full_tensor, init_distributed, iter_full_params, make_mesh, shard_model
from lib.distributed.sharding import fsdp_modules
from lib.distributed.watchdog import stop_watching
from lib.model import response_log_probs
from lib.rollout.weight_sync import weight_checksum

STAGE_TIMEOUT = 7200.0  # seconds: more than torch's own half an hour


def check(options: Options, device: torch.device) -> Iterator[dict]:
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    kind = {0: "gloo on the CPU", 1: "gloo with CUDA tensors"}.get(gpus, "NCCL")
    if gpus < 2:
        yield skipped("two ranks by NCCL", f"{gpus} GPUs here")
    try:
        yield from two_ranks(options, device, kind)
    except RuntimeError as error:
        if kind != "gloo with CUDA tensors":
            raise
        yield skipped(f"two ranks, {kind}", str(error).strip().splitlines()[-1])  # training never runs so
        yield from two_ranks(options, device, "gloo on the CPU")


def two_ranks(options: Options, device: torch.device, kind: str) -> Iterator[dict]:
    results = {n: run_ranks(n, options, kind) for n in (1, 2)}
    one, two = results[1], results[2]
    for name, limit in {"loss": 1e-5, "gradient": 1e-4, "weights": 1e-5}.items():
        a, b = (torch.tensor(r[name], dtype=torch.float64) for r in (one, two))
        error = ((a - b).norm() / a.norm()).item()
        yield row(f"{kind}: an update, two ranks against one, {name}", error, "", error < limit)
    same = two["checksums"][0] == two["checksums"][1]
    yield row(f"{kind}: both ranks gather the same weights", float(same), "", same)
    seconds = two["gather_s"]
    halved = two["gathered_bytes"]["float32"] / two["gathered_bytes"]["bfloat16"]
    ratio = seconds["float32"] / seconds["bfloat16"]
    said = f"shards in fp32 carry {halved:.2f} times the bytes of bf16 and take {ratio:.2f} times as long, {kind}"
    yield row(f"{kind}: weights gathered, fp32 / bf16, bytes", halved, "", halved == 2, of=two["gathered_bytes"])
    claims = claim(device, "G12", ratio > 1.2, said)
    yield row(f"{kind}: weights gathered, fp32 / bf16, time", ratio, "", None, claims, of=seconds)
    limits = two["limits_s"]
    passed = all(abs(limit - 1.1 * STAGE_TIMEOUT) < 1 for limit in limits.values())
    claims = claim(device, "G5", passed, f"the mesh's groups now have the limit of --stage-timeout: {limits}")
    yield row(f"{kind}: --stage-timeout in the mesh's groups", min(limits.values()), "s", passed, claims, of=limits)


def run_ranks(size: int, options: Options, kind: str) -> dict:
    """What `work_of` gives on rank 0. Raises RuntimeError with the first failed rank's traceback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    context = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        ranks = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank if kind == "NCCL" else 0)}
            ranks.append(context.Process(target=on_rank, args=(env | own, kind, options.tiny, out)))
            ranks[-1].start()
        while any(r.is_alive() for r in ranks) and not any(r.exitcode for r in ranks):
            time.sleep(0.05)
        codes = [r.exitcode for r in ranks]
        for r in ranks:
            r.kill()
            r.join()
        if any(codes):
            tracebacks = sorted(Path(folder).glob("*.txt"), key=lambda file: file.stat().st_mtime_ns)
            raise RuntimeError(tracebacks[0].read_text() if tracebacks else f"exit codes of the ranks: {codes}")
        return json.loads(out.read_text())


# ---- in a rank -----------------------------------------------------------------------------------


def on_rank(env: dict[str, str], kind: str, tiny: bool, out: Path) -> None:
    os.environ.update(env)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(env["WORLD_SIZE"])))  # not all cores for each
    try:
        result = work_of(kind, tiny)
    except Exception:  # noqa: BLE001  whatever it is, it is the result of this rank
        out.with_name(f"rank {env['RANK']}.txt").write_text(traceback.format_exc())
        os._exit(1)
    if env["RANK"] == "0":
        out.write_text(json.dumps(result))


def join(kind: str) -> tuple[World, DeviceMesh, dict[str, float]]:
    """(world, mesh of the model, time limits of the groups of a mesh as training makes it)."""
    if kind != "NCCL":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    world = init_distributed(STAGE_TIMEOUT)
    mesh = make_mesh(world)
    limits = limits_of(mesh.get_group("shard"), world.device) if world.size > 1 else {}
    if kind == "gloo with CUDA tensors":  # make_mesh would take NCCL, which wants a GPU a rank
        device = torch.device("cuda", 0)
        torch.zeros(1, device=device)
        world = world._replace(device=device)
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("shard",))
    return world, mesh, limits


class GatheredBytes(TorchDispatchMode):
    """Counts what comes out of all-gathers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "all_gather" in func.name() and isinstance(out, torch.Tensor):
            self.count += out.nbytes
        return out


def work_of(kind: str, tiny: bool) -> dict:
    world, mesh, limits = join(kind)
    options = Options(device=world.device.type, tiny=tiny)
    model = random_model(shape(options, "qwen2.5-0.5b"), world.device, num_hidden_layers=2)
    vocabulary = model.config.vocab_size
    model = shard_model(model, mesh, torch.float32)
    if kind.startswith("gloo"):
        for module in fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean of CUDA tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = random_batch([6, 5, 6, 7], [9, 12, 3, 8], vocabulary, world.device)
    mine = batch[list(range(world.rank, 4, world.size))]
    loss = response_log_probs(model, mine, 1.0)[0].sum()
    (loss * world.size / 32).backward()
    gradient = torch.cat([full_tensor(p.grad).flatten() for p in model.parameters()])
    optimizer.step()
    total = loss.detach().cpu()
    if world.size > 1:
        dist.all_reduce(total)
    result = {"loss": [total.item()], "gradient": summary(gradient)}
    result["weights"] = summary(torch.cat([w.flatten() for _, w in iter_full_params(model)]))
    if world.size > 1:
        result |= gathering(model) | {"limits_s": limits}
        result["checksums"] = [None] * world.size
        dist.all_gather_object(result["checksums"], weight_checksum(model, torch.bfloat16))
        dist.barrier()
    stop_watching()
    dist.destroy_process_group()
    return result


def summary(x: torch.Tensor) -> list[float]:
    """1000 sums that a change of any element changes."""
    x = x.detach().double().cpu()
    return torch.nn.functional.pad(x, (0, -len(x) % 1000)).view(-1, 1000).sum(0).tolist()


def gathering(model) -> dict:
    counted, seconds = {}, {}
    for name, dtype in {"float32": None, "bfloat16": torch.bfloat16}.items():
        seconds[name] = min(timed(lambda dtype=dtype: list_all(model, dtype)) for _ in range(3))
        with GatheredBytes() as gathered:
            list_all(model, dtype)
        counted[name] = gathered.count
    return {"gather_s": seconds, "gathered_bytes": counted}


def list_all(model, dtype) -> None:
    for _ in iter_full_params(model, dtype):
        pass


def limits_of(group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Seconds, of the group's backend for each device."""
    devices = {torch.device("cpu"), torch.device(device.type)}
    return {str(d): group._get_backend(d).options._timeout.total_seconds() for d in devices}
