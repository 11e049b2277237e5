"""Checkpoints on real gloo groups of 1 and 2 forked ranks: exact resume, resharding, torn folders, rotation, export."""

import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import threading
from concurrent.futures import Future
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from blake3 import blake3

import lib.distributed
from lib import InputError
from lib.args import RunArgs, ValidationArgs
from lib.data_proto import DataProto
from lib.distributed import World, full_tensor, in_thread, make_mesh, shard_model, trainable_parameters
from lib.log.tracking import Tracker
from lib.manifest import file_hash
from lib.model import load_tokenizer
from lib.run import Run, checkpoint
from lib.run.checkpoint import load_checkpoint, newest_complete, save_checkpoint
from lib.run.export import export_hf
from planner.meta import LiveBytes
from tests.common import TOY_MODEL, full_disk, rollout_batch, run_ranks, with_slow

VOCAB, ROWS, LENGTH = 96, 4, 12
TOKENIZER = load_tokenizer(TOY_MODEL)


# ---- a tiny trainer ------------------------------------------------------------------------------
def tiny_model(seed: int, tied: bool, dropout: float = 0.0) -> transformers.Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, tie_word_embeddings=tied, attention_dropout=dropout)
    return transformers.Qwen2ForCausalLM(config)


class Trainer:
    """An actor (tied embeddings) and a critic (untied), each with AdamW in two param groups and a warm-up."""

    def __init__(self, world: World, seed: int = 0, lr: float = 1e-2, dropout: float = 0.1, replicas: int = 1):
        self.world, self.models, self.schedulers, self.params = world, {}, {}, {}
        for name, tied in (("actor", True), ("critic", False)):
            mesh = make_mesh(world, replicas)
            model = shard_model(tiny_model(seed, tied, dropout), mesh, torch.float32).train()
            params = self.params[name] = trainable_parameters(model)
            groups = [
                {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=lr)
            self.models[name] = (model, optimizer)
            self.schedulers[name] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        self.parts = {"models": self.models, "schedulers": self.schedulers}
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(1000 * seed + world.rank)

    def steps(self, first: int, last: int) -> list[list[float]]:
        """Optimizer steps first..last-1 on fixed data; per step the draws of all generators and the learning rates. One
        Gaussian a step: after an odd number of steps a generator holds the second one of a pair back."""
        seen = []
        for step in range(first, last):
            ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
            ids = ids[self.world.rank :: self.world.size]
            for name, (model, optimizer) in self.models.items():
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
                (nll / (ROWS * (LENGTH - 1)) * self.world.size).backward()
                torch.nn.utils.clip_grad_norm_(self.params[name], 1.0)
                optimizer.step()
                optimizer.zero_grad()
                self.schedulers[name].step()
            rates = [group["lr"] for _, optimizer in self.models.values() for group in optimizer.param_groups]
            seen.append([random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(())), *rates])
        return seen

    def snapshot(self) -> dict:
        """Whole weights, optimizer states and schedules."""
        found = {}
        for name, (model, optimizer) in self.models.items():
            for part in model.modules():
                if hasattr(part, "reshard"):
                    part.reshard()
            found[f"{name} weights"] = {key: full_tensor(p.detach()).clone() for key, p in model.named_parameters()}
            found[f"{name} states"] = [
                {key: full_tensor(v).clone() for key, v in optimizer.state.get(p, {}).items()}
                for p in self.params[name]
            ]
            found[f"{name} groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            found[f"{name} schedule"] = self.schedulers[name].state_dict()
        return found

    def save(self, folder: Path, step: int, keep: int = 0) -> Future[Path]:
        for model, _ in self.models.values():  # validation without backward: it leaves the root's parameters whole
            with torch.no_grad():
                model.eval()(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
                model.train()
        state = {"loader": {"position": 7 * step}, "kl_coef": 0.1 + 0.2}
        return save_checkpoint(folder, step, **self.parts, trainer_state=state, keep=keep)

    def load(self, path: Path) -> dict:
        return load_checkpoint(path, **self.parts)


def same(a, b) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def _save_small(folder: Path, step: int, keep: int = 0, batches: dict | None = None) -> Path:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(step)
    how = {"schedulers": {}, "trainer_state": {}, "keep": keep, "batches": batches}
    return save_checkpoint(folder, step, models={"m": (model, None)}, **how).result()


def _load_small(path: Path) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 4)
    load_checkpoint(path, models={"m": (model, None)}, schedulers={})
    return model


# ---- resume --------------------------------------------------------------------------------------
def test_rates_are_those_of_now_at_the_place_in_the_schedule_that_was_saved(tmp_path, one_rank):
    """An override of --lr would otherwise change nothing. The warm-up is at its fourth of five updates."""
    run = Trainer(one_rank, lr=0.1)
    run.steps(0, 3)
    path = run.save(tmp_path, 3).result()
    other = Trainer(one_rank, seed=9, lr=0.5)
    other.load(path)
    for name, (_, optimizer) in other.models.items():
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * 0.8] * 2
        assert other.schedulers[name].get_last_lr() == [0.5 * 0.8] * 2
    assert same([rates[4:] for rates in other.steps(3, 5)], [[0.5] * 4] * 2)


