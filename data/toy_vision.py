"""The embedded task with images: how many of the shapes on a board have the colour that is asked for, and a small
vision-language model that could count them but mostly only glances.

    python data/toy_vision.py             rewrites data/toy_vision/: rows and model/ (five minutes on one core)
    python data/toy_vision.py --rows      only the rows, which are not in the repository: make setup does it
    python data/toy_vision.py --blank     data/toy_vision/blank/: the same rows with white images, for a control

    user        <image>red          3 x 3 cells of red, green and blue squares and discs; some are empty
    assistant   r.b1gr.2..b2=2      worked: each row of the board, and how many there are so far
    assistant   =1                  at a glance: those of the first column

The start is an Idefics3 of 0.65 M parameters (data/toy.py's Llama behind a tower of two layers, 9 tokens an image) that
has imitated pupils of mixed quality (`demonstration`): most glance, the others work and miscount in one row of ten. RL
has to find out that the working pays, then to make it reliable. Without the image nothing can be learnt: the question
is a colour only, and each answer, 1 to 5, is as frequent. The held-out boards are neither in train.jsonl nor in the
warm-up. (It is an Idefics3 because its processor needs no torchvision.)
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import base64
import io
import json
import random
from pathlib import Path

import torch
import tyro
from PIL import Image, ImageDraw
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from data import toy

FOLDER = Path(__file__).parent / "toy_vision"
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SIDE = 3  # cells
CELL = 24  # pixels; the processor makes them 8: two patches of the tower, and with both dimensions one token
LARGEST = 5
IMAGE = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]  # what the processor asks for
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHARE_WORKED = 0.35  # of the demonstrations
SHARE_SLIPS = 0.1  # of the rows of a working


def make_processor() -> Idefics3Processor:
    """data/toy.py's tokenizer, with a token for each colour; an image of any size becomes 24 x 24 pixels, 9 tokens."""
    size = {"longest_edge": 8 * SIDE}
    return Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False),
        tokenizer=toy.make_tokenizer([*toy.ROLES, *IMAGE, *COLOURS], CHAT_TEMPLATE),
        image_seq_len=SIDE**2,
        chat_template=CHAT_TEMPLATE,
    )


def make_board(rng: random.Random) -> tuple[str, str]:
    """A colour, and a board on which it occurs 1 to 5 times: its 9 cells, such as "rR.bGbg..", with capitals for
    squares and points for empty cells."""
    colour = rng.choice(list(COLOURS))
    count = rng.randint(1, LARGEST)
    others = [other[0] for other in COLOURS if other != colour] + ["."]
    cells = [colour[0]] * count + [rng.choice(others) for _ in range(SIDE**2 - count)]
    rng.shuffle(cells)
    return colour, "".join(rng.choice([cell.lower(), cell.upper()]) for cell in cells)


def draw_board(board: str) -> Image.Image:
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    pen = ImageDraw.Draw(image)
    colours = {name[0]: value for name, value in COLOURS.items()}
    for k, cell in enumerate(board):
        if cell != ".":
            x, y = k % SIDE * CELL, k // SIDE * CELL
            shape = pen.rectangle if cell.isupper() else pen.ellipse
            shape((x + 3, y + 3, x + CELL - 4, y + CELL - 4), fill=colours[cell.lower()])
    return image


def count(colour: str, board: str) -> int:
    return board.lower().count(colour[0])


def make_rows(n_train: int = 4096, n_val: int = 256, seed: int = 0, blank: bool = False) -> tuple[list, list]:
    """Distinct questions as rows of verl's form, (train, val). blank: with white images."""
    rng = random.Random(seed)
    questions: dict[tuple[str, str], None] = {}  # in order of their first draw
    while len(questions) < n_train + n_val:
        questions[make_board(rng)] = None

    def row(split: str, index: int, colour: str, board: str) -> dict:
        png = io.BytesIO()
        draw_board("." * SIDE**2 if blank else board).save(png, "PNG")
        return {
            "data_source": "toy/vision",
            "prompt": [{"role": "user", "content": f"<image>{colour}"}],
            "images": ["data:image/png;base64," + base64.b64encode(png.getvalue()).decode()],
            "reward_model": {"style": "rule", "ground_truth": str(count(colour, board))},
            "extra_info": {"split": split, "index": index, "board": board},
        }

    boards = list(questions)
    val = [row("val", i, *question) for i, question in enumerate(boards[:n_val])]
    train = [row("train", i, *question) for i, question in enumerate(boards[n_val:])]
    return train, val


def glance_response(colour: str, board: str) -> str:
    """ "=1": the shapes of the first column only."""
    return f"={count(colour, board[::SIDE])}"


def worked_response(colour: str, board: str, slips=(0,) * SIDE) -> str:
    """ "r.b1gr.2..b2=2": each row and the count so far (with its slip, if any)."""
    text, total = "", 0
    for k, slip in enumerate(slips):
        row = board[SIDE * k : SIDE * (k + 1)].lower()
        total = max(0, total + count(colour, row) + slip)
        text += f"{row}{total}"
    return f"{text}={total}"


def demonstration(colour: str, board: str, rng: random.Random) -> str:
    if rng.random() >= SHARE_WORKED:
        return glance_response(colour, board)
    return worked_response(colour, board, [(rng.random() < SHARE_SLIPS) * rng.choice([-1, 1]) for _ in range(SIDE)])


def make_model(tokenizer: PreTrainedTokenizerBase, hidden_size: int) -> Idefics3ForConditionalGeneration:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config=toy.llama_config(tokenizer, hidden_size).to_dict(),
        vision_config=tower | {"image_size": 8 * SIDE, "patch_size": 4, "initializer_range": 0.06},
        scale_factor=2,  # 2 x 2 patches are a token
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return Idefics3ForConditionalGeneration(config)


def warm_up(
    processor: Idefics3Processor, held_out: set[tuple[str, str]], *, steps: int = 1000, **settings
) -> tuple[PreTrainedModel, list[float]]:
    """`toy.imitate` with demonstrations of boards; questions in `held_out` are skipped."""
    tokenizer = processor.tokenizer

    def draw(rng: random.Random) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
        while True:
            question = make_board(rng)
            if question not in held_out:
                break
        messages = [{"role": "user", "content": f"<image>{question[0]}"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = processor(text=[prompt], images=[draw_board(question[1])], return_tensors="pt")
        prompt_ids = encoded["input_ids"][0].tolist()
        answer = [*tokenizer.encode(demonstration(*question, rng)), tokenizer.eos_token_id]
        pixels = {"pixel_values": encoded["pixel_values"][0]}
        return prompt_ids + answer, [0] * len(prompt_ids) + [1] * len(answer), pixels

    return toy.imitate(tokenizer, draw, steps=steps, make_model=make_model, **settings)


def write_rows(folder: Path, blank: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "val"), make_rows(blank=blank)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(rows: bool = False, blank: bool = False) -> None:
    """Write rows and model; with a flag, only these rows.

    Args:
        rows: train.jsonl and val.jsonl.
        blank: the same in blank/, with white images.
    """
    write_rows(FOLDER / "blank" if blank else FOLDER, blank)
    if rows or blank:
        return
    torch.set_num_threads(1)  # the sums inside a matrix product depend on the number of threads
    processor = make_processor()
    _, val = make_rows()
    held_out = {(row["prompt"][0]["content"].removeprefix("<image>"), row["extra_info"]["board"]) for row in val}
    model, losses = warm_up(processor, held_out)
    toy.save_model(model, processor, FOLDER / "model")
    print(f"warm-up loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {FOLDER}")


if __name__ == "__main__":
    tyro.cli(main)
