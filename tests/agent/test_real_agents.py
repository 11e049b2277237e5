"""Agents of other projects, unmodified, as programs of --agent: `make test-agents`. What is trained is what was
sampled, in the context that the agent sent."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent import make_episodes
from agent.http import endpoint
from agent.http.program import load_agent
from lib.args import RolloutArgs
from lib.rollout import Sampling
from tests.agent.random_agents import segments_of, trained_of
from tests.agent.test_agent_loop import CALL, prompts_of, tokenizer
from tests.agent.test_agents import Fake, encode, settings_of
from tests.common import ROOT

HERE = Path(__file__).parent / "real"
PYTHON = ROOT / ".venv-agents/bin/python"
needs_agents = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-agents: make agents")


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def bash(command):
    return "I run it.\n" + call("bash", command=command)


def code(program):
    return f"Thought: I compute.\n<code>\n{program}\n</code>"


ADDS = ["Let me see.\n" + CALL % (1, 2), CALL % (3, 4) + "\n" + CALL % (5, 6), "It is 7."]
HANDS_OVER = [CALL % (3, 4), call("transfer_to_checker"), CALL % (3, 4), "It is 7."]
REPAIRS = ["no call", bash("cat sums.py; python3 test_sums.py"), bash("sed -i s/-/+/ sums.py && python3 test_sums.py")]
REPAIRS += [bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
BEGINNING = '<tool_call>\n{"name": "'  # of a forced call
GAME = [f"I take [{i}]" for i in (0, 3, 1, 4, 2)]
CODES = ["no code", code("a = 3\nprint(a)"), code("final_answer(a + 4)")]
# by program: what the model answers, the segments of the row, the reward
AGENTS = {
    "tool_loop_openai.py": (ADDS, 1, 1),
    "tool_loop_anthropic.py": (ADDS, 1, 1),
    "with_openai_agents.py responses": (HANDS_OVER, 2, 1),  # the second agent has instructions of its own
    "with_openai_agents.py chat_completions": (HANDS_OVER, 2, 1),
    # the second question has a tool more
    "with_pydantic_ai.py": ([*ADDS, 'final_result", "arguments": {"total": 7}}\n</tool_call>'], 2, 1),
    "with_langgraph.py": ([*ADDS, "Yes, 7."], 1, 1),
    "with_langgraph.py streaming": ([*ADDS, "Yes, 7."], 1, 1),
    "with_smolagents.py PYTHON": (CODES, 3, 1),  # it adds "Calling tools: ..." to each answer
    "with_mini_swe_agent.py": (REPAIRS, 2, 1),  # it drops an answer without a call
    "with_textarena.py": (GAME, 5, 1),  # its agent has no memory
}


class Scripted(Fake):
    """Gives these answers, one after the other."""

    def sample(self, *request):
        left, self.texts = self.texts[1:], self.texts[:1]
        sampled = super().sample(*request)
        self.texts = left
        return sampled


def rendered(how, messages, tools) -> str:
    text = how.render(how.escape_special_tokens(messages), how.escape_special_tokens(tools))
    return tokenizer().decode(encode(text))


@needs_agents
@pytest.mark.parametrize("program", AGENTS)
def test_an_agent_of_another_project(program, monkeypatch):
    requests, refused = [], []
    for api in endpoint.APIS.values():

        def read(body, sampling, read=api.read_request):
            requests.append(read(body, sampling))
            return requests[-1]

        monkeypatch.setattr(api, "read_request", read)
    refuse = endpoint._refusal
    monkeypatch.setattr(endpoint, "_refusal", lambda *args: (refused.append(str(args[1])), refuse(*args))[1])
    answers, segments, reward = AGENTS[program]
    engine = Scripted(answers)
    command = f"{PYTHON} {HERE / program.replace('PYTHON', sys.executable)}"
    agent = load_agent(RolloutArgs(agent=command, agent_kwargs=("ignore=temperature",)), "auto")
    how = replace(settings_of(None), agent=agent)
    out = make_episodes(engine, how).generate(prompts_of(how, 1), Sampling(100_000), [0])
    assert refused == [] and len(engine.sampled) == len(answers)
    assert sorted(trained_of(out)) == sorted(engine.sampled)
    shown = [tokenizer().decode(context) for context, _ in engine.sampled]
    forced = [BEGINNING if options.forced else "" for *_, options in requests]
    assert shown == [rendered(how, *request[:2]) + text for request, text in zip(requests, forced, strict=True)]
    assert len(segments_of(out)) == segments and out.batch["turn_rewards"].sum() == reward
