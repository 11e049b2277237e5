"""lib/data/vision.py and the rows of RLHFDataset that have images: real files, real processors of tiny size."""

import base64
import io
import re
import struct
import tempfile
import zlib
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModel, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from data import toy, toy_vision
from lib import InputError
from lib.args import DataArgs, ModelArgs
from lib.data import RLHFDataset, collate_fn, make_loader
from lib.data.vision import Vision, media_hash, media_of, text_positions, to_png
from lib.data_proto import DataProto
from lib.setup import load_vision
from tests.common import GLM_BEGIN, GLM_END, MROPE, one_line, tiny_vision_config, vision_types
from tests.data.test_dataset import write_jsonl as write

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% elif c['type'] == 'video' %}<video>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
KEYS = st.sampled_from(["bytes", "path", "image", "video", "frames", "fps", "type", "text"])
PER_IMAGE = {"idefics3": 9, "gemma3": 4}  # placeholders after expansion


def test_the_chat_template_of_a_run_is_saved_with_its_processor(tmp_path):
    (tmp_path / "own.jinja").write_text("{# own #}")
    data = DataArgs(chat_template=str(tmp_path / "own.jinja"))
    vision = load_vision(ModelArgs(model=str(toy_vision.FOLDER / "model")), data)
    vision.processor.save_pretrained(tmp_path / "saved")
    for auto in (AutoProcessor, AutoTokenizer):
        assert auto.from_pretrained(tmp_path / "saved").chat_template == "{# own #}"


@cache
def processor_of(kind):
    if kind == "idefics3":
        processor = toy_vision.make_processor()
        processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
        return processor
    from transformers import Gemma3Processor  # one token in the text, others for the features
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    template = TEMPLATE.replace("<image>", "<start_of_image>")
    core = toy.make_tokenizer([*toy.ROLES, *words.values()]).backend_tokenizer
    special = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "extra_special_tokens": words}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)
    pictures = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(pictures, tokenizer, chat_template=template, image_seq_length=4)


MARKS = {"glm4v": ["<|begin_of_{}|>", "<|end_of_{}|>", "<|{}|>"]}  # around an image or a video, and its placeholder
QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|{}_pad|>"]


def mrope_processor(kind):
    """Its image and video processors need torchvision."""
    from transformers import Glm4vProcessor, Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
    from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size |= {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    template, words = TEMPLATE, []
    for name in ("image", "video"):
        start, end, token = (mark.format(name) for mark in MARKS.get(kind, QWEN_MARKS))
        template, words = template.replace(f"<{name}>", start + token + end), [*words, start, end, token]
    tokenizer = toy.make_tokenizer([*toy.ROLES, *dict.fromkeys(words)], template)
    processor, of_images, of_videos = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen2VLImageProcessor, Qwen3VLVideoProcessor),
        "glm4v": (Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor),
    }[kind]
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if kind == "qwen3_vl" else {}  # as the published one has
    return processor(of_images(**size, **half), tokenizer, of_videos(**size), chat_template=template)


def with_ids_of(processor, config):
    for kind in ("image", "video"):
        marks = [mark.format(kind) for mark in MARKS.get(config.model_type, QWEN_MARKS)]
        start, end, token = processor.tokenizer.convert_tokens_to_ids(marks)
        around = kind if config.model_type == "glm4v" else "vision"
        config.update({f"{kind}_token_id": token, f"{around}_start_token_id": start, f"{around}_end_token_id": end})
    return config


def config_of(kind):
    config = tiny_vision_config(kind)
    if kind in PER_IMAGE:
        [config.image_token_id] = processor_of(kind).image_token_ids
    return config


def vision_of(kind="idefics3", **limits):
    processor = processor_of(kind) if kind in PER_IMAGE else None
    return Vision(processor, config_of(kind), **{"min_pixels": 1} | limits)


