"""lib/data/dataset.py with real files, real (small) tokenizers and torch's DataLoader."""

import json
import random
import re
import tempfile
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from agent.tools.rows import template_of_row
from lib import InputError
from lib.args.data import COLUMN_NAMES
from lib.data import RLHFDataset, collate_fn, load_dataset_class, load_split, make_loader
from lib.data.chat_template import check_template_kwargs
from lib.data.rows import OF_VERL
from lib.model import load_tokenizer
from tests.common import TOY_MODEL

# One token a character: "<user: hi><assistant: " has 6 + 3 + 12 tokens, and thinking adds "!".
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}: {{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant: {% endif %}{% if enable_thinking %}!{% endif %}"
)


def make_tokenizer(template=TEMPLATE, **special):
    letters = ["[pad]", "[eos]", *(chr(c) for c in range(32, 127))]
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.decoder = decoders.Fuse()
    # As Llama's: a start token that the template must not get a second time (here it would show at once).
    core.post_processor = processors.TemplateProcessing(single="[eos] $A", special_tokens=[("[eos]", 1)])
    special = special or {"pad_token": "[pad]", "eos_token": "[eos]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)


def make_row(text, index=0, **extra_info):
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "toy",
        "reward_model": {"style": "rule", "ground_truth": text.upper()},
        "extra_info": {"index": index, **extra_info},
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


jsonl_and_parquet = pytest.mark.parametrize("write", [write_jsonl, write_parquet])


def dataset_of(folder, rows, tokenizer, **kwargs):
    return RLHFDataset(write_jsonl(folder / "a.jsonl", rows), tokenizer, **{"max_prompt_length": 99} | kwargs)


def texts(dataset):
    return [dataset[i]["raw_prompt"][0]["content"] for i in range(len(dataset))]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_item(tmp_path, tokenizer):
    row = make_row("hi", 7, tools_kwargs={"calc": {"digits": 3}}, interaction_kwargs={"name": "x"})
    dataset = dataset_of(tmp_path, [row], tokenizer, max_prompt_length=30)
    item = dataset[0]
    prompt = "<user: hi><assistant: "
    assert item["raw_prompt_ids"] == [tokenizer.convert_tokens_to_ids(c) for c in prompt]
    assert item["raw_prompt"] == row["prompt"]
    n_pad = 30 - len(prompt)
    assert item["input_ids"].tolist() == [0] * n_pad + item["raw_prompt_ids"]
    assert item["attention_mask"].tolist() == [0] * n_pad + [1] * len(prompt)
    assert item["position_ids"].tolist() == [0] * n_pad + list(range(len(prompt)))
    assert {item[k].dtype for k in ("input_ids", "attention_mask", "position_ids")} == {torch.int64}
    assert item["data_source"] == "toy" and item["index"] == 7
    assert item["reward_model"] == {"style": "rule", "ground_truth": "HI"}
    assert item["tools_kwargs"] == {"calc": {"digits": 3}} and item["interaction_kwargs"] == {"name": "x"}
    assert dataset.dropped == {"prompt_too_long": 0} and dataset.truncated == 0


def test_template_options_and_padding_without_a_pad_token(tmp_path):
    kwargs = {"add_generation_prompt": False, "enable_thinking": True}
    question = {"question": "hi", "data_source": "toy"}
    how = {"columns": {"prompt": "question"}, "chat_template_kwargs": kwargs, "max_prompt_length": 12}
    dataset = dataset_of(tmp_path, [question], make_tokenizer(eos_token="[eos]"), **how)
    assert dataset.tokenizer.decode(dataset[0]["raw_prompt_ids"]) == "<user: hi>!"
    assert dataset[0]["input_ids"][0] == 1 and dataset[0]["attention_mask"][0] == 0
    message = error_of(tmp_path / "a.jsonl", make_tokenizer(unk_token="?"), max_prompt_length=30)
    assert "neither a pad nor an eos" in message


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved", "numpy", "column lists"])
def test_every_kind_of_source_gives_the_same_items(tmp_path, tokenizer, kind):
    rows = [make_row("a", 0, tools_kwargs={"calc": {"n": 1}}), make_row("b", 1, tools_kwargs={"search": {"k": "v"}})]
    source = tmp_path / f"a.{kind}"
    match kind:
        case "jsonl":
            write_jsonl(source, rows)
        case "json":
            source.write_text(json.dumps(rows, indent=1))
        case "parquet":
            write_parquet(source, rows)
        case "saved":
            datasets.Dataset.from_list(rows).save_to_disk(source)
        case "numpy":
            source = datasets.Dataset.from_list(rows).with_format("numpy")
        case "column lists":  # old `datasets` stored a list of structs as a struct of lists
            lists = [row | {"prompt": {key: [value] for key, value in row["prompt"][0].items()}} for row in rows]
            source = write_parquet(tmp_path / "a.parquet", lists)
    dataset = RLHFDataset(source, tokenizer, max_prompt_length=30)
    for item, row in zip((dataset[0], dataset[1]), rows, strict=True):
        assert item["tools_kwargs"] == row["extra_info"]["tools_kwargs"]  # Arrow gave each row both tools
        assert item["raw_prompt"] == row["prompt"] and item["reward_model"] == row["reward_model"]
        assert item["index"] == row["extra_info"]["index"] and type(item["extra_info"]["index"]) is int


def test_several_files_of_different_types(tmp_path, tokenizer):
    with_number, bare = make_row("b"), make_row("c")
    with_number["reward_model"] = {"ground_truth": 42}
    bare["reward_model"] = {"style": "model"}
    del bare["extra_info"]
    files = [
        write_parquet(tmp_path / "a.parquet", [make_row("a", 5)]),
        write_parquet(tmp_path / "b.parquet", [with_number]),
        write_jsonl(tmp_path / "c.jsonl", [bare]),
    ]
    dataset = RLHFDataset([str(f) for f in files], tokenizer, max_prompt_length=30)
    assert texts(dataset) == ["a", "b", "c"]
    assert [dataset[i]["reward_model"]["ground_truth"] for i in range(3)] == ["A", 42, None]
    assert [dataset[i]["index"] for i in range(3)] == [5, 0, 2]
    assert dataset.without_ground_truth == f"{files[2]} row 0"
    assert dataset[2]["extra_info"] == dataset[2]["tools_kwargs"] == dataset[2]["interaction_kwargs"] == {}


def test_a_ground_truth_of_no_text_or_of_a_row_that_is_dropped_is_not_missing(tmp_path, tokenizer):
    dropped, empty = make_row("b" * 40) | {"reward_model": {"ground_truth": None}}, make_row("d")
    empty["reward_model"] = {"ground_truth": ""}
    rows = [make_row("a"), dropped, empty]
    assert dataset_of(tmp_path, rows, tokenizer, max_prompt_length=30).without_ground_truth is None
    null = make_row("e") | {"reward_model": None}
    dataset = dataset_of(tmp_path, [*rows, null, null], tokenizer, max_prompt_length=30, num_proc=2)
    assert dataset.without_ground_truth == f"{tmp_path / 'a.jsonl'} row 3"


SHOWS_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "find", "a" * 20)]
OF_TOOLS = {"row_template": partial(template_of_row, TOOLS)}
FIND = {"find": {"create_kwargs": {"at": 1}}}


