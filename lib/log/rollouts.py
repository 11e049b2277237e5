"""The training samples of --save-rollouts: rollouts/step_000012-rank_0.parquet, one row a response.

    datasets.load_dataset("parquet", data_files="runs/NAME/rollouts/*.parquet")

A rank keeps rows that it trained on, so nothing is gathered. A thread writes them while training goes on, under
another name until the file is whole.

Samples as text: the rows of samples.jsonl, what the model read, the turns of an episode. Small copies of the images of
prompts: images/<row's hash>-<number>.jpg in the run's folder, each written once. Prompts of equal text may differ in
their images and in the right answer, so the hash is over all of a row.
"""

import hashlib
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from lib import InputError
from lib.cli.secrets import private, private_folder, write_private
from lib.columns import COLUMNS
from lib.data_proto import DataProto
from lib.distributed import World
from lib.log.disk import free_space, writes_to

Outputs = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(rows (b,), log_probs (b, T), entropy (b, T)) of each micro-batch of an update, in their order"""


def kept_rows(uids: Iterable[str], wanted: int | Literal["all"], world: World) -> list[int]:
    """The rows that this rank keeps, group by group: its groups with the lowest prompt numbers.

    Rank r of R keeps ceil((wanted - r) / R) groups, or all it has. A uid is step-number (lib/rollout/stream.py)."""
    groups = defaultdict(list)
    for row, uid in enumerate(uids):
        groups[uid].append(row)
    share = len(groups) if wanted == "all" else max(0, -((world.rank - wanted) // world.size))
    parts = {uid: [(int(part), "") if part.isdecimal() else (-1, part) for part in uid.split("-")] for uid in groups}
    first = sorted(groups, key=parts.__getitem__)[:share]
    return [row for uid in first for row in groups[uid]]


def add_outputs(batch: DataProto, outputs: Outputs) -> None:
    """Adds log_probs and entropy (B, T) of the last pass of the update, unless there was none."""
    if not outputs:
        return
    columns = {name: torch.zeros_like(batch.batch["rollout_log_probs"]) for name in ("log_probs", "entropy")}
    first = batch.batch["row"][0]
    for rows, log_probs, entropy in outputs:
        columns["log_probs"][rows - first] = log_probs
        columns["entropy"][rows - first] = entropy
    batch.batch.update(columns)


def taken_out(batch: DataProto, rows: list[int]) -> DataProto:
    """A copy of these rows on the CPU, with the columns that are saved."""
    saved = [name for name, column in COLUMNS.items() if column.saved]
    tensors = [name for name in saved if name in batch.batch]
    return batch.select(tensors, saved, ())[rows].to("cpu")


def rollout_file(run_folder: Path, step: int, rank: int) -> Path:
    return run_folder / "rollouts" / f"step_{step:06d}-rank_{rank}.parquet"


def rollout_files(run_folder: Path, after: int) -> list[Path]:
    """The files of steps later than `after`, of any number of ranks, also unfinished ones."""
    files = sorted((run_folder / "rollouts").glob("step_*-rank_*"))
    steps = (int(file.name.removeprefix("step_").partition("-")[0]) for file in files)
    return [file for file, step in zip(files, steps) if step > after]


def write_rollouts(file: Path, step: int, batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the rows of a trained batch on the CPU. Raises InputError if the file cannot be written.

    - step, group (the uid), sample (its number in the group, from 0)
    - row_hash of the row of the data, images (names of files in images/): keep_images
    - prompt (the messages' text), response (with special tokens), ground_truth (JSON if it is not a string)
    - tokens (the text of each response token: `token_texts`)
    - columns of the batch that lib/columns.py copies: masks, log-probs, entropy, advantages, values, weight_versions
    - ratio of log_probs to old_log_probs, its log clamped to ±20 as in the losses; 1 without old_log_probs
    - score, null for a row without one; rewards, a JSON object of all that the scorers gave besides
    - turns of an episode: by, text, tokens, reward; tool_errors: a line for each error of its tools;
      tool_rewards: turn, tool and reward of each call

    Lists have a value per response token (prompt_ids: per prompt token). A column that was not computed is null."""
    import pyarrow.parquet  # not at the start of a run: it takes 0.4 s

    aside = file.with_suffix(".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)  # a disk of this node alone does, too
        images = pyarrow.array(keep_images(file.parent.parent, batch), pyarrow.list_(pyarrow.string()))
        table = rollouts_table(step, batch, tokenizer).append_column("images", images)
        pyarrow.parquet.write_table(table, private(aside), compression="zstd")
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        advice = f"({free_space(file)}); make room, or give --save-rollouts 0"
        why = f"the step's samples could not be written: {error} {advice}"
        raise InputError(f"{file}: {why}") from error


def rollouts_table(step: int, batch: DataProto, tokenizer: PreTrainedTokenizerBase):
    """The pyarrow.Table that `write_rollouts` writes. Its schema is always the same."""
    import pyarrow as pa

    t, columns, B = dict(batch.batch.items()), batch.non_tensor_batch, len(batch)
    masks = dict(zip("PT", t["attention_mask"].bool().tensor_split([t["prompts"].shape[1]], 1)))
    places = {width: mask.flatten().nonzero()[:, 0] for width, mask in masks.items()}  # (N,): of all rows' tokens
    ends = {width: [0, *mask.sum(1).cumsum(0).tolist()] for width, mask in masks.items()}  # of each row, in places
    if "log_probs" in t:
        t["ratio"] = (t["log_probs"] - t.get("old_log_probs", t["log_probs"])).clamp(-20, 20).exp()

    def copied(key: str, width: str, type: pa.DataType) -> pa.Array:
        if key in columns:
            return texts(columns[key]) if type == pa.string() else pa.array(columns[key].tolist(), type)
        if key not in t:
            return pa.nulls(B, type if width == "B" else pa.list_(type))
        values = t[key] if width == "B" else t[key].flatten()[places[width]]
        values = values.float() if values.is_floating_point() else values  # numpy has no bfloat16
        array = pa.array(values.numpy()).cast(type)
        return array if width == "B" else pa.ListArray.from_arrays(pa.array(ends[width], pa.int32()), array)

    def texts(values: Iterable[Any]) -> pa.Array:
        return pa.array([None if value is None else _utf8(value) for value in values], pa.string())

    ids = np.split(t["responses"].flatten()[places["T"]].numpy(), ends["T"][1:-1])
    responses, tokens = zip(*token_texts(tokenizer, ids))
    in_group: dict = defaultdict(itertools.count)
    truths = [row["ground_truth"] for row in columns["reward_model"]]
    scored, scores = t["response_mask"].any(1).tolist(), t["token_level_scores"].sum(1).tolist()
    turns: list = [None] * B
    if "turn_rewards" in t:
        rows = zip(t["responses"], t["response_mask"], t["turn_rewards"], masks["T"])
        turns = [turns_of(ids[own], mask[own], rewards[own], tokenizer) for ids, mask, rewards, own in rows]
    call = pa.struct({"turn": pa.int32(), "tool": pa.string(), "reward": pa.float64()}.items())
    turn = {"by": pa.string(), "text": pa.string(), "tokens": pa.int32(), "reward": pa.float64()}
    table: dict[str, pa.Array] = {
        "step": pa.array([step] * B, pa.int32()),
        "group": texts(columns["uid"]),
        "sample": pa.array([next(in_group[uid]) for uid in columns["uid"]], pa.int32()),
        "row_hash": texts(row_hashes(batch)),
        "prompt": texts(prompt_texts(batch, tokenizer)),
        "response": texts(responses),
        "ground_truth": texts(x if x is None or isinstance(x, str) else _json(x) for x in truths),
        "tokens": pa.array(tokens, pa.list_(pa.string())),
        "ratio": copied("ratio", "T", pa.float32()),
        "score": pa.array([score if known else None for score, known in zip(scores, scored)], pa.float64()),
        "rewards": texts(map(_json, columns["reward_extra_info"])),
        "turns": pa.array(turns, pa.list_(pa.struct(list(turn.items())))),
        "tool_errors": pa.array([*columns.get("tool_errors", [None] * B)], pa.list_(pa.string())),
        "tool_rewards": pa.array([*columns.get("tool_rewards", [None] * B)], pa.list_(call)),
    }
    for key, column in COLUMNS.items():
        name, type = column.copied
        if type:
            table[name] = copied(key, column.width, pa.type_for_alias(type))
    return pa.table(table)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _utf8(text: str) -> str:
    """The text; half a surrogate pair, which UTF-8 cannot hold, is written as \\udc80."""
    return str(text).encode("utf-8", "backslashreplace").decode()


# ---- the text of each token ----------------------------------------------------------------------


def token_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[np.ndarray]) -> list[tuple[str, list[str]]]:
    """For each row of token ids: (its text, with special tokens; the text of each token, which make it up). A
    character of several tokens stands at its last one."""

    def decode(ids: np.ndarray | list[int]) -> str:  # an array is read faster
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    alone = {token: decode([token]) for token in np.unique(np.concatenate([*rows, np.empty(0, int)])).tolist()}
    results = []
    for ids in rows:
        text, texts = decode(ids), [alone[token] for token in ids.tolist()]
        if "".join(texts) != text:  # a character of several tokens, or a token that depends on its context
            texts = _in_context(decode, ids.tolist(), text)
        results.append((text, texts))
    return results