def picture(seed=0, width=24, height=24):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def make_row(content, images=None, index=0, **columns):
    row = {"prompt": [{"role": "user", "content": content}], "data_source": "toy"}
    row |= {"reward_model": {"ground_truth": "1"}, "extra_info": {"index": index}} | columns
    return row if images is None else row | {"images": images}


def open_rows(source, vision=None, **kwargs):
    vision = vision or vision_of()
    return RLHFDataset(source, vision.processor.tokenizer, **{"max_prompt_length": 100, "vision": vision} | kwargs)


def base64_of(image):
    return base64.b64encode(to_png(image)).decode()


def pixels(image):
    return np.asarray(image).tolist()


ONE, TWO = base64_of(picture(1)), base64_of(picture(2))


def test_each_form_of_an_image_is_the_same_image(tmp_path):
    image = picture()
    png, text = to_png(image), base64_of(image)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(png)
    files = "pictures/a.png", str(tmp_path / "pictures/a.png"), f"file://{tmp_path}/pictures/a.png"
    dicts = {"bytes": png, "path": "a.png"}, {"path": "pictures/a.png"}, {"image": png}
    for form in (png, image, text, f"data:image/png;base64,{text}", *files, *dicts):
        [read] = vision_of().media([form], [], "a row", tmp_path)["image"]
        assert read.mode == "RGB" and pixels(read) == pixels(image), form


def test_the_column_of_each_kind_of_file(tmp_path):
    """Also datasets.Image, decoded or not, in memory and in parquet."""
    image = picture()
    text = [make_row("<image>red", [base64_of(image)])]
    feature = datasets.List(datasets.Image())
    rows = datasets.Dataset.from_list([make_row("<image>red", [{"bytes": to_png(image), "path": None}])])
    rows.to_parquet(tmp_path / "plain.parquet")
    rows = rows.cast_column("images", feature)
    rows.to_parquet(tmp_path / "feature.parquet")
    rows.save_to_disk(tmp_path / "saved")
    pil = datasets.Dataset.from_list([make_row("<image>red", [image])])
    sources = [write(tmp_path / "a.jsonl", text), tmp_path / "plain.parquet", tmp_path / "feature.parquet"]
    items = [open_rows(source)[0] for source in [*sources, tmp_path / "saved", rows, pil]]
    assert isinstance(pil[0]["images"][0], Image.Image)
    for item in items:
        assert pixels(item["multi_modal_data"]["image"][0]) == pixels(image)
        assert item["multi_modal_hash"] == items[0]["multi_modal_hash"] != 0
        assert item["raw_prompt"] == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red"}]}]


def test_a_column_of_images_has_any_name_and_may_hold_one(tmp_path):
    """As TRL's `image`. A column `images` beside it is a column like any other, and a scorer gets it."""
    image, row = picture(), {"problem": "red", "images": ["kept"]}
    text = write(tmp_path / "a.jsonl", [row | {"image": base64_of(image)}])
    rows = datasets.Dataset.from_list([row | {"image": {"bytes": to_png(image), "path": None}}])
    for source in (text, rows.cast_column("image", datasets.Image())):
        item = open_rows(source, columns={"images": "image"}, prompt_template="<image>{problem}")[0]
        assert pixels(item["multi_modal_data"]["image"][0]) == pixels(image)
        assert item["extra_info"] == {"problem": "red", "images": ["kept"]}


def test_a_turned_picture_is_turned_back_and_alpha_is_white(tmp_path):
    turned = picture(width=8, height=4)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    half = Image.new("RGBA", (4, 4), (255, 255, 255, 255))
    grey = [Image.fromarray(np.full((2, 2), 257 * 100, kind)) for kind in ("<u2", ">u2")]
    read = vision_of().media([file.getvalue(), clear, half, *grey], [], "a row", tmp_path)["image"]
    assert pixels(read[0]) == pixels(turned.rotate(-90, expand=True))
    assert pixels(read[1]) == pixels(read[2]) == pixels(Image.new("RGB", (4, 4), "white"))
    assert pixels(read[3]) == pixels(read[4]) == [[[100] * 3] * 2] * 2  # 16 bits


