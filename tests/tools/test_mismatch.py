"""tools/mismatch.py: each planted cause is found by its toggle and claimed by no other, and what the command refuses.

Planted log-probs come from loops over single rows with transformers alone."""

import copy
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lib.model import add_lora, load_model, log_probs_of
from lib.model.log_probs import _of_tokens
from lib.model.vision import cache_keyword
from lib.sampling import Sampling, splitmix64
from tests.common import ROOT, TOY_MODEL, one_line, randomize_lora_b
from tests.mutants.planting import run
from tools import mismatch
from tools.mismatch import Args, Batch, Gap

MIXTURE = str(ROOT / "data/toy_moe/model")
SIZES = ["--prompts-per-step", "4", "--group-size", "4", "--total-steps", "2", "--lr", "3e-3"]
FILTERS = ["--temperature", "0.8", "--top-p", "0.95"]
KERNELS = {"kernels", "batch composition"}  # of each other: a row alone has other kernels than many


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mismatch")
    run("grpo", folder, *SIZES, *FILTERS, "--run-name", "run", "--record", str(folder / "kept"), stop=False)
    return folder


@pytest.fixture(scope="module")
def step(recorded):
    """(the second step's Batch, its report by the command)."""
    kept, split = [], mismatch.split
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch, "split", lambda batch, step: kept.append(batch) or split(batch, step))
        report = mismatch.measure(Args(str(recorded / "run/config.json"), str(recorded / "kept")))
    return kept[0], report


@pytest.fixture
def group():
    """A process group of one, for a split without its command."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def planted(batch: Batch, rows: list[torch.Tensor]) -> mismatch.Report:
    """The report on the batch with these log-probs (n,) of each row's response as the engine's."""
    other = copy.copy(batch)  # it keeps what has been computed
    other.batch = batch.batch.select()
    log_probs = torch.zeros(batch.mask.shape)
    for row, own in zip(log_probs, rows):
        row[: len(own)] = own
    other.batch.batch["rollout_log_probs"] = log_probs
    return mismatch.split(other, 2)


def of_row(model, prompt: list[int], response: list[int], sampling: Sampling, cache=None) -> torch.Tensor:
    """Log-probs of the response by transformers, as filtered by top-p. cache: one token at a time, with it."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        if cache is None:
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        else:
            own = {cache_keyword(model): cache}
            parts = [model(ids[:, : len(prompt)], **own).logits[0, -1:]]
            parts += [model(ids[:, i : i + 1], **own).logits[0] for i in range(len(prompt), len(ids[0]) - 1)]
            logits = torch.cat(parts)
    z, y = logits.double() / sampling.temperature, ids[0, len(prompt) :, None]
    ranked = z.sort(-1, descending=True).values
    before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)  # the probability of all likelier tokens
    least = ranked.masked_fill(before >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
    kept = z >= torch.minimum(least, z.gather(-1, y))
    return z.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, y)[:, 0].float()


def plain_model(state: dict, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    return model.to(dtype).eval()


class RoundedCache(DynamicCache):
    """Keys and values in FP8."""

    def update(self, key_states, value_states, layer_idx, *more, **named):
        fp8 = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states))
        return super().update(*fp8, layer_idx, *more, **named)


def rows_of(batch: Batch, model, sampling=None, prompts=None, cache=None):
    sampling = sampling or batch.trainer.sampling
    rows = zip(prompts or batch.prompts, batch.responses)
    return [of_row(model, p, r, sampling, cache and cache()) for p, r in rows]


def check_claims(report, *causes: str, at_least: float, others: float = 0.1) -> None:
    shares = {row.cause: row.share for row in report.rows if row.share is not None}
    assert {cause for cause, share in shares.items() if share >= at_least} == {*causes}, shares
    assert all(share < others for cause, share in shares.items() if cause not in causes), shares


def test_the_command_reproduces_the_engine_of_the_run(step):
    """To the bit on the machine that wrote this. Elsewhere a kernel may depend on addresses: noise of float32."""
    batch, report = step
    assert (report.step, report.tokens) == (2, int(batch.mask.sum())) and report.gap.mean < 1e-5
    assert report.unexplained.mean < 1e-6 and not report.notes
    rows = {row.cause: row for row in report.rows}
    assert rows["routing"].note == "the model has no experts" and rows["LoRA rounding"].note
    assert rows["staleness"].engine == rows["staleness"].trainer == "version 1"
    start = plain_model({})
    for name, expected in batch.versions[0].items():  # version 0 is the start model
        assert torch.equal(expected, start.get_parameter(name))


