"""agent/environments.py, agent/interactions.py, rewards/verifiers.py, data/environments.py: environments of others.

OpenEnv's own example (what `openenv init` writes) is served here, verifiers' environments are loaded from the package.
Neither package is in the requirements: where one is missing, its tests are skipped.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import types
from contextlib import asynccontextmanager

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from agent.environments import OpenEnv
from agent.interactions import load_interaction
from agent.tools.builtin import calculator
from data import environments as rows_of
from lib import InputError
from rewards.verifiers import compute_score as verifiers_score
from tests.common import START_S, answers, documented, free_port

GAME = """

class Random(Letters):
    starts = 0

    def reset(self, *, seed=None, options=None):
        Random.starts += 1
        return f"{Random.starts}?", {}


class Arrays(Letters):
    def reset(self, *, seed=None, options=None):
        return [0, 1], {}
"""


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    path = tmp_path_factory.mktemp("gym") / "game.py"
    path.write_text(documented("letters.py") + GAME)
    return f"gym:{path}:Letters"


# ---- verifiers: the environments of the tests ----------------------------------------------------
OWN = '''

class Breaks(Again):
    async def env_response(self, messages, state, **kwargs):
        raise vf.ToolError("it broke")


class Forgets(Again):
    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


class Begins(Again):
    async def setup_state(self, state):
        state["prompt"] = [vf.types.UserMessage(content="another")]
        return state


def of_kind(kind):
    made = load_environment()
    return globals()[kind](dataset=made.dataset, rubric=made.rubric, max_turns=2)


def with_tools():
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    return vf.ToolEnv(tools=[add], dataset=load_environment().dataset, rubric=vf.Rubric(funcs=[letters]))


def of_groups():
    def best(completions) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=load_environment().dataset, rubric=vf.Rubric(funcs=[best]))


def puzzles():
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    return ReasoningGymEnv("chain_sum", num_train_examples=6, num_eval_examples=2)
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    pytest.importorskip("verifiers")
    path = tmp_path_factory.mktemp("verifiers") / "own.py"
    path.write_text(documented("again.py") + OWN)
    return f"{path}:"


# ---- OpenEnv: a server of two environments -------------------------------------------------------
GUESS = """
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from server.app import app


class Number(Action):
    number: int
    note: str = ""