def _in_context(decode, ids: list[int], text: str) -> list[str]:
    """What each token adds to the text of the tokens before it, if `text` goes on like that; else "", and a later
    token adds it too. Decodes few tokens at a time, from the start of the previous piece."""
    texts, done = [], 0  # text[:done] stands in texts
    start, end = 0, 0  # ids[start:end] is the previous piece
    for i in range(len(ids)):
        before, now = decode(ids[start:end]), decode(ids[start : i + 1])
        added = now[len(before) :] if now.startswith(before) else ""
        added = added if text.startswith(added, done) else ""
        if i == len(ids) - 1:
            added = text[done:]
        texts.append(added)
        if added:
            done, start, end = done + len(added), end, i + 1
    return texts


# ---- samples as text ----------------------------------------------------------------------------

OF_SOME = ("images", "tool_errors", "tool_rewards")  # lists that not every sample has


def sample_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a scored batch for `Tracker.samples`: prompts and responses with their special tokens.

    A row with images has their names in run_dir/images, where they are written. A multi-turn episode also has how
    it ended, its turns (`turns_of`) and the errors of its tools."""
    tensors = {name: tensor.cpu() for name, tensor in batch.batch.items()}
    scores, responses = tensors["token_level_scores"].sum(1).tolist(), tensors["responses"]
    scored = tensors["response_mask"].any(1).tolist()
    attended = tensors["attention_mask"][:, -responses.shape[1] :].bool()
    hashes, images = row_hashes(batch), keep_images(run_dir, batch)
    prompts, rows = prompt_texts(batch, tokenizer), []
    for i, own in enumerate(attended):
        row = {name: column[i] for name, column in batch.non_tensor_batch.items()}
        shown = {
            "index": row.get("index"),
            "data_source": row["data_source"],
            "row_hash": hashes[i],
            "prompt": prompts[i],
            "response": tokenizer.decode(responses[i][own]),
            "score": scores[i] if scored[i] else None,
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        if "turn_rewards" in tensors:
            sampled, rewards = tensors["response_mask"][i][own], tensors["turn_rewards"][i][own]
            turns = turns_of(responses[i][own], sampled, rewards, tokenizer)
            shown |= {"finish_reason": row["finish_reason"], "turns": turns}
        lists = images[i], row.get("tool_errors"), row.get("tool_rewards")
        shown |= {key: value for key, value in zip(OF_SOME, lists) if value}
        rows.append(shown)
    return rows


def prompt_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the model read before each response, with special tokens; an image is one placeholder."""
    prompts, columns = batch.batch["prompts"], batch.non_tensor_batch
    attended = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    media = columns.get("multi_modal_data", [None] * len(prompts))
    with_media = "raw_prompt_ids" in columns  # these have one placeholder for each image
    texts = []
    for i, prompt in enumerate(prompts):
        ids = columns["raw_prompt_ids"][i] if media[i] and with_media else prompt[attended[i]]
        texts.append(tokenizer.decode(ids))
    return texts