@pytest.mark.parametrize("num_proc", [1, 2])
@jsonl_and_parquet
def test_a_row_shows_the_tools_that_it_names(tmp_path, write, num_proc):
    """Also where the length is counted. A null is what Arrow writes for a name that other rows have."""
    infos = [{}, {"tools_kwargs": FIND}, {"tools_kwargs": {"add": {"create_kwargs": {"at": 2}}, "find": None}}]
    infos += [{"tool_selection": []}, {"tool_selection": ["find", "add"], "tools_kwargs": FIND}]
    infos += [{"tool_selection": None, "need_tools_kwargs": True}, {"tools_kwargs": FIND, "need_tools_kwargs": True}]
    file = write(tmp_path / f"a.{'jsonl' if write is write_jsonl else 'parquet'}", [make_row("q", **i) for i in infos])
    load = OF_TOOLS | {"num_proc": num_proc}
    data = RLHFDataset(str(file), make_tokenizer(SHOWS_TOOLS), max_prompt_length=99, **load)
    shown = [data.tokenizer.decode(row["raw_prompt_ids"]).partition("<")[0] for row in (data[i] for i in range(7))]
    every = f"[add][find][{'a' * 20}]"
    assert shown == [every, "[find]", "[add]", "", "[add][find]", every, "[find]"]
    assert data.note == f"{file} row 5: need_tools_kwargs is true, and there are no tools_kwargs"
    assert data[1]["tools_kwargs"] == FIND
    short = RLHFDataset(str(file), make_tokenizer(SHOWS_TOOLS), max_prompt_length=34, **load)
    assert short.kept.tolist() == [1, 2, 3, 4, 6] and short.note is None
    plain = RLHFDataset(str(file), make_tokenizer(SHOWS_TOOLS), max_prompt_length=99)  # a run without tools
    assert not any(plain.tokenizer.decode(plain[i]["raw_prompt_ids"]).startswith("[") for i in range(7))


