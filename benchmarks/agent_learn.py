"""Whether a program with the openai SDK learns the embedded task with tools as well as --multi-turn.tools.

    python -m benchmarks.agent_learn                    both arms, five seeds (a quarter of an hour of one core);
                                                        what benchmarks/results/agent_learn.json has is not run again
    python -m benchmarks.agent_learn --table            prints the table of the record

Both have the same calculator and as many turns. Accuracy is that of a sample of each held-out product at temperature 1.
"""

import json
import sys
from functools import cache
from pathlib import Path
from statistics import mean

from openai import AsyncOpenAI

from agent.tools.builtin import calculator
from benchmarks.turn_credit import FLAGS, run_seed

RECORD = Path(__file__).parent / "results/agent_learn.json"
# the agent's prompt has the tools, which the row's own prompt has not: it needs more room
LONGER = FLAGS.replace("--max-response-length 48", "--max-response-length 112").replace("--multi-turn.max-turns 3 ", "")
ARMS = {
    "--multi-turn.tools": "--multi-turn.tools calculator --multi-turn.max-turns 3",
    "--agent": "--agent benchmarks/agent_learn.py:solve",
}
SEEDS = (1, 2, 3, 4, 5)
SHOWN = (4, 8, 12, 16, 20)  # steps of the table
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}


@cache
def client_of(base_url: str) -> AsyncOpenAI:
    """One for all episodes: it keeps its connections."""
    return AsyncOpenAI(base_url=base_url, api_key="of each episode")


async def solve(base_url: str, api_key: str, row: dict) -> None:
    client, messages = client_of(base_url).with_options(api_key=api_key), row["prompt"]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        messages.append(answer.choices[0].message)
        if not (calls := answer.choices[0].message.tool_calls):
            break
        for call in calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except (ValueError, TypeError, ArithmeticError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def main() -> None:
    from benchmarks.curves import provenance

    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for seed, arm in ((seed, arm) for seed in SEEDS for arm in ARMS):
        flags = f"{LONGER} {ARMS[arm]}"
        record = records.setdefault(arm, {"command": f"python grpo.py {flags}", **provenance(jobs=1), "runs": []})
        if seed not in [run["seed"] for run in record["runs"]]:
            record["runs"].append(run_seed(flags, seed))
            RECORD.write_text(json.dumps(records) + "\n")
            print(arm, seed, record["runs"][-1]["curves"]["accuracy"], flush=True)


def table() -> str:
    """Mean and range of the seeds."""
    head = ["", *(f"step {step}" for step in SHOWN), "mean of steps 2-20", "CPU of a run, s"]
    lines = [head, ["---"] * len(head)]
    for arm, record in json.loads(RECORD.read_text()).items():
        runs = record["runs"]
        cells = [[dict(run["curves"]["accuracy"])[step] for run in runs] for step in SHOWN]
        cells += [[mean([x for step, x in run["curves"]["accuracy"] if step]) for run in runs]]
        line = [f"`{arm}`", *(f"{mean(x):.3f} ({min(x):.3f}-{max(x):.3f})" for x in cells)]
        lines.append([*line, f"{mean([run['cpu_seconds'] for run in runs]):.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table()) if "--table" in sys.argv else main()
