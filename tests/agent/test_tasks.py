"""agent/tasks/folders.py, agent/tasks/sandbox.py, data/task_folders.py: tasks of a folder, in a sandbox each."""

import asyncio
import json
import os
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest

from agent import MultiTurn, get_tool_parser, open_task
from agent.tasks.folders import read_task, read_tasks
from agent.tasks.shell import Shell
from agent.tools.builtin import load_tools
from data import task_folders as rows_of
from lib import InputError
from lib.args import MultiTurnArgs
from lib.distributed import in_thread
from lib.run.run_config import digest_of
from lib.sandbox import client
from tests.agent.test_agent_loop import END, play, response_text, rewards, tokenizer
from tests.common import ROOT, documented, fork, killed_with_its_children, metrics, one_line, ran, wait_until

TASKS = ROOT / "data/toy_tasks"
PATIENT_S = 100.0  # of what should take no time


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if client.sandbox_level() != "namespaces":
        pytest.skip("this kernel allows no namespaces")


def in_task(name: str, body, folder: Path = TASKS):
    """body(opened) in a new sandbox of the task."""

    async def run():
        async with open_task(folder, name) as opened:
            return await body(opened)

    return asyncio.run(run())


def write(folder: Path, files: dict[str, str | None] | None = None) -> Path:
    """A task with the files of `rename`, and these. None: without it."""
    shutil.copytree(TASKS / "rename", folder)
    for path, text in ((folder / name, text) for name, text in (files or {}).items()):
        path.parent.mkdir(exist_ok=True)
        path.unlink() if text is None else path.write_text(text)
    return folder


# ---- the embedded tasks --------------------------------------------------------------------------
def test_an_episode_begins_with_a_fresh_copy_where_the_dockerfile_says():
    async def body(opened):
        return await opened.exec("ls; cat a.jpeg; echo mine > a.jpeg; touch new", PATIENT_S)

    files = (0, "a.jpeg\nb.jpeg\nc.jpeg\nnotes.txt\npicture a\n")
    assert in_task("rename", body) == files == in_task("rename", body)
    assert (TASKS / "rename/environment/a.jpeg").read_text() == "picture a\n"
    count = read_task(TASKS / "count")
    assert [target for _, target in count.files] == ["/srv/logs/server.log"] and count.workdir == "/srv/logs"
    assert in_task("count", lambda opened: opened.exec("pwd; ls", PATIENT_S)) == (0, "/srv/logs\nserver.log\n")


# ---- the reward ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("check", "reward"),
    [
        ("exit 0", 1.0),
        ("exit 1", 0.0),
        ("sleep 1000", 0.0),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", 0.5),
        ("echo '{\"reward\": -1}' > /logs/verifier/reward.json", -1.0),
        ("echo nan > /logs/verifier/reward.txt", ValueError),
        ("yes > /logs/verifier/reward.txt", ValueError),
        ("echo '{}' > /logs/verifier/reward.json", ValueError),
    ],
)
def test_what_a_check_gives(tmp_path, check, reward):
    write(tmp_path / "own", {"tests/test.sh": check})
    seconds = 0.5 if "sleep" in check else PATIENT_S
    wrong = pytest.raises(ValueError, match="/logs/verifier/reward") if reward is ValueError else nullcontext()
    with wrong:
        assert in_task("own", lambda opened: opened.check(seconds), tmp_path) == reward


# ---- hostile commands ----------------------------------------------------------------------------
SHORT_S = 0.5


@pytest.fixture(scope="module")
def shell():
    """One for all commands: each must leave it fit for the next."""
    opened = Shell(("app", "tests", "logs"), memory_mb=256, folder_mb=8)
    yield opened
    opened.close()


FORKS = """python3 -c '
import os, time
try:
    for i in range(100):
        os.fork() or time.sleep(1000)
except BlockingIOError:
    print("limited")
'"""


