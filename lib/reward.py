"""From responses to scores: a response is decoded, scored by a plain function, and the score put on its last token."""

import importlib.util
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

import rewards
from lib import InputError
from lib.data_proto import DataProto


def load_reward(spec: str, datasets: list) -> Callable:
    """The scorer: "" picks by each row's data_source (rewards/), "path/to/file.py:function" is the user's own."""
    if not spec:
        data_sources = set().union(*(dataset.data_sources for dataset in datasets))  # reads every row
        unknown = sorted(s for s in data_sources if rewards.scorer_module(s) is None)
        if unknown:
            raise InputError(
                f"no scorer for data_source {unknown[0]!r}: add it to rewards/__init__.py (known: "
                f"{', '.join(rewards.SCORERS)}) or give --reward path/to/file.py:function"
            )
        return rewards.compute_score
    path, _, name = spec.partition(":")
    if not Path(path).is_file() or not name:
        raise InputError(f"--reward {spec}: give an existing file and a function in it, as path/to/file.py:function")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise InputError(f"--reward {spec}: {path} has no function {name!r}")
    return getattr(module, name)


def score_responses(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, compute_score: Callable
) -> tuple[torch.Tensor, dict[str, list]]:
    """Scores every response; a truncated one is scored as it stands, an aborted one (no trained token) gets 0.

    Returns:
        token_level_scores (B, T), zero but for each row's last trained token, and the scorer's other keys, a list of B
        values each (None where the scorer did not give it): "pred", and whatever it wants logged.
    """
    device = batch.batch["response_mask"].device
    responses, mask, attention = (batch.batch[key].cpu() for key in ("responses", "response_mask", "attention_mask"))
    attended = attention[:, -mask.shape[1] :].bool()
    scores = torch.zeros(mask.shape)
    extras: dict[str, list] = defaultdict(lambda: [None] * len(batch))
    for i, row in enumerate(batch.non_tensor_batch["reward_model"]):
        if not mask[i].any():
            continue
        source = batch.non_tensor_batch["data_source"][i]
        text = tokenizer.decode(responses[i][attended[i]], skip_special_tokens=True)
        result = compute_score(
            data_source=source,
            solution_str=text,
            ground_truth=row["ground_truth"],
            extra_info=batch.non_tensor_batch["extra_info"][i],
        )
        if not isinstance(result, dict):
            result = {"score": result}
        score = float(result["score"])
        if not np.isfinite(score):
            raise ValueError(f"the scorer gave {score} to a {source} response: {text[:200]!r}")
        scores[i, mask[i].nonzero()[-1]] = score
        for key, value in result.items():
            if key != "score":
                extras[key][i] = value
    return scores.to(device), dict(extras)
