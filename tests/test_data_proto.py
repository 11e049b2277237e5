import copy
import io
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lib import InputError
from lib.data import exchange_groups
from lib.data_proto import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from tests.common import run_ranks

ROWS = st.integers(1, 12)
quick = settings(max_examples=25)


def make(rows, offset=0, width=3):
    """Row i is recognisable in every key."""
    ids = torch.arange(rows) + offset
    tensors = {
        "ids": ids,
        "tokens": ids[:, None] * 10 + torch.arange(width),
        "mask": ids % 2 == 0,
        "half": ids.bfloat16(),
    }
    objects = {"uid": [f"u{i}" for i in ids.tolist()], "raw": [[i, i] for i in ids.tolist()]}
    return DataProto.from_dict(tensors, objects, {"eos_token_id": 2})


def rows_of(data):
    """The slow reference: one dict of plain values a row."""
    return [
        {key: x[i].tolist() for key, x in data.batch.items()} | {key: x[i] for key, x in data.non_tensor_batch.items()}
        for i in range(len(data))
    ]


def same(a, b):
    assert rows_of(a) == rows_of(b)
    assert {k: x.dtype for k, x in a.batch.items()} == {k: x.dtype for k, x in b.batch.items()}
    assert a.meta_info == b.meta_info
    a.check_consistency()
    b.check_consistency()


# --- making one
def test_columns_are_sorted_by_type_and_the_callers_dicts_are_left_alone():
    columns = {"a": torch.zeros(2), "b": np.array(["x", "y"], dtype=object)}
    data = DataProto.from_single_dict(columns, meta_info={"t": 1})
    assert list(data.batch.keys()) == ["a"] and list(data.non_tensor_batch) == ["b"] and data.meta_info == {"t": 1}
    objects, meta_info = {"o": [1, 2]}, {}
    data = DataProto.from_dict({"a": torch.zeros(2)}, objects, meta_info, auto_padding=True)
    assert objects == {"o": [1, 2]} and meta_info == {} and data.is_padding_enabled()


UNEQUAL = {"a": torch.zeros(2), "b": torch.zeros(3)}
MISUSE = [  # what is raised, what it says, how
    (ValueError, r"'a': \(2,\), 'b': \(3,\)", lambda _: DataProto.from_dict(UNEQUAL)),
    (ValueError, r"'a': \(\)", lambda _: DataProto.from_dict({"a": torch.tensor(1.0)})),
    (ValueError, "'o'.*3 rows.*2", lambda _: DataProto.from_dict({"a": torch.zeros(2)}, {"o": [1, 2, 3]})),
    (ValueError, "'p'.*2 rows.*1", lambda _: DataProto.from_dict({}, {"o": [1], "p": [1, 2]})),
    (ValueError, "'c'.*list", lambda _: DataProto.from_single_dict({"c": [1, 2]})),
    (ValueError, r"'tokens'.*\[2, 3\].*\[2, 4\]", lambda _: DataProto.concat([make(2), make(2, width=4)])),
    (ValueError, "'half' is not in every part", lambda x: DataProto.concat([x, x.select(["ids"])])),
    (ValueError, "as many", lambda x: x.rename(["ids"], ["a", "b"])),
    (KeyError, "absent", lambda x: x.rename("absent", "x")),
    (KeyError, "tokens", lambda x: x.rename("ids", "tokens")),
    (KeyError, "raw", lambda x: x.rename("ids", "raw")),
    (KeyError, "uid", lambda x: x.rename("raw", "uid")),
    (KeyError, "absent", lambda x: x.select(["absent"])),
    (KeyError, "absent", lambda x: x.pop(["ids"], ["uid"], ["absent"])),
    (IndexError, "ind(ex|ices)|range", lambda x: x[:0][0]),
]
INDICES = (3, -4, [3], torch.tensor([-4]), [True, False], [0.5], [[0, 1]])
MISUSE += [(IndexError, "ind(ex|ices)|range", lambda x, index=index: x[index]) for index in INDICES]


