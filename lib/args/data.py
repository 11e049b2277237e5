"""The groups of flags about rows: training data and validation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_type_hints

from annotated_types import Ge, Gt, Interval

from lib import InputError
from lib.args.groups import check_scorers
from lib.cli.flags import Group, Names, OnResume, parse_json
from lib.declared import from_words, words
from lib.sampling import Sampling, Truncation

MAY_CHANGE, NOT_COMPARED = OnResume.MAY_CHANGE, OnResume.NOT_COMPARED
FILES, ROWS = Names.FILES, Names.ROWS
NO_FILES = ("none",)
COLUMN_NAMES = ("prompt", "answer", "data_source", "extra_info", "images", "videos")  # of --columns
VALIDATION_WORDS = {  # of --val-kwargs: a value for all files, or one for each
    "top_p": tuple[Annotated[float, Interval(gt=0, le=1)], ...],
    "top_k": tuple[Annotated[int, Ge(-1)], ...],
    "max_response_length": tuple[Annotated[int, Ge(1)], ...],
    "repetition_penalty": tuple[Annotated[float, Gt(0)], ...],
}


@dataclass(frozen=True)
class VisionLimits:
    """The words of --vision-kwargs. Larger images and frames are scaled down, smaller ones up; then the model's
    processor resizes by its own rules."""

    max_pixels: Annotated[int, Ge(1)] = 1003520  # 1280 x 28 x 28
    min_pixels: Annotated[int, Ge(1)] = 3136
    max_images: Annotated[int, Ge(1)] = 8  # and videos, of a prompt; rows with more are dropped and counted
    video_fps: Annotated[float, Gt(0)] = 2.0  # frames sampled per second of a video file
    max_frames: Annotated[int, Ge(1)] = 32  # frames of longer videos are sampled evenly


class PromptSampling(NamedTuple):
    """--prompt-sampling: a rule and its numbers (Difficulty in lib/data/loader.py)."""

    rule: str
    skip_after: Annotated[int, Ge(1)] = 3
    share: Annotated[float, Interval(gt=0, le=1)] = 0.1

    @classmethod
    def parse(cls, text: str) -> "PromptSampling":
        """Raises InputError for another rule, or a number out of its range."""
        rule, *numbers = text.split(":")
        names = {"uniform": [], "skip": ["skip_after", "share"], "variance": ["share"]}.get(rule)
        if names is None or len(numbers) > len(names):
            raise InputError(f"--prompt-sampling {text}: give uniform, skip:3:0.1 or variance:0.1")
        given = [f"{name}={number}" for name, number in zip(names, numbers)]
        types = get_type_hints(cls, include_extras=True)
        return cls(rule, **words(f"--prompt-sampling {text}", given, types))


@dataclass
class DataArgs(Group):
    """Data files in verl's format, and how their rows become prompts."""

    train_files: Annotated[tuple[str, ...], FILES, ROWS] = ()
    """parquet or json(l) files, also at URLs such as s3://bucket/train.parquet, or a hub data set"""
    train_weights: Annotated[tuple[float, ...], Gt(0), ROWS] = ()
    """share of each of --train-files in the prompts, such as 0.7 0.3; empty: by number of rows"""
    dataset_class: Annotated[str, FILES, ROWS] = ""
    """path/to/file.py:ClassName of your own dataset class; empty: lib/data's RLHFDataset"""
    max_prompt_length: Annotated[int, Ge(1), ROWS] = 1024
    """maximum number of prompt tokens, including the chat template"""
    overlong_prompts: Annotated[Literal["drop", "error", "left", "right", "middle"], ROWS] = "drop"
    """prompts that are too long: drop and count them, stop the run, or truncate on this side"""
    max_train_samples: Annotated[int | None, Ge(1), ROWS] = None
    """use at most this many rows of --train-files, the same for every --seed; empty: all"""
    columns: Annotated[tuple[str, ...], ROWS] = ()
    """columns with other names than verl's: prompt=question answer=solution (docs/data.md)"""
    prompt_template: Annotated[str, ROWS] = ""
    """text of the prompt with columns in braces, such as Question: {question}; empty: as it is"""
    system_prompt: Annotated[str, ROWS] = ""
    """system message of prompts that have none"""
    chat_template: Annotated[str, FILES, ROWS] = ""
    """Jinja file in place of the tokenizer's template; none: text is tokenized as it is"""
    chat_template_kwargs: Annotated[str, ROWS] = "{}"
    """JSON of keyword arguments for the chat template, such as {"enable_thinking": false}"""
    vision_kwargs: Annotated[tuple[str, ...], ROWS] = ()
    """limits: max_pixels=1003520 min_pixels=3136 max_images=8 video_fps=2 max_frames=32"""
    allow_special_tokens: bool = False
    """text that spells a special token becomes that token; otherwise a space breaks it up"""
    shuffle: Annotated[bool, ROWS] = True
    """reshuffle the training prompts in each epoch"""
    loader_workers: Annotated[int, Interval(ge=0, le=1024), MAY_CHANGE] = 0
    """processes that tokenize prompts ahead of time; 0: the training process does it"""
    prompt_sampling: Annotated[str, ROWS] = "uniform"
    """uniform, skip:3:0.1 (solved and hopeless prompts) or variance:0.1 (docs/data.md)"""

    def check(self) -> None:
        parse_json("chat_template_kwargs", self.chat_template_kwargs)
        columns_of(self.columns)
        least, most = self.vision_limits.min_pixels, self.vision_limits.max_pixels
        if least > most:
            raise InputError(f"--vision-kwargs min_pixels={least}: more than max_pixels={most}")
        if self.system_prompt and self.chat_template == "none":
            raise InputError("--system-prompt with --chat-template none: the prompt is then one text: put it there")
        if len(self.train_weights) not in (0, len(self.train_files)):
            sizes = f"{len(self.train_weights)} numbers for the {len(self.train_files)} files"
            raise InputError(f"--train-weights has {sizes} of --train-files")
        if PromptSampling.parse(self.prompt_sampling).rule != "uniform" and self.loader_workers:
            flag = f"--prompt-sampling {self.prompt_sampling}"
            raise InputError(f"{flag} needs the last step's scores, and --loader-workers read ahead: drop one")

    @property
    def vision_limits(self) -> VisionLimits:
        return from_words("--vision-kwargs", self.vision_kwargs, VisionLimits)


