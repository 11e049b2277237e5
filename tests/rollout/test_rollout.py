"""lib/rollout: one contract for the hf and the vLLM engine (both real), sampling by numbers, the checked sync."""

import importlib
import math
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import grpo
import lib.distributed
import lib.rollout
from lib import InputError
from lib.args import Sizes
from lib.data import ROW, RLHFDataset, collate_fn
from lib.data_proto import DataProto
from lib.distributed import World, full_tensor, make_mesh, shard_model
from lib.model import Policy, add_lora, load_model, load_tokenizer, response_log_probs
from lib.model.vision import cache_keyword
from lib.rollout import Rollouts, Sampling, WeightSyncError, concat_rows, hf_engine, request_seeds, sync_weights
from lib.rollout.engine import stop_token_ids
from lib.rollout.group_cache import ROOM, GroupCache, GroupLayer, can_group
from lib.rollout.hf_engine import sample_tokens
from lib.rollout.stream import check_lengths
from lib.rollout.vllm_engine import VLLMEngine
from lib.rollout.vllm_start import adapter_settings
from lib.rollout.weight_sync import CheckedStream, UnsupportedAdapter
from lib.run.export import write_adapter
from lib.sampling import splitmix64
from servers.engine import NEUTRAL
from tests.common import (
    ROOT,
    TOY_MODEL,
    give_generation_config,
    parse_flags,
    randomize_lora_b,
    save_tiny,
    with_slow,
)
from tools.mismatch import Batch

WIDTH = 24  # prompt
TOLERANCE = 1e-3


def prompts_of(texts: list[list[int]]) -> DataProto:
    ids = torch.zeros(len(texts), WIDTH, dtype=torch.long)
    mask = torch.zeros_like(ids)
    raw = np.empty(len(texts), object)
    for i, text in enumerate(texts):
        ids[i, WIDTH - len(text) :], mask[i, WIDTH - len(text) :], raw[i] = torch.tensor(text), 1, text
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return DataProto.from_dict(tensors=tensors, non_tensors={"raw_prompt_ids": raw})


def random_prompts(n: int, copies: int = 1) -> DataProto:
    g = np.random.default_rng(n)
    return prompts_of([g.integers(9, 104, size=g.integers(3, WIDTH + 1)).tolist() for _ in range(n)] * copies)


def close(engine):
    """vLLM takes the process group along when it goes."""
    engine.close()
    if not dist.is_initialized():
        lib.distributed.init_distributed()


