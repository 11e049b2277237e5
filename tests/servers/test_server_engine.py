"""ServerEngine against a real vLLM server on the CPU, started once."""

import asyncio
import itertools
import re
import shutil
import socket
import time
from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import ClassVar

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent import MultiTurn, ToolCall, make_episodes
from agent.http.program import Agent, call_function
from lib import InputError
from lib.args import MultiTurnArgs
from lib.data_proto import DataProto
from lib.distributed import World, make_mesh, shard_model
from lib.model import load_model, load_tokenizer, response_log_probs
from lib.rollout import Generated, Sampling, WeightSyncError, make_engine, request_seeds, sync_weights
from servers import engine as server_engine
from servers import weights as server_weights
from servers.client import PATH, Servers
from servers.engine import ServerEngine
from tests.agent.random_agents import Client, trained_of
from tests.agent.test_agent_loop import Add, User, prompts_of, recorded, tokenizer, user_of
from tests.common import (
    SMALL,
    START_S,
    TOY_MODEL,
    Handler,
    fork,
    give_generation_config,
    http_server,
    key_header,
    metrics,
    one_line,
    ran,
    rollouts,
    save_tiny,
    serve,
    skip_without_vllm,
    wait_until,
)
from tests.rollout.test_rollout import SAMPLINGS, TOLERANCE, check_responses, perturb, random_prompts, text_log_probs

