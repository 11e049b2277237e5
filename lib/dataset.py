"""Prompts: files of rows in verl's form -> tokens, and the endless loader that hands each rank its share of a step.

A row is {"prompt": [{"role": ..., "content": ...}, ...], "data_source": ..., "reward_model": {"ground_truth": ...},
"extra_info": {"index": ..., "tools_kwargs": ..., "interaction_kwargs": ...}} (extra_info and its keys may be absent).

Traps this module avoids:
- Arrow gives every row of a struct column all fields that any row has, None where the row had none (tools_kwargs of
  two tools, say). So a null field is the same as an absent one: it is removed, whatever kind of file it came from.
- Columns of several files are not merged: ground_truth may be a string in one file and a number in the next.
- numpy makes a 2-D array of equally long lists; collate_fn never does.
- A worker prefetches; the loader's position counts what was handed out, not what was prepared.
"""

import bisect
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lib import InputError
from lib.args import HUB_ID, check_source
from lib.cli.user_code import load_object
from lib.special_tokens import Defuse

if TYPE_CHECKING:
    import datasets  # a second of import that rows of JSON can do without

warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 beside torch 2.13

DEEPEST = 100  # lists and dicts of a row, one in the other
SERIAL_ROWS = 20_000  # below this, starting processes costs more than tokenizing in one


# ---- reading files ----


