"""What an episode may do, and how its messages become tokens.

Tokens in, tokens out: a sampled token is never decoded and encoded again. After each turn the chat template renders the
whole conversation. Usually this text begins with the earlier text and then the turn, up to whitespace: templates trim,
and write JSON their own way. Then only the rest is encoded, and goes behind the sampled tokens. It begins with the
template's end token, which is dropped if the policy sampled one; the newline behind it stays.

If the text begins differently (a template may drop the thinking of earlier turns), the next turn starts a new segment
of the row: the whole text is its prompt, position_ids start from 0, and lib/model takes it as a sequence of its own."""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import jinja2
from PIL.Image import Image
from transformers import PreTrainedTokenizerBase

from agent.http.program import Agent
from agent.interactions import BaseInteraction, load_interaction
from agent.request import AsyncRolloutRequest
from agent.tools.base import BaseTool, ToolCall, in_thread, readable
from agent.tools.builtin import load_tools
from agent.tools.parsers import get_tool_parser
from agent.tools.rows import shown_tools, template_of_row
from lib import InputError
from lib.args import MultiTurnArgs
from lib.data import SpecialTokenEscaper
from lib.data.vision import Encoded, Vision
from lib.rollout import Generated

LONG_TEXT = 10_000  # characters that take milliseconds to encode
REFUSALS = (jinja2.TemplateError, TypeError)  # what a chat template raises for messages that it refuses


