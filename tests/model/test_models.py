"""Every family of transformers in tiny form: packed = shared = padded = alone, rollouts, and what is refused."""

import inspect
import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import make_mesh, make_row_group, shard_model
from lib.model import SAMPLED_BY_HF, check_rows, load_model, load_tokenizer, response_log_probs
from lib.model.attention import STATE_LAYERS, packed_attention
from lib.rollout import HFEngine, Sampling, hf_engine, request_seeds
from lib.rollout.weight_sync import CheckedStream
from lib.run.export import export_hf
from planner.meta import kv_bytes_per_token, meta_model
from tests.common import TOY_MODEL, VOCAB, one_line, rollout_batch, run_ranks, with_slow

# fmt: off
SIZES = {  # a config takes of these what it knows
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "sliding_window": 4, "sliding_window_size": 4,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # experts
    "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "num_experts": 4,
    "zero_expert_num": 2, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    # states
    "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_heads": 2, "linear_head_dim": 16, "mamba_n_heads": 4,
    "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
    "state_size": 16, "n_mamba_heads": 1, "use_mamba_kernels": False, "n_groups": 1,
    "chunk_size": 8, "time_step_rank": 4, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
    "lru_width": 64, "attention_window_size": 4, "num_heads": 4,
    # older names
    "n_inner": 96, "ffn_dim": 96, "word_embed_proj_dim": 64, "d_model": 64, "n_heads": 2,
    "n_layers": 4, "rotary_dim": 16,
    # Gemma 3n and 4
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "global_head_dim": 32, "num_global_key_value_heads": 1,
}
# fmt: on
HALF = {"layer_types": ["linear_attention", "full_attention"] * 2}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
# index_topk: more tokens than a row has, see docs/models.md
SPARSE = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
LATENT = {"num_key_value_heads": 2, "head_dim": 16, "qk_head_dim": 32}
OWN = {  # what a family needs beside
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), LATENT | SPARSE),
    **dict.fromkeys(("olmo_hybrid", "qwen3_next"), HALF),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text"), HALF | {"rope_parameters": MROPE}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"n_head": 4},
    "diffllama": {"num_key_value_heads": 2},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0}
    | {"activation_sparsity_pattern": None, "altup_num_inputs": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": HALF | {"num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 4}
    | {"no_rope_layers": [1, 0, 1, 0], "interleave_moe_layer_step": 1, "moe_layers": [0, 1, 2, 3]},
    "longcat_flash": LATENT | {"num_layers": 2, "ffn_hidden_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "nemotron_h": HALF,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1}
    | {"mamba_ngroups": 1, "n_mamba_heads": 4, "attention_head_dim": 64, "adapter_rank": 4, "mamba_headdim": 32},
}

ATTENTION = """
    afmoe apertus arcee aria_text axk1 biogpt bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 diffllama
    dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared
    helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna llama longcat_flash mellum
    minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 youtu
""".split()  # noqa: SIM905  a name a line is a page
STATE = [*sorted(STATE_LAYERS), "qwen3_5"]
BY_REASON = {  # that is printed: families
    "indexed_attention": "axk2 deepseek_v32 glm_moe_dsa hy_v4",
    "sinks, position biases": "bloom codegen gpt_neo gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa"
    " mimo_v2_flash mpt",
    "compressed_sparse_attention": "deepseek_v4",
    "mask of its own": "doge",
    "cannot be exchanged": "falcon",
    "linear_attention": "falcon_mamba mamba minimax",
    "soft caps": "gemma2 vaultgemma",
    "hybrid": "inkling_text",
    "chunked_attention": "llama4_text",
    "no keywords": "nemotron stablelm",
    "packing knows no": "recurrent_gemma",  # its layers are called linear_attention since transformers 5.23
    "recurrent": "rwkv xlstm",
}
PADDED = {family: reason for reason, families in BY_REASON.items() for family in families.split()}

