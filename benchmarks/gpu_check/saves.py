"""Part `saves`: how long a save holds training up, how long it takes, and a load: the state is the same."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu_check.common import TOY_MODEL, backward, equal_rows, random_model, shape, sharded
from benchmarks.gpu_check.measure import timed
from benchmarks.gpu_check.rows import Options, attempt, claim, row
from lib.distributed import full_tensor, trainable_parameters
from lib.model import load_tokenizer
from lib.run.checkpoint import load_checkpoint, save_checkpoint
from lib.run.export import export_hf


def check(options: Options, device: torch.device) -> Iterator[dict]:
    yield from attempt("save", lambda: save(options, device))


def save(options: Options, device: torch.device) -> Iterator[dict]:
    model = sharded(random_model(shape(options, "qwen2.5-0.5b"), device))
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-3, fused=True)
    backward(model, equal_rows(64, 4, model, device))
    optimizer.step()
    optimizer.zero_grad()
    models, pending = {"actor": (model, optimizer)}, []
    gib = 12 * sum(p.numel() for p in model.parameters()) / 2**30
    with tempfile.TemporaryDirectory() as folder:

        def start() -> None:
            pending.append(save_checkpoint(folder, 1, models=models, schedulers={}, trainer_state={"step": 1}, keep=0))

        held = timed(start)
        whole = held + timed(lambda: pending[0].result())
        of_7b = held / gib * 12 * 7.6e9 / 8 / 2**30
        said = f"staging takes {held / gib:.2f} s a GiB, {of_7b:.1f} s of a rank of 8 at 7B"
        yield row("save: training waits", held, "s", None, claim(device, "G15", of_7b > 2, said), gib=gib)
        yield row("save: until it is on the disk", whole, "s", gib=gib)

        before = {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}
        moments = [full_tensor(s["exp_avg"]).clone() for s in optimizer.state.values()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        loading = timed(lambda: load_checkpoint(Path(folder, "step_000001"), models=models, schedulers={}))
        same = all(torch.equal(full_tensor(p.detach()), before[name]) for name, p in model.named_parameters())
        same &= all(torch.equal(full_tensor(s["exp_avg"]), m) for s, m in zip(optimizer.state.values(), moments))
        yield row("load: weights and moments are those of the save", float(same), "", same, seconds=loading)
        exporting = timed(lambda: export_hf(model, load_tokenizer(TOY_MODEL), Path(folder, "model"), torch.bfloat16))
        yield row("export for from_pretrained, in bf16", exporting, "s")
