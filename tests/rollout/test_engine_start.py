"""The start of a vLLM engine, without vLLM's own: the folder from which it starts, and the threads that it leaves."""

import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from transformers import LlamaConfig

import grpo
import lib.rollout
from lib import setup
from lib.args import engine_rows
from lib.distributed import World
from lib.model import ForwardConfig, load_tokenizer
from lib.rollout.vllm_engine import VLLMEngine, own_generators
from lib.rollout.vllm_start import cached, engine_settings, save_files, scheduler_settings
from servers.managed import Server
from tests.common import TOY_MODEL, full_disk, parse_flags, skip_without_vllm

CONFIG = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/plainrl/engines"


def model(**changed) -> SimpleNamespace:
    return SimpleNamespace(config=LlamaConfig(**CONFIG | changed), parameters=lambda: iter([torch.zeros(1)]))


def saved(run: Path, tokenizer=None, **changed) -> Path:
    save_files(run / "engine", model(**changed), tokenizer or load_tokenizer(TOY_MODEL), None)
    return run / "engine"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_runs_of_one_model_share_a_path(tmp_path, cache):
    first, second = (cached(saved(tmp_path / run)) for run in ("monday", "tuesday"))
    assert first == second and first.parent == cache and contents(first) == contents(tmp_path / "monday/engine")
    tokenizer = load_tokenizer(TOY_MODEL)
    tokenizer.add_tokens(["<a new one>"])
    others = {cached(saved(tmp_path / "wednesday", tokenizer)), cached(saved(tmp_path / "thursday", rope_theta=7.0))}
    assert len(others | {first}) == len(list(cache.iterdir())) == 3


def test_several_processes_at_once(tmp_path, cache):
    context, processes, folder = multiprocessing.get_context("fork"), 8, saved(tmp_path / "run")
    together, found = context.Barrier(processes), context.SimpleQueue()

    def start() -> None:
        together.wait(60)
        found.put(cached(folder))

    started = [context.Process(target=start) for _ in range(processes)]
    for process in started:
        process.start()
    [path] = {found.get() for _ in started}
    for process in started:
        process.join()
    assert path.parent == cache and contents(path) == contents(folder) and list(cache.iterdir()) == [path]


@pytest.mark.parametrize("without", ["folder", "home"])
def test_without_a_cache_the_run_uses_its_own_folder(tmp_path, cache, monkeypatch, capsys, without):
    folder = saved(tmp_path / "run")
    if without == "folder":
        cache.parent.parent.write_text("a file")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert cached(folder) == folder
    assert capsys.readouterr().out.startswith("note: vLLM compiles anew, because")


def test_a_full_disk_leaves_nothing_half(tmp_path, cache, capsys):
    folder = saved(tmp_path / "run")
    with full_disk():
        assert cached(folder) == folder
    assert not list(cache.iterdir()) and len(capsys.readouterr().out) < 400
    assert cached(folder).parent == cache


@pytest.mark.parametrize("eager", [False, True])
def test_engines_start_from_it_if_they_compile(tmp_path, cache, monkeypatch, world, eager):
    """In process and as a server."""
    started = []

    def llm(path, **settings):
        started.append((Path(path), settings["scheduler_cls"]))
        raise InterruptedError

    weights = ModuleType("vllm_weights")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm, __version__="0.32.0"))
    monkeypatch.setitem(sys.modules, "lib.rollout.vllm_weights", weights)
    monkeypatch.setattr(lib.rollout, "vllm_weights", weights, raising=False)
    monkeypatch.setattr("lib.rollout.vllm_engine.prepare_for_cpu", lambda _: None)
    more, scheduler = {"enforce_eager": eager}, "lib.rollout.rollout_scheduler.make_scheduler"
    if eager:
        more["scheduler_cls"] = scheduler = "the.users"
    options = {"max_length": 40, "dtype": torch.float32, "gpu_memory": 0.3, "more": more}
    with pytest.raises(InterruptedError):
        VLLMEngine(model(), load_tokenizer(TOY_MODEL), folder=tmp_path / "model", **options)
    order = {"folder": str(tmp_path), "program": [], "settings": {"enforce_eager": eager}}
    server = Server(0, order, {"VLLM_API_KEY": ""}, "127.0.0.1")
    server._take_port()
    own = tmp_path / "model" if eager else cached(tmp_path / "model")
    assert started == [(own, scheduler)] and f"model: {own}\n" in server.config.read_text()


