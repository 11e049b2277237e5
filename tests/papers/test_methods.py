"""Every method of papers/: its diff applies and is short, and its script runs, replays, resumes and runs on two ranks.
What a method computes is tested in a file of its own."""

import re
import shlex
import subprocess

import pytest

from lib import InputError
from tests.common import ROOT, fork, one_line, ran, with_slow
from tools import paper


@pytest.mark.parametrize("resume_samples", with_slow([False, True], True), ids=["", "sampling after a resume"])
@pytest.mark.parametrize("name", paper.names())
def test_a_method_runs_replays_and_resumes_on_any_number_of_ranks(tmp_path, name, resume_samples, monkeypatch):
    """Sampling after a resume is that of the base scripts, which tests/scripts/test_scripts.py has."""
    script = paper.workplace(name, tmp_path)
    paper.check_text(name, script)

    def run(flags, ranks=1):
        ran(fork(str(script.with_suffix("")), tmp_path, *flags, ranks=ranks, preset=[]))

    def prepare(command, folder):  # the page's Python, in this process: another would import torch first
        subprocess.run([*command[:-2], "-n", "-c", command[-1]], check=True)
        for program in re.findall(r"<<'END_OF_FILE'[^\n]*\n(.*?)END_OF_FILE", command[-1], re.S):
            exec(program, {})

    monkeypatch.setattr(paper, "spawn", prepare)
    monkeypatch.chdir(tmp_path)
    paper.check_runs(name, tmp_path, run, resume_samples)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in paper.names() if paper.record_of(name)])
def test_a_method_learns_what_its_record_says(tmp_path, name):
    """Seed 1 ends at most 0.1 below the worst recorded seed: another CPU rounds and then samples differently."""
    commands, found = paper.commands_of(name), paper.record_of(name)
    paper.workplace(name, tmp_path)
    paper.spawn(["bash", "-ec", commands.prepare], tmp_path)
    again = paper.measure(tmp_path, found["metric"], name, commands.method, 1)
    assert again["values"][-1][1] > min(run["values"][-1][1] for run in found["runs"][name]) - 0.1


def test_tables_are_those_of_the_records_which_are_of_the_commands_on_the_pages():
    stale = [page.name for page, text in paper.tables().items() if page.read_text() != text]
    assert stale == [], "python -m tools.paper table"
    for name in filter(paper.record_of, paper.names()):
        commands, found = paper.commands_of(name), paper.record_of(name)
        assert {*found["runs"]} == {name, paper.base_of(name)}
        flags = {name: shlex.join(commands.method), paper.base_of(name): shlex.join(commands.base)}
        assert found["flags"] == flags, name
        assert "dirty" not in found["commit"] and len(found["runs"][name]) >= 3


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a base script of ten lines, and paper's folders in it."""
    for folder in ("papers/records", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "grpo.py").write_text("".join(f"line{i} = {i}\n" for i in range(10)))
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "FOLDER", tmp_path / "papers")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commit(repository):
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "state"]):
        subprocess.run([*git, *command], check=True)


def edit(file, line, text):
    lines = file.read_text().splitlines()
    lines[line] = text
    file.write_text("\n".join(lines) + "\n")


def test_a_diff_follows_its_base(repository, capsys):
    """new, edit, save; the base changes beside the diff, and under it."""
    base, script = repository / "grpo.py", repository / "mine.py"
    paper.new("mine")
    edit(script, 4, "line4 = 'mine'")
    paper.save("mine", base="grpo")
    assert "papers/mine.diff: 1 changed lines" in capsys.readouterr().out
    assert paper.changed_lines(paper.diff_of("mine")) == 1 and (repository / "papers/mine.md").exists()
    commit(repository)
    script.unlink()

    edit(base, 3, "line3 = 'theirs'")
    with pytest.raises(InputError, match=r"papers/mine\.diff does not apply to grpo\.py"):
        paper.apply("mine")
    paper.refresh()  # the lines are next to each other: a conflict
    assert "<<<<<<<" in script.read_text() and "mine: conflicts" in capsys.readouterr().out
    edit(script, 3, "line3 = 'theirs'")
    script.write_text(base.read_text().replace("line4 = 4", "line4 = 'mine'"))
    paper.save("mine")
    commit(repository)
    script.unlink()

    edit(base, 6, "line6 = 'theirs'")  # in the context of the diff, but no line of it
    paper.refresh()
    paper.apply("mine")
    assert script.read_text() == base.read_text().replace("line4 = 4", "line4 = 'mine'")
    script.write_text("other\n")
    with pytest.raises(InputError, match="has other lines"):
        paper.apply("mine")


CANNOT_BE = [  # a name, its base, and what is said
    ("mine", "sac", "--base sac: choose one of grpo, ppo, remax, dapo"),
    ("my-method", "grpo", "my-method: not a name of a module: use letters, digits and _"),
    ("mine.py", "grpo", "leave out .py"),
    ("class", "grpo", "class: not a name of a module"),
    ("grpo", "ppo", "grpo.py exists: remove it, or choose another name"),
    ("torch", "grpo", "torch: a module of this name is installed, which torch.py would hide"),
    ("lib", "grpo", "which lib.py would hide"),
]


def test_mistakes_are_one_line_each_and_commands_of_a_page_are_read(repository):
    before = {*repository.iterdir()}
    for name, base, said in CANNOT_BE:
        with one_line(re.escape(said)):
            paper.new(name, base)
        assert {*repository.iterdir()} == before
    with one_line("nobody: papers/ has "):
        paper.apply("nobody")
    paper.new("mine")
    edit(repository / "mine.py", 4, "line4 = 4  " + "\nmore = 1" * 81)
    paper.save("mine", base="grpo")
    with one_line("82 changed lines; at most 80"):
        paper.check_text("mine", repository / "mine.py")
    (repository / "papers/mine.md").write_text("```bash\npython mine.py\n```\n")
    with one_line(r"needs `python mine\.py \.\.\.`, then `python grpo\.py"):
        paper.commands_of("mine")
    block = "make paper P=mine\npython - <<'END'\nprint(1)\nEND\npython mine.py --a 'b c' \\\n  --d  # why\n"
    block += "python grpo.py --total-steps 3\n# check: --lr 1e-3\n"
    (repository / "papers/mine.md").write_text(f"# Mine\n\n```bash\n{block}```\n\n```bash\npython other.py\n```\n")
    prepare, method, base, check = paper.commands_of("mine")
    assert prepare == "python - <<'END'\nprint(1)\nEND\n" and method == ["--a", "b c", "--d"]
    assert base == ["--total-steps", "3"] and check == ["--lr", "1e-3"]


def test_other_metrics_are_an_error():
    rows = [{"step": 1, "a": 1.0, "perf/mfu": 0.1}]
    for other, value in (({"a": 1.1}, r"1\.1"), ({}, "nan")):
        with one_line(rf"a replay: a of step 1 is {value}, not 1\.0"):
            paper.compare("a replay", rows, [{"step": 1, "perf/mfu": 0.2} | other], 1e-3)
    paper.compare("a replay", rows, [{"step": 1, "a": 1.0005}], 1e-3)


def test_make_diff_says_where_a_script_comes_from():
    command = ["make", "--silent", "diff", "A=grpo", "B=distill"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stdout == "no distill.py; a method of papers/: make paper P=distill\n"
