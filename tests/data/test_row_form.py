"""Rows in the forms of other tools: text prompts, questions and answers, with and without a chat template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import grpo
from lib import InputError
from lib.args.data import columns_of
from lib.cli.flags import with_line_breaks
from lib.data import RLHFDataset
from lib.data.chat_template import set_chat_template
from lib.data.rows import RowForm, template_fields
from tests.common import SMALL, TOY_MODEL, fork, parse_flags, ran, rollouts
from tests.data.test_dataset import dataset_of, error_of, jsonl_and_parquet, make_tokenizer, write_jsonl

QUESTION = {"question": "1+1", "answer": "so #### 2", "level": 3}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def text_of(item, tokenizer):
    return tokenizer.decode(item["raw_prompt_ids"])


def test_a_template_names_columns_and_a_system_prompt_goes_first(tmp_path):
    tokenizer, form = make_tokenizer(), {"prompt_template": "Q{level}: {question} {{x}}", "system_prompt": "Be brief."}
    dataset = dataset_of(tmp_path, [QUESTION], tokenizer, columns={"answer": "answer"}, **form)
    assert text_of(dataset[0], tokenizer) == "<system: Be brief.><user: Q3: 1+1 {x}><assistant: "
    of_messages = [{"prompt": MESSAGES}, {"prompt": MESSAGES[1:]}]
    dataset = dataset_of(tmp_path, of_messages, tokenizer, system_prompt="Be brief.")
    assert [row["raw_prompt"][0]["content"] for row in (dataset[0], dataset[1])] == ["s", "Be brief."]
    dataset = dataset_of(tmp_path, of_messages, tokenizer, filter_overlong_prompts=False)
    assert dataset[0]["raw_prompt"] == MESSAGES


def test_without_a_chat_template_the_prompt_is_its_text(tmp_path):
    """With the tokens that the tokenizer puts around a text."""
    tokenizer = make_tokenizer(template=None)
    dataset = dataset_of(tmp_path, [QUESTION], tokenizer, prompt_template="Question: {question}\nAnswer:")
    assert text_of(dataset[0], tokenizer) == "[eos]Question: 1+1Answer:"  # its vocabulary has no line break
    assert text_of(dataset_of(tmp_path, [{"prompt": MESSAGES[1:]}], tokenizer)[0], tokenizer) == "[eos]u"
    no_bos = AutoTokenizer.from_pretrained(TOY_MODEL)
    no_bos.chat_template = None
    for text, reason in ("", "the prompt is empty"), ("\ud800", r"the prompt has '\ud800', half of a character"):
        bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "1+1"}, {"prompt": text}])
        assert f"bad.jsonl row 1: {reason}" in error_of(bad, no_bos, max_prompt_length=60)
    several = write_jsonl(tmp_path / "several.jsonl", [{"prompt": MESSAGES}])
    message = error_of(several, tokenizer, max_prompt_length=60)
    assert "several.jsonl row 0: a prompt of 2 messages needs a chat template" in message
    assert "--chat-template FILE" in message


def test_a_chat_template_comes_from_a_file_or_is_taken_away(tmp_path):
    tokenizer = make_tokenizer()
    before = tokenizer.chat_template
    own = "{% generation %}{{ messages[0].content }}{% endgeneration %}?"
    (tmp_path / "chat.jinja").write_text(own)
    for path, template in ("", before), ("none", None), (str(tmp_path / "chat.jinja"), own):
        set_chat_template(tokenizer, path)
        assert tokenizer.chat_template == template
    (tmp_path / "bad.jinja").write_text("\n{% for %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    (tmp_path / "empty.jinja").write_text(" \n")
    reasons = {"bad": "bad.jinja line 2: ", "latin": "not UTF-8", "absent": "cannot be read", "empty": "file is empty"}
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=f"--chat-template .*{reason}"):
            set_chat_template(tokenizer, str(tmp_path / f"{name}.jinja"))


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
ASKED += [{"role": "assistant", "content": "2"}, {"role": "user", "content": " 3+4\n"}]


SHOWN = {  # of each message: how many rows' prompts are incomplete, or None: a question is left out
    "{{ m.content[:2] }}": None,
    "{% if loop.first %}{{ m.content }}{% endif %}": None,
    "{# nothing #}<user>": None,
    "{{ m.content | trim | replace('+', ' ') | upper }}": 0,
    "{% if loop.last %}{{ m.content }}{% endif %}": 2,
    "{% if m.role == 'user' %}{{ m.content }}{% endif %}": 2,
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}": 0,
}


@pytest.mark.parametrize(("body", "incomplete"), SHOWN.items())
def test_a_chat_template_writes_the_question(body, incomplete, tmp_path):
    """Else all prompts are the same. Other messages may be left out, which is counted."""
    tokenizer = make_tokenizer(template=f"{{% for m in messages %}}<user>{body}{{% endfor %}}")
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ASKED[-1:]}, {"prompt": ASKED}, {"prompt": ASKED[1:]}])
    if incomplete is None:
        message = error_of(file, tokenizer, max_prompt_length=99)
        place = "row 1: {} message 3" if "loop.first" in body else "row 0: {} message 0, the question"
        assert place.format("the chat template leaves out text of") in message
    else:
        assert RLHFDataset(file, tokenizer, max_prompt_length=99).incomplete == incomplete


def test_files_of_one_name_are_two_data_sources(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
    names = ["a/train", "b/train", "sums"]
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [QUESTION]) for name in names]
    form = {"max_prompt_length": 60, "columns": {"prompt": "question"}}
    rows = RLHFDataset([*files, files[0]], make_tokenizer(), **form)
    assert [rows[i]["data_source"] for i in range(4)] == [*names, "a/train"]
    assert RLHFDataset(files[:1], make_tokenizer(), **form).data_sources == {"train"}


def test_a_template_is_text_and_names():
    for template, reason in {
        "{question": "expected '}'",
        "Answer:": "names no column",
        "{0}": "must be the name of a column",
        "{question:>9999999999}": "must be the name of a column",
    }.items():
        with pytest.raises(InputError, match=reason):
            template_fields(template)


@given(st.text(), st.text())
def test_a_template_puts_columns_in_as_they_are(before, value):
    """Also braces in a column, which are not read again."""
    template = before.replace("{", "{{").replace("}", "}}") + "{question}"
    row = RowForm(prompt_template=template).in_verls_form({"question": value}, "s")
    assert row["prompt"] == [{"role": "user", "content": before + value}]


def test_a_line_break_can_be_typed():
    """What a shell leaves of "...": a backslash and an n."""
    assert with_line_breaks(r"Q: {question}\nA:\n\n") == "Q: {question}\nA:\n\n"
    assert with_line_breaks(r"\\nabla \boxed{{}} \t \\") == r"\nabla \boxed{{}} \t \\"
    args = parse_flags(grpo.Args, ["--stop", r"\n", r"\\n", "x"])
    assert args.rollout.sampling().stop == ("\n", r"\n", "x")


RENAMED = {"prompt": "q", "answer": "a", "data_source": "source", "extra_info": "meta"}
OTHER = {"q": "1+1", "a": "2", "source": "mine", "meta": {"index": 7}}


@jsonl_and_parquet
def test_columns_have_any_name_and_none_is_lost(write, tmp_path):
    """A column of the name that another one takes over is the scorer's, as without a column extra_info."""
    own = {"prompt": "not it", "answer": "3", "data_source": "other", "reward_model": {"ground_truth": "4"}}
    for more, index in ((own | {"extra_info": {"index": 8}, "level": 1}, 7), ({}, 7), (own, 7)):
        file = write(tmp_path / f"a.{write.__name__[6:]}", [OTHER | more])
        rows = RLHFDataset(file, make_tokenizer(), max_prompt_length=60, columns=RENAMED)
        assert text_of(rows[0], rows.tokenizer) == "<user: 1+1><assistant: " and rows.data_sources == {"mine"}
        assert rows[0]["reward_model"] == {"ground_truth": "2"} and rows[0]["index"] == index
        kept = {name: value for name, value in more.items() if name in RENAMED}
        assert rows[0]["extra_info"] == kept | {"index": 7}
    flat = {name: value for name, value in (OTHER | own).items() if name != "meta"}
    columns = {name: column for name, column in RENAMED.items() if name != "extra_info"}
    file = write(tmp_path / f"b.{write.__name__[6:]}", [flat])
    item = RLHFDataset(file, make_tokenizer(), max_prompt_length=60, columns=columns)[0]
    assert item["extra_info"] == {"a": "2", "prompt": "not it", "answer": "3", "data_source": "other"}