@pytest.mark.parametrize(("width", "height"), [(24, 24), (200, 50), (10, 2), (3, 9000)])
def test_the_size_is_kept_within_the_limits(tmp_path, width, height):
    vision = vision_of(max_pixels=576, min_pixels=100)
    [read] = vision.media([picture(width=width, height=height)], [], "a row", tmp_path)["image"]
    assert 100 <= read.width * read.height <= 576
    if height < 9000:  # a line of one pixel
        assert read.width / read.height == pytest.approx(width / height, rel=0.1)  # whole pixels
    if 100 <= width * height <= 576:
        assert read.size == (width, height)


# ---- what is wrong: file, row, reason ----
def error_of(*args, **kwargs):
    with pytest.raises(InputError) as caught:
        open_rows(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def png_of(*chunks):
    """A PNG whose header says 13,000 x 13,000."""
    header = struct.pack(">IIBBBBB", 13000, 13000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", b""), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(x)) + n + x + struct.pack(">I", zlib.crc32(n + x)) for n, x in parts)
    return b"\x89PNG\r\n\x1a\n" + body


UNSAFE = {
    "bomb": (png_of(), "exceeds limit of 50000000 pixels"),
    "text": (png_of((b"zTXt", b"a\0\0" + zlib.compress(bytes(2**23)))), "Decompressed data too large"),
    "floats": (encoded(Image.new("F", (4, 4), 0.5), "TIFF"), "its pixels are 32-bit floats, of no known range"),
    "integers": (encoded(Image.new("I", (4, 4), 70000), "TIFF"), "its pixels are 32-bit integers, of no known range"),
    "PostScript": (encoded(picture(), "EPS"), "not a readable image (none of the formats PNG, JPEG, "),
    "a PNG as icon": (encoded(picture(), "ICO"), "not a readable image (none of the formats PNG, JPEG, "),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_an_image_that_is_unsafe_or_not_defined_is_not_decoded(tmp_path, case):
    """Also as a picture of a tool or a frame of a video."""
    content, message = UNSAFE[case]
    vision, entry = vision_of(), f"data:image/png;base64,{base64.b64encode(content).decode()}"
    said = error_of(write(tmp_path / "a.jsonl", [make_row("red"), make_row("<image>", [entry])]))
    assert said.startswith(f"{tmp_path}/a.jsonl row 1: image 0: ") and message in said
    vision.config.video_token_id = 1
    with pytest.raises(InputError, match=r"^a row: video 0: frame 0: ") as caught:
        vision.media([], [[content]], "a row", tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG", "AVIF", "JPEG2000"])
def test_no_format_decodes_more_pixels_than_the_limit(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12 * 24)
    small, large = (encoded(x, kind) for x in (picture(), picture(height=50)))
    vision_of().media([small], [], "a row", tmp_path)
    with pytest.raises(InputError, match=r"^a row: image 0: not a readable image \(DecompressionBomb.*1200 pix"):
        vision_of().media([large], [], "a row", tmp_path)


TORN = base64.b64encode(encoded(picture(), "JPEG")[:-200]).decode()
NO_PICTURE = base64.b64encode(b"this is no picture").decode()
WRONG = {
    "too few": (make_row("<image> and <image>", ["one"]), "2 <image> in the messages, but 1 images in the row"),
    "none": (make_row("<image>"), "1 <image> in the messages, but 0 images in the row"),
    "text in parts": (make_row([{"type": "text", "text": "<image>"}], ["one"]), "0 <image> in the messages, but 1"),
    "a video": (make_row("<video>", videos=["a.mp4"]), "has videos; models of type idefics3 take none"),
    "a column of TRL": (make_row("red?") | {"image": "one"}, "'image' is not read: give --columns images=image"),
    "no file": (make_row("<image>", "one"), "image 0: 'one' is no file in "),
    "no second file": (make_row("<image><image>", [ONE, "none.png"]), "image 1: 'none.png' is no file in "),
    "url": (make_row("<image>", "https://x.com/a.png"), "images and videos are read from disk, not from the netw"),
    "torn": (make_row("<image>", TORN), "image 0: not a readable image (OSError: "),
    "no picture": (make_row("<image>", NO_PICTURE), "not a readable image (none of the formats PNG, JPEG, "),
    "template": (make_row("<image>", ONE), "the templated prompt has 0 image placeholders (<image>) for 1 images"),
}
BLIND = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_named(tmp_path, case):
    row, message = WRONG[case]
    how = {"chat_template_kwargs": {"chat_template": BLIND}} if case == "template" else {}
    said = error_of(write(tmp_path / "a.jsonl", [make_row("no image"), row]), **how)
    assert said.startswith(f"{tmp_path}/a.jsonl row 1: ") and message in said


odd = st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.sampled_from(["", "a", "image", ONE])
odd = st.recursive(odd, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3), max_leaves=5)
image = st.just(ONE) | st.just({"bytes": ONE}) | odd
video = st.fixed_dictionaries({"frames": st.lists(image, max_size=2)}, optional={"fps": odd}) | odd
kinds = st.sampled_from(["text", "image", "video"]) | odd
part = st.fixed_dictionaries({"type": kinds}, optional={"text": odd, "image": image})
content = st.lists(part, max_size=3) | st.sampled_from(["<image>", "<image><image>", "<video>", "text"]) | odd


@settings(max_examples=80)
@given(content=content, images=st.lists(image, max_size=2) | odd, videos=st.lists(video, max_size=2) | odd)
def test_any_row_makes_an_item_or_one_line(content, images, videos):
    vision = vision_of()
    vision.config.video_token_id = processor_of("idefics3").tokenizer.convert_tokens_to_ids("x")  # as if it took them
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "a.jsonl"), [make_row(content, images, videos=videos)])
        try:
            dataset = open_rows(file, vision)
        except InputError as error:
            assert str(file) in str(error) and "\n" not in str(error)
        else:
            collate_fn([dataset[0], dataset[0]])


def test_a_text_model_takes_no_images(tmp_path):
    file = write(tmp_path / "a.jsonl", [make_row("<image>"), make_row("<image>", [ONE])])
    tokenizer = processor_of("idefics3").tokenizer
    with pytest.raises(InputError, match=r"a\.jsonl row 1: has images or videos; .* takes none"):
        RLHFDataset(file, tokenizer, max_prompt_length=100)


@pytest.mark.parametrize("kind", PER_IMAGE)
def test_an_item(tmp_path, kind):
    processor, image = processor_of(kind), picture(width=30, height=40)
    file = write(tmp_path / "a.jsonl", [make_row("<image>red", [base64_of(image)]), make_row("red", index=1)])
    dataset = open_rows(file, vision_of(kind))
    item, plain = dataset[0], dataset[1]
    text = f"<|im_start|>user\n{processor.image_token}red<|im_end|>\n<|im_start|>assistant\n"
    whole = processor(images=[image], text=[text], return_tensors="pt")
    ids = whole["input_ids"][0].tolist()
    assert item["input_ids"][-len(ids) :].tolist() == ids
    assert item["attention_mask"].sum() == len(ids)
    assert item["position_ids"].tolist() == [0] * (100 - len(ids)) + list(range(len(ids)))
    assert item["raw_prompt_ids"] == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    [feature_id] = processor.image_token_ids
    assert ids.count(feature_id) == PER_IMAGE[kind] and item["raw_prompt_ids"].count(processor.image_token_id) == 1
    assert item["multi_modal_inputs"].keys() == whole.keys() - {"input_ids", "attention_mask", "token_type_ids"}
    assert all(torch.equal(x, whole[name]) for name, x in item["multi_modal_inputs"].items())
    assert item["multi_modal_hash"].dtype == torch.int64 and item["multi_modal_hash"].shape == ()
    assert plain["multi_modal_data"] == plain["multi_modal_inputs"] == {} and plain["multi_modal_hash"] == 0
    assert plain["input_ids"][plain["attention_mask"].bool()].tolist() == plain["raw_prompt_ids"]


def test_markers_parts_and_images_of_parts_are_the_same(tmp_path):
    """The hash is that of the pixels in their order."""
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    own = [{"type": "image", "image": ONE}, parts[1], {"type": "image", "image": TWO}]
    rows = [make_row("<image>and<image>", [ONE, TWO]), make_row(parts, [ONE, TWO]), make_row(own)]
    rows.append(make_row([own[0], *parts[1:]], [TWO]))
    rows += [make_row(parts, [TWO, ONE]), make_row(parts, [ONE, ONE])]
    dataset = open_rows(write(tmp_path / "a.jsonl", rows))
    items = [dataset[i] for i in range(6)]
    for item in items[:4]:
        assert item["raw_prompt"] == [{"role": "user", "content": parts}]
        assert item["raw_prompt_ids"] == items[0]["raw_prompt_ids"]
        assert [pixels(x) for x in item["multi_modal_data"]["image"]] == [pixels(picture(1)), pixels(picture(2))]
    assert items[4]["input_ids"].equal(items[0]["input_ids"])
    hashes = [int(item["multi_modal_hash"]) for item in items]
    assert len({*hashes[:4]}) == 1 and len({*hashes}) == 3


def test_text_that_spells_a_placeholder_stays_text(tmp_path):
    """In a list of parts; a marker in plain text is an image's place."""
    parts = [{"type": "image"}, {"type": "text", "text": "<image> <|im_end|>"}]
    file = write(tmp_path / "a.jsonl", [make_row(parts, [ONE])])
    dataset = open_rows(file)
    ids = dataset[0]["raw_prompt_ids"]
    assert ids.count(processor_of("idefics3").image_token_id) == 1 and dataset.escaped == 1
    assert dataset[0]["raw_prompt"][0]["content"][1]["text"] == "< image> < |im_end|>"
    said = error_of(file, allow_special_tokens=True)
    assert "has 2 image placeholders (<image>) for 1 images" in said


def test_too_long_is_counted_with_expanded_placeholders(tmp_path):
    file = write(tmp_path / "a.jsonl", [make_row("<image>" * n, [ONE] * n, n) for n in (1, 2, 3)])
    lengths = [int(open_rows(file)[i]["attention_mask"].sum()) for i in range(3)]
    assert lengths[1] - lengths[0] == lengths[2] - lengths[1] == 9 + 3  # Idefics 3 puts three tokens around them
    dataset = open_rows(file, max_prompt_length=lengths[1])
    assert [dataset[i]["index"] for i in range(len(dataset))] == [1, 2]
    assert dataset.dropped == {"prompt_too_long": 1, "too_many_images": 0}


def test_too_many_images_are_dropped_and_counted(tmp_path):
    rows = [make_row("<image>" * n, [ONE] * n, n) for n in (1, 3, 2, 0)]
    rows[1]["images"] = ["never read"] * 3
    file = write(tmp_path / "a.jsonl", rows)
    for filtered in (True, False):
        dataset = open_rows(file, vision_of(max_images=2), filter_overlong_prompts=filtered)
        assert [dataset[i]["index"] for i in range(len(dataset))] == [1, 2, 0]
        assert dataset.dropped == {"prompt_too_long": 0, "too_many_images": 1}
    said = error_of(write(tmp_path / "b.jsonl", rows[1:2]), vision_of(max_images=2))
    assert "b.jsonl: no row left: each of 1 has more than max_images=2 images" in said


def test_a_prompt_with_images_is_never_cut(tmp_path):
    rows, cut = [make_row("long text " * 9), make_row("<image>", [ONE])], {"filter_overlong_prompts": False}
    said = error_of(write(tmp_path / "a.jsonl", rows), max_prompt_length=10, truncation="left", **cut)
    assert "row 1: " in said and "a prompt with images cannot be cut" in said
    dataset = open_rows(write(tmp_path / "b.jsonl", rows[:1]), max_prompt_length=10, truncation="left", **cut)
    assert dataset[0]["raw_prompt_ids"] == dataset[0]["input_ids"].tolist()


def rope_model(kind):
    config = config_of(kind)
    config.text_config.num_hidden_layers = 1
    return AutoModel.from_config(config)


def grid_prompt(kind):
    """(ids, inputs) with an image of 2 x 3 merged patches, then a video of two steps. Qwen3-VL and GLM-4V wrap each
    step, GLM-4V also the video."""
    start, end, video = 102, 103, 100 if kind == "glm4v" else 101
    steps = [start] + [video] * 4 + ([end, 7, 8, start] if kind in ("qwen3_vl", "glm4v") else []) + [video] * 4 + [end]
    ids = [5, 6, start, *[100] * 6, end, 9, *([GLM_BEGIN, *steps, GLM_END] if kind == "glm4v" else steps), 10, 11]
    inputs = {"image_grid_thw": torch.tensor([[1, 4, 6]]), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    inputs |= {"pixel_values": torch.zeros(24, 96), "pixel_values_videos": torch.zeros(32, 96)}
    return ids, inputs | ({"second_per_grid_ts": torch.tensor([1.0])} if kind == "qwen2_5_vl" else {})


@pytest.mark.parametrize("kind", MROPE)
def test_mrope_positions_are_those_of_the_models_whole_forward(kind):
    model, (ids, inputs) = rope_model(kind), grid_prompt(kind)
    row = torch.tensor([ids])
    seen, kinds = {}, vision_types(kind, ids)
    keep = lambda module, args, kwargs: seen.update(positions=kwargs["position_ids"])  # noqa: E731
    model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        if kind == "glm4v":  # its forward takes no row with an image and a video
            grids = {name: x for name, x in inputs.items() if name.endswith("_thw")}
            seen["positions"] = model.compute_3d_position_ids(row, None, mm_token_type_ids=kinds, **grids)
        else:
            model(input_ids=row, mm_token_type_ids=kinds, attention_mask=torch.ones_like(row), **inputs)
    positions = vision_of(kind).positions(ids, inputs)
    assert positions.dtype == torch.int64 and positions.shape == (4, len(ids))
    assert positions[0].tolist() == list(range(len(ids)))
    end = len(ids) - 3  # of the video
    assert torch.equal(positions[1:, :end], seen["positions"][-3:, 0, :end])
    after = positions[1:, :end].max() + 1 + torch.arange(3)
    assert positions[1:, end:].tolist() == [after.tolist()] * 3
    if kind in ("qwen3_vl", "glm4v"):  # transformers' Qwen2-VL and Qwen2.5-VL forget a video's temporal positions here
        assert torch.equal(positions[1:], seen["positions"][-3:, 0])
    assert positions[1:].max() < len(ids) - 1  # an image takes fewer positions than tokens


# ---- batches ----
def test_a_batch(tmp_path):
    rows = [make_row("<image>" * len(images), images) for images in ([ONE], [TWO], [], [ONE, TWO])]
    dataset = open_rows(write(tmp_path / "a.jsonl", rows))
    batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(4)]))
    assert batch.batch["multi_modal_hash"].shape == (4,) and batch.batch["input_ids"].shape == (4, 12 * 2 + 8)
    media = media_of(batch)
    assert media[2] is None
    for i in (0, 1, 3):
        item = dataset[i]
        attended = item["attention_mask"].bool()
        assert media[i].ids == item["input_ids"][attended].tolist() and media[i].inputs is not None
        assert media[i].positions.tolist() == list(range(len(media[i].ids)))
        assert media[i].hash == media_hash(item["multi_modal_inputs"])
    positions = batch.batch["position_ids"]
    assert text_positions(positions) is positions
    assert torch.equal(text_positions(positions[:, None].repeat(1, 4, 1)), positions)


