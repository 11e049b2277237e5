"""The embedded multi-turn task: products too large for a small model's head, and a calculator that it mostly ignores.

    python data/toy_tools.py     rewrites data/toy_tools/: train.jsonl, val.jsonl and model/ (three minutes on one core)

    user        630*52
    assistant   <tool_call>\\n{"name": "calculator", "arguments": {"expression": "630*52"}}\\n</tool_call>
    tool        32760
    assistant   =32760          or this at once, in the head; scored by rewards/arithmetic.py

The start is data/toy.py's Llama after it has imitated pupils of mixed quality (`demonstration`): most answer in the
head, and rightly, but what they do there is beyond a model of this size, which learns to guess: rarely right. The
others call the calculator, and slip: a wrong digit, a call that is no JSON, another answer than the result. So its
greedy answer comes from the head, while among the samples of a prompt some call, and nearly half of these are right. RL
has to find out that the call pays, then to make it reliable. Demonstrations whose prompt has no tools are all in the
head: a run without tools starts from there, and stays there. The held-out products occur neither in train.jsonl nor in
the warm-up. Every product has five digits, so a copied digit is always as far from its original; where it is not, a
model of two layers mistakes repeated digits.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import random
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data import toy

FOLDER = Path(__file__).parent / "toy_tools"
CALL = ["<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>"]  # one token each
# Of the tools only the names are shown: the calculator's JSON schema would be 300 tokens. {% generation %} marks what
# the assistant writes, for the labels of the warm-up.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\ntools:' }}
{%- for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}{{ '\\n' if message['content'] or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]  # what the template reads of agent's schema
SHARE_WITHOUT_TOOLS = 0.15  # of the demonstrations
SHARE_CALLS = 0.25  # of those with tools
SHARE_WRONG_DIGIT = 0.15  # of the calls, as the next two
SHARE_MALFORMED = 0.15
SHARE_IGNORED = 0.1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """data/toy.py's, with one token more for the tool's name and each fixed piece of a call."""
    return toy.make_tokenizer([*toy.ROLES, "calculator", *CALL], CHAT_TEMPLATE)


def make_rows(n_train: int = 4096, n_val: int = 256, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Distinct products of a three-digit and a two-digit factor as rows of verl's form, (train, val)."""
    rng = random.Random(seed)
    factors: dict[tuple[int, int], None] = {}  # in order of their first draw
    while len(factors) < n_train + n_val:
        factors[rng.randint(200, 999), rng.randint(50, 99)] = None

    def row(split: str, index: int, a: int, b: int) -> dict:
        return {
            "data_source": "toy/arithmetic",
            "prompt": [{"role": "user", "content": f"{a}*{b}"}],
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
            "extra_info": {"split": split, "index": index},
        }

    pairs = list(factors)
    val = [row("val", i, a, b) for i, (a, b) in enumerate(pairs[:n_val])]
    train = [row("train", i, a, b) for i, (a, b) in enumerate(pairs[n_val:])]
    return train, val


def tool_call(expression: str) -> str:
    return f"{CALL[0]}\n{CALL[1]}{expression}{CALL[2]}\n{CALL[3]}"


def demonstration(a: int, b: int, with_tools: bool, rng: random.Random) -> list[dict]:
    """The messages after the user's: an answer in the head, or a call, its result and the answer."""
    if not with_tools or rng.random() >= SHARE_CALLS:
        return [{"role": "assistant", "content": f"={a * b}"}]
    expression = f"{a}*{b}"
    if rng.random() < SHARE_WRONG_DIGIT:
        place = rng.choice([0, 1, 2, 4, 5])
        expression = expression[:place] + rng.choice("56789") + expression[place + 1 :]
    call = tool_call(expression)
    if rng.random() < SHARE_MALFORMED:
        return [{"role": "assistant", "content": call.replace(CALL[2], "")}]
    left, right = expression.split("*")
    result = int(left) * int(right)
    answer = rng.randint(1000, 98901) if rng.random() < SHARE_IGNORED else result
    return [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"={answer}"},
    ]


def warm_up(
    tokenizer: PreTrainedTokenizerFast, held_out: set[str], *, steps: int = 700, **settings
) -> tuple[PreTrainedModel, list[float]]:
    """`toy.imitate` with demonstrations of products; prompts "a*b" in `held_out` are skipped."""

    def draw(rng: random.Random) -> tuple[list[int], list[int], dict]:
        while True:
            a, b = rng.randint(200, 999), rng.randint(50, 99)
            if f"{a}*{b}" not in held_out:
                break
        with_tools = rng.random() >= SHARE_WITHOUT_TOOLS
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{a}*{b}"}, *demonstration(a, b, with_tools, rng)],
            tools=TOOLS if with_tools else None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return encoded["input_ids"], encoded["assistant_masks"], {}

    return toy.imitate(tokenizer, draw, steps=steps, **settings)


if __name__ == "__main__":
    toy.write_task(FOLDER, make_tokenizer(), make_rows(), warm_up)