def build(name, path, folder, max_length=64, **more):
    """(engine, its sharded model) with the weights not loaded yet."""
    model = shard_model(load_model(path), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    folder.mkdir(exist_ok=True)
    settings = {"folder": folder, "max_length": max_length, "dtype": torch.float32, "gpu_memory": 0.3}
    more = {"max_num_seqs": 300, **more}
    return lib.rollout.make_engine(name, model, load_tokenizer(TOY_MODEL), **settings, more=more), model


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine_of_file(request, world, tmp_path_factory):
    if request.param == "vllm":
        pytest.importorskip("vllm")
        import bm25s  # noqa: F401  a run with the search tool has it before vLLM, whose start must survive it
    folder = tmp_path_factory.mktemp(request.param)
    path = save_tiny(folder / "model")
    give_generation_config(path)  # the policy is the model alone
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "vllm":  # a step ahead, as on a GPU
            patch.setattr("vllm.config.VllmConfig.max_concurrent_batches", 2)
        engine, model = build(request.param, path, folder / "engine", max_length=128, block_size=32)
    yield engine, model
    close(engine)


@pytest.fixture
def engine_and_model(engine_of_file):
    sync_weights(*engine_of_file, 0, tolerance=TOLERANCE)
    return engine_of_file


def text_log_probs(model, ids):
    """(n - 1,), of the tokens of a text (n,) but the first."""
    return model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def reshard(model):
    """A probe leaves the root's parameters whole, and what is written there is lost."""
    for module in lib.distributed.fsdp_modules(model):
        module.reshard()


def perturb(model, size=0.3):
    reshard(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn_like(p))


@contextmanager
def broken(engine, weights, change):
    """The weights are changed in place until the end, and the engine has none afterwards."""
    before = [p.detach().clone() for p in weights]
    with torch.no_grad():
        change()
    engine.version = None
    yield
    with torch.no_grad():
        for weight, values in zip(weights, before):
            weight.copy_(values)
    engine.version = None


# ---- the contract --------------------------------------------------------------------------------
def test_a_turn_also_ends_as_the_chat_template_says():
    """Tokenizer and generation config of a base model know another end than its template."""
    model, tokenizer = load_model(TOY_MODEL), load_tokenizer(TOY_MODEL)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    tokenizer.eos_token, model.generation_config.eos_token_id = "<pad>", [1]
    assert stop_token_ids(model, tokenizer) == sorted({pad, 1, end})
    last, parts = "{{ messages[-1]['content'] }}", "{{ messages[0].content[0]['text'] }}"
    without = [last, f"{last} the end<|im_end|>", "{{ raise_exception('no assistant') }}", parts, None]
    for tokenizer.chat_template in without:
        assert stop_token_ids(model, tokenizer) == sorted({pad, 1})


def test_the_engine_gives_its_log_probs_again_for_tokens_that_are_forced_on_it(engine_and_model, tmp_path):
    """By tools/mismatch.py, with the filters. To the bit here; elsewhere a kernel may depend on addresses: 1e-5 is the
    noise of float32 in log-probs up to 10."""
    engine, model = engine_and_model
    load_tokenizer(TOY_MODEL).save_pretrained(model.name_or_path)
    flags = ["--model", model.name_or_path, "--temperature", "0.8", "--top-p", "0.9"]
    args = parse_flags(grpo.Args, [*flags, "--rollout-engine", "vllm" if hasattr(engine, "llm") else "hf"])
    sampling = args.rollout.sampling()
    out = engine.generate(random_prompts(40), replace(sampling, max_response_length=12), list(range(40)))
    weights = {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    batch = Batch(args, out, engine.version, {engine.version: weights}, tmp_path)
    batch.take_over(engine)
    mask, recorded = out.batch["response_mask"].bool(), out.batch["rollout_log_probs"].double()
    again = batch.log_probs(batch.engine)
    torch.testing.assert_close(again[mask], recorded[mask], rtol=0, atol=1e-5)
    assert not torch.equal(batch.log_probs(batch.trainer)[mask], recorded[mask])


def test_settings_that_vllm_must_not_get_are_refused_before_a_model_loads():
    pytest.importorskip("vllm")
    why = {"max_num_seq": "vLLM has no such setting; max_num_seqs?", "dtype": "set it by --compute-dtype"}
    for name, said in (why | {"logprobs_mode": "training depends on the value"}).items():
        with pytest.raises(InputError, match=re.escape(f"--vllm-kwargs {name}: {said}")):
            lib.rollout.check_engine_import("vllm", {name: 1})


def test_a_request_names_all_that_a_server_would_complete():
    """From the model's generation config: what vLLM has there, in this version and the next."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    completed = CompletionRequest.__private_attributes__["_DEFAULT_SAMPLING_PARAMS"].default
    assert "repetition_penalty" in completed and completed.keys() <= NEUTRAL.keys()
    assert all(NEUTRAL[name] == value for name, value in completed.items() if name != "top_k")  # -1 and 0 are the same


SAMPLINGS = [
    Sampling(24),
    Sampling(24, 1.3, top_p=0.8),
    Sampling(24, 0.8, top_k=5),
    Sampling(24, 1.4, top_p=0.9, top_k=30, min_p=0.1),
]


def check_responses(engine, model, sampling: Sampling, tolerance: float) -> None:
    """What the loss needs, and the trainer's log-probs."""
    T, stop, prompts = sampling.max_response_length, set(map(int, engine.stop_ids)), random_prompts(40)
    out = engine.generate(prompts, sampling, request_seeds(1, 2, list(range(40))))
    mask, reasons = out.batch["response_mask"], out.non_tensor_batch["finish_reason"]
    assert torch.equal(out.batch["prompts"], prompts.batch["input_ids"])
    assert torch.equal(out.batch["input_ids"], torch.cat([out.batch["prompts"], out.batch["responses"]], 1))
    assert torch.equal(out.batch["attention_mask"][:, WIDTH:], mask)
    assert set(reasons) == {"stop", "length"}
    for row, length, reason in zip(out.batch["responses"].tolist(), mask.sum(1).tolist(), reasons):
        assert (row[length - 1] in stop) == (reason == "stop") and not stop & set(row[: length - 1])
        assert reason == "stop" or length == T
    log_probs, _, *outside_top_p = on_policy(model, out, sampling)
    assert (log_probs - out.batch["rollout_log_probs"]).abs().max() < tolerance
    assert len(outside_top_p) == (sampling.truncation is not None) and not any(x.any() for x in outside_top_p)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_responses_are_what_the_loss_needs(engine_and_model, sampling):
    """fp32, 24 tokens, two layers: 1e-5 is 100 roundings; a wrong temperature, a shifted mask or a distribution that is
    not cut as the sampler's costs 0.1 or more."""
    check_responses(*engine_and_model, sampling, 1e-5)


def on_policy(model, out, sampling):
    return response_log_probs(model, out, sampling.temperature, truncation=sampling.truncation)


def slow_log_probs(logits, seen, sampling):
    """{token: log-prob} of the tokens that can be sampled, in float64. logits (V,), seen: the tokens before."""
    z = [float(x) for x in logits.double()]
    for token in seen:
        z[token] = z[token] / sampling.repetition_penalty if z[token] > 0 else z[token] * sampling.repetition_penalty
    z = [x / sampling.temperature for x in z]
    left = {token: x for token, x in enumerate(z) if math.exp(x - max(z)) >= sampling.min_p}
    total = sum(math.exp(x) for x in left.values())
    return {token: x - math.log(total) for token, x in left.items()}


OTHERS = [Sampling(12, 1.2, min_p=0.2), Sampling(12, 0.8, repetition_penalty=1.6)]
OTHERS += [Sampling(12, min_p=0.05, repetition_penalty=0.7)]


@pytest.mark.parametrize("sampling", OTHERS, ids=str)
def test_min_p_and_repetition_penalty_sample_as_a_slow_loop_does(engine_and_model, sampling):
    """Every log-prob is that of the loop, and hf's tokens are those that the loop draws with the same noise."""
    engine, model = engine_and_model
    prompts, seeds = random_prompts(5, copies=2), request_seeds(2, 2, list(range(10)))
    out = engine.generate(prompts, sampling, seeds)
    for i, prompt in enumerate(prompts.non_tensor_batch["raw_prompt_ids"]):
        n = int(out.batch["response_mask"][i].sum())
        response = out.batch["responses"][i, :n].tolist()
        with torch.no_grad(), lib.distributed.unsharded(model):
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 :]
        for t, token in enumerate(response):
            found = slow_log_probs(logits[t], {*prompt, *response[:t]}, sampling)
            assert abs(found[token] - float(out.batch["rollout_log_probs"][i, t])) < 1e-5
            if isinstance(engine, hf_engine.HFEngine):
                u, total = (int(splitmix64(torch.tensor(seeds[i] + (t << 32)))) & 0xFFFFFF) / 2**24, 0.0
                for drawn in sorted(found):
                    total += math.exp(found[drawn])
                    if total > u:
                        break
                assert drawn == token


def test_a_stop_string_ends_a_response_after_the_tokens_that_complete_it(engine_and_model):
    """Two strings: what two tokens of a row make together, and one token of another row. The tokens are those that are
    sampled without stop strings, up to the first that completes one."""
    engine, _ = engine_and_model
    prompts, seeds, decode = random_prompts(16), request_seeds(1, 3, list(range(16))), load_tokenizer(TOY_MODEL).decode
    whole = engine.generate(prompts, Sampling(24), seeds)
    rows = [row[mask.bool()].tolist() for row, mask in zip(whole.batch["responses"], whole.batch["response_mask"])]
    long = [row for row in rows if len(row) > 9]
    stop = decode(long[0][6:8]), decode(long[1][4:5])
    out = engine.generate(prompts, Sampling(24, stop=stop), seeds)
    cut = 0
    for i, row in enumerate(rows):
        completes = (n for n in range(1, len(row) + 1) if any(text in decode(row[:n]) for text in stop))
        n = next(completes, len(row))
        cut += n < len(row)
        assert out.batch["responses"][i][out.batch["response_mask"][i].bool()].tolist() == row[:n]
        torch.testing.assert_close(out.batch["rollout_log_probs"][i, :n], whole.batch["rollout_log_probs"][i, :n])
        ends = row[n - 1] in map(int, engine.stop_ids) or any(text in decode(row[:n]) for text in stop)
        assert out.non_tensor_batch["finish_reason"][i] == ("stop" if ends else "length")
    assert cut > 1


def test_a_sample_depends_on_its_seed_and_nothing_else(engine_and_model):
    engine, _ = engine_and_model
    prompts, seeds = random_prompts(6, copies=3), request_seeds(7, 3, list(range(18)))
    state = torch.get_rng_state()
    together = engine.generate(prompts, Sampling(10), seeds).batch["responses"]
    assert torch.equal(torch.get_rng_state(), state)  # the trainer's
    assert torch.equal(engine.generate(prompts, Sampling(10), seeds).batch["responses"], together)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = engine.generate(prompts[order], Sampling(10), [seeds[i] for i in order]).batch["responses"]
    assert torch.equal(shuffled, together[order])
    alone = engine.generate(prompts[[4]], Sampling(10), [seeds[4]]).batch["responses"]
    assert torch.equal(alone[0], together[4])
    assert len({tuple(row) for row in together.tolist()}) == 18  # also the copies of one prompt differ


def rollouts_of(engine) -> Rollouts:
    sizes = Sizes(2, 1, 1, 3)
    fixed = {"async_level": 0, "recorder": lib.rollout.NoRecorder(), "reads_log_probs": False}
    fixed |= {"sync_tolerance": TOLERANCE, "max_mismatch": 1.0, "world": World(0, 1, torch.device("cpu"))}
    return Rollouts(engine, engine, None, Sampling(8), sizes=sizes, seed=1, **fixed)


def prompts_of_step() -> DataProto:
    prompts = random_prompts(3)
    prompts.non_tensor_batch["uid"] = np.array(["1-0", "1-1", "1-2"], dtype=object)
    return prompts


def test_a_step_samples_a_prompt_as_often_as_it_likes(engine_and_model):
    """The group as ever, then others; a prompt of an earlier step, and prompts that the step wrote. All differ, and are
    the same in the next run."""
    engine, _ = engine_and_model
    prompts, again = prompts_of_step(), prompts_of_step()[[0] * 4]
    group = engine.generate(prompts.repeat(2, interleave=True), Sampling(8), request_seeds(1, 1, list(range(6))))
    again.non_tensor_batch["uid"] = np.array(["0-0", "1-0-solver-0", "1-0-solver-1", "1-mine"], dtype=object)
    of_runs = []
    for _ in range(2):
        rollouts = rollouts_of(engine)
        batches = [rollouts.generate(rows, n=n) for rows, n in ((prompts, 2), (prompts[[0, 0]], 3), (again, 2))]
        assert batches[0].batch["policy_version"].tolist() == [0] * 6
        of_runs.append([batch.batch["responses"].tolist() for batch in batches])
    assert of_runs[0] == of_runs[1] and of_runs[0][0] == group.batch["responses"].tolist()
    first, others, of_any_uid = of_runs[0]
    assert len({tuple(row[:8]) for row in (*first[:2], *others, *of_any_uid)}) == 16


def test_each_response_has_its_limit(engine_and_model):
    engine, _ = engine_and_model
    rollouts, seeds, limits = rollouts_of(engine), request_seeds(1, 1, list(range(6))), [1, 2, 3, 4, 6, 8]
    whole = rollouts.generate(prompts_of_step(), n=2, seeds=seeds)
    cut = rollouts.generate(prompts_of_step(), n=2, limits=limits, seeds=seeds)
    lengths = whole.batch["response_mask"].sum(1).clamp(max=torch.tensor(limits)).tolist()
    assert cut.batch["response_mask"].sum(1).tolist() == lengths
    for i, n in enumerate(lengths):
        assert cut.batch["responses"][i, :n].equal(whole.batch["responses"][i, :n])
    assert cut.non_tensor_batch["max_response_length"].tolist() == limits
    with pytest.raises(InputError, match="a response is longer than its limit: generate must keep row_limits"):
        check_lengths(whole, limits, "mine")


def test_a_response_begins_with_the_tokens_that_it_is_given(engine_and_model):
    """Greedy, the rest is what it was without them, the likeliest tokens. Given tokens are not trained and have no
    log-prob."""
    engine, model = engine_and_model
    rollouts, greedy = rollouts_of(engine), Sampling(8, temperature=0)
    whole = rollouts.generate(prompts_of_step(), sampling=greedy)
    lengths = whole.batch["response_mask"].sum(1).tolist()
    for row, mask, n in zip(whole.batch["input_ids"], whole.batch["attention_mask"].bool(), lengths):
        likeliest = model(input_ids=row[mask][None]).logits[0].argmax(-1)
        assert likeliest[-n - 1 : -1].equal(row[mask][-n:])
    begun = [0, 1, 5]
    assert all(n > k for n, k in zip(lengths, begun))
    prefixes = [row[:k] for row, k in zip(whole.batch["responses"].tolist(), begun)]
    rest = rollouts.generate(prompts_of_step(), sampling=greedy, prefixes=prefixes)
    given = torch.arange(8) < torch.tensor(begun)[:, None]
    assert rest.batch["given_mask"].equal(given.long())
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids"):
        assert rest.batch[name].equal(whole.batch[name]), name
    assert rest.batch["response_mask"].equal(whole.batch["response_mask"] * ~given)
    expected = whole.batch["rollout_log_probs"].masked_fill(given, 0)
    torch.testing.assert_close(rest.batch["rollout_log_probs"], expected, rtol=0, atol=1e-4)
    assert rest.non_tensor_batch["finish_reason"].tolist() == whole.non_tensor_batch["finish_reason"].tolist()
    for wrong in ([[1]] * 2, [[1]] * 2 + [[1] * 8]):
        with pytest.raises(InputError, match="each response needs a prefix, shorter than its limit"):
            rollouts.generate(prompts_of_step(), prefixes=wrong)


def test_given_responses_are_rows_like_sampled_ones(engine_and_model):
    """The same tokens, given: all columns are those of the sampled rows, but for what says that no engine sampled them.
    The last prompt has an empty response."""
    engine, model = engine_and_model
    rollouts = rollouts_of(engine)
    sampled = rollouts.generate(prompts_of_step(), n=2)
    texts = [ids[:n] for ids, n in zip(sampled.batch["responses"].tolist(), sampled.batch["response_mask"].sum(1))]
    given = rollouts.given(sampled, texts)
    assert given.batch.keys() == {*sampled.batch.keys(), "given_mask"}
    assert given.non_tensor_batch.keys() == sampled.non_tensor_batch.keys()
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"):
        assert given.batch[name].equal(sampled.batch[name]), name
    assert given.batch["given_mask"].equal(sampled.batch["response_mask"])
    assert not given.batch["rollout_log_probs"].any() and given.batch["policy_version"].tolist() == [-1] * 6
    log_probs, _ = response_log_probs(model, given, 1.0)
    torch.testing.assert_close(log_probs, sampled.batch["rollout_log_probs"], rtol=0, atol=1e-4)
    masked = rollouts.given(sampled[[0, 5]], [texts[0], []], masks=[[0] * (len(texts[0]) - 1) + [1], []])
    assert masked.batch["response_mask"].sum(1).tolist() == [1, 0]
    both = concat_rows([sampled, masked])
    assert both.batch["given_mask"].sum(1).tolist() == [0] * 6 + [len(texts[0]), 0]
    policy = Policy.__new__(Policy)
    policy.checked, policy.checks = True, SimpleNamespace()
    begun = rollouts.generate(sampled[:1], prefixes=[texts[0][:2]])
    both = concat_rows([both, begun, begun])
    both.batch["response_mask"][-1] |= both.batch["given_mask"][-1]
    policy.check_rows(both)
    assert both.batch["is_fresh"].tolist() == [True] * 6 + [False] * 2 + [True, False]
    with pytest.raises(InputError, match="a response of 9 tokens; --max-response-length is 8"):
        rollouts.given(sampled[:1], [[5] * 9])


def test_a_rank_may_have_no_prompt(engine_and_model):
    engine, _ = engine_and_model
    rollouts, prompts = rollouts_of(engine), prompts_of_step()
    whole = rollouts.generate(prompts)
    none = [rollouts.generate(prompts[[]], n=4), rollouts.given(prompts[[]], [])]
    for batch in none:
        assert len(batch) == 0 and {*batch.batch.keys()} - {"given_mask"} == {*whole.batch.keys()}
    assert concat_rows(none[:1]).batch.keys() == whole.batch.keys()
    assert concat_rows([whole, *none]).batch["given_mask"].sum() == 0


def test_a_run_writes_prompts(engine_and_model):
    """Of the data set's messages they are the data set's; what spells a special token is broken up; roles have uids."""
    engine, _ = engine_and_model
    data = RLHFDataset(f"{ROOT}/data/toy/val.jsonl", load_tokenizer(TOY_MODEL), max_prompt_length=24, max_samples=3)
    prompts = DataProto.from_single_dict(collate_fn([data[i] for i in range(3)]))
    prompts.non_tensor_batch |= {"uid": np.array(["1-0", "1-1", "1-0"], object), ROW: np.array([7, 8, 7], object)}
    rollouts = rollouts_of(engine)
    rollouts.loader = SimpleNamespace(dataset=SimpleNamespace(dataset=data))
    rows = rollouts.generate(prompts)
    again = rollouts.new_prompts(rows, list(prompts.non_tensor_batch["raw_prompt"]))
    for ours, theirs in ((again.batch, prompts.batch), (again.non_tensor_batch, prompts.non_tensor_batch)):
        assert {name: x.tolist() for name, x in ours.items()} == {name: x.tolist() for name, x in theirs.items()}
    said = [[{"role": "user", "content": text}] for text in ("1+2=", "<eos>", "3+4=")]
    written = rollouts.new_prompts(rows, said, role="solver")
    assert written.non_tensor_batch["uid"].tolist() == ["1-0-solver-0", "1-1-solver-0", "1-0-solver-1"]
    assert written.non_tensor_batch[ROW].tolist() == [None] * 3
    ends = [ids.count(data.tokenizer.eos_token_id) for ids in written.non_tensor_batch["raw_prompt_ids"]]
    assert ends == [ends[0]] * 3  # those of the template
    assert "1+2=" in data.tokenizer.decode(written.non_tensor_batch["raw_prompt_ids"][0])
    assert len(rollouts.new_prompts(rows[[]], [], role="solver")) == 0
    with pytest.raises(InputError, match=r"rollouts.new_prompts: prompt of .* tokens, max_prompt_length=24; raise"):
        rollouts.new_prompts(rows[:1], [[{"role": "user", "content": "1+" * 20}]])
    rollouts.loader.dataset.dataset = [1]
    with pytest.raises(InputError, match=r"rollouts.new_prompts: list has no prompt_columns"):
        rollouts.new_prompts(rows[:1], said[:1])


@pytest.mark.parametrize("long_prompt", [0, hf_engine.LONG_PROMPT], ids=["kept once", "copied"])
def test_hf_spends_no_step_on_finished_rows_and_one_prefill_on_a_group(world, tmp_path, monkeypatch, long_prompt):
    """Of long prompts, keys and values are held once, and as long as a row of the group runs."""
    monkeypatch.setattr(hf_engine, "LONG_PROMPT", long_prompt)
    engine, model = build("hf", save_tiny(tmp_path / "model"), tmp_path / "engine")
    rows, prompts = [], []

    def record(_, __, kwargs):
        rows.append(len(kwargs["input_ids"]))
        layers = getattr(kwargs[cache_keyword(model)], "layers", [])
        prompts.extend((len(x.prompt_keys), len(x.prompt_values)) for x in layers if isinstance(x, GroupLayer))

    model.register_forward_pre_hook(record, with_kwargs=True)
    out = engine.generate(random_prompts(6, copies=2), Sampling(60), request_seeds(1, 6, list(range(12))))
    lengths = out.batch["response_mask"].sum(1).view(2, 6)
    runs = [lengths > t for t in range(1, int(lengths.max()))]
    assert rows == [6, *(int(running.sum()) for running in runs)]  # 6 distinct prompts
    groups = [int(running.any(0).sum()) for running in runs]
    assert prompts[::2] == prompts[1::2] == [(n, n) for n in groups if long_prompt == 0]
    assert len({*rows}) > 3 and len({*groups}) > 1


MISTRAL = {"cls": transformers.MistralForCausalLM, "config": transformers.MistralConfig}
GEMMA3 = {"cls": transformers.Gemma3ForCausalLM, "config": transformers.Gemma3TextConfig, "head_dim": 32}
DECODERS = {
    "qwen2, tied": {},
    "llama, untied, gqa": {"cls": transformers.LlamaForCausalLM, "config": transformers.LlamaConfig, "tied": False},
    "window shorter than prompts": MISTRAL | {"sliding_window": 6},
    "window longer than prompts": MISTRAL | {"sliding_window": 40},
    "both": GEMMA3 | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("decoder", with_slow(DECODERS, "qwen2, tied", *(k for k in DECODERS if "window" in k)))
def test_a_prompts_keys_and_values_kept_once_change_no_sample(world, tmp_path, decoder, monkeypatch):
    """Against the cache of transformers, which has a copy a row, and against the loss's own forward.

    fp32, 80 tokens, more than the buffers' first room, two layers: 1e-5 is 100 roundings."""
    monkeypatch.setattr(hf_engine, "LONG_PROMPT", 0)
    engine, model = build("hf", save_tiny(tmp_path / "model", **DECODERS[decoder]), tmp_path / "engine")
    texts = [list(ids) for ids in random_prompts(6).non_tensor_batch["raw_prompt_ids"]]
    mixed = prompts_of([*texts[:3] * 3, *texts[3:]])  # three groups, three rows of their own
    equal = prompts_of([[9 + i, *range(20, 30)] for i in range(4)] * 3)  # no padding, hence no mask
    kept, longest = [], 0
    model.register_forward_pre_hook(lambda _, __, kw: kept.append(kw[cache_keyword(model)]), with_kwargs=True)
    for prompts in (mixed, equal):
        seeds = request_seeds(1, 7, list(range(len(prompts))))
        out = engine.generate(prompts, Sampling(80, 0.8), seeds)
        assert isinstance(kept[-1], GroupCache)
        longest = max(longest, int(out.batch["response_mask"].sum(1).max()))
        log_probs, _ = response_log_probs(model, out, 0.8)
        assert (log_probs - out.batch["rollout_log_probs"]).abs().max() < 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(hf_engine, "can_group", lambda *_: False)
            plain = engine.generate(prompts, Sampling(80, 0.8), seeds)
        assert isinstance(kept[-2], DynamicCache)
        assert torch.equal(out.batch["responses"], plain.batch["responses"])
        assert (out.batch["rollout_log_probs"] - plain.batch["rollout_log_probs"]).abs().max() < 1e-5
    assert longest > ROOM


def test_attention_that_cannot_be_joined_keeps_a_copy_a_row(world, tmp_path, monkeypatch):
    """Capped scores, and attention that is not packed_sdpa; what swallows the keyword is refused."""
    capped = {"cls": transformers.Gemma2ForCausalLM, "config": transformers.Gemma2Config, "head_dim": 32}
    for folder, more, attention in (("a", {}, "eager"), ("b", capped, "packed_sdpa")):
        model = load_model(save_tiny(tmp_path / folder, **more), attn_implementation=attention)
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.arange(9, 12)[None], **{cache_keyword(model): cache})
        assert not can_group(model, cache)
    monkeypatch.setattr(hf_engine, "LONG_PROMPT", 0)
    engine, _ = build("hf", str(tmp_path / "a"), tmp_path / "engine")
    swallow = lambda *args, group_cache=None, **kwargs: sdpa_attention_forward(*args, **kwargs)  # noqa: E731
    # set back by its mapping, it would hide what later tests register
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "packed_sdpa", swallow)
    with pytest.raises(InputError, match="takes no keyword arguments"):
        engine.generate(random_prompts(3), Sampling(8), [1, 2, 3])


