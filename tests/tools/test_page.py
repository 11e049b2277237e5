"""The run page in a real browser, on runs of the scripts and on folders of runs that are written for it."""

import hashlib
import json
import math
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from benchmarks.run_page import SCHEMA, response_row, write_rollouts, write_run
from lib import InputError
from tests.common import PYTHON, ROOT, SMALL, environment, fork, ran, with_slow
from tests.tools.browser import launch_options, why_no_browser
from tests.tools.test_compare import write as write_compared
from tools import compare
from tools.page import __main__ as command
from tools.page.__main__ import Args, Pages, main, make_server
from tools.page.read import read_run
from tools.page.samples import bfloat16, pack_samples
from tools.page.write import UPLOT, as_script, sections

TOOLS = [
    *("--model", str(ROOT / "data/toy_tools/model"), "--train-files", str(ROOT / "data/toy_tools/val.jsonl")),
    *("--val-files", str(ROOT / "data/toy_tools/val.jsonl"), "--multi-turn.max-turns", "3"),
    *("--max-prompt-length", "32", "--max-response-length", "48"),
]
CALCULATOR = """
from agent.tools.builtin import calculator as right

def calculator(expression: str) -> str:
    \"\"\"Works out an expression.

    Args:
        expression: with digits
    \"\"\"
    if sum(int(x) for x in expression if x.isdigit()) % 2:
        raise ValueError("<img src=x onerror=\\"document.title='run'\\">\\u202e" + 999 * "long " + "\\na second line")
    return right(expression)
"""

PATIENCE_MS = 120_000  # for anything in the browser, on a busy machine


# ---- the browser -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser() -> Iterator:
    if why := why_no_browser():
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**launch_options())
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, tmp_path) -> Iterator[Callable]:
    """Opens the page of runs. At the end no page may have asked the network, printed to the console or opened a box."""
    pages = []
    said: list[str] = []

    def open_page(*folders: Path, url: str = "", **how):
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce"} | how)
        page.set_default_timeout(PATIENCE_MS)
        pages.append(page)
        file = tmp_path / "page.html"
        if not url:
            main(Args(folders, output=file))
        allowed = url or file.as_uri()
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda box: (said.append("a dialog"), box.dismiss()))
        page.on("request", lambda request: request.url.startswith(allowed) or said.append(f"asked for {request.url}"))
        page.goto(allowed)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert said == []