def test_what_names_no_tools_is_one_line(tmp_path):
    for info, words in (
        ({"tools_kwargs": {"gone": {}}}, "there is no tool 'gone'; --multi-turn.tools has add, find, aaa"),
        ({"tool_selection": ["add", "x\n" * 99]}, r"there is no tool 'x\\nx"),
        ({"tool_selection": "add"}, "tool_selection 'add': write a list"),
        ({"tools_kwargs": ["add"]}, "write {tool: "),
        ({"tools_kwargs": {"add": [1]}}, "write {tool: "),
        ({"tools_kwargs": {"add": {"create_kwargs": "a"}}}, "write {tool: "),
    ):
        file = write_jsonl(tmp_path / "a.jsonl", [make_row("q"), make_row("q", 7, **info)])
        message = error_of(file, make_tokenizer(SHOWS_TOOLS), max_prompt_length=99, **OF_TOOLS)
        assert message.startswith(f"{file} row 1 (index 7): ") and re.search(words, message) and len(message) < 400


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", "><assistant: "), ("right", "<user: abcdef"), ("middle", "<user:stant: ")],
)
def test_truncation(tmp_path, tokenizer, truncation, kept):
    cut = {"max_prompt_length": len(kept), "truncation": truncation, "filter_overlong_prompts": False}
    dataset = dataset_of(tmp_path, [make_row("abcdefgh"), make_row("")], tokenizer, **cut)
    item = dataset[0]
    assert tokenizer.decode(item["raw_prompt_ids"]) == kept
    assert item["input_ids"].tolist() == item["raw_prompt_ids"] and item["attention_mask"].all()
    assert len(dataset) == 2 and dataset.dropped == {"prompt_too_long": 0} and dataset.truncated == 2


@pytest.mark.parametrize("num_proc", [None, 2])
def test_rows_are_drawn_from_all_files_and_keep_their_numbers(tmp_path, tokenizer, num_proc):
    """Before prompts that are too long are dropped. A larger number adds rows, and changes none."""
    rows = [make_row("x" * (30 if i % 5 == 0 else i % 5), None, file_row=i) for i in range(40)]
    files = [write_jsonl(tmp_path / "a.jsonl", rows[:30]), write_parquet(tmp_path / "b.parquet", rows[30:])]
    whole = RLHFDataset(files, tokenizer, max_prompt_length=40)
    before: set[int] = set()
    for n in (1, 20, 10**6):
        drawn = RLHFDataset(files, tokenizer, max_prompt_length=99, max_samples=n, num_proc=num_proc)
        indices = [drawn[i]["index"] for i in range(len(drawn))]
        assert len(drawn) == min(n, 40) and drawn.dropped == {"prompt_too_long": 0, "not_drawn": 40 - len(drawn)}
        assert before < {*indices} or n > 40
        assert indices == sorted(indices) == [drawn[i]["extra_info"]["file_row"] for i in range(len(drawn))]
        short = RLHFDataset(files, tokenizer, max_prompt_length=40, max_samples=n, num_proc=num_proc)
        assert [short[i]["index"] for i in range(len(short))] == [i for i in indices if i % 5]
        assert short.dropped == {"prompt_too_long": len(drawn) - len(short), "not_drawn": 40 - len(drawn)}
        assert short.source_sizes == [sum(i < 30 for i in short.kept), sum(i >= 30 for i in short.kept)]
        before = {*indices}
    assert short.kept.tolist() == whole.kept.tolist() and texts(short) == texts(whole)


