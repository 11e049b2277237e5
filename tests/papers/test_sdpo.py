"""Self-distillation: the teacher's log-probs, and the loss."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import toy
from tests.common import SMALL, fork, metrics, ran


def test_the_teacher_scores_the_same_tokens_after_the_answer(module_of):
    """Against each row alone, in float64."""
    module = module_of("sdpo")
    model = AutoModelForCausalLM.from_pretrained(toy.FOLDER / "model", dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(toy.FOLDER / "model")
    responses = [tokenizer.encode(text) for text in ("=12", "7,12,4=427", "=")]
    T = max(map(len, responses))
    mask = torch.tensor([[1] * len(ids) + [0] * (T - len(ids)) for ids in responses])
    padded = torch.tensor([ids + [0] * (T - len(ids)) for ids in responses])
    questions, answers = ["137+285", "1+2", "20+30"], ["422", "3", "50"]
    tensors = {"responses": padded, "response_mask": mask, "attention_mask": torch.cat([mask[:, :1], mask], 1)}
    objects = {
        "raw_prompt": [[{"role": "user", "content": question}] for question in questions],
        "reward_model": [{"ground_truth": answer} for answer in answers],
    }
    data = SimpleNamespace(tokenizer=tokenizer, chat_template_kwargs={"add_generation_prompt": True})
    t = module.with_answer(module.DataProto.from_dict(tensors, objects), data).batch
    with torch.no_grad():
        logits = model(**{name: t[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
    ours = logits[:, -T - 1 : -1].log_softmax(-1).gather(2, padded[:, :, None])[:, :, 0]  # (B, T)
    for i, ids in enumerate(responses):
        text = f"<|im_start|>user\n{questions[i]}\nAnswer: {answers[i]}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text)
        with torch.no_grad():
            alone = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert ours[i, : len(ids)].tolist() == pytest.approx([alone[j, token].item() for j, token in enumerate(ids)])


def test_self_distillation_trains_on_the_kl_to_the_teacher(script_of, tmp_path):
    """With one update a step the ratio is 1, so the loss is the mean log ratio. Rewards count for nothing."""
    ran(fork(str(script_of("sdpo").with_suffix("")), tmp_path, *SMALL, "--total-steps", "2", "--run-name", "run"))
    first, second = metrics(tmp_path / "run")
    for row in (first, second):
        assert row["actor/pg_loss"] == pytest.approx(row["actor/teacher_kl"], rel=1e-5)
        assert row["actor/teacher_kl"] > 1 and row["actor/grad_norm"] > 0  # the toy model has never seen an answer
    assert first["actor/teacher_kl"] != second["actor/teacher_kl"]