def rows_of(run: Path) -> list[dict]:
    files = sorted((run / "rollouts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def validated_in(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def see_samples(page, **filters: str) -> None:
    """Scrolls to the samples, which are drawn when they are looked at. filters: of the form, by their names."""
    count(page)
    for name, value in filters.items():
        page.select_option(f"#f-{name}", value)
    if kind := filters.get("kind"):  # the form waits for more input before it draws anew
        other = page.locator("#cards header", has_text={"train": "validation", "val": "training"}[kind])
        other.first.wait_for(state="detached")
    page.locator("#samples").evaluate("e => e.scrollIntoView()")
    page.locator("#cards .t").first.wait_for()


def count(page) -> int:
    """The responses that the page says match."""
    found = page.wait_for_function("() => document.querySelector('#count').innerText.match(/^[\\d,]+(?= responses?)/)")
    return int(found.json_value()[0].replace(",", ""))


def expect_count(page, responses: int) -> None:
    page.locator("#count", has_text=re.compile(rf"^{responses:,} responses? ")).wait_for()


def tip(page) -> dict[str, str]:
    page.locator("#tip dl").wait_for()
    names, values = page.locator("#tip dt").all_inner_texts(), page.locator("#tip dd").all_inner_texts()
    return dict(zip(names, values))


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a server of this run."""
    with make_server(Pages((run,), 1e6), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Four steps of grpo.py, two updates each, so that there are ratios."""
    folder = tmp_path_factory.mktemp("runs")
    more = ["--val-every", "2", "--val-before-train", "--num-mini-batches", "2", "--total-steps", "4"]
    ran(fork("grpo", folder, *SMALL, *more, "--run-name", "toy"))
    return folder / "toy"


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    """Its calculator raises an exception at every second expression, about."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "mine.py").write_text(f"import lib.run.validation\nlib.run.validation.SHOWN = 12\n{CALCULATOR}")
    args = [*SMALL, *TOOLS, "--multi-turn.tools", f"{folder / 'mine.py'}:calculator", "--lr", "3e-4"]
    args += ["--val-every", "2", "--val-temperature", "1", "--total-steps", "2"]
    done = ran(fork("grpo", folder, *args, "--run-name", "tools"))
    (folder / "tools/printed.txt").write_text(done.stdout)
    return folder / "tools"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two runs that differ in the seed and a third with another flag; 30 steps of 4 responses of 12 tokens."""
    folder = tmp_path_factory.mktemp("made")
    for name, seed, flags in (("a", 1, {}), ("b", 2, {}), ("c", 1, {"lr": 5e-6})):
        write_run(folder / name, 30, 4, 12, seed=seed, **flags)
    return folder


# ---- runs of the scripts -------------------------------------------------------------------------
def test_the_page_of_a_run(toy, visit):
    page = visit(toy)
    card = page.locator(".run")
    assert card.locator(".pill").inner_text() == "ended" and "step 4 of 4" in card.inner_text()
    flags = card.locator(".flags").inner_text()
    for flag in ("--num-mini-batches 2 default 1", "--group-size 4 default 8", "--lr 3e-4 default 1e-6"):
        assert flag in flags
    assert "--temperature" not in flags
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    assert commit[:12] in card.inner_text() and "CPU cores" in card.inner_text()
    page.locator("#curves").evaluate("e => e.scrollIntoView()")  # they are drawn when they are looked at
    page.locator("#groups canvas").first.wait_for()
    figures = page.locator("#groups figure")
    assert figures.count() >= 60  # of every metric, and what is shown at a glance once more
    last = json.loads((toy / "metrics.jsonl").read_text().splitlines()[-2])["reward/mean"]
    glance = page.locator("#groups figure", has=page.get_by_text("reward/mean", exact=True)).first
    assert float(glance.locator(".read").inner_text().removeprefix("last ")) == pytest.approx(last, rel=1e-3)
    page.locator("#time").scroll_into_view_if_needed()
    page.locator(".stages", has_text="rollout").wait_for()
    assert count(page) == len(rows_of(toy)) + len(validated_in(toy))


SHOWN = {"log-prob": "log_probs", "log-prob before the update": "old_log_probs", "entropy": "entropy"}
SHOWN |= {"log-prob of the engine": "rollout_log_probs", "advantage": "advantages"}
SHOWN |= {"ratio of new to old policy": "ratio"}


def test_hovering_and_arrow_keys_show_the_numbers_of_a_token(toy, visit):
    page = visit(toy)
    see_samples(page, kind="train")
    box = page.locator("#cards .tokens").first
    rows = {row["response"]: row for row in rows_of(toy) if row["step"] == 4}
    row = rows["".join(box.locator(".t").all_inner_texts())]
    box.locator(".t").nth(2).hover()

    for place in (2, 3, 2):
        for name, column in SHOWN.items():
            shown = float(tip(page)[name].split(" ")[0])
            # the page keeps 1.6 %, and three digits of that are shown; what is nearly 0 is the difference of two
            assert shown == pytest.approx(row[column][place], rel=0.02, abs=2e-3), name
        if place == 2:
            box.focus()
            page.keyboard.press("Home")
            for _ in range(3):
                page.keyboard.press("ArrowRight")
        else:
            page.keyboard.press("ArrowLeft")
    assert "log-prob" in page.inner_text("#say")  # for a screen reader
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


@pytest.mark.slow
def test_turns_are_a_conversation(tools, visit):
    page = visit(tools)
    validated = validated_in(tools)
    last = [row["response"] for row in validated if row["step"] == validated[-1]["step"]]
    page.locator(".glimpse .tokens").nth(2).wait_for()
    shown = page.locator(".glimpse .tokens").all()
    assert ["".join(box.locator(".t").all_text_contents()).replace("↵", "") for box in shown] == last[:3]
    row = next(row for row in rows_of(tools) if len(row["turns"]) == 3)
    see_samples(page, kind="train")
    response = page.locator("#cards .response", has=page.locator(".turn.environment")).first
    response.scroll_into_view_if_needed()
    labels = response.locator(".turn small").all_inner_texts()
    assert labels[:3] == ["policy calls a tool", "environment", "policy"]
    assert "<tool_call>" in response.locator(".call").first.inner_text()
    given = response.locator(".turn.environment .t").first
    assert "off" in given.get_attribute("class")
    given.hover()
    assert tip(page)["not sampled"] == "given by the environment"
    policy = [turn["text"] for turn in row["turns"] if turn["by"] == "policy"]
    page.fill("#f-text", policy[1])
    expect_count(page, sum(policy[1] in row["response"] for row in rows_of(tools)))


def test_exceptions_of_tools_are_shown_as_text(tools, visit):
    """The first line, with turn and kind: in both files of samples, in the console and on the page."""
    rows = rows_of(tools)
    failed = [row for row in rows if any(", exception: " in line for line in row["tool_errors"])]
    assert 0 < len(failed) < len(rows)
    for line in (line for row in failed for line in row["tool_errors"] if ", exception: " in line):
        assert re.match("turn [12], calculator, exception: ValueError: <img src=x onerror=", line)
        assert len(line) < 350 and "a second line" not in line
    validated = validated_in(tools)
    assert {"tool_errors" in row for row in validated} == {True, False}
    shown = [number for number, row in enumerate(validated[:12], 1) if "tool_errors" in row]
    printed = re.findall(r"^tool error of sample (\d+): turn ", (tools / "printed.txt").read_text(), re.M)
    assert shown and [*dict.fromkeys(map(int, printed))] == shown
    page = visit(tools)
    page.fill("#f-text", "document.title='run'")
    see_samples(page, kind="train")
    expect_count(page, len(failed))
    errors = page.locator("#cards .response").first.get_by_role("list", name="errors of tools")
    shown = errors.get_by_role("listitem").first
    assert "<img src=x onerror=\"document.title='run'\">‹U+202E›long" in shown.inner_text()
    assert page.locator(".response img").count() == 0 and page.title() != "run"


# ---- samples: filters ------------------------------------------------------------------------------
def test_filters_find_what_the_files_hold(made, visit):
    page, rows = visit(made / "a"), rows_of(made / "a")
    page.select_option("#f-kind", "train")
    expect_count(page, len(rows))
    page.fill("#f-step-min", "11")
    page.fill("#f-step-max", "20")
    expect_count(page, 40)
    page.fill("#f-score-min", "0.5")
    right = [row for row in rows if 11 <= row["step"] <= 20 and row["score"] > 0.5]
    expect_count(page, len(right))
    word = right[0]["tokens"][5]
    page.fill("#f-text", word.upper())
    found = [row for row in right if word in row["prompt"] + "\n" + row["response"]]
    expect_count(page, len(found))
    page.click("#sample-bar button[type=reset]")
    expect_count(page, len(rows) + 64)
    page.fill("#f-length-min", "13")  # validation responses count characters
    expect_count(page, 64)
    page.fill("#f-length-min", "")
    see_samples(page, sort="low", kind="train")
    worst = min(np.mean([row["score"] for row in rows if row["step"] == step]) for step in range(1, 31))
    page.locator("#cards .sample-group:first-child", has_text=f"mean score {worst:g}").wait_for()


@pytest.mark.slow
def test_one_prompt_over_all_steps(made, visit):
    page = visit(made / "a")
    see_samples(page, kind="val")
    page.locator("#cards .sample-group", has_text="validation 3").get_by_role("button").first.click()
    expect_count(page, 2)
    assert [text.split()[1] for text in page.locator("#cards .sample-group > header").all_inner_texts()] == ["0", "20"]
    page.get_by_role("button", name="show all prompts").click()
    expect_count(page, 64)


@pytest.fixture
def seen(tmp_path) -> Path:
    """A run with two validation prompts of equal text but other images and answers, and files that are no images."""
    run = write_run(tmp_path / "seen", 1, 1, 1)
    (run / "images").mkdir()
    for name, size in (("red", (40, 30)), ("blue", (50, 30)), ("wide", (600, 2))):
        Image.new("RGB", size, "red").save(run / f"images/{name}.jpg")
    (run / "images/page.jpg").write_text("<script>alert(1)</script>")
    (run / "images/png.jpg").write_bytes(b"\x89PNG\r\n")
    (run / "images/large.jpg").write_bytes((run / "images/red.jpg").read_bytes() + bytes(200_000))
    (run / "images/link.jpg").symlink_to(ROOT / "README.md")
    shown = {"step": 0, "prompt": "<image>How many?", "response": "2", "score": 1.0, "data_source": "made/up"}
    rows = [
        shown | {"index": 0, "row_hash": name, "ground_truth": name, "images": [f"{name}.jpg"]}
        for name in ("red", "red", "blue")
    ]
    odd = ["nope", "page", "png", "large", "wide", "link", "../config", '"><script>alert(1)</script>']
    rows.append(shown | {"index": 0, "row_hash": "odd", "images": [f"{name}.jpg" for name in odd]})
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.mark.slow
def test_prompts_of_equal_text_are_apart_and_show_their_images(seen, visit):
    page = visit(seen)
    see_samples(page, kind="val")
    expect_count(page, 4)
    cards = page.locator("#cards .sample-group")
    cards.locator(".truth").nth(1).wait_for()
    assert sorted(cards.locator(".truth").all_inner_texts()) == ["ground truth blue", "ground truth red"]
    assert cards.locator(".response").count() == 4 and cards.count() == 3
    widths = {}
    for card in cards.all()[:2]:
        card.locator("img").evaluate("(img) => img.decode()")
        widths[card.locator(".truth").inner_text()] = card.locator("img").evaluate("(img) => img.naturalWidth")
    assert widths == {"ground truth red": 40, "ground truth blue": 50} and cards.locator("img").count() == 2
    assert page.get_by_role("button", name="same prompt").count() == 0
    (note,) = page.locator(".note").all_inner_texts()
    for said in ("nope.jpg (No such file", "page.jpg (cannot identify", "large.jpg (it is larger than 200 kB)"):
        assert said in note
    index, chunks, _ = pack_samples(seen, 1e6)
    assert index["shown"] == 5 and len(chunks) == 2 + 2  # two images, each once


def test_a_server_gives_images_as_images(seen):
    keys = pack_samples(seen, 1e6)[1]
    with served(seen) as url:
        kinds = Counter(httpx.get(f"{url}chunk/{key}").headers["Content-Type"] for key in keys)
    assert kinds == {"application/octet-stream": 2, "image/jpeg": 2}


def test_what_does_not_fit_is_left_out_evenly_and_said(made, visit, tmp_path):
    index, chunks, _ = pack_samples(made / "a", 20_000)
    steps = sorted({step for step, kind in zip(index["step"], index["kind"]) if index["texts"][kind] == "train"})
    assert 4 <= len(steps) < 30 and max(np.diff(steps)) <= 4 * 30 / len(steps) and (steps[0], steps[-1]) == (1, 30)
    assert sum(map(len, chunks.values())) <= 20_000
    assert index["shown"] == len(index["step"]) < index["kept"] == 120 + 64
    main(Args((made / "a",), output=tmp_path / "small.html", max_mb=0.02))
    page = visit(url=(tmp_path / "small.html").as_uri())
    assert f"The page holds {index['shown']} of 184" in page.inner_text("#count")


# ---- curves: several runs --------------------------------------------------------------------------
def test_runs_lie_over_each_other_and_seeds_are_a_range(made, visit):
    page = visit(made / "a", made / "b", made / "c")
    page.locator("#curves").evaluate("e => e.scrollIntoView()")
    page.locator("#groups canvas").first.wait_for()
    legend = page.locator("#legend button")
    assert legend.all_inner_texts() == ["a, 2 seeds", "c"]
    read = page.locator("figure", has=page.get_by_text("reward/mean", exact=True)).first.locator(".read")
    last = [read_run(made / name)["metrics"]["reward/mean"][1][-1] for name in "abc"]
    shown = [float(text) for text in read.inner_text().split()[1:]]
    assert shown == pytest.approx([(last[0] + last[1]) / 2, last[2]], rel=1e-3)
    page.check("#apart")
    assert legend.all_inner_texts() == ["a", "b", "c"]
    legend.nth(1).click()
    assert legend.nth(1).get_attribute("aria-pressed") == "false"
    shown = [float(text) for text in read.inner_text().split()[1:]]
    assert shown == pytest.approx([last[0], last[2]], rel=1e-3)
    plot = page.locator("figure", has=page.get_by_text("reward/mean", exact=True)).first.locator(".plot")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert read.inner_text().startswith("step 29 ")
    assert re.fullmatch(r"step 29 ·\s+a: \S+, c: \S+", page.inner_text("#say").strip())
    other = page.locator("figure", has=page.get_by_text("response_length/mean", exact=True)).first.locator(".read")
    assert other.inner_text().startswith("step 29 ")  # cursors move together
    page.select_option("#x-axis", "tokens")
    plot.hover()
    assert read.inner_text().startswith("tokens ")
    page.fill("#find", "metric_1 actor")
    page.locator("#groups summary", has_text="at a glance").wait_for(state="detached")
    assert page.locator("#groups figure").count() == 1 + 10  # metric_1 and metric_10 to 19
    page.evaluate("document.querySelector('#smooth').value = 20")
    page.dispatch_event("#smooth", "input")
    assert page.inner_text("output[for=smooth]") == "20 %"


def test_runs_of_one_name_are_told_apart(made, tmp_path):
    other = write_run(tmp_path / "a", 1, 1, 1)
    data, _ = Pages((made / "a", other, made / "a"), 1e6).read()
    assert [run["name"] for run in data["runs"]] == [str(made / "a"), str(other)]


# ---- text from runs --------------------------------------------------------------------------------
HOSTILE = ["</script>", "<script>document.title = 'pwned'</script>", "<img src=http://example.com/x onerror=alert(1)>"]
HOSTILE += ["\x1b[31m", "\x00", "\u202eabc", "\u200b", "\u2028", "שלום", "\u2066", "<!--", "&lt;", "\n", "{{ 7 * 7 }}"]


@pytest.fixture
def hostile(tmp_path) -> Path:
    run = write_run(tmp_path / "<b>run", 2, 2, 3, name="</script><script>alert(1)</script>")
    rng, text, long = np.random.default_rng(0), "".join(HOSTILE), 10_000 * "12345678 !"
    start = json.loads((run / "starts/1/start.json").read_text())
    start |= {"flags": {"<b>flag": [long, text]}, "command": long, "packages": {long: long, "<b>x": text}}
    (run / "starts/1/start.json").write_text(json.dumps(start))
    more = {"prompt": text, "ground_truth": text, "data_source": text, "finish_reason": "<i>stop"}
    more["advantages"] = [math.nan] * len(HOSTILE)
    turns = [{"by": "policy", "text": text, "tokens": len(HOSTILE), "reward": float("nan")}]
    rewards = json.dumps({"<u>key": text, "nan": float("nan")})
    write_rollouts(run, 3, [response_row(3, 0, HOSTILE, rng, **more, rewards=rewards)])
    write_rollouts(run, 4, [response_row(4, 0, HOSTILE, rng, **more, rewards=rewards, turns=turns)])
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "prompt": text, "response": "\ud800" + text, "score": 1.0}) + "\n")
        file.write(json.dumps({"step": 2, "prompt": long, "response": long, "score": math.nan, "ground_truth": long}))
        file.write("\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward/<script>alert(1)</script>": 1.0, f"reward/{long}": 1.0}) + "\n")
    return run