@jsonl_and_parquet
def test_a_column_that_no_row_has_is_named_with_those_that_are_there(write, tmp_path):
    """Each of --columns, though another file has it."""
    good = write(tmp_path / f"a.{write.__name__[6:]}", [OTHER | {"absent": "x"}])
    file = write(tmp_path / f"b.{write.__name__[6:]}", [OTHER])
    for name in ("prompt", "answer", "data_source", "videos"):
        columns = {"prompt": "q"} | {name: "absent"}
        said = error_of([good, file], make_tokenizer(), max_prompt_length=60, columns=columns)
        assert said.startswith(f"{file}") and said.endswith(": no column 'absent'; it has q, a, source, meta")


@pytest.mark.parametrize(
    ("change", "form", "said"),
    [
        ({"source": None}, {}, "'source' is null; it must be text"),
        ({"meta": [1]}, {}, "'meta' is [1]; it must be a dict"),
        ({"q": 3}, {}, "'q' is not text or a list of messages"),
        ({"a": None}, {}, "no answer in column 'a'"),
        ({}, {"prompt_template": "{task}"}, "no column 'task'"),
        ({"tags": ["x"]}, {"prompt_template": "{tags}"}, "needs text in column 'tags', which is a list"),
    ],
)
def test_an_error_of_a_row_names_the_column_as_the_row_does(change, form, said, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [OTHER | change])
    message = error_of(file, make_tokenizer(), max_prompt_length=60, columns=RENAMED, **form)
    assert f"{file} row 0: " in message and said in message