def test_positions_of_mrope_are_cut_with_their_columns():
    item = {"input_ids": torch.arange(6), "attention_mask": torch.tensor([0, 0, 0, 1, 1, 1])}
    item |= {"position_ids": torch.arange(24).view(4, 6)}
    batch = collate_fn([item, item])
    assert batch["position_ids"].shape == (2, 4, 3)
    assert torch.equal(batch["position_ids"][1], item["position_ids"][:, 3:])


def test_pixels_from_workers_take_no_file_descriptors(tmp_path):
    """They took one for each tensor as long as it lived; at the limit the loader hung."""
    rows = [make_row("<image>red", [base64_of(picture(i))], i) for i in range(40)]
    dataset = open_rows(write(tmp_path / "a.jsonl", rows))
    batches = iter(make_loader(dataset, 20, rank=0, world_size=1, seed=0, num_workers=1))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    batch = next(batches)
    assert len(list(Path("/proc/self/fd").iterdir())) - open_before < 20
    for index, inputs, data in zip(batch["index"], batch["multi_modal_inputs"], batch["multi_modal_data"]):
        assert torch.equal(inputs["pixel_values"], dataset[index]["multi_modal_inputs"]["pixel_values"])
        assert pixels(data["image"][0]) == pixels(picture(index))


# ---- videos ----
def frames_of(data):
    [(frames, metadata)] = data["video"]
    assert frames.dtype == np.uint8 and len(frames) == len(metadata["frames_indices"])
    return frames, metadata