def test_text_of_a_run_is_text(hostile, visit):
    """`visit` sees to it that nothing ran, was asked for or was printed. Long text scrolls in its own box."""
    page = visit(hostile)
    see_samples(page)
    page.locator(".glimpse .t").nth(20_000).wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollHeight") < 10_000
    page.click("#open-all")
    for step, responses in (("3", 1), ("4", 1), ("2", 4)):
        page.fill("#f-step-min", step)
        page.fill("#f-step-max", step)
        expect_count(page, responses)
        see_samples(page)
        page.locator(".response").last.evaluate("row => row.scrollIntoView()")  # at once: drawing may replace the row
        for summary in page.locator("#cards summary").all():
            summary.click()
        advantage = page.locator("#cards .response header").first.inner_text()
        assert "NaN" in advantage or step == "2"
    text = page.locator("#cards .tokens", has_text="pwned").last.inner_text()
    escaped = ["␛[31m", "␀", "‹U+202E›abc", "‹U+200B›", "‹U+2028›", "‹U+2066›"]
    for shown in (HOSTILE[1], "onerror=alert(1)>", *escaped, "שלום", "<!--", "&lt;", "{{ 7 * 7 }}"):
        assert shown in text
    assert page.locator("main img, main script, main i:not(.scale i), main u").count() == 0
    assert page.title() == "<b>run · plainrl"
    page.fill("#f-text", "onerror=ALERT")
    page.fill("#f-step-min", "")
    page.fill("#f-step-max", "")
    expect_count(page, 3)


