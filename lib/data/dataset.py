"""RLHFDataset: rows -> tokenized prompts, with their images and videos."""

import bisect
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from lib import InputError
from lib.cli.user_code import load_object
from lib.data.rows import DEEPEST, _plain, _shown, read_rows
from lib.data.special_tokens import SpecialTokenEscaper
from lib.data.vision import Encoded, Vision, media_hash

if TYPE_CHECKING:
    import datasets

SERIAL_ROWS = 20_000  # below this, starting processes costs more than tokenizing in one
SERIAL_ROWS_OF_IMAGES = 500  # decoding and resizing take longer


class Prompt(NamedTuple):
    """A row's prompt: its messages, whether special tokens in them were broken up, and what the template makes."""

    messages: list[dict]
    escaped: bool
    text: str
    encoded: Encoded
    media: dict
    """multi_modal_data"""


class PromptDataset(Protocol):
    """The methods of RLHFDataset and of every class for --dataset-class."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict: ...


class RLHFDataset(Dataset):
    """The tokenized prompts of one or several sources (see read_rows), one source after the other.

    Items hold input_ids, attention_mask, position_ids, each (P,) int64 with P = max_prompt_length, left-padded with the
    pad token (eos where the tokenizer has none); raw_prompt_ids, the prompt's ids without padding (list); raw_prompt,
    the messages; data_source; reward_model, a dict that has "ground_truth"; extra_info; index, from extra_info, else
    the row's number; tools_kwargs and interaction_kwargs, from extra_info, else {}; full_prompts, the templated text,
    if return_full_prompt.

    The constructor templates and tokenizes every row once, so that a bad row stops the run before a model loads. It
    leaves out a prompt longer than P if filter_overlong_prompts; otherwise `truncation` says what is cut: "left" (the
    start), "right" (the end), "middle", or "error". `dropped` counts the rows left out, by reason; `truncated` counts
    those that will be cut; `without_ground_truth` is the file and number of the first kept row without a ground truth,
    for scorers that need one; `with_images` is that of the first with images or videos. Unless allow_special_tokens, a
    space breaks up message text that spells a special token, in raw_prompt too; `escaped` counts the prompts with such
    text.

    With `vision`, for models that see, a row's images and videos are those of the columns image_key and video_key, in
    the order of <image> and <video> in its messages (docs/data.md). Then input_ids have a placeholder for each feature
    of an image, and their number counts for P; raw_prompt_ids have one for each image; position_ids are (4, P) for a
    model with mrope; and items also hold multi_modal_data, the images; multi_modal_inputs, the processor's tensors;
    multi_modal_hash, () int64, of those tensors. A row with more than vision.max_images is left out, and a prompt with
    images is never cut.

    num_proc: processes for this pass; None is 1 for a small set, else the CPUs of this rank, at most 16.

    Raises InputError, with file and row (counted from 0), for anything wrong in the files.
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
        vision: Vision | None = None,
        image_key: str = "images",
        video_key: str = "videos",
    ):
        if truncation not in ("left", "right", "middle", "error"):
            raise InputError(f"truncation={truncation!r}: use left, right, middle or error")
        if max_prompt_length < 1:
            raise InputError(f"max_prompt_length={max_prompt_length}: must be at least 1")
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise InputError(
                f"tokenizer {name}: no chat template (a base model?): take an instruct model, or set the tokenizer's "
                "chat_template and save it"
            )
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if self.pad_token_id is None:
            raise InputError(f"tokenizer {tokenizer.name_or_path}: neither a pad nor an eos token; set pad_token")
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.prompt_key = prompt_key
        self.chat_template_kwargs = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        self.return_full_prompt = return_full_prompt
        self.escape_special_tokens = None if allow_special_tokens else SpecialTokenEscaper(tokenizer)
        self.vision = vision
        self.media_keys = (image_key, video_key)

        if not isinstance(data_files, list | tuple):
            data_files = [data_files]
        self.sources = [self._open(source, number) for number, source in enumerate(data_files)]
        self._ends = list(accumulate(len(rows) for _, rows in self.sources))
        n_read = self._ends[-1] if self._ends else 0
        names = ", ".join(name for name, _ in self.sources)
        if n_read == 0:
            raise InputError(f"{names or 'data files'}: no rows; check the files")

        lengths, has_truth, broken_up, n_media = self._check_rows(n_read, num_proc).T
        too_long = lengths > max_prompt_length
        too_many = n_media > (vision.max_images if vision else 0)
        self.dropped = {"prompt_too_long": int(too_long.sum()) if filter_overlong_prompts else 0}
        if vision:
            self.dropped["too_many_images"] = int(too_many.sum())
        self.truncated = 0 if filter_overlong_prompts else int(too_long.sum())
        if self.truncated and truncation == "error":
            row = int(too_long.argmax())
            raise InputError(
                f"{self._where(row)}: prompt of {lengths[row]} tokens, max_prompt_length={max_prompt_length}; "
                "raise it, set filter_overlong_prompts, or truncation to left, right or middle"
            )
        if not filter_overlong_prompts and (too_long & (n_media > 0)).any():
            row = int((too_long & (n_media > 0)).argmax())
            raise InputError(
                f"{self._where(row)}: prompt of {lengths[row]} tokens, max_prompt_length={max_prompt_length}; a prompt "
                "with images cannot be cut: raise it, or set filter_overlong_prompts"
            )
        self.kept = np.flatnonzero(~too_many & ~(too_long & filter_overlong_prompts))
        if len(self.kept) == 0:
            self._raise_no_row_left(names, lengths[~too_many], too_many)
        without = self.kept[has_truth[self.kept] == 0]
        self.without_ground_truth = self._where(int(without[0])) if len(without) else None
        self.escaped = int(broken_up[self.kept].sum())
        seen = self.kept[n_media[self.kept] > 0]
        self.with_images = self._where(int(seen[0])) if len(seen) else None

    def _raise_no_row_left(self, names: str, lengths: np.ndarray, too_many: np.ndarray) -> None:
        if len(lengths) == 0 and self.vision is not None:
            raise InputError(
                f"{names}: no row left: each of {len(too_many)} has more than max_images={self.vision.max_images} "
                "images; raise max_images"
            )
        limit = f"max_prompt_length={self.max_prompt_length}"
        raise InputError(
            f"{names}: no row left: {len(too_many)} read, {len(lengths)} too long for {limit} "
            f"(the shortest prompt has {lengths.min()} tokens); raise max_prompt_length"
        )

    def _open(self, source, number: int) -> tuple[str, Sequence[dict]]:
        name = str(source) if isinstance(source, str | Path) else f"data set {number} in memory"
        rows: Any = read_rows(source)
        required = [self.prompt_key, "data_source", "reward_model"]
        if not isinstance(rows, list):  # a datasets.Dataset
            for column in required:
                if column not in rows.column_names:
                    raise InputError(f"{name}: no column {column!r}; it has {', '.join(rows.column_names)}")
            wanted = [*required, "extra_info", *self.media_keys]
            rows = rows.select_columns([column for column in wanted if column in rows.column_names])
            has_media = not {*self.media_keys}.isdisjoint(rows.column_names)
            return name, UndecodedRows(rows) if has_media else rows  # type: ignore[return-value]  # it has what is used
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
            value = [dict(zip(value, fields)) for fields in zip(*value.values())]  # as old `datasets` saved lists
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

    def _with_media(self, row: int, fields: dict, messages: list[dict]) -> tuple[list[dict], list, list]:
        """The messages with <image> and <video> as content parts, and the images and videos as they are in the row."""
        if self.vision is None:
            if any(fields.get(key) for key in self.media_keys):
                name = self.tokenizer.name_or_path or "the model"
                raise InputError(f"{self._where(row)}: has images or videos; {name} takes none")
            return messages, [], []
        columns = [fields.get(key) or [] for key in self.media_keys]
        for key, column in zip(self.media_keys, columns):
            if not isinstance(column, list):
                raise InputError(f"{self._where(row)}: {key!r} is {_shown(column)}; it must be a list")
        images, videos = self.vision.entries(messages, *columns)
        return self.vision.messages(messages, {"image": images, "video": videos}, self._where(row)), images, videos

    def _prompt(self, row: int, messages: list[dict], images: list, videos: list) -> Prompt:
        """The template writes the special tokens, so none are added."""
        plain = self.escape_special_tokens(messages) if self.escape_special_tokens else messages
        text = self._templated(row, plain)
        if self.vision is None:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return Prompt(plain, plain != messages, text, Encoded(ids, ids, {}), {})
        media = self.vision.media(images, videos, self._where(row), self._folder(row))
        try:
            encoded = self.vision.encode(text, media)
        except InputError as error:
            raise InputError(f"{self._where(row)}: {error}") from error
        return Prompt(plain, plain != messages, text, encoded, media)

    def _folder(self, row: int) -> Path:
        """Where the row's relative paths begin."""
        path = Path(self.sources[self._locate(row)[0]][0]).expanduser()
        return path if path.is_dir() else path.parent if path.is_file() else Path()

    def _templated(self, row: int, messages: list[dict]) -> str:
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
        return text

    def _check_row(self, row: int) -> tuple[int, bool, bool, int]:
        """Checks a row's form. Returns the prompt's length in tokens (0 if it has too many images), whether the row has
        a ground truth, whether a special token in the prompt was broken up, and the number of images or of videos,
        whichever is more."""
        fields = self._row(row)
        for column in ("reward_model", "extra_info"):
            if not isinstance(value := fields.get(column, {}), dict):
                raise InputError(f"{self._where(row)}: {column!r} is {_shown(value)}; it must be a dict")
        source = fields.get("data_source")
        if not isinstance(source, str):
            raise InputError(f"{self._where(row)}: 'data_source' is {_shown(source)}; it must be text")
        has_truth = "ground_truth" in fields.get("reward_model", {})
        messages = self._messages(row, fields.get(self.prompt_key))
        messages, images, videos = self._with_media(row, fields, messages)
        n_media = max(len(images), len(videos))
        if self.vision and n_media > self.vision.max_images:
            return 0, has_truth, False, n_media
        prompt = self._prompt(row, messages, images, videos)
        return len(prompt.encoded.ids), has_truth, prompt.escaped, n_media

    def _check_rows(self, n_read: int, num_proc: int | None) -> np.ndarray:
        """(n_read, 4) integers: what _check_row returns for each row."""
        if num_proc is None:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            few = SERIAL_ROWS_OF_IMAGES if self.vision else SERIAL_ROWS
            num_proc = 1 if n_read < few else max(1, min(16, cpus // ranks_here))
        if num_proc == 1:
            return np.array([self._check_row(row) for row in range(n_read)])
        # Forked processes inherit the rows, without pickling. A Pool would hang if one of its processes were killed.
        global _forked
        _forked = self
        bounds = np.linspace(0, n_read, 4 * num_proc + 1).astype(int).tolist()
        fork = multiprocessing.get_context("fork")
        # OpenMP's threads are not there after a fork: an operation that waits for them would hang.
        with ProcessPoolExecutor(num_proc, fork, initializer=torch.set_num_threads, initargs=(1,)) as pool:
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
        prompt = self._prompt(row, *self._with_media(row, fields, self._messages(row, fields[self.prompt_key])))
        raw_ids, ids, inputs = prompt.encoded
        if len(ids) > self.max_prompt_length:  # of text alone: a prompt with images is not kept
            raw_ids = ids = self._truncate(ids)
        n_pad = self.max_prompt_length - len(ids)
        positions = self.vision.positions(ids, inputs) if self.vision else torch.arange(len(ids))
        extra_info = fields.get("extra_info", {})
        item = {
            "input_ids": F.pad(torch.tensor(ids, dtype=torch.long), (n_pad, 0), value=self.pad_token_id),  # (P,)
            "attention_mask": F.pad(torch.ones(len(ids), dtype=torch.long), (n_pad, 0)),  # (P,)
            "position_ids": F.pad(positions, (n_pad, 0)),  # (P,) or (4, P)
            "raw_prompt_ids": raw_ids,
            "raw_prompt": prompt.messages,
            "data_source": fields.get("data_source"),
            "reward_model": {"ground_truth": None, **fields.get("reward_model", {})},
            "extra_info": extra_info,
            "index": extra_info.get("index", row),
            "tools_kwargs": extra_info.get("tools_kwargs", {}),
            "interaction_kwargs": extra_info.get("interaction_kwargs", {}),
        }
        if self.return_full_prompt:
            item["full_prompts"] = prompt.text
        if self.vision:
            item |= {"multi_modal_data": prompt.media, "multi_modal_inputs": inputs}
            item["multi_modal_hash"] = torch.tensor(media_hash(inputs))  # ()
        return item

    def _truncate(self, ids: list[int]) -> list[int]:
        limit = self.max_prompt_length
        if self.truncation == "left":
            return ids[-limit:]
        if self.truncation == "right":
            return ids[:limit]
        head = limit // 2  # "middle"; under "error" no over-long row is kept
        return ids[:head] + ids[head - limit :]


class UndecodedRows:
    """The rows of a data set, with images as files hold them, {"bytes": ..., "path": ...}. The datasets library would
    decode them whenever a row is read, and would say of a broken one neither file nor row."""

    def __init__(self, rows: "datasets.Dataset"):
        self.rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        [row] = self.rows[i].to_pylist()
        return row


_forked: RLHFDataset | None = None  # what the processes of _check_rows inherit


def _check_rows_of_forked(rows: range) -> np.ndarray:
    assert _forked is not None
    return np.array([_forked._check_row(row) for row in rows], dtype=np.int64).reshape(-1, 4)


def load_dataset_class(spec: str) -> Callable[..., PromptDataset]:
    """The class that "path/to/file.py:ClassName" names. Scripts call it with RLHFDataset's arguments.

    Raises InputError as load_object does, and for a class that is no torch.utils.data.Dataset or has no length.
    """
    found = load_object("--dataset-class", spec)
    is_data_set = isinstance(found, type) and issubclass(found, Dataset)
    if not is_data_set:
        raise InputError(f"--dataset-class {spec}: it is not a subclass of torch.utils.data.Dataset")
    if not hasattr(found, "__len__"):  # an IterableDataset
        raise InputError(f"--dataset-class {spec}: it has no __len__; rows are read by number")
    return found
