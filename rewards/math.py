r"""Scorer for mathematics: the response's last \boxed{...}, or without one what math-verify finds in it.

math-verify (LaTeX -> sympy, then equality of expressions, sets, intervals, equations, matrices) decides. Its time
limits are SIGALRM, which works only in the main thread; in any other thread they are off, and the caller must hold the
limit, as it must for what no signal interrupts (a huge power of integers). In the main thread they replace an alarm
already set. The name is safe while it is imported as rewards.math: never put rewards/ itself on sys.path.
"""

import threading

from math_verify import parse, verify


def last_boxed(text: str) -> str | None:
    r"""What stands in the last closed \boxed{...}, braces matched: r"\boxed{\frac{1}{2}}." -> r"\frac{1}{2}"."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth, i = 0, start + len("\\boxed")
        while i < len(text):
            if text[i] == "\\":
                i += 2  # \{ and \} are not groups
                continue
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : i].strip()
            i += 1
        end = start
    return None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the answer as the response writes it, "" if it has none}."""
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    boxed = last_boxed(solution_str)
    answer = parse(solution_str if boxed is None else f"\\boxed{{{boxed}}}", parsing_timeout=seconds)
    truth = str(ground_truth).strip()
    pred = boxed if boxed is not None else str(answer[-1]).strip() if answer else ""
    if pred and pred == truth:
        return {"score": 1.0, "pred": pred}
    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=seconds)
    right = bool(gold and answer) and verify(gold, answer, timeout_seconds=seconds)
    return {"score": float(right), "pred": pred}