@pytest.mark.parametrize("error, said, misuse", MISUSE)
def test_misuse_is_named_and_changes_nothing(error, said, misuse):
    data = make(3)
    with pytest.raises(error, match=said):
        misuse(data)
    same(data, make(3))


CONFLICTS = [("batch", "ids", torch.tensor([0, 1, 9])), ("batch", "ids", torch.tensor([0.0, 1.0, 2.0]))]
CONFLICTS += [("batch", "tokens", torch.zeros(3, 2)), ("non_tensor_batch", "raw", np.array([0, 1, 2]))]
CONFLICTS += [("non_tensor_batch", "uid", np.array(["u0", "u1", "x"], dtype=object))]
CONFLICTS += [("meta_info", "eos_token_id", 3), ("meta_info", "eos_token_id", torch.ones(2))]


@pytest.mark.parametrize("part, key, value", CONFLICTS)
def test_union_conflicts_are_named_and_change_nothing(part, key, value):
    data, other = make(3), make(3)
    getattr(other, part)[key] = value
    other.batch["new"] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"{part}\['{key}'\]"):
        data.union(other)
    same(data, make(3))


# --- rows
@quick
@given(rows=ROWS, data=st.data())
def test_indexing_as_a_list_does(rows, data):
    proto, reference = make(rows), rows_of(make(rows))
    bound = st.none() | st.integers(-rows - 2, rows + 2)
    cut = slice(data.draw(bound), data.draw(bound), data.draw(st.none() | st.sampled_from([-3, -1, 1, 2, 5])))
    assert rows_of(proto[cut]) == reference[cut]
    positions = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=20))
    for index in (positions, np.array(positions, dtype=np.int32), torch.tensor(positions, dtype=torch.long)):
        assert rows_of(proto[index]) == [reference[i] for i in positions]
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for index in (mask, np.array(mask), torch.tensor(mask)):
        assert rows_of(proto[index]) == [row for row, keep in zip(reference, mask) if keep]
    i = data.draw(st.integers(-rows, rows - 1))
    item = proto[i]
    assert isinstance(item, DataProtoItem) and item.meta_info == {"eos_token_id": 2}
    assert item.batch["tokens"].tolist() == reference[i]["tokens"]
    assert item.non_tensor_batch["uid"] == reference[i]["uid"]


def test_what_results_share():
    """Slices are views and selections are copies; each has dicts of its own."""
    data = make(6)
    data[2:4].batch["ids"][:] = -1
    data.chunk(3)[0].batch["ids"][:] = -2
    data.split(5)[1].batch["ids"][:] = -3
    assert data.batch["ids"].tolist() == [-2, -2, -1, -1, 4, -3]
    for copied in (data[[0, 1]], data.repeat(1), data.repeat(1, interleave=False), DataProto.concat([data])):
        copied.batch["ids"][:] = 7
    assert data.batch["ids"].tolist() == [-2, -2, -1, -1, 4, -3]
    for derived in (data[:2], data.select(), data.chunk(2)[0], data.repeat(2), data[[1]]):
        derived.meta_info["new"] = 1
        derived.non_tensor_batch["new"] = derived.non_tensor_batch["uid"]
        derived.batch["new"] = derived.batch["ids"]
    assert "new" not in data.meta_info and "new" not in data.non_tensor_batch and "new" not in {*data.batch.keys()}


@quick
@given(rows=st.integers(0, 8), n=st.integers(0, 4), data=st.data())
def test_rows_in_another_order_and_several_times(rows, n, data):
    reference, reordered = rows_of(make(rows)), make(rows)
    order = data.draw(st.permutations(range(rows)))
    assert reordered.reorder(order) is None and rows_of(reordered) == [reference[i] for i in order]
    assert rows_of(make(rows).repeat(n)) == [row for row in reference for _ in range(n)]
    assert rows_of(make(rows).repeat(n, interleave=False)) == reference * n
    times = data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    for form in (times, tuple(times), np.array(times), torch.tensor(times)):
        expected = [row for row, own in zip(reference, times) for _ in range(own)]
        assert rows_of(make(rows).sample_level_repeat(form)) == expected


