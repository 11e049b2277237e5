"""grpo.py is the parent of ppo.py, remax.py and dapo.py: a diff shows the paper, and each is a page that one reads."""

import ast
import re
import subprocess

import pytest

from tests.common import ROOT

LINES = {"grpo": 310, "remax": 300, "ppo": 350, "dapo": 390}
CHANGED = {"remax": 85, "ppo": 150, "dapo": 150}  # lines of a diff to grpo.py
NESTING = 5
NO_GROUPS = {"adv_estimator", "adv_kwargs", "zero_variance"}
OWN_ARGS = {  # fields that a script has besides grpo's, has not, and has with another type, default or docstring
    "ppo": (
        {"cliprange_value", "critic_lr", "critic_model", "critic_warmup_steps"}
        | {"gamma", "gae_lambda", "gae_lambda_policy", "length_adaptive_alpha"},
        NO_GROUPS,
        {"prompts_per_step", "group_size", "num_mini_batches", "kl_coef", "kl_placement"},
    ),
    "remax": (set(), NO_GROUPS, {"prompts_per_step", "group_size"}),
    "dapo": (
        {"max_gen_batches", "overlong_buffer", "overlong_factor", "overlong_filtering"},
        set(),
        {"clip_ratio_high", "group_size", "num_mini_batches", "zero_variance"},
    ),
}


def source_of(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def definitions(source: str) -> dict[str, str]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def args_fields(source: str) -> dict[str, str]:
    """Type, default and docstring of each field of Args."""
    [args] = [node for node in ast.parse(source).body if getattr(node, "name", None) == "Args"]
    fields: dict[str, str] = {}
    for node in args.body[1:]:
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
            fields[name] = ast.unparse(node)
        elif isinstance(node, ast.Expr):  # the docstring of the field above
            fields[name] += ast.unparse(node)
    return fields


def depth(node: ast.AST) -> int:
    """Blocks within blocks below a function."""
    block = isinstance(node, ast.For | ast.While | ast.If | ast.With | ast.Try | ast.FunctionDef)
    return block + max((depth(child) for child in ast.iter_child_nodes(node)), default=0)


@pytest.mark.parametrize("script", LINES)
def test_a_script_is_a_page_and_its_stages_are_numbered_alike(script):
    source = source_of(script)
    assert len(source.splitlines()) <= LINES[script]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            assert depth(node) <= NESTING, node.name
            assert node.end_lineno - node.lineno < 90, node.name
    titles = "".join(re.findall(r"^        # ---- (.*)$", source, re.M))
    assert re.findall(r"\d", titles) == [*"1234567"]


@pytest.mark.parametrize("script", CHANGED)
def test_the_diff_is_the_paper(script):
    parent, sibling = source_of("grpo"), source_of(script)
    done = subprocess.run(["diff", "grpo.py", f"{script}.py"], cwd=ROOT, capture_output=True, text=True)
    assert sum(line[:1] in "<>" for line in done.stdout.splitlines()) <= CHANGED[script]
    assert definitions(parent)["policy_loss"] == definitions(sibling)["policy_loss"]
    order = [name for name in definitions(parent) if name in definitions(sibling)]
    assert order == [name for name in definitions(sibling) if name in definitions(parent)]


@pytest.mark.parametrize("script", OWN_ARGS)
def test_shared_flags_are_one(script):
    ours, theirs = args_fields(source_of("grpo")), args_fields(source_of(script))
    shared = [name for name in ours if name in theirs]
    different = {name for name in shared if ours[name] != theirs[name]}
    assert (theirs.keys() - ours.keys(), ours.keys() - theirs.keys(), different) == OWN_ARGS[script]
    assert shared == [name for name in theirs if name in ours]
