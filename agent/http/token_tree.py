"""The tokens of an agent's episode: a tree of contexts, whose nodes are the answers that were sampled.

An answer's context is the prompt, or the path to an earlier answer and new text behind it. A row holds the tree as
segments, its paths from the root to the leaves. Where two paths share answers, the first one trains them and the second
repeats them as context: each sampled token is trained exactly once, in the context in which it was sampled."""

from dataclasses import dataclass, field

import torch

from lib.model.routing import extended_routes
from lib.rollout import Generated


class RowFull(Exception):
    """The row has no room for a context and one more token."""


@dataclass(eq=False)
class Segment:
    """A path of the tree: one sequence of a row."""

    parts: list[tuple[list[int], Generated | None]]  # tokens, and how they were sampled; None: text
    is_busy: bool = False  # whether something is being sampled at its end
    routes: torch.Tensor | None = None  # as in the column routed_experts, if the engine returns them

    @property
    def ids(self) -> list[int]:
        return [token for ids, _ in self.parts for token in ids]


@dataclass(eq=False)
class Answer:
    """A node of the tree."""

    segment: Segment
    end: int  # the parts of the segment that lead to it, its own included

    @property
    def ids(self) -> list[int]:
        """Its context, and the tokens that were sampled."""
        return [token for ids, _ in self.segment.parts[: self.end] for token in ids]

    @property
    def num_sampled(self) -> int:
        """The sampled tokens among these."""
        return sum(len(ids) for ids, sampled in self.segment.parts[: self.end] if sampled is not None)

    @property
    def is_leaf(self) -> bool:
        """Whether the segment ends here, so that the next answer can stand behind it."""
        return self.end == len(self.segment.parts) and not self.segment.is_busy


@dataclass(eq=False)
class Request:
    """An answer that is being sampled."""

    segment: Segment
    new: list[int]  # the tokens between the segment so far and the answer
    is_fork: bool = False  # whether another answer stands where it would continue a segment
    limit: int = 0  # of the answer's tokens

    @property
    def context(self) -> list[int]:
        return self.segment.ids + self.new


@dataclass(eq=False)
class TokenTree:
    prompt_ids: list[int]
    max_response_length: int  # tokens of all segments together, without the prompt
    window: int | None = None  # the most tokens of a context and its answer; None: the row's
    segments: list[Segment] = field(init=False)  # the first begins with the prompt
    running: set[Request] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.root = Answer(Segment([(self.prompt_ids, None)]), 1)
        self.segments = [self.root.segment]

    @property
    def room(self) -> int:
        """The tokens that are left."""
        used = sum(len(ids) for segment in self.segments for ids, _ in segment.parts) - len(self.prompt_ids)
        return self.max_response_length - used - sum(len(r.new) + r.limit for r in self.running)

    def longest(self, ids: list[int]) -> Answer | None:
        """The answer whose tokens, with its context, begin `ids`: of several the longest, if there is one a leaf."""
        found: dict[tuple[int, bool], Answer] = {}
        for segment in self.segments:
            start = 0
            for end, (part, sampled) in enumerate(segment.parts, 1):
                if ids[start : start + len(part)] != part:
                    break
                start += len(part)
                if sampled is not None:
                    answer = Answer(segment, end)
                    found[start, answer.is_leaf] = answer
        return found[max(found)] if found else None

    def begin(self, contexts: list[tuple[Answer | None, list[int]]], max_tokens: int | None) -> list[Request] | None:
        """A request for an answer to each context: new tokens behind an answer, or (None) a whole context. max_tokens:
        of one answer; None: as many as there is room for. Returns None if running requests hold the room. Raises
        RowFull."""
        P, n = len(self.prompt_ids), len(contexts)
        requests = []
        for before, new in contexts:
            if before is None and new[:P] == self.prompt_ids:
                before, new = self.root, new[P:]
            if before is not None and before.is_leaf:
                requests.append(Request(before.segment, new))
                before.segment.is_busy = True
            else:
                forks = before is not None
                requests.append(Request(Segment([]), before.ids + new if forks else new, forks))
        if self.window is not None:
            left = self.window - max(len(request.context) for request in requests)
            max_tokens = left if max_tokens is None else min(max_tokens, left)
        room = self.room - sum(len(request.new) for request in requests)
        limit = room // n if max_tokens is None else min(max_tokens, room // n)
        waits = bool(self.running) and (max_tokens is None or limit < max_tokens)
        if waits or limit < 1:
            self._leave(requests)
            if waits:
                return None
            window = f" and a window of {self.window}" if self.window else ""
            raise RowFull(f"{len(requests[0].new)} more tokens of context, in a row with room for {self.room}{window}")
        for request in requests:
            request.limit = limit
        self.running |= {*requests}
        return requests

    def end(self, request: Request, sampled: Generated) -> Answer:
        self.running.remove(request)
        segment = request.segment
        segment.is_busy = False
        if not segment.parts:
            self.segments.append(segment)
        segment.parts += [(request.new, None), (sampled.token_ids, sampled)]
        segment.routes = extended_routes(segment.routes, sampled.routed_experts)
        sampled.routed_experts = None  # each answer's would be those of its whole context
        return Answer(segment, len(segment.parts))

    def cancel(self, requests: list[Request]) -> int:
        """Forgets those that still run, of which nothing is known. Returns their number."""
        left = [request for request in requests if request in self.running]
        self._leave(left)
        self.running -= {*left}
        return len(left)

    def _leave(self, requests: list[Request]) -> None:
        for request in requests:
            request.segment.is_busy = False