def test_another_version_of_vllm_keeps_its_own_scheduler(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    assert scheduler_settings() == {}
    assert capsys.readouterr().out.startswith("note: vLLM's own scheduler runs, which is slower: ")


ROWS = {
    "": 256,
    "--prompts-per-step 768 --group-size 8": 768,
    "--prompts-per-step 768 --group-size 8 --rollout-tensor-parallel-size 2 --dry-run 8": 1024,
    "--prompts-per-step 96 --group-size 8 --rollout-gpus 2 --dry-run 10 --async-level 1": 768,
}


def test_as_many_rows_at_a_time_as_an_engine_has(monkeypatch):
    """Fewer cost time, 256 a third of it with 1024 rows; more cost memory."""
    monkeypatch.setattr("lib.rollout.vllm_start.compute_device", lambda model: torch.device("cuda", 0))
    for flags, at_a_time in ROWS.items():
        rows = engine_rows(parse_flags(grpo.Args, ["--rollout-engine", "vllm", *flags.split()]), ranks=8)
        settings = engine_settings(model(), max_length=40, dtype=torch.bfloat16, gpu_memory=0.4, rows=rows)
        assert settings["max_num_seqs"] == at_a_time


def test_an_engine_that_sleeps_wakes_up_to_end():
    """On CUDA vLLM's allocator unmaps at its end what sleep has unmapped. The weights below an adapter survive."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.can_sleep, engine._finish_steps, engine.llm = True, lambda: None, Mock()
    for engine._base in (None, 7):
        engine.sleep()
    assert engine.llm.sleep.call_args_list == [call(level=2), call(level=1)] and engine.version is None
    for engine.version in (None, 3):
        engine.close()
    shutdown = call.llm_engine.engine_core.shutdown()
    assert engine.llm.mock_calls[2:] == [call.wake_up(), shutdown, shutdown]


def test_generators_of_other_gpus_are_left_alone(monkeypatch):
    kept = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices, device_type: kept.append((devices, device_type)))
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        own_generators(device)
    assert kept == [([torch.device("cuda", 3)], "cuda"), ([], "cpu")]


def test_adamw_on_the_cpu_has_its_threads_after_vllm_has_started(tmp_path, monkeypatch):
    """On a GPU a worker of vLLM sets torch's threads to 1 once it has loaded the model, after the trainer set them."""
    skip_without_vllm()
    from vllm.utils.torch_utils import set_torch_threads_for_runtime

    set_threads = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_threads[-1])
    monkeypatch.setattr(setup.rollouts, "make_engine", lambda *_, **__: set_torch_threads_for_runtime())
    monkeypatch.setattr(setup.rollouts, "Rollouts", lambda *_, **__: None)
    flags = ["--cpu-offload", "actor", "--model", TOY_MODEL, "--max-prompt-length", "8", "--max-response-length", "8"]
    args = parse_flags(grpo.Args, flags)
    world = World(0, 2, torch.device("cuda", 0))
    for device, offloaded in (("cpu", "actor"), ("cuda", "ref")):  # these leave the threads as they are
        setup.use_cores(SimpleNamespace(cpu_offload=(offloaded,)), torch.device(device))
    setup.use_cores(args.shard, world.device)  # as ModelFactory does
    forward = ForwardConfig(1, args.rollout.sampling(), None, torch.bfloat16)
    actor = SimpleNamespace(world=world, module=None, forward=forward)
    inputs = SimpleNamespace(tokenizer=None, vision=None, multi_turn=None, train_data=None)
    run = SimpleNamespace(folder=tmp_path, step=0, recorder=SimpleNamespace(replays=False))
    setup.make_rollouts(args, actor, inputs, SimpleNamespace(sizes=None, reads_log_probs=False), run)
    assert set_threads == [8, 1, 8]
