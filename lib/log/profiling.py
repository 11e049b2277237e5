"""torch.profiler traces of steps, one file a rank, for https://ui.perfetto.dev or chrome://tracing."""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.profiler import profile

from lib.distributed import World, dump_memory, profiler_activities, record_memory

LARGEST = 20  # operations in the table
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Profiler:
    """Profiles whole steps, from `start` to `stop`, into step_000003-rank_0.json.gz: operations, kernels, stages, and a
    curve of the memory in use (on a CPU from the start of the step). A GPU also writes
    step_000003-rank_0.memory.pickle, each allocation with its stack, for https://pytorch.org/memory_viz."""

    def __init__(self, folder: Path, steps: Collection[int], world: World) -> None:
        self.folder, self.steps, self.world = folder, steps, world
        self._on_gpu = world.device.type != "cpu"
        self._running: profile | None = None
        self._name = ""

    def start(self, step: int) -> None:
        if step not in self.steps:
            return
        self._name = f"step_{step:06d}-rank_{self.world.rank}"
        if self._on_gpu:
            record_memory(self.world.device)
        self._running = profile(activities=profiler_activities(self.world.device), profile_memory=True)
        self._running.start()

    def stop(self) -> bool:
        """If a step was being profiled, writes its trace and prints its largest operations. Returns if so."""
        if self._running is None:
            return False
        running, self._running = self._running, None
        running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._on_gpu:
            dump_memory(self.world.device, self.folder / f"{self._name}.memory.pickle")
        with tempfile.NamedTemporaryFile(suffix=".json", dir=self.folder) as file:
            running.export_chrome_trace(file.name)
            content = Path(file.name).read_bytes()
        content = json.dumps(with_memory_curves(json.loads(content))).encode()
        path = self.folder / f"{self._name}.json.gz"
        path.write_bytes(gzip.compress(content, 3))
        if self.world.rank == 0:
            table = largest_operations(json.loads(content)["traceEvents"])
            print(f"profiled: {path}\n{table}", flush=True)
        return True


def with_memory_curves(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace with a counter for each device, which viewers draw as a curve."""
    curves = []
    for event in trace["traceEvents"]:
        if event["name"] == "[memory]":
            args = event["args"]
            device = "CPU" if args["Device Type"] == 0 else f"GPU {args['Device Id']}"
            used = {"MiB": args["Total Allocated"] / 2**20}
            counter = {"ph": "C", "name": f"memory, {device}", "args": used}
            curves.append(counter | {key: event[key] for key in ("pid", "ts")})
    return trace | {"traceEvents": trace["traceEvents"] + curves}


def largest_operations(events: list[dict[str, Any]]) -> str:
    """A table of a GPU's kernels, or a CPU's operations, by time without the operations that they call."""
    kernels = [event for event in events if event.get("cat") in GPU_WORK]
    own_us, calls = Counter[str](), Counter[str]()
    around: dict[Any, list[tuple[float, str]]] = {}  # (end, name) of what runs in a thread or stream
    operations = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(operations, key=lambda event: (event["ts"], -event["dur"])):
        name, running = event["name"], around.setdefault((event["pid"], event["tid"]), [])
        while running and running[-1][0] <= event["ts"]:
            running.pop()
        if running:
            own_us[running[-1][1]] -= event["dur"]
        running.append((event["ts"] + event["dur"], name))
        own_us[name] += event["dur"]
        calls[name] += 1
    total = sum(own_us.values()) or 1
    lines = [f"{'self GPU, ms' if kernels else 'self CPU, ms':>14} {'share':>7} {'calls':>9}  operation"]
    for name, time in own_us.most_common(LARGEST):
        lines.append(f"{time / 1000:14,.1f} {time / total:7.1%} {calls[name]:9,d}  {name[:80]}")
    return "\n".join(lines)
