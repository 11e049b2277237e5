"""A scheduler for rollouts, of vLLM 0.32: in most steps each running request only gets its next token, and nobody
reads a response before it ends. Such a step is a few list operations a request here; vLLM's own scheduler treats it
as if it could be anything, and hands on each token. For all other steps and requests this is vLLM's scheduler.

Tokens, log-probs, finish reasons, KV blocks and the prefix cache are the same."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass(slots=True, eq=False)
class Row:
    """A request whose tokens are handed on together."""

    request: Request
    stop_ids: set[int]
    longest: int  # tokens of prompt and response
    tokens: list[int] = field(default_factory=list)  # not handed on yet
    log_probs: list[float] = field(default_factory=list)  # of these tokens, if the request wants them
    ranks: list[int] = field(default_factory=list)

    def hand_on(self, output: EngineCoreOutput) -> None:
        """Puts the tokens before those of `output`."""
        if output.new_logprobs:
            ids, log_probs, ranks, _ = output.new_logprobs
            held = np.array(self.tokens, ids.dtype), np.array(self.log_probs, log_probs.dtype)
            joined = (np.concatenate([old[:, None], new[:, :1]]) for old, new in zip(held, (ids, log_probs)))
            output.new_logprobs = LogprobsLists(*joined, np.concatenate([np.array(self.ranks, ranks.dtype), ranks]))
        output.new_token_ids = self.tokens + output.new_token_ids
        self.tokens, self.log_probs, self.ranks = [], [], []


class RolloutScheduler(Scheduler):
    """steps, fallback_steps: how often a step was scheduled, and how often by vLLM's own way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = self.fallback_steps = 0
        self._rows: dict[str, Row] = {}  # by request_id
        parts: tuple = (self.connector, self.ec_connector, self.aux_output_connector, self.return_sampling_mask)
        self._handles_rows = not any((*parts, self.num_spec_tokens, self.use_pp, self.log_stats))
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._groups = len(managers)
        self._one_block_size = all(
            type(manager) is FullAttentionManager and manager.block_size == self.block_size for manager in managers
        )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        special = request.mm_features or request.prompt_embeds is not None or request.use_structured_output
        if not self._handles_rows or special or request.resumable or params is None:
            return
        if params.output_kind != RequestOutputKind.FINAL_ONLY or params.stop or params.num_logprobs:
            return
        if params.repetition_detection is None:
            stop_ids = {*(params.stop_token_ids or ()), params.eos_token_id}
            longest = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
            self._rows[request.request_id] = Row(request, stop_ids, longest)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._rows.pop(request.request_id, None)
        return finished

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.steps += 1
        if requests := self._decodes():
            return self._schedule_decodes(requests)
        self.fallback_steps += 1
        return super().schedule(throttle_prefills)

    def _decodes(self) -> list[Request]:
        """The requests of a step that only decodes; none if the next step is another."""
        running, rows, size = self.running, self._rows, self.block_size
        admits = len(running) + self.num_waiting_for_streaming_input < self.max_num_active_reqs
        if (self.waiting or self.kv_holding_waiting) and admits:
            return []
        if self._inflight_prefills or self.pause_state == PauseState.PAUSED_ALL or not self._one_block_size:
            return []
        requests, blocks = [], 0
        for request in running:
            row, computed = rows.get(request.request_id), request.num_computed_tokens
            if row is None or len(request._all_token_ids) + request.num_output_placeholders - computed != 1:
                return []
            if computed + 1 < row.longest:  # otherwise its last token is being computed
                requests.append(request)
                blocks += not computed % size
        enough = blocks * self._groups <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        return requests if enough else []

    def _schedule_decodes(self, requests: list[Request]) -> SchedulerOutput:
        """As Scheduler.schedule and _update_after_schedule do it: a token each."""
        self.current_step += 1
        ids = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        known = [len(request._all_token_ids) for request in requests]
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(ids),
            num_computed_tokens=computed,
            num_output_tokens=[c + 1 - request.num_prompt_tokens for c, request in zip(computed, requests)],
        )
        for i, (c, k) in enumerate(zip(computed, known)):
            if not (c % self.block_size and k % self.block_size):  # it needs a block, or has filled one
                blocks = self.kv_cache_manager.allocate_slots(requests[i], 1)
                cached.new_block_ids[i] = blocks.get_block_ids(allow_none=True)
        if not self.use_v2_model_runner:
            scheduled = set(ids)
            for request_id in scheduled - self.prev_step_scheduled_req_ids:
                cached.all_token_ids[request_id] = self.requests[request_id].all_token_ids.copy()
            self.prev_step_scheduled_req_ids = scheduled
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self.ahead
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    ahead = 0  # placeholders of a step in flight

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Keeps the tokens of rows that go on; what else has happened is vLLM's."""
        sampled, at = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        if not self._rows or not sampled:
            return super().update_from_output(scheduler_output, model_runner_output)
        rows, ahead, hash_size, others = self._rows, self.ahead, self.hash_block_size, {}
        found = model_runner_output.logprobs
        log_probs, ranks = (found.logprobs[:, 0].tolist(), found.sampled_token_ranks.tolist()) if found else (None, None)
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            row, i = rows.get(request_id), at.get(request_id)
            if row is None or len(sampled[i]) != 1:
                others[request_id] = scheduled
                continue
            request, [token] = row.request, sampled[i]
            length = len(request._all_token_ids) + 1
            begins = request.prefill_stats is not None or request.num_stale_output_tokens
            if begins or token in row.stop_ids or length >= row.longest:
                others[request_id] = scheduled
                continue
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            request.num_in_flight_tokens -= scheduled
            request.num_output_placeholders -= ahead
            if not length % hash_size:
                request.update_block_hashes()
            row.tokens.append(token)
            if log_probs is not None:
                row.log_probs.append(log_probs[i])
                row.ranks.append(ranks[i])
        outputs = super().update_from_output(
            replace(scheduler_output, num_scheduled_tokens=others), model_runner_output
        )
        for of_client in outputs.values():
            for output in of_client.outputs:
                row = rows.pop(output.request_id, None) if output.finished else rows.get(output.request_id)
                if row is not None and row.tokens:
                    row.hand_on(output)
        return outputs


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """Schedules a step before it has read the one before, as vLLM does on GPUs."""

    ahead = 1


def make_scheduler(vllm_config: Any, **settings) -> RolloutScheduler:
    several = vllm_config.max_concurrent_batches > 1
    return (AsyncRolloutScheduler if several else RolloutScheduler)(vllm_config=vllm_config, **settings)
