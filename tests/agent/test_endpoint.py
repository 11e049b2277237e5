"""The endpoint of --agent: raw prompts, forced tool calls, parameters that are ignored, rewards of single answers."""

import asyncio
import copy
import json
from collections import defaultdict
from dataclasses import replace

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing

import grpo
from agent import make_episodes
from agent.http.conversation import Conversations
from agent.http.program import load_agent
from agent.http.token_tree import TokenTree
from agent.metrics import agent_metrics
from agent.tools.parsers import call_beginning, get_tool_parser
from lib import InputError
from lib.args import RolloutArgs
from lib.cli.flags import parse_flags
from lib.distributed import reduce_metrics
from lib.rollout import Sampling
from tests.agent.random_agents import ACTIONS, Client, random_raw_agent, segments_of, trained_of
from tests.agent.test_agent_loop import END, prompts_of, tokenizer
from tests.agent.test_agents import ASK, HELLO, RAW, SAY, TOOLS, Fake, chat, encode, failures, play, settings_of, user
from tests.common import one_line

ROLE = "\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"  # behind an answer's end token


def complete(*steps, **kwargs):
    """Each step makes the body of a request from the choices so far. Returns batch, engine, metrics and choices."""
    choices = []

    async def agent(client, row):
        for step in steps:
            status, found = await client.post(step(choices), "/completions")
            assert status == 200, found
            choices.extend(found["choices"])

    out, engine = chat(agent, **kwargs)
    return out, engine, out.non_tensor_batch["agent_metrics"][0], choices


# ---- raw prompts ---------------------------------------------------------------------------------
@settings(max_examples=20)
@given(actions=ACTIONS, in_ids=st.booleans(), room=st.sampled_from([600, 4000]))
def test_every_trained_token_was_sampled_in_its_raw_prompt(actions, in_ids, room):
    """Each answer is trained exactly once, in the context that the agent sent, in which earlier answers have the tokens
    that were sampled."""
    # words that are one token each, or as many as they have letters
    engine, sent = Fake(["tool", "user no", "a system stop", " tool "], steps=3), []
    out, _ = play(random_raw_agent(actions, encode, in_ids, sent), engine=engine, room=room)
    assert sorted(trained_of(out)) == sorted(engine.sampled) != []
    contexts = [context for context, _ in engine.sampled]
    if in_ids:
        assert sorted(contexts) == sorted(sent)
        return
    assert sorted(map(tokenizer().decode, contexts)) == sorted(sent)
    if "fork" in dict(actions):  # of which one may not know the other's answer
        return
    for i, (context, _) in enumerate(engine.sampled):
        text, shown = tokenizer().decode(context), defaultdict(list)  # by the number of their characters
        for before, ids in engine.sampled[:i]:
            ids = [*before, *ids[: -1 if ids[-1] == encode(END)[0] else None]]
            if text.startswith(own := tokenizer().decode(ids)):
                shown[len(own)].append(ids)
        assert not shown or any(context[: len(ids)] == ids for ids in shown[max(shown)])


def test_an_answer_that_was_cut_or_stripped_keeps_the_tokens_that_are_left():
    """A stop string that the agent writes again is in one segment with the answer."""
    stop = {"stop": "stop"}
    out, engine, metrics, found = complete(
        lambda found: {"prompt": "1"} | stop,
        lambda found: {"prompt": f"1{found[0]['text']}stop 2"} | stop,
        lambda found: {"prompt": f"1{found[0]['text']}stop 2{found[1]['text'].strip()} 3"} | stop,
        engine=Fake(["a b c stop d"]),
    )
    assert [choice["text"] for choice in found] == ["a b c "] * 3 and not metrics["lost_prefixes"]
    [(one, first), (two, second), (three, _)] = engine.sampled
    assert two == one + first + encode(" 2") and len(segments_of(out)) == 2
    assert three[: len(two) + 3] == two + second[:3] and tokenizer().decode(three) == "1a b c stop 2a b c 3"


