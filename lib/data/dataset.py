"""RLHFDataset: rows -> tokenized prompts, with their images and videos."""

import bisect
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from lib import InputError
from lib.cli.user_code import load_object
from lib.data.chat_template import SpecialTokenEscaper, left_out, question_of, start_of_text
from lib.data.remote import local_copy
from lib.data.rows import MEDIA_COLUMNS, RowForm, _plain, _shown, arguments_of, only_text, read_rows, without_nulls
from lib.data.vision import Encoded, Vision, media_hash

if TYPE_CHECKING:
    import datasets

WRITTEN = -1  # in place of the number of a row: a prompt that the run wrote
SERIAL_ROWS = 20_000  # below this, starting processes costs more than tokenizing in one
SERIAL_ROWS_OF_IMAGES = 500  # decoding and resizing take longer


class Prompt(NamedTuple):
    messages: list[dict]
    template_kwargs: dict  # with the schemas of the row's tools
    text: str
    escaped: bool  # whether special tokens in the messages were broken up
    encoded: Encoded
    media: dict  # multi_modal_data


class PromptDataset(Protocol):
    """The methods of RLHFDataset and of every class for --dataset-class."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict: ...


class RLHFDataset(Dataset):
    """The tokenized prompts of one or several sources (see read_rows), one after the other. A prompt goes through the
    chat template; without one it must be a single text. Items have the columns that lib/columns.py lists for this file,
    and input_ids, attention_mask, position_ids, each (P,) with P = max_prompt_length, left-padded.

    The constructor tokenizes every row once, so that a bad row stops the run before a model loads.

    truncation: what a prompt longer than P loses unless filter_overlong_prompts leaves it out: "left" (its start),
    "right" (its end), "middle", or "error". columns, prompt_template, system_prompt: see RowForm.
    allow_special_tokens: otherwise a space breaks up text that spells a special token, in raw_prompt too.
    max_samples: at most so many rows of all sources, drawn with a fixed seed; a larger number includes a smaller one's.
    num_proc: processes for the first pass; None: 1 for a small set, else this rank's CPUs, at most 16.
    row_template: from a row's extra_info to more keywords of its template, and a note.
    vision: rows may have images and videos (docs/data.md). input_ids have a placeholder for each feature of an image,
    raw_prompt_ids one for each image; position_ids are (4, P) with mrope. A prompt with images is never cut.

    Attributes: `dropped`, rows left out by reason; the numbers of rows that are `truncated`, `escaped` (a special token
    was broken up) and `incomplete` (the chat template leaves out a message; never the user's last one); file and number
    of the first row `without_ground_truth` and `with_images`; `note` is the first kept row's (row_template).

    Raises InputError, with file and row (counted from 0), for anything wrong in the files."""

    def __init__(
        self,
        data_files: "str | Path | datasets.Dataset | Sequence[str | Path | datasets.Dataset]",
        tokenizer,
        *,
        max_prompt_length: int,
        truncation: str = "error",
        filter_overlong_prompts: bool = True,
        columns: Mapping[str, str] | None = None,
        prompt_template: str = "",
        system_prompt: str = "",
        chat_template_kwargs: dict | None = None,
        row_template: Callable[[dict], tuple[dict, str]] | None = None,
        allow_special_tokens: bool = False,
        max_samples: int | None = None,
        num_proc: int | None = None,
        vision: Vision | None = None,
    ):
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if self.pad_token_id is None:
            raise InputError(f"tokenizer {tokenizer.name_or_path}: neither a pad nor an eos token; set pad_token")
        self.tokenizer, self.vision = tokenizer, vision
        self.start = start_of_text(tokenizer)
        self.row_form = RowForm(columns or {}, prompt_template, system_prompt)
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        self.chat_template_kwargs = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        self.row_template = row_template
        self.escape_special_tokens = None if allow_special_tokens else SpecialTokenEscaper(tokenizer)

        if not isinstance(data_files, list | tuple):
            data_files = [data_files]
        data_files = [local_copy(source) if isinstance(source, str) else source for source in data_files]
        self.sources = [self._open(source, number) for number, source in enumerate(data_files)]
        self._data_sources = data_sources_of(self.sources, self.row_form.column("data_source"))
        self._ends = list(accumulate(len(rows) for _, rows in self.sources))
        n_read = self._ends[-1] if self._ends else 0
        names = ", ".join(name for name, _ in self.sources)
        if n_read == 0:
            raise InputError(f"{names or 'data files'}: no rows; check the files")

        rows = np.sort(np.random.default_rng(0).permutation(n_read)[:max_samples])
        lengths, has_truth, broken_up, n_media, incomplete, has_note = self._check_rows(rows.tolist(), num_proc).T
        max_media = vision.max_images if vision else 0
        too_long, too_many = lengths > max_prompt_length, n_media > max_media
        cut = too_long & (not filter_overlong_prompts)
        self.truncated = int(cut.sum())
        self.dropped = {"prompt_too_long": int((too_long & ~cut).sum())}
        if max_samples:
            self.dropped["not_drawn"] = n_read - len(rows)
        if vision:
            self.dropped["too_many_images"] = int(too_many.sum())
        advice = "raise it, or set --overlong-prompts to drop, left, right or middle"
        if truncation != "error":
            cut &= n_media > 0
            advice = "a prompt with images cannot be cut: raise it, or set --overlong-prompts drop"
        if cut.any():
            i = int(cut.argmax())
            found = f"prompt of {lengths[i]} tokens, max_prompt_length={max_prompt_length}"
            raise self._error(int(rows[i]), f"{found}; {advice}")
        kept = ~too_many & ~(too_long & filter_overlong_prompts)
        self.kept = rows[kept]
        if too_many.all():
            has = f"each of {len(rows)} has more than max_images={max_media} images; raise max_images"
            raise InputError(f"{names}: no row left: {has}")
        if len(self.kept) == 0:
            left = f"{len(rows)} read, {int(too_long.sum())} too long for max_prompt_length={max_prompt_length}"
            shortest = f"the shortest prompt has {lengths.min()} tokens"
            raise InputError(f"{names}: no row left: {left} ({shortest}); raise max_prompt_length")
        self.escaped, self.incomplete = int(broken_up[kept].sum()), int(incomplete[kept].sum())
        self.without_ground_truth = self._first(rows[kept & (has_truth == 0)])
        self.with_images = self._first(rows[kept & (n_media > 0)])
        self.note = None
        if len(noted := rows[kept & (has_note > 0)].tolist()):
            self.note = f"{self._where(noted[0])}: {self._of_row(noted[0], self._row(noted[0]))[1]}"

    def _first(self, rows: np.ndarray) -> str | None:
        return self._where(int(rows[0])) if len(rows) else None

    def _open(self, source, number: int) -> tuple[str, Sequence[dict]]:
        name = str(source) if isinstance(source, str | Path) else f"data set {number} in memory"
        rows: Any = read_rows(source)
        form, required = self.row_form, self.row_form.required()

        def check(where: str, columns: Iterable[str], needed: Iterable[str]) -> None:
            for column in needed:
                if column not in columns:
                    raise InputError(f"{where}: no column {column!r}; it has {', '.join(columns)}")
            if self.vision and "image" in columns and form.column("images") not in columns:  # as in TRL's rows
                advice = "give --columns images=image, and write <image> in the messages"
                raise InputError(f"{where}: the column 'image' is not read: {advice}")

        if isinstance(rows, list):
            for i, row in enumerate(rows):
                check(f"{name} row {i}", row, required)
            if form.columns and rows:
                check(name, dict.fromkeys(column for row in rows for column in row), form.columns.values())
            return name, rows
        check(name, rows.column_names, [*required, *form.columns.values()])  # a datasets.Dataset
        if form.column("extra_info") in rows.column_names:  # otherwise it gets the columns that are none of verl's
            rows = rows.select_columns(form.read(rows.column_names))
        has_media = not {*map(form.column, MEDIA_COLUMNS)}.isdisjoint(rows.column_names)
        return name, UndecodedRows(rows) if has_media else rows  # type: ignore[return-value]  # it has what is used

    def _locate(self, row: int) -> tuple[int, int]:
        source = bisect.bisect_right(self._ends, row)
        return source, row - (self._ends[source - 1] if source else 0)

    def _where(self, row: int) -> str:
        if row == WRITTEN:
            return "rollouts.new_prompts"
        source, i = self._locate(row)
        return f"{self.sources[source][0]} row {i}"

    def _error(self, row: int, text: str) -> InputError:
        return InputError(f"{self._where(row)}: {text}")

    def _row(self, row: int) -> dict:
        source, i = self._locate(row)
        rows = self.sources[source][1]
        try:
            return self.row_form.in_verls_form(_plain(rows[i], isinstance(rows, list)), self._data_sources[source])
        except InputError as error:
            raise self._error(row, str(error)) from error

    def _messages(self, row: int, value) -> list[dict]:
        if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
            value = [dict(zip(value, fields)) for fields in zip(*value.values())]  # as old `datasets` saved lists
        messages = without_nulls(value) if isinstance(value, list) else []
        if not (messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)):
            form = 'write text, or [{"role": "user", "content": ...}]'
            key = self.row_form.column("prompt")
            raise self._error(row, f"{key!r} is not text or a list of messages but {_shown(value)}; {form}")
        for number, message in enumerate(messages):
            content, called = message.get("content"), message.get("tool_calls")
            parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
            if not (isinstance(content, str) or parts or (content is None and called)):
                form = "it must be text, or a list of parts such as {'type': 'text', 'text': ...}"
                raise self._error(row, f"the content of message {number} is {_shown(content)}; {form}")
            for call in called if isinstance(called, list) else ():
                function = call.get("function", call) if isinstance(call, dict) else None
                if isinstance(function, dict) and "name" in function:
                    try:
                        function["arguments"] = arguments_of(function.get("arguments"))
                    except ValueError as error:
                        raise self._error(row, f"a tool call of message {number}: {error}") from error
        return messages

    def _with_media(self, row: int, fields: dict) -> tuple[list[dict], list, list]:
        """(messages with <image> and <video> as content parts, images, videos), media as they are in the row."""
        messages = self._messages(row, fields.get("prompt"))
        if self.vision is None:
            if any(fields.get(key) for key in MEDIA_COLUMNS):
                name = self.tokenizer.name_or_path or "the model"
                raise self._error(row, f"has images or videos; {name} takes none")
            return messages, [], []
        columns = [fields.get(key) or [] for key in MEDIA_COLUMNS]
        columns = [column if isinstance(column, list) else [column] for column in columns]
        images, videos = self.vision.entries(messages, *columns)
        return self.vision.messages(messages, {"image": images, "video": videos}, self._where(row)), images, videos

    def _prompt(self, row: int, fields: dict, messages: list[dict], images: list, videos: list) -> Prompt:
        """Special tokens are the chat template's, or without one those of `start_of_text`."""
        plain = self.escape_special_tokens(messages) if self.escape_special_tokens else messages
        templated = bool(self.tokenizer.chat_template)
        kwargs = self.chat_template_kwargs | self._of_row(row, fields)[0]
        text = self._templated(row, kwargs, plain) if templated else self._only_text(row, plain)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._error(row, f"the prompt has {text[error.start]!r}, half of a character") from error
        if self.vision is None:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = ids if templated or self.start == ids[: len(self.start)] else self.start + ids
            if not ids:
                raise self._error(row, "the prompt is empty, and the tokenizer puts no token before a text")
            return Prompt(plain, kwargs, text, plain != messages, Encoded(ids, ids, {}), {})
        path = Path(self.sources[self._locate(row)[0]][0]).expanduser()
        folder = path if path.is_dir() else path.parent if path.is_file() else Path()  # where relative paths begin
        media = self.vision.media(images, videos, self._where(row), folder)
        try:
            encoded = self.vision.encode(text, media)
        except InputError as error:
            raise self._error(row, str(error)) from error
        return Prompt(plain, kwargs, text, plain != messages, encoded, media)

    def _only_text(self, row: int, messages: list[dict]) -> str:
        if (text := only_text(messages)) is None:
            advice = "give --chat-template FILE, or text prompts"
            why = "needs a chat template, which the model's tokenizer lacks (a base model?)"
            raise self._error(row, f"a prompt of {len(messages)} messages {why}: {advice}")
        return text

    def _of_row(self, row: int, fields: dict) -> tuple[dict, str]:
        """(keywords of its template, note), by row_template."""
        extra_info = fields.get("extra_info", {})
        try:
            return self.row_template(extra_info) if self.row_template else ({}, "")
        except InputError as error:
            index = "" if (own := extra_info.get("index")) is None else f" (index {own})"
            raise InputError(f"{self._where(row)}{index}: {error}") from error

    def _templated(self, row: int, kwargs: dict, messages: list[dict]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except Exception as error:  # a template's code may raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise self._error(row, f"the chat template refuses this prompt: {reason}") from error

    def _left_out(self, row: int, prompt: Prompt) -> bool:
        """Whether the chat template leaves a message out. Raises InputError if it is the user's question."""
        messages = prompt.messages
        render = partial(self._templated, row, prompt.template_kwargs)
        found = left_out(messages, prompt.text, render) if self.tokenizer.chat_template else []
        if (question := question_of(messages)) in found:
            advice = "in a template that is message.content; give another --chat-template"
            raise self._error(row, f"the chat template leaves out text of message {question}, the question: {advice}")
        return bool(found)

    def _check_row(self, row: int) -> tuple[int, bool, bool, int, bool, bool]:
        """Checks a row. Returns the prompt's tokens (0 with too many images), whether it has a ground truth, whether a
        special token was broken up, the number of its images or of its videos, the larger one, whether the template
        leaves out a message, and whether there is a note."""
        fields = self._row(row)
        for column in ("reward_model", "extra_info"):
            if not isinstance(value := fields.get(column, {}), dict):
                raise self._error(row, f"{self.row_form.column(column)!r} is {_shown(value)}; it must be a dict")
        source = fields.get("data_source")
        if not isinstance(source, str):
            column = self.row_form.column("data_source")
            raise self._error(row, f"{column!r} is {_shown(source)}; it must be text")
        has_truth = fields.get("reward_model", {}).get("ground_truth") is not None
        messages, images, videos = self._with_media(row, fields)
        n_media = max(len(images), len(videos))
        if self.vision and n_media > self.vision.max_images:
            return 0, has_truth, False, n_media, False, False
        prompt, has_note = self._prompt(row, fields, messages, images, videos), bool(self._of_row(row, fields)[1])
        n_tokens, is_incomplete = len(prompt.encoded.ids), self._left_out(row, prompt)
        return n_tokens, has_truth, prompt.escaped, n_media, is_incomplete, has_note

    def _check_rows(self, rows: list[int], num_proc: int | None) -> np.ndarray:
        """(rows, 6) integers: what _check_row returns for each row."""
        if num_proc is None:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            few = SERIAL_ROWS_OF_IMAGES if self.vision else SERIAL_ROWS
            num_proc = 1 if len(rows) < few else max(1, min(16, cpus // ranks_here))
        if num_proc == 1:
            return np.array([self._check_row(row) for row in rows])
        # Forked processes inherit the rows, without pickling. A Pool would hang if one of its processes were killed.
        global _forked
        _forked = self
        fork = multiprocessing.get_context("fork")
        # OpenMP's threads do not survive a fork: an operation that waits for them would hang.
        with ProcessPoolExecutor(num_proc, fork, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            checked = list(pool.map(_check_rows_of_forked, np.array_split(rows, 4 * num_proc)))
        _forked = None
        return np.concatenate(checked)

    @property
    def data_sources(self) -> set[str]:
        """Of the kept rows: what the reward must know."""
        return {self._row(int(row))["data_source"] for row in self.kept}

    @property
    def source_sizes(self) -> list[int]:
        """The number of kept rows of each source."""
        sources = np.searchsorted(self._ends, self.kept, side="right")
        return np.bincount(sources, minlength=len(self._ends)).tolist()

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: int) -> dict:
        row = int(self.kept[i])
        fields = self._row(row)
        prompt = self._prompt(row, fields, *self._with_media(row, fields))
        extra_info = fields.get("extra_info", {})
        return self._columns(prompt) | {
            "data_source": fields.get("data_source"),
            "reward_model": {"ground_truth": None, **fields.get("reward_model", {})},
            "extra_info": extra_info,
            "index": row if extra_info.get("index") is None else extra_info["index"],
            "tools_kwargs": extra_info.get("tools_kwargs") or {},
            "interaction_kwargs": extra_info.get("interaction_kwargs") or {},
        }

    def prompt_columns(self, messages: list[dict], extra_info: dict) -> dict:
        """The columns that __getitem__ makes of a prompt, for messages of text that a run wrote (`new_prompts`). A
        prompt that is longer than P raises InputError if truncation is "error"."""
        prompt = self._prompt(WRITTEN, {"extra_info": extra_info}, self._messages(WRITTEN, messages), [], [])
        if (n := len(prompt.encoded.ids)) > self.max_prompt_length and self.truncation == "error":
            advice = "raise --max-prompt-length, or set --overlong-prompts to left, right or middle"
            raise self._error(WRITTEN, f"prompt of {n} tokens, max_prompt_length={self.max_prompt_length}; {advice}")
        return self._columns(prompt)

    def _columns(self, prompt: Prompt) -> dict:
        raw_ids, ids, inputs = prompt.encoded
        if len(ids) > self.max_prompt_length:  # of text alone: a prompt with images is not kept
            raw_ids = ids = self._truncate(ids)
        n_pad = self.max_prompt_length - len(ids)
        positions = self.vision.positions(ids, inputs) if self.vision else torch.arange(len(ids))
        columns = {
            "input_ids": F.pad(torch.tensor(ids, dtype=torch.long), (n_pad, 0), value=self.pad_token_id),  # (P,)
            "attention_mask": F.pad(torch.ones(len(ids), dtype=torch.long), (n_pad, 0)),  # (P,)
            "position_ids": F.pad(positions, (n_pad, 0)),  # (P,) or (4, P)
            "raw_prompt_ids": raw_ids,
            "raw_prompt": prompt.messages,
        }
        if self.vision:
            columns |= {"multi_modal_data": prompt.media, "multi_modal_inputs": inputs}
            columns["multi_modal_hash"] = torch.tensor(media_hash(inputs))  # ()
        return columns

    def _truncate(self, ids: list[int]) -> list[int]:
        limit = self.max_prompt_length
        head = {"left": 0, "middle": limit // 2, "right": limit}[self.truncation]  # tokens kept at the start
        return ids[:head] + ids[len(ids) - limit + head :]


def data_sources_of(sources: Sequence[tuple[str, Any]], column: str = "data_source") -> list[str]:
    """For each (name, rows), the data_source of rows without this column: the file's stem (with its folder's name where
    several files share it), or the data set's hub id. "" if the column exists."""
    files = {name: Path(name).expanduser().absolute().with_suffix("") for name, _ in sources}
    stems = Counter(file.name for file in files.values())
    found = []
    for name, rows in sources:
        columns = rows[0] if isinstance(rows, list) and rows else getattr(rows, "column_names", ())
        file, is_file = files[name], Path(name).expanduser().exists()
        own = file.name if stems[file.name] == 1 else f"{file.parent.name}/{file.name}"
        found.append("" if column in columns else own if is_file else name.partition(":")[0])
    return found


class UndecodedRows:
    """The rows of a data set with images as {"bytes": ..., "path": ...}: the datasets library would decode them at each
    reading, and its errors name neither file nor row."""

    def __init__(self, rows: "datasets.Dataset"):
        self.rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i].to_pylist()[0]


_forked: RLHFDataset | None = None  # what the processes of _check_rows inherit


def _check_rows_of_forked(rows: np.ndarray) -> np.ndarray:
    assert _forked is not None
    return np.array([_forked._check_row(row) for row in rows.tolist()], dtype=np.int64).reshape(-1, 6)


def load_dataset_class(spec: str) -> Callable[..., PromptDataset]:
    """The class of "path/to/file.py:ClassName", which scripts call with RLHFDataset's arguments. Raises InputError."""
    found = load_object("--dataset-class", spec)
    is_data_set = isinstance(found, type) and issubclass(found, Dataset)
    if not is_data_set:
        raise InputError(f"--dataset-class {spec}: it is not a subclass of torch.utils.data.Dataset")
    if not hasattr(found, "__len__"):  # an IterableDataset
        raise InputError(f"--dataset-class {spec}: it has no __len__; rows are read by number")
    return found
