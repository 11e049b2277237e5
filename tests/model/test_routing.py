"""Routing replay: the experts of a record with the router's own weights equal a slow loop over tokens, in every layout,
with gradient checkpointing, LoRA, FSDP2, sequence and tensor parallelism; the routes of episodes; and what is
rejected."""

import asyncio
import itertools
import json
import random
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import grpo
from agent import BaseInteraction, MultiTurn, make_episodes
from agent.http.program import Agent, call_function
from agent.request import AsyncRolloutRequest
from data import toy_moe
from data.toy import make_tokenizer
from data.toy_moe import make_mixtral
from lib import InputError, setup
from lib.args import MultiTurnArgs
from lib.distributed import full_tensor, make_mesh, make_row_group, reduce_metrics, shard_model
from lib.model import add_lora, batched_log_probs, check_routing_replay, load_model, load_tokenizer, response_log_probs
from lib.model.routing import ROUTERS, ROUTES, RoutingMetrics, chosen_experts, routes_column
from lib.rollout import Generated, Rollouts, make_engine
from lib.sampling import Sampling
from servers.client import answered
from servers.engine import ServerEngine
from tests.agent.random_agents import random_agent, segments_of
from tests.agent.test_agent_loop import Add, digits, prompts_of, tokenizer
from tests.common import (
    ROOT,
    SMALL,
    TOY_MODEL,
    fork,
    metrics,
    parse_flags,
    ran,
    run_ranks,
    skip_without_vllm,
    with_slow,
)
from tests.model.test_models import alone, batch_of_groups, load, plain, save, with_gradient

MODEL = str(ROOT / "data/toy_moe/model")
MOE = ["--model", MODEL]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts", "num_experts_per_tok")
SOFT = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"}  # scores: softmax of the logits


def random_routes(batch, layers: int, experts: int, k: int):
    """Some experts for each token, the same where rows share a prompt; those of the last token are not known."""
    generator, rows = torch.Generator().manual_seed(0), []
    for n in batch.batch["attention_mask"].sum(1).tolist():
        draws = torch.rand(n, layers, experts, generator=generator)
        rows.append(draws.argsort(-1)[..., :k].to(torch.int16))
    for row in (3, 4):
        rows[row][:7] = rows[2][:7]
    return routes_column([row[:-1] for row in rows])


def slow_block(block, hidden_states):
    """The experts of block.now (l, k), token by token; by the formulas of the papers."""
    kind, router, experts = block.kind, block.gate if hasattr(block, "gate") else block.router, block.experts
    out = []
    for x, chosen in zip(hidden_states[0], block.now.tolist()):
        logits = router.weight @ x + (router.bias if kind == "gpt_oss" else 0)
        taken = logits[chosen]
        if kind in SOFT:
            weights = logits.softmax(-1)[chosen]
            weights = weights / weights.sum() if getattr(router, "norm_topk_prob", True) else weights
        elif kind == "gpt_oss":
            weights = taken.softmax(-1)
        else:
            weights = taken.sigmoid() / taken.sigmoid().sum() * router.routed_scaling_factor
        y = torch.zeros_like(x)
        for weight, e in zip(weights, chosen):
            if kind == "gpt_oss":
                z = x @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]
                gate, up = z[::2].clamp(max=7), z[1::2].clamp(-7, 7)
                own = gate * (1.702 * gate).sigmoid() * (up + 1) @ experts.down_proj[e] + experts.down_proj_bias[e]
            else:
                gate, up = (experts.gate_up_proj[e] @ x).chunk(2)
                own = experts.down_proj[e] @ (F.silu(gate) * up)
            y = y + weight * own
        if hasattr(block, "shared_experts"):
            y = y + block.shared_experts(x)
        if hasattr(block, "shared_expert"):
            y = y + block.shared_expert_gate(x).sigmoid() * block.shared_expert(x)
        out.append(y)
    y = torch.stack(out)[None]
    return (y, None) if kind == "gpt_oss" else y