class Shown(Observation):
    text: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = seed or 0
        return Shown(text=f"a number, {self.secret} mod 3")

    def step(self, action, timeout_s=None, **kwargs):
        if action.number < 0:
            raise ValueError("no number below 0")
        right = action.number == self.secret
        return Shown(text="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self):
        return State()


app.mount("/guess", create_fastapi_app(Guess, Number, Shown, max_concurrent_envs=2))
"""


@pytest.fixture(scope="module")
def openenv(tmp_path_factory):
    """The URL of OpenEnv's example, which echoes; GUESS is at /guess."""
    pytest.importorskip("openenv")
    folder = tmp_path_factory.mktemp("openenv")
    init = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(folder)]
    subprocess.run(init, check=True, capture_output=True, timeout=120)
    example = folder / "echo_env/server/app.py"
    example.write_text(example.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=9"))
    (folder / "echo_env/both.py").write_text(GUESS)
    port = free_port()
    serve = [sys.executable, "-m", "uvicorn", "both:app", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(serve, cwd=folder / "echo_env", stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait()


# ---- one episode ---------------------------------------------------------------------------------
def talk(interaction, turns: list[str], **kwargs) -> tuple[list, float]:
    """(what each turn is answered, the score at the end); the score is asked for also if the episode is not over."""

    async def episode():
        env = interaction()
        try:
            await env.start("1", **kwargs)
            replies = [await env.respond([{"role": "assistant", "content": turn}]) for turn in turns]
            return replies, await env.score()
        finally:
            await env.stop()

    return asyncio.run(episode())


def test_gym_steps(game):
    play = load_interaction(game)
    replies, score = talk(play, ["a1", "<think>11</think> bb "], reset={"seed": 3, "options": None}, first="3?")
    assert replies == [(False, "2 long", 0.5, {}), (True, "2 long", 1.0, {})] and score == 0.0
    talk(play, [], first="0?")  # a row without a seed: not from the clock
    with pytest.raises(InputError, match=r"shows '4\?', but the row has '3\?'"):
        talk(play, [], reset={"seed": 4}, first="3?")
    with pytest.raises(InputError, match="the observation is a list; wrap the environment"):
        talk(load_interaction(game.replace("Letters", "Arrays")), [])


def test_gymnasium_by_id():
    gymnasium = pytest.importorskip("gymnasium")
    with pytest.raises(InputError, match="Nowhere"):
        load_interaction("gym:Nowhere-v0")
    with pytest.raises(InputError, match="the observation is a int; wrap"):
        talk(load_interaction("gym:FrozenLake-v1"), [])
    assert gymnasium.spec("FrozenLake-v1")


def test_openenv_steps(openenv):
    echo = load_interaction(f"openenv:{openenv}/")
    replies, score = talk(echo, ["hello", "<think>hm</think>\nhello world"], reset={"seed": 3})
    assert json.loads(replies[0][1]) == {"echoed_message": "hello", "message_length": 5}
    assert [(over, reward) for over, _, reward, _ in replies] == [(False, 0.5), (False, 1.0)] and score == 0.0
    one_field = load_interaction(f"openenv:observation=echoed_message {openenv}")
    assert talk(one_field, ["hello"])[0] == [(False, "hello", 0.5, {"errors": 0})]
    assert talk(one_field, ["hi"], observation="message_length", action={"message": "{text}!"})[0][0][1] == "3"
    with pytest.raises(InputError, match="no 'text' in its observation, but metadata, echoed_message, message_length"):
        talk(echo, [], observation="text")


def test_openenv_actions_that_are_refused_are_answered(openenv):
    guess = load_interaction(f"openenv:action=number observation=text {openenv}/guess")
    replies, _ = talk(guess, ["six", "-1", "5", "6"], reset={"seed": 6}, first="a number, 6 mod 3")
    texts = [text for _, text, _, _ in replies]
    assert texts[0].startswith("Error: number: Input should be a valid integer")
    assert texts[1:] == ["Error: no number below 0", "wrong", "right"]
    assert [reply[2] for reply in replies] == [0, 0, 0, 1] and [reply[0] for reply in replies] == [False] * 3 + [True]
    assert [reply[3]["errors"] for reply in replies] == [1, 2, 2, 2]
    as_json = load_interaction(f"openenv:action={{json}} observation=text {openenv}/guess")
    texts = [text for _, text, _, _ in talk(as_json, ['{"number": 0, "note": "x"}', "0", "{", "[" * 10**5])[0]]
    assert texts[0] == "right" and texts[1] == "Error: the action is no JSON object" and "Expecting" in texts[2]
    assert texts[3].startswith("Error: the action is no JSON (maximum recursion depth")


def test_openenv_has_a_session_for_each_episode_and_frees_it(openenv):
    guess = load_interaction(f"openenv:action=number observation=text {openenv}/guess")  # two sessions at most

    async def three():
        envs = [guess() for _ in range(3)]
        try:
            for seed in (1, 2):
                await envs[seed].start("1", reset={"seed": seed})
            for seed in (1, 2):
                assert (await envs[seed].respond([{"role": "assistant", "content": str(seed)}]))[0]
            with pytest.raises(ConnectionError, match="as many sessions"):
                await envs[0].start("1")
        finally:
            for env in envs:
                await env.stop()

    for _ in range(3):
        asyncio.run(three())


def test_openenv_answers_pings_while_the_policy_speaks():
    """uvicorn closes a session whose client does not answer for 40 s. This server, which only echoes, for 0.15 s."""

    async def episode():
        async with replying(lambda asked: {"type": "observation", "data": {"observation": asked["data"]}}) as env:
            await env.start("1", reset={"message": "begin"})
            await asyncio.sleep(1)
            return await env.respond([{"role": "assistant", "content": "hello"}])

    assert asyncio.run(episode())[1] == "hello"


@asynccontextmanager
async def replying(reply):
    """An environment of a server that sends reply(what it is sent), as JSON unless it is text."""

    async def serve(request):
        socket = web.WebSocketResponse(heartbeat=0.1)
        await socket.prepare(request)
        async for message in socket:
            if (asked := message.json())["type"] == "close":
                break
            answer = reply(asked)
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return socket

    app = web.Application()
    app.router.add_get("/ws", serve)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    env = OpenEnv(f"http://127.0.0.1:{port}", "message", "message")
    try:
        yield env
    finally:
        await env.stop()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("no JSON", "is no JSON"),
        (["x" * 10**6], "has another form than OpenEnv's: $: "),
        ({"type": "observation", "data": {"observation": {"message": ""}, "reward": {}}}, "$.data.reward: {} is not"),
        ({"type": "error", "data": {"errors": [{"loc": 1, "msg": ""}]}}, "$.data.errors[0].loc: 1 is not"),
    ],
)
def test_replies_of_another_form_are_one_line(reply, words):
    async def episode():
        async with replying(lambda asked: reply) as env:
            await env.start("1")

    with pytest.raises(InputError) as caught:
        asyncio.run(episode())
    said = str(caught.value)
    assert words in said and "\n" not in said and len(said) < 400
    assert re.match(r"openenv:http://\S+: its answer to ", said)


def test_openenv_actions_that_a_server_does_not_have(openenv):
    for action, words in (
        ("code", "an action has no 'code', but message"),
        ('{"code"', "not valid JSON"),
        ('{"code":1}', "an action has no 'code', but message"),
    ):
        with pytest.raises(InputError, match=words):
            load_interaction(f"openenv:action={action} {openenv}")


def row(i: int = 0) -> dict:
    return {"prompt": [{"role": "user", "content": f"{i}?"}], "question": f"{i}?", "answer": ""}


def test_servers_and_packages_that_are_missing_or_too_new_are_named(monkeypatch):
    for spec, words in (
        ("http://127.0.0.1:9", "no OpenEnv server answers at http://127.0.0.1:9/schema"),
        ("localhost:8000", "give 'openenv:action=FIELD"),
    ):
        with pytest.raises(InputError, match=words):
            load_interaction(f"openenv:{spec}")
    for module in (None, types.ModuleType("verifiers")):  # that of 0.4 has no load_environment
        monkeypatch.setitem(sys.modules, "verifiers", module)
        with pytest.raises(InputError, match=r"pip install 'verifiers>=0\.1\.14,<0\.4'"):
            load_interaction("verifiers:some")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(InputError, match="pip install gymnasium"):
        load_interaction("gym:CartPole-v1")


def test_verifiers_runs_its_own_rollout(own):
    again = load_interaction(f"verifiers:{own}load_environment")
    replies, score = talk(again, ["ab", "12"], row=json.dumps(row()))
    assert replies == [(False, "again, 2", 0.0, {}), (True, "", 0.0, {"letters": 0.5, "num_turns": 2.0})]
    assert score == 0.5
    longer = load_interaction(f'verifiers:{own}load_environment {{"max_turns": 9}}')
    replies, score = talk(longer, ["ab", "12", "34"], row=json.dumps(row()))
    assert [over for over, *_ in replies] == [False] * 3 and score == pytest.approx(1 / 3)  # of an unfinished one
    with pytest.raises(Exception, match="it broke"):
        talk(load_interaction(f'verifiers:{own}of_kind {{"kind": "Breaks"}}'), ["ab", "12"], row=json.dumps(row()))
    with pytest.raises(InputError, match="begins with another prompt"):
        talk(load_interaction(f'verifiers:{own}of_kind {{"kind": "Begins"}}'), [], row=json.dumps(row()))
    with pytest.raises(InputError, match="rewrites earlier messages"):
        talk(load_interaction(f'verifiers:{own}of_kind {{"kind": "Forgets"}}'), ["1"], row=json.dumps(row()))


def test_verifiers_environments_that_cannot_be_loaded(own):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for spec, words in {
        "no_such_environment": "it cannot be loaded: Could not import 'no_such_environment'",
        f"{own}nothing": "has no 'nothing'",
        f"{own}load_environment {{": "is no JSON object",
        f'{own}with_tools {{"colour": 1}}': "unexpected keyword argument 'colour'",
        f"{own}with_tools": "tools are called through the API",
        f"{own}of_groups": "scores groups of responses",
    }.items():
        with pytest.raises(InputError, match=words):
            load_interaction(f"verifiers:{spec}")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_verifiers_rubric_as_a_scorer(own, tmp_path):
    """On ReasoningGymEnv, a public one: its rubric gives 1 to the right answer in tags, 0 to others."""
    env = f"{own}puzzles"
    rows_of.main(f"verifiers:{env}", tmp_path, size=6, test_size=2)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 6 and pq.read_table(tmp_path / "test.parquet").num_rows == 2
    for found in rows[:2]:
        assert [message["role"] for message in found["prompt"]] == ["system", "user"]
        question = found["prompt"][1]["content"].partition("following arithmetic problem: ")[2].rstrip("= ")
        truth = found["reward_model"]["ground_truth"]
        for answer, expected in {calculator(question): 1.0, "x": 0.0}.items():
            response = f"<answer>{answer}</answer>"
            result = asyncio.run(verifiers_score("verifiers", response, truth, env=env))
            assert result["score"] == result["check_answer_reward_func"] == expected
            interaction, kwargs = load_interaction(f"verifiers:{env}"), found["extra_info"]["interaction_kwargs"]
            _, score = talk(interaction, [response], **kwargs)
            assert score == expected
    with pytest.raises(InputError, match="has several turns: use"):
        asyncio.run(verifiers_score("verifiers", "x", json.dumps(row()), env=f"{own}load_environment"))


def test_reasoning_gym_gives_further_tries():
    import reasoning_gym  # whose import takes more than a second

    from rewards.reasoning_gym import dump_entry

    [entry] = reasoning_gym.create_dataset("chain_sum", seed=1, size=1)
    right, truth = entry["answer"], {"task": "chain_sum", "task_kwargs": {}, "entry": dump_entry(entry)}

    def play(*answers, **kwargs):
        turns = [f"<answer>{answer}</answer>" for answer in answers]
        return talk(load_interaction("reasoning_gym"), turns, ground_truth=json.dumps(truth), **kwargs)

    [(over, said, *_), (ended, *_)], score = play("no", right)
    assert (over, ended, score) == (False, True, 1.0) and "'no' is not right" in said and right not in said
    replies, score = play("no", "no", max_tries=2)
    assert [over for over, *_ in replies] == [False, True] and score < 1.0
    truth["task"] = "simple_integration"
    with pytest.raises(InputError, match="simple_integration"):
        play()


# ---- rows ----------------------------------------------------------------------------------------
def test_rows_are_starts(game, tmp_path):
    rows_of.main(game, tmp_path, size=3, test_size=2, seed=5, system="Be brief.")
    train, test = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "test"))
    user = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7?"}]
    assert train[2]["prompt"] == user
    assert train[2]["extra_info"]["interaction_kwargs"] == {"reset": {"seed": 7}, "first": "7?"}
    assert [found["prompt"][1]["content"] for found in test] == ["8?", "9?"]
    with pytest.raises(InputError, match="after two resets with seed 0 it shows"):
        rows_of.main(game.replace("Letters", "Random"), tmp_path)
    with pytest.raises(InputError, match="give openenv:"):
        rows_of.main("reasoning_gym", tmp_path)