def test_a_raw_prompt_may_continue_an_answer_of_chat_or_the_answer_itself():
    async def agent(client, row):
        [said] = await client.chat(row["prompt"])
        text = tokenizer().apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        body = {"prompt": f"{text}{said['content']}{END}{ROLE % 'go on'}", "max_tokens": 1, "return_token_ids": True}
        [cut] = (await client.post(body, "/completions"))[1]["choices"]
        assert cut["finish_reason"] == "length"
        await client.post({"prompt": cut["prompt_token_ids"] + cut["token_ids"]}, "/completions")

    out, engine = chat(agent, engine=Fake(["yes, yes"]))
    [(context, first), (second, cut), (third, last)] = engine.sampled
    assert second[: len(context) + len(first)] == context + first and third == second + cut
    assert len(segments_of(out)) == 1 and trained_of(out) == [(context, first), (second, cut + last)]


def test_an_edited_answer_is_a_lost_prefix():
    asks = [lambda found, prompt=prompt: {"prompt": prompt} for prompt in ("1", "1no 2")]
    _, engine, metrics, _ = complete(*asks, engine=Fake(["yes"]))
    assert metrics["lost_prefixes"] == 1 and metrics["tokens_reencoded"] == len(engine.sampled[1][0])


def test_the_beginning_of_text_is_written_where_the_tokenizer_writes_it():
    """And once: a prompt of the agent's own template may begin with it."""
    own, [bos] = copy.deepcopy(tokenizer()), encode(END)
    own.bos_token = END
    own.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, bos)])
    how = replace(settings_of(None), tokenizer=own)
    for prompt in ("1", f"{END}1"):
        assert Conversations(how, TokenTree([], 100)).raw_context(prompt).new == [bos, *encode("1")]
    assert Conversations(settings_of(None), TokenTree([], 100)).raw_context("1").new == encode("1")