def slow_loop(model, kind: str, batch):
    """`alone`, with the experts of the batch's column: (2, B, T)."""
    blocks = [block for block in model.modules() if hasattr(block, "experts") and hasattr(block.experts, "down_proj")]
    for block in blocks:
        block.kind, block.forward = kind, MethodType(slow_block, block)
    results = []
    for i, routes in enumerate(batch.non_tensor_batch[ROUTES]):
        for layer, block in enumerate(blocks):
            block.now = torch.cat([routes[:, layer], routes[-1:, layer]]).long()  # no result depends on the last token
        results.append(alone(model, batch[[i]])[:, 0])
    return torch.stack(results, 1)


# in make test: two forms of scores, an expert that all tokens share, layers with a state, biases in padded rows
OTHERS = ROUTERS.keys() - {"mixtral", "deepseek_v3", "qwen3_next", "gpt_oss"}


@pytest.mark.parametrize("kind", with_slow(ROUTERS, *OTHERS))
def test_replay_is_the_slow_loop_in_every_layout(tmp_path, kind):
    """In fp64, but for what transformers computes in fp32 (norms, scores): by the weights of 0.3 results differ by 1e-5
    at most, gradients by 1e-6 of their norm. Other experts change log-probs by 3 nats and more."""
    path, batch = save(kind, tmp_path), batch_of_groups()
    model = load(path)
    [router, *_] = model.routers
    own = torch.stack(response_log_probs(model, batch, 1.0)).detach()
    batch.non_tensor_batch[ROUTES] = random_routes(batch, len(model.routers), router.num_experts, router.top_k)
    theirs = plain(path)
    expected, gradient = with_gradient(theirs, partial(slow_loop, theirs, kind, batch))
    assert (expected - own).abs().max() > 1
    for options in ({}, {"share_prompts": False}, {"padding_free": False}):
        ours, of_ours = with_gradient(model, partial(response_log_probs, model, batch, 1.0, **options))
        assert (ours - expected).abs().max() < 1e-4
        assert (of_ours - gradient).norm() < 1e-5 * gradient.norm()
        assert router.weight.grad.norm() > 1e-3  # the gate learns, from the experts' weights


def test_a_recorded_pass_replays_itself_and_the_router_decides_where_nothing_is_known(tmp_path):
    model, batch = load(save("deepseek_v3", tmp_path)), batch_of_groups()
    routes: list[torch.Tensor] = []
    own = batched_log_probs(model, batch, 1.0, 30, routes=routes)
    assert [len(row) for row in routes] == batch.batch["attention_mask"].sum(1).tolist()
    assert model.route_layers == (1, 2, 3)  # the first layer has no experts
    for i, row in enumerate(routes):
        ids = batch.batch["input_ids"][i][batch.batch["attention_mask"][i].bool()]
        model(input_ids=ids[None])
        assert torch.equal(chosen_experts(model)[:-1], row[:-1]) and (row[-1] == -1).all()
    stats = RoutingMetrics()
    for rows in (routes, [row[:3] for row in routes], [row[:0] for row in routes]):
        batch.non_tensor_batch[ROUTES] = routes_column(rows)
        again = response_log_probs(model, batch, 1.0)
        stats.watch(model)
        torch.testing.assert_close(again[0].detach(), own[0], atol=1e-6, rtol=0)  # the order of experts may differ
    assert stats.sums["router/differing_experts"].total == 0 < stats.sums["router/differing_experts"].count
    tokens, layers, k = chosen_experts(model).shape
    assert stats.loads.sum(1).tolist() == [3 * tokens * k] * layers


def router_metrics(world, path: str, padded: bool = False, grouped: bool = False):
    """Of five rows, or of this rank's share of them; grouped: split over ranks by tokens."""
    model, batch, stats = load_model(path), batch_of_groups(), RoutingMetrics()
    group = make_row_group(world, make_mesh(world), 2) if grouped else None
    rows = [*range(len(batch))][:3] if world.rank == 0 else [*range(len(batch))][3:]
    batch = batch[rows] if grouped else batch
    layout = {"padding_free": not padded, "share_prompts": False}
    response_log_probs(model, batch, 1.0, row_group=group, **layout)
    stats.watch(model)
    return reduce_metrics(stats.end())


@pytest.mark.parametrize("how", ["padded", "grouped"])
def test_router_metrics_count_no_padding(tmp_path, how):
    """float32, 1e-5: experts of a token differ by rounding at most, and sums come in another order."""
    path = save("qwen3_moe", tmp_path)
    [expected] = run_ranks(1, router_metrics, path)
    for found in run_ranks(2 if how == "grouped" else 1, router_metrics, path, how == "padded", how == "grouped"):
        assert found == pytest.approx(expected, rel=1e-5)


