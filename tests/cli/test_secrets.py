"""Keys and passwords: from the environment, refused in flags, struck out of what a run prints and writes."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from lib.cli.secrets import private, secret_in, struck
from tests.cli.test_args import DRIVER
from tests.common import PYTHON, ROOT, SMALL, environment, launch, ran

KEY = "sk-proj-0123456789abcdefghij"
IN_FLAGS = {  # what the message says, by flags
    "--rollout-engine: user:password@": ["--rollout-engine", "http://me:hunter22@10.0.0.7:8000"],
    "--reward-kwargs api_key": ["--reward-kwargs", '{"base_url": "http://h/v1", "api_key": "correct horse"}'],
    "--reward-kwargs base_url: user:password@": ["--reward-kwargs", '{"base_url": "https://me:hunter22@h/v1"}'],
    "--reward-kwargs headers Authorization": [
        "--reward-kwargs",
        '{"headers": {"Authorization": "Basic aHVudGVyMjI="}}',
    ],
    "--reward-kwargs api_key_env": ["--reward-kwargs", '{"api_key_env": "hunter22-hunter22"}'],
    "--reward-kwargs model: it looks like a key": ["--reward-kwargs", json.dumps({"model": KEY})],
    "--reward-kwargs base_url: a key in": ["--reward-kwargs", '{"base_url": "https://h/v1?api_key=hunter22"}'],
    "--multi-turn.tools: GITHUB_TOKEN gets": ["--multi-turn.tools", "mcp:env GITHUB_TOKEN=hunter22 server"],
    "--multi-turn.tools: --api-key": ["--multi-turn.tools", "mcp:server --api-key hunter22"],
    "--multi-turn.tools: Authorization": ["--multi-turn.tools", "mcp:Authorization=hunter22 https://h/mcp"],
    "--train-files: it holds the value of MY_TOKEN": ["--train-files", "https://h/of-the-environment/train.parquet"],
}


def test_a_key_in_a_flag_is_refused_and_not_repeated():
    cases = [[*flags, "--dry-run", "1"] for flags in IN_FLAGS.values()]
    env = environment() | {"PYTHONPATH": str(ROOT), "MY_TOKEN": "of-the-environment"}
    done = subprocess.run(
        [*PYTHON, "-c", DRIVER, str(ROOT / "grpo.py"), json.dumps(cases)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for message, (code, said, torch_imported) in zip(IN_FLAGS, json.loads(done.stdout)):
        assert code == 2 and said.startswith(f"error: {message}") and not torch_imported, (message, said)
        assert said.splitlines() == [said.strip()] and "environment" in said
        assert not any(secret in said for secret in ("hunter22", "aHVudGVyMjI", "correct horse", KEY, "of-the-env"))


@pytest.mark.parametrize(
    "value",
    [
        "http://localhost:8000/v1",
        "Qwen/Qwen2.5-1.5B-Instruct",
        ".*[qkvo]_proj",
        '{"base_url": "http://localhost:8000/v1", "model": "judge", "api_key_env": "JUDGE_KEY", "max_tokens": 100}',
        '{"tools": ["calculator", "mcp:GITHUB_TOKEN=$GITHUB_TOKEN npx server --port 1 -v"], "max_turn_tokens": 5}',
        '{"tools": ["mcp:Authorization=$AUTH https://h/mcp", "mcp:LOG_LEVEL=debug server"]}',
        '{"enable_thinking": false, "eos_token": "<|im_end|>", "answer_key": "A"}',
        '{"rubric": "Basic correctness first: no password in the answer, write to me@example.com", "token": ""}',
        "{not json",
        3,
        None,
        ("a", "b"),
    ],
)
def test_what_is_no_key_passes(value):
    assert secret_in(value, "--flag") is None


def test_what_the_environment_says_is_secret_is_struck_out(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OPENAI_API_KEY": KEY, "HTTPS_PROXY": "http://me:hunter22@proxy:3128"})
    os.environ |= {"SHORT_KEY": "abc", "MONKEY": "/usr/bin", "JUDGE": "a judge's credential"}
    assert (
        secret_in('{"api_key_env": "JUDGE"}', "--reward-kwargs") is None
    )  # and from now on that is one, whatever it is called
    text = f"401: {KEY} by http://me:hunter22@proxy:3128 abc /usr/bin a judge's credential"
    assert struck(text) == "401: *** by http://me:***@proxy:3128 abc /usr/bin ***"


ECHOES = """
import os
def score(**kwargs):
    raise ValueError("Incorrect API key provided: " + os.environ["JUDGE_API_KEY"])
"""


def test_a_run_prints_and_keeps_no_key(tmp_path, monkeypatch):
    """Of a judge that repeats the key which it refuses."""
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    (tmp_path / "echoes.py").write_text(ECHOES)
    args = ["--reward", f"{tmp_path / 'echoes.py'}:score", "--total-steps", "1", "--run-name", "run"]
    done = launch("grpo", tmp_path, *SMALL, *args)
    assert "Incorrect API key provided: ***" in done.stdout + done.stderr
    files = [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(KEY in text for text in (done.stdout, done.stderr, *files))


# ---- files ---------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        (tmp_path / "old").write_text("x")
        for name in ("old", "new"):
            with private(tmp_path / name).open("a") as file:
                file.write("y")
            assert mode(tmp_path / name) == 0o600
    finally:
        os.umask(before)
    assert (tmp_path / "old").read_text() == "xy"


def test_files_of_a_run_that_may_hold_secrets_are_their_owners_alone(tmp_path):
    """And all others as the umask says: a group may share checkpoints, metrics and the model."""
    before = os.umask(0o007)
    try:
        args = ["--run-name", "run", "--total-steps", "1", "--save-every", "1", "--val-every", "1"]
        args += ["--track", "wandb", "tensorboard"]
        ran(launch("grpo", tmp_path, *SMALL, *args))
    finally:
        os.umask(before)
    run = tmp_path / "run"
    paths = [*run.iterdir(), *(run / "rollouts").iterdir(), *(run / "checkpoints").rglob("*")]
    closed = {str(path.relative_to(run)) for path in paths if not mode(path) & 0o070}
    kept = {"samples.jsonl", "rollouts/step_000001-rank_0.parquet", "wandb", "tensorboard"}
    assert closed == kept | {"config.json", "checkpoints/step_000001/config.json"}
