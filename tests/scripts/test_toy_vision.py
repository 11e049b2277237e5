"""The embedded task with images: a start that can count and mostly does not, rows that hide nothing in their text, and
the four scripts on it."""

import base64
import functools
import io
import json
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from data import toy, toy_vision
from rewards.arithmetic import compute_score
from tests.common import TOY_MODEL, fork, metrics, ran, rollouts, skip_without_vllm, unexplained_metrics, with_slow
from tools.page.samples import pack_samples

MODEL = toy_vision.FOLDER / "model"


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def rows():
    return toy_vision.make_rows()


def decoded(row: dict) -> Image.Image:
    [image] = row["images"]
    return Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2])))


# ---- rows and model ------------------------------------------------------------------------------


def test_a_row_asks_for_what_its_image_shows(rows):
    train, val = rows
    assert (len(train), len(val)) == (4096, 256)
    questions = {(row["prompt"][0]["content"], row["extra_info"]["board"]) for row in train + val}
    assert len(questions) == len(train) + len(val)
    for row in val:
        content, board = row["prompt"][0]["content"], row["extra_info"]["board"]
        colour = content.removeprefix("<image>")
        truth = str(board.lower().count(colour[0]))
        assert row["reward_model"]["ground_truth"] == truth and 1 <= int(truth) <= 5
        image = decoded(row)
        assert (image.mode, image.size) == ("RGB", (72, 72))
        shown = Counter(image.getpixel((24 * (k % 3) + 12, 24 * (k // 3) + 12)) for k in range(9))
        assert shown[toy_vision.COLOURS[colour]] == int(truth)
        assert compute_score("toy/vision", toy_vision.worked_response(colour, board), truth)["score"] == 1.0


def test_without_the_image_a_row_says_nothing(rows):
    """No answer to a question is right in more than 1 of 4 rows: 3 standard deviations above 1 of 5 for the 85
    held-out rows of a colour."""
    for split in rows:
        for colour in toy_vision.COLOURS:
            own = [row for row in split if row["prompt"][0]["content"] == f"<image>{colour}"]
            most = max(Counter(row["reward_model"]["ground_truth"] for row in own).values())
            assert most / len(own) < (0.25 if len(own) > 1000 else 0.34)


def test_blank_rows_differ_in_the_image_only(rows):
    for split, blank in zip(rows, toy_vision.make_rows(blank=True)):
        assert {decoded(row).tobytes() for row in blank} == {bytes([255]) * 72 * 72 * 3}
        assert [row | {"images": []} for row in blank] == [row | {"images": []} for row in split]


def test_responses_as_documented():
    assert toy_vision.worked_response("blue", "R.BGr.g.b") == "r.b1gr.1g.b2=2"
    assert toy_vision.worked_response("blue", "R.BGr.g.b", (0, -1, 1)) == "r.b1gr.0g.b2=2"
    assert toy_vision.worked_response("red", "RRrGr.g.b", (1, 0, 0)) == "rrr4gr.5g.b5=5"
    assert toy_vision.glance_response("green", "R.BGr.g.b") == "=2"
    rng = random.Random(0)
    lengths = {len(toy_vision.demonstration(*toy_vision.make_board(rng), rng)) for _ in range(500)}
    assert lengths == {2, 14}  # with the end token within --max-response-length's default


def test_processor_files_are_the_generators(processor, tmp_path):
    toy_vision.make_processor().save_pretrained(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (MODEL / path.name).read_text()
    text = "".join(map(chr, range(32, 127))) + "\n<|im_start|>user\n<image>red<|im_end|><pad>"
    tokenizer = processor.tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == toy_vision.make_processor().tokenizer.encode(text)


def test_prompt(processor):
    content = [{"type": "image"}, {"type": "text", "text": "red"}]
    text = "<|im_start|>user\n<image>red<|im_end|>\n<|im_start|>assistant\n"
    as_text = [{"role": "user", "content": "<image>red"}]
    for messages in (as_text, [{"role": "user", "content": content}]):
        for own in (processor, processor.tokenizer):
            assert own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    encoded = processor(text=[text], images=[toy_vision.draw_board("rR.bGbg..")], return_tensors="pt")
    assert encoded["input_ids"].shape == (1, 21)  # within --max-prompt-length's default
    assert (encoded["input_ids"] == processor.image_token_id).sum() == 9
    assert encoded["pixel_values"].shape == (1, 1, 3, 24, 24)


def test_special_ids_and_size(processor):
    model = AutoModelForImageTextToText.from_pretrained(MODEL)
    text, tokenizer = model.config.text_config, processor.tokenizer
    assert tokenizer.eos_token_id == text.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == text.pad_token_id == model.generation_config.pad_token_id
    assert len(tokenizer) == text.vocab_size
    assert model.config.tie_word_embeddings and text.tie_word_embeddings  # vLLM reads the second
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 3 * 2**20


def accuracy(processor, rows: list[dict], first: str | None = None, **how) -> float:
    """first: what the response must not begin with."""
    model = AutoModelForImageTextToText.from_pretrained(MODEL).eval()
    texts = [processor.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = processor(text=texts, images=[[decoded(row)] for row in rows], return_tensors="pt")
    if first:
        how["begin_suppress_tokens"] = processor.tokenizer.encode(first)
    torch.manual_seed(0)
    out = model.generate(**inputs, max_new_tokens=16, **how)
    answers = processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return sum(compute_score("toy/vision", text, truth)["score"] for text, truth in zip(answers, truths)) / len(rows)


def test_start_glances_and_could_count(processor, rows):
    """Greedy and sampled it is right in less than 40 %; made to work, in most; without the image in none of these."""
    greedy = {"do_sample": False, "temperature": None}
    assert 0.05 <= accuracy(processor, rows[1], **greedy) <= 0.4
    assert 0.2 <= accuracy(processor, rows[1], do_sample=True) <= 0.4
    assert accuracy(processor, rows[1], "=", **greedy) >= 0.8
    _, blank = toy_vision.make_rows(0, blank=True)
    assert accuracy(processor, blank, "=", **greedy) <= 0.25


def test_warm_up_learns_and_repeats_itself(tmp_path: Path):
    processor, sizes = toy_vision.make_processor(), {"steps": 20, "batch_size": 8, "hidden_size": 64}
    model, losses = toy_vision.warm_up(processor, set(), **sizes)
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    toy.save_model(model, processor, tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    own = AutoProcessor.from_pretrained(tmp_path)
    inputs = own(text=["<image>red"], images=[toy_vision.draw_board("rR.bGbg..")], return_tensors="pt")
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    again, _ = toy_vision.warm_up(processor, set(), **sizes)
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p, q)


# ---- the scripts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """flags(blank=False, count=32): those of a small run, on held-out rows with their images or with white ones. Each
    row is read, with its image, when a run starts."""

    @functools.cache
    def flags(blank: bool = False, count: int = 32) -> list[str]:
        file = tmp_path_factory.mktemp("rows") / "val.jsonl"
        _, rows = toy_vision.make_rows(0, count, blank=blank)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = ["--train-files", str(file), "--val-files", str(file)]
        sizes = ["--prompts-per-step", "8", "--group-size", "4", "--micro-batch-tokens", "400"]
        return ["--model", str(MODEL), *files, *sizes, "--val-every", "0", "--no-val-before-train", "--save-every", "0"]

    return flags


def of_steps(folder: Path) -> list[dict]:
    return [row for row in metrics(folder) if "reward/mean" in row]


@pytest.mark.parametrize("script", with_slow(["grpo", "ppo", "remax", "dapo"], "grpo", "remax", "dapo"))
def test_every_script_trains_the_whole_model_and_exports_it(tmp_path, flags, script):
    ran(fork(script, tmp_path, *flags(), "--run-name", "run", "--total-steps", "2", "--kl-coef", "0.01"))
    rows = of_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["rollout/logp_diff_max"] < 1e-4  # it trains on what the engine saw
    assert unexplained_metrics(tmp_path / "run", "metrics.md") == []
    start, model = (AutoModelForImageTextToText.from_pretrained(path) for path in (MODEL, tmp_path / "run/model"))
    for name, p in start.named_parameters():
        assert not torch.equal(p, model.get_parameter(name)), name
    exported, ours = (AutoProcessor.from_pretrained(path) for path in (tmp_path / "run/model", MODEL))
    assert exported.to_dict() == ours.to_dict()
    assert exported.chat_template == exported.tokenizer.chat_template == toy_vision.CHAT_TEMPLATE


def questions_of_equal_text_are_apart(run: Path, blank: bool) -> None:
    """In the run page: each row of the data set has its own group, answer and image, the same at each validation."""
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 3 and {row["data_source"] for row in rows} == {"toy/vision"}
    assert {row["step"]: row["index"] for row in rows} == {0: 255, 6: 255}
    index, _, notes = pack_samples(run, 1e9)
    texts = index["texts"]
    found = {
        (texts[kind], step, texts[group]) for kind, step, group in zip(index["kind"], index["step"], index["group"])
    }
    assert notes == [] and sum(kind == "val" for kind, *_ in found) == 2 * 256
    prompts = {texts[prompt] for kind, prompt in zip(index["kind"], index["prompt"]) if texts[kind] == "val"}
    assert len(prompts) == 256 or blank  # two white images with the same colour and answer are one prompt
    trained = pq.read_table(run / "rollouts/step_000001-rank_0.parquet").to_pylist()
    kept = {name for row in [*rows, *trained] for name in row["images"]}
    assert {file.name for file in (run / "images").iterdir()} >= kept and len(kept) >= len(prompts)
    assert Image.open(run / "images" / rows[0]["images"][0]).size == (72, 72)


@pytest.mark.slow
def test_the_image_decides_what_is_learnt(tmp_path, flags):
    """The same steps with white images gain nothing: 0.20 is what one answer to all questions earns."""
    accuracy = {}
    for blank in (False, True):
        sizes = ["--prompts-per-step", "32", "--group-size", "8", "--lr", "5e-4", "--micro-batch-tokens", "16384"]
        args = [*flags(blank, 256), *sizes, "--total-steps", "6", "--val-every", "6", "--val-before-train"]
        done = ran(fork("grpo", tmp_path, *args, "--no-export-model", "--run-name", str(blank)))
        shown = re.findall(r"^images of sample \d: (.*)", done.stdout, re.M)
        assert len(shown) == 3 and all(Path(file).is_file() for file in shown)
        rows = metrics(tmp_path / str(blank))
        accuracy[blank] = [row["val/toy/vision/mean@1"] for row in rows if "val/toy/vision/mean@1" in row]
        questions_of_equal_text_are_apart(tmp_path / str(blank), blank)
    assert accuracy[False][0] < 0.4 and accuracy[False][-1] > 0.8
    assert max(accuracy[True]) < 0.3


@pytest.mark.slow
def test_vllm_sees_the_same_images(tmp_path, flags):
    skip_without_vllm()
    args = [*flags(), "--total-steps", "2", "--lr", "1e-3", "--rollout-engine", "vllm", "--no-export-model"]
    ran(fork("grpo", tmp_path, *args, "--run-name", "run"))
    rows = of_steps(tmp_path / "run")
    assert len(rows) == 2 and all(row["rollout/logp_diff_max"] < 1e-4 for row in rows)


def test_two_ranks_train_as_one(tmp_path, flags):
    """Two updates of two micro-batches and more. 1e-3: as in test_scripts.py. A scorer prints the prompt, in which an
    image is one placeholder, to a log of each rank; the console shows the first rank's."""
    (tmp_path / "read.py").write_text("def score(full_prompt, **_):\n    print(repr(full_prompt))\n    return 0\n")
    args = [*flags(), "--total-steps", "1", "--num-mini-batches", "2", "--no-export-model", "--save-rollouts", "all"]
    args += ["--shadow-reward", f"{tmp_path / 'read.py'}:score"]
    read = r"'<\|im_start\|>user\\n<image>(red|green|blue)<\|im_end\|>\\n<\|im_start\|>assistant\\n'"
    for ranks in (1, 2):
        done = ran(fork("grpo", tmp_path, *args, "--run-name", str(ranks), ranks=ranks))
        assert 1 <= len(re.findall(f"^scorer read.score: {read}$", done.stdout, re.M)) <= 3
        for rank in range(ranks):
            lines = (tmp_path / f"{ranks}/scorers-{rank}.log").read_text().splitlines()
            assert lines and all(re.fullmatch(f"step 1 read.score: {read}", line) for line in lines)
    one, two = (of_steps(tmp_path / name) for name in ("1", "2"))
    assert len(one) == len(two) == 1
    for ours, theirs in zip(two, one):
        for key, value in theirs.items():
            if key.startswith(("actor/", "advantages/", "training/rollout_probs_diff")) and "clipfrac" not in key:
                assert ours[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key
            elif key.startswith(("reward/", "response_length/", "training/")):
                assert ours[key] == value, key
    one, two = (
        {key: (row["response"], row["score"]) for key, row in rollouts(tmp_path / name).items()} for name in ("1", "2")
    )
    assert one == two


@pytest.mark.slow
def test_resumed_equals_never_interrupted(tmp_path, flags):
    """dapo.py also saves groups that are left over, with their images."""
    args = [*flags(count=256), "--save-every", "1", "--num-mini-batches", "2", "--group-size", "8"]
    ran(fork("dapo", tmp_path, *args, "--run-name", "whole", "--total-steps", "4"))
    for steps in ("2", "4"):
        args += ["--resume", "auto"] if steps == "4" else []
        ran(fork("dapo", tmp_path, *args, "--run-name", "resumed", "--total-steps", steps))
    rows = metrics(tmp_path / "whole")
    assert rows[1]["training/rows_left_over"] > 0
    assert metrics(tmp_path / "resumed") == rows
    assert rollouts(tmp_path / "resumed") == rollouts(tmp_path / "whole")


def test_a_reward_model_is_refused(tmp_path, flags):
    done = fork("grpo", tmp_path, *flags(), "--reward-model", TOY_MODEL)
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and "val.jsonl row 0 has images: --reward-model reads text only" in error
