"""What tools.lens has written into a run's folder (--output runs/NAME), for the page."""

from pathlib import Path
from typing import Any

from tools.page.files import open_inside, parse, reason

TOKEN: dict = {"row": int, "position": int} | dict.fromkeys(("token", "context", "prompt"), str)
TOKEN |= dict.fromkeys(("difference", "coefficient", "recorded"), float)
CHOICE: dict = dict.fromkeys(("cosine", "norm", "ratio"), float) | {"tokens": [TOKEN]}
UPDATES = [{"step": int, "update": int, "choices": {...: CHOICE}}]
HEADING = ["flags", "step, update, row, position", "context", "token", "coefficient", "as recorded"]
SHOWN = 5  # tokens for each choice


def read_lens(folder: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """(rows of metrics: cosine and norm of each choice by step, the table of the tokens that differ most). Nothing if
    there is no lens.json, or if it cannot be read, which is noted."""
    try:
        with open_inside(folder, "lens.json") as file:
            updates = parse(file.read(), UPDATES) or []
        return _by_step(updates), _tokens(updates)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notes.append(f"lens.json: could not read the file ({reason(error)})")
    except (KeyError, TypeError) as error:
        notes.append(f"lens.json: could not read the file (it has no {error})")
    return [], []


def _by_step(updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The means over the updates of a step that have a value: a gradient of 0 has no cosine."""
    values: dict[int, dict[str, list[float]]] = {}
    for update in updates:
        of_step = values.setdefault(update["step"], {})
        for name, choice in update["choices"].items():
            for key in ("cosine", "norm"):
                if choice[key] is not None:
                    of_step.setdefault(f"lens/{name}/{key}", []).append(choice[key])
    return [
        {"step": step} | {name: sum(found) / len(found) for name, found in of.items()} for step, of in values.items()
    ]


def _tokens(updates: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name in updates[0]["choices"] if updates else ():
        for token in most_apart(updates, name, SHOWN):
            place = ", ".join(str(token[key]) for key in ("step", "update", "row", "position"))
            numbers = [f"{token[key]:+.4f}" for key in ("coefficient", "recorded")]
            rows.append([name, place, token["context"], token["token"], *numbers])
    return [HEADING, *rows] if rows else []


def most_apart(updates: list[dict], name: str, count: int) -> list[dict]:
    """The tokens of all updates on which this choice differs most."""
    tokens = [{"step": u["step"], "update": u["update"], **t} for u in updates for t in u["choices"][name]["tokens"]]
    return sorted(tokens, key=lambda token: -token["difference"])[:count]