def test_columns_are_names_and_columns():
    with pytest.raises(InputError, match=r"^--columns takes no promt, only prompt, answer, "):
        parse_flags(grpo.Args, ["--columns", "promt=q"])
    assert columns_of(["prompt=a=b", "answer= x"]) == {"prompt": "a=b", "answer": " x"}


SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "truth": float(ground_truth), "level": float(extra_info["level"])}
"""


def test_a_base_model_trains_on_text_prompts_up_to_a_stop_string(tmp_path):
    """As docs/data.md says. The trained tokens are those of the text, and of a response that ends with the string."""
    rows = [{"question": f"{i}+{i}", "answer": 2 * i, "level": 1} for i in range(8)] * 2
    (tmp_path / "length.py").write_text(SCORER)
    files = ["--train-files", str(write_jsonl(tmp_path / "sums.jsonl", rows))]
    base = ["--chat-template", "none", "--prompt-template", r"{question}\n=", "--columns", "answer=answer"]
    more = ["--reward", f"{tmp_path}/length.py:compute_score", "--stop", "1", "--total-steps", "2"]
    small = [*SMALL[:-2], *files, *base, *more, "--val-files", "none", "--save-rollouts", "all", "--run-name", "run"]
    done = ran(fork("grpo", tmp_path, *small, "--max-train-samples", "15"))
    assert "training prompts: 15 (prompt_too_long 0, not_drawn 1) from " in done.stdout
    samples = rollouts(tmp_path / "run").values()
    assert {row["prompt"] for row in samples} == {f"{i}+{i}\n=" for i in range(8)}
    stopped = [row for row in samples if "1" in row["response"]]
    assert stopped and all(row["response"].index("1") == len(row["response"]) - 1 for row in stopped)