def test_checkpointing_repeats_the_routes_of_its_own_forward(tmp_path):
    """Two forwards with other routes before their backwards, with LoRA: what is recomputed takes the routes of its own
    batch. Equal to the bit but for the order of sums, 1e-12 of the norm."""
    path, gradients = save("qwen3_moe", tmp_path), []
    for checkpointing in (False, True):
        model = load(path, gradient_checkpointing=checkpointing)
        add_lora(model, rank=2, alpha=8, seed=0, target_modules=".*[qkvo]_proj")
        for p in model.parameters():
            if p.requires_grad:
                p.data = torch.full_like(p, 0.1, dtype=torch.float64)
        first, second = batch_of_groups(), batch_of_groups()
        first.non_tensor_batch[ROUTES] = random_routes(first, 4, 4, 2)
        second.non_tensor_batch[ROUTES] = routes_column([3 - row for row in first.non_tensor_batch[ROUTES]])
        a, b = (response_log_probs(model, batch, 1.0)[0] for batch in (first, second))
        (2 * a.sum() + b.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert gradients[0].norm() > 0.1
    torch.testing.assert_close(*gradients, atol=1e-12 * gradients[0].norm(), rtol=0)


def replays(world, path: str, split: str = "", grouped: bool = False):
    """Of this rank's share of four rows: log-probs and routes of a recorded pass, log-probs of three more, and the
    gradient of their sum. These three have no routes, random ones, and the first experts only, which one rank holds.
    grouped: float32, in which experts are one grouped product, with gradient checkpointing."""
    model = load_model(path, gradient_checkpointing=True) if grouped else load(path)
    router, batch, n = model.routers[0], batch_of_groups()[[0, 1, 2, 3]], 4 // world.size
    drawn = random_routes(batch_of_groups(), len(model.routers), router.num_experts, router.top_k)
    mesh = make_mesh(world, tensor_parallel=2 if split == "tensor" else 1)
    group = make_row_group(world, mesh, 2 if split == "sequence" else 1)
    model = shard_model(model, mesh, model.dtype)
    own = list(range(n * world.rank, n * world.rank + n))
    batch, routes = batch[own], []
    recorded, replayed = batched_log_probs(model, batch, 1.0, 40, row_group=group, routes=routes)[0], []
    first = routes_column([row.argsort(-1).argsort(-1).to(row.dtype) for row in drawn])  # 0 .. k - 1, in some order
    for routing in (None, drawn, first):
        if routing is not None:
            batch.non_tensor_batch[ROUTES] = routing[own]
        log_probs = response_log_probs(model, batch, 1.0, row_group=group)[0]
        (world.size * log_probs.sum()).backward()
        replayed.append(log_probs.detach())
    gradient = torch.cat([full_tensor(p.grad).flatten() for p in model.parameters() if p.grad is not None])
    return torch.stack([recorded, *replayed], 1), gradient, routes


SPLITS = [(2, "", "mixtral"), (2, "sequence", "mixtral"), (4, "tensor", "mixtral")]
TENSOR = [(2, "tensor", kind) for kind in ROUTERS if kind != "gpt_oss"]  # which is rejected: its rows are padded


@pytest.mark.parametrize(
    ("ranks", "split", "kind"),
    with_slow(SPLITS + TENSOR, SPLITS[0], SPLITS[2], *(case for case in TENSOR if case[2] != "deepseek_v3")),
)
def test_sharded_and_parallel_ranks_replay_as_one(tmp_path, ranks, split, kind):
    """Float64 weights; scores are fp32, so that the order of sums shows in 1e-7; in float32, by the weights of
    0.3, in 2e-5 of results. The routes change results by more than 1."""
    path, grouped = save(kind, tmp_path, num_key_value_heads=2, use_qk_norm=True), ranks == 4
    tolerance = 1e-3 if grouped else 1e-5
    [(expected, gradient, routes)] = run_ranks(1, replays, path, "", grouped)
    parts = run_ranks(ranks, replays, path, split, grouped)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), expected, atol=tolerance, rtol=0)
    assert expected.diff(dim=1).abs().amax((0, 2))[1:].min() > 1
    for _, ours, _ in parts:
        assert (ours - gradient).norm() < tolerance * gradient.norm()
    for ours, theirs in zip([row for part in parts for row in part[2]], routes, strict=True):
        assert torch.equal(ours, theirs)