def test_a_list_of_frames(tmp_path):
    frames = [picture(i) for i in range(5)]
    (tmp_path / "0.png").write_bytes(to_png(frames[0]))
    vision = vision_of("qwen2_5_vl", max_frames=3)
    form = {"frames": ["0.png", *frames[1:4], {"bytes": to_png(frames[4])}], "fps": 4.0}
    taken, metadata = frames_of(vision.media([], [form], "a row", tmp_path))
    assert [x.tolist() for x in taken] == [pixels(frames[i]) for i in (0, 2, 4)]
    assert metadata["frames_indices"] == [0, 2, 4] and metadata["total_num_frames"] == 5
    assert metadata["fps"] == 4.0 and metadata["duration"] == 1.25
    bare, metadata = frames_of(vision.media([], [frames[:2]], "a row", tmp_path))
    assert len(bare) == 2 and metadata["fps"] == vision.video_fps
    small, _ = frames_of(vision_of("qwen2_5_vl", max_pixels=100).media([], [frames], "a row", tmp_path))
    assert small.shape == (5, 10, 10, 3)


def write_video(path, n, fps=10.0, size=(32, 16)):
    """Frame i is grey, of brightness 10 i."""
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), fps, size)
    for i in range(n):
        writer.write(np.full((size[1], size[0], 3), 10 * i, np.uint8))
    writer.release()
    return path


