"""The FLOPs of an update against torch's own count of the operations that run, those of a step by hand."""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import grpo
import ppo
from lib.data import prefix_tree
from lib.model import freeze, load_model, response_log_probs
from lib.model.flops import flops_of, update_flops
from planner.step_flops import StepFlops, flops_of_step
from tests.common import ROOT, VOCAB, parse_flags, rollout_batch, save_tiny, tiny_vision, vision_batch, with_slow
from tests.model.test_models import FAMILIES, OTHERS, STATE, config_of

PROMPTS, RESPONSES = [6, 6, 9, 9], [5, 8, 8, 3]  # 3 + 4 prompts


@pytest.fixture(autouse=True)
def plain_mask(monkeypatch):
    """The counter cannot be told of a tensor subclass."""

    def mask(tokens, seen):
        return torch.ones(tokens, seen).tril(seen - tokens).bool()

    monkeypatch.setattr("lib.model.attention.causal_lower_right", mask)


def counted(model, batch, share_prompts: bool) -> tuple[float, float]:
    """FLOPs of (weights, attention), by torch: batched products are those of attention."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        log_probs, entropy = response_log_probs(model, batch, 1.0, share_prompts=share_prompts)
        (log_probs + entropy).sum().backward()
    by_operation = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in by_operation.items() if "bmm" in name)
    return sum(by_operation.values()) - attention, attention


@pytest.fixture
def model(tmp_path):
    return load_model(save_tiny(tmp_path, tied=False))


@pytest.mark.parametrize("share_prompts", [True, False])
def test_products_are_those_that_torch_counts(model, share_prompts):
    batch = rollout_batch(PROMPTS, RESPONSES)
    batch.batch["input_ids"][1, :9] = batch.batch["input_ids"][0, :9]  # rows 0 and 1 answer the same prompt
    flops = flops_of(model)
    n = float(batch.batch["response_mask"].sum())
    products, _ = counted(model, batch, share_prompts)
    ours = float(update_flops(flops._replace(pair=0), batch, prefix_tree(batch, share=share_prompts)))
    again = n * flops.prediction / 3  # logits are computed a second time in the backward
    assert products == pytest.approx(ours + again, rel=1e-12)


def test_frozen_weights_have_no_gradient_of_their_own(model):
    for p in model.parameters():
        p.requires_grad = False
    model.model.layers[0].mlp.up_proj.weight.requires_grad = True
    a_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert flops_of(model)[:3] == (4 * 2 * a_layer + 2 * 64 * 96, 4 * 64 * VOCAB, 12 * 2 * 64)


FROZEN = {"qwen2_vl": "tower", "qwen3_vl": "", "glm4v": "", "gemma3": "tower", "idefics3": "", "llava": "vision"}


@pytest.mark.parametrize(("kind", "frozen"), FROZEN.items())
def test_products_of_a_tower_are_those_that_torch_counts(tmp_path, kind, frozen):
    """Nearly. An image of a shared prompt is encoded once."""
    tiny_vision(kind, tmp_path)
    model, batch = load_model(str(tmp_path)), vision_batch(kind)
    if frozen:
        freeze(model, frozen)
    flops, n = flops_of(model), float(batch.batch["response_mask"].sum())
    products, _ = counted(model, batch, share_prompts=True)
    text = float(update_flops(flops._replace(pair=0, patch=0), batch, prefix_tree(batch))) + n * flops.prediction / 3
    ours = float(update_flops(flops._replace(pair=0, token=0, prediction=0), batch, prefix_tree(batch)))
    # the lowest layer has no gradient of its input; LLaVA leaves the last layer of its two out
    assert products - text == pytest.approx(ours, rel=0.1 if kind != "llava" else 0.6)


def test_flops_of_a_step_by_hand():
    """Qwen2.5-0.5B has 357.9 M weights in the products of its layers and 136.1 M in its head; 8 groups of 4."""
    words = f"--model {ROOT}/benchmarks/shapes/qwen2.5-0.5b.json --dry-run 1 --max-prompt-length 100"
    words += " --max-response-length 50 --prompts-per-step"

    def flops(script, more: str) -> StepFlops:
        args = parse_flags(script.Args, f"{words} {more}".split())
        return flops_of_step(args)

    def by_hand(weights: int, group_size: int) -> float:
        """Forward and backward of 8 groups, without the head."""
        tokens = 100 + group_size * 49
        pairs = 100 * 101 / 2 + group_size * (49 * 100 + 49 * 50 / 2)
        return 8 * (6 * tokens * weights + 12 * 24 * 896 * pairs)

    layers, head = 357_826_560, 6 * 8 * 4 * 50 * 151_936 * 896
    update, log_probs, again = flops(grpo, "8 --group-size 4")
    assert update == pytest.approx(by_hand(layers, 4) + head, rel=1e-12)
    assert log_probs == again == 0
    _, twice, again = flops(grpo, "8 --group-size 4 --kl-coef 1 --num-mini-batches 2")
    assert twice == pytest.approx(2 * update / 3, rel=1e-12) and again == 0  # old log-probs and the reference's
    twice, _, again = flops(grpo, "8 --group-size 4 --gradient-checkpointing --update-epochs 2")
    assert twice == pytest.approx(2 * update, rel=1e-12)
    assert again == pytest.approx(2 * by_hand(layers, 4) / 3, rel=1e-12)
    _, _, alone = flops(grpo, "8 --group-size 4 --gradient-checkpointing --no-share-prompts")
    assert alone == pytest.approx(4 * by_hand(layers, 1) / 3, rel=1e-12)

    update, log_probs, again = flops(ppo, "8 --gradient-checkpointing --kl-coef 0")
    both = by_hand(layers, 1) + by_hand(layers + 896, 1)  # of policy and critic, which has a head of its own
    assert update == pytest.approx(both + head / 4, rel=1e-12)
    assert log_probs == pytest.approx(update / 3, rel=1e-12)  # old log-probs and values
    assert again == pytest.approx(both / 3, rel=1e-12)


# ---- families ------------------------------------------------------------------------------------
OTHER_PRODUCTS = {  # what is not counted, or not by its weights
    "gemma3n_text": "products of its parallel residual streams",
    "hrm_text": "runs its layers several times",
    "longcat_flash": "some tokens go to experts without weights",
    "inkling_text": "its attention's relative positions are products",
    "axk2 deepseek_v32 glm_moe_dsa hy_v4": "its indexer has no backward",
    "deepseek_v4": "its attention compresses what it sees",
    "llama4_text": "transformers runs all tokens through all experts",
    "diffllama": "two attentions in one",
    "xlstm rwkv mamba falcon_mamba mamba2 recurrent_gemma": "attends to a state or a window",
    "falcon_h1 minimax nemotron_h": "batched products of states are in the same layers or modules",
}
DIFFERS = {family for families in OTHER_PRODUCTS for family in families.split()}


@torch.no_grad()
@pytest.mark.parametrize("family", with_slow([family for family in FAMILIES if family not in DIFFERS], *OTHERS))
def test_products_and_attention_of_a_family_are_those_that_torch_counts(family):
    """Of a forward pass, a third. Eager attention computes the masked half, too. Keys and values differ in size where
    the family has a size for both."""
    config = config_of(family, v_head_dim=24)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(16)[None], use_cache=False)
    batched = {
        place.rpartition(".")[2]: sum(flops for name, flops in by_operation.items() if "bmm" in str(name))
        for place, by_operation in counter.get_flop_counts().items()
        if not re.search(r"\.layers\.[02]\b", place) or family not in STATE  # those layers carry a state
    }
    flops, products = flops_of(model), counter.get_total_flops() - batched["Global"]
    if family in STATE:  # a state takes products that are not counted
        assert 3 * batched["self_attn"] == flops.pair / 2 * 16**2
    else:
        assert 3 * batched["Global"] == flops.pair * 16**2
        assert 3 * products == 16 * (flops.token + flops.prediction)
