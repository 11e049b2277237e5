"""The embedded task: three-digit addition, and a small model that could do it but mostly does not take the trouble.

    python data/toy.py       rewrites data/toy/: train.jsonl, val.jsonl and model/ (two minutes on one core)

A response is "=" and the sum, after a working or without one: the sum of each column from the right, with its carry.

    137+285  ->  12,12,4=422     worked: 7+5=12, 3+8+1=12, 1+2+1=4
    137+285  ->  =312            in the head, with the carries forgotten: right only for the 3 sums in 10 that have none

The start is a 0.5 M parameter Llama that imitates pupils of mixed quality (`demonstration`): most answer in the head,
the others show their working but slip in one column of ten. So its greedy answer comes from the head, while among the
samples of a prompt some show a working, which is right twice as often. RL has to find out that the working pays, and
then to make it reliable: reward and response length rise together. The held-out sums occur, in either order, neither in
train.jsonl nor in the warm-up. (It is a Llama because AutoTokenizer ignores tokenizer.json's pre-tokenizer for Qwen2.)
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

FOLDER = Path(__file__).parent / "toy"
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]  # ids 0 to 3
ROLES = ["system", "user", "assistant", "tool"]  # one token each: a prompt is 15 tokens, not 26
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHARE_WORKED = 0.35  # of the demonstrations
SHARE_SLIPS = 0.1  # of the columns of a working


def make_tokenizer(words: list[str] = ROLES, chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and newline, each special token and each of `words`: 104 in all."""
    tokens = SPECIAL + words + ["\n"] + [chr(c) for c in range(32, 127)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    core.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_rows(n_train: int = 4096, n_val: int = 256, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Distinct unordered pairs of three-digit numbers as rows of verl's form, (train, val)."""
    rng = random.Random(seed)
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    while len(pairs) < n_train + n_val:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        pairs.setdefault((min(a, b), max(a, b)), (a, b))

    def row(split: str, index: int, a: int, b: int) -> dict:
        return {
            "data_source": "toy/arithmetic",
            "prompt": [{"role": "user", "content": f"{a}+{b}"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": index},
        }

    sums = list(pairs.values())
    val = [row("val", i, a, b) for i, (a, b) in enumerate(sums[:n_val])]
    train = [row("train", i, a, b) for i, (a, b) in enumerate(sums[n_val:])]
    return train, val


def careless_response(a: int, b: int) -> str:
    """137, 285 -> "=312": each column is added, but no carry is taken to the next one."""
    units, tens, hundreds = (a // place % 10 + b // place % 10 for place in (1, 10, 100))
    return f"={hundreds}{tens % 10}{units % 10}"


def worked_response(a: int, b: int, slips=(0, 0, 0)) -> str:
    """137, 285 -> "12,12,4=422": the sum of each column from the right, with its carry (and its slip, if any)."""
    columns, carry = [], 0
    for place, slip in zip((1, 10, 100), slips):
        columns.append(a // place % 10 + b // place % 10 + carry + slip)
        carry = columns[-1] // 10
    units, tens, hundreds = columns
    return f"{units},{tens},{hundreds}={hundreds}{tens % 10}{units % 10}"


def demonstration(
    a: int, b: int, rng: random.Random, share_worked: float = SHARE_WORKED, share_slips: float = SHARE_SLIPS
) -> str:
    if rng.random() >= share_worked:
        return careless_response(a, b)
    return worked_response(a, b, [int(rng.random() < share_slips) for _ in range(3)])


def llama_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 32,  # heads of 32: the smallest that vLLM supports on CPU
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=256,
        attention_bias=True,  # with the wider start below, half the steps
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_llama(tokenizer: PreTrainedTokenizerFast, hidden_size: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(llama_config(tokenizer, hidden_size))


def encode_demonstration(
    tokenizer: PreTrainedTokenizerFast, question: str, response: str
) -> tuple[list[int], list[int], dict]:
    """One turn as `imitate` wants it: the model is to write the response and its end."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = len(tokenizer.encode(prompt))
    ids = [*tokenizer.encode(prompt + response), tokenizer.eos_token_id]
    return ids, [0] * start + [1] * (len(ids) - start), {}


def warm_up(
    tokenizer: PreTrainedTokenizerFast,
    held_out: set[str],
    *,
    steps: int = 600,
    demonstrate: Callable[[int, int, random.Random], str] = demonstration,
    **settings,
) -> tuple[PreTrainedModel, list[float]]:
    """`imitate` with demonstrations of sums; prompts "a+b" in `held_out` are skipped, also as "b+a"."""

    def draw(rng: random.Random) -> tuple[list[int], list[int], dict]:
        while True:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            if f"{a}+{b}" not in held_out and f"{b}+{a}" not in held_out:
                break
        return encode_demonstration(tokenizer, f"{a}+{b}", demonstrate(a, b, rng))

    return imitate(tokenizer, draw, steps=steps, **settings)


def imitate(
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[random.Random], tuple],
    *,
    steps: int,
    make_model: Callable[..., PreTrainedModel] = make_llama,
    batch_size: int = 64,
    lr: float = 3e-3,
    seed: int = 0,
    hidden_size: int = 128,
) -> tuple[PreTrainedModel, list[float]]:
    """A model after `steps` fresh batches of demonstrations, and the loss of each step in nats per token.

    draw(rng): one demonstration's token ids, 1 where the model is to write and 0 elsewhere, and other inputs of the
    model, tensors of one size for all demonstrations.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = make_model(tokenizer, hidden_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    losses = []
    for step in range(steps):
        rows, masks, inputs = zip(*[draw(rng) for _ in range(batch_size)])
        length = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])  # (B, L)
        written = torch.tensor([mask + [0] * (length - len(mask)) for mask in masks])
        labels = ids.masked_fill(written == 0, -100)
        more = {name: torch.stack([row[name] for row in inputs]) for name in inputs[0]}
        logits = model(ids, **more).logits[:, :-1]  # causal: the padding on the right is not seen
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


def save_model(model: PreTrainedModel, processor: PreTrainedTokenizerFast | ProcessorMixin, folder: Path) -> None:
    text = model.config.get_text_config()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_task(
    folder: Path, tokenizer: PreTrainedTokenizerFast, rows: tuple[list[dict], list[dict]], warm_up: Callable[..., tuple]
) -> None:
    """train.jsonl, val.jsonl and model/. warm_up(tokenizer, the questions of val) -> model, losses."""
    torch.set_num_threads(1)  # the sums inside a matrix product depend on the number of threads
    folder.mkdir(exist_ok=True)
    for name, of_split in zip(("train", "val"), rows):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))
    model, losses = warm_up(tokenizer, {row["prompt"][0]["content"] for row in rows[1]})
    save_model(model, tokenizer, folder / "model")
    print(f"warm-up loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {folder}")


if __name__ == "__main__":
    write_task(FOLDER, make_tokenizer(), make_rows(), warm_up)