def test_one_process_saves_and_loads_without_collectives_of_dcp(tmp_path):
    """In torch 2.11 the gather of a single process's group does nothing, and DCP unpickles what it left unset."""

    def save_and_load(world, folder):
        dist.gather_object = dist.scatter_object_list = lambda *_, **__: pytest.fail("a collective")
        _load_small(_save_small(folder, 1))

    run_ranks(1, save_and_load, tmp_path)


def test_the_writing_thread_has_the_gpu_of_its_rank(tmp_path):
    """A new thread's is GPU 0, where every rank would take half a GB."""

    def save(world, folder):
        set_in: list[str] = []
        for module in (checkpoint, lib.distributed.collectives):
            module.device_setter = lambda: lambda: set_in.append(threading.current_thread().name)
        _save_small(folder, 1)
        assert set_in[0].startswith("checkpoint")
        assert in_thread(lambda: threading.current_thread().name).result() == set_in[-1]

    run_ranks(1, save, tmp_path)


@pytest.mark.parametrize("saved_by, loaded_by", with_slow([(4, 1), (1, 2), (2, 4)], (4, 1), (1, 2)))
def test_resharding_keeps_weights_and_optimizer(saved_by, loaded_by, tmp_path, capfd):
    """4 ranks are two replicas of two shards."""

    def save(world, folder):
        run = Trainer(world, replicas=max(1, saved_by // 2))
        run.steps(0, 1)
        run.save(folder, 1).result()
        torch.save(run.snapshot(), folder / "at_1.pt")

    def load(world, folder):
        run = Trainer(world, seed=9, dropout=0.0, replicas=max(1, loaded_by // 2))
        run.steps(90, 91)
        before = torch.get_rng_state()
        run.load(folder / "step_000001")
        assert torch.equal(torch.get_rng_state(), before)
        assert same(run.snapshot(), torch.load(folder / "at_1.pt"))
        run.steps(1, 2)

    run_ranks(saved_by, save, tmp_path)

    run_ranks(loaded_by, load, tmp_path)
    notice = [line for line in capfd.readouterr().out.splitlines() if line.startswith("checkpoint:")]
    assert len(notice) == 1
    assert f"saved by {saved_by} rank(s), this run has {loaded_by}" in notice[0]


@pytest.mark.parametrize("saved_with_both", [False, True])
def test_parameters_without_gradient_have_no_optimizer_state(saved_with_both, tmp_path, one_rank):
    def make(seed, both):
        torch.manual_seed(seed)
        module = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(3, 2)})
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        step(module, optimizer, both)
        return module, optimizer

    def step(module, optimizer, both):
        optimizer.zero_grad()
        x = torch.ones(2, 3)
        (module["used"](x).sum() + (module["unused"](x).sum() if both else 0)).backward()
        optimizer.step()

    saved, loaded = make(0, both=saved_with_both), make(1, both=False)
    save_checkpoint(tmp_path, 1, models={"m": saved}, schedulers={}, trainer_state={}, keep=0).result()
    load_checkpoint(tmp_path / "step_000001", models={"m": loaded}, schedulers={})
    assert len(loaded[1].state) == (4 if saved_with_both else 2)
    for model in saved, loaded:
        step(*model, both=True)
    assert all(same(x.state_dict(), y.state_dict()) for x, y in zip(saved, loaded))


class Holds:
    """A part of a script's state."""

    def __init__(self, state):
        self.state_dict = lambda: state
        self.load_state_dict = None


def of_ones(times: float, uid: str = "a") -> DataProto:
    return DataProto.from_dict({"x": torch.ones(1, 3) * times}, {"uid": [uid]})


BAD_STATE = {  # what a script keeps, on each of two ranks
    "stateful['tracker']: counts has int keys; JSON needs text": lambda r: Holds({"counts": {3: 1}}),
    "stateful['tracker']: seen[1].at is a tuple; JSON": lambda r: Holds({"seen": [1, {"at": (1, 2)}]}),
    "stateful['tracker']: mean is nan": lambda r: Holds({"mean": math.nan}),
    "stateful['tracker']: only is a set; JSON": lambda r: Holds({"only": {1} if r else []}),
    "stateful['tracker']: seen is another on rank 1 than on rank 0": lambda r: Holds({"mean": 1.0, "seen": [r]}),
    "stateful['tracker']: late is another on rank 1 than on rank 0": lambda r: Holds({"late": 1} if r else {}),
    "stateful['tracker']: rows is another on rank 1": lambda r: Holds({"rows": of_ones(r)}),
    "stateful['tracker']: rows is another on rank 1 ": lambda r: Holds({"rows": of_ones(1, f"a{r}")}),
    "stateful['tracker']: state_dict() must return a dict with text as keys": lambda r: Holds([[1], {1: 1}][r]),
    "stateful['tracker'], a dict, has no state_dict()": lambda r: {"mean": 1.0},
}


def test_state_that_would_be_lost_is_named_in_the_first_step_and_at_each_save(tmp_path):
    def save_each(world, folder):
        tracker = Tracker(folder, {}, total_steps=9, enabled=False)
        run = Run("r", folder, RunArgs(total_steps=9, save_every=5), ValidationArgs(), world, tracker)
        for said, part in BAD_STATE.items():
            with pytest.raises(InputError, match=re.escape(said.strip())):
                run.save(1, {}, {"tracker": part(world.rank)})
        run.save(2, {}, {"tracker": Holds({1: 1})})  # nothing is written: the next check is that of the next save
        with pytest.raises(InputError, match="int keys"):
            run.save(5, {}, {"tracker": Holds({"a": {1: 1}})})
        rows = of_ones(world.rank)
        with pytest.raises(InputError, match=r"batches\['pool'\] is another on rank 1"):
            run.save(1, {}, {}, batches={"pool": rows})
        with pytest.raises(InputError, match=r"'a\.b' cannot be the name"):
            run.save(1, {}, {"a.b": Holds({})})
        exact = Holds({"counts": {"3": [1, None, "x", 0.5, math.inf]}})
        run.save(1, {}, {"tracker": exact}, batches={"pool": rows[:0]})
        run._writer.shutdown()

    run_ranks(2, save_each, tmp_path)


# ---- in the background ---------------------------------------------------------------------------
def _trains_while_it_saves(world: World, folder: Path) -> None:
    plain = Trainer(world)
    draws, run, write, further = plain.steps(0, 5), Trainer(world), dcp.save, threading.Event()
    final = plain.snapshot()

    def write_late(*args, **kwargs):
        assert further.wait(60)
        return write(*args, **kwargs)

    run.save(folder, 0).result()
    assert same(run.steps(0, 3), draws[:3])
    at_3, dcp.save = run.snapshot(), write_late
    saving = run.save(folder, 3)
    assert same(run.steps(3, 5), draws[3:]) and same(run.snapshot(), final)
    assert not saving.done() and newest_complete(folder) == folder / "step_000000"
    further.set()
    assert saving.result() == newest_complete(folder) == folder / "step_000003"
    for step in (3, 0):
        resumed = Trainer(world, seed=9)
        resumed.steps(90, 91)  # weights, optimizer states, schedule and generators are all something else
        state = resumed.load(folder / f"step_{step:06d}")
        assert state == {"loader": {"position": 7 * step}, "kl_coef": 0.1 + 0.2}
        assert step == 0 or same(resumed.snapshot(), at_3)
        assert same(resumed.steps(step, 5), draws[step:]) and same(resumed.snapshot(), final)


@pytest.mark.parametrize("size", with_slow([1, 2], 1))
def test_resume_is_bit_for_bit_from_what_was_written_while_training_went_on(size, tmp_path):
    """Also from before the first step, where Adam's counters must not be 1 ahead. Shards are not written before
    training is two steps further, which must neither show in them nor be disturbed. Ranks draw other numbers."""
    run_ranks(size, _trains_while_it_saves, tmp_path)
    states = [torch.load(file, weights_only=True) for file in (tmp_path / "step_000003").glob("rng_*.pt")]
    for first, second in combinations(states, 2):
        assert not torch.equal(first["torch"], second["torch"])
        assert not torch.equal(first["numpy"][0], second["numpy"][0])
        assert not torch.equal(first["python"][1], second["python"][1])
    assert len(states) == size


TOO_LARGE = {"rng_": 5_000, "distcp": 40_000, "batch_": 200_000}  # at this limit of a file's bytes


def test_a_save_that_finds_no_room_is_named_on_every_rank_and_leaves_nothing(tmp_path):
    """The last rank (for batches: the first) may not write files above the limit, which looks like a full disk."""

    def check(world, run, what, folder):
        run.save(folder, 1).result()
        unlimited, failing = resource.getrlimit(resource.RLIMIT_FSIZE), 0 if what == "batch_" else world.size - 1
        if world.rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_LARGE[what], unlimited[1]))
        batches = {"large": DataProto.from_dict(tensors={"x": torch.zeros(1, 100_000)})}
        saving = save_checkpoint(folder, 2, **run.parts, trainer_state={}, keep=1, batches=batches)
        with pytest.raises(InputError) as error:
            saving.result()
        [line] = str(error.value).splitlines()
        assert f"step_000002: not saved, earlier checkpoints are intact: rank {failing}: " in line
        assert "File too large" in line or what == "rng_"  # torch.save does not say why
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == ["step_000001"]
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert run.save(folder, 2, keep=1).result() == newest_complete(folder)

    def check_each(world):
        run = Trainer(world)
        run.steps(0, 1)
        for what in TOO_LARGE:
            check(world, run, what, tmp_path / what)

    run_ranks(2, check_each)


