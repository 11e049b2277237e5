"""Vision models: log-probs, values and gradients against the model's own forward over single rows with their images."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaConfig

from lib import InputError
from lib.data import prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import full_tensor, make_mesh, set_gradient_sync, shard_model
from lib.model import (
    add_lora,
    batched_log_probs,
    check_rows,
    check_sequence_parallel,
    check_tensor_parallel,
    freeze,
    load_critic,
    load_model,
    load_processor,
    load_tokenizer,
    response_log_probs,
    response_values,
)
from lib.model.load import decoder_layers
from lib.model.vision import family_of, vision_names
from tests.common import (
    IMAGE,
    MROPE,
    TOY_MODEL,
    VIDEO_ROWS,
    VISION,
    VISION_ROWS,
    VisionRow,
    run_ranks,
    save_tiny,
    tiny_vision,
    tiny_vision_config,
    vision_batch,
    vision_inputs,
    vision_types,
    with_slow,
)

LAYOUTS = {"shared": {}, "packed": {"share_prompts": False}, "padded": {"padding_free": False}}
SPARE = 96  # a token that no row has; its embedding is the placeholder's


def of_kinds(*fast: str) -> list:
    """All kinds, of which make test runs `fast`."""
    return with_slow(VISION, *{*VISION}.difference(fast))


def rows_of(kind: str) -> tuple[VisionRow, ...]:
    return VISION_ROWS + (VIDEO_ROWS if kind in MROPE else ())


def save(kind: str, folder, **options) -> str:
    """A tiny model, saved. A sampled placeholder can stand as SPARE: its own forward would take it for an image."""
    model = tiny_vision(kind, **options)
    embedding = model.get_input_embeddings().weight.data
    embedding[SPARE] = embedding[IMAGE]
    model.save_pretrained(folder)
    return str(folder)


def plain(path: str):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").train()


def frames_as_images(inputs: dict) -> dict:
    """Of a row whose videos follow its images. GLM-4V sees a video as an image for each pair of frames."""
    t, size = inputs["video_grid_thw"][:, 0], inputs["video_grid_thw"].clone()
    size[:, 0] = 1
    grids = torch.cat([inputs["image_grid_thw"], size.repeat_interleave(t, 0)])
    pixels = torch.cat([inputs["pixel_values"], inputs["pixel_values_videos"]])
    return {"pixel_values": pixels, "image_grid_thw": grids}


def of_single_rows(model, batch: DataProto, of_tokens) -> list[torch.Tensor]:
    """of_tokens(the outputs, the ids) for each row alone, by the model's own forward: its results (n - 1,) for tokens 1
    to n - 1, as rows (B, T)."""
    mask = batch.batch["response_mask"]
    T, kind, results = mask.shape[1], model.config.model_type, []
    for i, inputs in enumerate(batch.non_tensor_batch["multi_modal_inputs"]):
        attended = batch.batch["attention_mask"][i].bool()
        ids, sampled = batch.batch["input_ids"][i][attended], mask[i].bool()
        own = torch.cat([torch.zeros(len(attended) - T, dtype=torch.bool), sampled])[attended]
        x = ids.where(~(own & (ids == IMAGE)), SPARE)
        types = vision_types(kind, x.tolist())
        if kind == "glm4v" and len(inputs) == 4:  # images and videos: its own forward takes no such row
            inputs, types = frames_as_images(inputs), types.clamp(max=1)
        more = {"mm_token_type_ids": types} if kind in MROPE else {}
        more |= {"token_type_ids": types} if kind == "gemma3" else {}
        model.base_model.rope_deltas = None
        outputs = model(input_ids=x[None], use_cache=False, output_hidden_states=True, **inputs, **more)
        place = (attended.nonzero()[:, 0] - (len(attended) - T))[own]
        found = [r[own[1:]] for r in of_tokens(outputs, ids)]
        results.append([torch.zeros(T, dtype=r.dtype).index_put((place,), r) for r in found])
    return [torch.stack(rows) for rows in zip(*results)]


def log_probs_and_entropies(outputs, ids):
    log_p = (outputs.logits[0, :-1] / 0.9).log_softmax(-1)
    return log_p.gather(-1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(model, loss) -> dict[str, torch.Tensor]:
    names, params = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad])
    grads = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads)}


def distance(a: dict, b: dict) -> float:
    """Of all gradients, relative."""
    assert a.keys() == b.keys()
    difference, norm = (sum(float(x.square().sum()) for x in xs) for xs in ([a[n] - b[n] for n in a], b.values()))
    return math.sqrt(difference / norm)


def weighted(results) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return sum((torch.randn(r.shape, generator=g, dtype=r.dtype) * r).sum() for r in results)


@pytest.mark.parametrize("kind", of_kinds("qwen3_vl", "glm4v", "gemma3", "idefics3"))
def test_packed_is_shared_is_padded_is_the_models_own_forward_of_each_row(tmp_path, kind):
    """With no image, one, several, videos, equal tokens with other images, and a placeholder sampled as text. Also the
    gradient, of the tower too, with gradient checkpointing."""
    path = save(kind, tmp_path)
    model = load_model(path, dtype=torch.float64, gradient_checkpointing=True)
    own, batch = plain(path), vision_batch(kind, rows_of(kind))
    theirs = of_single_rows(own, batch, log_probs_and_entropies)
    expected = gradients(own, weighted(theirs))
    embedding = next(n for n, p in own.named_parameters() if p is own.get_input_embeddings().weight)
    expected[embedding][IMAGE] += expected[embedding][SPARE]
    expected[embedding][SPARE] = 0
    assert all(expected[n].any() for n in vision_names(own, "projector"))
    for name, options in LAYOUTS.items():
        ours = response_log_probs(model, batch, 0.9, **options)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        # the norms of LLaMA and Qwen cast to fp32 in the backward of shared prompts, in another order of sums, Gemma's
        # and SigLIP's always; GLM-4V's tower interpolates its position embeddings in fp32
        exact = 1e-6 if name == "shared" or kind == "gemma3" else 1e-8 if kind == "glm4v" else 1e-13
        assert distance(gradients(model, weighted(ours)), expected) < exact, name


@pytest.mark.parametrize("kind", with_slow(["qwen3_vl", "glm4v", "gemma3", "idefics3"], "glm4v", "idefics3"))
def test_values_are_those_of_single_rows(tmp_path, kind):
    path = save(kind, tmp_path / "model", tied=True)
    critic, own, batch = load_critic(path, dtype=torch.float64), plain(path), vision_batch(kind, rows_of(kind))
    assert not response_values(critic, batch).any()
    critic.score.weight.data.normal_()
    values = lambda outputs, ids: [outputs.hidden_states[-1][0, :-1] @ critic.score.weight[0]]  # noqa: E731
    [theirs], found = of_single_rows(own, batch, values), []
    for options in LAYOUTS.values():
        ours = response_values(critic, batch, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        found.append(gradients(critic, weighted([ours])))
    assert distance(found[0], found[-1]) < 1e-6
    critic.save_pretrained(tmp_path / "critic")
    again = load_critic(str(tmp_path / "critic"), dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), again.parameters(), strict=True))


def count_images(model) -> list[int]:
    """Grows by the number of images of each call of the tower."""
    calls: list[int] = []

    def count(module, args, kwargs):
        images = kwargs["grid_thw"] if "grid_thw" in kwargs else [*args, kwargs.get("pixel_values")][0]
        calls.append(len(images))

    model.get_submodule(family_of(model.config).tower).register_forward_pre_hook(count, with_kwargs=True)
    return calls


@pytest.mark.parametrize("kind", of_kinds("qwen3_vl", "idefics3"))
def test_the_images_of_a_shared_prompt_are_encoded_once(tmp_path, kind):
    """Also with gradient checkpointing, which repeats layers of the decoder."""
    model, batch = load_model(save(kind, tmp_path), gradient_checkpointing=True), vision_batch(kind)
    calls = count_images(model)
    for name, images in (("shared", 4), ("packed", 7), ("padded", 7)):
        calls.clear()
        sum(response_log_probs(model, batch, 1.0, **LAYOUTS[name])).sum().backward()
        assert calls == [images], name
    calls.clear()
    text = batch[[6, 7]]
    text.non_tensor_batch.pop("multi_modal_inputs")
    response_log_probs(model, text, 1.0)
    response_log_probs(model, batch[[6, 7]], 1.0)
    assert calls == []  # no images, no tower


@pytest.mark.parametrize(
    "kind", with_slow(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava"], *MROPE[:2], "glm4v")
)
def test_images_in_the_response_are_a_tools(tmp_path, one_rank, kind):
    """Tokens there that are not sampled: their placeholders follow those of the prompt."""
    path = save(kind, tmp_path)
    model, own = load_model(path, dtype=torch.float64), plain(path)
    batch = vision_batch(kind, (VisionRow(2, 4), VisionRow(2, 4)))
    P, (_, [_, second], _) = batch.batch["prompts"].shape[1], vision_inputs(kind, 2, 4)
    ids = batch.batch["input_ids"]
    cut = second + 4  # the prompt ends before its second image
    for name in ("responses", "prompts", "response_mask"):
        batch.batch.pop(name)
    sampled = torch.cat([torch.zeros(2, cut), batch.batch["attention_mask"][:, P:]], 1).long()
    sampled[:, 0] = 1  # the policy's word before the tool's image
    batch.batch.update({"prompts": ids[:, : P - cut], "responses": ids[:, P - cut :], "response_mask": sampled})
    theirs = of_single_rows(own, batch, log_probs_and_entropies)
    for options in LAYOUTS.values():
        for a, b in zip(response_log_probs(model, batch, 0.9, **options), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    check_rows(model, batch, 1.0, 1000, torch.float32)


# ---- ranks ---------------------------------------------------------------------------------------
def train_on_ranks(world, path: str, rows: list[list[int]]) -> tuple:
    """(gradients, log-probs of rows[rank]), over micro-batches of 40 tokens."""
    model = shard_model(load_model(path, dtype=torch.float64, on_meta=True), make_mesh(world), torch.float64)
    batch = vision_batch(model.config.model_type, rows_of(model.config.model_type))[rows[world.rank]]
    check_rows(model, batch, 1.0, 40, torch.float32)
    log_probs, _ = batched_log_probs(model, batch, 1.0, 40)
    micro_batches, _ = prepare_dynamic_batch(batch, 40, share_prompts=True)
    assert len(micro_batches) > 1
    for i, micro in enumerate(micro_batches):
        set_gradient_sync(model, i == len(micro_batches) - 1)
        (response_log_probs(model, micro, 1.0)[0].square().sum() * world.size).backward()
    grads = {n: torch.zeros(p.shape) if p.grad is None else full_tensor(p.grad) for n, p in model.named_parameters()}
    return grads, log_probs


@pytest.mark.parametrize(
    "kind", with_slow(["qwen2_vl", "qwen3_vl", "glm4v", "gemma3", "llava"], "qwen2_vl", "glm4v", "gemma3", "llava")
)
def test_two_ranks_are_one_where_one_has_no_image(tmp_path, kind):
    """The other rank has all of them. Both check their rows, and run as many micro-batches. Of an export:
    tests/scripts/test_toy_vision.py."""
    path = save(kind, tmp_path / "model", tied=kind == "gemma3")
    model, batch = load_model(path, dtype=torch.float64), vision_batch(kind, rows_of(kind))
    with_images, without = [0, 1, 3, 4, 5, *range(8, len(batch))], [6, 7]
    without = (without * len(with_images))[: len(with_images)]
    rows = [with_images, without]
    whole = batch[with_images + without]
    theirs, _ = response_log_probs(model, whole, 1.0)
    expected = gradients(model, theirs.square().sum())
    results = run_ranks(2, train_on_ranks, path, rows)
    for grads, _ in results:
        assert distance(grads, expected) < 1e-6  # in other groups of rows; norms cast to fp32
    torch.testing.assert_close(torch.cat([x for _, x in results]), theirs.detach(), rtol=1e-11, atol=1e-11)


# ---- what is trained -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", of_kinds("qwen3_vl", "gemma3", "llava"))
def test_parts_of_the_vision_half_have_names(tmp_path, kind):
    model = load_model(save(kind, tmp_path))
    tower, projector = vision_names(model, "tower"), vision_names(model, "projector")
    assert tower and projector and set(tower).isdisjoint(projector)
    names = {n for n, _ in model.named_parameters()}
    language = {n for n in names if n.startswith(("model.language_model.", "model.text_model.", "lm_head."))}
    assert names - language == set(tower + projector) == set(vision_names(model, "vision"))
    for part, frozen in (("tower", tower), ("projector", projector), ("vision", tower + projector)):
        model.requires_grad_(True)
        assert {n for n, p in freeze(model, part).named_parameters() if not p.requires_grad} == set(frozen)
    response_log_probs(model, vision_batch(kind), 1.0)[0].sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == language
    classes = [type(m).__name__ for m in decoder_layers(model)]
    assert len(classes) == 3 and set(classes) < model.fsdp_layer_classes


@pytest.mark.parametrize("kind", with_slow(["qwen2_5_vl", "glm4v", "smolvlm"], "qwen2_5_vl"))
def test_lora_adapts_the_language_part(tmp_path, kind):
    model = add_lora(load_model(save(kind, tmp_path)), rank=2, alpha=4, seed=0)
    adapted = [n for n, p in model.named_parameters() if p.requires_grad]
    of_language = ("model.language_model.", "model.text_model.")
    linear = 6 if kind == "glm4v" else 7  # in each of three layers; GLM-4V's gate_up_proj is one
    assert len(adapted) == 2 * linear * 3 and all(n.startswith(of_language) for n in adapted)
    response_log_probs(model, vision_batch(kind), 1.0)[0].sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(adapted)
    model = add_lora(load_model(str(tmp_path)), rank=2, alpha=4, seed=0, target_modules=r".*(fc1|up_proj)")
    adapted = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not all(n.startswith(of_language) for n in adapted)  # by name it reaches the tower


# ---- refused -------------------------------------------------------------------------------------
def test_placeholders_and_images_that_do_not_match_are_refused(tmp_path):
    model, batch = load_model(save("qwen2_5_vl", tmp_path)), vision_batch("qwen2_5_vl")
    cut = batch[[5]]
    cut.batch["input_ids"][0, (cut.batch["input_ids"][0] == IMAGE).nonzero()[0, 0]] = 7
    with pytest.raises(InputError, match="have 12 features, their prompts 11 placeholder tokens"):
        response_log_probs(model, cut, 1.0)
    batch.non_tensor_batch["multi_modal_inputs"][0] = {}
    with pytest.raises(InputError, match="has placeholders and no images: qwen2_5_vl's placeholder is token 100"):
        response_log_probs(model, batch, 1.0)
    model.config.image_token_id = 99  # another model's
    with pytest.raises(InputError, match="has images and no placeholders: qwen2_5_vl's placeholder is token 99"):
        response_log_probs(model, vision_batch("qwen2_5_vl"), 1.0)


def test_a_vision_model_without_a_processor_runs_on_text(tmp_path):
    path = save("qwen2_5_vl", tmp_path)
    assert load_processor(path) is None
    Path(path, "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    Path(path, "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    load_tokenizer(TOY_MODEL).save_pretrained(path)
    if find_spec("torchvision") is None:
        with pytest.raises(InputError, match=r"cannot load its processor: it needs torchvision: install it$"):
            load_processor(path)
    else:
        assert load_processor(path).image_processor is not None


def test_what_a_model_takes_is_known_by_its_config(tmp_path):
    """A text model no images; Pixtral is no family; a tower's dropout is off. Gemma's attention: test_varlen.py."""
    model, batch = load_model(save_tiny(tmp_path)), vision_batch("llava")
    with pytest.raises(InputError, match="model type qwen2 supports no images; supported: qwen2_vl"):
        response_log_probs(model, batch, 1.0)
    response_log_probs(model, batch[[6, 7]], 1.0)
    assert load_processor(str(tmp_path)) is None
    assert family_of(LlavaConfig(vision_config={"model_type": "pixtral"})) is None
    assert family_of(LlavaConfig(vision_config={"model_type": "siglip_vision_model"})) is not None
    config = tiny_vision_config("idefics3")
    config.vision_config.attention_dropout = 0.5
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "dropout")
    assert load_model(str(tmp_path / "dropout")).config.vision_config.attention_dropout == 0


def test_images_are_not_split_over_ranks(tmp_path):
    path = save("idefics3", tmp_path)
    for check, flag in ((check_sequence_parallel, "sequence"), (check_tensor_parallel, "tensor")):
        check(path, 1)
        with pytest.raises(InputError, match=f"^--{flag}-parallel-size 2: --model .* drop --{flag}-parallel-size$"):
            check(path, 2)
