"""A closed terminal, a reader that ends, a full disk behind stdout, and Ctrl-C during the imports. Real processes."""

import signal
import subprocess
import sys

import pytest

from tests.common import ROOT

PRINTS = """
import sys
from lib.cli.process import guard_output
guard_output()
for i in range(3):
    print("a" * 100_000, flush=True)
    print("b", file=sys.stderr)
sys.stdout.isatty(), sys.stdout.encoding, sys.stderr.fileno()
print("not flushed")
"""
DROPPED = "stdout cannot be written ({}): it is dropped\n"
FULL = DROPPED.format("No space left on device")
ENDS = {
    "full": (">/dev/full", f"{FULL}b\nb\nb\n"),
    "no reader": ("| true", DROPPED.format("Broken pipe") + "b\nb\nb\n"),
    "both full": (">/dev/full 2>/dev/full", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_output_that_cannot_be_written_ends_nothing(end):
    redirection, said = ENDS[end]
    command = f'set -o pipefail; "$0" -c "$1" {redirection}'
    done = subprocess.run(["bash", "-c", command, sys.executable, PRINTS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, said)


def test_a_streams_own_settings_and_text_stay():
    guarded = "from lib.cli.process import guard_output; guard_output()"
    source = f"import sys; print('ä', end=' '); {guarded}; print('ö€', flush=True)"
    env = {"PYTHONIOENCODING": "latin-1:replace", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, env=env)
    assert (done.returncode, done.stdout) == (0, "ä ö?\n".encode("latin-1")), done.stderr


READS = """
import sys, time
from dataclasses import dataclass
from lib.cli.flags import Group, read_flags
class Args(Group):
    pass
read_flags(dataclass(Args))
print("imports", flush=True)
"""


def test_a_script_guards_its_output_and_checks_its_threads():
    for threads, code, said in (("1", 0, FULL), ("x", 2, "error: OMP_NUM_THREADS=x: ")):
        command = ["bash", "-c", 'OMP_NUM_THREADS=$2 "$0" -c "$1" >/dev/full', sys.executable, READS, threads]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_ctrl_c_during_the_imports_is_one_line():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 a background shell ignores it
    command = [sys.executable, "-c", f"{READS}time.sleep(1000)"]
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=heed, **pipes)
    assert process.stdout.readline() == "imports\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n" and process.returncode == 130