REFUSED = {"bert": "attention is not causal", "phimoe": "draws its experts at random"}
UNTESTED = """
    big_bird bigbird_pegasus bert-generation camembert data2vec-text electra ernie git megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod bart blenderbot blenderbot-small
    marian mbart moshi musicgen musicgen_melody mvp pegasus plbart prophetnet trocr whisper emu3 fuyu gemma3 gemma3n
    gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant got_ocr2 llama4 mllama phi4_multimodal qwen3_5_moe
    qwen4_exp blt cohere_compass_text cpmant ctrl dbrx gpt-sw3 modernbert-decoder openai-gpt qwen4_exp_text reformer
    xglm zamba zaya
    bailing_hybrid beam dots3_note dots3_note_text flint inkling2_text internlm3 iquestcoder kolibri1 lfm3
    moss_transcribe_diarize
""".split()  # noqa: SIM905  encoders; halves of other models; text parts stand above; no tiny config; 5.23's new ones
FAMILIES = [*ATTENTION, *STATE, *PADDED]
# what make test runs: attention (latent, windows, experts, other streams, older names), states, and each reason once
KINDS = {
    *("deepseek_v3", "gemma3_text", "gemma4_text", "gpt2", "llama", "qwen3_moe"),
    *("bamba", "lfm2", "mamba2", "qwen3_5_text"),
    *("doge", "falcon", "gemma2", "gpt_oss", "llama4_text", "recurrent_gemma", "rwkv"),
}
OTHERS = {*FAMILIES} - KINDS


def config_of(model_type: str, **more):
    """A tiny config: of SIZES and `more` what the family knows, by its own names, and what it needs beside."""
    cls, own = CONFIG_MAPPING[model_type], OWN.get(model_type, {})
    if model_type == "qwen3_5":  # as on the hub, with a vision part, which AutoModelForCausalLM leaves out
        return cls(text_config=config_of("qwen3_5_text").to_dict())
    known, names = inspect.signature(cls.__init__).parameters, cls.attribute_map or {}
    settings = {name if name in known else names.get(name): value for name, value in (SIZES | more).items()} | own
    if "layer_types" in known and "layer_types" not in own:
        kinds = list(dict.fromkeys(getattr(cls(), "layer_types", None) or ()))
        settings |= {"layer_types": (4 * kinds)[: (SIZES | more)["num_hidden_layers"]]} if kinds else {}
    return cls(**{name: value for name, value in settings.items() if name in known or name in own})


def save(model_type: str, folder, **more) -> str:
    """A model whose weights have a standard deviation of 0.3: at that of the default start a leak hides."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **more), dtype=torch.float32)
    for p in model.parameters():
        p.data = 0.3 * torch.randn_like(p) if p.dim() > 1 else p.data + 0.1 * torch.randn_like(p)
    model.save_pretrained(folder)
    config_of(model_type, **more).save_pretrained(folder)
    return str(folder)


def load(path: str, **more):
    """By `load_model`, in fp64, which torch's grouped matrix product of experts has not."""
    model = load_model(path, dtype=torch.float64, **more)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def batch_of_groups():
    """Rows 2, 3 and 4 answer one prompt; 0 and 3 are as long as another row."""
    batch = rollout_batch([3, 7, 5, 5, 5, 6], [4, 1, 9, 6, 6, 8])
    batch.batch["input_ids"][3:5, :7] = batch.batch["prompts"][3:5] = batch.batch["prompts"][2]
    return batch