# --- parts
@quick
@given(rows=st.integers(0, 12), n=st.integers(1, 13))
def test_chunk_split_and_concat(rows, n):
    data, size = make(rows), -(-rows // n)
    if rows % n:
        with pytest.raises(ValueError, match=f"{rows} rows.*{n}"):
            data.chunk(n)
        data.meta_info[DataProtoConfig.auto_padding_key] = True
    chunks, parts = data.chunk(n), data.split(n)
    assert [len(p) for p in chunks] == [max(0, min(size, rows - i * size)) for i in range(n)]
    assert [rows_of(p) for p in parts] == [rows_of(data)[i : i + n] for i in range(0, rows, n)]
    same(DataProto.concat(chunks), data)
    same(DataProto.concat(parts or [data]), data)


def test_concat_merges_meta_info():
    parts = make(6).chunk(3)
    parts[0].meta_info["metrics"] = {"loss": 1.0}
    parts[1].meta_info |= {"metrics": [{"loss": 2.0}, {"loss": 3.0, "extra": 4.0}], "only": torch.ones(2)}
    parts[2].meta_info |= {"metrics": None, "only": torch.ones(2)}
    meta_info = DataProto.concat(parts).meta_info
    assert meta_info["metrics"] == {"loss": [1.0, 2.0, 3.0], "extra": [4.0]}
    assert meta_info["eos_token_id"] == 2 and torch.equal(meta_info["only"], torch.ones(2))
    parts[2].meta_info["eos_token_id"] = 3
    with pytest.raises(ValueError, match="eos_token_id"):
        DataProto.concat(parts)


@quick
@given(rows=ROWS, divisor=st.integers(1, 30))
def test_pad_and_unpad(rows, divisor):
    data = make(rows)
    data.meta_info["metrics"] = {"loss": 1.0}
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    reference = rows_of(data)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert rows_of(padded) == reference + [reference[i % rows] for i in range(pad_size)]
    same(unpad_dataproto(padded, pad_size), data)
    for candidate, row in (("first", 0), ("last", rows - 1)):
        padded = make(rows)
        padded.padding(3, candidate)
        assert rows_of(padded) == reference + [reference[row]] * 3


@quick
@given(size=st.sampled_from([1, 2, 3, 4, 6, 12]), epochs=st.integers(1, 3), shuffle=st.booleans())
def test_iterator_in_the_order_of_torchs_loader(size, epochs, shuffle):
    data, options = make(12), {"shuffle": True} if shuffle else None
    batches = list(data.make_iterator(size, epochs, seed=5, dataloader_kwargs=options))
    loader = DataLoader(range(12), batch_size=size, shuffle=shuffle, generator=torch.Generator().manual_seed(5))
    expected = [batch.tolist() for _ in range(epochs) for batch in loader]
    assert [rows_of(b) for b in batches] == [rows_of(data[b]) for b in expected]
    assert all(b.meta_info == data.meta_info for b in batches) and options == ({"shuffle": True} if shuffle else None)


# --- keys
def test_select_pop_and_rename():
    data = make(3)
    chosen = data.select(["ids"], ["uid"], [])
    assert [*chosen.batch.keys()] == ["ids"] and [*chosen.non_tensor_batch] == ["uid"] and chosen.meta_info == {}
    assert chosen.batch["ids"] is data.batch["ids"]
    popped = data.pop(["ids"], ["uid"], ["eos_token_id"])
    assert [*popped.batch.keys()] == ["ids"] and [*popped.non_tensor_batch] == ["uid"]
    assert popped.meta_info == {"eos_token_id": 2} and data.meta_info == {}
    assert {*data.batch.keys()} == {"tokens", "mask", "half"} and [*data.non_tensor_batch] == ["raw"]
    same(data.union(popped), make(3))
    assert data.rename("ids", "numbers").rename(["numbers", "uid"], ["ids2", "uid2"]) is data
    assert {*data.batch.keys()} == {"ids2", "tokens", "mask", "half"} and {*data.non_tensor_batch} == {"uid2", "raw"}
    assert data.batch["ids2"].tolist() == [0, 1, 2] and data.batch["tokens"].shape == (3, 3)


@quick
@given(rows=ROWS, keys=st.sets(st.sampled_from(["ids", "tokens", "mask", "half"])))
def test_union_commutes_and_accepts_equal_values(rows, keys):
    left = lambda: make(rows).select(sorted(keys), ["uid"])  # noqa: E731
    right = lambda: copy.deepcopy(make(rows)).select(["ids", "half"], ["uid", "raw"])  # noqa: E731
    a, b = left().union(right()), right().union(left())
    assert {*a.batch.keys()} == keys | {"ids", "half"}
    same(a, b)
    same(a, a.union(b))


def test_union_of_nan_negative_zero_and_nested_values():
    def nested():
        objects = {"o": [{"a": np.array([1.0, np.nan])}, [float("nan"), (torch.ones(1),)]]}
        return DataProto.from_dict({"x": torch.tensor([float("nan"), 0.0])}, objects, {"t": torch.tensor([1, 2])})

    nested().union(nested())
    other = nested()
    other.batch["x"] = torch.tensor([float("nan"), -0.0])
    nested().union(other)
    other.non_tensor_batch["o"][0]["a"][0] = 2.0
    with pytest.raises(ValueError, match="'o'"):
        nested().union(other)


def test_no_rows_and_no_tensors():
    data = DataProto()
    assert len(data) == 0 and len(data.repeat(3)) == 0 and len(data[[]]) == 0 and data.split(2) == []
    assert [len(c) for c in data.chunk(2)] == [0, 0]
    assert len(DataProto.concat([])) == 0
    assert pad_dataproto_to_divisor(data, 4) == (data, 0)
    same(DataProto().union(make(2)), make(2))
    same(make(2).union(DataProto()), make(2))
    same(DataProto.concat([make(2)[:0], DataProto(), make(2)]), make(2))
    assert [*make(3)[:0].batch.keys()] == ["ids", "tokens", "mask", "half"]
    data = DataProto.from_dict(non_tensors={"o": ["a", "b", "c"]})
    assert len(data) == 3 and data[1].batch is None and data[1].non_tensor_batch == {"o": "b"}
    assert data.repeat(2).non_tensor_batch["o"].tolist() == ["a", "a", "b", "b", "c", "c"]
    assert data.to("cpu") is data


def test_data_info_and_size(capsys):
    data = make(2)
    data.meta_info |= {"list": [1, "a"], "tuple": (1, None), "dict": {"a": [1.0]}, "none": {}}
    lines = ["tokens: (2, 3) (torch.int64) cpu", "uid: ndarray(2,) (object)", "list: list[int|str]", "none: dict"]
    lines += ["tuple: tuple(int, NoneType)", "dict: dict[str: list[float]]"]
    assert {f"  {line}" for line in lines} <= {*data.get_data_info().split("\n")}
    data.print_size("here")
    assert capsys.readouterr().out.startswith(f"here, Size of tensordict: {(16 + 48 + 2 + 4) / 2**30} GB")


# --- pickling and files
def test_pickle_takes_only_its_own_rows():
    data = make(1000)
    part = pickle.dumps(data[:2])
    assert len(part) < len(pickle.dumps(data)) / 50
    restored = pickle.loads(part)  # noqa: S301
    same(restored, data[:2])
    restored.batch["ids"][0] = 5  # writable, and its own
    assert data.batch["ids"][0] == 0
    same(copy.deepcopy(data), data)


KEYS = st.text() | st.integers() | st.none() | st.tuples(st.integers())
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda of: st.lists(of, max_size=3) | st.lists(of, max_size=3).map(tuple) | st.dictionaries(KEYS, of, max_size=3),
    max_leaves=5,
)