# ---- requests that come and go -------------------------------------------------------------------
def drain(engine, wanted: int) -> dict:
    done = {}
    while len(done) < wanted:
        done |= engine.step()
    return done


def test_a_request_is_sampled_as_generate_samples_it(engine_and_model):
    """Whenever it comes, with its own limit and settings."""
    engine, _ = engine_and_model
    prompts, seeds = random_prompts(9), request_seeds(1, 8, list(range(9)))
    ids = prompts.non_tensor_batch["raw_prompt_ids"]
    samplings = [Sampling([3, 8, 14][i % 3], [1.0, 0.5][i % 2]) for i in range(9)]
    state = torch.get_rng_state()
    with engine.session():
        for i in range(5):
            engine.submit(str(i), ids[i], samplings[i], seeds[i])
        done = engine.step()
        for i in range(5, 9):
            engine.submit(str(i), ids[i], samplings[i], seeds[i])
        done |= drain(engine, 9 - len(done))
    assert torch.equal(torch.get_rng_state(), state) and len(done) == 9
    for i, sampling in enumerate(samplings):
        alone = engine.generate(prompts[[i]], sampling, [seeds[i]])
        n, got = int(alone.batch["response_mask"].sum()), done[str(i)]
        assert got.token_ids == alone.batch["responses"][0, :n].tolist()
        assert got.finish_reason == alone.non_tensor_batch["finish_reason"][0]
        # float32, batched otherwise: logits are some tens here, so 1e-4 is twenty roundings
        assert got.log_probs == pytest.approx(alone.batch["rollout_log_probs"][0, :n].tolist(), abs=1e-4)


