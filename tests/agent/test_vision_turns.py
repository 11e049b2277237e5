"""Episodes with images: those of the prompt go with every turn, and tools return more."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from agent import MultiTurn, ToolCall, ToolResponse, get_tool_parser, load_multi_turn, make_episodes
from agent.metrics import agent_metrics
from agent.tools.builtin import Zoom, load_tools
from data.toy_vision import make_processor
from lib import InputError
from lib.args import MultiTurnArgs
from lib.data.vision import Vision, media_hash
from lib.data_proto import DataProto
from lib.distributed import World, make_mesh, reduce_metrics, shard_model
from lib.model import load_model, response_log_probs
from lib.rollout import HFEngine, Sampling, hf_engine
from tests.agent.test_agent_loop import END, FORGETS, TEMPLATE, Scripted, User, response_ids
from tests.common import MROPE, tiny_vision_config, with_slow
from tests.rollout.test_vision_rollout import TOLERANCE, idefics3_config, noise

PARTS = (
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{{ '%s' if part['type'] == 'image' else part['text'] }}{%% endfor %%}{%% endif %%}"
)
START = "<global-img>"  # of a video of the tiny GLM-4V
CALL = '<tool_call>\n{"name": "zoom", "arguments": {"x0": %d, "y0": %d, "x1": %d, "y1": %d}}\n</tool_call>'


def shows(template: str, image: str = "<image>") -> str:
    """The template of a model that sees. FORGETS drops the thinking in texts only, so all is made text first."""
    begin, parts = "<|im_start|>{{ message['role'] }}\n", f"{{% set content %}}{PARTS % image}{{% endset %}}"
    return template.replace("message['content']", "content").replace(begin, parts + begin)


class QwenProcessor:
    """As Qwen's, which needs torchvision for the videos. <image> is the placeholder."""

    image_token = "<image>"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        sizes = {"shortest_edge": 64, "longest_edge": 4096}
        self.images = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=sizes)

    def __call__(self, text, images, **kwargs):
        inputs = self.images(images, return_tensors="pt")
        tokens = iter((inputs["image_grid_thw"].prod(1) // 4).tolist())
        before, *rest = text[0].split(self.image_token)
        whole = before + "".join(self.image_token * next(tokens) + piece for piece in rest)
        return {"input_ids": torch.tensor([self.tokenizer(whole, add_special_tokens=False)["input_ids"]]), **inputs}


def make_vision(kind: str, template: str = TEMPLATE, **limits) -> Vision:
    processor = make_processor()
    # Qwen's images have marks around them, without which neighbours would be one to get_rope_index
    processor.tokenizer.chat_template = shows(template, "<image>" if kind == "idefics3" else "[<image>]")
    if kind == "idefics3":
        return Vision(processor, idefics3_config(processor), min_pixels=1, **limits)
    config = tiny_vision_config(kind)
    config.image_token_id = processor.image_token_id
    config.video_token_id, config.vision_start_token_id = len(processor.tokenizer), len(processor.tokenizer) + 1
    if kind == "glm4v":
        config.video_start_token_id = processor.tokenizer.convert_tokens_to_ids(START)
        config.video_end_token_id = config.video_token_id
    config.text_config.vocab_size, config.text_config.eos_token_id = len(processor.tokenizer) + 2, 3
    return Vision(QwenProcessor(processor.tokenizer), config, min_pixels=1, **limits)


def settings(vision: Vision, tools=None, parse=None, interaction=None, **limits) -> MultiTurn:
    tools, tokenizer = {"zoom": Zoom()} if tools is None else tools, vision.processor.tokenizer
    parse = parse or get_tool_parser("hermes", tokenizer, tools)
    return MultiTurn(tokenizer, tools, parse, interaction, MultiTurnArgs(**limits), vision=vision)


def prompts_of(how: MultiTurn, rows: list[tuple[str, list[Image.Image]]]) -> DataProto:
    """As the data set makes them."""
    contents = [[*[{"type": "image"}] * len(images), {"type": "text", "text": text}] for text, images in rows]
    messages = [[{"role": "user", "content": content}] for content in contents]
    data = [{"image": images} if images else {} for _, images in rows]
    encoded = [how.vision.encode(how.render(row), images) for row, images in zip(messages, data)]
    P = max(len(row.ids) for row in encoded) + 2
    positions = [how.vision.positions(row.ids, row.inputs) for row in encoded]
    pads = [P - len(row.ids) for row in encoded]
    tensors = {
        "input_ids": torch.tensor([[0] * pad + row.ids for pad, row in zip(pads, encoded)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (P - pad) for pad in pads]),
        "position_ids": torch.stack([torch.nn.functional.pad(x, (pad, 0)) for pad, x in zip(pads, positions)]),
        "multi_modal_hash": torch.tensor([media_hash(row.inputs) for row in encoded]),
    }
    columns = {"raw_prompt": messages, "raw_prompt_ids": [row.raw_ids for row in encoded], "uid": [*range(len(rows))]}
    columns |= {"multi_modal_data": data, "multi_modal_inputs": [row.inputs for row in encoded]}
    return DataProto.from_dict(tensors, columns)


class Playing(Scripted):
    """Keeps the media of each turn."""

    def __init__(self, tokenizer, *turns):
        super().__init__(*turns)
        self.tokenizer, self.media = lambda: tokenizer, {}

    def submit(self, request_id, prompt_ids, sampling, seed, *media):
        super().submit(request_id, prompt_ids, sampling, seed)
        self.media[self.contexts[-1][:2]] = media


def play(how: MultiTurn, rows, *turns, T=900):
    engine, prompts = Playing(how.tokenizer, *turns), prompts_of(how, rows)
    return make_episodes(engine, how).generate(prompts, Sampling(T), list(range(len(turns)))), engine


# ---- tokens, positions, inputs -------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl", "qwen2_5_vl", "glm4v"])
def test_a_row_is_the_whole_conversation_encoded_at_once(kind):
    how, first = settings(make_vision(kind)), noise(1, 24, 32)
    turns = [CALL % (0, 0, 12, 20) + END, CALL % (2, 3, 12, 8) + "\n" + CALL % (0, 0, 8, 8) + END, "=1" + END]
    out, engine = play(how, [("how many?", [first]), ("none", [])], turns, ["no" + END])
    objects = out.non_tensor_batch
    messages, data, inputs = (objects[name][0] for name in ("messages", "multi_modal_data", "multi_modal_inputs"))
    assert [len(message["content"]) for message in messages if message["role"] == "tool"] == [2, 2, 2]
    assert len(data["image"]) == 4 and data["image"][0] is first and len(objects["multi_modal_data"][1]) == 0
    whole = how.tokenizer.apply_chat_template(messages, tools=how.schemas, tokenize=False)
    expected = how.vision.encode(whole.removesuffix("\n"), data)
    attended = out.batch["attention_mask"][0].bool()
    assert out.batch["input_ids"][0][attended].tolist() == expected.ids
    for name, tensor in expected.inputs.items():
        assert torch.equal(inputs[name], tensor), name
    positions = how.vision.positions(expected.ids, expected.inputs)
    assert torch.equal(out.batch["position_ids"][0][..., attended], positions)
    trained = out.batch["responses"][0][out.batch["response_mask"][0].bool()]
    assert how.tokenizer.decode(trained) == "".join(turns)
    assert objects["segments"][0] == [(0, len(response_ids(out)))]
    assert out.batch["multi_modal_hash"][0] == prompts_of(how, [("?", [first])]).batch["multi_modal_hash"][0]
    for (row, turn), media in engine.media.items():  # what the engine got, turn by turn
        context = next(ids for *place, ids in engine.contexts if place == [row, turn])
        assert bool(media) == (row == 0)
        if media:
            [media] = media
            n, images = len(media.ids), [1, 2, 4][turn]
            assert media.ids == expected.ids[:n] and torch.equal(media.positions, positions[..., :n])
            assert len(media.data["image"]) == images == context.count(how.vision.config.image_token_id)
            assert media.hash == media_hash(media.inputs)


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_vl"])
def test_a_new_segment_has_all_images_again(kind):
    how = settings(make_vision(kind, FORGETS), interaction=User)
    turns = ["hm</think>" + CALL % (0, 0, 12, 20) + END, "ah</think>3" + END, "oh</think>4" + END]
    out, engine = play(how, [("how many?", [noise(1)])], turns)
    (_, end), (start, last) = out.non_tensor_batch["segments"][0]
    assert start == end
    [media] = engine.media[0, 2]
    ids, positions = torch.tensor(response_ids(out))[start:last], out.batch["position_ids"][0]
    P = out.batch["prompts"].shape[1]
    n = len(media.ids)
    assert media.ids == ids[:n].tolist() and torch.equal(positions[..., P + start : P + start + n], media.positions)
    assert not positions[..., P + start].any() and len(media.data["image"]) == 2
    inputs = out.non_tensor_batch["multi_modal_inputs"][0]
    both = how.vision.joined(engine.media[0, 1][0].inputs, media.inputs)
    for name, tensor in both.items():
        assert torch.equal(inputs[name], tensor), name


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "token"), [("idefics3", "<image>"), ("glm4v", START)])
def test_a_sampled_placeholder_is_text_in_a_new_segment(kind, token):
    how = settings(make_vision(kind, FORGETS), {}, interaction=User, parse=lambda text: [])
    out, engine = play(how, [("?", [noise(1)])], [f"hm</think>{token}" + END, "y" + END])
    assert out.non_tensor_batch["finish_reason"][0] == "stop" and len(out.non_tensor_batch["segments"][0]) == 2
    [media] = engine.media[0, 1]
    assert len(media.data["image"]) == 1 and f"< {token[1:]}" in how.tokenizer.decode(media.ids)