def test_an_error_in_a_part_of_the_rows_names_the_row_of_the_file(tmp_path, tokenizer):
    part = {"max_prompt_length": 30, "max_samples": 4, "filter_overlong_prompts": False}
    rows = [make_row("x") for _ in range(50)]
    kept = dataset_of(tmp_path, rows, tokenizer, **part).kept.tolist()
    rows[next(i for i in range(50) if i not in kept)] = {"prompt": 3}  # is not read
    assert len(dataset_of(tmp_path, rows, tokenizer, **part)) == 4
    for change, message in ({"prompt": "long" * 9}, "prompt of 56 tokens"), ({"data_source": 3}, "'data_source' is 3"):
        rows[kept[-1]] |= change
        file = write_jsonl(tmp_path / "b.jsonl", rows)
        assert f"b.jsonl row {kept[-1]}: {message}" in error_of(file, tokenizer, **part)


# ---- errors: one line, with the place and the remedy ----
def error_of(*args, **kwargs):
    with pytest.raises(InputError) as caught:
        RLHFDataset(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_error_nothing_left(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [make_row("abc"), make_row("ab")])
    message = error_of(file, tokenizer, max_prompt_length=8)
    assert all(part in message for part in ("a.jsonl", "2 read, 2 too long", "max_prompt_length=8", "22 tokens"))
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty.jsonl: no rows" in error_of(tmp_path / "empty.jsonl", tokenizer, max_prompt_length=8)
    assert "no rows" in error_of([], tokenizer, max_prompt_length=8)


def test_error_files(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def message(source):
        return error_of(source, tokenizer, max_prompt_length=30)

    assert str(tmp_path / "no.parquet") in message([tmp_path / "no.parquet"])
    assert "no such file" in message("data/none.parquet")
    assert "owner/name: not a file here" in message("owner/name:test") and "'test'" in message("owner/name:test")
    (tmp_path / "a.csv").write_text("prompt\n")
    assert "a.csv: unsupported extension '.csv'" in message(tmp_path / "a.csv")
    (tmp_path / "bad.parquet").write_text("not parquet")
    assert "bad.parquet: not readable as parquet" in message(tmp_path / "bad.parquet")
    assert "name the files in it: a.csv, bad.parquet" in message(tmp_path)
    assert "got a int" in message([3])
    good = json.dumps(make_row("a"))
    (tmp_path / "bad.jsonl").write_text(f"{good}\n\n{good[:-1]}\n")
    assert "bad.jsonl line 3: not valid JSON" in message(tmp_path / "bad.jsonl")
    (tmp_path / "bad.json").write_text(f"[{good},\n{good}")
    assert "bad.json line 2: not valid JSON" in message(tmp_path / "bad.json")
    (tmp_path / "list.jsonl").write_text(f"{good}\n[1]\n")
    assert "list.jsonl line 2: a list" in message(tmp_path / "list.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert "latin.jsonl: not UTF-8" in message(tmp_path / "latin.jsonl")
    other = write_jsonl(tmp_path / "other.jsonl", [{"question": "1+1"}])
    assert "other.jsonl row 0: no column 'prompt'; it has question" in message(other)


BAD_ROWS = {  # what a row of make_row("b") is changed to, and what is said of it
    "reward model text": ({"reward_model": "42"}, "'reward_model' is '42'; it must be a dict"),
    "no message": ({"prompt": []}, "not text or a list of messages"),
    "a list of texts": ({"prompt": ["text"]}, "not text or a list of messages"),
    "a message alone": ({"prompt": {"role": "user"}}, "not text or a list of messages"),
    "a tool": ({"prompt": [{"role": "tool", "content": "x"}]}, "the chat template refuses"),
    "no content": ({"prompt": [{"role": "user"}]}, "the content of message 0 is null; it must be text"),
    "half a character": ({"prompt": [{"role": "user", "content": "a\ud800"}]}, r"'\ud800', half of a character"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_error_rows_are_one_line_with_file_and_row(tmp_path, tokenizer, case):
    change, message = BAD_ROWS[case]
    rows = [make_row("a"), make_row("b") | change]
    said = error_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_length=99)
    assert "a.jsonl row 1: " in said and message in said
    if case == "a tool":
        in_memory = error_of(datasets.Dataset.from_list(rows), tokenizer, max_prompt_length=99, num_proc=2)
        assert "data set 0 in memory row 1: " in in_memory and message in in_memory


words = st.text(st.characters(codec=None, categories=["L", "Cs", "Cc"]), max_size=3) | st.just("content")
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
message = st.fixed_dictionaries({"role": st.just("user") | values, "content": words | values})


@given(
    row=st.fixed_dictionaries(
        {
            "prompt": st.lists(message, max_size=2) | values,
            "data_source": st.just("toy") | values,
            "reward_model": st.dictionaries(st.just("ground_truth") | words, values, max_size=2) | values,
        },
        optional={"extra_info": st.dictionaries(st.just("index") | words, values, max_size=2) | values},
    ),
    columns=st.just({}) | st.dictionaries(st.sampled_from(COLUMN_NAMES), st.sampled_from([*OF_VERL, "prompt"])),
)
def test_any_row_makes_an_item_or_one_line(tokenizer, row, columns):
    with tempfile.TemporaryDirectory() as folder:
        file = write_jsonl(Path(folder, "a.jsonl"), [row])
        try:
            dataset = RLHFDataset(file, tokenizer, max_prompt_length=200, columns=columns)
        except InputError as error:
            assert str(file) in str(error) and "\n" not in str(error)
        else:
            collate_fn([dataset[0], dataset[0]])
            assert all(isinstance(source, str) for source in dataset.data_sources)


CALLING = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ (call.function or call).arguments | tojson }}{% endfor %}{% endfor %}"
)


def calling(call: dict) -> list[dict]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]