def test_no_request_outlives_its_abort_or_its_session(engine_and_model):
    engine, model = engine_and_model
    ids, sampling = random_prompts(4).non_tensor_batch["raw_prompt_ids"], Sampling(8)
    model.train()
    with pytest.raises(KeyboardInterrupt), engine.session():
        for i in range(3):
            engine.submit(str(i), ids[i], sampling, i)
        if not engine.long_steps:
            engine.step()
        raise KeyboardInterrupt
    assert model.training
    if engine.long_steps:  # hf: sharded again
        assert all(isinstance(p, DTensor) for p in model.parameters())
    with engine.session():
        for i in (2, 3):
            engine.submit(str(i), ids[i], sampling, i)
        engine.abort("2")
        assert set(drain(engine, 1)) == {"3"}
    if not engine.long_steps:
        assert not engine.llm.llm_engine.has_unfinished_requests()


# ---- the scheduler for rollouts ------------------------------------------------------------------
def schedule_by(engine, patch, queue: int, own: bool) -> None:
    """Lets vLLM's scheduler, or ours for rollouts, run, with so many steps in flight."""
    scheduling = importlib.import_module("lib.rollout.rollout_scheduler")
    core = engine.llm.llm_engine.engine_core.engine_core
    engine._finish_steps()
    if queue == 1:
        patch.setattr(core, "batch_queue", None)
        patch.setattr(core, "step_fn", core.step)
    name = ("Async" if queue == 2 else "") + ("RolloutScheduler" if own else "Scheduler")
    patch.setattr(core.scheduler, "__class__", getattr(scheduling, name))


