"""Samples as text: the rows of samples.jsonl, what the model read, the turns of an episode."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lib.data_proto import DataProto
from lib.log.prompt_images import keep_images, row_hashes

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