@pytest.mark.parametrize(
    ("command", "code", "shown"),
    [
        (":(){ :|:& };:; sleep 1000", 124, ""),
        (FORKS, 0, "limited"),
        ("trap '' TERM INT HUP; while :; do :; done", 124, ""),
        ("yes", (1, 153), "bytes left out"),  # EFBIG or SIGXFSZ
        ("head -c 100M /dev/zero > /app/file; ls -s /app/file; rm /app/file", 0, "8192 /app|8188 /app"),
        ("for i in $(seq 9); do head -c 1M /dev/zero > /app/$i; done; rm /app/?", 0, "No space left"),
        ("python3 -c \"open('/app/hole', 'w').truncate(2**40)\"", 1, "File too large"),
        ("python3 -c 'b = bytes(2**30)'", 1, "MemoryError"),
        ("mkdir -p /app/many; cd /app/many; touch $(seq 20000); cd ..; rm -r many", 0, "No space left"),
        ("kill -9 $PPID 1; echo still", 0, "Operation not permitted\nbash: line 1: kill: (1) - Operation|still"),
        ("kill -9 $$", 137, ""),
        ("ls /home /proc /work; cat /etc/passwd", 1, "No such file"),
        ("touch /file /usr/file /bin/file", 1, "Read-only file system"),
        ("mount -t tmpfs none /app; unshare -U true; chroot / true; echo $?", 0, "1|12"),
        ("python3 -c 'import socket; socket.socket()'", 1, "Function not implemented"),
        ("ulimit -u 1000; ulimit -v unlimited", 1, "cannot modify limit"),
        ("printf '\\xff\\0\\ud800'", 0, "\ufffd"),
        ("echo \ud800", 126, "surrogates not allowed"),
    ],
)
def test_hostile_command(shell, command, code, shown):
    given, output = shell.exec(command, SHORT_S if code == 124 else PATIENT_S)
    assert given in (code if isinstance(code, tuple) else (code,)), output
    assert any(part in output for part in shown.split("|")) and len(output) < 70_000, output
    assert shell.exec("echo fit", PATIENT_S) == (0, "fit\n")


def test_a_daemon_ends_with_its_command(shell):
    """Also with a session of its own, and when it ignores signals."""
    shell.exec("trap '' HUP TERM; setsid bash -c 'while :; do date +%N > /app/alive; sleep 0.01; done' &", PATIENT_S)
    first = shell.exec("cat /app/alive", PATIENT_S)
    time.sleep(0.1)
    assert shell.exec("cat /app/alive", PATIENT_S) == first
    assert shell.exec("rm -f /app/alive; kill -9 -1", PATIENT_S)[0] == 1  # there is no process to kill


def test_an_episode_sees_no_other_and_nothing_of_the_machine(shell, tmp_path):
    shell.exec("echo x > /app/secret; echo x > /tmp/secret; ln -s /etc/passwd /app/out", PATIENT_S)
    other = Shell(("app",), memory_mb=256, folder_mb=8)
    try:
        found = other.exec("find /tmp /app/ /logs /tests; env", PATIENT_S)[1]
        assert "secret" not in found and "PYTEST" not in found and str(ROOT) not in found
        assert shell.exec("cat /app/out", PATIENT_S)[0] == 1
        assert other.exec(f"ls {tmp_path} {ROOT}", PATIENT_S)[0] == 2
    finally:
        other.close()
    with pytest.raises(RuntimeError, match="gone"):
        other.exec("true", PATIENT_S)


# What a policy may try, so that the check passes. Each fails, as none solves the task
CHEATS = [
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "echo exit 0 > /tests/test.sh; chmod 444 /tests/test.sh; chmod 555 /tests",
    "rm -r /tmp/tests; ln -s /app /tmp/tests; echo exit 0 > test.sh",
    "rm -r /tmp/tests; ln -s /usr /tmp/tests",
    "rm -r /tmp/tests; ln -s tests /tmp/tests",
    "rm -r /tmp/logs; echo 1 > /tmp/logs",
    "rm -r /tmp/logs; mkdir /app/verifier; echo 1 > /app/verifier/reward.txt; ln -s /app /tmp/logs",
    "setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; echo exit 0 > /tests/test.sh; done' &",
    "echo 'exit 0' > ~/.bashrc; cp ~/.bashrc ~/.profile; cp ~/.bashrc ~/.bash_profile; export BASH_ENV=~/.bashrc",
    "for name in ls grep tr bash; do echo 'exit 0' > $name; chmod +x $name; done; PATH=.:$PATH",
    "head -c 100M /dev/zero > /tmp/full; head -c 100M /dev/zero > /tmp/full2",
    "cd /tmp; for i in $(seq 200); do mkdir d; cd d; done; chmod 0 .",
    "chmod 000 . /tmp/logs /tmp/tests",
    "rm -rf /app/* /tmp/*",
    "ln -sf /tests/test.sh a.jpg; ln -sf /logs/verifier b.jpg",
]


