"""An engine of the user's own, --rollout-engine path/to/file.py:Class: it trains, and mistakes are one line."""

import math
import re

import pyarrow.parquet
import pytest

from lib import InputError
from lib.model import check_sampling
from lib.rollout import check_capabilities, engine_class
from lib.rollout.hf_engine import HFEngine
from lib.rollout.server_engine import ServerEngine
from lib.rollout.vllm_engine import VLLMEngine
from lib.sampling import Sampling
from tests.common import SMALL, fork, metrics, ran

TABLE = '''
"""Answers from a table."""

import math

from lib.rollout import Generated, RolloutEngine, add_responses

ANSWERS = {"12": 0.75, "7": 0.25}


class Table(RolloutEngine):
    takes_weights = False

    def __init__(self, model, tokenizer, **settings):
        self.pad_token_id, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.answers = [
            ([*tokenizer(text, add_special_tokens=False)["input_ids"], end], math.log(p)) for text, p in ANSWERS.items()
        ]

    def generate(self, prompts, sampling, seeds):
        rows = []
        for seed in seeds:
            ids, log_p = self.answers[seed % 4 == 0]
            rows.append(Generated(ids, [log_p, *[0.0] * (len(ids) - 1)], "stop"))
        return add_responses(prompts, rows, self.pad_token_id)


def likes_12(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == "12")
'''


@pytest.fixture
def table(tmp_path):
    (tmp_path / "table.py").write_text(TABLE)
    return f"{tmp_path}/table.py:Table"


def test_an_engine_in_a_file_of_its_own_trains(table, tmp_path):
    """A table of answers: what is trained and saved are its tokens, with the log-probs that it gives."""
    flags = ["--rollout-engine", table, "--reward", f"{tmp_path}/table.py:likes_12", "--save-rollouts", "all"]
    ran(fork("grpo", tmp_path, *flags, "--total-steps", "1", "--run-name", "run", *SMALL))
    [file] = (tmp_path / "run/rollouts").glob("*.parquet")
    rows = pyarrow.parquet.read_table(file, columns=["response", "rollout_log_probs"]).to_pylist()
    found = {(row["response"], round(math.exp(sum(row["rollout_log_probs"])), 6)) for row in rows}
    assert found == {("12<|im_end|>", 0.75), ("7<|im_end|>", 0.25)}
    [step] = metrics(tmp_path / "run")
    assert step["actor/grad_norm"] > 0 and "rollout/canary_logp_diff" not in step


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def Table(): ...", "must be a class that inherits lib.rollout.RolloutEngine"),
        (TABLE.replace("takes_weights = False", ""), "the class has no method load_weights"),
        (TABLE.replace("takes_weights = False", "takes_weights = False; in_process = True"), "no method session"),
        (TABLE.replace("def generate", "def generates"), "the class has no method generate"),
        (TABLE.replace("class Table", "class Other"), "has no 'Table'"),
        ("import absent_package", "cannot be imported: ModuleNotFoundError"),
    ],
    ids=["no class", "no weights", "no session", "no generate", "no name", "no import"],
)
def test_an_engine_that_cannot_work_is_named_before_a_model_loads(table, tmp_path, text, why):
    (tmp_path / "table.py").write_text(text)
    with pytest.raises(InputError, match=re.escape("--rollout-engine " + table) + ".*" + re.escape(why)):
        engine_class(table)
    with pytest.raises(InputError, match="give an existing file"):
        engine_class(f"{tmp_path}/absent.py:Table")


def test_a_run_asks_for_what_the_engine_can_do(table):
    check_capabilities(table, images=False, episodes=False)
    for images, episodes, why in [(True, False, "it takes no images"), (False, True, "--multi-turn and --agent need")]:
        with pytest.raises(InputError, match=why):
            check_capabilities(table, images, episodes)
        for name in ("hf", "vllm", "http://127.0.0.1:1,http://127.0.0.1:2"):
            check_capabilities(name, images, episodes)
    assert [engine_class(name) for name in ("hf", "vllm", "http://x")] == [HFEngine, VLLMEngine, ServerEngine]


def test_a_repetition_penalty_is_for_validation_alone(tmp_path):
    check_sampling(Sampling(1, 0.7, 0.9, 5, 0.1, stop=("x",)))
    with pytest.raises(InputError, match=r"--repetition-penalty 1\.2: .*--val-only"):
        check_sampling(Sampling(1, repetition_penalty=1.2))
    flags = ["--repetition-penalty", "1.2", "--total-steps", "1", "--run-name", "run", *SMALL]
    refused = fork("grpo", tmp_path, *flags)
    assert refused.returncode and "--repetition-penalty 1.2: it depends on" in refused.stderr
