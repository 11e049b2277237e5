"""The documents: each file, symbol, flag and name in them exists."""

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import tyro

from lib.args import groups
from lib.cli.flags import OTHER_NAMES, switched, walk
from lib.cli.yaml_files import read_yaml
from lib.core_algos import LOSS_AGG_MODES, compute_rollout_correction
from lib.data import RLHFDataset
from lib.declared import ADV_ESTIMATORS, CRITERIA, POLICY_LOSSES, TOKEN_MASKS
from lib.log.alerts import ALERTS, COUNTS
from lib.model import load_tokenizer
from rewards import compute_score
from tests.common import ROOT, TOY_MODEL

PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCS = [*PAGES, *sorted((ROOT / "papers").glob("*.md")), *(ROOT / "docs").glob("*.ipynb")]
DOCS += [ROOT / name for name in ("README.md", ".github/CONTRIBUTING.md", "AGENTS.md", ".github/SECURITY.md")]
CODE_LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)\)")
SCRIPTS = ("grpo", "ppo", "remax", "dapo")
SCRIPT_OF = {page.name: "grpo" for page in PAGES if page.name not in ("your_own.md", "CHANGELOG.md")}
SCRIPT_OF |= {"README.md": "grpo"} | {f"{name}.md": name for name in SCRIPTS}
SNIPPET = re.compile(r"`(?:(\w+)\.py )?(--[^`]+)`")  # in a sentence or a table, flags with or without values


def files(*rooms: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """Of these folders and all below."""
    return [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in suffixes and path.is_file()]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.relative_to(ROOT).as_posix())
def test_links_lead_to_files_headings_and_the_code_that_is_quoted(doc):
    """A link to code names a symbol or quotes a line; it has no line number, which would go stale."""
    text = doc.read_text()
    assert re.findall(r"\]\([^)]*#L\d+", text) == []
    for code, file in CODE_LINK.findall(text):
        if code.split("/")[-1] != Path(file).name:  # else the link names the file itself
            assert code in (doc.parent / file).read_text(), f"{file} does not contain {code!r}"
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        page = (doc.parent / target).resolve() if target else doc
        assert page.exists(), target
        assert not anchor or page.suffix != ".md" or anchor in anchors(page), (target, anchor)


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- flags ---------------------------------------------------------------------------------------
def text_of(doc: str) -> str:
    return (ROOT / doc if doc == "README.md" else ROOT / "docs" / doc).read_text()


def args_of(script: str) -> type:
    return importlib.import_module(script).Args


def as_flags(names) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in names}


@cache
def flags_of(script: str) -> set[str]:
    """As --help writes them, with the prefixes of settings: --multi-turn, --rollout-correction.reject."""
    values = {name: value for name, value, _ in walk(args_of(script)())}
    prefixes = {name.rsplit(".", depth)[0] for name in values for depth in range(1, name.count(".") + 1)}
    negated = {re.sub(r"(\w+)$", r"no-\1", name) for name, value in values.items() if value in (True, False)}
    return {"--help"} | as_flags(values.keys() | prefixes | negated)


def choices(script: str, field: str) -> tuple:
    return get_args(get_type_hints(args_of(script))[field])


@pytest.mark.parametrize("doc", SCRIPT_OF)
def test_flags_and_their_values_are_taken(doc):
    """A flag alone is one of the script's; flags with values parse, and the algorithm takes them."""
    text = re.sub(r"^## Former flags$.*?^(?=## )", "", text_of(doc), flags=re.M | re.S)
    for script, code in dict.fromkeys(SNIPPET.findall(text)):
        script, words = script or SCRIPT_OF[doc], shlex.split(code)
        if {*words} & (OF_OTHERS | {"n", "K"}) or words[0] == "--help":
            continue
        if len(words) == 1:
            assert code in flags_of(script), (script, code)
            continue
        try:
            args = tyro.cli(args_of(script), args=switched(args_of(script), words), console_outputs=False)
        except SystemExit:
            pytest.fail(f"{doc}: {script}.py does not take {code}", pytrace=False)
        _ = args.adv_settings  # raises InputError for a wrong one
        if args.loss != "dro" or args.loss_kwargs:  # dro has no default
            _ = args.loss_settings, args.mask_settings
        if correction := args.rollout_correction.settings():
            compute_rollout_correction(*[torch.ones(2, 1)] * 3, **correction)