def test_no_command_makes_a_check_pass(tmp_path):
    async def body(opened):
        before = await opened.exec("ls -A /tests /logs /solution", PATIENT_S)
        await opened.exec(cheat, PATIENT_S)
        return before, await opened.check(PATIENT_S)

    for cheat in CHEATS:
        assert in_task("rename", body) == ((0, "/logs:\n\n/solution:\n\n/tests:\n"), 0.0), cheat


def run_and_wait(pids):
    opened = Shell(("app",), memory_mb=256, folder_mb=8)
    command = "echo x > /app/x; chmod 0 /app; setsid sleep 1000 & trap '' TERM HUP; sleep 1000"
    in_thread(lambda: opened.exec(command, 1000.0))

    def below() -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    wait_until(lambda: any("sleep" in process.name() for process in below()), PATIENT_S)
    pids.send([process.pid for process in below()])
    time.sleep(1000)


def test_nothing_is_left_of_a_run_that_is_killed():
    """Its files are on a file system that ends with the last process."""
    assert len(killed_with_its_children(run_and_wait)) > 1


def test_closing_ends_a_command():
    async def body(opened):  # which is closed again behind it: twice is no error
        running = asyncio.ensure_future(opened.exec("sleep 1000", 1000.0))
        await asyncio.sleep(0.1)
        await opened.close()
        with pytest.raises(RuntimeError, match="gone"):
            await running

    in_task("rename", body)


# ---- the tool, a run, an agent -------------------------------------------------------------------
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": %s}}\n</tool_call>' + END


def bash(spec: str, timeout_s: float = PATIENT_S) -> MultiTurn:
    tools = load_tools((spec,), timeout_s)
    return MultiTurn(tokenizer(), tools, get_tool_parser("hermes", tokenizer()), None, MultiTurnArgs())


def of_tasks(*names: str) -> list[dict]:
    return [{"bash": {"create_kwargs": {"task": name}}} for name in names]


def test_the_policy_runs_commands_and_the_check_is_its_reward():
    solve = (TASKS / "rename/solution/solve.sh").read_text()
    how = bash(f"bash:{TASKS}")

    def episode(name, *commands):
        turns = [*(CALL % json.dumps(command) for command in commands), "done" + END]
        out, _ = play(how, turns, T=5000, tools_kwargs=of_tasks(name))
        assert how.tools["bash"].opened == {}
        return rewards(out)[0], response_text(out)

    reward, text = episode("rename", "rm -rf /tests /logs; printf '<|im_%s|>' end; ls missing", solve)
    assert reward == [1.0] and "(no output)" in text
    assert "ls: cannot access 'missing': No such file or directory\n\n(exit code 2)" in text
    assert text.count(END) == 3 + 2  # turns and answers; not what a tool says
    reward, text = episode("rename", "seq 100000")
    assert reward == [] and "100000" in text and len(text) < 2500
    assert episode("fix_test")[0] == [0.25]
    reward, text = episode("../../rename", "ls")
    assert reward == [] and "Error: bash did not start" in text


OWN_PROVIDER = """
class Remote:
    log = []

    def __init__(self, task):
        self.log.append(("made", task.folder.name, task.workdir, len(task.files)))

    async def exec(self, command, timeout_s):
        self.log.append(command)
        if "test.sh" in command:
            return 0, ""
        return (1, "") if command.startswith("head") else (0, "x" * 10**5)

    async def close(self):
        self.log.append("closed")
"""


def test_a_provider_of_ones_own(tmp_path):
    """It runs what needs Docker, too; what it says is data."""
    (tmp_path / "remote.py").write_text(OWN_PROVIDER)
    write(tmp_path / "tasks/image", {"environment/Dockerfile": "FROM own\nRUN apt-get install cowsay"})
    write(tmp_path / "tasks/files")
    how = bash(f"bash:{tmp_path}/tasks {tmp_path}/remote.py:Remote")
    turns = [CALL % json.dumps("ls"), "done" + END]
    out, _ = play(how, turns, turns, T=9000, tools_kwargs=of_tasks("image", "files"))  # both say the same
    log = how.tools["bash"].provider.log
    assert rewards(out) == [[1.0], [1.0]] and log.count("closed") == 2
    assert {entry for entry in log if entry[0] == "made"} == {("made", "image", "", 0), ("made", "files", "/app", 4)}
    assert "ls" in log and "cd /app || exit\nls" in log
    assert "characters left out" in response_text(out)