@dataclass(frozen=True)
class MultiTurn:
    """What an episode may do. Tools answer a turn that calls them. The interaction, if any, answers other turns. Raises
    InputError for a chat template that cannot show a tool's output."""

    tokenizer: PreTrainedTokenizerBase
    tools: dict[str, BaseTool] = field(default_factory=dict)
    parse: Callable[[str], list[ToolCall]] = lambda text: []  # what get_tool_parser returns
    interaction: Callable[[], BaseInteraction] | None = None  # makes that of an episode
    limits: MultiTurnArgs = field(default_factory=MultiTurnArgs)  # its tools, parser and interaction are not read
    chat_template_kwargs: dict = field(default_factory=dict)  # those of the data set
    max_prompt_length: int | None = None  # that of the data set, which may cut longer prompts; None: it cuts none
    vision: Vision | None = None  # that of the data set; None for a text model
    agent: Agent | None = None  # what plays the episodes, with its own tools

    def __post_init__(self):
        if self.image_tools and not (self.vision and self.vision.takes_later_images):
            takes = "takes none after its prompt" if self.vision else "takes none"
            raise InputError(f"--multi-turn.tools {self.image_tools[0]}: returns images; this --model {takes}")
        check_template(self)
        check_window(self)

    @cached_property
    def schemas(self) -> list[dict]:
        """Without special tokens: an MCP server may have written them."""
        return self.escape_special_tokens([tool.get_openai_tool_schema() for tool in self.tools.values()])

    @cached_property
    def special_ids(self) -> set[int]:
        return {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @property
    def row_template(self) -> Callable[[dict], tuple[dict, str]] | None:
        """For the data set."""
        return partial(template_of_row, self.schemas) if self.schemas else None

    def tools_of(self, extra_info: dict) -> tuple[dict[str, BaseTool], list[dict]]:
        """The tools of a row, and their schemas. Raises InputError for a row that names others."""
        schemas = shown_tools(self.schemas, extra_info)
        hidden = [name for name, schema in zip(self.tools, self.schemas) if schema not in schemas]
        return {name: tool for name, tool in self.tools.items() if name not in hidden}, schemas

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        """tools: the schemas of a row or an agent; None: all of the run."""
        if self.vision is not None:  # as the data set writes them; some templates of vision models take nothing else
            messages = [_in_parts(message) for message in messages]
        kwargs = self.chat_template_kwargs | {"add_generation_prompt": True, "tokenize": False}
        schemas = self.schemas if tools is None else tools
        return self.tokenizer.apply_chat_template(messages, tools=schemas or None, **kwargs)

    def turn_of(self, sampled: Generated, stop: tuple[str, ...]) -> tuple[str, bool]:
        """(the text of a turn without its end token, whether it has one). stop: the strings that end a turn, too."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        at_string = stop and any(string in decode(sampled.token_ids) for string in stop)
        has_end_token = sampled.finish_reason == "stop" and not at_string
        return decode(sampled.token_ids[:-1] if has_end_token else sampled.token_ids), has_end_token

    def encode(self, text: str) -> list[int]:
        """The template writes the special tokens, so none are added. An image is one placeholder."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_with(self, text: str, data: dict) -> Encoded:
        """data: the images that the text shows, as in multi_modal_data."""
        if data:
            return self.vision.encode(text, data)
        ids = self.encode(text)
        return Encoded(ids, ids, {})

    @cached_property
    def escape_special_tokens(self) -> SpecialTokenEscaper:
        return SpecialTokenEscaper(self.tokenizer)

    def answer(self, text: str) -> str:
        """The text of a tool's error or of the interaction, for the model."""
        return readable(text, self.limits.max_tool_output, self.limits.truncate)

    def escaped(self, text: str) -> str:
        """The text of a tool or user, without special tokens, of which one would end its message."""
        return self.escape_special_tokens(text.encode("utf-8", "replace").decode())  # no tokenizer takes surrogates

    @cached_property
    def image_tools(self) -> list[str]:
        return [name for name, tool in self.tools.items() if tool.returns_images]

    @cached_property
    def _escape_placeholders(self) -> SpecialTokenEscaper:
        return SpecialTokenEscaper(self.tokenizer, self.vision.placeholders)

    def without_placeholders(self, message: dict) -> dict:
        """A turn's message in which an image placeholder that the policy sampled stays text when it is encoded anew."""
        return message if self.vision is None else self._escape_placeholders(message)


def load_multi_turn(
    args: MultiTurnArgs,
    tokenizer,
    chat_template_kwargs: dict,
    max_prompt_length: int,
    vision: Vision | None = None,
    agent: Agent | None = None,
) -> MultiTurn:
    """Raises InputError: what load_tools, get_tool_parser and load_interaction raise."""
    # where episodes have a thread, a data set's truncation would cut their text
    tokenizer, vision = copy.deepcopy((tokenizer, vision))
    tools = load_tools(args.tools, args.tool_timeout)
    parse = get_tool_parser(args.parser, tokenizer, tools) if tools else lambda text: []
    interaction = load_interaction(args.interaction) if args.interaction else None
    return MultiTurn(tokenizer, tools, parse, interaction, args, chat_template_kwargs, max_prompt_length, vision, agent)


def glue(settings: MultiTurn, before: str, turn: str, after: str) -> str | None:
    """If `after` is `before`, then the turn, then more text: that text, which begins with the turn's end token."""
    if not after.startswith(before):
        return None
    end = len(before)
    for character in turn:
        if not character.isspace():
            while after[end : end + 1].isspace():
                end += 1
            if after[end : end + 1] != character:
                return None
            end += 1
    rest = after[end:].lstrip()
    return rest if settings.special_ids.issuperset(settings.encode(rest)[:1]) and rest else None


class Added(NamedTuple):
    messages: list[dict]
    rendered: str
    encoded: Encoded
    before: int  # tokens of the context that this follows; 0: this is the whole context
    data: dict  # images of the context

    @property
    def length(self) -> int:
        """The tokens of the context with it."""
        return self.before + len(self.encoded.ids)


async def encode_messages(
    request: AsyncRolloutRequest, settings: MultiTurn, turn: str, ended: bool, versions: list, images: Sequence[Image]
) -> Added:
    """What the turn and its answers add to the request. versions: the same messages in several forms: the first that
    keeps the sampled text is used, else the first that the template takes. ended: whether the policy sampled an end
    token. images: those that the answers show."""
    encode = partial(_encode_messages, request, settings, turn, ended, versions, images)
    takes_long = images or any(len(message["content"]) > LONG_TEXT for message in versions[0])
    return await in_thread(encode) if takes_long else encode()  # other episodes go on meanwhile


def add_messages(request: AsyncRolloutRequest, settings: MultiTurn, added: Added) -> bool:
    """Adds the messages, and their tokens to the row. False if row or window have no room for them and one more."""
    request.messages, request.rendered = added.messages, added.rendered
    if len(added.encoded.ids) >= request.room_behind(added.before):
        return False
    if not added.before:
        request.begin_segment()
    if added.encoded.inputs:
        request.append_images(added.encoded, added.data, settings.vision)
    else:
        request.append(added.encoded.ids)
    return True


def _encode_messages(request: AsyncRolloutRequest, settings: MultiTurn, turn, ended: bool, versions, images) -> Added:
    """Only reads the request."""
    rewritten = refusal = None
    for new in versions:
        messages = request.messages + new
        try:
            after = settings.render(request.shown + new, request.schemas)
        except REFUSALS as error:
            refusal = error
            continue
        rest = glue(settings, request.rendered, turn, after)
        if rest is not None:
            break
        rewritten = rewritten or (messages, after)
    else:
        if rewritten is None:
            raise refusal
        messages, after = rewritten
    shown = {"image": images} if images else {}
    data = request.data | {"image": [*request.data.get("image", ()), *images]} if images else request.data
    if rest is None:
        return Added(messages, after, settings.encode_with(after, data), 0, data)
    raw_ids, ids, inputs = settings.encode_with(rest, shown)
    encoded = Encoded(raw_ids[ended:], ids[ended:], inputs)
    return Added(messages, after, encoded, len(request.context), data)


def assistant_message(turn: str, calls: list[ToolCall], parse: Callable, first_id: int) -> dict:
    """The turn as templates want it: content and tool_calls. A turn with a malformed call has only content."""
    if not calls or any(call.error is not None for call in calls):
        return {"role": "assistant", "content": turn}
    # the content is the longest beginning without which the turn has the same calls
    start = bisect_left(range(1, len(turn)), True, key=lambda i: parse(turn[i:]) != calls)
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    tool_calls = [{"id": call_id(first_id + i), "type": "function", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": turn[:start].rstrip(), "tool_calls": tool_calls}


def content_of(text: str, images: list[Image]) -> str | list[dict]:
    """The content of a message with images, and then the text."""
    return [*[{"type": "image"}] * len(images), {"type": "text", "text": text}] if images else text


def _in_parts(message: dict) -> dict:
    text = message.get("content")
    return message | {"content": [{"type": "text", "text": text}]} if text and isinstance(text, str) else message


def call_id(number: int) -> str:
    return f"{number:09d}"  # Mistral's template demands nine characters


def check_template(settings: MultiTurn) -> None:
    """Raises InputError unless the template shows the answers to a turn, and its text can be encoded piece by piece."""
    name, end = f"tokenizer {getattr(settings.tokenizer, 'name_or_path', '')}", None
    question = {"role": "user", "content": "6*7?"}
    pairs: list[tuple[dict, dict]] = [({"role": "assistant", "content": "6*7=42"}, question | {"content": "4 or 2?"})]
    for tool in list(settings.tools)[:1]:
        call = {"id": call_id(0), "type": "function", "function": {"name": tool, "arguments": {}}}
        answer = {"role": "tool", "name": tool, "tool_call_id": call_id(0), "content": "4 or 2?"}
        pairs.append(({"role": "assistant", "content": "", "tool_calls": [call]}, answer))
    _check_shows_images(settings, question, *pairs[-1])
    for turn, answer in pairs:
        try:
            before, after = settings.render([question]), settings.render([question, turn, answer])
        except REFUSALS as error:
            raise InputError(f"{name}: its chat template takes no {answer['role']} message: {error}") from error
        if answer["content"] not in after:
            raise InputError(f"{name}: its chat template leaves out a {answer['role']} message after a turn")
        text = turn["content"] if end is None else after[len(before) :].partition(end)[0]
        rest = glue(settings, before, text, after)
        if rest is None:  # the template rewrites history: every turn is a segment, which is encoded as a whole
            return
        if settings.encode(before) + settings.encode(text) + settings.encode(rest) != settings.encode(after):
            raise InputError(f"{name}: a conversation encoded turn by turn has other tokens than the whole")
        end = settings.tokenizer.decode(settings.encode(rest)[:1])


def check_window(settings: MultiTurn) -> None:
    """Raises InputError unless the window holds a context of compact_at tokens, a turn, and its summary."""
    limits = settings.limits
    if limits.compact_at is None or limits.max_turn_tokens is None:
        return
    if settings.vision:
        raise InputError("--multi-turn.compact-at: a summary is text, and this --model reads images: take a text model")
    question, turn = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "6*7=42"}
    ask = {"role": "user", "content": limits.compact_prompt}
    texts = settings.render([question]) + turn["content"], settings.render([question, turn, ask])
    before, after = (len(settings.encode(text)) for text in texts)
    needed = limits.compact_at + 2 * limits.max_turn_tokens + after - before
    if limits.context_window is not None and limits.context_window < needed:
        parts = f"{limits.compact_at} of --multi-turn.compact-at, 2 x {limits.max_turn_tokens} of .max-turn-tokens"
        what = f"must hold {needed} tokens: {parts}, {after - before} of .compact-prompt"
        raise InputError(f"--multi-turn.context-window {limits.context_window}: {what}")


def _check_shows_images(settings: MultiTurn, question: dict, turn: dict, answer: dict) -> None:
    """Raises InputError if the template leaves out the image of a tool's answer."""
    if not settings.image_tools:
        return
    shown = answer | {"content": content_of(answer["content"], [None])}
    try:
        text, why = settings.render([question, turn, shown]), "leaves it out"
    except REFUSALS as error:
        text, why = "", f"refuses it: {error}"
    if text.count(settings.vision.processor.image_token) != 1:
        what = f"the chat template of tokenizer {getattr(settings.tokenizer, 'name_or_path', '')} {why}"
        raise InputError(f"--multi-turn.tools {settings.image_tools[0]}: returns an image; {what}")