def test_an_answer_to_raw_prompts_in_openais_form():
    body = {"prompt": ["1", "2"], "n": 2, "logprobs": 0, "max_tokens": 3, "seed": 1, "return_token_ids": True}
    events = []

    async def agent(client, row):
        events.append((await client.post(body, "/completions"))[1])
        more = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.session.post(f"{client.url}/completions", json=more) as answer:
            events.extend((await answer.text()).split("\n\n"))

    _, engine = chat(agent, engine=Fake(["yes, yes", "no"]))
    answer, *streamed, done, end = events
    assert (done, end) == ("data: [DONE]", "")
    streamed = [json.loads(event.removeprefix("data: ")) for event in streamed]
    assert [choice for event in streamed for choice in event["choices"]] == answer["choices"]
    assert streamed[-1]["usage"] == answer["usage"] and answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, (context, ids) in zip(answer["choices"], engine.sampled, strict=False):
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (context, ids)
        log_probs = choice["logprobs"]
        assert log_probs["token_logprobs"] == [-0.5 - token for token in ids]
        assert "".join(log_probs["tokens"]) == tokenizer().decode(ids)
        shown = [log_probs["tokens"][i] for i, at in enumerate(log_probs["text_offset"]) if at < len(choice["text"])]
        assert "".join(shown) == choice["text"]
    prompts = len(engine.sampled[0][0]) + len(engine.sampled[2][0])
    sampled, usage = sum(len(ids) for _, ids in engine.sampled[:4]), answer["usage"]
    assert usage == {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def test_prompts_of_one_request_are_answered_together_or_not_at_all():
    """What an agent never got is not trained."""
    own = copy.deepcopy(tokenizer())
    own.backend_tokenizer.normalizer = Replace("\u200b", "")

    async def agent(url, key, row):
        async with Client(url, key) as client:
            for second, why in (("\u200b", "prompt: the tokenizer makes no tokens of it"), ("2" * 300, "room for")):
                status, found = await client.post({"prompt": ["1", second]}, "/completions")
                assert status == 400 and why in found["error"]["message"]
            assert found["error"]["code"] == "context_length_exceeded"
            await client.chat(row["prompt"])

    how, engine = replace(settings_of(agent), tokenizer=own), Fake()
    make_episodes(engine, how).generate(prompts_of(how, 1), Sampling(200), [0])
    assert len(engine.sampled) == 1


# ---- forced calls --------------------------------------------------------------------------------
SUB = {"type": "function", "function": {"name": 'su"b', "description": "", "parameters": {}}}


@pytest.mark.parametrize("api", ["/chat/completions", "/messages", "/responses"])
@pytest.mark.parametrize("tools, choice", [(TOOLS, "required"), ([*TOOLS, SUB], "named"), ([*TOOLS, SUB], "required")])
def test_a_forced_call_begins_as_given_and_is_sampled_to_its_end(api, tools, choice):
    rest, begins = ' {"a": 1, "b": 2}}\n</tool_call>', '<tool_call>\n{"name": "'
    if len(tools) == 2 and choice == "required":
        rest = f'add", "arguments":{rest}'
    else:
        begins += 'add", "arguments":'
    named = {"type": "function", "function": {"name": "add"}}

    async def agent(client, row):
        client.api, forced = api, {"tools": tools, "tool_choice": named if choice == "named" else choice}
        [said] = await client.chat(row["prompt"], **forced)
        [call] = said["tool_calls"]
        assert call["function"]["name"] == "add" and not said["content"]
        answered = [said, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        await client.chat([*row["prompt"], *answered], **forced)

    out, engine = chat(agent, engine=Fake([rest]), room=1500)
    [(context, first), (second, _)] = engine.sampled
    assert tokenizer().decode(context).endswith(f"<|im_start|>assistant\n{begins}")
    assert tokenizer().decode(first) == rest + END  # which alone is trained
    assert second[: len(context) + len(first)] == context + first
    assert len(segments_of(out)) == 1 and trained_of(out) == engine.sampled
    assert not out.non_tensor_batch["agent_metrics"][0].get("lost_prefixes")


def test_a_forced_call_that_is_not_one_stays_text():
    async def agent(client, row):
        body = {"messages": row["prompt"], "tools": TOOLS, "tool_choice": "required"}
        [choice] = (await client.post(body))[1]["choices"]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == '<tool_call>\n{"name": "add", "arguments": no'
        [choice] = (await client.post(body | {"max_tokens": 1}))[1]["choices"]
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
        [said] = await client.chat(**body | {"stop": '"name"'})  # which was given, not sampled
        assert said["content"].endswith('"arguments": no')
        await client.chat([*row["prompt"], said, user("go on")], tools=TOOLS)

    out, _ = chat(agent, engine=Fake([" no"]))
    assert out.non_tensor_batch["agent_metrics"][0]["lost_prefixes"] == 0


FORMATS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_beginning_of_a_call_in_every_format(name):
    """It is the beginning of a call as models write it, and what follows is read with it."""
    for tools in (("add",), ("add", "sub")):
        assert FORMATS[name].startswith(call_beginning(name, tokenizer(), tools))
    [call] = get_tool_parser(name, tokenizer())(FORMATS[name])
    assert (call.name, call.error) == ("add", None)
    assert call_beginning("auto", tokenizer(), ("add",)) == call_beginning("hermes", tokenizer(), ("add",))
    with pytest.raises(InputError, match="can be forced in the formats hermes, llama3_json, qwen3_coder"):
        call_beginning("vllm:hermes", tokenizer(), ("add",))


# ---- ignored parameters --------------------------------------------------------------------------
def test_ignored_parameters_have_no_effect_and_are_counted():
    bodies = {
        "/chat/completions": HELLO | {"temperature": 0, "top_p": 1.0, "response_format": {"type": "json_object"}},
        "/messages": ASK | {"temperature": 0.3},
        "/responses": SAY | {"temperature": [], "reasoning_effort": None},
        "/completions": {"prompt": "hello", "temperature": 2},
    }

    async def agent(client, row):
        for path, body in bodies.items():
            status, found = await client.post(body, path)
            assert status == 200, found
        status, found = await client.post(HELLO | {"top_p": 0.5})
        advice = "The run's --agent-kwargs ignore=top_p accepts and ignores it"
        assert status == 400 and found["error"]["message"].endswith(advice)

    out, engine = chat(agent, ignore=frozenset({"temperature", "response_format", "reasoning_effort"}))
    assert len(engine.sampled) == 4 and reduce_metrics(agent_metrics(out))["agent/ignored_mean"] == 5


def test_the_names_of_ignored_parameters_are_checked():
    args = parse_flags(grpo.Args, ["--agent", "true", "--agent-kwargs", "ignore=temperature,top_p"])
    assert load_agent(args.rollout, "auto").ignore == {"temperature", "top_p"}
    for name in ("temprature", "messages"):
        with one_line(f"^--agent-kwargs ignore={name}: it can ignore frequency_penalty, .*, verbosity"):
            load_agent(RolloutArgs(agent="true", agent_kwargs=(f"ignore=top_p,{name}",)), "auto")


# ---- rewards of answers --------------------------------------------------------------------------
def test_rewards_of_answers_stand_on_their_last_tokens():
    numbers = {}

    async def agent(client, row):
        ids = []
        bodies = {"/completions": RAW, "/messages": ASK, "/responses": SAY, "/chat/completions": HELLO | {"n": 2}}
        for path, body in [("/chat/completions", HELLO), *bodies.items()]:
            status, found = await client.post(body, path)
            assert status == 200
            ids += [f"{found['id']}-{i}" for i in range(2)] if "n" in body else [found["id"]]
        numbers.update({name: i + 1.0 for i, name in enumerate(ids) if i != 1})
        return {"reward": 0.5, "rewards": numbers}

    out, engine = chat(agent, room=1500)
    mask, given = out.batch["response_mask"][0].bool(), out.batch["turn_rewards"][0]
    ends = (mask & ~F.pad(mask, (0, 1))[1:]).nonzero()[:, 0].tolist()
    assert len(ends) == 6 == len(engine.sampled) and len(numbers) == 5
    expected = dict(zip(ends, [1.0, 0.0, 3.0, 4.0, 5.0, 6.0]))
    last = int(out.batch["attention_mask"][0, -len(given) :].sum()) - 1
    expected[last] += 0.5
    assert given.nonzero()[:, 0].tolist() == [at for at, value in expected.items() if value]
    assert [given[at].item() for at in expected] == [*expected.values()]


def test_wrong_rewards_of_answers_end_their_episode_and_right_ones_leave_the_scorers_their_part():
    names = {}

    async def agent(client, row):
        number = int(row["prompt"][0]["content"][:-1])
        names[number] = name = (await client.post(HELLO))[1]["id"]
        while len(names) < 6:  # all episodes have an answer
            await asyncio.sleep(0.001)
        bad = [{name: float("nan")}, {name: "1"}, {name: 10**400}, {name: 1, names[0]: 1}, 0]
        return {"rewards": [*bad, {name: 1}][number]}

    out, _ = chat(agent, rows=6, engine=Fake(["yes"]))
    assert out.non_tensor_batch["finish_reason"].tolist() == [*["error"] * 5, "stop"]
    assert failures(out) == {"bad_reward": 5}
    assert out.batch["turn_rewards"].sum(1).tolist() == [0.0] * 5 + [1.0] and out.non_tensor_batch["answer"][5] == "yes"


def test_runs_with_an_agent_need_no_scorer_and_may_use_mt_grpo():
    assert parse_flags(grpo.Args, ["--agent", "true", "--reward"]).reward.reward == ()
    args = ["--agent", "true", "--adv-estimator", "mt_grpo", "--prompts-per-step", "2", "--group-size", "2"]
    assert parse_flags(grpo.Args, args).adv_estimator == "mt_grpo"
    with pytest.raises(InputError, match="gigpo credits the turns of an episode"):
        parse_flags(grpo.Args, [*args, "--adv-estimator", "gigpo"])
