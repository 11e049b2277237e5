"""The likelihood of the reference answer: the reward of each response against the model on one text, in float64; which
groups train."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import toy
from lib.data_proto import DataProto
from lib.model import ForwardConfig, Reference, load_model
from lib.rollout import Generated, Rollouts, add_responses
from lib.sampling import Sampling


def test_rewards_are_mean_probabilities_of_the_reference_answer(module_of):
    module, folder = module_of("rlpr"), str(toy.FOLDER / "model")
    tokenizer, sampling = AutoTokenizer.from_pretrained(folder), Sampling(16)
    questions = ["137+285", "137+285", "20+30", "500+500", "1+2"]
    responses = ["12,12,4=999", "=422", "7,1,4", "0,0,10=1=1000", "3,0,0,0,0,0,0,0=3"]  # the last one has no room
    truths, fits = ["422", "422", "50", "1000", "3333"], [True, True, False, True, False]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in questions]
    prompts = tokenizer(chats, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    t = {**prompts, "position_ids": (prompts["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    objects = {"reward_model": np.array([{"ground_truth": truth} for truth in truths], dtype=object)}
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id][:16] for text in responses]
    rows = [Generated(own, [0.0] * len(own), "stop") for own in ids]
    batch = add_responses(DataProto.from_dict(t, objects), rows, tokenizer.pad_token_id)
    engine = SimpleNamespace(route_layers=(), pad_token_id=tokenizer.pad_token_id)
    rollouts = SimpleNamespace(sampling=sampling, engine=engine, async_level=0)
    rollouts.given = lambda *given: Rollouts.given(rollouts, *given)
    actor = Reference(load_model(folder), ForwardConfig(100, sampling, None, torch.float32))
    args = SimpleNamespace(answer_after="=")
    ours = module.reference_likelihoods(args, rollouts, actor, batch, tokenizer)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def likelihood(before: str, answer: str) -> float:
        before, answer = tokenizer.encode(before), tokenizer.encode(answer)
        with torch.no_grad():
            probs = model(torch.tensor([before + answer])).logits[0].softmax(-1)
        return math.fsum(probs[len(before) - 1 + k, token].item() for k, token in enumerate(answer)) / len(answer)

    for i, (chat, text, truth) in enumerate(zip(chats, responses, truths)):
        expected = likelihood(chat + text.rpartition("=")[0] + "=", truth) if fits[i] else 0
        assert ours[0, i].item() == pytest.approx(expected, abs=1e-5)
        assert ours[1, i].item() == pytest.approx(likelihood(chat + "=", truth), abs=1e-5)
    assert ours[0, 0] > ours[1, 0] + 0.1  # the working of row 0 is right


def test_the_moving_average(module_of):
    average = module_of("rlpr").MovingAverage()
    assert average.update(0.2) == 0.2
    assert average.update(0.4) == pytest.approx(0.9 * 0.2 + 0.1 * 0.4)