OF_OTHERS = """
accelerate and torchrun: --config_file --cpu --machine_rank --main_process_ip --multi_gpu --num_processes
  --max-restarts --nproc-per-node
vLLM: --enable-lora --enable-return-routed-experts --enable-scale-out --enforce-eager --generation-config --host
  --logprobs-mode --lora-modules --max-lora-rank --max-model-len --middleware --no-enable-chunked-prefill
  --override-generation-config --tensor-parallel-size --weight-transfer-config --worker-extension-cls
python -m planner: --gpus --trace
tools/, data/ and benchmarks/: --accumulation --adapter --adv-estimators --answer-template --choices --dtype --figure
  --flags --frozen-dtype --gold-key --local-dir --loss-agg-modes --losses --max-gb --merged --ours --output --ranks
  --redact-text --reference --script --step --steps --tokens --tolerance --weights --wheels
git: --binary --exclude-standard --no-ext-diff --others
pip, uv, docker, unshare and others: --extra --extra-index-url --ipc --map-root-user --net --requeue --rm
  --security-opt --ulimit --user
"""
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w(?![\w-])")
OF_OTHERS = {*FLAG.findall(OF_OTHERS)}


def flags_of_programs() -> set[str]:
    """Those that the diffs of papers/ add; parameters, fields and words of data/, benchmarks/, rewards/ and tools/."""
    diffs = "".join(file.read_text() for file in ROOT.glob("papers/*.diff"))
    names = {*re.findall(r"^\+    (\w+): ", diffs, flags=re.M)}
    for path in files("data", "rewards", "benchmarks", "tools"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Constant) and str(node.value).startswith("--"):
                names.add(node.value.removeprefix("--"))
    return as_flags(names)


RENAMED = {"--engine-ranks", "--gpu-memory", "--replicas", "--lam", "--answer-key"}  # in older configs
RENAMED |= {"--no-filter-overlong-prompts"}  # and of docs/defaults.md
FORMER_SETTINGS = ("--loss-kwargs.", "--adv-kwargs.", "--token-masks.", "--rollout-correction.reject.")
RENAMED |= as_flags(read_yaml(OTHER_NAMES, "")["defaults.md"])


def test_flags_that_documents_and_code_name_exist():
    """Code: in help, errors and comments. In a script, in a program of ours, or in one that is listed here."""
    ours = {flag for script in SCRIPTS for flag in flags_of(script)} | OF_OTHERS
    known = ours | flags_of_programs() | RENAMED
    named = {(doc.name, flag) for doc in DOCS for flag in FLAG.findall(doc.read_text()) if flag not in known}
    assert {(page, flag) for page, flag in named if not flag.startswith(FORMER_SETTINGS)} == set()
    paths = [ROOT / f"{script}.py" for script in SCRIPTS] + files("lib", "agent", "servers", "planner", "rewards")
    lines = [line for path in paths for line in path.read_text().splitlines() if "-->" not in line]  # no drawings
    assert {name for line in lines for name in FLAG.findall(line)} - ours == set()


def test_commands_start_servers_on_an_address_and_name_modules_that_exist():
    """vLLM's default is all interfaces, and in dev mode it obeys whoever comes. Modules: python -m tools.memory,
    --worker-extension-cls servers.worker.WorkerExtension."""
    rooms = ("docs", "lib", "agent", "servers", "planner", "rewards", "tools", "benchmarks")
    paths = [ROOT / "README.md", ROOT / "Makefile", *files(*rooms, suffixes=(".md", ".py", ".sh", ""))]
    text = "\n".join(path.read_text().replace("\\\n", "") for path in paths)
    commands = [line for line in text.splitlines() if re.search(r"api_server |vllm serve ", line)]
    assert len(commands) >= 2
    assert [line for line in commands if "--host" not in line] == []
    ours = r"(?:-m |--worker-extension-cls )((?:lib|servers|tools|data|benchmarks)(?:\.[a-z_]\w*)+)"
    named = {*re.findall(ours, text)}
    assert {"tools.memory", "tools.page", "servers.worker"} <= named
    assert [module for module in named if importlib.util.find_spec(module) is None] == []