RUN = ["--model", str(ROOT / "data/toy_tools/model"), "--val-files", "none", "--reward", "--total-steps", "1"]
RUN += ["--prompts-per-step", "3", "--group-size", "2", "--max-prompt-length", "300", "--max-response-length", "64"]
RUN += ["--micro-batch-tokens", "3000", "--save-every", "0", "--no-export-model"]


def test_a_run_on_the_embedded_tasks(tmp_path):
    """Each is solved by its solution, and not by the model; but a check gives 0.25 for the files as they are. The rows
    name bash, so that their prompts do not show the run's other tool."""
    rows_of.main(TASKS, tmp_path / "data")
    rows = pq.read_table(tmp_path / "data/train.parquet").to_pylist()
    assert [row["extra_info"]["task"] for row in rows] == ["count", "fix_test", "rename"]
    flags = [*RUN, "--train-files", str(tmp_path / "data/train.parquet"), "--multi-turn.tools"]
    ran(fork("grpo", tmp_path, *flags, "calculator", f"bash:{TASKS}", "--run-name", "r"))
    [step] = metrics(tmp_path / "r")
    [file] = (tmp_path / "r/rollouts").iterdir()
    prompts = pq.read_table(file)["prompt"].to_pylist()
    assert all("bash" in prompt and "calculator" not in prompt for prompt in prompts)
    assert step["agent/tool/bash/calc_reward"] == pytest.approx(0.25 / 3, abs=1e-6)
    assert step["reward/mean"] == pytest.approx(0.25 / 3, abs=1e-6)  # float32
    assert step["agent/failed"] == step["agent/tool_errors/exception"] == step["agent/tool_errors/timeout"] == 0


def example(name: str) -> dict:
    """What the file of that name in docs/environments.md defines."""
    names: dict = {}
    exec(documented(name), names)
    return names


def test_the_program_of_the_documents(monkeypatch):
    """With a client that says what a policy could say."""
    counts = ["cat server.log | cut -d ' ' -f 2 > levels", "grep -c ERROR levels"]
    said, asked = iter([*counts, "echo 15 > errors.txt", "ls", "ls"]), []

    async def create(model, messages, max_tokens):
        asked.append(messages[-1]["content"])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=next(said)))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    monkeypatch.setattr("openai.AsyncOpenAI", lambda **kwargs: client)
    monkeypatch.chdir(ROOT)
    row = {"prompt": [{"role": "user", "content": "Count."}], "extra_info": {"task": "count"}}
    assert asyncio.run(example("solve.py")["solve"]("http://127.0.0.1", "key", row)) == 1.0
    assert asked[2:4] == ["15\n\nexit code 0", "\nexit code 0"]


def test_the_provider_of_the_documents(tmp_path, monkeypatch):
    """With a docker that only repeats its arguments."""
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" = run ] && echo container || echo "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def run():
        made = await example("my_docker.py")["docker"](read_task(TASKS / "count", local=False))
        found = await made.exec("ls; ls", 3)
        await made.close()
        return found

    assert asyncio.run(run()) == (0, "exec container timeout -k 1 3 bash -c ls; ls\n")


# ---- folders that are no tasks -------------------------------------------------------------------
IN_APP = "FROM ubuntu\nWORKDIR /app\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"task.toml": "[verifier"}, "task.toml: "),
        ({"task.toml": "[verifier]\ntimeout_sec = 'long'"}, "task.toml: verifier.timeout_sec: "),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "task.toml: steps: "),
        ({"task.toml": "[environment]\ndocker_image = 'x:1'"}, "docker_image x:1: not without Docker: give a provider"),
        ({"environment/docker-compose.yaml": ""}, "docker-compose.yaml: not without Docker: give a provider"),
        ({"environment/Dockerfile": "FROM own:1"}, "Dockerfile line 1: FROM own:1: not without Docker"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY --from=a b c"}, "line 2: COPY --from=a"),
        ({"environment/Dockerfile": f"{IN_APP}COPY ../../x ."}, "COPY ../../x: there is no such"),
        ({"environment/Dockerfile": f"{IN_APP}COPY a.jpeg /app/../etc/b"}, "writes to /etc, which is read only"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY a.jpeg /"}, "writes to /, which is read only"),
        ({"instruction.md": None}, "instruction.md: no such file"),
        ({"instruction.md": None, "task.yaml": "instruction: x"}, "terminal-bench's old form: convert it"),
        ({"tests/test.sh": None}, "tests/test.sh: no such file"),
    ],
)
def test_a_folder_that_is_no_task_is_one_line(tmp_path, files, said):
    write(tmp_path / "own", files)
    with one_line(re.escape(said)):
        read_tasks(tmp_path)