# 2 seconds at 2 frames a second
@pytest.mark.parametrize(("max_frames", "taken"), [(32, [0, 6, 13, 19]), (3, [0, 10, 19]), (1, [0])])
def test_a_video_file_is_sampled(tmp_path, max_frames, taken):
    write_video(tmp_path / "a.avi", 20)
    vision = vision_of("qwen2_5_vl", max_frames=max_frames)
    for form in ("a.avi", {"video": f"file://{tmp_path}/a.avi"}, {"path": str(tmp_path / "a.avi")}):
        frames, metadata = frames_of(vision.media([], [form], "a row", tmp_path))
        assert metadata["frames_indices"] == taken and metadata["total_num_frames"] == 20
        assert metadata["fps"] == 10.0 and metadata["duration"] == 2.0
        assert frames.shape == (len(taken), 16, 32, 3)
        assert abs(frames.mean((1, 2, 3)) - [10 * i for i in taken]).max() < 3  # JPEG


def test_a_broken_video_is_named(tmp_path):
    whole = write_video(tmp_path / "a.avi", 20).read_bytes()
    (tmp_path / "torn.avi").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.avi").write_text("no video")
    vision = vision_of("qwen2_5_vl")
    for video, message in [
        ("none.mp4", "'none.mp4' is no file in "),
        ("torn.avi", "torn.avi: "),
        ("text.avi", "text.avi: not a readable video"),
        ("https://example.com/a.mp4", "are read from disk, not from the network"),
        (7, "7; it must be a path, or a list of frames"),
        ([], "[]; it must be"),
        (["none.png"], "frame 0: 'none.png' is no file"),
        ([picture(), picture(width=8)], "its frames have several sizes"),
    ]:
        with one_line(rf"^a row: video 0: .*{re.escape(message)}"):
            vision.media([], [video], "a row", tmp_path)
    with pytest.raises(InputError, match="a row: has videos; models of type idefics3 take none"):
        vision_of().messages([{"role": "user", "content": "text"}], {"video": ["a.avi"]}, "a row")


