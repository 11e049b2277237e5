"""Loading of weights by shards against loading them whole, bit for bit, on 1 and 2 ranks."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lib import InputError
from lib.distributed import full_tensor, make_mesh, shard_model
from lib.model import add_lora, load_critic, load_model, response_log_probs, response_values
from tests.common import rollout_batch, run_ranks, save_tiny, with_slow

PROMPTS, RESPONSES = [3, 7, 5, 5, 2, 7], [4, 1, 9, 6, 6, 8]
MOE = {"cls": transformers.Qwen3MoeForCausalLM, "config": transformers.Qwen3MoeConfig}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def state(world, path, load, on_meta, dtype, lora=False):
    """Names, values and dtypes of all parameters and buffers, what is tied, and what the model computes."""
    torch.manual_seed(world.rank)
    model = load(path, dtype=dtype, on_meta=on_meta)
    was_on_meta = any(p.is_meta for p in model.parameters())
    if lora:
        add_lora(model, rank=4, alpha=8, seed=3)
    model = shard_model(model, make_mesh(world), dtype)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = {name: full_tensor(t.detach()).clone() for name, t in tensors}
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    compute = response_values if load is load_critic else lambda *args: response_log_probs(*args, 1.0)[0]
    with torch.no_grad():
        outputs = compute(model, rollout_batch(PROMPTS, RESPONSES))
    facts = tied, model.training, model.generation_config.eos_token_id if head else None, model.config.to_dict()
    return was_on_meta, values, facts, outputs


def assert_same_by_shards(path, load, dtype=torch.float64, by_shards=True, lora=False):
    [(_, expected, facts, outputs)] = run_ranks(1, state, path, load, False, dtype, lora)
    for size in (1, 2):
        for on_meta, values, other_facts, other_outputs in run_ranks(size, state, path, load, True, dtype, lora):
            assert on_meta == by_shards
            assert list(values) == list(expected) and other_facts == facts
            for name, value in values.items():
                assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
            assert torch.equal(other_outputs, outputs)


LLAMA = {"cls": transformers.LlamaForCausalLM, "config": transformers.LlamaConfig}
GEMMA3 = {"cls": transformers.Gemma3ForCausalLM, "config": transformers.Gemma3TextConfig}
GEMMA3 |= {"head_dim": 32, "sliding_window": 4}
DECODERS = {"tied": {}, "adapters": {}, "untied": {"tied": False}, "llama": LLAMA, "gemma3": GEMMA3}


@pytest.mark.parametrize("decoder", with_slow(DECODERS, "untied", "llama"))
def test_weights_buffers_and_log_probs_are_those_of_a_whole_load(tmp_path, decoder):
    """Trap 9: rotary tables and embedding scales of a model made empty are garbage."""
    path = save_tiny(tmp_path, **DECODERS[decoder])
    transformers.GenerationConfig(eos_token_id=[5, 7]).save_pretrained(path)
    assert_same_by_shards(path, load_model, lora=decoder == "adapters")


@pytest.mark.parametrize("dtype", with_slow([torch.float32, torch.bfloat16], torch.bfloat16))
def test_a_bf16_checkpoint_of_several_files(tmp_path, dtype):
    path = save_tiny(tmp_path / "fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16", max_shard_size="50KB")
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 2
    assert_same_by_shards(str(tmp_path / "bf16"), load_model, dtype)


@pytest.mark.parametrize("has_head", with_slow([False, True], True))
def test_a_critic_with_and_without_its_head(tmp_path, has_head):
    """Two ranks split a head of one row: one of them has none."""
    critic = {"cls": transformers.Qwen2ForTokenClassification, "num_labels": 1}
    assert_same_by_shards(save_tiny(tmp_path, **critic if has_head else {}), load_critic)


def to_bin(path):
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def both_tied_names(path):
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def without_prefix(path):
    weights = {name.removeprefix("model."): w for name, w in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", with_slow([to_bin, *(OTHERS := [both_tied_names, without_prefix])], *OTHERS))
def test_other_files_are_read_whole(tmp_path, change):
    path = save_tiny(tmp_path)
    change(tmp_path)
    assert_same_by_shards(path, load_model, by_shards=False)


def test_experts_that_transformers_fuses_are_read_whole_and_fused_ones_by_shards(tmp_path, capfd):
    """fp32: torch's product of experts has no fp64."""
    path, fused = save_tiny(tmp_path / "model", **MOE), str(tmp_path / "fused")
    transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(fused, save_original_format=False)
    capfd.readouterr()
    assert_same_by_shards(path, load_model, torch.float32, by_shards=False)
    said = capfd.readouterr().out
    assert f"--model {path}: its weights have to be converted: every process reads all of them" in said
    assert_same_by_shards(fused, load_model, torch.float32)
    assert "converted" not in capfd.readouterr().out


def another_width(folder):
    """A config that asks for another than the weights have."""
    path = save_tiny(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(re.sub(r'"intermediate_size": \d+', '"intermediate_size": 80', text))
    return path


WRONG_FILES = [
    (load_model, lambda p: save_tiny(p, cls=transformers.Qwen2Model, tied=False)),
    (load_model, another_width),
    (load_critic, lambda p: save_tiny(p, cls=transformers.Qwen2ForTokenClassification, num_labels=3)),
]


@pytest.mark.parametrize(("load", "save"), WRONG_FILES)
def test_wrong_files_are_refused_in_the_same_line(tmp_path, load, save):
    path, lines = save(tmp_path), []
    for on_meta in (False, True):
        with pytest.raises(InputError) as error:
            load(path, on_meta=on_meta)
        lines.append(str(error.value))
    assert lines[0] == lines[1] and "\n" not in lines[0]
