"""smolagents: a CodeAgent, whose programs run in lib/sandbox. Argument: the Python of plainrl's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIServerModel
from smolagents.local_python_executor import CodeOutput, PythonExecutor

IN_SANDBOX = """import sys, time
from lib.sandbox import connect, hang_up, make_spec, receive, sandbox_level, send
sandbox = connect(make_spec(level=sandbox_level(), form="stdin", program=sys.stdin.read()))
send(sandbox, "")
print("output:", receive(sandbox, time.monotonic() + 60)["stdout"])
hang_up(sandbox)
"""
ANSWER = """
def final_answer(answer):
    print("final answer:", answer)
    raise SystemExit
"""


class Sandbox(PythonExecutor):
    """Each program begins with the ones before it, so that their variables are there."""

    so_far = ANSWER

    def send_tools(self, tools) -> None:
        """There is final_answer, and no other."""

    def send_variables(self, variables) -> None:
        """There are none."""

    def __call__(self, code_action: str) -> CodeOutput:
        self.so_far += f"\n{code_action}\n"
        command, root = [sys.argv[1], "-c", IN_SANDBOX], Path(__file__).parents[3]
        ran = subprocess.run(command, input=self.so_far, cwd=root, capture_output=True, text=True, check=True)
        logs = ran.stdout.partition("output: ")[2]
        _, found, answer = logs.partition("final answer: ")
        return CodeOutput(answer.strip() or None, logs, bool(found))


model = OpenAIServerModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = CodeAgent([], model, executor=Sandbox(), max_steps=4, verbosity_level=0)
[message] = json.load(sys.stdin)["prompt"]
print(json.dumps({"reward": "7" in agent.run(message["content"])}))