def _read_json(path: Path) -> list[dict]:
    """The rows of a .jsonl file, or of a .json file that is either one array or one object a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if text.lstrip().startswith("["):
        try:
            rows = list(enumerate(json.loads(text)))
        except json.JSONDecodeError as error:
            raise InputError(f"{path} line {error.lineno}: not valid JSON ({error.msg}); correct the file") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not readable ({_why_unreadable(error)}); correct the file") from error
        place = "row"
    else:
        rows, place = [], "line"
        for number, line in enumerate(text.split("\n"), start=1):  # not splitlines(): U+2028 may stand in a string
            if not line.strip():
                continue
            try:
                rows.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                message = f"{path} line {number}: not valid JSON ({error.msg}); correct or remove the line"
                raise InputError(message) from error
            except (ValueError, RecursionError) as error:
                why = _why_unreadable(error)
                raise InputError(f"{path} line {number}: not readable ({why}); correct or remove the line") from error
    for number, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{path} {place} {number}: a {type(row).__name__}, but a row must be an object {{...}}")
    return [row for _, row in rows]


def _why_unreadable(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def read_rows(source: "str | Path | datasets.Dataset") -> Sequence[dict]:
    """The rows of one source: a .parquet / .json / .jsonl file, a folder written by Dataset.save_to_disk, a
    datasets.Dataset, or a hub id "owner/name" or "owner/name:split" (split "train" if not given).

    Raises InputError: no such file, an extension that is not one of these, a file that cannot be read.
    """
    if not isinstance(source, str | Path):
        import datasets

        if isinstance(source, datasets.Dataset):
            return source
        raise InputError(f"data files: got a {type(source).__name__}; give paths, a hub id or a datasets.Dataset")
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "state.json").is_file():
            files = sorted(p.name for p in path.iterdir())[:8]
            raise InputError(f"{path}: a folder that holds no saved Dataset; name the files in it: {', '.join(files)}")
        with _quiet_datasets() as datasets:
            return datasets.load_from_disk(str(path))
    if path.is_file():
        if path.suffix in (".json", ".jsonl"):
            return _read_json(path)
        if path.suffix != ".parquet":
            raise InputError(f"{path}: unsupported extension {path.suffix!r}; use .parquet, .jsonl or .json")
        try:
            with _quiet_datasets() as datasets:
                return datasets.Dataset.from_parquet(str(path))
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise InputError(f"{path}: not readable as parquet ({reason}); write the file again") from error
    check_source(str(source))
    hub = HUB_ID.fullmatch(str(source))
    return load_split(hub["id"], hub["split"] or "train")


def load_split(hub_id: str, split: str, *, config: str | None = None, local_dir: Path | None = None) -> Sequence[dict]:
    """A split of a data set on the hub, or of a copy of it: the .parquet / .jsonl / .json files under local_dir (under
    local_dir/config if there is such a folder) whose names begin with `split`.

    Raises InputError when there is none, with the reason.
    """
    if local_dir is None:
        try:
            with _quiet_datasets() as datasets:
                return datasets.load_dataset(hub_id, config, split=split)
        except Exception as error:  # the hub client's errors have no common class
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{hub_id}: not a file here, and split {split!r} cannot be had from the hub ({reason}); "
                "check the name and the network, or use a local copy"
            ) from error
    folder = local_dir / config if config and (local_dir / config).is_dir() else local_dir
    files = sorted(path for path in folder.rglob(f"{split}*") if path.suffix in (".parquet", ".jsonl", ".json"))
    if not files:
        raise InputError(f"{folder}: no {split}*.parquet, {split}*.jsonl or {split}*.json in it; check --local-dir")
    return [row for path in files for row in read_rows(path)]


@contextmanager
def _quiet_datasets():
    """The library, imported where it is needed, without its progress bars."""
    import datasets

    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if not were_off:
            datasets.enable_progress_bars()


def _plain(value, depth: int = 0):
    """Python's lists and scalars for numpy's; a dict's fields that are None are removed (see the module's traps).

    Raises RecursionError for what is nested deeper than DEEPEST: other code, of a template, say, is to get through.
    """
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [_plain(item, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _shown(value) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the data set ----


class RLHFDataset(Dataset):
    """Tokenized prompts of one or several sources (see read_rows), one after another.

    An item: input_ids, attention_mask, position_ids, each (P,) int64 with P = max_prompt_length, left-padded with the
    pad token (eos where the tokenizer has none); raw_prompt_ids, the prompt's ids without padding (list); raw_prompt,
    the messages; data_source; reward_model, a dict that has "ground_truth"; extra_info; index, from extra_info, else
    the row's number; tools_kwargs and interaction_kwargs, from extra_info, else {}; full_prompts, the templated text,
    if return_full_prompt.

    Every row is templated and tokenized once here, so that a bad row stops the run before a model loads. A prompt
    longer than P is left out if filter_overlong_prompts; otherwise `truncation` says what goes: "left" (its start),
    "right" (its end), "middle", or "error". `dropped` counts rows left out by reason, `truncated` those to be cut;
    `without_ground_truth` is the file and number of the first row kept that has none, for scorers that take one. Text
    in a message that spells a special token is broken up by a space, unless allow_special_tokens; `defused` counts the
    prompts with such text, and raw_prompt has it broken up.
    num_proc: processes for this pass; None is 1 for a small set, else the CPUs of this rank, at most 16.

    Raises InputError, with file and row (counted from 0), on whatever is wrong in the files.
    """

    def __init__(
        self,
        data_files: "str | Path | datasets.Dataset | Sequence[str | Path | datasets.Dataset]",
        tokenizer,
        *,
        max_prompt_length: int,
        truncation: str = "error",
        filter_overlong_prompts: bool = True,
        prompt_key: str = "prompt",
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        return_full_prompt: bool = False,
        allow_special_tokens: bool = False,
        num_proc: int | None = None,
    ):
        if truncation not in ("left", "right", "middle", "error"):
            raise InputError(f"truncation={truncation!r}: use left, right, middle or error")
        if max_prompt_length < 1:
            raise InputError(f"max_prompt_length={max_prompt_length}: must be at least 1")
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise InputError(f"tokenizer {name}: no chat template; use an instruct model's, or set chat_template")
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if self.pad_token_id is None:
            raise InputError(f"tokenizer {tokenizer.name_or_path}: neither a pad nor an eos token; set pad_token")
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.prompt_key = prompt_key
        self.chat_template_kwargs = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        self.return_full_prompt = return_full_prompt
        self.defuse = None if allow_special_tokens else Defuse(tokenizer)

        if not isinstance(data_files, list | tuple):
            data_files = [data_files]
        self.sources = [self._open(source, number) for number, source in enumerate(data_files)]
        self._ends = list(accumulate(len(rows) for _, rows in self.sources))
        n_read = self._ends[-1] if self._ends else 0
        names = ", ".join(name for name, _ in self.sources)
        if n_read == 0:
            raise InputError(f"{names or 'data files'}: no rows; check the files")

        lengths, has_truth, broken_up = self._check_rows(n_read, num_proc).T
        too_long = lengths > max_prompt_length
        self.dropped = {"prompt_too_long": int(too_long.sum()) if filter_overlong_prompts else 0}
        self.truncated = 0 if filter_overlong_prompts else int(too_long.sum())
        if self.truncated and truncation == "error":
            row = int(too_long.argmax())
            raise InputError(
                f"{self._where(row)}: prompt of {lengths[row]} tokens, max_prompt_length={max_prompt_length}; "
                "raise it, set filter_overlong_prompts, or truncation to left, right or middle"
            )
        self.kept = np.flatnonzero(~too_long) if filter_overlong_prompts else np.arange(n_read)
        if len(self.kept) == 0:
            raise InputError(
                f"{names}: no row left: {n_read} read, {n_read} too long for max_prompt_length={max_prompt_length} "
                f"(the shortest prompt has {lengths.min()} tokens); raise max_prompt_length"
            )
        without = self.kept[has_truth[self.kept] == 0]
        self.without_ground_truth = self._where(int(without[0])) if len(without) else None
        self.defused = int(broken_up[self.kept].sum())

    def _open(self, source, number: int) -> tuple[str, Sequence[dict]]:
        name = str(source) if isinstance(source, str | Path) else f"data set {number} in memory"
        rows = read_rows(source)
        required = [self.prompt_key, "data_source", "reward_model"]
        if not isinstance(rows, list):  # a datasets.Dataset
            for column in required:
                if column not in rows.column_names:
                    raise InputError(f"{name}: no column {column!r}; it has {', '.join(rows.column_names)}")
            return name, rows.select_columns([c for c in [*required, "extra_info"] if c in rows.column_names])
        for i, row in enumerate(rows):
            for column in required:
                if column not in row:
                    raise InputError(f"{name} row {i}: no column {column!r}; it has {', '.join(row)}")
        return name, rows

    def _locate(self, row: int) -> tuple[int, int]:
        source = bisect.bisect_right(self._ends, row)
        return source, row - (self._ends[source - 1] if source else 0)

    def _where(self, row: int) -> str:
        source, i = self._locate(row)
        return f"{self.sources[source][0]} row {i}"

    def _row(self, row: int) -> dict:
        source, i = self._locate(row)
        try:
            return _plain(self.sources[source][1][i])
        except RecursionError as error:
            raise InputError(f"{self._where(row)}: nested deeper than {DEEPEST} lists and dicts") from error

    def _messages(self, row: int, value) -> list[dict]:
        if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
            value = [dict(zip(value, fields)) for fields in zip(*value.values())]  # old `datasets` saved lists so
        are_messages = isinstance(value, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in value
        )
        if not (value and are_messages):
            raise InputError(
                f"{self._where(row)}: {self.prompt_key!r} is not a list of messages but {_shown(value)}; "
                'write [{"role": "user", "content": ...}]'
            )
        for number, message in enumerate(value):
            content, called = message.get("content"), message.get("tool_calls")
            parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
            if not (isinstance(content, str) or parts or (content is None and called)):
                raise InputError(
                    f"{self._where(row)}: the content of message {number} is {_shown(content)}; it must be text, or a "
                    "list of parts such as {'type': 'text', 'text': ...}"
                )
        return value

    def _tokenize(self, row: int, messages: list[dict]) -> tuple[str, list[int]]:
        """The templated text and its ids. The template writes the special tokens, so none are added."""
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.chat_template_kwargs)
        except Exception as error:  # a template's code may raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise InputError(f"{self._where(row)}: the chat template refuses this prompt: {reason}") from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = text[error.start]
            raise InputError(f"{self._where(row)}: the prompt has {surrogate!r}, half of a character") from error
        return text, self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check_row(self, row: int) -> tuple[int, bool, bool]:
        """Checks a row's form; its prompt's length in tokens, whether it has a ground truth, and whether a special
        token in the prompt was broken up."""
        fields = self._row(row)
        for column in ("reward_model", "extra_info"):
            if not isinstance(value := fields.get(column, {}), dict):
                raise InputError(f"{self._where(row)}: {column!r} is {_shown(value)}; it must be a dict")
        source = fields.get("data_source")
        if not isinstance(source, str):
            raise InputError(f"{self._where(row)}: 'data_source' is {_shown(source)}; it must be text")
        written = self._messages(row, fields.get(self.prompt_key))
        messages = self.defuse(written) if self.defuse else written
        ids = self._tokenize(row, messages)[1]
        return len(ids), "ground_truth" in fields.get("reward_model", {}), messages != written

    def _check_rows(self, n_read: int, num_proc: int | None) -> np.ndarray:
        """(n_read, 3) integers: what _check_row gives."""
        if num_proc is None:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            num_proc = 1 if n_read < SERIAL_ROWS else max(1, min(16, cpus // ranks_here))
        if num_proc == 1:
            return np.array([self._check_row(row) for row in range(n_read)])
        # Forked: the rows are inherited, not pickled. An executor: a Pool hangs when one of its processes is killed.
        global _forked
        _forked = self
        bounds = np.linspace(0, n_read, 4 * num_proc + 1).astype(int).tolist()
        with ProcessPoolExecutor(num_proc, mp_context=multiprocessing.get_context("fork")) as pool:
            checked = list(pool.map(_check_rows_of_forked, map(range, bounds, bounds[1:])))
        _forked = None
        return np.concatenate(checked)

    @property
    def data_sources(self) -> set[str]:
        """Every data_source among the kept rows: what the reward must know."""
        return {self._row(int(row))["data_source"] for row in self.kept}

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: int) -> dict:
        row = int(self.kept[i])
        fields = self._row(row)
        messages = self._messages(row, fields[self.prompt_key])
        messages = self.defuse(messages) if self.defuse else messages
        text, ids = self._tokenize(row, messages)
        if len(ids) > self.max_prompt_length:
            ids = self._truncate(ids)
        n_pad = self.max_prompt_length - len(ids)
        mask = F.pad(torch.ones(len(ids), dtype=torch.long), (n_pad, 0))
        extra_info = fields.get("extra_info", {})
        item = {
            "input_ids": F.pad(torch.tensor(ids, dtype=torch.long), (n_pad, 0), value=self.pad_token_id),  # (P,)
            "attention_mask": mask,  # (P,)
            "position_ids": (mask.cumsum(0) - 1).clamp(min=0),  # (P,)
            "raw_prompt_ids": ids,
            "raw_prompt": messages,
            "data_source": fields.get("data_source"),
            "reward_model": {"ground_truth": None, **fields.get("reward_model", {})},
            "extra_info": extra_info,
            "index": extra_info.get("index", row),
            "tools_kwargs": extra_info.get("tools_kwargs", {}),
            "interaction_kwargs": extra_info.get("interaction_kwargs", {}),
        }
        if self.return_full_prompt:
            item["full_prompts"] = text
        return item

    def _truncate(self, ids: list[int]) -> list[int]:
        limit = self.max_prompt_length
        if self.truncation == "left":
            return ids[-limit:]
        if self.truncation == "right":
            return ids[:limit]
        head = limit // 2  # "middle"; under "error" no over-long row is kept
        return ids[:head] + ids[head - limit :]


_forked: RLHFDataset | None = None  # what the processes of _check_rows inherit


def _check_rows_of_forked(rows: range) -> np.ndarray:
    return np.array([_forked._check_row(row) for row in rows], dtype=int).reshape(-1, 3)


def load_dataset_class(spec: str) -> type[Dataset]:
    """The class that "path/to/file.py:ClassName" names. Scripts call it with RLHFDataset's arguments.

    Raises InputError: what load_object raises, or it is not a subclass of torch.utils.data.Dataset.
    """
    found = load_object("--dataset-class", spec)
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise InputError(f"--dataset-class {spec}: it is not a subclass of torch.utils.data.Dataset")
    return found


# ---- batches ----


def collate_fn(items: list[dict]) -> dict[str, torch.Tensor | np.ndarray]:
    """Tensors are stacked to (B, ...); everything else becomes a 1-D object array (B,). P of input_ids, attention_mask
    and position_ids (B, P) is that of the longest prompt: columns that are padding in all rows are left out."""
    batch = {}
    for key in items[0]:
        values = [item[key] for item in items]
        if isinstance(values[0], torch.Tensor):
            batch[key] = torch.stack(values)
        else:
            batch[key] = np.fromiter(values, dtype=object, count=len(values))
    if "attention_mask" in batch:
        longest = int(batch["attention_mask"].sum(1).max())
        batch |= {key: batch[key][:, -longest:] for key in ("input_ids", "attention_mask", "position_ids")}
    return batch


class _StepSampler:
    """Yields, step after step and without end, the rows of the stream that belong to this rank."""

    def __init__(self, num_rows: int, prompts_per_step: int, rank: int, world_size: int, seed: int, shuffle: bool):
        self.num_rows, self.prompts_per_step, self.seed, self.shuffle = num_rows, prompts_per_step, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        epoch_of_order, order, position = None, None, self.start
        while True:
            rows = []
            for k in range(position + self.rank, position + self.prompts_per_step, self.world_size):
                epoch, i = divmod(k, self.num_rows)
                if epoch != epoch_of_order:
                    epoch_of_order, order = epoch, self.order(epoch)
                rows.append(int(order[i]))
            yield rows
            position += self.prompts_per_step

    def order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)


class PromptLoader(StatefulDataLoader):
    """See make_loader. `position` is the number of rows of the stream that were handed out, over all ranks.

    The state is the position and what the order depends on, so it fits any world size and any num_workers (torchdata's
    own state holds its workers, and loads only into as many).
    """

    def __init__(self, dataset: Dataset, sampler: _StepSampler, num_workers: int):
        # Its own generator: the worker seeds would else be drawn from the global one, at another time after a resume.
        generator = torch.Generator().manual_seed(sampler.seed)
        super().__init__(
            dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=collate_fn, generator=generator
        )
        self.position = 0

    def __iter__(self) -> Iterator[dict]:
        self.batch_sampler.start = self.position
        for batch in super().__iter__():
            self.position += self.batch_sampler.prompts_per_step
            yield batch

    def state_dict(self) -> dict[str, int | bool]:
        sampler = self.batch_sampler
        order = {"num_rows": sampler.num_rows, "seed": sampler.seed, "shuffle": sampler.shuffle}
        return {"position": self.position, **order}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Takes effect at the next iter(loader). Raises InputError when the saved stream had another order; a state of
        a position alone is one of this stream."""
        for key, here in self.state_dict().items():
            if key != "position" and state.get(key, here) != here:
                raise InputError(
                    f"resume: the saved data stream has {key}={state[key]}, this run {key}={here}, so rows would be "
                    "lost or doubled; use the same data files, max_prompt_length, seed and shuffle, or start a new run"
                )
        self.position = int(state["position"])


