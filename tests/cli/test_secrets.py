"""Keys and passwords: from the environment, refused in flags, redacted from what a run prints and writes."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lib.cli.secrets import private, redact, redact_values, secret_in
from tests.cli.test_args import DRIVER
from tests.common import PYTHON, ROOT, SMALL, environment, fork, ran

KEY = "sk-proj-0123456789abcdefghij"
IN_FLAGS = {  # what the message says, by flags
    "--rollout-engine: user:password@": ["--rollout-engine", "http://me:hunter22@10.0.0.7:8000"],
    "--reward-kwargs headers Auth": ["--reward-kwargs", '{"headers": {"Authorization": "Basic aHVudGVyMjI="}}'],
    "--reward-kwargs api_key_env": ["--reward-kwargs", '{"api_key_env": "hunter22-hunter22"}'],
    "--reward-kwargs model: it looks like a key": ["--reward-kwargs", json.dumps({"model": KEY})],
    "--multi-turn.tools: GITHUB_TOKEN gets": ["--multi-turn.tools", "mcp:env GITHUB_TOKEN=hunter22 server"],
    "--agent: OPENROUTER_API_KEY gets": ["--agent", "env OPENROUTER_API_KEY=hunter22 python prog.py"],
    "--multi-turn.interaction api_key": ["--multi-turn.interaction", 'verifiers:x {"api_key": "correct horse"}'],
    "--train-files: it holds the value of MY_TOKEN": ["--train-files", "https://h/of-the-environment/train.parquet"],
}


def test_a_key_in_a_flag_is_refused_and_not_repeated():
    cases = [[*flags, "--dry-run", "1"] for flags in IN_FLAGS.values()]
    env = environment() | {"PYTHONPATH": str(ROOT), "MY_TOKEN": "of-the-environment"}
    words = [*PYTHON, "-c", DRIVER, str(ROOT / "grpo.py"), json.dumps(cases)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for message, (code, said, torch_imported) in zip(IN_FLAGS, json.loads(done.stdout)):
        assert code == 2 and said.startswith(f"error: {message}") and not torch_imported, (message, said)
        assert said.splitlines() == [said.strip()] and "environment" in said
        assert not any(secret in said for secret in ("hunter22", "aHVudGVyMjI", "correct horse", KEY, "of-the-env"))


HOLD_A_KEY = r"""
prog --api-key hunter22 ;; prog -api_key=hunter22 ;; prog --openai-key=hunter22 ;; prog --token=hunter22
prog --github-token hunter22 ;; prog --password 'hunter22 x' ;; prog --token 'a b' ;; prog -H 'x-api-key: hunter22'
prog -H 'Authorization: Bearer hunter22' ;; prog --header=Authorization:hunter22 ;; curl -u me:hunter22 http://h
prog 'Authorization: Basic aHVudGVyMjI=' ;; prog --auth 'Bearer hunter22' ;; bash -c "API_KEY='hunter22' prog"
sh -c 'export X_TOKEN=hunter22; prog' ;; docker run -e DB_PASS=hunter22 x ;; docker run --env=GITHUB_PAT=hunter22 x
PASSWORD=hunter22 prog ;; env AWS_SECRET_ACCESS_KEY=hunter22 prog ;; PGPASSWORD=hunter22 prog ;; KEY=hunter22 p
prog password=hunter22 ;; prog --set auth.apiKey=hunter22 ;; prog --pass hunter22 ;; prog --bearer hunter22
prog https://me:hunter22@h/v1 ;; s3://me:hunter22@bucket/model ;; https://h/v1?access_token=hunter22
abfs://me:hunter22@account.dfs.core.windows.net/rows ;; https://h/rows?X-Goog-Date=1&X-Goog-Signature=hunter22
-----BEGIN RSA PRIVATE KEY----- ;; prog --api-key $ecret-hunter22 ;; prog --api-key ${X:-hunter22}
prog --pat hunter22 ;; java -DapiKey=hunter22 x ;; verifiers:x {"token": "hunter22" ;; {"api_keys": ["hunter22"]}
verifiers:x {"api_key": "hunter22"} ;; gym:x.py:Env {'api_key': 'hunter22'} ;; {"args": ["--api-key", "hunter22"]}
{"env": {"OPENAI_KEY": "hunter22"}} ;; {"env": ["OPENAI_API_KEY=hunter22"]} ;; {"cmd": "prog --api-key hunter22"}
{"a": [{"b": {"clientSecret": "hunter22"}}]} ;; {"api_key": {"value": "hunter22"}} ;; {"password": 12345678}
{"a": "{\"api_key\": \"hunter22\"}"} ;; {"api\u005fkey": "hunter22"} ;; {"env": "x.py:load {\"api_key\": \"hunter22\"}"}
{"headers": {"Cookie": "session=hunter22"}} ;; {"api key": "hunter22"} ;; {"auth": {"pass": "hunter22"}}
{"Ocp-Apim-Subscription-Key": "hunter22"} ;; {"slack_token": "hunter22"}"""
HOLD_A_KEY = re.split(" ;; |\n", HOLD_A_KEY.strip())
HOLD_A_KEY += [f"prog {KEY}", f"hf_{'aB3' * 11}", f"ghp_{'aB3' * 12}", f"AKIA{'ABC4' * 4}", f"AIza{'aB3' * 12}"]
HOLD_A_KEY += [f"prog --key {'a1' * 12}", f'{{"label_key": "{"a1" * 12}"}}', f'{{"{KEY}": 1}}', {"X-Auth-Token": KEY}]
HOLD_A_KEY += [("a", "--api-key", "hunter22"), "prog --api-key \\\n hunter22"]


NO_KEY = [
    "python agent.py --max-tokens 5 --tokenizer gpt2 --level token_level --api-key-env NAME --key-file x.pem",
    'sh -c \'prog --api-key $OPENAI_API_KEY -H "Authorization: Bearer $TOKEN" --token "${HF_TOKEN}"\'',
    "sh -c 'API_KEY=$(cat key.txt) prog'; prog --api-key EMPTY --token --verbose",
    "prog answer_key=answer --eos-token '<|im_end|>' --stop-token END --sort-key=name --label-key label_2024",
    'verifiers:x {"max_tokens": 5, "api_key_var": "OPENAI_API_KEY", "judge_api_key_env": "JUDGE_KEY"}',
    '{"gym_env": "CartPole-v1", "cost_per_token": 0.1, "token": 7, "end_token": "###", "api_key": "EMPTY"}',
    '{"rubric": "The answer says password: none, or KEY=value pairs", "secret": null, "use_auth_token": true}',
    '{"stop_token": "Observation", "prompt_key": "question", "model": "hf_checkpoint_converter_v2", "token": ""}',
    '{"revision": "0123456789abcdef0123456789abcdef01234567", "tokens": ["password", "key", "token"]}',
    "data/level=token/token=5/part.parquet",
    "path/to/token.py:password",
    "prog --pass 3 --path DATA --cookie-jar x --passes first2 --partition-key day",
    "hdfs://me@namenode:8020/rows abfss://box@account.dfs.core.windows.net/rows hf://datasets/me/rows@main/rows",
    '{"tools": ["calculator", "mcp:GITHUB_TOKEN=$GITHUB_TOKEN npx server --port 1 -v", "mcp:Authorization=$AUTH h"]}',
    *("{not json", 3, None, ("a", "b")),
]


def test_what_holds_a_key_is_refused_and_nothing_else():
    for value in HOLD_A_KEY:
        found = secret_in(value, "--agent")
        assert found and found.startswith("--agent") and "hunter22" not in found and KEY not in found, value
    assert [value for value in NO_KEY if secret_in(value, "--flag")] == []
    text = "Write KEY=value lines, such as password: {password}, or run login --token abc"
    for flag in ("--system-prompt", "--prompt-template", "--stop", "--multi-turn.compact-prompt"):
        assert secret_in(text, flag) is None and secret_in(f"{text} {KEY}", flag), "a text for the model"


LINES = 3 * ("MIIEvQIBADANBgkqh+iG9w0BAQEFAASC" * 2 + "\n")
PEM = f"-----BEGIN PRIVATE KEY-----\n{LINES}ab/=\n-----END PRIVATE KEY-----\n"
URL = lambda secret: quote(secret, safe="")  # noqa: E731
WRITTEN = {"raw": str, "json": json.dumps, "repr": repr, "url": URL, "form": quote_plus}
around = st.text(st.characters(min_codepoint=32, exclude_characters="%\\", codec="utf-8"))


@pytest.mark.parametrize("form", WRITTEN)
@settings(max_examples=30)
@example(PEM, "one ", "two")
@example(PEM.replace("\n", "\\n"), "one ", "two")
@example("pass%41\\u00e9wörd😀'\"+ %%25 \\", "one ", "two")
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=8), around, around)
def test_a_secret_is_redacted_in_the_usual_forms(form, secret, before, after):
    """It begins and ends with eight plain characters, of which nothing may be left."""
    secret = f"Qwertzui{secret}Yxcvbnmk"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {"MY_KEY": secret})
        text = f"{before} <{WRITTEN[form](secret)}> {after}"
        left = redact(text)
        assert "***" in left and not any(end in left for end in ("Qwertzui", "Yxcvbnmk"))
        assert left.startswith(f"{before} <") and left.endswith(f"> {after}")
        assert secret_in(text, "--flag") is not None
        assert redact(f"{before}{after}") == before + after


def test_what_the_environment_says_is_secret_is_redacted(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OPENAI_API_KEY": KEY, "HTTPS_PROXY": "http://me:hunter22@proxy:3128"})
    os.environ |= {"SHORT_KEY": "abc", "MONKEY": "/usr/bin", "JUDGE": "a judge's credential"}
    # from now on JUDGE is one, whatever it is called
    assert secret_in('{"api_key_env": "JUDGE"}', "--reward-kwargs") is None
    text = f"401: {KEY} by http://me:hunter22@proxy:3128 abc /usr/bin a judge's credential"
    assert redact(text) == "401: *** by http://me:***@proxy:3128 abc /usr/bin ***"
    os.environ["DEPLOY_KEY"] = PEM  # each line of it
    logged = "".join(f"12:00 stderr: {line}\n" for line in PEM.splitlines())
    assert redact(logged).count("***") == 5 and "MIIE" not in redact(logged)
    os.environ |= {"A_KEY": "abcdefgh\\", "B_TOKEN": "admin:changeme"}  # in JSON one ends in \, one spans two texts
    values = {"a": ["abcdefgh\\", None, True, 1.5], "admin": "changeme", "path": Path("x")}
    assert redact_values(values) == {"a": ["***", None, True, 1.5], "admin": "changeme", "path": "x"}


ECHOES = """
import os
def score(solution_str, **kwargs):
    if len(solution_str) % 2:
        return 1.0
    raise ValueError("Incorrect API key provided: " + os.environ["JUDGE_API_KEY"])
"""


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


def test_a_run_keeps_no_key_and_what_may_hold_one_is_its_owners_alone(tmp_path, monkeypatch):
    """The judge repeats the key that it refuses. The umask is of a group, which may share all other files."""
    (tmp_path / "echoes.py").write_text(ECHOES)
    (tmp_path / "rows.py").write_text("import os\nfrom lib.data import RLHFDataset as Rows\nos.umask(0o007)")
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    args = ["--reward", f"{tmp_path / 'echoes.py'}:score", "--dataset-class", f"{tmp_path / 'rows.py'}:Rows"]
    args += ["--total-steps", "1", "--save-every", "1", "--val-every", "1", "--track", "wandb", "tensorboard"]
    done, run = ran(fork("grpo", tmp_path, *SMALL, *args, "--run-name", "run")), tmp_path / "run"
    assert "Incorrect API key provided: ***" in done.stdout + done.stderr
    files = [path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()]
    assert not any(KEY in text for text in (done.stdout, done.stderr, *files))
    paths = [*run.iterdir(), *(run / "rollouts").iterdir(), *(run / "checkpoints").rglob("*")]
    closed = {str(path.relative_to(run)) for path in paths if not mode(path) & 0o070}
    kept = {"samples.jsonl", "rollouts/step_000001-rank_0.parquet", "wandb", "tensorboard"}
    assert closed == kept | {"config.json", "checkpoints/step_000001/config.json"}