@given(st.text())
def test_json_in_a_script_element_cannot_end_it(text):
    shown = as_script({"text": text})
    assert "<" not in shown and shown.isascii() and json.loads(shown) == {"text": text}


# ---- looks -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("runs", with_slow(["toy", "tools", "hostile"], "toy", "tools"))
def test_a_phone_scrolls_in_one_direction(runs, visit, request):
    page = visit(request.getfixturevalue(runs), viewport={"width": 360, "height": 740})
    page.click("#open-all")
    see_samples(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    lines = "const r = document.createRange(); r.selectNodeContents(e.firstChild); return r.getClientRects().length;"
    labels = page.locator("#sample-bar label:visible, #sample-bar legend:visible")
    assert set(labels.evaluate_all(f"labels => labels.map((e) => {{ {lines} }})")) == {1}
    wide = "(e) => e.getBoundingClientRect().right > 361 && e.checkVisibility()"
    assert page.evaluate(f"[...document.querySelectorAll('main *')].filter({wide}).map((e) => e.outerHTML)") == []


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard(made, visit):
    """From the top of the page by Tab alone; each stop shows its focus."""
    page = visit(made / "a")
    see_samples(page)
    page.locator(".skip").focus()
    reached = Counter()
    where = "(e => [e.id || e.className || e.tagName, getComputedStyle(e).outlineStyle])(document.activeElement)"
    while (stop := page.evaluate(where))[0] != "BODY":  # after the last one
        assert stop[1] != "none", stop
        reached[stop[0]] += 1
        page.keyboard.press("Tab")
    expected = {"skip", "theme", "find", "x-axis", "smooth", "open-all", "plot", "f-kind", "f-text", "colour"}
    assert expected | {"prompt", "tokens text"} <= set(reached)


# ---- the first screen, sweeps, two responses -------------------------------------------------------
@pytest.mark.parametrize("width", with_slow([1280, 390], 390))
def test_the_first_screen_has_results_a_curve_and_samples(made, visit, width):
    page = visit(made / "a", viewport={"width": width, "height": 900})
    page.locator("#first canvas").wait_for()
    rows = [json.loads(line) for line in (made / "a/metrics.jsonl").read_text().splitlines()]
    before, after = (row["val/made/up/mean@1"] for row in rows if "val/made/up/mean@1" in row)
    [cells] = [page.locator("#first tbody tr").locator("td").all_inner_texts()]
    assert cells[0] == "val/made/up/mean@1" and cells[3] == "20"
    assert float(cells[1]) == pytest.approx(before, rel=1e-3)
    value, low, high = (float(text) for text in re.findall(r"[\d.]+", cells[2]))
    assert value == pytest.approx(after, rel=1e-3) and low < value < high
    last = page.locator(".glimpse .sample-group")
    last.first.locator(".response").wait_for()
    assert last.count() == 3 and "validation 0" in last.first.inner_text()
    bottom = "document.querySelector('#first').getBoundingClientRect().bottom"
    assert page.evaluate(bottom) < 900 or width == 390
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def write_sweep(folder: Path, settings: int, seeds: int) -> Path:
    """Runs without samples: settings differ in lr, and the larger it is the better."""
    for number in range(settings * seeds):
        setting, seed = divmod(number, seeds)
        run = folder / f"lr={setting},seed={seed}"
        run.mkdir(parents=True)
        config = {"script": "grpo.py", "seed": seed, "run_name": run.name, "total_steps": 2, "loss": "x"}
        config["lr"] = setting / 1e5
        (run / "config.json").write_text(json.dumps(config))
        lines = [{"step": 1, "reward/mean": 0.1, "timing_s/step": 1.0}]
        for step, right in ((0, 0.0), (2, setting / settings + seed / 1000)):
            lines.append({"step": step, "val/x/mean@1": right, "val/x/mean@1/ci_low": 0, "val/x/mean@1/ci_high": 1})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "logs").mkdir()  # what is no run
    return folder