def turns_of(response, sampled, rewards, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Splits one row's response, without padding, into what the policy wrote (`sampled` is 1) and what it was given.
    reward: what the turn got besides the score."""
    lengths = sampled.unique_consecutive(return_counts=True)[1].tolist()
    turns = []
    columns = (column.split(lengths) for column in (response, sampled, rewards))
    for ids, mask, given in zip(*columns):
        by, text = "policy" if mask[0] else "environment", tokenizer.decode(ids)
        turns.append({"by": by, "text": text, "tokens": len(ids), "reward": float(given.sum())})
    return turns


# ---- small copies of images ---------------------------------------------------------------------

SIDE = 320  # pixels; the run page shows at most 512 (tools/page/samples.py)


def row_hashes(batch: DataProto) -> list[str]:
    """For each row the digest of its data source, messages, images and ground truth."""
    rows, hashes = batch.non_tensor_batch, batch.batch.get("multi_modal_hash", None)
    of_images = [0] * len(batch) if hashes is None else hashes.tolist()
    parts = zip(rows["data_source"], rows["raw_prompt"], rows["reward_model"], of_images)
    return [hashlib.sha256(json.dumps(row, default=str).encode()).hexdigest()[:16] for row in parts]


def keep_images(run_folder: Path, batch: DataProto) -> list[list[str] | None]:
    """Writes the images of the rows' prompts, not those of tools. Returns their names in images/; None for a row
    without. Raises InputError if an image cannot be written."""
    rows = batch.non_tensor_batch
    if "multi_modal_data" not in rows:
        return [None] * len(batch)
    names = []
    for row_hash, messages, media in zip(row_hashes(batch), rows["raw_prompt"], rows["multi_modal_data"]):
        in_prompt = sum(part.get("type") == "image" for part in _parts(messages))
        images = media.get("image", [])[:in_prompt]
        names.append([f"{row_hash}-{i}.jpg" for i in range(len(images))] or None)
        for name, image in zip(names[-1] or (), images):
            _keep(run_folder / "images" / name, image)
    return names


def _keep(file: Path, image: Image.Image) -> None:
    if file.exists():
        return
    small, jpeg = image.convert("RGB"), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(jpeg, "JPEG", quality=85)
    with writes_to(file, "a prompt's image was not written"):
        file.parent.parent.mkdir(parents=True, exist_ok=True)  # a disk of this node alone does, too
        private_folder(file.parent)
        write_private(file, jpeg.getvalue())


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content]
