"""Groups of responses that servers sample while ranks train."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lib.data import gather_groups, own_groups
from lib.data_proto import DataProto
from lib.rollout.engine import Generated, Response
from lib.sampling import Sampling
from servers.engine import ServerEngine

STATE = ("seed", "partial", "version")  # columns of a saved group that are not its prompt's


@dataclass(eq=False)
class Group:
    """The responses to one prompt, in flight."""

    rows: DataProto  # the prompt, once for each response
    responses: list[Response]
    version: int  # of the weights from which its oldest tokens may be

    def complete(self) -> bool:
        return all(response.future.done() for response in self.responses)


@dataclass
class AsyncRollouts:
    """Queue of this rank's in-flight groups, taken batch by batch. No token is more than `level` versions older than
    the weights when it is given, if each version takes one batch (of order "prompts": or more).

    order: "prompts": a batch is the groups that began first, out of level + 1 batches in flight. "finished": the
    complete groups, the oldest first, out of `level` batches. With one batch fewer in flight, slow groups may take one
    more version; groups that would then be too old are waited for. Responses continue across weight syncs and
    checkpoints."""

    engine: ServerEngine
    sampler: Any  # has start and collect, like the engine
    begin: Callable[[int], tuple[DataProto, list[int]]]  # (prompts repeated group_size times, seeds) of batch 1, 2, ...
    sampling: Sampling
    level: int
    order: Literal["prompts", "finished"]
    groups: int  # of a batch
    group_size: int
    last_started: int  # number of the last batch that was started
    last: int | None  # the run's last batch; None: each step takes as many as it needs
    in_flight: list[Group] = field(default_factory=list)
    _saved: DataProto | None = None

    def take(self) -> tuple[DataProto, list[Response]]:
        """(prompts repeated group_size times, their responses) of the next batch. A collective."""
        self.engine.check_weights()
        version: int = self.engine.version
        self._resume(version)
        batches = self.level + (self.order == "prompts")
        while len(self.in_flight) < (self.groups if self.last_started == self.last else batches * self.groups):
            self.last_started += 1
            self._start(*self.begin(self.last_started), None, version)
        self.engine.wait_until(lambda: self._next(version) is not None)
        taken = self._next(version) or []
        self.in_flight = [group for group in self.in_flight if group not in taken]
        rows = DataProto.concat([group.rows for group in taken])
        return rows, [response for group in taken for response in group.responses]

    def _next(self, version: int) -> list[Group] | None:
        """The groups of the next batch, if all of them are complete."""
        chosen = self.in_flight[: self.groups] if self.order == "prompts" else self._finished(version)
        return chosen if len(chosen) == self.groups and all(group.complete() for group in chosen) else None

    def _finished(self, version: int) -> list[Group]:
        """The complete groups that began first, and those that must come now: of the groups that may be given until
        `left` versions later at most, the next `left` batches can take only so many."""
        waiting = sorted(self.in_flight, key=lambda group: not group.complete())
        chosen: dict[Group, None] = {}
        for left in range(self.level + 1):
            urgent = [group for group in waiting if group.version + self.level <= version + left]
            must = len(urgent) - left * self.groups - len(chosen)
            chosen |= dict.fromkeys([group for group in urgent if group not in chosen][: max(must, 0)])
        others = [group for group in waiting if group not in chosen and group.complete()]
        return [*chosen, *others][: self.groups]

    def _start(self, rows: DataProto, seeds: list[int], partial: list[Generated] | None, version: int) -> None:
        responses = self.sampler.start(rows, self.sampling, seeds, partial)
        for i in range(0, len(rows), self.group_size):
            own = slice(i, i + self.group_size)
            self.in_flight.append(Group(rows[own], responses[own], version))

    def state_dict(self) -> dict[str, Any]:
        """`last_started`, and the in-flight groups of all ranks with the tokens they have so far. A collective."""
        parts = []
        for group in self.in_flight:
            columns: dict[str, list] = {"seed": [response.seed for response in group.responses]}
            columns["partial"] = [asdict(row) for row in self.engine.so_far(group.responses)]
            columns["version"] = [group.version] * len(group.rows)
            parts.append(group.rows.select().union(DataProto.from_dict(non_tensors=columns)))
        if not parts:  # on all ranks, which have equally many
            return {"last_started": self.last_started}
        rows = DataProto.concat(parts)
        return {"last_started": self.last_started, "in_flight": gather_groups(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The groups continue at the next `take`, when the engine has weights."""
        self.last_started, self._saved = state.get("last_started", self.last_started), state.get("in_flight")

    def _resume(self, version: int) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        for own in own_groups(saved):
            rows = saved[own]
            columns = {name: rows.non_tensor_batch[name] for name in STATE}
            rows = rows.select(non_tensor_batch_keys=[key for key in rows.non_tensor_batch if key not in STATE])
            partial, since = [Generated(**row) for row in columns["partial"]], int(columns["version"][0])
            if since < version - self.level:  # --async-level was higher
                partial, since = None, version
            self._start(rows, list(columns["seed"]), partial, since)
