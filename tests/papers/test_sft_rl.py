"""SFT mixed with RL: the gradient of demonstrations, and learning from them."""

import json
from types import SimpleNamespace

import pytest
import torch

from data import toy
from tests.common import SMALL, fork, metrics, ran


@pytest.mark.parametrize("phi", [False, True])
def test_the_gradient_of_demonstrations(module_of, monkeypatch, phi):
    """Of two micro-batches, against a loop in float64."""
    sft_rl, generator = module_of("sft_rl"), torch.Generator().manual_seed(0)
    log_probs = (-torch.rand(4, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])
    demos = sft_rl.DataProto.from_dict({"response_mask": mask, "row": torch.arange(4)})
    actor = SimpleNamespace(backward=torch.Tensor.backward)
    actor.log_probs = lambda micro: (log_probs[micro.batch["row"]], None)
    monkeypatch.setattr(sft_rl, "micro_batches", lambda batch, _: [batch[:2], batch[2:]])
    monkeypatch.setattr(sft_rl, "global_counts", lambda mask: (6, 3))
    sft_rl.imitate(sft_rl.Args(phi=phi), actor, demos, 0.25)
    for gradient, p, own in zip(*(x.flatten().tolist() for x in (log_probs.grad, log_probs.exp(), mask))):
        assert gradient == pytest.approx(-0.25 * (p * (1 - p) if phi else 1) * own / 6)


def test_it_learns_the_demonstrations(script_of, tmp_path):
    """Every second row has one. The loss falls with mu 1, where rewards count for nothing."""
    rows = [json.loads(line) for line in (toy.FOLDER / "val.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        row["extra_info"]["answer"] = toy.worked_response(*map(int, row["prompt"][0]["content"].split("+")))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*SMALL, "--train-files", str(tmp_path / "rows.jsonl"), "--mu", "1", "--mu-end", "1"]
    ran(fork(str(script_of("sft_rl").with_suffix("")), tmp_path, *args, "--total-steps", "4", "--run-name", "run"))
    logged = metrics(tmp_path / "run")
    assert logged[-1]["actor/sft_nll"] < 0.9 * logged[0]["actor/sft_nll"]
    assert [row["actor/loss"] for row in logged] == [0] * 4