@settings(max_examples=15)
@example(values=[], meta=None, tensors=False)
@given(values=st.lists(PLAIN, max_size=3), meta=PLAIN, tensors=st.booleans())
def test_files_hold_plain_values(tmp_path_factory, values, meta, tensors):
    path, tensors = tmp_path_factory.getbasetemp() / "plain", {"x": torch.arange(len(values))} if tensors else {}
    DataProto.from_dict(tensors, {"o": values}, {"m": meta}).save_to_disk(path)
    loaded = DataProto.load_from_disk(path)
    assert (loaded.batch is None) == (not tensors) and len(loaded) == len(values)
    assert repr(loaded.non_tensor_batch["o"].tolist()) == repr(values) and repr(loaded.meta_info) == repr({"m": meta})


def test_files_hold_arrays_scalars_and_tensors(tmp_path):
    array, keyed = np.arange(6, dtype=np.int16).reshape(2, 3), {"!tuple": 1, 3: torch.ones(2, dtype=torch.bfloat16)}
    values = [array, np.float32(0.1), keyed, np.array(["a", None], dtype=object)]
    meta_info = {"nan": float("nan"), "text": np.array(["a", "bc"])}
    meta_info |= {"time": np.datetime64("2024-01-01"), "empty": np.zeros((0, 2))}
    shared = torch.randn(4, 6)
    tensors = {"x": shared[:, ::2], "y": shared, "z": shared, "empty": torch.zeros(4, 0)}
    DataProto.from_dict(tensors, {"o": values, "numbers": np.arange(4)}, meta_info).save_to_disk(tmp_path / "f")
    loaded = DataProto.load_from_disk(tmp_path / "f")
    first, second, third, fourth = loaded.non_tensor_batch["o"]
    assert first.dtype == np.int16 and np.array_equal(first, array)
    assert type(second) is np.float32 and second == np.float32(0.1)
    assert third["!tuple"] == 1 and torch.equal(third[3], torch.ones(2, dtype=torch.bfloat16))
    assert fourth.dtype == object and fourth.tolist() == ["a", None]
    assert loaded.non_tensor_batch["numbers"].dtype == np.arange(4).dtype
    assert np.isnan(loaded.meta_info["nan"]) and loaded.meta_info["text"].tolist() == ["a", "bc"]
    assert loaded.meta_info["time"] == np.datetime64("2024-01-01") and loaded.meta_info["empty"].shape == (0, 2)
    assert [*loaded.batch.keys()] == [*tensors]
    assert all(torch.equal(loaded.batch[key], x) for key, x in tensors.items())


