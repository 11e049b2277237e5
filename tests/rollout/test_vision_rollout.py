"""Prompts with images in the engines: hf in all families of models, vLLM (real, on the CPU) with an Idefics3."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma3ForConditionalGeneration, Idefics3Config, Idefics3ForConditionalGeneration

from data.toy_vision import make_processor
from lib import InputError
from lib.data.vision import Vision, media_hash, media_of
from lib.data_proto import DataProto
from lib.distributed import World, make_mesh, shard_model
from lib.model import load_model, response_log_probs
from lib.rollout import (
    HFEngine,
    Sampling,
    WeightSyncError,
    concat_rows,
    hf_engine,
    make_engine,
    request_seeds,
    sync_weights,
)
from lib.rollout.engine import add_responses, check_expanded
from lib.rollout.vllm_engine import VLLMEngine
from tests.common import VISION, tiny_vision, vision_batch
from tests.rollout.test_rollout import close, perturb

TOLERANCE = 1e-4  # nats, fp32: other kernels sum in another order


class Tokens:
    """Of the models of tests.common, which have no processor."""

    pad_token_id, eos_token_id = 0, 2


def prompts_of(kind: str) -> DataProto:
    """Eight: one image for three, the same ids with another image for two, two images, none for two."""
    batch = vision_batch(kind)
    P = batch.batch["prompts"].shape[1]
    tensors = {"input_ids": batch.batch["prompts"], "multi_modal_hash": batch.batch["multi_modal_hash"]}
    tensors |= {name: batch.batch[name][..., :P] for name in ("attention_mask", "position_ids")}
    raw = [ids[mask.bool()].tolist() for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"])]
    inputs = batch.non_tensor_batch["multi_modal_inputs"]
    objects = {"raw_prompt_ids": raw, "multi_modal_data": [{} for _ in raw], "multi_modal_inputs": inputs}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects)


def trainer_difference(model, out: DataProto) -> float:
    """Largest |engine's log-prob - trainer's| of the sampled tokens."""
    with torch.no_grad():
        log_probs = response_log_probs(model, out, 1.0)[0]
    return float(((log_probs - out.batch["rollout_log_probs"]) * out.batch["response_mask"]).abs().max())


# ---- what engines share --------------------------------------------------------------------------


def test_positions_go_on_after_the_highest_of_the_prompt():
    """With mrope an image's tokens have lower positions than its width, so fewer than its tokens."""
    prompts = prompts_of("qwen3_vl")
    rows = [hf_engine.Generated([5] * n, [0.0] * n, "length") for n in range(1, 9)]
    out = add_responses(prompts, rows, 0)
    P = out.batch["prompts"].shape[1]
    positions, before = out.batch["position_ids"], prompts.batch["position_ids"]
    assert positions.shape == (8, 4, P + 8)
    assert torch.equal(positions[..., :P], before)
    for row, last in zip(positions, before.amax(-1)):
        assert torch.equal(row[:, P:], last[:, None] + torch.arange(1, 9))
    assert (positions[:6, 0, P:] > positions[:6, 1, P:]).all()  # those with images
    own = torch.arange(4 * 3).view(4, 3)
    chosen = add_responses(prompts, rows, 0, position_ids=[own] * 8)
    assert torch.equal(chosen.batch["position_ids"][3, :, P : P + 3], own)
    wider = add_responses(prompts[6:], rows[:2], 0)  # rows without images, which are short
    both = concat_rows([wider, out])
    assert torch.equal(both.batch["position_ids"][2:], positions)
    assert torch.equal(both.batch["position_ids"][0, :, P:][:, :1], wider.batch["position_ids"][0, :, -2:][:, :1])


def test_a_prompt_that_an_engine_expands_otherwise_is_refused():
    check_expanded("vllm", [5, 8, 8, 6], (5, 8, 8, 6))
    with pytest.raises(InputError, match=r"--rollout-engine vllm: .* the engine made 3 tokens, training 4, "):
        check_expanded("vllm", [5, 8, 8, 6], [5, 8, 6])
    with pytest.raises(InputError, match=r"http://a:1: .* other ones.*start the server with this run's --model"):
        check_expanded("http://a:1", [5, 8, 8, 6], [5, 8, 8, 7])