def play(engine, free_blocks: int) -> tuple[list, Counter]:
    """What each of 30 requests got, and in which step. They come and are aborted in between, and some go on as an
    agent's next turn does. And counts of the scheduler."""
    llm, scheduler, counts = engine.llm.llm_engine, engine._scheduler, Counter()
    pool, preempt = scheduler.kv_cache_manager.block_pool, scheduler._preempt_request
    assert engine.llm.reset_prefix_cache()
    held = pool.get_new_blocks(pool.get_num_free_blocks() - free_blocks)
    prompts, texts = random_prompts(30).non_tensor_batch["raw_prompt_ids"], {}

    def add(i: int, ids: list[int], turn: int = 0) -> None:
        more = {} if i % 7 == 3 else {"logprobs": 0}
        if i == 25:
            more |= {"stop": ["a"], "include_stop_str_in_output": True}
        texts[f"{i} {turn}"] = ids
        limit = min(1 + 13 * i % 60, 127 - len(ids))
        params = engine._params(limit, temperature=1.0, seed=100 * turn + i, **more)
        llm.add_request(f"{i} {turn}", {"prompt_token_ids": ids}, params)

    def count_preempted(request, *args, **kwargs):
        counts["preempted"] += 1
        preempt(request, *args, **kwargs)

    came, ended, step = 0, [], 0
    with pytest.MonkeyPatch.context() as patch, engine._sampling():
        patch.setattr(scheduler, "_preempt_request", count_preempted)
        while came < 30 or llm.has_unfinished_requests():
            arrive = {0: 16, 7: 22, 20: 28, 30: 30}.get(step, came)
            for i in range(came, arrive):
                add(i, prompts[i])
            came = arrive
            if step == 11:
                llm.abort_request(["5 0", "14 0", "20 0"])
            for output in llm.step():
                out, i = output.outputs[0], int(output.request_id.split()[0])
                values = (out.logprobs.logprobs, out.logprobs.ranks, out.logprobs.token_ids) if out.logprobs else ()
                result = (step, output.request_id, *out.token_ids), values, out.finish_reason, out.stop_reason
                ended.append((*result, output.num_cached_tokens))
                text = [*texts[output.request_id], *out.token_ids]
                if output.request_id.endswith(" 0") and i % 3 == 0 and len(text) < 100:
                    add(i, [*text, *prompts[i]][:126], turn=1)
            step += 1
        counts |= {"steps": scheduler.steps, "fallback": scheduler.fallback_steps}
    pool.free_blocks(held)
    return ended, counts