def plain(path: str):
    """transformers' own model, in fp64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def sequences_of(batch: DataProto):
    """(row, flat index of the first response token, ids, trained) of each sequence; trained: of its response tokens."""
    names = ("input_ids", "attention_mask", "position_ids", "response_mask")
    ids, attention, positions, trained = (batch.batch[name] for name in names)
    P = ids.shape[1] - trained.shape[1]
    for row in range(len(ids)):
        columns = attention[row].nonzero()[:, 0].tolist()
        starts = [c for c in columns if positions[row, c] == 0]
        for start, end in zip(starts, [*starts[1:], columns[-1] + 1]):
            begin = max(start, P)
            yield row, begin - P, ids[row, start:end].tolist(), trained[row, begin - P : end - P].bool().tolist()


def logits_of_rows(model, batch):
    """((row, column), the token there, the logits (V,) that predict it) of each trained token, by sequences alone."""
    for row, begin, ids, trained in sequences_of(batch):
        logits, first = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], len(ids) - len(trained)
        for t, is_trained in enumerate(trained):
            if is_trained:
                yield (row, begin + t), ids[first + t], logits[first + t - 1]


def alone(model, batch):
    """Log-probs and entropies (2, B, T), by sequences alone."""
    results = torch.zeros(2, *batch.batch["response_mask"].shape, dtype=torch.float64)
    for at, token, logits in logits_of_rows(model, batch):
        log_p = logits.double().log_softmax(-1)
        results[0][at], results[1][at] = log_p[token], -(log_p.exp() * log_p).sum()
    return results


def with_gradient(model, forward):
    """The results of `forward`, and the gradient of a random combination of them, as one vector."""
    model.zero_grad()
    results = torch.stack([*forward()]).double()
    weights = torch.randn(results.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (results * weights).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return results.detach(), torch.cat([g.flatten() for g in gradients])


def measure(family: str, folder) -> tuple[PreTrainedModel, dict[str, list[float]]]:
    """The model, and for each layout (largest difference from rows alone in nats, that of the gradient over its norm);
    for a model with states also what a packed row would be off without `sequence_rows`."""
    path, batch = save(family, folder), batch_of_groups()
    model, theirs = load(path), plain(path)
    expected, gradient = with_gradient(theirs, partial(alone, theirs, batch))
    off = {}
    for name, options in {"packed": {"share_prompts": False}, "shared": {}, "padded": {"padding_free": False}}.items():
        ours, own = with_gradient(model, partial(response_log_probs, model, batch, 1.0, **options))
        off[name] = [float((ours - expected).abs().max()), float((own - gradient).norm() / gradient.norm())]
    if model.takes_rows:
        model.takes_rows = False
        leaking = torch.stack(response_log_probs(model, batch, 1.0, share_prompts=False))
        off["leak"] = [float((leaking - expected).abs().max())]
    return model, off


@pytest.mark.parametrize("family", with_slow(FAMILIES, *OTHERS))
def test_packed_is_shared_is_padded_is_alone(tmp_path, capfd, family):
    """In fp64, except what transformers computes in fp32, such as norms, rotary tables and states: with these weights,
    results differ by 2e-4 at most (hrm_text), gradients by 5e-4 of their norm (granitemoe). A leak is 0.1 to 10."""
    model, off = measure(family, tmp_path)
    said = [line for line in capfd.readouterr().out.splitlines() if line]
    assert model.padding_free == model.share_prompts == (family not in PADDED)
    assert len(said) == (family in PADDED) and all(PADDED[family] in line for line in said)
    assert all(max(off[layout]) < 1e-3 for layout in ("packed", "shared", "padded"))
    assert ("leak" in off) == (family in STATE) and all(leak > 0.1 for leak in off.get("leak", ()))


def test_every_family_of_transformers_is_listed_here():
    listed = {*FAMILIES, *REFUSED, *UNTESTED}
    assert sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - listed) == []


def conversion(family: str) -> tuple:
    """How its weights are named and shaped otherwise in files, by transformers; () if they are not."""
    conversions = get_checkpoint_conversion_mapping(family) or ()
    return tuple((*part.source_patterns, "to", *part.target_patterns) for part in conversions)


# one of each conversion, tied and untied heads, and the half of a model with a vision part
EXPORTED = sorted({"gpt2", "llama", "qwen3_5", *{conversion(family): family for family in FAMILIES}.values()})

FEW = {"gpt2", "llama", "qwen3_5", "qwen3_moe"}


def exported(world, folder, families):
    """The families of which an export or a sync is not what transformers' save_pretrained writes of the whole model."""
    different, tokenizer = [], load_tokenizer(TOY_MODEL)
    for family in families:
        whole, ours = folder / family / "whole", folder / family / "ours"
        model = AutoModelForCausalLM.from_pretrained(save(family, folder / family))
        with torch.no_grad():
            export_hf(model, tokenizer, ours, max_shard_bytes=1)  # each layer is a file
        untouched = isinstance(model.config.dtype, torch.dtype)  # save_pretrained makes it a string
        model.save_pretrained(whole)
        expected, files = load_file(whole / "model.safetensors"), list(ours.glob("*.safetensors"))
        index = json.loads((ours / "model.safetensors.index.json").read_text())
        weights = {name: weight for file in files for name, weight in load_file(file).items()}
        again, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
        state, synced = model.state_dict(), dict(CheckedStream(model, torch.float32))
        held = dict(model.named_parameters()) if family == "hrm_text" else expected  # whose files join parameters
        if not (
            untouched
            and synced.keys() == held.keys()
            and all(torch.equal(held[name], weight) for name, weight in synced.items())
            and len(files) > 2
            and weights.keys() == expected.keys() == index["weight_map"].keys()
            and all(torch.equal(weights[name], weight) for name, weight in expected.items())
            and all(torch.equal(state[name], weight) for name, weight in again.state_dict().items())
            and not any(info.values())
            and index["metadata"]["total_size"] == sum(weight.nbytes for weight in expected.values())
            and (ours / "config.json").read_text() == (whole / "config.json").read_text()
        ):
            different.append(family)
    return different