# ---- hf ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VISION)
def hf(request, world, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_vision(request.param, folder)
    model = shard_model(load_model(str(folder)), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    engine = HFEngine(model, Tokens())
    engine.load_weights(model, 0)
    return request.param, engine, model


def test_hf_samples_from_the_policy_that_is_trained(hf):
    kind, engine, model = hf
    prompts = prompts_of(kind)
    out = engine.generate(prompts, Sampling(12), request_seeds(0, 1, list(range(8))))
    assert trainer_difference(model, out) < TOLERANCE


def test_equal_ids_with_another_image_are_another_prompt(hf):
    """Rows 0 to 2 have one image, rows 3 and 4 another."""
    kind, engine, _ = hf
    prompts = prompts_of(kind)
    raw = prompts.non_tensor_batch["raw_prompt_ids"]
    assert raw[0] == raw[2] == raw[3] == raw[4]
    out = engine.generate(prompts, Sampling(4), [7] * 8)
    first = out.batch["rollout_log_probs"][:, 0]
    assert first[0] == first[1] == first[2] and first[3] == first[4]
    assert abs(first[0] - first[3]) > 1e-3
    alone = engine.generate(prompts[[3]], Sampling(4), [7])
    torch.testing.assert_close(alone.batch["rollout_log_probs"][0, 0], first[3], atol=TOLERANCE, rtol=0)


def test_images_of_a_group_are_encoded_once(hf, monkeypatch):
    """5 images stand in 8 prompts, in 4 tensors for 6 of them; 4 are different prompts' images."""
    kind, engine, model = hf
    prompts, encoded = prompts_of(kind), []
    features = model.base_model.get_image_features

    def counted(pixel_values, *args, **kwargs):
        encoded.append(pixel_values.numel())
        return features(pixel_values, *args, **kwargs)

    monkeypatch.setattr(model.base_model, "get_image_features", counted)
    engine.generate(prompts, Sampling(3), [1] * 8)
    inputs = prompts.non_tensor_batch["multi_modal_inputs"]
    assert sum(encoded) == sum(inputs[i]["pixel_values"].numel() for i in (0, 3, 5))


def test_long_prompts_with_images_are_stored_once_for_their_group(hf, monkeypatch):
    kind, engine, model = hf
    prompts, seeds = prompts_of(kind), list(range(8))
    copied = engine.generate(prompts, Sampling(12), seeds)
    grouped = []
    GroupCache = hf_engine.GroupCache
    monkeypatch.setattr(hf_engine, "GroupCache", lambda *args: grouped.append(1) or GroupCache(*args))
    monkeypatch.setattr(hf_engine, "LONG_PROMPT", 1)
    shared = engine.generate(prompts, Sampling(12), seeds)
    assert grouped
    assert torch.equal(copied.batch["responses"], shared.batch["responses"])
    assert trainer_difference(model, shared) < TOLERANCE


def test_single_requests_give_what_a_batch_gives(hf):
    kind, engine, _ = hf
    check_single_requests(engine, prompts_of(kind))


def check_single_requests(engine, prompts: DataProto):
    seeds = request_seeds(0, 2, list(range(len(prompts))))
    out, done = engine.generate(prompts, Sampling(5), seeds), {}
    with engine.session():
        rows = zip(prompts.non_tensor_batch["raw_prompt_ids"], seeds, media_of(prompts))
        for i, (ids, seed, media) in enumerate(rows):
            engine.submit(str(i), ids, Sampling(5), seed, media)
        while len(done) < len(prompts):
            done |= engine.step()
    for i, (tokens, mask) in enumerate(zip(out.batch["responses"], out.batch["response_mask"])):
        assert done[str(i)].token_ids == tokens[mask.bool()].tolist()


# ---- vLLM, with a processor ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor():
    return make_processor()


def save_idefics3(processor, folder) -> str:
    """The head is tied, which only the whole model's config says."""
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = size | {"model_type": "llama", "vocab_size": len(processor.tokenizer), "num_key_value_heads": 1}
    text |= {"head_dim": 32, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3}
    config = Idefics3Config(
        text_config=text | {"max_position_embeddings": 256},
        vision_config=size | {"image_size": 24, "patch_size": 4},
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


def noise(seed: int, height: int = 24, width: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def visual_prompts(processor, model) -> DataProto:
    """The same six kinds of rows as above, of pictures; one is of another size."""
    vision, A, B, wide = Vision(processor, model.config), noise(1), noise(2), noise(3, 30, 50)
    contents = [(["red?"], [A])] * 3 + [(["red?"], [B])] * 2 + [(["red", "or this?"], [A, wide]), (["how many"], [])]
    encoded, data = [], []
    for texts, images in contents:
        message = "".join(("<image>" if images else "") + text for text in texts)
        text = processor.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True)
        data.append({"image": images} if images else {})
        encoded.append(vision.encode(text, data[-1]))
    P = max(len(row.ids) for row in encoded)
    ids, mask = torch.zeros(len(encoded), P, dtype=torch.long), torch.zeros(len(encoded), P, dtype=torch.long)
    for i, row in enumerate(encoded):
        ids[i, P - len(row.ids) :], mask[i, P - len(row.ids) :] = torch.tensor(row.ids), 1
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    tensors["multi_modal_hash"] = torch.tensor([media_hash(row.inputs) for row in encoded])
    objects = {"raw_prompt_ids": [row.raw_ids for row in encoded], "multi_modal_data": data}
    objects["multi_modal_inputs"] = [row.inputs for row in encoded]
    return DataProto.from_dict(tensors=tensors, non_tensors=objects)


def engine_of(name, processor, path, folder):
    model = shard_model(load_model(path), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    folder.mkdir()
    more = {"processor": processor, "max_images": 2, "vllm_kwargs": {"max_num_seqs": 16}}
    settings = {"folder": folder, "max_length": 80, "dtype": torch.float32, "gpu_memory": 0.3}
    return make_engine(name, model, processor.tokenizer, **settings, **more), model


@pytest.fixture(scope="module")
def vllm(world, processor, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("vllm")
    engine, model = engine_of("vllm", processor, save_idefics3(processor, folder / "model"), folder / "engine")
    sync_weights(engine, model, 0, tolerance=TOLERANCE)
    yield engine, model
    close(engine)


def test_vllm_samples_from_the_policy_that_is_trained(vllm, processor):
    engine, model = vllm
    prompts = visual_prompts(processor, model)
    raw = prompts.non_tensor_batch["raw_prompt_ids"]
    assert raw[0] == raw[4]
    for _ in range(2):  # the second time from its caches
        out = engine.generate(prompts, Sampling(8), [7] * 7)
        assert trainer_difference(model, out) < TOLERANCE
        first = out.batch["rollout_log_probs"][:, 0]
        assert abs(first[0] - first[3]) > 1e-3
    assert torch.equal(out.batch["prompts"], prompts.batch["input_ids"])


def test_vllm_and_hf_sample_from_the_same_policy(vllm, processor):
    engine, model = vllm
    prompts = visual_prompts(processor, model)
    hf = HFEngine(model, processor.tokenizer)
    greedy = [of.generate(prompts, Sampling(8, temperature=0.0), [0] * 7) for of in (engine, hf)]
    assert torch.equal(*(out.batch["responses"] for out in greedy))


def test_vllm_single_requests_give_what_a_batch_gives(vllm, processor):
    engine, model = vllm
    check_single_requests(engine, visual_prompts(processor, model))


def test_vllm_forgets_the_features_of_old_weights(vllm, processor):
    """Without reset_encoder_cache the same images are more than a nat off."""
    engine, model = vllm
    prompts = visual_prompts(processor, model)
    engine.generate(prompts, Sampling(2), [7] * 7)  # their features are in the cache
    perturb(model.model.vision_model)
    engine.load_weights(model, engine.version + 1)
    out = engine.generate(prompts, Sampling(8), [7] * 7)
    assert trainer_difference(model, out) < TOLERANCE


def test_a_sync_sees_a_stale_tower(vllm, monkeypatch):
    engine, model = vllm
    version = engine.version
    sync_weights(engine, model, version + 1, tolerance=TOLERANCE)
    perturb(model.model.vision_model)
    monkeypatch.setattr(engine.llm.llm_engine, "reset_encoder_cache", lambda: None)
    with pytest.raises(WeightSyncError, match=r"on the probe with an image"):
        sync_weights(engine, model, version + 2, tolerance=TOLERANCE)
    monkeypatch.undo()
    sync_weights(engine, model, version + 3, tolerance=TOLERANCE)


@pytest.mark.parametrize("fault", ["a token more", "an image less", "expanded ids"])
def test_vllm_must_expand_a_prompt_as_training_does(vllm, processor, fault):
    engine, model = vllm
    prompts = visual_prompts(processor, model)[5:6]
    [media], raw = media_of(prompts), prompts.non_tensor_batch["raw_prompt_ids"][0]
    if fault == "a token more":
        media = replace(media, ids=[*media.ids[:8], processor.image_token_id, *media.ids[8:]])
    elif fault == "an image less":
        media = replace(media, data={"image": media.data["image"][:1]})
    else:
        raw = media.ids
    with engine.session():
        engine.submit("0", raw, Sampling(2), 0, media)
        with pytest.raises(InputError, match="of a prompt with images the engine made"):
            while not engine.step():
                pass


def test_a_prompt_counts_with_its_expanded_placeholders(vllm, processor):
    engine, model = vllm
    [media] = media_of(visual_prompts(processor, model)[:1])
    with engine.session(), pytest.raises(ValueError, match="a prompt of 200 tokens"):
        engine.submit("0", [5, processor.image_token_id], Sampling(1), 0, replace(media, ids=[5] * 200))


def test_gemma_3_is_refused_by_vllm_on_a_cpu(world, processor, tmp_path):
    model = Gemma3ForConditionalGeneration(tiny_vision("gemma3").config)
    settings = {"folder": tmp_path, "max_length": 80, "dtype": torch.float32, "gpu_memory": 0.3, "ranks": 1, "more": {}}
    with pytest.raises(InputError, match="Gemma 3's all see each other: take hf"):
        VLLMEngine(model, processor.tokenizer, processor=processor, max_images=1, **settings)
