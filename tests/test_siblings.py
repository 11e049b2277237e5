"""grpo.py is the parent of ppo.py, remax.py and dapo.py: a fix lands in all four or not at all.

Functions and classes of one name have one body, apart from check_flags and main. Args fields of one name have one type,
default and docstring, apart from OWN_ARGS. Common imports have one order. Everything else outside the docstring that
differs, or is left out, carries `# PPO:`, `# REMAX:` or `# DAPO:`; the indentation under such a line is no difference.
"""

import ast
import re
from difflib import SequenceMatcher
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN_ARGS = {  # fields that a script has besides grpo's, has not, and has with another type, default or docstring
    "ppo": {
        "new": {
            *("cliprange_value", "critic_lr", "critic_model", "critic_warmup_steps"),
            *("gamma", "lam", "lam_policy", "length_adaptive_alpha"),
        },
        "missing": {"adv_estimator", "adv_kwargs", "reward_keys", "singleton", "zero_variance"},
        "different": {
            *("prompts_per_step", "group_size", "num_mini_batches"),
            *("kl_coef", "kl_estimator", "kl_placement"),
        },
    },
    "remax": {
        "new": set(),
        "missing": {"adv_estimator", "adv_kwargs", "reward_keys", "singleton", "zero_variance"},
        "different": {"prompts_per_step", "group_size"},
    },
    "dapo": {
        "new": {"max_gen_batches", "overlong_buffer", "overlong_factor", "overlong_filtering"},
        "missing": set(),
        "different": {"clip_ratio_high", "num_mini_batches", "zero_variance"},
    },
}


def lines_of(source: str, node: ast.stmt) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def definitions(source: str) -> dict[str, str]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: lines_of(source, node) for node in nodes}


def args_fields(source: str) -> dict[str, str]:
    """Type, default and docstring of each field of Args."""
    [args] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    fields = {}
    for node in args.body:
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
            fields[name] = lines_of(source, node)
        else:  # the docstring of the field above
            fields[name] += "\n" + lines_of(source, node)
    return fields


def imported_names(source: str) -> list[str]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [f"{getattr(node, 'module', '')} {alias.name}" for node in nodes for alias in node.names]