@jsonl_and_parquet
@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [({"a": 1}, '{"a": 1}'), ('{"a": null}', '{"a": null}'), ("", "{}"), (None, "{}"), ("null", "{}")],
)
def test_a_call_s_arguments_may_be_json_text(tmp_path, write, arguments, rendered):
    plain = {"name": "f", "arguments": arguments}
    for form in (plain, {"type": "function", "id": None, "function": plain}):
        path = write(tmp_path / f"a.{write.__name__[6:]}", [make_row("") | {"prompt": calling(form)}])
        dataset = RLHFDataset(path, make_tokenizer(CALLING), max_prompt_length=99)
        assert make_tokenizer().decode(dataset[0]["raw_prompt_ids"]) == "a" + rendered


@pytest.mark.parametrize("arguments", ["{", "[1]", '"{}"', 3, "[" * 100_000])
def test_a_call_s_arguments_are_an_object_or_one_line(tmp_path, arguments):
    rows = [make_row("a"), make_row("b") | {"prompt": calling({"name": "f", "arguments": arguments})}]
    message = error_of(write_jsonl(tmp_path / "a.jsonl", rows), make_tokenizer(CALLING), max_prompt_length=200)
    assert "a.jsonl row 1: a tool call of message 1: its arguments must be an object" in message
    assert len(message) < 300