class ValidationSet(NamedTuple):
    """Files that are validated on, and how."""

    files: tuple[str, ...]
    samples: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    max_response_length: int | None = None  # None: as in training
    repetition_penalty: float = 1.0

    def sampling(self, training: Sampling) -> Sampling:
        length = self.max_response_length or training.max_response_length
        tokens = Truncation(self.top_p, self.top_k)
        return Sampling(length, self.temperature, *tokens, self.repetition_penalty, stop=training.stop)


@dataclass
class ValidationArgs(Group):
    """Validation during training."""

    val_files: Annotated[tuple[str, ...], MAY_CHANGE, FILES] = ()
    """as --train-files; empty, or none: no validation"""
    max_val_samples: Annotated[int | None, Ge(1), MAY_CHANGE] = None
    """as --max-train-samples, of all --val-files, or of each where flags differ by file"""
    val_before_train: Annotated[bool, MAY_CHANGE] = True
    """validate before the first step"""
    val_every: Annotated[int, Ge(0), MAY_CHANGE] = 5
    """validate every n steps and after the last; 0: never"""
    val_only: Annotated[bool, NOT_COMPARED] = False
    """validate (with --resume: that checkpoint) and stop; writes to <run>/val_only/1, 2, ..."""
    val_reward: Annotated[tuple[str, ...], MAY_CHANGE, FILES] = ()
    """scorers of validation, as --reward; empty: as in training"""
    val_samples: Annotated[tuple[int, ...], Interval(ge=1, le=2**16), MAY_CHANGE] = (1,)
    """responses per validation prompt (n in mean@n); one number, or one for each of --val-files"""
    val_temperature: Annotated[tuple[float, ...], Ge(0), MAY_CHANGE] = (0.0,)
    """sampling temperature in validation, as --val-samples; 0: greedy"""
    val_kwargs: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """top_p=0.9 top_k=20 max_response_length=4096 repetition_penalty=1.1; a,b: one for each file"""

    def check(self) -> None:
        check_scorers("--val-reward", self.val_reward)
        if self.val_only and not self.enabled:
            raise InputError("--val-only needs --val-files: name the files to validate on")
        for val_set in self.sets():
            if val_set.samples > 1 and val_set.temperature == 0:
                raise InputError(f"--val-samples {val_set.samples} are all the same at --val-temperature 0: raise it")

    def sets(self) -> list[ValidationSet]:
        """The files with their sampling: all together if no flag has several values. Raises InputError."""
        files = self.val_files
        flags: dict[str, tuple] = {"samples": self.val_samples, "temperature": self.val_temperature}
        values = flags | words("--val-kwargs", self.val_kwargs, VALIDATION_WORDS)
        for name, given in values.items():
            if len(given) not in (1, len(files)):
                flag = f"--val-{name}" if name in flags else f"--val-kwargs {name}"
                counts = f"{len(given)} values for {len(files)} --val-files"
                raise InputError(f"{flag} has {counts}: give one for all, or one for each")
        if all(len(given) == 1 for given in values.values()):
            return [ValidationSet(files, **{name: given[0] for name, given in values.items()})]
        own = [{name: given[i % len(given)] for name, given in values.items()} for i in range(len(files))]
        return [ValidationSet((file,), **settings) for file, settings in zip(files, own)]

    @property
    def enabled(self) -> bool:
        return self.val_files not in ((), NO_FILES) and (self.val_only or self.val_before_train or self.val_every > 0)


def columns_of(given: Iterable[str]) -> dict[str, str]:
    """{name: the rows' column} of --columns. Raises InputError."""
    return words("--columns", given, dict.fromkeys(COLUMN_NAMES, str))
