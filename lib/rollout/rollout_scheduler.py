"""A scheduler of vLLM 0.32 for rollouts: in most of their steps each request gets its next token, and nothing else
happens. Such a step is a few list operations a request here, and a response is handed on when it ends; vLLM's own
scheduler handles each token as if anything could happen. It still does in all other steps, and for other requests.

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


def make_scheduler(vllm_config: Any, **settings) -> "RolloutScheduler":
    several = vllm_config.max_concurrent_batches > 1  # scheduled ahead
    return (AsyncRolloutScheduler if several else RolloutScheduler)(vllm_config=vllm_config, **settings)


@dataclass(slots=True, eq=False)
class Row:
    """A request that only its tokens and its length can end, and whose response is read as a whole."""

    request: Request
    stop_ids: set[int | None]
    longest: int  # tokens of prompt and response
    tokens: list[int] = field(default_factory=list)  # not handed on yet
    log_probs: list[float] = field(default_factory=list)  # of these tokens, if any request wants them
    ranks: list[int] = field(default_factory=list)

    def goes_on(self, token: int) -> bool:
        """Whether vLLM has nothing else to do with the token."""
        request = self.request
        special = request.prefill_stats is not None or request.num_stale_output_tokens  # its first; before a preemption
        return not special and token not in self.stop_ids and len(request._all_token_ids) + 1 < self.longest

    def hand_on(self, output: EngineCoreOutput) -> None:
        """Puts the tokens before those of `output`."""
        output.new_token_ids = self.tokens + output.new_token_ids
        if output.new_logprobs:
            kept = np.array(self.tokens)[:, None], np.array(self.log_probs, np.float32)[:, None], np.array(self.ranks)
            ids, log_probs, ranks, _ = output.new_logprobs
            parts = zip(kept, (ids[:, :1], log_probs[:, :1], ranks))
            output.new_logprobs = LogprobsLists(*map(np.concatenate, parts))
        self.tokens, self.log_probs, self.ranks = [], [], []


class RolloutScheduler(Scheduler):
    finished_req_ids: set[str]  # vLLM's: of requests since the last step
    reset_preempted_req_ids: set[str]
    prev_step_scheduled_req_ids: set[str]
    in_flight = 0  # steps that are scheduled before the one before has been read

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = self.fallback_steps = 0  # all, and those that vLLM's own scheduler scheduled
        self._rows: dict[str, Row] = {}  # by request_id
        others = self.connector, self.ec_connector, self.aux_output_connector, self.num_spec_tokens, self.use_pp
        self.handles_rows = not any((*others, self.return_sampling_mask, self.log_stats))
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._full_attention = all(
            type(manager) is FullAttentionManager and manager.block_size == self.block_size
            for manager in self._managers
        )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        special = request.mm_features or request.prompt_embeds is not None or request.resumable or params is None
        if special or not self.handles_rows or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return
        if not (params.stop or params.num_logprobs or params.repetition_detection or params.structured_outputs):
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
        if requests := self._decoding():
            return self._schedule_decodes(requests)
        self.fallback_steps += 1
        return super().schedule(throttle_prefills)

    def _decoding(self) -> list[Request]:
        """The requests of the next step, if it gives each its next token; none if something else is to do."""
        begins = (self.waiting or self.kv_holding_waiting) and len(self.running) < self.max_num_active_reqs
        if begins or self._inflight_prefills or self.pause_state == PauseState.PAUSED_ALL or not self._full_attention:
            return []
        requests, blocks = [], 0
        for request in self.running:
            row, computed = self._rows.get(request.request_id), request.num_computed_tokens
            if row is None or len(request._all_token_ids) + request.num_output_placeholders != computed + 1:
                return []
            if computed + 1 < row.longest:  # otherwise its last token is in flight
                requests.append(request)
                blocks += computed % self.block_size == 0
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return requests if blocks * len(self._managers) <= free else []  # otherwise some are preempted

    def _schedule_decodes(self, requests: list[Request]) -> SchedulerOutput:
        """What Scheduler.schedule does with them."""
        self.current_step += 1
        ids = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(ids),
            num_computed_tokens=computed,
            num_output_tokens=[n + 1 - request.num_prompt_tokens for n, request in zip(computed, requests)],
        )
        size = self.block_size
        for i, (n, request) in enumerate(zip(computed, requests)):
            if n % size == 0 or len(request._all_token_ids) % size == 0:  # it needs a block, or has filled one
                cached.new_block_ids[i] = self.kv_cache_manager.allocate_slots(request, 1).get_block_ids(
                    allow_none=True
                )
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
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self.in_flight
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Keeps the tokens of rows that go on; the others are vLLM's."""
        if not self._rows:
            return super().update_from_output(scheduler_output, model_runner_output)
        sampled, at = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        found = model_runner_output.logprobs
        others: dict[str, int] = {}
        log_probs, ranks = (found.logprobs[:, 0].tolist(), found.sampled_token_ranks.tolist()) if found else ([], [])
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            row, i = self._rows.get(request_id), at.get(request_id)
            if row is None or len(sampled[i]) != 1 or not row.goes_on(token := sampled[i][0]):
                others[request_id] = scheduled
                continue
            request = row.request
            request.num_in_flight_tokens -= scheduled
            request.num_output_placeholders -= self.in_flight
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if len(request._all_token_ids) % self.hash_block_size == 0:
                request.update_block_hashes()
            row.tokens.append(token)
            if found:
                row.log_probs.append(log_probs[i])
                row.ranks.append(ranks[i])
        rest = replace(scheduler_output, num_scheduled_tokens=others)
        outputs = super().update_from_output(rest, model_runner_output)
        for of_client in outputs.values():
            for output in of_client.outputs:
                row = self._rows.pop(output.request_id, None) if output.finished else self._rows.get(output.request_id)
                if row is not None and row.tokens:
                    row.hand_on(output)
        return outputs


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """As vLLM schedules on GPUs."""

    in_flight = 1
