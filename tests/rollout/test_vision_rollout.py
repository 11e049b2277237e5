"""Prompts with images in the engines: hf in all families of models, vLLM (real, on the CPU) with an Idefics3."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Idefics3Config, Idefics3ForConditionalGeneration

import lib.rollout
from data.toy_vision import make_processor
from lib import InputError
from lib.data import collate_fn
from lib.data.vision import Vision, media_hash, media_of
from lib.data_proto import DataProto
from lib.distributed import World, make_mesh, shard_model
from lib.model import load_model, response_log_probs
from lib.rollout import HFEngine, Sampling, WeightSyncError, hf_engine, request_seeds, sync_weights
from lib.rollout import engine as rollout_engine
from lib.rollout.vllm_engine import VLLMEngine
from lib.rollout.vllm_start import save_files
from servers import engine as server_engine
from tests.common import MROPE, VISION, serve, tiny_vision, tiny_vision_config, vision_batch, wait_until, with_slow
from tests.data.test_vision_rows import mrope_processor, with_ids_of
from tests.rollout.test_rollout import close, perturb
from tests.servers.test_server_engine import check_versions, generated_tokens

TOLERANCE = 1e-4  # nats, fp32: other kernels sum in another order
VISION_SIBLINGS = {*VISION} - {"qwen3_vl", "gemma3", "llava"}  # mrope, windows, one image a row of pixels


class Tokens:
    """Of the models of tests.common, which have no processor."""

    pad_token_id, eos_token_id = 0, 2

    def apply_chat_template(self, messages, **_):
        raise ValueError("no chat template")


def prompts_of(kind: str) -> DataProto:
    """Eight: one image for three, the same ids with another image for two, two images, none for two."""
    prompts = rollout_engine.prompts_of(vision_batch(kind))
    rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"].bool())
    columns = {"raw_prompt_ids": [ids[mask].tolist() for ids, mask in rows], "multi_modal_data": [{}] * len(prompts)}
    return prompts.union(DataProto.from_dict(non_tensors=columns))


def trainer_difference(model, out: DataProto) -> float:
    """Largest |engine's log-prob - trainer's| of the sampled tokens."""
    with torch.no_grad():
        log_probs = response_log_probs(model, out, 1.0)[0]
    return float(((log_probs - out.batch["rollout_log_probs"]) * out.batch["response_mask"]).abs().max())


# ---- hf ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=with_slow(VISION, *VISION_SIBLINGS))
def hf(request, world, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_vision(request.param, folder)
    model = shard_model(load_model(str(folder)), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    return request.param, HFEngine(model, Tokens()), model


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


def test_hf_samples_from_the_policy_that_is_trained(hf, monkeypatch):
    """Long prompts with images are stored once for their group. Also of several rollouts, of several widths."""
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
    without_images = engine.generate(prompts[6:], Sampling(3), seeds[6:])
    assert trainer_difference(model, lib.rollout.concat_rows([without_images, copied, shared])) < TOLERANCE
    check_single_requests(engine, prompts)


def check_single_requests(engine, prompts: DataProto):
    """They give what a batch gives."""
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


def idefics3_config(processor) -> Idefics3Config:
    """The head is tied, which only the whole model's config says."""
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = size | {"model_type": "llama", "vocab_size": len(processor.tokenizer), "num_key_value_heads": 1}
    text |= {"head_dim": 32, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3}
    text |= {"max_position_embeddings": 256}
    of_both = {"image_token_id": processor.image_token_id, "pad_token_id": 0, "tie_word_embeddings": True}
    tower = size | {"image_size": 24, "patch_size": 4}
    return Idefics3Config(text_config=text, vision_config=tower, scale_factor=2, **of_both)


