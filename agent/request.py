"""The state of an episode: its messages, its tokens, and what happened in it."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.nn.functional as F

from agent.metrics import FinishReason
from agent.tools.base import BaseTool, readable
from lib.data.vision import Encoded, Media, Vision, media_hash
from lib.model.routing import extended_routes
from lib.reward.scorer import LARGEST_SCORE
from lib.rollout import Generated

MOST_ERRORS, ERROR_TEXT = 20, 300  # errors of an episode that its sample shows, characters of one


class RequestState(Enum):
    PENDING = "pending"
    RUNNING = "running"  # in the engine, or waiting for it
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass
class AsyncRolloutRequest:
    """The state of an episode: its messages, the text that the template renders, and the tokens."""

    request_id: str
    messages: list[dict]
    rendered: str
    prompt_ids: list[int]
    raw_context: list[int]  # as `context`, with one placeholder for each image: what an engine is given
    positions: torch.Tensor  # (n,), or with mrope (4, n): those of `context`
    tools_kwargs: dict
    interaction_kwargs: dict
    seed: int
    weight_version: int | None
    max_response_length: int
    tools: dict[str, BaseTool] = field(default_factory=dict)  # of its row
    schemas: list[dict] = field(default_factory=list)  # of these
    row: dict = field(default_factory=dict)  # of the data set, for an agent
    answer: str | None = None  # of an agent, for the scorers; None: it needs none, or has none
    data: dict = field(default_factory=dict)  # the images of `context`, as in multi_modal_data
    inputs: dict = field(default_factory=dict)  # and as in multi_modal_inputs
    hash: int = 0  # of these
    row_inputs: dict = field(default_factory=dict)  # those of all segments, one after the other
    state: RequestState = RequestState.PENDING
    finish_reason: FinishReason | None = None
    observation: int = 0  # hash of what answered the last turn; 0: the prompt
    token_ids: list[int] = field(default_factory=list)  # tokens of the response; the next five go with them
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)  # -1 where none is known
    anchor_states: list[int] = field(default_factory=list)  # of a sampled token: the observation before its turn
    turn_numbers: list[int] = field(default_factory=list)  # of a sampled token: the number of its turn, from 1
    new_positions: list[torch.Tensor] = field(default_factory=list)  # pieces
    routed_experts: torch.Tensor | None = None  # of the prompt and the response, as in the column
    starts: list[int] = field(default_factory=lambda: [0])  # where segments start; the first includes the prompt
    num_turns: int = 0
    rewards: list[tuple[int, float]] = field(default_factory=list)  # with the index of the last token before each
    window: int | None = None  # the most tokens of a context and its turn; None: the row's
    summarized: int = 0  # the number of messages that the context has no more
    summary: list[dict] = field(default_factory=list)  # and those that it has instead: the prompt and a summary
    metrics: Counter = field(default_factory=Counter)
    tool_errors: list[str] = field(default_factory=list)  # what its sample shows of them
    tool_rewards: list[dict] = field(default_factory=list)  # turn, tool and reward of each call of a tool that it has

    def add_error(self, where: str, kind: str, what: str) -> None:
        """Counts an error of a tool, and keeps the first line of the first few for the sample."""
        self.metrics[kind] += 1
        if len(self.tool_errors) < MOST_ERRORS:
            line = f"turn {self.num_turns}, {where[:50]}, {kind}: {what.partition(chr(10))[0]}"
            self.tool_errors.append(readable(line, ERROR_TEXT, "right"))

    @property
    def context(self) -> list[int]:
        """The tokens from which the next turn is sampled."""
        return ([] if self.starts[-1] else self.prompt_ids) + self.token_ids[self.starts[-1] :]

    @property
    def sampled(self) -> list[int]:
        """Which tokens of `context` the policy sampled (1)."""
        return ([] if self.starts[-1] else [0] * len(self.prompt_ids)) + self.response_mask[self.starts[-1] :]

    @property
    def media(self) -> Media | None:
        """What an engine is given besides raw_context."""
        if not self.inputs:
            return None
        return Media(self.data, self.inputs, self.context, self.positions, self.hash, self.sampled)

    @property
    def position_ids(self) -> torch.Tensor:
        """(T,), or with mrope (4, T): those of the response."""
        return torch.cat(self.new_positions, -1) if self.new_positions else torch.empty(0, dtype=torch.long)

    @property
    def shown(self) -> list[dict]:
        """The messages of the context."""
        return self.summary + without_calls(self.messages[self.summarized :]) if self.summary else self.messages

    @property
    def room(self) -> int:
        """The tokens that the row and the window have left."""
        return self.room_behind(len(self.context))

    def room_behind(self, context: int) -> int:
        """The same in a segment with `context` tokens so far."""
        row = self.max_response_length - len(self.token_ids)
        return row if self.window is None else min(row, self.window - context)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, [*self.starts[1:], len(self.token_ids)]))

    def append(self, ids: list[int], sampled: Generated | None = None, positions: torch.Tensor | None = None) -> None:
        """Appends tokens that the policy sampled or text that it was given. positions: None, without images."""
        if positions is None:
            highest = F.pad(self.positions, (1, 0), value=-1).amax(-1, keepdim=True)
            positions = highest + torch.arange(1, len(ids) + 1)
            self.raw_context += ids
        self.positions = torch.cat([self.positions, positions], -1)
        self.new_positions.append(positions)
        n, state, turn = len(ids), 0, 0
        log_probs, versions = [0.0] * n, [-1] * n
        if sampled is not None:
            state, turn = self.observation, 1 + max(self.turn_numbers, default=0)
            log_probs, versions = sampled.log_probs, sampled.weight_versions or versions
        self.token_ids += ids
        self.response_mask += [int(sampled is not None)] * n
        self.log_probs += log_probs
        self.weight_versions += versions
        self.anchor_states += [state] * n
        self.turn_numbers += [turn] * n

    def add_routes(self, routes: torch.Tensor | None) -> None:
        """routes: of the tokens of `context` as far as they are known, if the engine returns them."""
        start = len(self.prompt_ids) + len(self.token_ids) - self.positions.shape[-1]
        self.routed_experts = extended_routes(self.routed_experts, routes, start)

    def append_images(self, encoded: Encoded, data: dict, vision: Vision) -> None:
        """Appends text with images that the policy was given. data: all images of the context, these among them."""
        self.data, self.inputs = data, vision.joined(self.inputs, encoded.inputs)
        self.row_inputs = vision.joined(self.row_inputs, encoded.inputs) if self.starts[-1] else self.inputs
        self.hash = media_hash(self.inputs)
        self.raw_context += encoded.raw_ids
        positions = vision.positions(self.context + encoded.ids, self.inputs)
        self.append(encoded.ids, positions=positions[..., self.positions.shape[-1] :])

    def begin_segment(self) -> None:
        """What is appended next has nothing before it."""
        self.starts.append(len(self.token_ids))
        self.raw_context, self.inputs = [], {}
        self.positions = self.positions[..., :0]

    def reward(self, value: float) -> None:
        if not abs(value) <= LARGEST_SCORE:
            raise ValueError(f"a reward of {value}; use numbers up to {LARGEST_SCORE:g}")
        self.rewards.append((len(self.token_ids) - 1, float(value)))

    def end(self) -> None:
        done = self.finish_reason not in (None, FinishReason.ABORTED)
        self.state = RequestState.COMPLETED if done else RequestState.FAILED


def without_calls(messages: list[dict]) -> list[dict]:
    """Messages whose beginning has no call before it: there, answers of tools become messages of the user."""
    n = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    first = [{"role": "user", "content": m["content"]} if m["role"] == "tool" else m for m in messages[:n]]
    return first + messages[n:]