@pytest.mark.parametrize(
    "families", [sorted(FEW), pytest.param(sorted({*EXPORTED} - FEW), marks=pytest.mark.slow)], ids=["few", "others"]
)
def test_an_export_in_files_holds_what_save_pretrained_writes_at_once(tmp_path, families):
    assert run_ranks(1, exported, tmp_path, families) == [[]]


def checkpointed(model, batch):
    log_probs = response_log_probs(model, batch, 0.8)[0]
    other = response_log_probs(model, batch[[1, 0, 2]], 0.8)[0]  # two micro-batches wait for their backward
    (log_probs.square().sum() + other.sum()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("family", with_slow(["qwen3_5_text", "recurrent_gemma", "zamba2"], "recurrent_gemma"))
def test_gradient_checkpointing_repeats_the_rows_of_its_own_micro_batch(tmp_path, family):
    path, batch = save(family, tmp_path), batch_of_groups()
    expected, ours = (checkpointed(load(path, gradient_checkpointing=on), batch) for on in (False, True))
    assert (ours - expected).norm() < 1e-9 * expected.norm()  # the same roundings in another order of sums


def test_a_state_is_no_cache_that_grows_with_tokens(tmp_path):
    """Two of four layers have keys and values of one head of 32 numbers."""
    model = meta_model(AutoModelForCausalLM, save("qwen3_5_text", tmp_path), "--model", torch.float32)
    assert kv_bytes_per_token(model) == 2 * 2 * 32 * 4


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize("family", REFUSED)
def test_a_model_whose_tokens_depend_on_later_ones_or_on_chance_is_refused(tmp_path, family):
    with one_line(f"--model .*{REFUSED[family]}"):
        load_model(save(family, tmp_path))
    with pytest.raises(InputError, match="sdpa ignores the soft caps"):
        load_model(save("gemma2", tmp_path), attn_implementation="sdpa")


# ---- rollouts ------------------------------------------------------------------------------------
def prompts_of(lengths: list[int]) -> DataProto:
    """Random left-padded prompts, each three times."""
    batch = rollout_batch(lengths, [1] * len(lengths)).repeat(3)
    P = max(lengths)
    tensors = {name: batch.batch[name][:, :P] for name in ("input_ids", "attention_mask", "position_ids")}
    raw = [ids[mask.bool()].tolist() for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"])]
    prompts = np.fromiter(raw, dtype=object, count=len(raw))
    return DataProto.from_dict(tensors=tensors, non_tensors={"raw_prompt_ids": prompts})


def rollout(world, path):
    hf_engine.LONG_PROMPT = 0  # prompts are kept once wherever the cache allows it
    model = shard_model(load_model(path), make_mesh(world), torch.float32)
    engine = HFEngine(model, load_tokenizer(TOY_MODEL))
    batch = engine.generate(prompts_of([2, 9, 5]), Sampling(12, 0.7), request_seeds(1, 1, list(range(9))))
    with torch.no_grad():
        alone = [response_log_probs(model, batch[[i]], 0.7, padding_free=False)[0] for i in range(9)]
    return batch.batch["rollout_log_probs"], torch.cat(alone), batch.batch["response_mask"]


NOT_AS_CACHED = ["deepseek_v3", "diffllama", "jetmoe"]  # attention to other keys than those in the cache
SAMPLED = [*sorted(SAMPLED_BY_HF), *NOT_AS_CACHED, "gemma2", "gemma3_text", "gpt_oss", "llama", "llama4_text", "bloom"]


@pytest.mark.parametrize("family", with_slow(SAMPLED, *OTHERS, "bamba", "gemma2"))
def test_hf_samples_from_the_policy_that_is_trained(tmp_path, family):
    """Also prompts shorter than a convolution. qwen3_next differs by 1e-4 in fp32, padding in a state by 1 and more."""
    [(sampled, alone, mask)] = run_ranks(1, rollout, save(family, tmp_path))
    assert (sampled - alone).abs().max() < 1e-3 and mask.sum(1).max() > 6


STATES = ["mamba", "minimax", "nemotron_h", "recurrent_gemma", "rwkv", "xlstm", "zamba2"]


@pytest.mark.parametrize("family", with_slow(STATES, *{*STATES} - {"nemotron_h", "rwkv"}))
def test_hf_refuses_states_that_it_would_not_carry_right(tmp_path, family):
    with one_line("--rollout-engine hf does not know"):
        HFEngine(load_model(save(family, tmp_path)), load_tokenizer(TOY_MODEL))


# ---- the check of the first step -----------------------------------------------------------------
def checked(world, path, fault, dtype, split):
    """The refusal, if any, of `check_rows` on this rank."""
    model = load(path)
    if fault == "leak":
        model.takes_rows = False
    if fault == "scale":  # packed attention that is not the model's
        # not `register`: that one is hidden by what a monkeypatch has set and set back before
        ALL_ATTENTION_FUNCTIONS["packed_sdpa"] = lambda *x, scaling, **more: packed_attention(
            *x, scaling=scaling * (2 if "packed_runs" in more else 1), **more
        )
    mesh = make_mesh(world)
    model = shard_model(model, mesh, torch.float64)
    batch = batch_of_groups()[list(range(world.rank, 6, world.size))]
    try:
        tokens = 200 if split == 1 else 8  # of a rank: one row in all, and so no row of one of two ranks
        check_rows(model, batch, 0.8, tokens, dtype, make_row_group(world, mesh, split))
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("family", "fault", "found", "dtype", "size", "split"),
    [
        ("lfm2", "", None, torch.float32, 2, 1),
        ("llama", "", None, torch.float32, 2, 2),
        ("gemma2", "", None, torch.float32, 1, 1),
        ("lfm2", "leak", "depend on neighbouring rows", torch.float32, 2, 1),
        ("llama", "scale", "differ from those of the row alone", torch.bfloat16, 2, 1),
    ],
)
def test_rows_that_are_not_their_own_are_found_on_every_rank(tmp_path, family, fault, found, dtype, size, split):
    for said in run_ranks(size, checked, save(family, tmp_path), fault, dtype, split):
        assert said is None if found is None else found in said and said.endswith("set --attn-implementation eager")