def with_images(offset=0):
    """Rows 0 and 1 share an image and its tensors, as a group of responses does. Row 2 has it, too, another and a
    video. Row 3 has none."""
    rng = np.random.default_rng(offset)

    def image():
        return Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))

    shared = {"image": [image()]}, {"pixel_values": torch.from_numpy(rng.random((2, 3)))}
    video = (rng.integers(0, 256, (2, 4, 5, 3), dtype=np.uint8), {"fps": 2.0, "frames_indices": [0, 3]})
    several = {"image": [image(), shared[0]["image"][0]], "video": [video]}, {"pixel_values": torch.ones(7, 3)}
    data, inputs = zip(shared, shared, several, ({}, {}))
    objects = {"multi_modal_data": list(data), "multi_modal_inputs": list(inputs)}
    positions = torch.arange(4 * 4 * 6).view(4, 4, 6) + offset
    ids = torch.arange(4) + 10 * offset
    ones = torch.ones_like(ids[:, None])
    widths = {"prompts": ids[:, None], "attention_mask": ones, "response_mask": ones}  # what ranks make equal
    return DataProto.from_dict({"input_ids": ids[:, None], "position_ids": positions, "ids": ids} | widths, objects)


def media_rows(data):
    """The slow reference: plain values of each row."""
    rows = []
    for i, media, inputs in zip(data.batch["ids"].tolist(), *data.non_tensor_batch.values()):
        pictures = [np.asarray(image).tolist() for image in media.get("image", [])]
        videos = [(frames.dtype, frames.tolist(), metadata) for frames, metadata in media.get("video", [])]
        rows.append((i, pictures, videos, {name: x.tolist() for name, x in inputs.items()}))
    return rows