def test_table_figure_and_gap(step, tmp_path, monkeypatch, capsys):
    report = step[1]
    monkeypatch.setattr(mismatch, "measure", lambda args: report)
    mismatch.main(Args("config.json", output=str(tmp_path / "out")))
    table = (tmp_path / "out/mismatch.md").read_text()
    assert table in capsys.readouterr().out and table.count("\n| without ") == len(mismatch.CAUSES)
    record = json.loads((tmp_path / "out/mismatch.json").read_text())
    assert record["gap"]["mean"] == report.gap.mean and len(record["rows"]) == len(mismatch.CAUSES)
    assert (tmp_path / "out/mismatch.png").read_bytes().startswith(b"\x89PNG")
    clamped = [0.5, -0.25, 0.0, 20.0]
    gap = Gap.of(torch.tensor([0.5, -0.25, 0.0, 30.0], dtype=torch.float64))
    assert gap.mean == pytest.approx(sum(map(abs, clamped)) / 4) and gap.max == 30
    assert gap.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in clamped) / 4)


def test_stale_weights(step, group):
    batch, _ = step
    report = planted(batch, rows_of(batch, plain_model(batch.versions[0])))
    check_claims(report, "staleness", at_least=0.99)
    assert report.gap.mean > 1e-3 and report.share < 0.01
    assert report.notes == ["staleness: the engine's log-probs are those of version 0; by the flags it is version 1"]


def test_versions_of_each_token_as_of_an_asynchronous_run(step, group):
    """Every second token is of the weights before: the flags say so, and nothing has to be guessed."""
    batch, _ = step
    other = copy.copy(batch)
    vars(other).pop("engine", None)
    other.batch = batch.batch.select()
    versions = torch.arange(batch.mask.shape[1]).expand(batch.mask.shape) % 2
    other.batch.batch["weight_versions"] = versions.where(batch.mask, -1)
    by_version = [rows_of(batch, plain_model(batch.versions[v])) for v in (0, 1)]
    rows = [torch.where(torch.arange(len(a)) % 2 == 0, a, b) for a, b in zip(*by_version)]
    report = planted(other, rows)
    check_claims(report, "staleness", at_least=0.99)
    assert not report.notes and {row.engine for row in report.rows if row.cause == "staleness"} == {"of each token"}


def test_engines_that_differ_in_one_setting(step, group):
    """Log-probs before the sampling filters, and before the temperature too; a prompt without its special tokens; keys
    and values in FP8, where one next to the middle of two numbers is rounded to the other one by other kernels; an
    engine in bfloat16, whose kernels of a row alone are left."""
    batch, _ = step
    tokenizer, model = AutoTokenizer.from_pretrained(TOY_MODEL), plain_model(batch.versions[1])
    prompts = [tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=True)) for ids in batch.prompts]
    for cause, rows, at_least, others in (
        ("sampling filters", rows_of(batch, model, Sampling(16, 0.8)), 0.99, 0.1),
        ("sampling filters", rows_of(batch, model, Sampling(16)), 0.99, 0.1),
        ("tokenization", rows_of(batch, model, prompts=prompts), 0.99, 0.1),
        ("KV-cache dtype", rows_of(batch, model, cache=RoundedCache), 0.8, 0.2),
        ("dtype", rows_of(batch, plain_model(batch.versions[1], torch.bfloat16)), 0.5, 0.2),
    ):
        check_claims(planted(batch, rows), cause, at_least=at_least, others=others)


def test_kernels_of_decoding(step, group, monkeypatch):
    """The engine's attention rounds the query of a token that it decodes to bfloat16."""
    own = copy.copy(step[0])
    own._kept, before = {}, {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "packed_sdpa")}

    def coarse(module, query, key, *more, attend, **named):
        query = query.bfloat16().to(query.dtype) if query.shape[2] == 1 else query
        return attend(module, query, key, *more, **named)

    for name, attend in before.items():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, partial(coarse, attend=attend))
    report = planted(own, rows_of(own, plain_model(own.versions[1]), cache=DynamicCache))
    check_claims(report, "kernels", at_least=0.95)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The Batch of a step of a mixture of experts, with the experts that its engine took."""
    folder, kept = tmp_path_factory.mktemp("mixture"), []
    flags = ["--model", MIXTURE, "--routing-replay", "R3", "--run-name", "run", "--record", str(folder / "kept")]
    run("grpo", folder, *SIZES, *flags, "--total-steps", "1", stop=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch, "split", lambda batch, step: kept.append(batch))
        mismatch.measure(Args(str(folder / "run/config.json"), str(folder / "kept")))
    return kept[0]


@pytest.mark.slow
def test_experts_of_an_engine_that_routes_otherwise(mixture, group):
    """Each token goes to the experts after those that the trainer's routers take."""
    del mixture.trainer  # which takes them, by the flags
    mixture.args.model.routing_replay = "none"
    experts = mixture.batch.non_tensor_batch["routed_experts"]
    for row in experts:
        row.copy_(torch.where(row < 0, row, (row + 1) % 8))
    model = AutoModelForCausalLM.from_pretrained(MIXTURE, attn_implementation="sdpa", dtype=torch.float32).eval()

    def routed(router, recorded, hidden):
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        routes = logits.topk(2).indices
        routes[: len(recorded)] = torch.where(recorded < 0, routes[: len(recorded)], recorded)
        weights = logits.softmax(-1).gather(-1, routes)
        return logits, weights / weights.sum(-1, keepdim=True), routes

    def of(prompt, response, recorded):
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.forward = partial(routed, block.mlp.gate, recorded[:, layer].long())
        return of_row(model, prompt, response, mixture.trainer.sampling)

    report = planted(mixture, [*map(of, mixture.prompts, mixture.responses, experts)])
    check_claims(report, "routing", at_least=0.99)
    assert report.gap.mean > 0.01