pytestmark = pytest.mark.in_order  # runs take the server from one another
MAX_LENGTH = 400
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, folder that it serves, process). The server takes what a request leaves out from the model's generation
    config: no log-prob of a sample would be right."""
    skip_without_vllm()
    folder = tmp_path_factory.mktemp("served")
    path = save_tiny(folder / "model")
    give_generation_config(path)
    load_tokenizer(TOY_MODEL).save_pretrained(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "the server's key")
        with serve(path, MAX_LENGTH) as (url, process):
            yield url, path, process


def build(url, path, folder):
    model = shard_model(load_model(path), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    how = {"folder": folder, "max_length": MAX_LENGTH, "dtype": torch.float32, "gpu_memory": 0.3}
    return make_engine(url, model, load_tokenizer(TOY_MODEL), **how), model


@pytest.fixture(scope="module")
def engine_and_model(world, server, tmp_path_factory):
    url, path, _ = server
    engine, model = build(url, path, tmp_path_factory.mktemp("engine"))
    torch.manual_seed(0)
    perturb(model, 0.1)  # not what the server read at its start
    sync_weights(engine, model, 0, tolerance=TOLERANCE)
    yield engine, model
    engine.close()


@pytest.fixture
def engine(engine_and_model):
    return engine_and_model[0]


def server_metrics(engine, name: str) -> float:
    """The sum of those of this name."""
    text = httpx.get(f"{engine.servers.urls[0]}/metrics", headers=key_header()).text
    found = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    assert found, name
    return sum(found)


def generated_tokens(engine) -> float:
    return server_metrics(engine, "generation_tokens_total")


def await_tokens(engine, more_than: float) -> None:
    wait_until(lambda: generated_tokens(engine) > more_than, START_S)


def await_idle(engine) -> None:
    wait_until(lambda: server_metrics(engine, "num_requests_running") == 0, 120)


def off_policy(model, out) -> float:
    log_probs, _ = response_log_probs(model, out, 1.0)
    return float((log_probs.detach() - out.batch["rollout_log_probs"]).abs().max())


@pytest.fixture
def asynchronous(server):
    def flags(level: int, *more: str, url: str = server[0]) -> list[str]:
        moving = ["--entropy-coef", "0.1"]  # whatever the rewards are
        run = [*SMALL, *moving, "--model", server[1], "--rollout-engine", url, "--run-name", "run"]
        return [*run, "--async-level", str(level), "--save-rollouts", "all", *more]

    return flags


def groups_of(run: Path) -> dict[int, list[str]]:
    """Those that each step trained on, of all ranks."""
    steps: dict[int, set[str]] = defaultdict(set)
    for step, group, _ in rollouts(run):
        steps[step].add(group)
    return {step: sorted(groups) for step, groups in sorted(steps.items())}


def test_grpo_with_async_rollouts_and_a_resume(asynchronous, tmp_path):
    """Before this process joins the server. What was on its way at a checkpoint goes on with its tokens."""
    args = asynchronous(2, "--save-every", "2", "--keep-checkpoints", "0")
    ran(fork("grpo", tmp_path, *args, "--total-steps", "6"))
    found, whole = metrics(tmp_path / "run"), groups_of(tmp_path / "run")
    assert [row["training/epoch"] * 256 for row in found] == [8, 16, 24, 32, 40, 48]
    assert [row["async/staleness_max"] for row in found] == [0, 1, 2, 2, 2, 2]
    assert all(0 < row["async/staleness_mean"] <= row["async/staleness_max"] for row in found[1:])
    assert all(0.9 < row["rollout/is_weight"] < 1.1 for row in found)  # corrected by default
    assert whole == {step: [f"{step}-{n}" for n in range(8)] for step in range(1, 7)}

    # as after a kill behind step 2: the groups of steps 3 and 4 go on
    saved = tmp_path / "run/checkpoints/step_000002"
    args = [*args, "--resume", str(saved), "--resume-override", "record"]
    ran(fork("grpo", tmp_path / "again", *args, "--total-steps", "6", "--record", str(tmp_path / "kept")))
    assert groups_of(tmp_path / "again/run") == {step: whole[step] for step in (3, 4, 5, 6)}
    kept = DataProto.load_from_disk(saved / "batch_loader.in_flight.safetensors").non_tensor_batch
    assert len(kept["uid"]) == 2 * 8 * 4
    rows = zip(kept["uid"], kept["seed"], kept["partial"])
    before = {(uid, seed): row for uid, seed, row in rows if row["token_ids"]}
    assert before  # of some there were tokens
    rest = rollouts(tmp_path / "again/run").items()
    rows = [(group, row["response_ids"], row["weight_versions"]) for (step, group, _), row in rest if step in (3, 4)]
    for (uid, _), row in before.items():
        n = len(row["token_ids"])
        assert max(row["weight_versions"]) <= 1
        assert (uid, row["token_ids"], row["weight_versions"]) in [(uid, ids[:n], v[:n]) for uid, ids, v in rows]
    assert all(row["async/staleness_max"] <= 2 for row in metrics(tmp_path / "again/run"))

    # a replay needs no server, and runs nothing ahead
    args = asynchronous(2, "--total-steps", "6", "--replay", str(tmp_path / "kept"), url="http://127.0.0.1:1")
    args += ["--resume", str(saved), "--resume-override", "replay"]
    ran(fork("grpo", tmp_path / "replay", *args))
    assert metrics(tmp_path / "replay/run") == metrics(tmp_path / "again/run")


def test_dapo_runs_asynchronously_and_resumes(asynchronous, tmp_path):
    """Each batch of prompts once, in order; leftovers wait one step."""
    args = asynchronous(1, "--save-every", "2", "--keep-checkpoints", "0")
    args += ["--max-gen-batches", "3", "--total-steps", "4"]
    ran(fork("dapo", tmp_path, *args))
    found, saved = metrics(tmp_path / "run"), tmp_path / "run/checkpoints/step_000002"
    batches = [row["training/gen_batches"] for row in found]
    assert max(batches) > 1 and all(row["async/staleness_max"] <= 2 for row in found)
    assert [row["training/epoch"] * 32 for row in found] == np.cumsum(batches).tolist()
    ran(fork("dapo", tmp_path / "again", *args, "--resume", str(saved)))
    again = metrics(tmp_path / "again/run")
    assert again[0]["training/epoch"] * 32 == sum(batches[:2]) + again[0]["training/gen_batches"]
    whole, rest = groups_of(tmp_path / "run"), groups_of(tmp_path / "again/run")
    for steps in (whole, {step: whole[step] for step in (1, 2)} | rest):
        trained = [group for groups in steps.values() for group in groups]
        assert len(trained) == 4 * 8 == len(set(trained))


def test_what_finishes_first_is_trained_first(asynchronous, tmp_path):
    ran(fork("grpo", tmp_path, *asynchronous(2, "--async-order", "finished", "--total-steps", "4")))
    each_once = sorted(f"{step}-{n}" for step in range(1, 5) for n in range(8))
    assert sorted(group for groups in groups_of(tmp_path / "run").values() for group in groups) == each_once
    assert all(row["async/staleness_max"] <= 2 for row in metrics(tmp_path / "run"))


TALK = """
import asyncio

from agent import BaseInteraction, BaseTool


class Client(BaseTool):
    loop = None

    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "client", "description": "", "parameters": {}}}

    async def create(self, instance_id):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()


class TalksOn(BaseInteraction):
    async def respond(self, messages):
        return False, "more", 0.1, {}
"""


def test_grpo_with_async_episodes_and_a_resume(asynchronous, tmp_path):
    """On two ranks, and then on one. A tool's client belongs to one event loop: also while validation shares the server
    with the next rollout."""
    (tmp_path / "talk.py").write_text(TALK)
    with open(SMALL[SMALL.index("--train-files") + 1]) as rows:
        (tmp_path / "val.jsonl").write_text("".join(next(rows) for _ in range(8)))
    args = asynchronous(1, "--max-response-length", "100", "--save-every", "2")
    args += ["--multi-turn.tools", f"{tmp_path / 'talk.py'}:Client", "calculator", "--multi-turn.parser", "hermes"]
    args += ["--multi-turn.interaction", f"{tmp_path / 'talk.py'}:TalksOn", "--multi-turn.max-turns", "3"]
    args += ["--multi-turn.max-turn-tokens", "12", "--val-every", "2", "--val-files", str(tmp_path / "val.jsonl")]
    args += ["--adv-estimator", "gigpo"]
    ran(fork("grpo", tmp_path, *args, "--total-steps", "3", ranks=2))
    check_async_episodes(tmp_path / "run", [0, 1, 1])
    shutil.rmtree(tmp_path / "run/checkpoints/step_000003")
    ran(fork("grpo", tmp_path, *args, "--total-steps", "4", "--resume", "auto"))
    check_async_episodes(tmp_path / "run", [0, 1, 0, 1])  # at 3 all begin anew


SOLVE = """
import json, urllib.request