class Returns(Zoom):
    def __init__(self, value, returns_images=True):
        super().__init__()
        self.value, self.returns_images = value, returns_images

    async def create(self, instance_id, images=()): ...

    async def execute(self, instance_id, parameters):
        return self.value


LOOK = CALL % (0, 0, 12, 20)


@pytest.mark.parametrize(
    ("kind", "tool", "turn", "message"),
    [
        ("idefics3", Returns(ToolResponse("", [noise(0)]), False), LOOK, "must say returns_images = True"),
        ("idefics3", Returns(ToolResponse("", ["a.png"])), LOOK, "images that are not PIL images"),
        ("idefics3", Returns(ToolResponse(None)), LOOK, "returned a NoneType"),
        ("idefics3", Zoom(), CALL % (30, 0, 9, 9), "nothing of the image, which is 24 x 24 pixels, is within"),
        ("idefics3", Zoom(), f"{LOOK}\n{LOOK}", "only 2 images may be shown"),
        # an engine would take the placeholder for the image's; behind a video's start, GLM-4V's images are frames
        ("idefics3", Zoom(), f"<image>{LOOK}", "no image can be shown after"),
        ("glm4v", Zoom(), f"<image>{LOOK}", "no image can be shown after"),
        ("glm4v", Zoom(), f"{START}{LOOK}", "no image can be shown after"),
    ],
)
def test_what_cannot_be_shown_is_an_error(kind, tool, turn, message):
    how = settings(make_vision(kind, max_images=2), {"zoom": tool})
    out, _ = play(how, [("?", [noise(1)])], [turn + END, "x" + END])
    answers = [m["content"] for m in out.non_tensor_batch["messages"][0] if m["role"] == "tool"]
    assert answers[-1].startswith("Error: ") and message in answers[-1]
    assert len(out.non_tensor_batch["multi_modal_data"][0]["image"]) == len(answers)
    error = f"agent/tool_errors/{'too_many' if 'only' in message else 'exception'}"
    assert reduce_metrics(agent_metrics(out))[error] == 1