# ---- metrics ---------------------------------------------------------------------------------------
GROUPS = "actor|agent|async|critic|perf|reward|response_length|rollout|timing_s|training|val"
METRIC = re.compile(rf"`((?:{GROUPS})/[^` ]+)`")


def test_troubleshooting_has_a_section_for_each_alert_and_its_metrics_are_explained():
    """In the first column of a table, where runs of all scripts look for what they log."""
    lines = [line for page in PAGES if page.name != "troubleshooting.md" for line in page.read_text().splitlines()]
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    reasons = ("dead", "rollout_correction", "zero_variance", "token_masks")
    stages = ("weight_sync", "rollout", "reward", "log_probs", "advantages", "update", "step")
    explained |= {f"training/rows_dropped/{reason}" for reason in reasons} | {f"timing_s/{stage}" for stage in stages}
    named = set(METRIC.findall(text_of("troubleshooting.md")))
    assert len(named) > 40 and named - explained == set()
    assert {alert.metric for alert in ALERTS} <= named
    sections = {alert.section for alert in ALERTS} | {section for _, section in COUNTS.values()}
    assert sections - anchors(ROOT / "docs/troubleshooting.md") == set()


# ---- data ----------------------------------------------------------------------------------------
def test_the_row_of_the_readme_is_one(tmp_path):
    [row] = re.findall(r"^```json\n(.*)\n```", text_of("README.md"), flags=re.M)
    (tmp_path / "a.jsonl").write_text(row)
    [item] = RLHFDataset(tmp_path / "a.jsonl", load_tokenizer(TOY_MODEL), max_prompt_length=32)
    truth = item["reward_model"]["ground_truth"]
    assert compute_score(item["data_source"], f"={truth}", truth, item["extra_info"])["score"] == 1


def test_the_code_in_the_readme_is_that_of_grpo():
    """Line by line; `...` stands for lines that are left out."""
    [code] = re.findall(r"^```python\n(.*?)^```", text_of("README.md"), flags=re.M | re.S)
    parts = [part.strip("\n") for part in re.split(r"^ *\.\.\.$|^$", code, flags=re.M) if part.strip()]
    source, position = (ROOT / "grpo.py").read_text(), 0
    for part in parts:
        assert f"{part}\n" in source[position:], part
        position += source[position:].index(part) + len(part)
    assert "advantages = (scores - mean) / (std" in code and "torch.minimum(losses, dual_clip)" in code


# ---- tables --------------------------------------------------------------------------------------
def test_tables_of_algorithms_are_complete():
    tables = {
        "Advantages": ADV_ESTIMATORS,
        "Policy losses": POLICY_LOSSES,
        "Aggregation": LOSS_AGG_MODES,
        "KL to the start model": get_args(groups.KLEstimator),
        "Token masks": TOKEN_MASKS,
        "Groups with equal scores": choices("dapo", "zero_variance"),
        "Rollout correction": CRITERIA,
    }
    assert choices("grpo", "loss_agg_mode") == LOSS_AGG_MODES
    sections = re.split(r"^## ", text_of("algorithms.md"), flags=re.M)
    for title, names in tables.items():
        [section] = [section for section in sections if section.startswith(title)]
        rows = re.findall(r"^\| (`[^|]+`) \|", section, flags=re.M)
        listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
        assert sorted(listed) == sorted(names), title


def test_what_other_files_name_is_there():
    linked = set(re.findall(r"\]\(([^)#]+)", text_of("index.md")))
    assert {page.name for page in PAGES} - linked == {"index.md"}
    page, requirements = text_of("installation.md"), (ROOT / "requirements.txt").read_text()
    assert {*re.findall(r"torch==[\d.]+", page)} == {*re.findall(r"^torch==[\d.]+", requirements, flags=re.M)}
    assert all((ROOT / "tools/launch" / name).exists() for name in re.findall(r"\brequirements-\w+\.txt", page))
    [fast] = re.findall(r"^FAST := (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert [name for name in fast.split() if not (ROOT / "tests" / name).exists()] == []
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
