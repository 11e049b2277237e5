"""The user of an episode is a frozen model: it asks the next question, until there have been `questions`."""

from functools import cache
from threading import Lock

from transformers import AutoModelForCausalLM, AutoTokenizer

from agent import BaseInteraction
from agent.tools.base import in_thread

ONE_AT_A_TIME = Lock()


@cache
def load(path: str):
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def sample(path: str, messages: list[dict]) -> str:
    with ONE_AT_A_TIME:
        model, tokenizer = load(path)
    other = {"user": "assistant", "assistant": "user"}  # to itself, the opponent is the assistant
    seen = [message | {"role": other.get(message["role"], "system")} for message in messages]
    prompt = tokenizer.apply_chat_template(seen, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with ONE_AT_A_TIME:
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=True)[0]
    return tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)


class Opponent(BaseInteraction):
    async def start(self, instance_id: str, *, model: str, questions: int = 1, **kwargs) -> None:
        self.model, self.left = model, questions

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        """(episode over, the opponent's message, reward of this turn, metrics)"""
        self.left -= 1
        return self.left < 0, "" if self.left < 0 else await in_thread(sample, self.model, messages), 0.0, {}