@pytest.mark.parametrize(("queue", "free_blocks"), with_slow([(2, 20), (1, 200), (1, 20), (2, 200)], (1, 20), (2, 200)))
def test_the_scheduler_for_rollouts_changes_nothing(engine_and_model, monkeypatch, queue, free_blocks):
    """Tokens, log-probs, ranks, reasons, the step in which a request ends and what it found in the prefix cache, to the
    bit; also with a cache that is too small for all."""
    engine, _ = engine_and_model
    if not isinstance(engine, VLLMEngine):
        pytest.skip("of vLLM")
    assert type(engine._scheduler).__name__ == "AsyncRolloutScheduler"
    assert engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 300  # as --vllm-kwargs says
    found = []
    for own in (False, True):
        with monkeypatch.context() as patch:
            schedule_by(engine, patch, queue, own)
            found.append(play(engine, free_blocks))
            engine._finish_steps()
    (expected, before), (got, counts) = found
    assert got == expected
    reasons = Counter(reason for *_, reason, _, _ in got)
    assert min(reasons["stop"], reasons["length"]) > 3 and any(cached for *_, cached in got) and len(got) > 30
    assert before["preempted"] == counts["preempted"] and (counts["preempted"] > 3) == (free_blocks == 20)
    assert 0 < counts["fallback"] < 0.7 * counts["steps"]
    assert not engine._scheduler._rows


def test_other_requests_are_left_to_vllms_scheduler(engine_and_model):
    engine, _ = engine_and_model
    if not isinstance(engine, VLLMEngine):
        pytest.skip("of vLLM")
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

    llm, scheduler = engine.llm.llm_engine, engine._scheduler
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    special = {"stop": ["a"]}, {"logprobs": 2}, {"repetition_detection": detection}
    for settings in ({}, {"logprobs": 0, "min_tokens": 3, "top_p": 0.5, "repetition_penalty": 1.1}, *special):
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
            params = engine._params(8, **settings)
            params.output_kind = kind
            llm.add_request("a", {"prompt_token_ids": [9, 10]}, params)
            whole = settings not in special and kind == RequestOutputKind.FINAL_ONLY
            assert len(scheduler._rows) == whole, (settings, kind)
            llm.abort_request(["a"])
            assert not scheduler._rows


# ---- the sync that is checked --------------------------------------------------------------------
def test_a_skipped_sync_stops_the_run(engine_and_model, monkeypatch):
    engine, model = engine_and_model
    if engine.shares_weights:
        pytest.skip("hf has the trainer's own")
    perturb(model, 1e-6)  # an update too small for any log-prob to tell
    monkeypatch.setattr(engine, "load_weights", lambda *_: setattr(engine, "version", 2))
    with pytest.raises(WeightSyncError, match="version 2 failed"):
        sync_weights(engine, model, 2, tolerance=TOLERANCE)
    engine.version = None
    with pytest.raises(WeightSyncError, match="no weights"):
        engine.generate(random_prompts(1), Sampling(2), [1])


@pytest.mark.in_order  # NaN stays in the cache's blocks, and attention on a CPU multiplies it by 0
def test_log_probs_that_are_not_finite_are_the_policys_fault(engine_and_model):
    """Weights of 1e30, as --lr 1e30 leaves them: each is finite, what is computed from them is not. Embeddings stay, as
    those of tokens that no row has do."""
    engine, model = engine_and_model
    reshard(model)
    weights = [p for name, p in model.named_parameters() if "embed" not in name]
    said = "the policy's log-probs are not finite after step 7: lower --lr"
    with broken(engine, weights, lambda: torch._foreach_mul_(weights, 1e30)), pytest.raises(InputError, match=said):
        sync_weights(engine, model, 7, tolerance=TOLERANCE)
    sync_weights(engine, model, 8, tolerance=TOLERANCE)
    engine.version = None


def test_no_step_runs_while_weights_change(engine_and_model, monkeypatch):
    """On a GPU vLLM starts a step before it has read the one before: here too, by the length of its queue."""
    engine, model = engine_and_model
    if not isinstance(engine, VLLMEngine):
        pytest.skip("of vLLM")
    queue, running = engine.llm.llm_engine.engine_core.engine_core.batch_queue, []
    start = engine.llm.start_weight_update
    monkeypatch.setattr(engine.llm, "start_weight_update", lambda: (running.append(len(queue)), start()))
    for version in (1, 2):
        sync_weights(engine, model, version, tolerance=TOLERANCE)
        engine.generate(random_prompts(6), Sampling(8), [*range(6)])
        assert len(queue) == 1  # a step that no request needs
        with engine.session():
            engine.submit("a", [9, 10, 11], Sampling(8), 1)
            for _ in range(4):
                engine.step()
            assert len(queue) == 1  # the session ends before the request
    with monkeypatch.context() as patch:
        patch.setattr(engine, "can_sleep", True)
        patch.setattr(engine.llm, "sleep", lambda level: running.append(len(queue)))
        engine.sleep()
    assert running == [0, 0, 0]


@pytest.mark.parametrize(("version", "blamed"), [(0, "--model"), (7, "--lr")])
def test_weights_that_are_not_finite_are_named_and_not_sent(engine_and_model, version, blamed, monkeypatch):
    """One number of an embedding that the probe need not read: the engine is not to blame."""
    engine, model = engine_and_model
    reshard(model)
    weight = model.get_input_embeddings().weight
    monkeypatch.setattr(engine, "load_weights", lambda *_: pytest.fail("sent"))
    said = rf"not finite, model\.embed_tokens\.weight.*{blamed}"
    with broken(engine, [weight], lambda: weight[1, 2].fill_(math.nan)), pytest.raises(InputError, match=said):
        sync_weights(engine, model, version, tolerance=TOLERANCE)