def test_tools_that_return_images_are_refused_where_they_cannot_be_shown():
    vision = make_vision("idefics3")
    with pytest.raises(InputError, match=r"zoom: returns images; this --model takes none$"):
        MultiTurn(vision.processor.tokenizer, {"zoom": Zoom()})
    gemma = replace(vision, config=SimpleNamespace(model_type="gemma3"))
    with pytest.raises(InputError, match="this --model takes none after its prompt"):
        settings(gemma)
    vision.processor.tokenizer.chat_template = shows(TEMPLATE, "")
    with pytest.raises(InputError, match=r"zoom: returns an image; the chat template of .* leaves it out"):
        settings(vision)
    settings(vision, {})


def test_zoom_crops_and_enlarges():
    [(name, tool)] = load_tools(("zoom",)).items()
    image = noise(1, 20, 40)
    how = settings(make_vision("idefics3"), {name: tool})
    out, _ = play(how, [("?", [image])], [CALL % (10, 5, 20, 99) + END, "x" + END])
    crop = out.non_tensor_batch["multi_modal_data"][0]["image"][1]
    assert crop.size == (13, 20)  # 10 x 15, by 4 / 3
    expected = image.crop((10, 5, 20, 20)).resize((13, 20), Image.Resampling.BICUBIC)
    assert crop.tobytes() == expected.tobytes() and not tool.images


# ---- engines -------------------------------------------------------------------------------------
def calls(text: str) -> list[ToolCall]:
    """A random model's: each turn looks at a rectangle that depends on what was said."""
    x = sum(map(ord, text)) % 10
    return [ToolCall("zoom", {"x0": x, "y0": x, "x1": x + 12, "y1": x + 4 + x % 5})]


class Look(Zoom):
    """Also where the prompt has no image."""

    async def create(self, instance_id, images):
        await super().create(instance_id, images or [noise(9)])