def solve(base_url, api_key, row):
    def post(path, **body):
        headers = {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    tools = [{"type": "function", "function": {"name": "f"}}]
    said = post("chat/completions", messages=row["prompt"], tools=tools, tool_choice="required", max_tokens=9)
    answer = said["choices"][0]["message"]
    history = [*row["prompt"], answer, {"role": "user", "content": "go on"}]
    post("chat/completions", messages=history, tools=tools, stop=["1", "2"], max_tokens=9, temperature=0)
    text = "1+1="
    for _ in range(2):
        text += post("completions", prompt=text, max_tokens=9)["choices"][0]["text"]
    return {"reward": len(text) / 100, "rewards": {said["id"]: 0.5}}
"""


def test_grpo_with_async_agents(asynchronous, tmp_path):
    """Whose calls are forced, whose prompts are raw, and whose answers end at stop strings."""
    (tmp_path / "solve.py").write_text(SOLVE)
    args = asynchronous(1, "--max-response-length", "300", "--reward")
    args += ["--agent", f"{tmp_path / 'solve.py'}:solve", "--agent-kwargs", "ignore=temperature", "--stop", "3"]
    args += ["--multi-turn.parser", "hermes", "--adv-estimator", "mt_grpo"]
    ran(fork("grpo", tmp_path, *args, "--total-steps", "3"))
    found = metrics(tmp_path / "run")
    assert all(row["async/staleness_max"] <= bound for row, bound in zip(found, [0, 1, 1], strict=True))
    assert sum(row["async/staleness_mean"] for row in found) > 0  # some of it was ahead
    for row in found:
        assert row["agent/turns_mean"] == row["agent/requests_mean"] == 4 and row["agent/ignored_mean"] == 1
        assert not row["agent/lost_prefixes_mean"] and not row["agent/failed"] and row["agent/tokens_reused_mean"] > 0
        assert 0.9 < row["rollout/is_weight"] < 1.1 and row["training/rows_trained"] == 32
    for row in rollouts(tmp_path / "run").values():
        assert [version >= 0 for version in row["weight_versions"]] == [*map(bool, row["response_mask"])]


def check_async_episodes(run, staleness):
    found = [row for row in metrics(run) if "agent/turns_mean" in row]
    assert [row["step"] for row in found] == list(range(1, len(staleness) + 1))
    assert all(row["async/staleness_max"] <= bound for row, bound in zip(found, staleness))
    assert sum(row["async/staleness_mean"] for row in found) > 0  # some of it was ahead
    assert all(row["agent/turns_mean"] > 2 and row["agent/finish/max_turns"] > 0 for row in found)
    assert not any(row["agent/failed"] or row["agent/tool_errors/exception"] for row in found)
    assert all(0.9 < row["rollout/is_weight"] < 1.1 for row in found)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_responses_of_a_server_are_what_the_loss_needs(engine_and_model, sampling):
    check_responses(*engine_and_model, sampling, 1e-4)


def test_requests_of_one_moment_travel_together(engine, monkeypatch):
    sizes, response = [], engine.servers._response

    def counted(*args, json):
        sizes.append(len(json["begin"]))
        return response(*args, json=json)

    monkeypatch.setattr(engine.servers, "_response", counted)
    monkeypatch.setattr(engine, "stop_ids", [])
    found = at_once(engine, *({"max_tokens": length, "ignore_eos": True} for length in range(1, 21)))
    assert [len(row.token_ids) for row in found] == [*range(1, 21)] and sizes == [20]


def at_once(engine, *settings: dict) -> list[Generated | BaseException]:
    async def ask():
        url, own = engine.servers.urls[0], {"logprobs": 0}
        requests = (engine._request(url, [5, 6], own | more, None) for more in settings)
        return await asyncio.gather(*requests, return_exceptions=True)

    return engine.servers.begin(ask()).result()


def test_single_requests_are_answered_as_those_in_batches(engine, monkeypatch):
    """A server without the route takes them one by one."""
    assert engine.batches
    prompts, seeds = random_prompts(12), request_seeds(2, 4, list(range(12)))
    ways = [engine.generate(prompts, SAMPLINGS[1], seeds)]
    monkeypatch.setattr(engine, "batches", False)
    ways.append(engine.generate(prompts, SAMPLINGS[1], seeds))
    for name in ("responses", "rollout_log_probs", "weight_versions", "response_mask"):
        assert torch.equal(*(out.batch[name] for out in ways))


def test_a_request_that_is_refused_leaves_the_others_of_its_batch(engine):
    refused, fine = at_once(engine, *({"max_tokens": 3, "top_p": top_p} for top_p in (5.0, 1.0)))
    why = rf"--rollout-engine {engine.servers.urls[0]}: .*top_p.* 5"
    assert isinstance(refused, InputError) and re.match(why, str(refused))
    assert fine.finish_reason in ("stop", "length") and len(fine.token_ids) == len(fine.log_probs) > 0


def hanging_calls(**limits) -> MultiTurn:
    """Every turn calls a tool that hangs."""
    parse, limits = lambda text: [ToolCall("add", {"a": 1, "b": 2})], MultiTurnArgs(max_turn_tokens=6, **limits)
    return MultiTurn(tokenizer(), {"add": Add(delay=1000.0)}, parse, limits=limits)


def test_equal_prompts_share_a_server():
    engine = ServerEngine.__new__(ServerEngine)
    engine._turns = count()
    assert engine.turns([[1], [1], [2], [2], [1]]) == [0, 0, 1, 1, 2]


def test_what_a_rollout_waits_for_is_said(engine, monkeypatch, capsys):
    monkeypatch.setattr(server_engine, "REPORT_S", 0.1)
    monkeypatch.setattr(server_engine, "ROUND_S", 0.05)
    how = hanging_calls(max_turns=2, tool_timeout=0.5)
    make_episodes(engine, how).generate(prompts_of(how, 3), Sampling(300), [1, 2, 3])
    assert "responses: 3 tool_calling\n" in capsys.readouterr().out


def test_a_request_that_a_server_refuses_ends_the_run_and_a_failed_episode_does_not(engine, monkeypatch):
    how = MultiTurn(tokenizer(), interaction=User, limits=MultiTurnArgs(max_turns=3, max_turn_tokens=6))
    prompts = prompts_of(how, 4, interaction_kwargs=[{"fail_at": at} for at in (None, 1, 2, None)])
    episodes, sample = make_episodes(engine, how), engine.sample
    out = episodes.generate(prompts, Sampling(200), [*range(4)])
    assert [reason == "error" for reason in out.non_tensor_batch["finish_reason"]] == [False, True, True, False]
    assert out.batch["response_mask"].any(1).tolist() == [True, False, False, True]

    async def refused(prompt_ids, sampling, seed, turn):
        if seed == 1:
            raise InputError("the server refuses it")
        return await sample(prompt_ids, sampling, seed, turn)

    monkeypatch.setattr(engine, "sample", refused)
    with pytest.raises(InputError, match=r"^the server refuses it$"):
        episodes.generate(prompts, Sampling(200), [*range(4)])


def test_a_server_serves_one_run(engine_and_model, server, tmp_path, monkeypatch):
    """Another run is refused before it disturbs the first. A run that is resumed, or has ended, has no lease."""
    (engine, model), (url, path, _) = engine_and_model, server
    monkeypatch.setattr("servers.engine.LEASE_S", 600.0)
    other = {"run": "runs/other", "host": "another", "pid": 1}

    def lend(holder: dict, seconds: float = 600.0) -> None:
        engine.servers.on_workers(url, "take_lease", ours=holder, seconds=seconds, over=engine._lease).result()

    lend(other)
    message = f"--rollout-engine {url}: the run runs/other .pid 1 on another. uses this server: end that run"
    with pytest.raises(InputError, match=message):
        build(url, path, tmp_path)
    with pytest.raises(InputError, match=message):  # the first run, if its lease has ended in a long step
        engine.load_weights(model, 1)
    lend(other, 0.0)
    for holder in (other | {"run": str(tmp_path)}, other | {"host": socket.gethostname(), "pid": 2**22 + 1}):
        lend(holder)
        mine, _ = build(url, path, tmp_path / "engine")
        mine.close()  # gives it back
    lend(other, 0.0)
    sync_weights(engine, model, engine.version + 1, tolerance=TOLERANCE)
    engine._take_lease(0.0)


@pytest.mark.parametrize("batches", [True, False])
def test_no_request_outlives_its_response(engine, monkeypatch, batches):
    """A response that nobody waits for any more leaves the server; others of its batch stay."""
    monkeypatch.setattr(engine, "batches", batches)
    monkeypatch.setattr(engine, "stop_ids", [])
    before = generated_tokens(engine)
    one, *left = engine.start(random_prompts(4), Sampling(350, top_k=1), list(range(4)))
    await_tokens(engine, before)
    for response in left:
        response.future.cancel()
    assert len(one.future.result().token_ids) == 350
    assert generated_tokens(engine) < before + 2 * 350
    await_idle(engine)


def test_nothing_outlives_its_engine(engine, server, tmp_path):
    """Neither a request nor what the tools of an episode hold."""
    url, path, _ = server
    other, _ = build(url, path, tmp_path / "engine")
    other.version, other.stop_ids, how = 0, [], hanging_calls()
    episodes = make_episodes(other, how).start(prompts_of(how, 3), Sampling(200), [1, 2, 3])
    wait_until(lambda: {episode.request.state.value for episode in episodes} == {"tool_calling"}, START_S)
    before = generated_tokens(engine)
    other.start(random_prompts(4), Sampling(350, top_k=1), list(range(4)))
    await_tokens(engine, before)
    other.close()
    await_idle(engine)
    assert generated_tokens(engine) < before + 4 * 350
    assert [kind for kind, *_ in how.tools["add"].log].count("release") == 3


def test_a_prompt_that_is_too_long_never_gets_to_the_server(engine):
    with pytest.raises(ValueError, match="400 tokens"):
        engine.begin(engine.sample([5] * MAX_LENGTH, Sampling(8), 1, 0)).result()


@pytest.mark.parametrize("way, bucket", [("broadcast", 1 << 28), ("broadcast", 9000), ("reload_from", 0)])
def test_after_an_update_the_server_samples_from_the_new_weights(engine_and_model, monkeypatch, way, bucket):
    """Also behind a prompt of more than one block of the prefix cache (128 on a CPU), which must not survive. A bucket
    of 9000 bytes holds several of the smaller tensors; the embedding and others exceed it."""
    engine, model = engine_and_model
    monkeypatch.setattr(engine.weights, "way", way)
    monkeypatch.setattr(server_weights, "BUCKET_BYTES", bucket)
    sent, real = [], engine.servers.order
    monkeypatch.setattr(engine.servers, "order", lambda path, **kw: sent.append(path) or real(path, **kw))
    long, version = np.random.default_rng(0).integers(9, 104, size=200).tolist(), engine.version + 1

    def sampled() -> list[int]:
        got = engine.begin(engine.sample(long, Sampling(8), 1, 0)).result()
        log_probs = text_log_probs(model, torch.tensor([*long, *got.token_ids]))[-len(got.token_ids) :]
        assert got.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
        return got.token_ids

    before = sampled()
    perturb(model, 0.1)
    metrics = sync_weights(engine, model, version, tolerance=TOLERANCE)
    assert metrics["rollout/canary_logp_diff"] < 1e-4 and sampled() != before
    out = engine.generate(random_prompts(8), Sampling(8), request_seeds(1, version, list(range(8))))
    assert off_policy(model, out) < 1e-4
    buckets = sent.count("/update_weights")
    assert buckets == (way == "broadcast") if bucket != 9000 else buckets > 5
    assert not list(engine.weights.folder.iterdir())  # no copy stays
    monkeypatch.setattr(engine, "load_weights", None)  # no second load; the metrics are those of the first
    assert sync_weights(engine, model, version, tolerance=TOLERANCE) == metrics


def test_a_server_without_the_extension_gets_a_file(engine_and_model, monkeypatch):
    """As vLLM is, a CPU server with a tied head is refused: its reload leaves the head's packed copy as it was."""
    engine, model = engine_and_model
    order = engine.servers.on_workers

    def without(url, method, **kwargs):
        return order(url, "no_such_method" if method == "weight_transfer_backend" else method, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine.servers, "on_workers", without)
        assert engine.weights._find_way() == "reload_weights"
        patch.setattr(engine.weights, "way", "reload_weights")
        perturb(model)
        with pytest.raises(WeightSyncError, match="does not compute with them"):
            sync_weights(engine, model, engine.version + 1, tolerance=TOLERANCE)
    assert engine.weights._find_way() == "broadcast"
    sync_weights(engine, model, engine.version + 2, tolerance=TOLERANCE)


@pytest.mark.parametrize("batches", [True, False])
def test_a_sync_in_the_midst_of_a_rollout(engine_and_model, monkeypatch, batches):
    """Also a request of the moment before it is of the old weights at first."""
    engine, model = engine_and_model
    monkeypatch.setattr(engine, "batches", batches)
    settings = server_engine.vllm_settings
    monkeypatch.setattr(server_engine, "vllm_settings", lambda *args: settings(*args) | {"ignore_eos": True})
    monkeypatch.setattr(engine, "stop_ids", [])  # so that the sync does not find them ended
    n, T, old_version, before, on_loop = 24, 360, engine.version, generated_tokens(engine), engine._on_loop
    prompts, sampling, seeds = random_prompts(n), Sampling(T), request_seeds(1, 9, list(range(n)))
    old_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = engine.start(prompts[:-1], sampling, seeds[:-1])
    await_tokens(engine, before + 10 * n)

    def on_loop_later(act):
        if len(rows) < n:
            rows.extend(engine.start(prompts[-1:], sampling, seeds[-1:]))
            wait_until(lambda: len(engine._posted) == n)
        return on_loop(act)

    monkeypatch.setattr(engine, "_on_loop", on_loop_later)
    perturb(model, 0.1)
    sync_weights(engine, model, old_version + 1, tolerance=TOLERANCE)
    out = engine.collect(prompts, sampling, rows)

    check_versions(model, out, old_weights, old_version)
    mask = out.batch["response_mask"].bool()
    assert set(out.non_tensor_batch["finish_reason"]) == {"length"} and (mask.sum(1) == T).all()
    sync_weights(engine, model, old_version + 2, tolerance=TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_string_ends_a_response_wherever_a_sync_cuts_it(seed):
    """A server that goes on looks for stop strings in its own tokens only, as this one does."""
    random, own = Random(seed), load_tokenizer(TOY_MODEL)
    whole = [random.choice(own("ab abc")["input_ids"]) for _ in range(60)]
    stop, cuts = ("cab", "b a"), sorted(random.sample(range(1, 60), 8))
    engine = ServerEngine.__new__(ServerEngine)
    engine.own, engine.servers, engine.tokenizer, engine._lost = None, SimpleNamespace(urls=["a"]), own, set()
    engine.max_length, engine.version, engine._posted, engine._open = 99, 0, set(), asyncio.Event()

    def first_end(ids):
        ends = (end for end in range(1, len(ids) + 1) if any(text in own.decode(ids[:end]) for text in stop))
        return next(ends, None)

    async def serve_until_cut(url, ids, settings, pictures):
        done = len(ids) - 1
        cut = next((cut for cut in cuts if cut > done), 60)
        end = first_end(whole[done:cut])
        ids = whole[done:cut][:end]
        reason = "stop" if end else "abort" if cut < 60 else "length"
        if reason == "abort":  # new weights come
            engine._open.clear()
            engine.version += 1
            syncs.append(asyncio.create_task(weights_come()))
        return Generated(ids, [float(-token) for token in ids], reason)

    async def weights_come():
        await engine._drain()
        engine._open.set()

    async def sample():
        engine._open.set()
        return await engine.sample([0], Sampling(60, stop=stop), 1, 0)

    engine._request, syncs = serve_until_cut, []
    row, end = asyncio.run(sample()), first_end(whole)
    assert row.token_ids == whole[:end] and row.finish_reason == ("stop" if end else "length")
    assert row.log_probs == [float(-token) for token in row.token_ids]
    assert row.weight_versions == sorted(row.weight_versions) and len(row.weight_versions) == len(row.token_ids)


def episodes_across_a_sync(engine, model, how, monkeypatch):
    """(episodes, their futures) of 12 rows that get new weights in the second of four turns."""
    settings = server_engine.vllm_settings
    monkeypatch.setattr(server_engine, "vllm_settings", lambda *args: settings(*args) | {"ignore_eos": True})
    n, old_version, before = 12, engine.version, generated_tokens(engine)
    prompts, sampling, episodes = prompts_of(how, n), Sampling(340), make_episodes(engine, how)
    old_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(engine, "stop_ids", [])  # a turn ends at its limit
        responses = episodes.start(prompts, sampling, request_seeds(1, 9, list(range(n))))
        await_tokens(engine, before + 100 * n)  # in the second turn
        perturb(model, 0.1)
        sync_weights(engine, model, old_version + 1, tolerance=TOLERANCE)
        out = episodes.collect(prompts, sampling, responses)
    check_versions(model, out, old_weights, old_version)
    assert out.non_tensor_batch["num_turns"].tolist() == [4] * n
    return out, responses


def test_a_sync_in_the_midst_of_episodes(engine_and_model, monkeypatch):
    engine, model = engine_and_model
    how = MultiTurn(tokenizer(), interaction=user_of(9), limits=MultiTurnArgs(max_turns=4, max_turn_tokens=70))
    out, responses = episodes_across_a_sync(engine, model, how, monkeypatch)
    for row, response in enumerate(responses):
        assert response.future.result() is response.request and response.row.token_ids == []
        assert len(trained_of(out, row)) == 4  # one per turn: a sync leaves no seam
    sync_weights(engine, model, engine.version + 1, tolerance=TOLERANCE)


def test_a_sync_in_the_midst_of_agents(engine_and_model, monkeypatch):
    engine, model = engine_and_model

    async def agent(url, key, row):
        messages = row["prompt"]
        async with Client(url, key) as client:
            for _ in range(4):
                [said] = await client.chat(messages, max_tokens=70)
                messages = [*messages, said, {"role": "user", "content": "go on"}]

    how = MultiTurn(tokenizer(), agent=Agent(partial(call_function, agent), 300.0, "hermes", Sampling(1)))
    with recorded(engine) as got:
        out, _ = episodes_across_a_sync(engine, model, how, monkeypatch)
    sampled = [(context, ids) for turns in got.values() for context, ids, _ in turns]
    assert sorted(pair for row in range(len(out)) for pair in trained_of(out, row)) == sorted(sampled)
    sync_weights(engine, model, engine.version + 1, tolerance=TOLERANCE)

    async def refused(*_):
        raise InputError("the server refuses it")

    monkeypatch.setattr(engine, "sample", refused)
    with pytest.raises(InputError, match=r"^the server refuses it$"):  # not an agent's failure
        make_episodes(engine, how).generate(prompts_of(how, 12), Sampling(340), [*range(12)])


def check_versions(model, out, old_weights, old_version):
    """Each token's log-prob is that of the weights of its version, and of no other. Loads the old weights."""
    versions, mask = out.batch["weight_versions"], out.batch["response_mask"].bool()
    assert torch.equal(versions >= 0, mask) and set(versions[mask].tolist()) == {old_version, old_version + 1}
    both = ((versions == old_version).any(1) & (versions == old_version + 1).any(1)).sum()
    rows = [row[row >= 0] for row in versions]
    assert both > 0 and all((row.diff() >= 0).all() for row in rows)
    differences = {}
    for version in (old_version + 1, old_version):
        if version == old_version:
            model.load_state_dict(old_weights)
        log_probs, _ = response_log_probs(model, out, 1.0)
        differences[version] = (log_probs.detach() - out.batch["rollout_log_probs"]).abs()
    for version, difference in differences.items():
        own = difference[versions == version]
        assert own.mean() < TOLERANCE / 10 and own.max() < 0.01  # roundings of large logits: 1e-3 at most was seen
        assert difference[mask & (versions != version)].mean() > 0.1


def test_requests_behind_the_pause_are_of_the_new_weights(engine_and_model, monkeypatch):
    engine, model = engine_and_model
    monkeypatch.setattr(server_engine, "STOP_S", 0.2)
    engine.servers.ask(engine.servers.urls[0], "POST", "/pause", params={"mode": "abort"})
    prompts, sampling = random_prompts(6), Sampling(8)
    rows = engine.start(prompts, sampling, list(range(6)))
    wait_until(lambda: len(engine._posted) == 6)
    perturb(model, 0.1)
    sync_weights(engine, model, engine.version + 1, tolerance=TOLERANCE)
    out = engine.collect(prompts, sampling, rows)
    assert set(out.batch["weight_versions"][out.batch["response_mask"].bool()].tolist()) == {engine.version}
    assert off_policy(model, out) < 1e-4


def test_buckets(monkeypatch):
    monkeypatch.setattr(server_weights, "BUCKET_BYTES", 100)
    stream = [(str(i), torch.zeros(n)) for i, n in enumerate([10, 10, 5, 5, 40, 1, 25])]  # of 4 bytes
    assert [names for names, _ in server_weights._buckets(stream)] == [["0", "1", "2"], ["3"], ["4"], ["5"], ["6"]]


def test_a_broadcast_listens_on_the_way_to_its_servers(monkeypatch):
    """On loopback where all of them are on this machine; else where those elsewhere reach it too."""
    ways = {("localhost", 8000): "127.0.0.1", ("::1", 8000): "::1"}
    ways |= {("node1", 8000): "10.0.0.1", ("node2", 443): "10.0.0.1"}
    monkeypatch.setattr(server_weights, "address_towards", lambda *at: ways[at])
    local, others = ["http://localhost:8000", "http://[::1]:8000"], ["http://node1:8000", "https://node2"]
    assert server_weights._address_towards(local) == "127.0.0.1"
    assert server_weights._address_towards([*local, *others]) == "10.0.0.1"


# ---- what a person reads --------------------------------------------------------------------------
class Stub(Handler):
    """A server that was started otherwise: what it answers to each path, or 404."""

    answers: dict[str, dict]
    posted: ClassVar[dict[str, dict]] = {}

    def do_GET(self):
        answer = self.answers.get(self.path.partition("?")[0], {})
        self.reply(answer, 200 if answer else 404)

    def do_POST(self):
        self.posted[self.path] = self.body()
        self.do_GET()


MODELS = {"data": [{"id": "m", "max_model_len": MAX_LENGTH}]}
RAW = {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-0.7]}, "finish_reason": "length"}]}
DEVELOPING = {"/v1/models": MODELS, "/reset_prefix_cache": {"success": True}, "/resume": {"status": "resumed"}}
WRONG = {
    "--max-model-len 400": {"/v1/models": {"data": [{"id": "m", "max_model_len": 399}]}},
    "VLLM_SERVER_DEV_MODE=1": {"/v1/models": MODELS},
    "--logprobs-mode processed_logprobs": DEVELOPING | {"/v1/completions": RAW},
    "/v1/models failed with 404": {},
}
ONE_TOKEN = RAW["choices"][0] | {"logprobs": {"token_logprobs": [0.0]}}
CERTAIN = DEVELOPING | {"/v1/completions": {"choices": [ONE_TOKEN]}}