# ---- the engines ---------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", [(), ("87",)])
def test_routes_come_from_a_server_and_survive_a_sync(stop):
    """A line as servers/batches.py writes it, of vLLM's own classes and its encoding. vLLM on a CPU has no routes to
    return (docs/moe.md). A response that a sync cuts keeps the routes by which its tokens were computed. Tokens behind
    a stop string that began before the sync are dropped, with their routes."""
    skip_without_vllm()
    from vllm import RequestOutput
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput

    from servers.batches import _sample

    layers, k = 3, 2
    of_model = np.arange(2 * 9 * layers * k, dtype=np.uint8).reshape(2, 9, layers, k)

    class Engine:
        async def generate(self, prompt, params, name):
            first = len(prompt["prompt_token_ids"])
            ids = [7, 8] if first == 3 else [7, 8, 8]
            log_probs = FlatLogprobs()
            for token in ids:
                log_probs.append({token: SimpleNamespace(logprob=-1.0, rank=1, decoded_token=None)})
            ended = "abort" if first == 3 else "length"
            routes = of_model[int(first > 3), : first + len(ids) - 1]
            out = CompletionOutput(0, "", ids, -2.0, log_probs, routed_experts=routes, finish_reason=ended)
            yield RequestOutput(name, None, prompt["prompt_token_ids"], None, [out], True)

    class Open(asyncio.Event):
        async def wait(self):  # what is waited for happens then, on a machine of any speed
            self.set()

    engine = ServerEngine.__new__(ServerEngine)
    engine.own, engine.servers, engine._lost, engine._posted = None, SimpleNamespace(urls=["a"]), set(), set()
    engine.max_length, engine.version, engine.route_layers = 99, 0, (0, 2)
    engine.tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(str, ids)))

    async def request(url, ids, settings, pictures):
        _, found = await _sample(Engine(), {"id": "1", "prompt_token_ids": ids, "settings": {}})
        line = json.dumps(found)
        if len(ids) == 3:  # new weights come, and are there
            engine._open.clear()
        return answered(json.loads(line))

    async def sample():
        engine._open = Open()
        return await engine.sample([1, 2, 3], Sampling(5, stop=stop), 1, 0)

    engine._request = request
    row = asyncio.run(sample())
    ids, ended, known = ([7, 8, 7], "stop", 6) if stop else ([7, 8, 7, 8, 8], "length", 7)
    assert row.token_ids == ids and row.finish_reason == ended
    expected = np.concatenate([of_model[0, :4], of_model[1, 4:known]])[:, [0, 2]]
    assert row.routed_experts.dtype == torch.int16 and (row.routed_experts.numpy() == expected).all()


# ---- several turns -------------------------------------------------------------------------------
REPLIES = st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans(), st.none() | st.integers(0, 9))


@given(st.integers(1, 3), st.lists(REPLIES, max_size=6), st.booleans())
def test_a_token_keeps_the_routes_of_the_first_request_that_has_them(prompt, turns, mrope):
    """Against a dictionary, token by token. A turn: tokens of text, sampled tokens, whether a segment begins before
    them, and how many of its routes the engine leaves out at the end, or None: it returns none. All routes differ."""
    request = AsyncRolloutRequest("", [], "", [1] * prompt, [], torch.arange(prompt), {}, {}, 0, None, 99)
    if mrope:
        request.positions = request.positions.expand(4, -1)
    numbers, expected, start = itertools.count(), {}, 0
    for text, sampled, begins, missing in turns:
        if begins:
            request.begin_segment()
            start = prompt + len(request.token_ids)
        request.append([2] * text)
        row = Generated([3] * sampled, [0.0] * sampled, "stop")
        request.append(row.token_ids, row)
        if missing is not None:
            known = prompt + len(request.token_ids) - start - 1 - missing
            routes = [[[next(numbers), next(numbers)]] for _ in range(known)]
            row.routed_experts = torch.tensor(routes, dtype=torch.int16).view(-1, 1, 2)
            for i, route in enumerate(routes, start):
                expected.setdefault(i, route)
        request.add_routes(row.routed_experts)
    found = [] if request.routed_experts is None else request.routed_experts.tolist()
    assert found == [expected.get(i, [[-1, -1]]) for i in range(len(found))] and len(found) > max(expected, default=-1)