def test_a_file_holds_what_rows_share_once(tmp_path):
    data = with_images()
    data.save_to_disk(tmp_path / "f")
    held = load_file(tmp_path / "f")
    assert sum(name.startswith("value/") for name in held) == 2 + 2 + 1  # images, tensors, the video
    loaded = DataProto.load_from_disk(tmp_path / "f")
    assert media_rows(loaded) == media_rows(data)
    assert torch.equal(loaded.batch["position_ids"], data.batch["position_ids"])
    first, second, third, _ = loaded.non_tensor_batch["multi_modal_data"]
    assert first["image"][0] is second["image"][0] is third["image"][1] and first["image"][0].mode == "RGB"
    first, second, *_ = loaded.non_tensor_batch["multi_modal_inputs"]
    assert first["pixel_values"] is second["pixel_values"]
    loaded.save_to_disk(tmp_path / "g")
    assert (tmp_path / "g").stat().st_size == (tmp_path / "f").stat().st_size
    data.repeat(8).save_to_disk(tmp_path / "g")
    assert len(load_file(tmp_path / "g")) == len(held)


def test_rows_share_images_in_memory_and_when_sent():
    data = with_images()
    repeated = data.repeat(8)
    sent = pickle.dumps(repeated)
    assert len(sent) < 2 * len(pickle.dumps(data)) + 8 * 4 * 6 * 4 * 8  # images once; positions by row
    restored = pickle.loads(sent)  # noqa: S301
    assert media_rows(restored) == media_rows(repeated)
    assert media_rows(data.select(deepcopy=True)) == media_rows(data)
    first, second = restored.non_tensor_batch["multi_modal_inputs"][:2]
    assert first is second
    assert "multi_modal_inputs" in data.get_data_info() and "multi_modal_inputs" in data[3:].get_data_info()
    assert len(data.union(with_images()[:])) == 4  # equal values


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_of_each_mode_go_into_a_file(tmp_path, mode):
    image = Image.linear_gradient("L").resize((7, 5)).convert(mode)
    DataProto.from_dict(non_tensors={"o": [image]}).save_to_disk(tmp_path / "f")
    [loaded] = DataProto.load_from_disk(tmp_path / "f").non_tensor_batch["o"]
    assert loaded.mode == mode and loaded.size == (7, 5) and loaded.tobytes() == image.tobytes()
    with pytest.raises(InputError, match=r"non_tensor_batch\['o'\] row 0: a value of type Image cannot be saved"):
        DataProto.from_dict(non_tensors={"o": [image.convert("CMYK")]}).save_to_disk(tmp_path / "f")


def test_a_loaded_file_can_be_changed_and_saved_over(tmp_path):
    path = tmp_path / "f"
    make(3).save_to_disk(path)
    first = DataProto.load_from_disk(path)
    first.batch["ids"] += 100
    same(DataProto.load_from_disk(path), make(3))
    make(3, offset=7).save_to_disk(path)
    assert first.batch["tokens"][:, 0].tolist() == [0, 10, 20]
    same(DataProto.load_from_disk(path), make(3, offset=7))
    assert [*tmp_path.iterdir()] == [path]