# ---- folders -------------------------------------------------------------------------------------
def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _unlist(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


TEARS = {
    "no manifest.json": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": lambda folder: _truncate(folder / "manifest.json"),
    ".metadata is not in manifest.json": lambda folder: _unlist(folder, ".metadata"),
    "__1_0.distcp is not in manifest.json": lambda folder: _unlist(folder, "__1_0.distcp"),
    "rng_00001.pt is missing": lambda folder: (folder / "rng_00001.pt").unlink(),
    "__0_0.distcp has": lambda folder: _truncate(folder / "__0_0.distcp"),
}
for file in (".metadata", "__0_0.distcp", "__1_0.distcp", "rng_00001.pt", "trainer.json", "batch_kept.safetensors"):
    TEARS[f"{file} is not as it was saved"] = lambda folder, file=file: _flip_a_bit(folder / file)


def test_a_torn_checkpoint_is_passed_over(tmp_path, capfd):
    def save(world, folder):
        for step in (5, 20, 100):
            _save_small(folder, step, batches={"kept": rollout_batch([2, 3, 2], [4, 1, 3])})

    assert newest_complete(tmp_path) is None
    run_ranks(2, save, tmp_path)
    shutil.copytree(tmp_path / "step_000100", tmp_path / "step_000200.tmp")
    assert newest_complete(tmp_path) == tmp_path / "step_000100"
    assert "torn" not in capfd.readouterr().out
    for reason, tear in TEARS.items():
        shutil.copytree(tmp_path / "step_000100", tmp_path / "step_000101")
        tear(tmp_path / "step_000101")
        checkpoint._why_altered.cache_clear()  # each is a process that starts
        assert newest_complete(tmp_path) == tmp_path / "step_000100"
        printed = capfd.readouterr().out.splitlines()
        assert len(printed) == 1 and "step_000101 is torn" in printed[0] and reason in printed[0]
        shutil.rmtree(tmp_path / "step_000101")
    _truncate(tmp_path / "step_000100" / "trainer.json")
    assert newest_complete(tmp_path) == tmp_path / "step_000020"

    def refuse_and_save(world, folder):
        with pytest.raises(InputError, match=r"step_000100: not a complete checkpoint \(trainer\.json has"):
            _load_small(folder / "step_000100")
        assert torch.equal(_load_small(folder / "step_000020").weight, torch.full((4, 4), 20.0))
        _save_small(folder, 200)
        assert newest_complete(folder) == folder / "step_000200" and not list(folder.glob("*.tmp"))

    run_ranks(2, refuse_and_save, tmp_path)


def test_a_checkpoint_that_is_a_link_is_replaced_and_rotated_without_the_data_on_the_other_disk(tmp_path, one_rank):
    for step in (1, 2):
        saved, moved = _save_small(tmp_path / "run", step), tmp_path / f"moved_{step}"
        saved.rename(moved)
        saved.symlink_to(moved)
    (tmp_path / "run/step_000003").symlink_to(tmp_path / "disk_that_is_gone")
    assert newest_complete(tmp_path / "run") == tmp_path / "run/step_000002"
    _save_small(tmp_path / "run", 2)
    _save_small(tmp_path / "run", 3, keep=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_000003"]
    assert checkpoint.why_torn(tmp_path / "moved_1") is checkpoint.why_torn(tmp_path / "moved_2") is None


def test_a_fork_of_a_process_that_has_hashed_can_hash(tmp_path):
    """A pool of threads that hash is not there in the child; scorers and ranks of tests are forks."""
    (tmp_path / "file").write_bytes(bytes(2**21))
    expected = file_hash(tmp_path / "file")
    hashes = lambda: os._exit(3 * (file_hash(tmp_path / "file") == expected))  # noqa: E731
    child = multiprocessing.get_context("fork").Process(target=hashes, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 3


def test_rotation(tmp_path):
    def check(world, folder):
        def names():
            dist.barrier()
            found = sorted(int(p.name[5:]) for p in folder.glob("step_*"))
            dist.barrier()
            return found

        for step in (8, 9, 10, 11):
            _save_small(folder, step)
        assert names() == [8, 9, 10, 11]
        if world.rank == 0:
            (folder / "step_000010/manifest.json").unlink()
        _save_small(folder, 12, keep=2)  # the torn one does not count as one of the two
        assert names() == [11, 12]
        _save_small(folder, 13, keep=3)
        assert names() == [11, 12, 13]
        _save_small(folder, 12, keep=1)  # a run rewound to 11 saves 12 again: replaced whole; 13 is not ours to delete
        assert names() == [12, 13]
        assert newest_complete(folder) == folder / "step_000013"
        _save_small(folder, 1_000_000, keep=1)
        assert names() == [1_000_000]

    run_ranks(2, check, tmp_path)


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(("name", "refused"), [("rng_00000.pt", pickle.UnpicklingError), (".metadata", InputError)])
def test_a_pickle_in_a_checkpoint_does_not_run(tmp_path, one_rank, name, refused):
    """Also where the manifest was made to fit."""
    path, marker = _save_small(tmp_path, 1), tmp_path / "executed"
    pickled = pickle.dumps(Payload(marker))
    if name == ".metadata":
        (path / name).write_bytes(pickled)
    else:
        torch.save(Payload(marker), path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    content = (path / name).read_bytes()
    manifest["files"][name] = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(refused, match=r"Unsupported global|metadata names"):
        _load_small(path)
    assert not marker.exists()
    pickle.loads(pickled)  # noqa: S301 it is ours, and live
    assert marker.exists()


# ---- export --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "tied"), with_slow([(1, True), (2, True), (2, False)], (1, True)))
def test_export_reloads_equal(size, tied, tmp_path):
    ids = torch.arange(20).view(2, 10)

    def export(world, folder):
        model = tiny_model(3, tied).eval()
        model.generation_config.max_new_tokens = 17
        model.generation_config.temperature = 0.6  # without do_sample: transformers loads it and does not save it
        expected = model(input_ids=ids).logits
        model = shard_model(model, make_mesh(world), torch.bfloat16)
        with torch.no_grad():
            model(input_ids=ids)  # leaves the root's parameters whole, in bfloat16
        export_hf(model, TOKENIZER, folder / "fp32")
        export_hf(model, TOKENIZER, folder / "bf16")
        export_hf(model, TOKENIZER, folder / "bf16", dtype=torch.bfloat16, max_shard_bytes=20_000)  # replaces
        if world.rank == 0:
            torch.save(expected.detach(), folder / "logits.pt")

    run_ranks(size, export, tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    expected = torch.load(tmp_path / "logits.pt")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    assert again.dtype == torch.float32 and again.config.architectures == ["Qwen2ForCausalLM"]
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(again.eval()(input_ids=ids).logits, expected)
    assert (again.generation_config.max_new_tokens, again.generation_config.temperature) == (17, 0.6)
    assert load_tokenizer(str(tmp_path / "fp32"))("2+1").input_ids == TOKENIZER("2+1").input_ids
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert half.dtype == torch.bfloat16
    assert same(half.state_dict(), tiny_model(3, tied).bfloat16().state_dict())
    whole, parts = ([*(tmp_path / name).glob("*.safetensors")] for name in ("fp32", "bf16"))
    assert (len(whole), len(parts)) == (1, 3 if tied else 4)
    assert max(file.stat().st_size for file in parts) < 20_000 + 4096  # its header
    parameters = sum(p.numel() for p in again.parameters())  # a tied head counts once
    index = json.loads((tmp_path / "bf16/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": parameters, "total_size": 2 * parameters}


class HostBytes(LiveBytes):
    """Of tensors in the host's memory."""

    def _add(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._add(tensor)


OTHERS = (1, False), (2, True)


@pytest.mark.parametrize("size, experts", with_slow([(1, True), (2, False), *OTHERS], *OTHERS))
def test_an_export_holds_one_file_and_a_layer_in_memory(size, experts, tmp_path):
    """And what gathers a weight, some five times that. Other ranks hold no more."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 24, "num_key_value_heads": 2}
    file_bytes = 2 * 2**20

    def export(world, folder):
        config = (
            transformers.MixtralConfig(num_local_experts=2, **sizes) if experts else transformers.Qwen2Config(**sizes)
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        counts = [p.numel() for p in model.model.layers[0].parameters()]
        whole, layer, largest = (2 * n for n in (model.num_parameters(), sum(counts), max(counts)))
        if size > 1:
            model = shard_model(model, make_mesh(world), torch.float32)
        peaks = []
        for most in (10**12, file_bytes):
            with torch.no_grad(), HostBytes(model) as held:
                export_hf(model, TOKENIZER, folder / "model", torch.bfloat16, most)
            peaks.append(held.peak)
        return whole, layer, largest, peaks

    [(whole, layer, largest, (at_once, by_files)), *others] = run_ranks(size, export, tmp_path)
    assert at_once >= whole  # it is counted
    split = 2 if experts else 1  # transformers copies the matrices of stacked experts, which are apart in files
    assert by_files < split * file_bytes + layer + 6 * largest < whole / 2
    assert all(peak <= 6 * largest for *_, peaks in others for peak in peaks)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == whole / 2


def test_an_export_that_breaks_off_leaves_the_one_before(tmp_path, one_rank, monkeypatch):
    model, calls = tiny_model(3, tied=True), []

    def save_pretrained(*args, save=transformers.PreTrainedModel.save_pretrained, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("the disk is full")
        save(*args, **kwargs)

    export_hf(model, TOKENIZER, tmp_path / "model")
    before = file_hash(tmp_path / "model/model.safetensors")
    message = "/model: the model was not exported, checkpoints are as they were: the disk is full .*GiB were free"
    with monkeypatch.context() as patch, pytest.raises(InputError, match=message):
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", save_pretrained)
        export_hf(tiny_model(4, tied=True), TOKENIZER, tmp_path / "model", max_shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert file_hash(tmp_path / "model/model.safetensors") == before
    with full_disk(4000), pytest.raises(InputError, match=r"the model was not exported.*\(os error 27\)"):
        export_hf(tiny_model(4, tied=True), TOKENIZER, tmp_path / "model")
    (tmp_path / "model.tmp").mkdir()  # of an export that was killed
    export_hf(model, TOKENIZER, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").glob("*.safetensors")] == ["model.safetensors"]
