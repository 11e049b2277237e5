"""The embedded mixture of experts: the task of data/toy.py, for a Mixtral of 0.54 M parameters with 8 experts a layer,
of which a token takes 2.

    python data/toy_moe.py       rewrites data/toy_moe/model (three minutes on one core)

    python grpo.py --config data/toy/preset.yaml --model data/toy_moe/model

Its weights are stored in bfloat16, which halves the files.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from data.toy import llama_config, make_rows, make_tokenizer, save_model, warm_up

FOLDER = Path(__file__).parent / "toy_moe"


def make_mixtral(tokenizer: PreTrainedTokenizerFast, hidden_size: int) -> MixtralForCausalLM:
    config = llama_config(tokenizer, hidden_size).to_dict()
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shared += ("max_position_embeddings", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    sizes = {name: config[name] for name in (*shared, "pad_token_id")}
    mixture = {"intermediate_size": hidden_size // 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **mixture, sliding_window=None))


def main() -> None:
    torch.set_num_threads(1)  # the sums inside a matrix product depend on the number of threads
    tokenizer = make_tokenizer()
    _, val = make_rows()
    held_out = {row["prompt"][0]["content"] for row in val}
    model, losses = warm_up(tokenizer, held_out, steps=800, make_model=make_mixtral)
    save_model(model.to(torch.bfloat16), tokenizer, FOLDER / "model")
    print(f"warm-up loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {FOLDER}")


if __name__ == "__main__":
    main()