def saved(config, folder: Path) -> str:
    """A random model of the config; its path."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


def noise(seed: int, height: int = 24, width: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def visual_prompts(processor, model, *videos) -> DataProto:
    """Eight: one image for three, the same ids with another image for two, two images (one larger), none, and the first
    image with another text. videos: one row more, of these and an image."""
    vision, A, B, wide = Vision(processor, model.config), noise(1), noise(2), noise(3, 30, 50)
    texts = [("<image>red?", [A]), ("<image>red?", [B]), ("<image>or<image>", [A, wide])]
    texts += [("red", []), ("or<image>", [A])]
    texts += [("<image>or" + "<video>" * len(videos), [A])] * bool(videos)
    rows = []
    for content, images in texts:
        data = {"image": images} if images else {}
        data |= {"video": list(videos)} if "<video>" in content else {}
        messages = vision.messages([{"role": "user", "content": content}], data, "a row")
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded = vision.encode(text, data)
        ids, positions = torch.tensor(encoded.ids), vision.positions(encoded.ids, encoded.inputs)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
        row = {name: torch.nn.functional.pad(x, (512 - len(ids), 0)) for name, x in tensors.items()}
        row |= {"multi_modal_hash": torch.tensor(media_hash(encoded.inputs)), "multi_modal_data": data}
        rows.append(row | {"raw_prompt_ids": encoded.raw_ids, "multi_modal_inputs": encoded.inputs})
    prompts = DataProto.from_single_dict(collate_fn(rows))
    return prompts[[0, 0, 0, 1, 1, 2, 3, 4] + [5] * bool(videos)]


def engine_of(name, processor, path, folder, max_length=80):
    model = shard_model(load_model(path), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    folder.mkdir()
    more = {"processor": processor, "max_images": 2, "more": {"max_num_seqs": 16}}
    settings = {"folder": folder, "max_length": max_length, "dtype": torch.float32, "gpu_memory": 0.3}
    return lib.rollout.make_engine(name, model, processor.tokenizer, **settings, **more), model


@pytest.fixture(scope="module")
def vllm(world, processor, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("vllm")
    path = saved(idefics3_config(processor), folder / "model")
    engine, model = engine_of("vllm", processor, path, folder / "engine")
    sync_weights(engine, model, 0, tolerance=TOLERANCE)
    yield engine, model
    close(engine)


def test_vllm_samples_from_the_policy_that_is_trained(vllm, processor):
    engine, model = vllm
    prompts = visual_prompts(processor, model)
    raw = prompts.non_tensor_batch["raw_prompt_ids"]
    assert raw[0] == raw[4]
    for _ in range(2):  # the second time from its caches
        out = engine.generate(prompts, Sampling(8), [7] * 8)
        assert trainer_difference(model, out) < TOLERANCE
        first = out.batch["rollout_log_probs"][:, 0]
        assert abs(first[0] - first[3]) > 1e-3
    assert torch.equal(out.batch["prompts"], prompts.batch["input_ids"])
    check_single_requests(engine, prompts)


def test_a_sync_sees_a_stale_tower(vllm, monkeypatch):
    """Without reset_encoder_cache the same images are more than a nat off."""
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


@pytest.mark.parametrize("kind", MROPE)
def test_vllm_samples_from_the_policy_that_is_trained_with_mrope(world, tmp_path, kind):
    """Also after an update of the tower. With images, and with an image and two videos."""
    pytest.importorskip("torchvision")
    pytest.importorskip("vllm")
    processor = mrope_processor(kind)
    config = with_ids_of(processor, tiny_vision_config(kind))
    config.text_config.vocab_size, config.text_config.eos_token_id = len(processor.tokenizer), 3
    path = saved(config, tmp_path / "model")
    engine, model = engine_of("vllm", processor, path, tmp_path / "engine", max_length=512)
    frames = np.random.default_rng(0).integers(0, 256, (5, 24, 32, 3), dtype=np.uint8)
    videos = [
        (x, {"total_num_frames": len(x), "fps": 2.0, "frames_indices": [*range(len(x))], "duration": len(x) / 2})
        for x in (frames, frames[:2, :, :24])
    ]
    try:
        for version in (0, 1):
            sync_weights(engine, model, version, tolerance=TOLERANCE)
            prompts = visual_prompts(processor, model, *videos[: 1 if kind == "glm4v" else 2])  # vLLM takes one there
            out = engine.generate(prompts, Sampling(8), list(range(9)))
            assert trainer_difference(model, out) < TOLERANCE
            perturb(model.model.visual)
    finally:
        close(engine)


def test_gemma_3_is_refused_by_vllm_on_a_cpu(world, processor, tmp_path):
    model = tiny_vision("gemma3")
    settings = {"folder": tmp_path, "max_length": 80, "dtype": torch.float32, "gpu_memory": 0.3, "ranks": 1, "more": {}}
    with pytest.raises(InputError, match=r"see each other in this model, .*: take hf"):
        VLLMEngine(model, processor.tokenizer, processor=processor, max_images=1, **settings)


# ---- a server ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def served(world, processor, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("served")
    path = saved(idefics3_config(processor), folder / "model")
    save_files(Path(path), AutoModelForImageTextToText.from_pretrained(path), processor.tokenizer, processor)
    with serve(path, 128, "--enable-scale-out") as (url, _):
        engine, model = engine_of(url, processor, path, folder / "engine")
        perturb(model, 0.1)  # not what the server read at its start
        sync_weights(engine, model, 0, tolerance=TOLERANCE)
        yield engine, model
        engine.close()


@pytest.mark.slow
def test_episodes_whose_tools_return_images_on_a_server(served, processor):
    from tests.agent.test_vision_turns import check_log_probs, make_vision, random_play  # which imports this file

    engine, model = served
    vision = make_vision("idefics3")
    assert vision.processor.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    out = random_play(engine, vision, max_turns=2)
    assert max(len(data["image"]) for data in out.non_tensor_batch["multi_modal_data"]) == 3
    check_log_probs(model, out)


@pytest.mark.slow
def test_a_response_with_an_image_goes_on_with_new_weights(served, processor, monkeypatch):
    engine, model = served
    settings = server_engine.vllm_settings
    monkeypatch.setattr(server_engine, "vllm_settings", lambda *args: settings(*args) | {"ignore_eos": True})
    monkeypatch.setattr(engine, "stop_ids", [])
    prompts, sampling, version = visual_prompts(processor, model), Sampling(90), engine.version
    old_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = generated_tokens(engine)
    responses = engine.start(prompts, sampling, list(range(8)))
    wait_until(lambda: generated_tokens(engine) >= before + 10 * 8, 300)
    perturb(model, 0.1)
    sync_weights(engine, model, version + 1, tolerance=TOLERANCE)
    out = engine.collect(prompts, sampling, responses)
    check_versions(model, out, old_weights, version)
    sync_weights(engine, model, version + 2, tolerance=TOLERANCE)


@pytest.mark.slow
def test_a_request_that_the_server_could_not_do_is_made_again(served, processor, monkeypatch):
    """Such as one whose image the server has lost: see PICTURE_ATTEMPTS."""
    engine, model = served
    prompts, request, failed = visual_prompts(processor, model), engine.servers.request, []

    async def fails(url, method, path, **kwargs):
        if len(failed) < server_engine.PICTURE_ATTEMPTS - 1 and path == server_engine.GENERATE:
            failed.append(path)
            raise InputError("failed with 500")
        return await request(url, method, path, **kwargs)

    monkeypatch.setattr(engine.servers, "request", fails)
    out = engine.generate(prompts[:1], Sampling(8), [1])
    assert failed and trainer_difference(model, out) < TOLERANCE


@pytest.mark.slow
def test_a_server_must_expand_a_prompt_as_training_does(served, processor):
    engine, model = served
    [media] = media_of(visual_prompts(processor, model)[:1])
    pictures = engine.pictures(replace(media, ids=media.ids[1:]))
    raw = visual_prompts(processor, model).non_tensor_batch["raw_prompt_ids"][0]
    with pytest.raises(InputError, match=r"of a prompt with images the engine made .* start the server with this run"):
        engine.begin(engine.sample(raw, Sampling(2), 0, 0, pictures=pictures)).result()


# ---- record and replay ---------------------------------------------------------------------------
def test_a_recorded_rollout_is_for_no_other_images(world, processor, tmp_path):
    model = Idefics3ForConditionalGeneration(idefics3_config(processor))
    prompts = visual_prompts(processor, model)
    rows = [hf_engine.Generated([5, 6], [0.0, -0.5], "length")] * len(prompts)
    of, recorded = World(0, 1, torch.device("cpu")), rollout_engine.add_responses(prompts, rows, 0)
    recorder = lib.rollout.Recorder(tmp_path, of)
    recorder.begin(1)
    recorder.rollout(prompts, lambda: recorded)
    recorder.end(recorded)
    replay = lib.rollout.Replayer(tmp_path, of)
    replay.begin(1)
    again = replay.rollout(prompts, None)
    for mine, theirs in zip(media_of(recorded), media_of(again)):
        assert (mine and mine.hash) == (theirs and media_hash(theirs.inputs))
    other = prompts[[3, 1, 2, 0, 4, 5, 6, 7]]  # the same tokens
    replay.begin(1)
    with pytest.raises(InputError, match="the prompts of step 1 are not those recorded"):
        replay.rollout(other, None)