@pytest.mark.slow
def test_a_folder_of_200_runs_is_a_table_of_flags_and_results(tmp_path, visit):
    page = visit(write_sweep(tmp_path / "sweep", 100, 2))
    heads = page.locator("#first th").all_inner_texts()
    assert heads == ["run", "--lr", "seeds", "step", "val/x/mean@1"]
    assert page.locator("#first tbody tr").count() == 100
    top = page.locator("#first tbody tr").first.locator("td").all_inner_texts()
    assert top == ["lr=99, 2 seeds", "9.9e-4", "2", "2", "0.9905 (0.99 to 0.991)"]
    page.get_by_role("button", name="--lr").click()  # by that flag, the smallest first
    rates = page.locator("#first tbody td:nth-child(2)").all_inner_texts()
    assert [float(rate) for rate in rates] == [setting / 1e5 for setting in range(100)]
    assert page.locator("th[aria-sort=ascending]").inner_text() == "--lr"
    assert page.evaluate("document.activeElement.textContent") == "--lr"
    assert page.locator(".run").count() == 200 and not page.locator(".run").first.is_visible()
    page.set_viewport_size({"width": 390, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_served_folder_of_runs_grows(tmp_path):
    pages = Pages((write_sweep(tmp_path / "sweep", 1, 2),), 1e6)
    stamp, data, _ = pages.fresh()
    (tmp_path / "sweep/another").mkdir()
    (tmp_path / "sweep/another/metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    later, more, _ = pages.fresh()
    names = [[run["name"] for run in json.loads(text)["runs"]] for text in (data, more)]
    assert names == [["lr=0,seed=0", "lr=0,seed=1"], ["another", "lr=0,seed=0", "lr=0,seed=1"]] and stamp != later


@pytest.mark.slow
def test_two_responses_are_compared_token_by_token(made, tmp_path, visit):
    runs = []
    for name, response in (("one", "8,15,14=1458 end"), ("two", "8,15,13,14=1458")):
        runs.append(tmp_path / name)
        (tmp_path / name).mkdir()
        (runs[-1] / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        row = {"step": 1, "prompt": "964+494", "response": response, "score": 1.0, "ground_truth": "1458"}
        (runs[-1] / "samples.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"prompt": "1+1"}) + "\n")
    page = visit(*runs)
    see_samples(page)
    page.get_by_role("button", name="same prompt, 2 times").first.click()
    expect_count(page, 2)
    cards = {name: page.locator("#cards .response", has_text=text) for name, text in (("one", "end"), ("two", "13"))}
    cards["one"].get_by_role("button", name="compare").press("Enter")
    assert "".join(cards["two"].locator(".differs").all_inner_texts()) == "13,"
    assert cards["two"].locator(".differing").inner_text() == "2 differ, 1 missing"
    assert cards["one"].locator(".differs").count() == 0
    cards["one"].get_by_role("button", name="compare").click()
    assert page.locator(".differs").count() == 0 and cards["two"].locator(".differing").inner_text() == ""


# ---- runs that are old, empty, broken -------------------------------------------------------------
def test_a_run_is_running_while_a_process_has_its_lock(tmp_path):
    run = write_run(tmp_path / "run", 1, 1, 1)
    assert read_run(run)["state"] == "ended"
    code = "import sys; from pathlib import Path; from lib.run.lock import take_lock\n"
    code += "with take_lock(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*PYTHON, "-c", code, run], cwd=ROOT, **pipes) as holder:
        holder.stdout.readline()
        assert read_run(run)["state"] == "running"
        holder.kill()
    assert read_run(run)["state"] == "stopped"


def test_numbers_that_are_not_finite_and_broken_lines_are_said(tmp_path, visit):
    run = write_run(tmp_path / "run", 3, 2, 4)
    row = {"step": 4, "actor/metric_1": None, "nonfinite": {"actor/metric_1": "nan"}, "reward/zero_variance": 0.95}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + '\nno row\n{"step": "x"}\n{"step": 5, "half')
    (run / "rollouts/step_000003-rank_0.parquet").write_bytes(b"PAR1")
    (run / ".lock").write_text('{"pid": 1}')
    page = visit(run)
    assert page.locator(".pill").inner_text() == "stopped"
    notes = page.locator(".note").all_inner_texts()
    assert any(re.match(r"metrics.jsonl: could not read row 6 \(Expect.*\), row 7 \(step is", note) for note in notes)
    assert any("step_000003-rank_0.parquet: could not read the file" in note for note in notes)
    alerts = page.locator(".alert")
    assert "actor/metric_1 not finite" in alerts.nth(1).inner_text()
    assert "equal scores in more than 90 % of the groups" in alerts.nth(0).inner_text()
    alerts.nth(0).locator("summary").click()
    assert "reward/zero_variance" in alerts.nth(0).locator(".help").inner_text()
    page.fill("#find", "metric_1")
    page.locator("#curves").evaluate("e => e.scrollIntoView()")
    page.locator("figure .nan", has_text="nan × 1").first.wait_for()


DEEP = "[" * 100_000
MALFORMED = ["", "null", "[]", "{}", '{"step": "1"}', '{"step": 1.5}', '{"step": -1}', "{", "\x00", DEEP]
MALFORMED += ['{"step": 9007199254740992}']
TEXTS = "prompt score data_source finish_reason turns images tool_errors row_hash"
VALUES = {  # of these names in a row, by file
    "metrics.jsonl": [("reward/mean", ['"x"', "1" + "0" * 400, "1" * 5000]), ("nonfinite", ['{"reward/mean": 1}'])],
    "samples.jsonl": [
        *((TEXTS, ['{"a": 1}']), ("ground_truth", ["[" * 60 + "]" * 60, "1" * 5000])),
        *(("turns", ["[null]", '[{"text": 1}]']), ("images", ["[null]"])),
    ],
}


def read_page(*folders: Path, most_bytes: float = 1e6) -> dict:
    """The page's data, as the browser gets it."""
    data, chunks = Pages(folders, most_bytes).read()
    assert sum(map(len, chunks.values())) <= most_bytes
    return json.loads(as_script(data))["runs"][0]


@pytest.mark.parametrize("name", VALUES)
def test_rows_that_cannot_be_read_are_named_and_left_out(tmp_path, name):
    run = write_run(tmp_path / "run", 2, 1, 2)
    whole, kept = read_page(run), (run / name).read_text().splitlines(keepends=True)
    rows = len(kept)
    wrong = [(key, value) for keys, values in VALUES[name] for key in keys.split() for value in values]
    for row in MALFORMED + [f'{{"step": 9, "{key}": {value}}}' for key, value in wrong]:
        (run / name).write_text("".join([*kept, row + "\n", kept[-1]]))
        read = read_page(run)
        (note,) = read["notes"]
        assert note.startswith(f"{name}: could not read row {rows + 1} (") and len(note) < 400, row[:60]
        assert read["metrics"] == whole["metrics"] and read["step"] == whole["step"], row[:60]
        more = name == "samples.jsonl"  # the row after it, which repeats the one before
        assert read["samples"]["shown"] == whole["samples"]["shown"] + more, row[:60]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.sampled_from([0, -1, 2**53, 10**400, "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["by", "tokens", "a"]), inner),
    max_leaves=5,
)
NAMES = ["step", "nonfinite", "turns", "images", "tool_errors", "row_hash", "index", "score", "prompt"]
NAMES += ["timing_s/step", "val/a/ci_low"]
ROW = st.fixed_dictionaries({"step": st.integers(0, 3) | JSON}, optional=dict.fromkeys(NAMES[1:], JSON))
CONFIG = st.dictionaries(st.sampled_from(["script", "seed", "total_steps", "history", "lr"]), JSON)
START = st.dictionaries(st.sampled_from(["command", "commit", "packages", "flags", "python", "untracked"]), JSON)


@settings(max_examples=60)
@given(st.lists(ROW, max_size=3), st.lists(ROW, max_size=3), CONFIG | JSON, START | JSON)
def test_whatever_json_a_run_holds_there_is_a_page(metrics, samples, config, start):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "starts/1").mkdir(parents=True)
        for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
            (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, value in (("config.json", config), ("starts/1/start.json", start)):
            (run / name).write_text(json.dumps(value))
        read_page(run)


COLUMN = st.sampled_from([
    *(pa.nulls(2), pa.array([1, None]), pa.array([0.5, math.inf]), pa.array(["x", None]), pa.array([True, False])),
    *(pa.array([b"\xff", b""]), pa.array([2**62, 0], pa.timestamp("us")), pa.array([{"a": 1}, None])),
    *(pa.array([[1, None], [1, 2, 3]]), pa.array([[math.nan], None]), pa.array([["x", None], []])),
    *(pa.array([[[1]], [[2]]]), pa.array([[{"by": "policy", "tokens": -1}], [{"text": "x"}]]), pa.array(["{", DEEP])),
])  # fmt: skip


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from([*response_row(1, 0, ["a"], np.random.default_rng(0)), "images"]), COLUMN | st.none()
    )
)
def test_whatever_a_file_of_training_samples_holds_there_is_a_page(columns):
    """columns: what takes the place of one; None: it is missing."""
    row = response_row(1, 0, ["a", "b", "c"], np.random.default_rng(0))
    table = pa.Table.from_pylist([row, row], SCHEMA)
    table = table.drop_columns([name for name in columns if name in table.column_names])
    for name, column in columns.items():
        table = table if column is None else table.append_column(name, column)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "rollouts").mkdir()
        (run / "metrics.jsonl").touch()
        pq.write_table(table, run / "rollouts/step_000001-rank_0.parquet")
        read_page(run)


def test_a_wrong_row_of_training_samples_is_left_out_and_named(tmp_path):
    run, rng = write_run(tmp_path / "run", 1, 1, 3), np.random.default_rng(0)
    wrong = [{"ratio": [1.0]}, {"response_mask": [True, None]}, {"tokens": ["a", None]}, {"sample": -1}]
    wrong.append({"rewards": "["})
    rows = [response_row(1, i, ["a", "b"], rng) | more for i, more in enumerate([{}, *wrong, {}])]
    write_rollouts(run, 1, rows)
    read = read_page(run)
    kinds = [read["samples"]["texts"][kind] for kind in read["samples"]["kind"]]
    assert kinds.count("train") == 2 and read["samples"]["kept"] - read["samples"]["shown"] == 5
    assert read["notes"] == [
        "rollouts/step_000001-rank_0.parquet: could not read row 2 (2 tokens, but 1 ratio), row 3 (a list of whole "
        "numbers with null in it), row 4 (tokens has null in it), row 5 (sample is no whole number from 0 to 2^53), "
        "row 6 (Expecting value: line 1 column 2 (char 1))"
    ]


FILES = ["metrics.jsonl", "samples.jsonl", "config.json", "starts/1/start.json", "waits.txt", ".lock"]
FILES += ["rollouts/step_000001-rank_0.parquet", "rollouts/step_000002-rank_0.parquet"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, "link out of the folder", "link to itself"])
def test_what_is_no_file_of_the_run_is_not_read(tmp_path, make):
    """A FIFO would block, and a link shows a file that is not of the run."""
    run, other = write_run(tmp_path / "run", 2, 1, 2), write_run(tmp_path / "other", 2, 1, 2)
    (other / "waits.txt").write_text("secret")
    for name in FILES:
        (run / name).unlink(missing_ok=True)
        if callable(make):
            make(run / name)
        else:
            (run / name).symlink_to(other / name if "out" in make else run / name)
    read = read_page(run)
    assert read["metrics"] == {} and read["samples"]["shown"] == 0 and "secret" not in str(read)
    noted = [note.split(": could not read the file (")[0] for note in read["notes"]]
    assert sorted(noted) == sorted(set(FILES) - {".lock"}) and read["state"] == "state unknown"


def test_the_page_replaces_a_link_and_does_not_follow_it(made, tmp_path):
    (tmp_path / "other").write_text("other")
    (tmp_path / "page.html").symlink_to(tmp_path / "other")
    main(Args((made / "a",), output=tmp_path / "page.html"))
    assert (tmp_path / "other").read_text() == "other" and (tmp_path / "page.html").stat().st_size > 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "page.html"]