@pytest.mark.parametrize("kind", MROPE)
def test_rows_with_images_and_a_video(tmp_path, kind):
    pytest.importorskip("torchvision")
    processor = mrope_processor(kind)
    config = with_ids_of(processor, config_of(kind))
    frames = [picture(i, 16, 24) for i in range(5)]
    row = make_row("<image>a<video>b<image>", [ONE, base64_of(picture(2, 16, 32))])
    row["videos"] = [{"frames": [base64_of(frame) for frame in frames], "fps": 4.0}]
    file = write(tmp_path / "a.jsonl", [row, make_row("text")])
    dataset = open_rows(file, Vision(processor, config, min_pixels=1))
    item, plain = dataset[0], dataset[1]
    text = dataset.tokenizer.apply_chat_template(item["raw_prompt"], tokenize=False, add_generation_prompt=True)
    media = {"images": [picture(1), picture(2, 16, 32)], "videos": [np.stack(frames)], "do_sample_frames": False}
    media["video_metadata"] = [{"total_num_frames": 5, "fps": 4.0, "frames_indices": [*range(5)]}]
    whole = processor(text=[text], **media, return_tensors="pt")
    attended = item["attention_mask"].bool()
    assert item["input_ids"][attended].tolist() == whole["input_ids"][0].tolist()
    assert item["raw_prompt_ids"].count(config.image_token_id) == 2
    assert item["raw_prompt_ids"].count(config.video_token_id) == 1
    assert item["multi_modal_data"]["video"][0][1]["frames_indices"] == [*range(5)]  # no frame was added for a pair
    inputs = {name: x for name, x in whole.items() if name not in ("input_ids", "attention_mask")}
    model = rope_model(kind)
    model.config.image_token_id, model.config.video_token_id = config.image_token_id, config.video_token_id
    rope, _ = model.get_rope_index(whole["input_ids"], **inputs)
    until = int((whole["mm_token_type_ids"][0] == 2).nonzero().max()) + 1
    assert torch.equal(item["position_ids"][1:, attended][:, :until], rope[:, 0, :until])
    assert plain["position_ids"].shape == (4, 100) and plain["multi_modal_hash"] == 0
    batch = DataProto.from_single_dict(collate_fn([item, plain]))
    [media, none] = media_of(batch)
    assert none is None and torch.equal(media.positions, item["position_ids"][:, attended])