def drop_the_last(self, update_info):
    """Takes every tensor, so that the checksum is right, and does not load one."""
    self.model.load_weights(list(update_info.weights)[:-1])


def only_finalize(self):
    """What vLLM does by itself: sinks of gpt-oss, and on a CPU the packed copy of a tied head, stay as they were."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(self.model, self.model_config)


def forget_the_experts(self):
    """What vLLM does by itself: the packed experts of a CPU stay those of the first load."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(self.model)


BROKEN = {
    "tied": ("finish_weight_update", only_finalize),
    "untied": ("receive_weights", drop_the_last),
    "moe": ("start_weight_update", forget_the_experts),
    "gpt_oss": ("finish_weight_update", only_finalize),
    "deepseek_v3": ("start_weight_update", forget_the_experts),
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1}  # as its files say
DEEPSEEK |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 32, "num_key_value_heads": 2}
MODELS: dict[str, dict] = {
    "moe": {"cls": transformers.MixtralForCausalLM, "config": transformers.MixtralConfig, **EXPERTS},
    "gpt_oss": {"cls": transformers.GptOssForCausalLM, "config": transformers.GptOssConfig, "head_dim": 32, **EXPERTS},
    "deepseek_v3": {
        "cls": transformers.DeepseekV3ForCausalLM,
        "config": transformers.DeepseekV3Config,
        **DEEPSEEK,
        **EXPERTS,
    },
}


@pytest.mark.parametrize("kind", with_slow(BROKEN, "untied", "moe", "deepseek_v3", "gpt_oss"))
def test_vllm_sync_reaches_every_weight(world, tmp_path, kind, monkeypatch):
    """Tied head, prefix cache, packed experts, the fused ones and the sinks of gpt-oss; from files, too. An engine that
    took the weights and does not use them is caught."""
    vllm_weights = pytest.importorskip("lib.rollout.vllm_weights")
    from servers.worker import WorkerExtension

    if kind == "deepseek_v3" and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("where the CPU has AMX, vLLM's latent attention computes in bfloat16 only")
    if kind in MODELS:  # vLLM makes the group of experts for the first model of a process only
        groups = importlib.import_module("vllm.distributed.parallel_state")
        monkeypatch.setattr(groups, "_EP", groups._EP or groups._TP)
    path = save_tiny(tmp_path / "model", tied=kind == "tied", **MODELS.get(kind, {}))
    engine, model = build("vllm", path, tmp_path / "engine", max_length=300)
    # prefix caching: the keys of a prompt of more than one block (128) must not survive the update
    long = np.random.default_rng(0).integers(9, 104, size=200).tolist()
    # 200 tokens: DeepSeek's router has near ties, which the rounding of a CPU's kernels decides (3e-4 on a Xeon)
    bound = 1e-3 if kind == "deepseek_v3" else 1e-4

    def sampled() -> list[int]:
        [row] = engine._run([long], [engine._params(8, temperature=1.0, logprobs=0, seed=1)])[0].outputs
        got = torch.tensor([log_probs[token].logprob for token, log_probs in zip(row.token_ids, row.logprobs)])
        own = text_log_probs(model, torch.tensor([*long, *row.token_ids]))[len(long) - 1 :]
        assert (own - got).abs().max() < bound
        return list(row.token_ids)

    sync_weights(engine, model, 0, tolerance=TOLERANCE)
    for version in (1, 2):
        before = sampled()
        perturb(model)
        metrics = sync_weights(engine, model, version, tolerance=TOLERANCE)
        assert metrics["rollout/canary_logp_diff"] < 1e-4 and sampled() != before
        with monkeypatch.context() as patch:
            for name in ("load_weights", "probe_log_probs"):  # no second load; the metrics are those of the first
                patch.setattr(engine, name, None)
            assert sync_weights(engine, model, version, tolerance=TOLERANCE) == metrics
    monkeypatch.setattr(engine.llm.llm_engine.vllm_config.load_config, "load_format", "auto")  # as a server has it
    engine.llm.collective_rpc(WorkerExtension.reload_from, args=(path,))
    ids = torch.arange(20, 52)
    own = text_log_probs(load_model(path), ids)
    assert (own - engine.probe_log_probs(ids.tolist())).abs().max() < 1e-4
    monkeypatch.setattr(vllm_weights.DirectEngine, *BROKEN[kind])
    perturb(model)
    with pytest.raises(WeightSyncError, match="does not compute with them"):
        sync_weights(engine, model, 9, tolerance=TOLERANCE)
    close(engine)


def lora_engine(world, folder, dtype, vllm_kwargs=None, rank=4):
    """(engine, its model with adapters that change the log-probs)"""
    pytest.importorskip("vllm")
    model = load_model(save_tiny(folder / "model"), dtype=dtype)
    if rank:
        add_lora(model, rank=rank, alpha=2 * rank, seed=3)
        randomize_lora_b(model)
    model, settings = shard_model(model, make_mesh(world), dtype), {"max_length": 64, "dtype": dtype, "gpu_memory": 0.3}
    (folder / "engine").mkdir()
    more = {"folder": folder / "engine", "more": vllm_kwargs}
    return lib.rollout.make_engine("vllm", model, load_tokenizer(TOY_MODEL), **settings, **more), model


def perturb_adapter(model, size):
    reshard(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.to_local().add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))