def random_play(engine, vision: Vision, **kwargs):
    how = settings(vision, {"zoom": Look()}, parse=calls, max_turn_tokens=6, **{"max_turns": 3} | kwargs)
    rows = [("red?", [noise(1)])] * 3 + [("red?", [noise(2)])] * 2 + [("or", [noise(1), noise(3)]), ("red?", [])]
    prompts = prompts_of(how, rows)
    return make_episodes(engine, how).generate(prompts, Sampling(300), list(range(len(rows))))


def check_log_probs(model, out: DataProto):
    assert (out.batch["response_mask"].sum(1) > 6).any()
    assert not {"error", "abort"} & set(out.non_tensor_batch["finish_reason"])
    with torch.no_grad():
        for how in ({"share_prompts": True}, {"share_prompts": False}, {"padding_free": False}):
            log_probs = response_log_probs(model, out, 1.0, **how)[0]
            difference = (log_probs - out.batch["rollout_log_probs"]) * out.batch["response_mask"]
            assert difference.abs().max() < TOLERANCE, how


@pytest.fixture(scope="module", params=with_slow(["idefics3", *MROPE], "qwen2_5_vl", "qwen2_vl", "glm4v"))
def hf(request, world, tmp_path_factory):
    vision, folder = make_vision(request.param), tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1 if request.param == "glm4v" else 0)  # so that it looks at different places
    model = AutoModelForImageTextToText.from_config(vision.config, attn_implementation="sdpa")
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    model = shard_model(load_model(str(folder)), make_mesh(World(0, 1, torch.device("cpu"))), torch.float32)
    return HFEngine(model, vision.processor.tokenizer), model, request.param


def test_hf_samples_from_the_policy_that_is_trained(hf):
    engine, model, kind = hf
    out = random_play(engine, make_vision(kind))
    seen = [len(data.get("image", ())) for data in out.non_tensor_batch["multi_modal_data"]]
    assert max(seen) == 4 and seen[6] > 0
    assert len({media_hash(inputs) for inputs in out.non_tensor_batch["multi_modal_inputs"][:3]}) == 3
    assert out.batch["multi_modal_hash"][:3].unique().numel() == 1  # so their prompt is shared
    check_log_probs(model, out)


def test_an_image_of_a_shared_prompt_is_encoded_once(hf, monkeypatch):
    """Also if the rows of its group got other images from tools: these are encoded for each."""
    engine, model, kind = hf
    out = random_play(engine, make_vision(kind))[[0, 1, 2, 5]]
    dim, encoded, features = int(kind == "idefics3"), [], model.base_model.get_image_features

    def counted(pixel_values, *args, **kwargs):
        encoded.append(pixel_values.shape[dim])
        return features(pixel_values, *args, **kwargs)

    monkeypatch.setattr(model.base_model, "get_image_features", counted)
    with torch.no_grad():
        shared, alone = (response_log_probs(model, out, 1.0, share_prompts=share)[0] for share in (True, False))
    torch.testing.assert_close(shared, alone, rtol=0, atol=TOLERANCE)
    prompts = out.non_tensor_batch["multi_modal_data"]
    first = make_vision(kind).encode("<image>", {"image": prompts[0]["image"][:1]}).inputs["pixel_values"].shape[dim]
    assert encoded[1] - encoded[0] == 2 * first


def test_a_sampled_placeholder_is_text(hf, monkeypatch):
    """The policy samples one in each row's second token; the next turn goes on from it."""
    engine, model, kind = hf
    vision, sample = make_vision(kind), hf_engine.sample_tokens

    def with_placeholder(logits, sampling, seeds, t):
        token, log_prob = sample(logits, sampling, seeds, t)
        if t == 1:
            token = torch.full_like(token, vision.config.image_token_id)
            log_prob = logits.float().log_softmax(-1)[:, token[0]]
        return token, log_prob

    monkeypatch.setattr(hf_engine, "sample_tokens", with_placeholder)
    out = random_play(engine, vision)
    tools = itertools.chain(*out.non_tensor_batch["messages"])
    assert any("placeholder" in message["content"] for message in tools if message["role"] == "tool")
    check_log_probs(model, out)
    masked = DataProto.from_dict(dict(out.batch), out.non_tensor_batch)
    masked.batch["response_mask"] = torch.zeros_like(out.batch["response_mask"])
    assert not response_log_probs(model, masked, 1.0)[0].any()


def test_episodes_have_a_tokenizer_of_their_own():
    """In a thread of episodes a data set's truncation would cut their text."""
    vision = make_vision("qwen3_vl")
    how = load_multi_turn(MultiTurnArgs(tools=("zoom",), parser="hermes"), vision.processor.tokenizer, {}, 32, vision)
    assert how.tokenizer is how.vision.processor.tokenizer is not vision.processor.tokenizer