def main_lines(source: str) -> list[str]:
    """What is neither docstring, import nor Args, without blank lines."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        docstring = isinstance(node, ast.Expr)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "name", None) == "Args":
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return [line for line in lines if line.strip()]


def drifted_functions(parent: str, sibling: str) -> list[str]:
    ours, theirs = definitions(parent), definitions(sibling)
    shared = ours.keys() & theirs.keys() - {"Args", "check_flags", "main"}
    return [
        f"{name} is not grpo.py's: make them one, or move the difference to main or to a function of another name"
        for name in sorted(shared)
        if ours[name] != theirs[name]
    ]


def drifted_args(parent: str, sibling: str, own: dict[str, set[str]]) -> list[str]:
    ours, theirs = args_fields(parent), args_fields(sibling)
    shared = [name for name in ours if name in theirs]
    found = {
        "new": theirs.keys() - ours.keys(),
        "missing": ours.keys() - theirs.keys(),
        "different": {name for name in shared if ours[name] != theirs[name]},
    }
    problems = [
        f"Args: {kind} fields are {sorted(found[kind])}, OWN_ARGS has {sorted(own[kind])}: mend the script or the list"
        for kind in found
        if found[kind] != own[kind]
    ]
    if shared != [name for name in theirs if name in ours]:
        problems.append("Args: fields that grpo.py has too stand in another order than there")
    return problems


def drifted_imports(parent: str, sibling: str) -> list[str]:
    ours, theirs = imported_names(parent), imported_names(sibling)
    same_order = [name for name in ours if name in theirs] == [name for name in theirs if name in ours]
    return [] if same_order else ["imports that grpo.py has too stand in another order than there"]


def hunks(parent: list[str], sibling: list[str]) -> list[tuple[list[str], list[str]]]:
    """Where the lines differ: (parent's, sibling's). Brackets alone do not end a hunk; a line that is only indented
    otherwise is equal while all lines since the last hunk are moved as far, or not at all."""
    found, bridge, shift = [], ([], []), 0
    matcher = SequenceMatcher(
        None, [line.strip() for line in parent], [line.strip() for line in sibling], autojunk=False
    )
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            if found and not any(re.search(r"\w", line) for line in bridge[1]):
                found[-1][0].extend([*bridge[0], *parent[i:i_end]])
                found[-1][1].extend([*bridge[1], *sibling[j:j_end]])
            else:
                found.append((parent[i:i_end], sibling[j:j_end]))
            bridge, shift = ([], []), None
            continue
        bridge = parent[i:i_end], sibling[j:j_end]
        for ours, theirs in zip(*bridge):
            moved = len(theirs) - len(ours)
            if shift is not None and moved not in (0, shift):
                found.append(([ours], [theirs]))
            shift = moved
    return found


def unmarked_hunks(parent: str, sibling: str, marker: str) -> list[str]:
    problems = []
    for ours, theirs in hunks(main_lines(parent), main_lines(sibling)):
        if not any(marker in line for line in theirs):
            diff = "\n".join([*(f"- {line}" for line in ours), *(f"+ {line}" for line in theirs)])
            problems.append(
                f"differs from grpo.py without a {marker!r}: make them one; if it is the algorithm's own, say so in "
                f"a comment with {marker!r} (for lines left out, in their place)\n{diff}"
            )
    return problems


def differences(parent: str, sibling: str, script: str, own: dict[str, set[str]]) -> list[str]:
    return [
        *drifted_functions(parent, sibling),
        *drifted_args(parent, sibling, own),
        *drifted_imports(parent, sibling),
        *unmarked_hunks(parent, sibling, f"# {script.upper()}:"),
    ]


@pytest.mark.parametrize("script", OWN_ARGS)
def test_a_sibling_differs_from_grpo_in_its_algorithm_only(script):
    texts = [(ROOT / f"{name}.py").read_text() for name in ("grpo", script)]
    problems = differences(*texts, script, OWN_ARGS[script])
    if problems:
        pytest.fail("\n\n".join(f"{script}.py: {problem}" for problem in problems), pytrace=False)


# ---- the checks themselves -----------------------------------------------------------------------

PARENT = '''"""Group."""

import json
import math
from lib import InputError, run

NAMES = {"a", "b"}


@dataclass
class Args:
    # ---- run
    run_name: str = ""
    """its folder"""
    seed: int = 1
    """seed"""
    lr: float = 1e-4
    """learning rate"""


@dataclass
class Sizes:
    rows: int


def sizes(args):
    return Sizes(args.rows)


def main(args):
    for step in range(9):
        batch = engine.generate(
            prompts,
            seeds,
        )
        scores = score(batch)
        for part in batch.split(2):
            backward(part)
            optimizer.step()
        log(args.seed)


if __name__ == "__main__":
    run(main)
'''
NONE = {"new": set(), "missing": set(), "different": set()}


def edited(*edits: tuple[str, str]) -> str:
    text = PARENT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


WRAPPED = [
    ("        batch = engine", "        while short:  # DAPO: fill\n            batch = engine"),
    (
        "            prompts,\n            seeds,\n        )",
        "                prompts,\n                seeds,\n            )",
    ),
    ("        scores =", "            scores ="),
]


@pytest.mark.parametrize(
    "edits, own",
    [
        ([], NONE),
        ([('"""Group."""', '"""Dynamic."""')], NONE),
        ([("import math\n", "import math\nimport time\n")], NONE),
        ([("lr: float = 1e-4", "lr: float = 1e-6")], NONE | {"different": {"lr"}}),
        ([("seed: int = 1\n", 'clip: float = 0.2\n    """bound"""\n    seed: int = 1\n')], NONE | {"new": {"clip"}}),
        ([('    lr: float = 1e-4\n    """learning rate"""\n', "")], NONE | {"missing": {"lr"}}),
        ([("backward(part)", "backward(part, keep)  # DAPO: kept")], NONE),
        ([("            optimizer.step()", "            # DAPO: no update")], NONE),
        ([("def main", "def keep(batch):  # DAPO: filter\n    return batch\n\n\ndef main")], NONE),
        ([("generate(\n            prompts,", "sample(\n            prompts,  # DAPO: more")], NONE),
        (WRAPPED, NONE),
    ],
)
def test_what_is_the_algorithms_own_passes(edits, own):
    assert differences(PARENT, edited(*edits), "dapo", own) == []


@pytest.mark.parametrize(
    "edits, own, problem",
    [
        ([("return Sizes(args.rows)", "return Sizes(args.rows + 1)  # DAPO: more")], NONE, "sizes is not grpo.py's"),
        ([("rows: int", "rows: float  # DAPO: more")], NONE, "Sizes is not grpo.py's"),
        (
            [("@dataclass\nclass Sizes", "@dataclass(frozen=True)  # DAPO:\nclass Sizes")],
            NONE,
            "Sizes is not grpo.py's",
        ),
        ([("lr: float = 1e-4", "lr: float = 1e-6")], NONE, r"different fields are \['lr'\], OWN_ARGS has \[\]"),
        ([("seed: int", "seed: float")], NONE, r"different fields are \['seed'\]"),
        ([('"""learning rate"""', '"""rate"""')], NONE, r"different fields are \['lr'\]"),
        ([], NONE | {"different": {"lr"}}, r"different fields are \[\], OWN_ARGS has \['lr'\]"),
        ([("seed: int", "seeds: int")], NONE, r"new fields are \['seeds'\]"),
        ([("seed: int", "seeds: int")], NONE | {"new": {"seeds"}}, r"missing fields are \['seed'\]"),
        (
            [
                ('    seed: int = 1\n    """seed"""\n', ""),
                ('rate"""\n', 'rate"""\n    seed: int = 1\n    """seed"""\n'),
            ],
            NONE,
            "another order",
        ),
        ([("import json\nimport math\n", "import math\nimport json\n")], NONE, "imports"),
        ([("InputError, run", "run, InputError")], NONE, "imports"),
        ([("backward(part)", "backward(part, keep)")], NONE, r"\+             backward\(part, keep\)"),
        ([("            optimizer.step()\n", "")], NONE, r"- +optimizer.step\(\)"),
        ([("            optimizer.step()", "        optimizer.step()")], NONE, r"\+         optimizer.step\(\)"),
        ([('"a", "b"', '"a"')], NONE, "NAMES"),
        ([("def main", "def keep(batch):\n    return batch\n\n\ndef main")], NONE, "def keep"),
        ([("batch.split(2):", "batch.split(4):  # PPO: more")], NONE, "without a '# DAPO:'"),
        ([*WRAPPED, ("batch.split(2)", "batch.split(4)")], NONE, "split"),
        ([*WRAPPED, ("        log(", "            log(")], NONE, r"\+             log"),
    ],
)
def test_what_drifts_is_found(edits, own, problem):
    [found] = [p for p in differences(PARENT, edited(*edits), "dapo", own) if re.search(problem, p)]
    assert found