def test_a_name_that_is_no_utf8_is_shown(tmp_path, capsys):
    main(Args((write_run(tmp_path / "run", 1, 1, 1).rename(tmp_path / "run\udcff"),)))
    assert capsys.readouterr().out.encode().endswith(b" MB\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_mb": -1.0}, r"^--max-mb \S+: give 0 or more"),
        ({"max_mb": math.nan}, r"^--max-mb \S+: give 0 or more"),
        ({"serve": 65536}, "--serve 65536: give a port from 1 to 65535, or 0 for any free one"),
        ({"runs": (Path("nope"),)}, "nope is no folder"),
        ({"runs": (Path("docs"),)}, "docs has neither config"),
        ({"output": Path("nope/page.html")}, "cannot be written"),
    ],
)
def test_what_cannot_be_shown_is_one_line(made, monkeypatch, how, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=message):
        main(Args(**{"runs": (made / "a",)} | how))


def test_a_step_larger_than_max_mb_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", 2, 1, 4)
    write_rollouts(run, 3, [response_row(3, 0, [*map(chr, range(1000, 9000))], np.random.default_rng(0))])
    samples = read_page(run, most_bytes=5000)["samples"]
    assert 3 not in samples["step"] and samples["shown"] > 0 and samples["kept"] == samples["shown"] + 1
    assert read_page(run, most_bytes=0)["samples"]["shown"] == 0