@pytest.fixture
def stub(world, tmp_path):
    """stub(answers) makes (an engine, its model) at a Stub that gives them."""
    with http_server(Stub) as url:

        def make(answers: dict[str, dict]) -> tuple:
            Stub.answers = answers
            return build(url, save_tiny(tmp_path / "model"), tmp_path)

        yield make


@pytest.mark.parametrize("message", WRONG)
def test_a_server_that_was_started_otherwise(stub, message):
    with one_line(message):
        stub(WRONG[message])


@pytest.mark.parametrize(
    ("answers", "message"),
    [  # the first as --override-generation-config '{"max_new_tokens": 1}' does, whatever a request asks for
        ({}, "ended a response after 1 of 8 tokens: start it with --generation-config"),
        ({PATH: {"not": "a line"}}, r"the server left (\d) of \1 requests without an answer"),
    ],
)
def test_a_server_that_answers_otherwise(stub, answers, message):
    engine, _ = stub(CERTAIN | answers)
    engine.version = 0
    with one_line(message):
        engine.generate(random_prompts(3), Sampling(8), [1, 2, 3])


def test_a_server_obeys_nobody_without_its_key(server):
    """Not in what vLLM leaves open to all either: weights and methods of its workers come by those routes."""
    paths = ["/pause", "/collective_rpc", "/update_weights", "/v1/completions", PATH, "/health", "/metrics", "/no/such"]
    with httpx.Client(base_url=server[0]) as client:
        for header in ({}, {"Authorization": "Bearer another key"}):
            for method, path in itertools.product(["GET", "POST", "OPTIONS"], paths):
                assert client.request(method, path, headers=header).status_code == 401, (method, path)
    with one_line("wants a key: start the run with VLLM_API_KEY"):
        Servers([server[0]]).ask(server[0], "POST", "/pause")


