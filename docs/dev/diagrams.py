"""The diagrams: `python -m docs.dev.diagrams` writes docs/step.svg, docs/processes.svg and docs/house.svg."""

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1]
STYLE = """
svg { font: 13px system-ui, sans-serif; --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #6e7781; --box: #f6f8fa;
  --engine: #cfe3ff; --train: #d3f0d8; --score: #ffe9c2; --wait: #eceff2; }
@media (prefers-color-scheme: dark) { svg { --paper: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #8b949e;
  --box: #161b22; --engine: #1b3a66; --train: #1d4428; --score: #5a4312; --wait: #22272e; } }
text { fill: var(--ink); } .dim { fill: var(--dim); } .bold { font-weight: 600; }
.code { font-family: ui-monospace, monospace; font-size: 12px; }
.paper { fill: var(--paper); } .box { fill: var(--box); } .engine { fill: var(--engine); }
.train { fill: var(--train); } .score { fill: var(--score); } .wait { fill: var(--wait); }
rect { stroke: var(--line); stroke-width: 1; } .paper { stroke: none; }
path { stroke: var(--line); stroke-width: 1.5; fill: none; marker-end: url(#head); } marker path { fill: var(--line); }
"""
HEAD = '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
HEAD += '<path d="M0 0L8 4L0 8z" style="marker-end: none"/></marker></defs>'


