"""On-policy distillation with the teacher's top-k: which teacher scores which rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lib import InputError
from lib.core_algos import top_k
from lib.model import ForwardConfig, Reference, load_model
from lib.sampling import Sampling
from tests.common import rollout_batch, save_tiny


@pytest.mark.parametrize("k", [0, 3])
def test_a_row_has_the_columns_of_its_data_sources_teacher(module_of, tmp_path, k):
    forward = ForwardConfig(100, Sampling(9), None, torch.float32)
    teachers = [Reference(load_model(save_tiny(tmp_path / str(seed), seed=seed)), forward) for seed in (0, 1)]
    batch = rollout_batch([3, 7, 5, 4], [4, 1, 9, 6])
    sources = batch.non_tensor_batch["data_source"] = np.array(["sums", "codes", "sums", "sums"], dtype=object)
    mask = batch.batch["response_mask"].clone()
    args = SimpleNamespace(teacher_sources=("sums", "codes"), teacher_top_k=k)
    found = module_of("distill").teach(args, teachers, batch, 90)
    assert batch.batch["response_mask"].equal(mask)
    signal = (lambda log_p: top_k(log_p, k, 90)) if k else None
    for teacher, source in zip(teachers, args.teacher_sources):
        rows = sources == source
        log_prob, _, *of_top_k = teacher.batched_signal(batch, signal)
        expected = of_top_k or [log_prob]
        for ours, theirs in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-4)  # fp32, other micro-batches
    args.teacher_sources = ("sums", "proofs")
    with pytest.raises(InputError, match="rows of codes have no teacher"):
        module_of("distill").teach(args, teachers, batch, 90)
