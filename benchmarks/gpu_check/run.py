"""Runs the parts, each in a process of its own, and prints and writes what they gave."""

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import get_args

import torch

from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.rows import Options, Part, row, skipped

*PARTS, _SEVERAL = get_args(Part)  # what is wanted most comes first: the time may not suffice for all
OF_RANKS: tuple[Part, ...] = ("hardware", "ranks", "several")
DEADLINE_S = 560
DEADLINE_OF_RANKS_S = 1180
LIMITS_S = dict.fromkeys(("fused", "vllm_engine", "batch_invariance", "scripts", "stages", "log_probs"), 150)
LIMITS_S |= {"vllm_scripts": 200, "several": 1000}
LIMIT_S = 90  # of the other parts
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_A_LAUNCHER = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"


class Interrupted(KeyboardInterrupt):
    """By SIGINT, SIGTERM or SIGHUP."""


def main(options: Options) -> int:
    start = time.monotonic()
    for name in OF_A_LAUNCHER.split():  # within a job of several ranks a part would wait for the others
        os.environ.pop(name, None)
    if options.ranks % 2:
        print(f"--ranks {options.ranks}: give an even number", file=sys.stderr)
        return 1
    parts = options.parts or (OF_RANKS if options.ranks else tuple(PARTS))
    patience = 4 if options.tiny else 1  # a test's machine may be busy
    deadline = patience * (DEADLINE_OF_RANKS_S if options.ranks else DEADLINE_S)
    method, why = start_method(options, parts)
    if not method:
        print(f"no GPU here that torch can use ({why}): --device cpu --tiny tries the script itself", file=sys.stderr)
        return 1
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        torch.set_num_threads(1)
    if method == "fork":
        with redirect_stdout(sys.stderr):  # the summary is the first that standard output has
            import_parts(parts)  # once for all
    report = Report(options)
    signals, handler = os.pipe()  # what a handler raises in a destructor would be lost
    before = {s: signal.signal(s, lambda number, _: os.write(handler, bytes([number]))) for s in SIGNALS}
    try:
        for part in parts:
            began = time.monotonic()
            limit = patience * LIMITS_S.get(part, LIMIT_S)
            left = min(limit, deadline - (began - start))
            rows = report.begin(part)
            if left < 0.1 * limit:
                rows.append(skipped(part, f"not run: the {deadline} s of the whole check are over"))
            else:
                try:
                    for r in part_in_a_process(part, options, left, method, report.log, signals):
                        rows.append(r)
                        report.write()  # what there is, if this or the next part takes the machine with it
                except Exception as error:  # noqa: BLE001  such as a machine that starts no more processes
                    rows.append(row(f"{part} failed: {error}", None, "", False))
            report.end(part, time.monotonic() - began)
    except Interrupted as error:
        report.interrupted = str(error)
    for s in SIGNALS:
        signal.signal(s, signal.SIG_IGN)  # one more would cut the report
    report.finish()
    for s, of_s in before.items():
        signal.signal(s, of_s)
    os.close(signals)
    os.close(handler)
    return 130 if report.interrupted else 1 if report.failed else 0


# ---- how parts start -----------------------------------------------------------------------------


def import_parts(parts: tuple[Part, ...]) -> None:
    """What cannot be imported is a row of its part."""
    for part in parts:
        with suppress(Exception):
            import_module(f"benchmarks.gpu_check.{part}")


def start_method(options: Options, parts: tuple[Part, ...]) -> tuple[str, str]:
    """(how to start parts; why none can use the GPU). A fork saves the imports. But it cannot use CUDA if an import has
    asked for GPUs, and an import may crash or hang; then each part is spawned."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    probe = context.Process(target=import_and_fork, args=(options, parts, theirs))
    probe.start()
    theirs.close()
    said = None
    with suppress(EOFError):
        said = ours.recv() if ours.poll(120) else None
    end(probe)
    if said == "":
        return "fork", ""
    if said is None or torch.cuda.is_available():
        return "spawn", ""
    return "", said


def import_and_fork(options: Options, parts: tuple[Part, ...], results: Connection) -> None:
    """Sends "" if a fork of a process that has imported the parts can use the device, or else why not."""
    os.setpgid(0, 0)
    silence(Path(os.devnull))
    import_parts(parts)
    fork = multiprocessing.get_context("fork").Process(target=use_the_device, args=(options.device, results))
    fork.start()
    fork.join()


def use_the_device(device: str, results: Connection) -> None:
    try:
        torch.zeros(1, device=device)
        results.send("")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without CUDA
        results.send(str(error).strip().splitlines()[0])


# ---- parts in processes --------------------------------------------------------------------------


def silence(log: Path) -> None:
    """Standard output and error go to a file, also those of C++ and of subprocesses."""
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  not those of a fork's parent


def run_part(name: str, options: Options, results: Connection, log: Path) -> None:
    os.setpgid(0, 0)  # so that what it starts ends with it
    for s in SIGNALS:
        signal.signal(s, signal.SIG_DFL)
    try:
        silence(log)
        faulthandler.enable()
        for r in import_module(f"benchmarks.gpu_check.{name}").check(options, torch.device(options.device)):
            results.send(r)
    except Exception:  # noqa: BLE001
        # whatever it is, it is the result of this part
        results.send(row(f"{name} failed", None, "", False, error=traceback.format_exc()[-3000:]))
    results.send(None)


def part_in_a_process(
    name: str, options: Options, seconds: float, start_method: str, log: Path, signals: int
) -> Iterator[dict]:
    """The rows of a part. signals: a pipe with the number of one that ends the check."""
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_part, args=(name, options, theirs, log))
    logged, deadline = size_of(log), time.monotonic() + seconds
    try:
        process.start()
        theirs.close()
        while ready := wait([ours, process.sentinel, signals], max(0.0, deadline - time.monotonic())):
            if signals in ready:
                raise Interrupted(signal.Signals(os.read(signals, 1)[0]).name)
            if ours not in ready:  # a child of the part that lives on has the other end, too
                raise EOFError
            if (r := ours.recv()) is None:
                return
            yield r
        yield row(f"{name} did not end in {seconds:.0f} s", None, "", False, error=tail(log, logged))
    except EOFError:
        process.join(10)
        yield row(f"{name} died with {exit_of(process.exitcode)}", None, "", False, error=tail(log, logged))
    finally:
        if process.pid is not None:  # it was started
            end(process)


def end(process: multiprocessing.Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
        process.kill()
    process.join(10)  # longer, if a driver holds it


def size_of(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def tail(log: Path, start: int) -> str:
    """What a part printed: where it crashed, if it did, and below it the last that it said."""
    try:
        printed = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    except OSError:
        return ""
    said, crash, where = printed.partition("Fatal Python error")  # faulthandler's
    said = re.sub(r'^.*File ".*", line \d+, in .*\n', "", said, flags=re.M)  # torch's frames of C++ may come before
    return f"{crash}{where[:1500]}\n{said[-1500:]}"


def exit_of(code: int | None) -> str:
    if code is not None and code < 0:
        return f"{signal.Signals(-code).name}{' (out of memory?)' * (-code == signal.SIGKILL)}"
    return f"exit code {code}"
