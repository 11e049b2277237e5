"""What listens where, on a machine whose name leads to a network: a network namespace with an address beside loopback.

docs/security.md says it in a table. Ranks of one node and servers of their own: tests/servers/test_managed_servers.py.
"""

import ipaddress
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.common import PYTHON, SMALL, command, environment

NODE = """
set -euo pipefail
printf '%s\n' '127.0.0.1 localhost' "10.77.0.1 $(hostname)" > $HOSTS
mount --bind $HOSTS /etc/hosts  # no name server answers here, which each connection would wait for
ip link add name cable0 type veth peer name cable1
ip link set lo up && ip addr add 10.77.0.1/24 dev cable0 && ip link set cable0 up && ip link set cable1 up
exec "$@"
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
CABLE = [*UNSHARE, "ip", "link", "add", "name", "cable0", "type", "veth"]
NO_NAMESPACES = subprocess.run(CABLE, capture_output=True).returncode != 0
needs_namespaces = pytest.mark.skipif(NO_NAMESPACES, reason="needs network namespaces")


def listening(pid: int) -> set[str]:
    """The addresses that sockets of the process's network namespace listen on."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                words = bytes.fromhex(local.partition(":")[0])  # of 4 bytes, each in the machine's order
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.add(str(ipaddress.ip_address(address)))
    return addresses


def listened(arguments: list[str], folder: Path, look: Callable[[psutil.Process], None] = lambda job: None) -> set[str]:
    """What was listened on while the command ran, on a node of its own. look: called with the process all the while."""
    env = environment() | {"HOSTS": str(folder / "hosts")}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen([*UNSHARE, "bash", "-c", NODE, "bash", *arguments], env=env, stdout=log, stderr=log)
    addresses, process, here = set(), psutil.Process(job.pid), Path("/proc/self/ns/net").readlink()
    while job.poll() is None:
        with suppress(FileNotFoundError):  # it has just ended
            if Path(f"/proc/{job.pid}/ns/net").readlink() != here:
                addresses |= listening(job.pid)
        look(process)
        time.sleep(0.1)  # the kernel takes 3 ms for the two tables
    assert job.returncode == 0, (folder / "log").read_text()[-3000:]
    return addresses


@pytest.mark.slow
@needs_namespaces
def test_a_single_process_opens_no_port(tmp_path):
    args = [*SMALL, "--total-steps", "1", "--run-name", "run", "--rollout-engine", "vllm"]
    args += ["--loader-workers", "1", "--save-every", "1", "--track", "tensorboard", "wandb"]
    assert listened(command("ppo", tmp_path, *args, launcher=PYTHON), tmp_path) == set()