def test_the_page_needs_no_torch_and_is_its_owners_alone(made, tmp_path):
    code = "import runpy, sys; runpy.run_module('tools.page', run_name='__main__'); "
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    words = [*PYTHON, "-c", code, str(made / "a"), "--output", str(tmp_path / "page.html")]
    ran(subprocess.run(words, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300))
    assert (tmp_path / "page.html").stat().st_mode & 0o077 == 0


def test_every_alert_has_its_help_on_the_page():
    from lib.log.alerts import ALERTS, COUNTS

    helps = sections((ROOT / "docs/troubleshooting.md").read_text())
    assert {alert.section for alert in ALERTS} | {section for _, section in COUNTS.values()} <= set(helps)
    assert "<table>" in "".join(helps.values()) and 'href="http' not in helps["groups-have-equal-scores"]
    assert not re.findall(r'href="(?!https?://)', "".join(helps.values()))


# ---- a run that goes on ----------------------------------------------------------------------------
def test_a_served_page_follows_the_run_and_keeps_the_readers_place(tmp_path, visit):
    run = write_run(tmp_path / "run", 25, 4, 12)
    with served(run) as url:
        page = visit(url=url)
        page.fill("#f-score-min", "0.5")
        see_samples(page, kind="train")
        before = sum(row["score"] > 0.5 for row in rows_of(run))
        expect_count(page, before)
        place = page.locator("#cards .response").first.element_handle()
        text, top = place.inner_text(), place.bounding_box()["y"]
        write_rollouts(run, 26, [response_row(26, i, ["new"], np.random.default_rng(0), score=1.0) for i in range(3)])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 26, "reward/mean": 0.9}) + "\n")
        page.get_by_role("button", name="show what is new").wait_for()
        assert "step 26 of 25" in page.inner_text(".run")
        assert place.inner_text() == text and place.bounding_box()["y"] == pytest.approx(top, abs=1)
        page.get_by_role("button", name="show what is new").click()
        expect_count(page, before + 3)
        page.locator("#cards .sample-group").first.filter(has_text="step 26").wait_for()  # its chunk is fetched
        assert page.input_value("#f-score-min") == "0.5"
        page.close()

        etag = httpx.get(f"{url}data.json").headers["ETag"]
        assert httpx.get(f"{url}data.json", headers={"If-None-Match": etag}).status_code == 304
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}../config.json").status_code == 404
        assert httpx.get(f"{url}chunk/nope").status_code == 404
        (run / "config.json").write_text("no JSON")
        assert "config.json: could not read the file" in httpx.get(f"{url}data.json").text


