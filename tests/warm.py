"""What each run of tests.common.fork would do anew, done once in the server that they are forked from: late imports,
and first calls that fill caches."""

import importlib.metadata
import json
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import fsspec  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import pandas  # noqa: F401
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dapo
import grpo
import ppo
import remax
from lib.log import tracking
from lib.run import opening
from tests.common import parse_flags
from tests.parsers import by_fields, keep_parsers

if find_spec("vllm") and not torch.backends.cuda.is_built():  # a GPU's driver does not survive a fork
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
keep_parsers(by_fields)  # a run's Args are another class with the same fields
for script in (grpo, ppo, remax, dapo):
    parse_flags(script.Args, [])
get_checkpoint_conversion_mapping("llama")  # compiles the regular expressions of all models
with tempfile.TemporaryDirectory() as folder:
    metrics = Path(folder, "metrics.jsonl")
    metrics.write_text(json.dumps({"step": 1, "reward/mean": 0.0, "response_length/mean": 1.0}) + "\n")
    tracking.plot_curve(metrics, Path(folder, "curve.png"), "fonts")

packages = [SimpleNamespace(name=package.name, version=package.version) for package in opening.distributions()]
opening.distributions = lambda: packages  # a third of a short run's seconds
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # vLLM reads those of all packages an engine


def draw_several_steps(metrics: Path, path: Path, title: str, draw=tracking.plot_curve) -> None:
    """A run of one or two steps, whose curve nobody looks at, leaves an empty file."""
    draw(metrics, path, title) if len(metrics.read_text().splitlines()) > 2 else Path(path).touch()


tracking.plot_curve = draw_several_steps