class Asks(BaseInteraction):
    """Twice, but not in a row that is broken."""

    async def start(self, instance_id, broken=False, **kwargs):
        assert not broken
        self.left = 2

    async def respond(self, messages):
        self.left -= 1
        return self.left < 0, "137+285", 0.0, {}


class Hangs(Asks):
    async def start(self, instance_id, **kwargs):
        await asyncio.sleep(60)


@pytest.fixture(scope="module")
def mixture(world):
    model = load_model(MODEL)
    sizes = {"max_length": 400, "dtype": torch.float32, "gpu_memory": 0.3}
    return model, make_engine("hf", model, load_tokenizer(MODEL), folder=None, returns_routes=True, **sizes)


@pytest.mark.parametrize("kind", ["tools", "compaction", "agent"])
def test_episodes_are_trained_with_the_experts_that_the_engine_took(mixture, kind):
    """Float32. With equal weights the router would take the same experts, as no scores are equal to 1e-6; with other
    weights the trainer still takes those of the engine. In the first row nothing is sampled, and nothing is known; in
    the others only the last token of a sequence is not."""
    model, engine = mixture
    limits = {"compact_at": 48, "compact_prompt": "sum"} if kind == "compaction" else {}
    limits = MultiTurnArgs(max_turn_tokens=12, max_turns=4, **limits)
    how = MultiTurn(tokenizer(), {"add": Add()}, digits, Asks, limits)
    draw = random.Random(1)
    kinds = ["go on", "retry", "edit", "drop", "fork", "n", "stop"]
    plans = [[(name, draw.randrange(9)) for name in draw.sample(kinds, 5)] for _ in range(4)]

    async def agent(url, key, row):
        number = int(row["prompt"][0]["content"][:-1])
        assert number > 0
        return await random_agent(plans[number], [])(url, key, row)

    if kind == "agent":
        plays = Agent(partial(call_function, agent), 60.0, "auto", Sampling(300))
        how = replace(how, tools={}, interaction=None, agent=plays)
    prompts = prompts_of(how, 4, interaction_kwargs=[{"broken": i == 0} for i in range(4)])
    out = make_episodes(engine, how).generate(prompts, Sampling(300), [1, 2, 3, 4])

    column, segments = out.non_tensor_batch[ROUTES], [segments_of(out, i) for i in range(1, 4)]
    assert column[0].shape == (0, 2, 2) and not out.batch["response_mask"][0].any()
    known = [int((own >= 0).all(-1).all(-1).sum()) for own in column[1:]]
    assert known == [sum(len(ids) - 1 for ids, _ in own) for own in segments]
    assert sum(map(len, segments)) == 3 if kind == "tools" else sum(map(len, segments)) > 5
    assert kind != "tools" or any(own.get("tool_calls") for own in out.non_tensor_batch["agent_metrics"])

    other = load_model(MODEL)
    for router in other.routers:
        router.weight.data.normal_()
    for trainer in (model, other):
        taken, stats = [], RoutingMetrics()
        log_probs, *_ = batched_log_probs(trainer, out, 1.0, 1 << 20, routes=taken)
        stats.watch(trainer)
        for ours, engines in zip(taken, column):
            ours = torch.where(engines < 0, -1, ours[: len(engines)])
            assert torch.equal(ours.sort(-1).values, engines.sort(-1).values)
        differing, off = stats.sums["router/differing_experts"], log_probs - out.batch["rollout_log_probs"]
        assert (differing.total == 0 and off.abs().max() < 1e-4) == (trainer is model) and differing.count > 0


