"""One server of forks for all workers of pytest-xdist, which imports once what runs need (tests/warm.py)."""

import fcntl
import json
import os
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from unittest.mock import patch


def share_fork_server(folder: Path) -> None:
    """From here on, in this process: the first worker that needs a server starts it, with a socket in the folder of
    all workers. It ends with the last of them."""
    server, start = forkserver._forkserver, forkserver._forkserver.ensure_running

    def ensure_running():
        resource_tracker.ensure_running()
        if server._forkserver_address is not None:
            return
        with (folder / "fork_server.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            try:
                address, alive = json.loads(file.read())
                server._forkserver_alive_fd = os.open(alive, os.O_WRONLY)  # it lives as long as this is open somewhere
                server._forkserver_address = address
            except (ValueError, OSError):  # none yet, or the worker that started it has ended
                address = str(folder / f"forks{os.getpid()}")
                with patch.object(connection, "arbitrary_address", lambda family: address):
                    start()
                file.truncate(0)
                file.write(json.dumps([address, f"/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}"]))

    server.ensure_running = ensure_running