def test_what_cannot_be_saved_is_named(tmp_path):
    data = make(3)
    data.non_tensor_batch["extra"] = np.array([1, {"deep": {"lock": threading.Lock()}}, 2], dtype=object)
    with pytest.raises(InputError, match=r"non_tensor_batch\['extra'\] row 1\['deep'\]\['lock'\].*type lock"):
        data.save_to_disk(tmp_path / "f")
    data.non_tensor_batch.pop("extra")
    data.meta_info["set"] = {1, 2}
    with pytest.raises(InputError, match=r"meta_info\['set'\].*type set"):
        data.save_to_disk(tmp_path / "f")
    assert [*tmp_path.iterdir()] == []


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["pickle", "torch", "object array", "garbage", "empty", "truncated"])
def test_a_hostile_or_damaged_file_is_refused_and_executes_nothing(tmp_path, how):
    path, victim, file = tmp_path / "f", tmp_path / "executed", io.BytesIO()
    make(3).save_to_disk(path)
    good = path.read_bytes()
    torch.save(Payload(victim), file)
    contents = {"pickle": pickle.dumps(Payload(victim)), "torch": file.getvalue(), "garbage": b"\xff" * 99}
    contents |= {"empty": b"", "truncated": good[:-5]}
    contents["object array"] = good.replace(b'{"batch": ["ids"', b'{"bbbbb": ["ids"')
    path.write_bytes(contents[how])
    with pytest.raises(InputError, match=f"{path}.*not a file of DataProto.save_to_disk"):
        DataProto.load_from_disk(path)
    assert not victim.exists()


# --- across ranks, and in the future
def gather(world):
    rank = world.rank
    even = make(3, offset=rank * 3)
    even.meta_info["rank"] = rank
    gathered = even.all_gather()
    assert gathered.meta_info == {"eos_token_id": 2, "rank": rank}
    assert rows_of(gathered) == rows_of(make(6)) and len(even) == 3
    assert rows_of(make(1 + 4 * rank, offset=rank).all_gather()) == rows_of(make(6))
    for nothing in (DataProto(), make(2)[:0]):
        assert rows_of((nothing if rank == 0 else make(2)).all_gather()) == rows_of(make(2))
        assert rows_of((nothing if rank == 1 else make(2)).all_gather()) == rows_of(make(2))
    assert len(DataProto().all_gather()) == 0
    objects = DataProto.from_dict(non_tensors={"o": [rank, None, {"rank": rank}]})
    assert objects.all_gather().non_tensor_batch["o"].tolist() == [0, None, {"rank": 0}, 1, None, {"rank": 1}]
    images = with_images(rank).all_gather()
    both = media_rows(with_images(0)) + media_rows(with_images(1))
    assert media_rows(images) == both and images.batch["position_ids"].shape == (8, 4, 6)
    groups = with_images(rank)
    groups.non_tensor_batch["uid"] = np.array([["0", "0", "1", "1"], ["2", "2", "3", "3"]][rank], dtype=object)
    moved = exchange_groups(groups, [{"0": 0, "3": 1}, {"1": 0, "2": 1}])
    moved.non_tensor_batch.pop("uid")
    assert media_rows(moved) == (both[:2] + both[6:], both[2:6])[rank]
    assert moved.batch["mini_batch"].tolist() == [0, 0, 1, 1]
    other_group = dist.new_group([0, 1])
    assert len(make(2).all_gather(other_group)) == 4
    with pytest.raises(ValueError, match="ranks 0 and 1 differ"):
        make(2, width=3 + rank).all_gather()


def test_all_gather_of_two_ranks():
    run_ranks(2, gather)


def test_a_future_waits_only_in_get_and_passes_errors_on():
    gate = threading.Event()

    def late(i):
        assert gate.wait(60)
        return make(2, offset=2 * i)

    with ThreadPoolExecutor(3) as pool:
        future = DataProtoFuture.concat([pool.submit(late, i) for i in range(3)])
        parts = future.chunk(2)
        halves = parts[1].chunk(3)
        assert not gate.is_set()
        gate.set()
        for part, rows in (
            (future, make(6)),
            (parts[1], make(6)[3:]),
            (halves[2], make(6)[5:]),
            (parts[0], make(6)[:3]),
        ):
            same(part.get(), rows)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            DataProtoFuture.concat([pool.submit(open, "nowhere")]).chunk(2)[0].get()
        with pytest.raises(TypeError, match="future 1 gave a int"):
            DataProtoFuture.concat([pool.submit(make, 2), pool.submit(int)]).get()