def test_nulls_of_json_stay_in_what_is_the_user_s(tmp_path, tokenizer):
    own = {"inputs": [[{"a": None}], [None], {}], "b": {"c": None, "d": []}, "mixed": [1, "x", None, {"y": None}]}
    kwargs = {"calc": {"create_kwargs": {"start": None}}}
    rows = [make_row("a", 3, tools_kwargs=kwargs, **own), make_row("b", None, other=None)]
    rows[0]["reward_model"]["ground_truth"] = own
    call = {"name": "f", "arguments": {"x": None}}
    rows[0]["prompt"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    for message in rows[0]["prompt"]:
        message["reasoning"] = None  # of the form, not of the user: templates ask whether a field is there
    rows[1] |= {"reward_model": None, "note": None}
    dataset = dataset_of(tmp_path, rows, tokenizer, max_prompt_length=200)
    first, second = dataset[0], dataset[1]
    assert first["extra_info"] == rows[0]["extra_info"] and first["tools_kwargs"] == kwargs
    assert first["reward_model"]["ground_truth"] == own
    assert first["raw_prompt"][1] == {"role": "assistant", "tool_calls": [call]}
    assert second["extra_info"] == {"index": None, "other": None} and second["index"] == 1
    assert second["tools_kwargs"] == second["interaction_kwargs"] == {}
    assert dataset.without_ground_truth.endswith("row 1")
    flat = [{"question": "c", "data_source": "toy", "note": None, "more": {"n": None}}]
    dataset = dataset_of(tmp_path, flat, tokenizer, columns={"prompt": "question"})
    assert dataset[0]["extra_info"] == {"note": None, "more": {"n": None}}


@pytest.mark.parametrize(
    ("form", "before"),
    [("$A [eos]", []), ("[pad] $A [eos]", [0]), ("[pad] $A", [0]), ("$A [eos] [eos]", []), ("[eos] $A [eos]", [1])],
)
def test_a_prompt_without_a_template_has_what_begins_a_text_and_not_what_ends_one(tmp_path, form, before):
    tokenizer = make_tokenizer(None)
    pieces = [("[eos]", 1), ("[pad]", 0)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=pieces)
    rows = [make_row("hi"), make_row(tokenizer.decode(before) + "hi")]
    dataset = dataset_of(tmp_path, rows, tokenizer, allow_special_tokens=True)
    words = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert [dataset[i]["raw_prompt_ids"] for i in (0, 1)] == [before + words] * 2  # and not twice


def test_load_split_of_a_local_copy(tmp_path):
    """A split in one file is not all in memory. Of a config, and none: tests/rewards/test_rewards.py."""
    for n in range(2):
        write_jsonl(tmp_path / f"train-{n}.jsonl", [{"n": n}])
    assert load_split("any/name", "train", local_dir=tmp_path) == [{"n": 0}, {"n": 1}]
    datasets.Dataset.from_list([{"config": "main"}]).to_parquet(tmp_path / "test.parquet")
    assert isinstance(load_split("any/name", "test", local_dir=tmp_path), datasets.Dataset)


def test_what_is_no_dataset_class_is_refused(tmp_path):
    """One that is: tests/scripts/test_grpo.py."""
    code = tmp_path / "mine.py"
    code.write_text(
        "class Other: pass\nimport torch.utils.data\nclass Stream(torch.utils.data.IterableDataset): pass\n"
    )
    for spec, reason in {
        f"{code}:Other": "not a subclass",
        f"{code}:Stream": "it has no __len__",
        f"{code}:Nothing": "has no 'Nothing'",
        f"{tmp_path}/no.py:Mine": "give an existing file",
    }.items():
        with pytest.raises(InputError, match=reason):
            load_dataset_class(spec)


# ---- batches ----
def test_collate_never_makes_2d_object_arrays():
    of_both = {"d": {"a": 1}, "s": "x", "a": np.arange(2)}
    batch = collate_fn([{"t": torch.tensor([i, i]), "ids": [i, i], "n": i} | of_both for i in (0, 1)])
    assert torch.equal(batch["t"], torch.tensor([[0, 0], [1, 1]]))
    for key in ("ids", "d", "s", "n", "a"):
        assert batch[key].shape == (2,) and batch[key].dtype == object, key
    assert batch["ids"][1] == [1, 1] and batch["n"].tolist() == [0, 1]


class Rows(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"row": torch.tensor(i)}


def draw(loader, steps):
    batches = iter(loader)
    return [next(batches)["row"].tolist() for _ in range(steps)]


@settings(max_examples=60)
@given(
    *(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**40), st.booleans()),
    *(st.integers(0, 10), st.integers(1, 10)),
)
def test_resume_anywhere_and_on_another_world_size(n, per_rank, world, seed, shuffle, before, after):
    per_step = per_rank * world
    args = {"seed": seed, "shuffle": shuffle}
    whole = draw(make_loader(Rows(n), per_step, rank=0, world_size=1, **args), before + after)
    loader = make_loader(Rows(n), per_step, rank=world - 1, world_size=world, **args)
    draw(loader, before)
    assert loader.position == before * per_step
    state = json.loads(json.dumps(loader.state_dict()))
    for size in (world, 1):
        rest = []
        for rank in range(size):
            resumed = make_loader(Rows(n), per_step, rank=rank, world_size=size, **args)
            resumed.load_state_dict(state)
            rest.append(draw(resumed, after))
        assert [[rest[k % size][s][k // size] for k in range(per_step)] for s in range(after)] == whole[before:]


def test_the_order_is_that_of_the_rows_or_depends_on_seed_and_epoch():
    """Each epoch has each row once: test_mixture.py."""
    in_order = make_loader(Rows(5), 3, rank=0, world_size=1, seed=0, shuffle=False)
    assert draw(in_order, 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    epochs = [draw(make_loader(Rows(50), 50, rank=0, world_size=1, seed=seed), 3) for seed in (0, 1, 1)]
    assert len({tuple(order) for of_seed in epochs for order in of_seed}) == 6 and epochs[1] == epochs[2]


def test_a_loader_goes_on_where_another_or_itself_was_left_whatever_was_prefetched(tmp_path, tokenizer):
    dataset = dataset_of(tmp_path, [make_row(f"{i}", i) for i in range(10)], tokenizer)

    def loader(workers=2):
        return make_loader(dataset, 4, rank=1, world_size=2, seed=3, num_workers=workers)

    def indices(batches, steps):
        return [next(batches)["index"].tolist() for _ in range(steps)]

    whole, first = indices(iter(loader(0)), 8), loader()
    batches = iter(first)
    for done in (2, 3, 5):  # the epochs end within steps 3 and at 5
        indices(batches, done - first.position // 4)
        assert first.state_dict() == {"position": 4 * done, "num_rows": 10, "seed": 3, "shuffle": True}
        again = loader()
        again.load_state_dict(first.state_dict())
        assert indices(iter(again), 2) == whole[done : done + 2]
    assert indices(iter(first), 1) == whole[5:6]


class Drawing(Rows):
    def __getitem__(self, i):
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return {"row": torch.tensor(drawn, dtype=torch.double)}


def test_what_a_data_set_draws_depends_on_seed_and_place_alone():
    """Not on ranks, workers, or how far another process came: a resumed run draws as one that was never stopped. The
    global generators stay as they are."""

    def loader(rank=0, world=1, seed=1, workers=0):
        return make_loader(Drawing(5), 4, rank=rank, world_size=world, seed=seed, num_workers=workers)

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    whole = draw(loader(), 4)
    assert len({number for step in whole for row in step for number in row}) == 3 * 4 * 4  # also of a row drawn again
    ranks = [draw(loader(rank, 2), 4) for rank in range(2)]
    assert [[ranks[k % 2][step][k // 2] for k in range(4)] for step in range(4)] == whole
    resumed = loader(workers=2)
    resumed.load_state_dict({"position": 4})
    assert draw(resumed, 3) == whole[1:]
    assert draw(loader(seed=2), 1) != whole[:1]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_loader_errors():
    def make(n=10, seed=0):
        return make_loader(Rows(n), 4, rank=0, world_size=2, seed=seed)

    with pytest.raises(InputError, match="no rows"):
        make(n=0)
    for other in ({"n": 11}, {"seed": 1}):
        with pytest.raises(InputError, match="resume: the saved data stream"):
            make(**other).load_state_dict(make().state_dict())


def test_a_chat_template_reads_the_keywords_that_it_names():
    tokenizer = load_tokenizer(TOY_MODEL)
    template = "{% generation %}{% if enable_thinking is defined %}x{% endif %}{% endgeneration %}{{ messages }}"
    for kwargs in ({}, {"enable_thinking": True, "chat_template": template}, {"add_generation_prompt": False}):
        check_template_kwargs(tokenizer, kwargs)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": template}
    check_template_kwargs(tokenizer, {"enable_thinking": True})
    with pytest.raises(InputError, match="does not read thinking; it reads enable_thinking"):
        check_template_kwargs(tokenizer, {"thinking": True})