def make_loader(
    dataset: Dataset,
    prompts_per_step: int,
    *,
    rank: int,
    world_size: int,
    seed: int,
    shuffle: bool = True,
    num_workers: int = 0,
) -> PromptLoader:
    """An endless loader of one rank's share, prompts_per_step / world_size rows, of each step's prompts.

    Row k of the stream is row order(seed, k // N)[k % N] of the data set's N rows, shuffled anew each epoch. A step
    takes the next prompts_per_step rows, also across an epoch's end, and rank r every world_size-th of them from the
    r-th on. So each epoch has each row once, and the union over the ranks does not depend on their number. (With N less
    than prompts_per_step a step has rows of several epochs, hence the same row more than once.)

    state_dict() / load_state_dict() are plain ints, the same on every rank. Raises InputError on impossible sizes.
    """
    if prompts_per_step < 1 or prompts_per_step % world_size:
        above = (max(prompts_per_step, 1) // world_size + 1) * world_size
        raise InputError(
            f"prompts_per_step={prompts_per_step} must be a positive multiple of world_size={world_size} "
            f"(prompts_per_step % world_size = {prompts_per_step % world_size}); use {above}, say"
        )
    if not 0 <= rank < world_size:
        raise InputError(f"rank={rank}: must be in 0..{world_size - 1} for world_size={world_size}")
    if seed < 0:
        raise InputError(f"seed={seed}: must not be negative")
    if len(dataset) == 0:
        raise InputError("the data set has no rows")
    sampler = _StepSampler(len(dataset), prompts_per_step, rank, world_size, seed, shuffle)
    return PromptLoader(dataset, sampler, num_workers)