def test_a_rank_whose_episodes_were_all_out_of_time_has_the_column_too(mixture):
    """As ranks exchange rows. A rollout that has tokens but no experts is rejected."""
    _, engine = mixture
    how = MultiTurn(engine.tokenizer, interaction=Hangs, limits=MultiTurnArgs(episode_timeout=0.01))
    rollouts = Rollouts.__new__(Rollouts)
    rollouts.engine, rollouts.version, rollouts.async_level = engine, 0, 0
    out = rollouts._checked(make_episodes(engine, how).generate(prompts_of(how, 2), Sampling(9), [1, 2]), [9, 9])
    assert [row.shape for row in out.non_tensor_batch[ROUTES]] == [(0, 2, 2)] * 2
    out.batch["attention_mask"][1, -1] = 1
    with pytest.raises(InputError, match="the rollouts come without their experts"):
        rollouts._checked(out, [9, 9])


# ---- runs ----------------------------------------------------------------------------------------
def test_a_run_with_r3_replays_its_record(tmp_path):
    """The engine's experts are in the record. The second run has no others, and would differ in its metrics. Two ranks
    also replay it with half of the experts each: rel 1e-3, abs 1e-4, for fp32 sums in another order."""
    flags = [*MOE, *SMALL, "--multi-turn.interaction", f"{__file__}:Asks", "--multi-turn.max-turn-tokens", "12"]
    flags += ["--max-response-length", "64", "--routing-replay", "R3", "--num-mini-batches", "2", "--total-steps", "2"]
    record, flags = str(tmp_path / "record"), [*flags, "--run-name"]
    ran(fork("grpo", tmp_path, *flags, "a", "--record", record, ranks=2))
    ran(fork("grpo", tmp_path, *flags, "b", "--replay", record, ranks=2))
    first, second = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert first == second and len(first) == 2
    assert all(0 <= row["router/differing_experts"] < 0.1 and row["router/load_max"] >= 1 for row in first)
    assert all(0 < row["router/entropy"] < np.log(8) and row["agent/turns_mean"] == 3 for row in first)
    tensor = ["--tensor-parallel-size", "2", "--rollout-engine", "http://localhost:1"]  # the server is not asked
    ran(fork("grpo", tmp_path, *flags, "c", "--replay", record, *tensor, ranks=2))
    for row, expected in zip(metrics(tmp_path / "c"), first, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_r2_replays_the_pass_before_the_update(tmp_path):
    """Before the first update nothing differs, so that with a learning rate of 0 no expert does and the ratio is 1."""
    flags = [*MOE, *SMALL, "--routing-replay", "R2", "--lr", "0", "--total-steps", "1", "--run-name", "a"]
    ran(fork("grpo", tmp_path, *flags))
    [row] = metrics(tmp_path / "a")
    assert row["router/differing_experts"] == 0 and abs(row["actor/ppo_kl"]) < 1e-6


def test_what_cannot_replay_its_routes_is_rejected():
    with pytest.raises(InputError, match="the forward pass that --routing-replay R2 needs"):
        parse_flags(grpo.Args, [*MOE, "--routing-replay", "R2", "--old-log-probs", "rollout"])
    with pytest.raises(InputError, match="of type llama, it knows those of deepseek_v3, glm4_moe, gpt_oss, mixtral"):
        check_routing_replay(TOY_MODEL)
    skip_without_vllm()
    args = parse_flags(grpo.Args, [*MOE, "--routing-replay", "R3", "--rollout-engine", "vllm"])
    setup.check_engine(args, torch.device("meta"), torch.bfloat16, False)  # stands for a GPU
    with pytest.raises(InputError, match="on a CPU vLLM does not return the experts: take --rollout-engine hf, or R2"):
        setup.check(args, torch.device("cpu"))


# ---- the embedded mixture ------------------------------------------------------------------------
def test_the_embedded_mixture_is_the_generators_and_uses_its_experts(tmp_path):
    tokenizer = make_tokenizer()
    model, config = load_model(MODEL), make_mixtral(tokenizer, 128).config
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 1e6
    assert {name: getattr(model.config, name) for name in SIZES} == {name: getattr(config, name) for name in SIZES}
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == (toy_moe.FOLDER / "model/tokenizer.json").read_text()
    prompts = [f"<|im_start|>user\n{a}+285<|im_end|>\n<|im_start|>assistant\n" for a in range(137, 987, 50)]
    model(input_ids=torch.tensor(tokenizer(prompts)["input_ids"]))
    used = [chosen_experts(model)[:, layer].unique().numel() for layer in range(2)]
    assert min(used) >= 6  # of 8
