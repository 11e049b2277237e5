"""What several test files need: ranks, tiny models, batches, runs of the scripts."""

import gc
import importlib.util
import json
import multiprocessing
import os
import random
import re
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import PreTrainedModel, Qwen2ForCausalLM

import lib.cli.flags
from lib import InputError
from lib.data.vision import media_hash
from lib.data_proto import DataProto
from lib.distributed import World

ROOT = Path(__file__).parent.parent
TOY_MODEL = str(ROOT / "data/toy/model")
TOY = ["--config", str(ROOT / "data/toy/preset.yaml")]  # for a model or files of a test's own
VOCAB = 104


def _on_rank(rank: int, fn: Callable, size: int, folder: str, args: tuple) -> None:
    gc.freeze()  # a rank that finds a process group among what it inherited as garbage waits for its threads
    gc.enable()
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # torch has no threads in a fork of a process that has had vLLM
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(fn(World(rank, size, torch.device("cpu")), *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(size: int, fn: Callable, *args) -> list:
    """The results of `fn(world, *args)` in `size` forked ranks of one gloo group; a rank's exception is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        gc.disable()  # until a rank has frozen what it inherits
        try:
            mp.start_processes(_on_rank, (fn, size, folder, args), nprocs=size, start_method="fork")
        finally:
            gc.enable()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def save_tiny(folder: Path, *, tied=True, seed=0, cls=Qwen2ForCausalLM, config=None, **more) -> str:
    """A random two-layer decoder, saved; its path. vLLM on a CPU wants heads of 32 at least."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes["num_hidden_layers"] = 2
    config = config or cls.config_class
    model = cls(config(vocab_size=VOCAB, tie_word_embeddings=tied, **sizes | more))
    for p in model.parameters():  # livelier than the default start, so that errors show
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


def float64_norms(model):
    """transformers' RMSNorm computes in float32, whose rounding (6e-8) would hide what rtol 1e-8 looks for."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def give_generation_config(folder: str) -> None:
    """The model's own way to sample, none of which may reach a rollout. vLLM's server takes from it what a request
    leaves out, transformers' generate all of it."""
    file = Path(folder, "generation_config.json")
    config = json.loads(file.read_text()) | {"do_sample": True, "temperature": 0.6, "top_k": 5, "top_p": 0.8}
    config |= {"min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    config |= {"suppress_tokens": [20, 21], "begin_suppress_tokens": [22], "forced_eos_token_id": 23}
    file.write_text(json.dumps(config | {"max_new_tokens": 5, "min_new_tokens": 4, "no_repeat_ngram_size": 1}))


def randomize_lora_b(model, seed: int = 0) -> None:
    """Adapters start at B = 0, where neither a merge nor the gradient of A shows."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            p.data = (0.1 * torch.randn(p.shape, generator=g)).to(p.dtype)


def rollout_batch(prompt_lengths, response_lengths, seed: int = 0) -> DataProto:
    """Random prompts (left-padded) and responses (right-padded) as an engine returns them."""
    g = torch.Generator().manual_seed(seed)
    B, P, T = len(prompt_lengths), max(prompt_lengths), max(response_lengths)
    ids = torch.randint(4, VOCAB, (B, P + T), generator=g)
    column = torch.arange(P + T)[None]
    first = P - torch.tensor(prompt_lengths)[:, None]
    end = P + torch.tensor(response_lengths)[:, None]
    mask = ((column >= first) & (column < end)).long()
    tensors = columns_of(ids * mask, mask, (column - first).clamp(min=0), P)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([str(i // 2) for i in range(B)], object)})


def columns_of(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, P: int) -> dict[str, torch.Tensor]:
    """(B, P + T) as an engine's columns."""
    tensors = {"prompts": ids[:, :P], "responses": ids[:, P:], "input_ids": ids, "attention_mask": mask}
    return tensors | {"position_ids": positions, "response_mask": mask[:, P:].clone()}


# ---- vision models -------------------------------------------------------------------------------

OF_CONFIGS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v"}
MROPE = (*OF_CONFIGS,)  # these take videos, too
OF_CONFIGS |= {"gemma3": "Gemma3", "smolvlm": "SmolVLM", "idefics3": "Idefics3", "llava": "Llava"}
VISION = (*OF_CONFIGS,)
IMAGE, VIDEO, BEGIN, END = 100, 101, 102, 103  # ids of the placeholders, and of what stands around them
GLM_BEGIN, GLM_END = 98, 99  # around a video of GLM-4V, whose placeholders are those of images


def tiny_vision_config(kind: str, tied: bool = False) -> transformers.PreTrainedConfig:
    """The last three have LLaMA as their decoder. Their images, and Gemma's, are of 4 tokens."""
    text: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
    more: dict[str, Any] = {"tie_word_embeddings": tied, "image_token_id": IMAGE}
    if kind in MROPE:
        tower |= {"num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "depth": 2}
        more |= {"video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    else:
        tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
        text |= {} if kind == "gemma3" else {"model_type": "llama"}
    match kind:
        case "qwen2_vl":
            tower = {name: tower[name] for name in ("num_heads", "patch_size", "spatial_merge_size", "depth")}
            tower |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        case "glm4v":
            tower |= {"image_size": 16}
            text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
            text["attention_bias"] = True  # what vLLM reads; transformers always has the biases
            more = {name: id_ for name, id_ in more.items() if not name.startswith("vision_")}
            more |= {"video_start_token_id": GLM_BEGIN, "video_end_token_id": GLM_END}
            more |= {"image_start_token_id": BEGIN, "image_end_token_id": END}
        case "qwen2_5_vl":
            tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
        case "qwen3_vl":
            tower |= {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
            text["rope_parameters"]["mrope_interleaved"] = True
        case "gemma3":
            text |= {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
            tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
            more |= {"mm_tokens_per_image": 4, "boi_token_index": BEGIN, "eoi_token_index": END}
        case "llava":
            tower |= {"model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32}
            more |= {"vision_feature_select_strategy": "default", "vision_feature_layer": -2, "image_seq_length": 4}
        case "smolvlm" | "idefics3":
            more |= {"scale_factor": 2, "pad_token_id": 0}
    return getattr(transformers, f"{OF_CONFIGS[kind]}Config")(text_config=text, vision_config=tower, **more)


def tiny_vision(kind: str, folder: Path | None = None, *, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    """A random model of one of VISION, fp32 and in train mode; saved to `folder`, if one is given."""
    torch.manual_seed(seed)
    config = tiny_vision_config(kind, tied)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    for p in model.parameters():  # livelier than the default start, so that errors show
        p.data.add_(0.1 * torch.randn_like(p))
    if folder is not None:
        model.save_pretrained(folder)
    return model.train()


def vision_inputs(kind: str, images: int, seed: int, videos: int = 0) -> tuple[dict, list[int], list[int]]:
    """(multi_modal_inputs, the tokens of each image, those of each piece of a video): noise, as a processor gives it.
    Those of MROPE have images of several sizes and videos of four frames."""
    g = torch.Generator().manual_seed(seed)
    if kind in MROPE:
        inputs, tokens = {}, {}
        for name, pixels, t, n in (("image", "pixel_values", 1, images), ("video", "pixel_values_videos", 2, videos)):
            grids = torch.tensor([[t, 4, 4 + 4 * (i % 2)] for i in range(n)]).view(n, 3)
            tokens[name] = grids.prod(1) // 4
            if n:
                inputs[pixels] = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=g)
                inputs[f"{name}_grid_thw"] = grids
        pieces = 2 if kind in ("qwen3_vl", "glm4v") else 1  # these have text (the time) at each pair of frames
        return inputs, tokens["image"].tolist(), (tokens["video"] // pieces).repeat_interleave(pieces).tolist()
    inputs = {"pixel_values": torch.randn(images, 3, 16, 16, generator=g)} if images else {}
    if images and kind in ("smolvlm", "idefics3"):
        inputs = {"pixel_values": inputs["pixel_values"][None]}
        inputs["pixel_attention_mask"] = torch.ones(1, images, 16, 16, dtype=torch.long)
    return inputs, [4] * images, []


class VisionRow(NamedTuple):
    images: int
    seed: int
    """rows of one seed have the same images"""
    copies: int = 1
    """responses to the prompt"""
    videos: int = 0


# one image for three responses, the same ids with another image for two, several images, none
VISION_ROWS = (VisionRow(1, 1, 3), VisionRow(1, 2, 2), VisionRow(2, 4), VisionRow(0, 0, 2))
VIDEO_ROWS = (VisionRow(0, 5, videos=1), VisionRow(1, 6, videos=2))  # for MROPE


@cache
def _without_layers(kind: str) -> PreTrainedModel:
    config = tiny_vision_config(kind)
    config.text_config.num_hidden_layers = config.vision_config.depth = 0
    config.text_config.layer_types = []
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def vision_types(kind: str, ids: list[int]) -> torch.Tensor:
    """(1, L): 0 for text, 1 for images, 2 for videos."""
    if kind == "glm4v":
        names = SimpleNamespace(image_token_id=IMAGE, video_start_id=GLM_BEGIN, video_end_id=GLM_END)
        return torch.tensor(transformers.Glm4vProcessor.create_mm_token_type_ids(names, [ids]), dtype=torch.int)
    return torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]], dtype=torch.int)


def vision_positions(kind: str, ids: list[int], inputs: dict) -> torch.Tensor:
    """(L,), or with MROPE (4, L), by the model's own get_rope_index."""
    text, types = torch.arange(len(ids)), vision_types(kind, ids)
    if kind not in MROPE:
        return text
    grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
    rope = _without_layers(kind).get_rope_index(torch.tensor([ids]), mm_token_type_ids=types, **grids)[0]  # (3, 1, L)
    return torch.cat([text[None], rope[:, 0]])


def vision_batch(kind: str, rows: tuple[VisionRow, ...] = VISION_ROWS) -> DataProto:
    """Rows as an engine returns them. The second response to a prompt has sampled the placeholder of an image."""
    g = torch.Generator().manual_seed(3)

    def text(n: int) -> list[int]:
        return torch.randint(4, 96, (n,), generator=g).tolist()

    before, after, prompts, responses = text(3), text(2), [], []
    for row in rows:
        inputs, of_images, of_videos = vision_inputs(kind, row.images, row.seed, row.videos)
        ids = list(before)
        for n in of_images:
            ids += [BEGIN, *[IMAGE] * n, END]
        marks = ([GLM_BEGIN], [GLM_END]) if of_videos and kind == "glm4v" else ([], [])
        pieces = [[BEGIN, *[IMAGE if any(marks) else VIDEO] * n, END] for n in of_videos]
        ids += sum(pieces, marks[0]) + marks[1]
        for copy in range(row.copies):
            prompts.append((ids + after, inputs))
            responses.append(text(2 + len(responses) % 4) + ([IMAGE, 7] if copy == 1 else []))
    P, T, B = max(len(ids) for ids, _ in prompts), max(map(len, responses)), len(prompts)
    ids, mask = torch.zeros(B, P + T, dtype=torch.long), torch.zeros(B, P + T, dtype=torch.long)
    positions = torch.zeros(B, 4 if kind in MROPE else 1, P + T, dtype=torch.long)
    for i, ((prompt, inputs), response) in enumerate(zip(prompts, responses)):
        a, b = P - len(prompt), P + len(response)
        ids[i, a:b], mask[i, a:b] = torch.tensor(prompt + response), 1
        own = vision_positions(kind, prompt, inputs).view(-1, len(prompt))
        positions[i, :, a:P], positions[i, :, P:] = own, own.amax(1, keepdim=True) + 1 + torch.arange(T)
    tensors = columns_of(ids, mask, positions if kind in MROPE else positions[:, 0], P)
    tensors["multi_modal_hash"] = torch.tensor([media_hash(inputs) for _, inputs in prompts])
    return DataProto.from_dict(tensors=tensors, non_tensors={"multi_modal_inputs": [inputs for _, inputs in prompts]})


# ---- runs of the scripts -------------------------------------------------------------------------

BIN = Path(sys.executable).parent
PYTHON = [sys.executable]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
ONE_NODE = ["env", "GPUS=2", str(ROOT / "tools/launch/one_node.sh")]
ACCELERATE = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
SMALL = [
    *("--prompts-per-step", "8", "--group-size", "4", "--lr", "3e-4", "--save-every", "0", "--no-export-model"),
    *("--val-every", "0", "--no-val-before-train"),
    *("--train-files", str(ROOT / "data/toy/val.jsonl")),  # 256 prompts, not 4096
]
SEVERAL_UPDATES = [  # of several micro-batches
    *("--num-mini-batches", "2", "--update-epochs", "2", "--micro-batch-tokens", "200", "--total-steps", "2"),
    *("--kl-coef", "0.01", "--entropy-coef", "0.001"),
]

Completed = TypeVar("Completed", bound=subprocess.CompletedProcess)
START_S = 900  # of a vLLM server, on a machine with other work

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.warm"])


def parse_flags(args_class: type, words: list[str]) -> Any:
    """lib's, with the sizes of the embedded task, whatever the model."""
    return lib.cli.flags.parse_flags(args_class, [*TOY, *words])


def command(script: str, folder: Path, *args: str, launcher: list[str] = PYTHON, preset: list[str] = TOY) -> list[str]:
    """With the sizes of the embedded task, whatever the model; without them if preset is []."""
    return [*launcher, str(ROOT / f"{script}.py"), *preset, "--output-dir", str(folder), *args]


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    env["PATH"] = f"{BIN}:{env['PATH']}"  # of tools/launch/
    return env | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "COLUMNS": "120"}


def launch(script: str, folder: Path, *args: str, launcher: list[str] = PYTHON) -> subprocess.CompletedProcess:
    """The script as a user starts it."""
    how = {"env": environment(), "capture_output": True, "text": True, "timeout": 400}
    return subprocess.run(command(script, folder, *args, launcher=launcher), **how)


def fork(script: str, folder: Path, *args: str, ranks: int = 1, preset: list[str] = TOY) -> subprocess.CompletedProcess:
    """The same script in processes of their own, one a rank, forked from one that has imported everything: the seconds
    of that are spent once for all tests. Several ranks have the variables that a launcher sets, but no launcher."""
    return _ended(command(script, folder, *args, launcher=[], preset=preset), ranks)


def fork_module(module: str, *args: str, ranks: int = 1) -> subprocess.CompletedProcess:
    """`python -m module` in the same way."""
    return _ended([module, *args], ranks)


def fork_each(*commands: list[str]) -> subprocess.CompletedProcess:
    """One rank for each of these commands (`command` with launcher=[])."""
    return _ended(commands, len(commands))


def _ended(arguments: Sequence, ranks: int) -> subprocess.CompletedProcess:
    with started(arguments, ranks) as processes:
        for process in processes:
            process.join(600)
    return processes.done


class Processes(list):
    """Of a started job. done: what it has left behind, once all have ended; done.modules: the names of what a rank had
    imported then, tests/warm.py with it."""

    done: subprocess.CompletedProcess


@contextmanager
def started(arguments: Sequence, ranks: int = 1) -> Iterator[Processes]:
    """What `fork` waits for; the processes that still run at the end are killed. arguments: of all ranks, or a list of
    each."""
    of_rank = [arguments] * ranks if isinstance(arguments[0], str) else arguments
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryDirectory() as captured:
        names, processes = ("stdout", "stderr", "modules"), Processes()
        outputs = [[Path(captured, f"{name}{rank}") for name in names] for rank in range(ranks)]
        for rank in range(ranks):
            launched = {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            env = environment() | ({} if ranks == 1 else launched)  # the fork server has the one of its own start
            processes.append(FORKSERVER.Process(target=run_as_main, args=(of_rank[rank], outputs[rank], env)))
            processes[-1].start()
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()
        code = next((process.exitcode for process in processes if process.exitcode), 0)
        texts = ([path.read_text() for path in paths if path.exists()] for paths in zip(*outputs))
        stdout, stderr, modules = map("".join, texts)
        processes.done = subprocess.CompletedProcess(arguments, code, stdout, stderr)
        processes.done.modules = {*modules.split()}


def run_as_main(arguments: list[str], outputs: list[Path], env: dict[str, str]) -> None:
    """In a process of its own: arguments are a script's path or a module's name, and what follows."""
    gc.freeze()  # a collection need not look through what the server has imported
    gc.unfreeze = lambda: None  # nor when vLLM has ended
    for stream, path in zip((sys.stdout, sys.stderr), outputs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    random.seed()  # as in a process of its own: the server's state is the same in each fork
    np.random.seed()
    run = runpy.run_path if arguments[0].endswith(".py") else partial(runpy.run_module, alter_sys=True)
    try:
        run(arguments[0], run_name="__main__")
    finally:
        outputs[2].write_text("".join(f"{name}\n" for name in [*sys.modules]))


def killed_with_its_children(target, *args) -> list[psutil.Process]:
    """Those that target(*args, pids) has sent to `pids`: they end with its process, which is killed then."""
    here, there = FORKSERVER.Pipe()
    run = FORKSERVER.Process(target=target, args=(*args, there))
    run.start()
    assert here.poll(300)
    processes = [psutil.Process(pid) for pid in here.recv()]
    run.kill()
    run.join()
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert not alive
    return processes


@contextmanager
def full_disk(most_bytes: int = 100):
    """A limit on the size of a file looks like one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def imported(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(name: str) -> str:
    """The file of that name in docs/environments.md."""
    page = (ROOT / "docs/environments.md").read_text()
    return re.search(rf"^```python\n# {name}\n(.*?)^```", page, re.M | re.S)[1]


class Handler(BaseHTTPRequestHandler):
    """For `http_server`: of JSON, and quiet."""

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")

    def reply(self, answer: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_): ...


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its URL, without a path, on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def one_line(match: str = "") -> Iterator[None]:
    """The block raises an InputError of one line that matches."""
    with pytest.raises(InputError) as error:
        yield
    said = str(error.value)
    assert re.search(match, said) and "\n" not in said, said


def wait_until(done: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, done
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ran(done: Completed) -> Completed:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done


def metrics(run: Path, timings: bool = False) -> list[dict]:
    """The lines of metrics.jsonl, less what a clock says."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if timings or not k.startswith(("timing_", "perf/"))} for row in rows]


def rollouts(run: Path) -> dict[tuple, dict]:
    """The training samples that the run kept: {(step, group, sample): the file's other columns}."""
    rows = [row for file in (run / "rollouts").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    return {tuple(row.pop(key) for key in ("step", "group", "sample")): row for row in rows}


def unexplained_metrics(run: Path, *docs: str) -> list[str]:
    """Metrics of the run that no table of these documents has."""
    lines = [line for doc in docs for line in (ROOT / "docs" / doc).read_text().splitlines()]
    names = [name for line in lines if line.startswith("| `") for name in re.findall(r"`(.+?)`", line.split("|")[1])]
    patterns = [re.sub(r"@[nk]", r"@\\d+", re.sub(r"<\w+>", "[a-z/_.]+", name)) for name in names]
    logged = {key for row in metrics(run, timings=True) for key in row} - {"step"}
    return [key for key in sorted(logged) if not any(re.fullmatch(pattern, key) for pattern in patterns)]


def checkpoint_state(checkpoint: Path) -> dict:
    """{name: {"model": {parameter: whole tensor}, "optim": ...}} of the models in a checkpoint."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(checkpoint, file.name)
        return torch.load(file.name, weights_only=True)


def with_slow(cases: Iterable, *slow) -> list:
    """Values of parametrize (tuples, of several names), of which `slow` are run by make test-slow only."""
    each = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*values, marks=pytest.mark.slow) if case in slow else case for case, values in each]


# ---- vLLM ----------------------------------------------------------------------------------------
def skip_without_vllm() -> None:
    """pytest.importorskip would spend the seconds of the import."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# its engine's process is a fork, as on a GPU; vLLM on a CPU would start one that imports everything again
SERVER = """
import multiprocessing, runpy
from vllm.v1.engine import utils
utils.get_mp_context = lambda: multiprocessing.get_context("fork")
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""


@contextmanager
def serve(model: str, max_length: int, *more: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """(URL, process) of a vLLM server on the CPU, of the model in a folder, fp32, as docs/rollout_engines.md says, but
    with the model's generation config. more: further flags."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, "--model", model, "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--seed", "0"]
    command += ["--max-model-len", str(max_length), "--kv-cache-memory-bytes", str(1 << 28)]
    command += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", "servers.worker.WorkerExtension"]
    command += ["--weight-transfer-config", json.dumps({"backend": "broadcast"})]
    command += ["--middleware", "servers.batches.Batches", *more]
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # one process less
    env |= {"TORCH_COMPILE_DISABLE": "1"}  # a C++ compilation of many seconds at the first request
    url, log = f"http://127.0.0.1:{port}", Path(model, "server.log")
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.3)
        with pytest.MonkeyPatch.context() as patch:  # engines of the tests share it with runs
            patch.setattr("servers.engine.LEASE_S", 0.0)
            yield url, process
    finally:
        process.terminate()  # it ends its engine's process too, which a kill leaves behind
        process.wait(START_S)


def key_header() -> dict[str, str]:
    """For servers that `serve` has started with a key in the environment."""
    return {"Authorization": f"Bearer {os.environ.get('VLLM_API_KEY')}"}


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", headers=key_header()).is_success
    except httpx.TransportError:
        return False