def test_a_connection_without_a_request_is_closed(made, monkeypatch):
    monkeypatch.setattr(command, "IDLE_S", 0.1)
    with served(made / "a") as url:
        for said in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=60) as connection:
                connection.sendall(said)
                assert connection.recv(1) == b""


# ---- parts -----------------------------------------------------------------------------------------
def test_uplot_is_the_published_package():
    """npm package uplot 1.6.32: LICENSE (MIT) and two files of dist/."""
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in UPLOT.iterdir()} == {
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }


@given(st.lists(st.floats(width=32, allow_subnormal=False)), st.integers(1, 7))
def test_numbers_are_rounded_to_binary_digits(values, digits):
    """Half of the last digit."""
    halves = bfloat16(np.array(values, np.float32), digits)
    back = (halves.astype("<u4") << 16).view("<f4")
    exact = np.array(values, np.float32)
    finite = np.abs(exact) < 2e38  # the largest round to infinity
    np.testing.assert_allclose(back[finite], exact[finite], rtol=2.0 ** -(digits + 1))
    np.testing.assert_array_equal(back[~np.isfinite(exact)], exact[~np.isfinite(exact)])


# ---- comparisons, and gradients of other flags ---------------------------------------------------
@pytest.mark.slow
def test_settings_with_the_same_seeds_are_compared_on_the_page(tmp_path, made, visit, capsys):
    folders = [
        write_compared(tmp_path / f"{name}{seed}", seed, lr)
        for name, lr in (("a", 3e-4), ("b", 1e-4))
        for seed in (1, 2)
    ]
    compare.main(compare.Args(tuple(folders)))
    said = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    card = visit(*folders).locator(".comparison")
    assert card.locator("th").all_inner_texts() == said[0] and card.locator("td").all_inner_texts() == said[2]
    alone = visit(made / "a", made / "c").locator(".comparison")
    assert "Not compared: " in alone.inner_text() and "row_hash" in alone.inner_text()
    assert visit(made / "a", made / "b").locator(".comparison").count() == 0  # they differ in the seed alone


LENS = {"cosine": 0.5, "norm": 2.0, "ratio": 1.5, "tokens": []}
APART = {"row": 3, "position": 4, "token": "<b>", "context": "a\n", "prompt": "", "difference": 0.4}
APART |= {"coefficient": -0.25, "recorded": 0.125}


@pytest.mark.slow
def test_the_gradients_of_other_flags_are_curves_and_a_table(tmp_path, visit):
    folder = write_run(tmp_path / "run", 2, 1, 5)
    updates = [
        {"step": step, "update": 1, "choices": {"as recorded": LENS, "--loss gspo": LENS | {"tokens": [APART]}}}
        for step in (1, 2)
    ]
    (folder / "lens.json").write_text(json.dumps(updates))
    page = visit(folder)
    page.fill("#find", "lens/--loss gspo/cosine")
    page.locator("#groups figure", has_text="lens/--loss gspo/cosine").first.wait_for()
    page.locator("summary", has_text="differ most").click()
    row = page.locator(".run .scroll tbody tr").first.locator("td").all_inner_texts()
    assert row == ["--loss gspo", "1, 1, 3, 4", "a↵", "<b>", "-0.2500", "+0.1250"]


@pytest.mark.parametrize("text", ['[{"step": 1}]', '[{"step": 1, "choices": {"x": {"cosine": "a"}}}]', "[null]"])
def test_a_lens_json_that_is_none_is_noted(tmp_path, text):
    (folder := write_run(tmp_path / "run", 2, 1, 5)).joinpath("lens.json").write_text(text)
    run = read_page(folder)
    assert any(note.startswith("lens.json: could not read the file (") for note in run["notes"]) and run["lens"] == []
