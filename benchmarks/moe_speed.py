"""CPU seconds of an update of a mixture of experts with each of transformers' implementations, after a comparison of
their results.

    python benchmarks/moe_speed.py      some seconds on one core; writes benchmarks/results/moe_speed.json

One layer's experts are products of few rows. eager loops over the experts and gathers the rows of each; grouped_mm, the
default, sorts the rows once and calls one grouped product (torch.nn.functional.grouped_mm).
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.curves import RESULTS, provenance  # noqa: E402
from lib.model import response_log_probs  # noqa: E402
from lib.model.load import LoadOptions, _prepare  # noqa: E402
from lib.model.log_probs import token_log_probs  # noqa: E402
from tests.common import rollout_batch  # noqa: E402

IMPLEMENTATIONS = ("eager", "grouped_mm")
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8}
ROUNDS = 4


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = OlmoeConfig(**SIZES, initializer_range=0.1, attn_implementation="packed_sdpa")
    how = LoadOptions()
    model = _prepare(OlmoeForCausalLM(config), set(), "a mixture of 64 experts", token_log_probs, how)
    batch = rollout_batch([16] * 8, [48] * 8)
    results, seconds = {}, {name: [] for name in IMPLEMENTATIONS}
    for i in range(ROUNDS + 1):
        for name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
            model.zero_grad()
            start = time.process_time()
            log_probs = response_log_probs(model, batch, 1.0)[0]
            log_probs.sum().backward()
            if i:
                seconds[name].append(time.process_time() - start)
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            results[name] = log_probs.detach(), gradient
    expected, of_loop = results["eager"]
    record = {**provenance(1), "command": "python benchmarks/moe_speed.py", "sizes": SIZES}
    record["tokens"] = int(batch.batch["attention_mask"].sum())
    for name, (log_probs, gradient) in results.items():
        off = float((log_probs - expected).abs().max()), float((gradient - of_loop).norm() / of_loop.norm())
        assert max(off) < 1e-4, (name, off)  # float32: the order of sums
        record[name] = {"cpu_seconds": round(min(seconds[name]), 4), "log_probs_off": off[0], "gradient_off": off[1]}
        print(name, record[name])
    (RESULTS / "moe_speed.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