@pytest.mark.slow
def test_merged_adapters_in_bfloat16(step, group):
    """W + dW, rounded. The kernels of a row alone leave about as much in bfloat16 as that rounding."""
    own = copy.copy(step[0])
    for name in ("model", "trainer", "engine"):
        vars(own).pop(name, None)
    own.args, own._kept = copy.deepcopy(own.args), {}
    own.args.model.compute_dtype, own.args.rollout.top_p = "bfloat16", 1.0
    own.args.model.lora_rank, own.args.model.lora_alpha = 4, 1.0
    model = add_lora(load_model(TOY_MODEL), rank=4, alpha=1.0, seed=1)
    randomize_lora_b(model)
    own.versions = {1: {name: p.detach().clone() for name, p in model.named_parameters()}}
    merged = {}
    for name, weight in own.versions[1].items():
        if ".lora_" not in name:
            path = name.replace(".base_layer.weight", "")
            A, B = (own.versions[1].get(f"{path}.lora_{x}.default.weight") for x in "AB")
            merged[name.replace(".base_layer", "")] = weight if A is None else weight + B @ A / 4
    report = planted(own, rows_of(own, plain_model(merged, torch.bfloat16)))
    shares = {row.cause: row.share for row in report.rows if row.share is not None}
    assert shares["LoRA rounding"] > 0.3, shares
    assert shares.keys() <= {"LoRA rounding", "dtype", *KERNELS} and shares["kernels"] < 0.2, shares


def test_what_nothing_reproduces_is_unexplained(step, group):
    batch, _ = step
    noise = torch.Generator().manual_seed(0)
    rows = rows_of(batch, plain_model(batch.versions[1]))
    report = planted(batch, [row - torch.rand(len(row), generator=noise) for row in rows])
    check_claims(report, at_least=0.2)
    assert report.share > 0.95


def test_the_engine_hf_has_the_log_probs_of_training_to_the_bit():
    """Given the same logits."""
    logits = 5 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    y = splitmix64(torch.arange(64)) % 1000
    assert torch.equal(log_probs_of(logits, y), _of_tokens(logits.clone(), y[:, None], 1.0, False, None)[1][:, 0])


# ---- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, error",
    [
        ({"config": "nothing.json"}, "--config nothing.json: no such file"),
        ({"replay": "nowhere"}, "--replay nowhere: no config.json there"),
        ({"step": 3}, "step 3 was not recorded"),
        ({"step": -1}, "--step must be at least 0"),
        ({"flags": "--lr fast"}, "lr"),
        ({"script": "README.md"}, "--script README.md"),
        ({"text": "[]"}, "names no script"),
        ({"text": '{"script": 3}'}, "names no script"),
        ({"text": "{"}, "not a JSON"),
        ({"model": "other/model"}, "toy/model', the config has 'other/model'"),
    ],
)
def test_bad_input_is_one_line(recorded, tmp_path, change, error):
    """text: of the config; model: another in it."""
    given = {"config": str(recorded / "run/config.json"), "replay": str(recorded / "kept")} | change
    text, model = given.pop("text", None), given.pop("model", None)
    if text or model:
        config = json.loads((recorded / "run/config.json").read_text()) | {"model": model}
        (tmp_path / "config.json").write_text(text or json.dumps(config))
        given["config"] = str(tmp_path / "config.json")
    with one_line(error):
        mismatch.main(Args(**given))


def test_the_cause_dtype_leaves_a_quantized_engine_as_it_is():
    trainer = mismatch.Setting(
        "bfloat16", "trainer", "together", "own", 0, Sampling(8), "sampled", "apart", "auto", quantization=None
    )
    for kernels, note in (("hf", ""), ("vllm", "not toggled: vLLM quantizes no float32")):
        engine = replace(trainer, kernels=kernels, quantization="fp8")
        other, own = mismatch.agreeing("dtype", engine, trainer)
        assert (other.dtype, own.dtype, other.quantization) == ("float32", "float32", "fp8")
        assert mismatch.why_not("dtype", SimpleNamespace(args=None), engine) == note