def test_vllm_samples_with_adapters_and_with_merged_weights(world, tmp_path, capsys, monkeypatch):
    """After each sync of either kind log-probs are the trainer's (fp32: 1e-4), and the trainer's weights are untouched,
    though vLLM scales B in place."""
    engine, model = lora_engine(world, tmp_path, torch.float32, {"enable_lora": True})
    assert engine.lora_sync == "adapter"
    for version, way in enumerate(["merged", "adapter", "adapter", "merged", "adapter"], 1):
        perturb_adapter(model, 0.1)
        engine.lora_sync = way
        before = lib.rollout.weight_checksum(model, torch.float32, ("base", "adapter"))
        assert sync_weights(engine, model, version, tolerance=TOLERANCE)["rollout/canary_logp_diff"] < 1e-4
        assert (engine._lora is not None) == (way == "adapter")
        out = engine.generate(random_prompts(6), Sampling(8), [*range(6)])
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "handles_rows", False)  # by vLLM's own scheduler
            again = engine.generate(random_prompts(6), Sampling(8), [*range(6)])
        assert all(torch.equal(out.batch[key], again.batch[key]) for key in ("responses", "rollout_log_probs"))
        assert (on_policy(model, out, Sampling(8))[0] - out.batch["rollout_log_probs"]).abs().max() < 1e-4
        with engine.session():  # requests one by one
            engine.submit("a", [9, 10, 11], Sampling(4), 1)
            [row] = drain(engine, 1).values()
        own = text_log_probs(model, torch.tensor([9, 10, 11, *row.token_ids]))[2:]
        assert (own - torch.tensor(row.log_probs)).abs().max() < 1e-4
        assert lib.rollout.weight_checksum(model, torch.float32, ("base", "adapter")) == before
    [held] = engine.llm.collective_rpc("list_loras")
    assert held == {engine._lora.lora_int_id}  # the old ones are gone

    from vllm.lora.request import LoRARequest

    adapter = {name: full_tensor(p.detach()) for name, p in model.named_parameters() if ".lora_" in name}
    write_adapter(tmp_path / "exported", model, adapter)
    engine._lora = LoRARequest("exported", 99, str(tmp_path / "exported"))  # read from its files, as by vllm serve
    own = text_log_probs(model, torch.arange(9, 41))
    assert (own - engine.probe_log_probs([*range(9, 41)])).abs().max() < 1e-4
    engine._lora = None
    assert (own - engine.probe_log_probs([*range(9, 41)])).abs().max() > 0.1  # the adapter counts

    foreign = {f"model.tower.0.q_proj.lora_{x}.weight": torch.ones(4, 64) for x in "AB"}
    with monkeypatch.context() as patch:
        patch.setattr(CheckedStream, "__iter__", lambda self: iter(foreign.items()))
        with pytest.raises(InputError, match=r"vLLM adapts no model\.tower\.0\.q_proj"):
            sync_weights(engine, model, 8, tolerance=TOLERANCE)  # as asked for by enable_lora
    perturb_adapter(model, 1e-6)  # too small for any log-prob to tell
    monkeypatch.setattr(engine, "_load_adapter", lambda model: 0)
    with pytest.raises(WeightSyncError, match="version 9 failed: the engine holds"):
        sync_weights(engine, model, 9, tolerance=TOLERANCE)

    def refuse(model):
        raise UnsupportedAdapter("vLLM adapts no x")

    monkeypatch.setattr(engine, "_load_adapter", refuse)
    engine._asks_for_lora = None
    assert sync_weights(engine, model, 10, tolerance=TOLERANCE)["rollout/canary_logp_diff"] < 1e-4
    assert engine.lora_sync == "merged" and "LoRA: vLLM gets merged weights" in capsys.readouterr().out
    close(engine)


def test_adapters_come_by_themselves_where_16_bits_would_round_merged_weights(capsys):
    """One that vLLM has no room for is refused, or merged."""
    pytest.importorskip("vllm")

    def lora(rank=4, name="Qwen2ForCausalLM"):
        config = SimpleNamespace(architectures=[name])
        return SimpleNamespace(config=config, peft_config={"default": SimpleNamespace(r=rank)})

    def way(model, dtype, asked) -> str:
        engine = VLLMEngine.__new__(VLLMEngine)
        engine.dtype, engine._asks_for_lora = dtype, asked
        assert bool(engine._lora_settings(model)) == (engine.lora_sync == "adapter")
        return engine.lora_sync

    assert way(lora(), torch.bfloat16, None) == way(lora(), torch.float32, True) == "adapter"
    assert way(lora(), torch.float32, None) == way(lora(), torch.bfloat16, False) == "merged"
    assert way(SimpleNamespace(), torch.bfloat16, None) == "merged"  # without LoRA
    assert adapter_settings(lora(20)) == {"enable_lora": True, "max_lora_rank": 32, "max_loras": 1}
    large, unknown = "--lora-rank 600: vLLM takes adapters up to 512", "no LoRA for Unknown"
    for wrong, why in ((lora(600), large), (lora(4, "Unknown"), unknown)):
        with pytest.raises(InputError, match=why):
            way(wrong, torch.float32, True)
        assert way(wrong, torch.bfloat16, None) == "merged" and why in capsys.readouterr().out


@pytest.mark.slow
def test_fp8_weights_are_quantized_anew_at_each_sync(world, tmp_path):
    """fp8_per_channel, the one that vLLM runs on a CPU. A weight of e4m3 has 3 bits after its first: it is at most 1/16
    off, or less than 2^-9 of the channel's scale."""
    engine, model = lora_engine(world, tmp_path, torch.bfloat16, {"quantization": "fp8_per_channel"}, rank=0)
    for version in range(3):
        sync_weights(engine, model, version, tolerance=math.inf, max_mismatch=1.0)
        [held] = engine.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        layer = held.model.layers[1].mlp.down_proj
        held, whole = layer.weight.t().float() * layer.weight_scale, dict(lib.distributed.iter_full_params(model))
        own = whole["model.layers.1.mlp.down_proj.weight"].float()
        assert layer.weight.dtype == torch.float8_e4m3fn
        assert ((held - own).abs() <= own.abs() / 16 + layer.weight_scale * 2**-9).all() and not held.equal(own)
        perturb(model, 0.01)
    said = r"^--max-mismatch 1e-09: engine and trainer differ by k3 = \S+ nats on the probe after step 7: "
    with pytest.raises(InputError, match=said):
        sync_weights(engine, model, 7, tolerance=math.inf, max_mismatch=1e-9)
    close(engine)


# ---- sampling ------------------------------------------------------------------------------------
def test_positions_and_seeds_are_independent():
    logits, seeds = torch.zeros(4096, 2), torch.tensor(request_seeds(0, 0, list(range(4096))))
    draws = [sample_tokens(logits, Sampling(1), seeds, t)[0].float() * 2 - 1 for t in range(4)]
    for i in range(4):
        for j in range(i):  # correlation of 4096 coin flips: standard deviation 1/64
            assert abs((draws[i] * draws[j]).mean()) < 5 / 64
        assert abs(draws[i].mean()) < 5 / 64
    assert len(set(request_seeds(1, 1, list(range(10**4)))) & set(request_seeds(1, 2, list(range(10**4))))) < 3


def test_every_run_seed_gives_a_stream_of_its_own():
    """Of each seed 16 responses, all different: a collision of 208 draws of 31 bits has a chance of 1e-5. Samples of
    small seeds stay what they were when the curves in docs/ were recorded."""
    assert request_seeds(1, 3, [0, 1, 5, 1000]) == [1865044984, 660049333, 1277585501, 464018202]
    assert request_seeds(32767, -1, [0, 2]) == [214554217, 193460483]
    runs = [0, 1, 32767, 32768, 32769, 65535, 65536, 65537, 2**20, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    streams = [request_seeds(seed, step, list(range(8))) for seed in runs for step in (-1, 7)]
    assert len({seed for stream in streams for seed in stream}) == 16 * len(runs)
    assert all(0 <= seed < 2**31 for stream in streams for seed in stream)
