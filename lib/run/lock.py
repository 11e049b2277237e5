"""One writer for a folder."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from lib import InputError

LOCK = ".lock"
PATIENCE_S = 5.0  # how long to wait for a process that is about to end


def take_lock(folder: Path, flag: str = "--run-name") -> TextIO:
    """Makes and locks the folder, until the returned file is closed or the process ends.

    Children do not inherit an fcntl lock, and file servers (NFS, Lustre, GPFS) show it to other hosts. The file
    says who has it. A run that ends empties it, so a killed process leaves its text.

    Raises InputError if another process has the lock. flag: names the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from error
    end = time.monotonic() + PATIENCE_S
    while not _is_taken(lock):
        if time.monotonic() >= end:
            lock.seek(0)
            raise InputError(
                f"{folder} is in use by {lock.read() or 'another process'}: end that run first, or give another "
                f"{flag} (if its host is gone for good, delete {lock.name})"
            )
        time.sleep(0.1)
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    lock.flush()
    os.fsync(lock.fileno())  # for readers on other hosts
    return lock


def _is_taken(lock: TextIO) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another process has it
        return False
    except OSError as error:
        why = f"no file locks here ({error.strerror})"
        print(f"{lock.name}: {why}, so a second run is not prevented", flush=True)
    return True