def svg(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="8"/>'
    head = f'<svg {size} role="img"><title>{title}</title><style>{STYLE}</style>{HEAD}{paper}'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def arrow(*points: tuple[float, float]) -> str:
    return f'<path d="M{" L".join(f"{x} {y}" for x, y in points)}"/>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>'


def card(x: int, y: int, title: str, where: str, columns: str, kind: str, width: int = 186) -> Iterator[str]:
    """A stage of the step: who computes it, and the columns of the batch that it writes."""
    names = columns.split()
    yield box(x, y, width, 52 + 17 * len(names), kind)
    yield text(x + 10, y + 20, title, "bold")
    yield text(x + 10, y + 37, where, "dim")
    for line, name in enumerate(names):
        yield text(x + 10, y + 57 + 17 * line, name, "code column")


def step() -> Iterator[str]:
    yield text(24, 28, "One step: each stage writes columns of the batch, one row per response (B rows)", "bold")
    sampled = "prompts responses response_mask rollout_log_probs finish_reason"
    yield from card(24, 110, "1 Rollout", "engine: vLLM, hf, servers", sampled, "engine")
    yield from card(268, 60, "2 Reward", "scorers in processes", "token_level_scores reward_extra_info", "score")
    passes = "old_log_probs entropys ref_log_prob values"
    yield from card(268, 192, "3 Log-probs", "policy, reference, critic", passes, "train")
    all_ranks = "token_level_rewards advantages returns loss_mask denominator_mask"
    yield from card(512, 110, "4 Advantages", "from the rows of all ranks", all_ranks, "train")
    yield from card(756, 110, "5 Update", "micro-batches, AdamW", "log_probs entropy", "train")
    yield arrow((210, 150), (239, 150), (239, 105), (266, 105))
    yield arrow((210, 210), (239, 210), (239, 250), (266, 250))
    yield arrow((454, 105), (483, 105), (483, 150), (510, 150))
    yield arrow((454, 250), (483, 250), (483, 210), (510, 210))
    yield arrow((698, 170), (754, 170))
    yield arrow((849, 196), (849, 345), (117, 345), (117, 249))
    sync = "weight sync: the engine gets the new weights; a checksum and the log-probs of a probe verify them"
    yield text(483, 364, sync, "dim", "middle")
    yield text(361, 177, "(2 and 3 run at the same time)", "dim", "middle")


# ---- processes -----------------------------------------------------------------------------------
LANES = {
    "Colocated (default)": [
        ("GPU 0-7", "rollout:4 log-probs:2 update:3 rollout:4 log-probs:2 update:3"),
        ("", "Each process trains and has an engine, which frees its memory during the update."),
    ],
    "Dedicated servers: --rollout-gpus 2": [
        ("GPU 0-5", "wait:4 log-probs:2 update:3 wait:4 log-probs:2 update:3"),
        ("GPU 6-7", "rollout:4 wait:5 rollout:4 wait:5"),
        ("", "The job starts vLLM servers on the last GPUs. Both sides wait for each other."),
    ],
    "Asynchronous: --rollout-gpus 2 --async-level 1": [
        ("GPU 0-5", "wait:4 log-probs:2 update:3 log-probs:2 update:3 log-probs:2 update:2"),
        ("GPU 6-7", "rollout:4 rollout:5 rollout:5 rollout:4"),
        ("", "Servers sample the next batch during the update, with weights that are one step old."),
    ],
}
KINDS = {"rollout": "engine", "log-probs": "train", "update": "train", "wait": "wait"}


def processes() -> Iterator[str]:
    y = 28
    for title, lanes in LANES.items():
        yield text(24, y, title, "bold")
        for name, work in lanes:
            y += 34 if name else 22
            if name:
                yield text(24, y, name, "code")
                yield from lane(y - 19, work)
            else:
                yield text(100, y, work, "dim")
        y += 40
    yield arrow((100, y - 14), (892, y - 14))
    yield text(892, y + 4, "time", "dim", "end")


def lane(y: int, work: str) -> Iterator[str]:
    x = 100
    for part in work.split():
        what, length = part.split(":")
        yield box(x, y, 44 * int(length) - 3, 28, KINDS[what])
        yield text(x + 22 * int(length) - 1, y + 19, what, "dim" if what == "wait" else "", "middle")
        x += 44 * int(length)


# ---- packages ------------------------------------------------------------------------------------
PACKAGES = "run log reward sandbox rollout model data distributed core_algos"  # of lib, below setup
BASE = "data_proto args declared columns sampling cli"
WINGS = {"agent": "episodes, tools, agents", "servers": "vLLM servers", "planner": "memory and time"}


def house() -> Iterator[str]:
    yield text(24, 28, "Who imports what: always downwards, and within lib from left to right", "bold")
    for number, script in enumerate(("grpo.py", "ppo.py", "remax.py", "dapo.py")):
        yield box(24 + 134 * number, 48, 122, 34, "score")
        yield text(85 + 134 * number, 70, script, "code", "middle")
    yield text(570, 70, "one algorithm each: advantages, loss, training loop", "dim")
    yield arrow((285, 84), (285, 112))
    yield box(24, 114, 524, 46, "train")
    yield text(40, 142, "lib/setup", "code")
    yield text(125, 142, "from flags to what a run needs", "dim")
    for number, (wing, what) in enumerate(WINGS.items()):
        yield box(640, 114 + 54 * number, 296, 42, "engine")
        yield text(656, 140 + 54 * number, f"{wing}/", "code")
        yield text(740, 140 + 54 * number, what, "dim")
        yield arrow((550, 137), (594, 137), (594, 135 + 54 * number), (638, 135 + 54 * number))
    yield text(550, 106, "only where a flag asks for them", "dim")
    yield arrow((285, 162), (285, 284))
    yield arrow((788, 266), (788, 284))
    yield box(24, 286, 912, 104)
    yield text(924, 321, "lib/", "code", "end")
    x = 40
    for number, name in enumerate(PACKAGES.split()):
        width = 28 + 7.6 * len(name)
        yield box(x, 300, width, 32, "train")
        yield text(x + width / 2, 321, name, "code package", "middle")
        if number < len(PACKAGES.split()) - 1:
            yield arrow((x + width + 1, 316), (x + width + 14, 316))
        x += width + 16
    yield arrow((480, 334), (480, 350))
    yield text(480, 372, " · ".join(BASE.split()), "code", "middle")
    yield text(24, 414, "rewards/, data/, tools/ and benchmarks/ use lib; lib imports none of them.", "dim")


DRAWINGS = {
    "step": (966, 384, "the data flow of one training step", step),
    "processes": (916, 422, "what GPUs do: colocated, dedicated servers, asynchronous", processes),
    "house": (960, 430, "the packages of plainrl and their imports", house),
}


def drawn(name: str) -> str:
    width, height, title, parts = DRAWINGS[name]
    return svg(width, height, title, parts())


if __name__ == "__main__":
    for name in DRAWINGS:
        (FOLDER / f"{name}.svg").write_text(drawn(name))