def test_images_need_a_route_that_a_server_may_not_have(engine_and_model, server, tmp_path):
    url, (_, model) = server[0], engine_and_model
    settings = {"folder": tmp_path, "max_length": MAX_LENGTH, "dtype": torch.float32}
    with pytest.raises(InputError, match="start the server with --enable-scale-out"):
        ServerEngine(model, load_tokenizer(TOY_MODEL), urls=url, **settings, processor=object())


def test_a_server_that_stops_to_answer_ends_a_rollout(stub, monkeypatch):
    """Its port is still open, as after a SIGSTOP."""
    for name, seconds in {"REPORT_S": 0, "ROUND_S": 0.05, "HEALTH_S": 0.1}.items():
        monkeypatch.setattr(server_engine, name, seconds)
    engine, _ = stub(CERTAIN)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine.servers.urls = [url := f"http://127.0.0.1:{silent.getsockname()[1]}"]
        with pytest.raises(InputError, match=rf"{url}: no vLLM server answers there \(Timeout"):
            engine.wait_until(lambda: False)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("join", [server_weights.join_group, lambda *_: time.sleep(1000)], ids=["gloo", "hangs"])
def test_a_server_that_does_not_join_the_broadcast(stub, monkeypatch, join, here):
    """It says that it will, and dies. NCCL connects in its first collective, which nothing interrupts. No other user of
    the machine could join a broadcast to the job's own server."""
    yes = {"status": "ok"}
    answers = CERTAIN | {"/pause": yes, "/health": yes}
    answers |= {"/get_world_size": {"world_size": 1}, "/init_weight_transfer_engine": yes}
    answers["/collective_rpc"] = {"results": [None]}  # of the lease
    monkeypatch.setattr(server_weights, "SYNC_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server_weights, "join_group", join)
    engine, model = stub(answers)
    engine.weights.way, engine.weights.here = "broadcast", here
    with one_line("the broadcast of weights broke off"):
        engine.load_weights(model, 0)
    info = Stub.posted["/init_weight_transfer_engine"]["init_info"]
    assert (info["port"] == 0) == here == bool(info["file"])
    assert not here or Path(info["file"]).parent.stat().st_mode & 0o077 == 0


def test_another_model_and_then_no_server(server, tmp_path, monkeypatch):
    url, path, process = server
    engine, model = build(url, path, tmp_path / "engine")
    idle, _ = build(url, path, tmp_path / "idle")
    moe = save_tiny(tmp_path / "other", cls=Qwen3MoeForCausalLM, config=Qwen3MoeConfig, **MOE)
    other, other_model = build(url, moe, tmp_path)
    for other.weights.way in ("reload_from", "broadcast"):
        with one_line("must serve the model that is trained"):
            sync_weights(other, other_model, 1, tolerance=TOLERANCE)

    worker = max(psutil.Process(process.pid).children(recursive=True), key=lambda child: child.memory_info().rss)
    real_buckets = server_weights._buckets

    def buckets(stream):
        for names, tensors in real_buckets(stream):
            yield names, tensors
            worker.kill()  # while one is on its way

    monkeypatch.setattr(server_weights, "_buckets", buckets)
    monkeypatch.setattr(server_weights, "BUCKET_BYTES", 9000)
    with pytest.raises(InputError, match="must serve the model that is trained") as raised:
        sync_weights(engine, model, 1, tolerance=TOLERANCE)
    assert "no answer" not in str(raised.value)
    process.kill()  # a worker is missing: it would not end by itself
    process.wait(START_S)
    with pytest.raises(WeightSyncError, match="no weights"):
        engine.generate(random_prompts(2), Sampling(4), [1, 2])
    idle.version = 0
    for call in (lambda: idle.generate(random_prompts(2), Sampling(4), [1, 2]), lambda: idle.probe_log_probs([1])):
        with one_line("no vLLM server answers"):
            call()