def test_flags_that_do_not_fit_are_one_line(tmp_path):
    write(tmp_path / "tasks/own", {"task.toml": "[verifier]\ntimeout_sec = 120.0"})
    for spec, said in {
        f"bash:{tmp_path}/absent": "no folder that holds folders of tasks",
        f"bash:{tmp_path}/tasks": "the check of own may take 120 s .* set --multi-turn.tool-timeout 134 or more",
        f"bash:{tmp_path}/tasks remote.py:absent": "give an existing file and a name in it",
        "bash": "no folder that holds|calculator",
    }.items():
        with pytest.raises(InputError, match=said):
            load_tools((spec,), 30.0)
    assert load_tools((f"bash:{tmp_path}/tasks",), 134.0)["bash"].tasks["own"].check_s == 120


def test_rows_of_tasks_that_cannot_be_trained_on(tmp_path):
    for name, check, said in (
        ("easy", "true", "gives 1 before anything is done"),
        ("hard", "false", "gives 0 after its own solution"),
        ("big", "false", "its files take 2.0 MiB, and its sandbox has 1"),
    ):
        own = write(tmp_path / name / "own", {"tests/test.sh": check})
        if name == "big":
            (own / "environment/big").write_bytes(bytes(2**21))
            (own / "task.toml").write_text("[environment]\nstorage_mb = 1")
        with pytest.raises(InputError, match=f"(?s){name}/own: .*{said}"):
            rows_of.main(tmp_path / name, tmp_path / "out")
    with pytest.raises(InputError, match="--test-size 1"):
        rows_of.main(tmp_path / "easy", tmp_path / "out", test_size=1)


def test_a_program_names_tasks_of_its_folder_only():
    for name in ("../toy_tasks/rename", "..", "", f"{TASKS}/rename", "rename/", "a\0b"):
        with pytest.raises(InputError, match="is not the name of a task in it"):
            in_task(name, None)


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("task.toml", "/etc/hostname"),
        ("environment/deep/key", "../../../../secret/key"),
        ("environment/key", "../../other/instruction.md"),
        ("", "../secret"),
    ],
)
def test_a_link_out_of_a_task_is_one_line(tmp_path, link, target):
    (tmp_path / "secret/tests").mkdir(parents=True)
    for name in ("key", "instruction.md", "tests/test.sh"):
        (tmp_path / "secret" / name).write_text("mine")
    write(tmp_path / "tasks/other")
    path = write(tmp_path / "tasks/own", {"environment/deep/a": ""}) / link
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(target)
    for local in (True, False):
        with one_line(re.escape(f"links to {target!r}, outside the task")):
            read_tasks(tmp_path / "tasks", local)


def test_a_link_within_a_task_and_what_is_no_file(tmp_path):
    own = write(tmp_path / "tasks/own", {"environment/data/a": "found"})
    (own / "environment/b").symlink_to("data/a")
    (own / "environment/loop").symlink_to("loop")
    assert in_task("own", lambda opened: opened.exec("cat b", PATIENT_S), tmp_path / "tasks") == (0, "found")
    os.mkfifo(own / "environment/pipe")
    with pytest.raises(InputError, match="'pipe' is neither a file nor a folder"):
        read_task(own)
    (own / "environment/pipe").unlink()
    with (own / "instruction.md").open("ab") as file:
        file.truncate(2**40)  # a hole: read, it would take the memory
    with pytest.raises(InputError, match=r"its files take 1048576.0 MiB, and its sandbox has 64 \(storage_mb"):
        read_task(own)
    write(tmp_path / "tasks/a\nb")
    with pytest.raises(InputError, match=r"rename the folder 'a\\nb'"):
        read_tasks(tmp_path / "tasks")


def test_a_resume_sees_tasks_that_changed(tmp_path):
    write(tmp_path / "tasks/own")
    (tmp_path / "remote.py").write_text("")
    specs = [[f"bash:{tmp_path}/tasks"], [f"bash:{tmp_path}/tasks {tmp_path}/remote.py:Remote"]]
    before = [digest_of(spec) for spec in specs]
    (tmp_path / "remote.py").write_text("#")
    assert [a == digest_of(spec) for a, spec in zip(before, specs)] == [True, False]
    (tmp_path / "tasks/own/tests/test.sh").write_text("true")
    assert digest_of(specs[0]) != before[0]
