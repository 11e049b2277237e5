"""Routing of mixtures of experts: which experts a token goes to, recorded and replayed.

A small difference in a router's input changes its choice of experts. So the engine, the pass before the update and the
update may send a token to different experts, and the ratio then compares two networks. With --routing-replay the
experts are recorded ones: R2, of the pass that computes old_log_probs (arXiv 2507.18071); R3, of the rollout engine
(arXiv 2510.11370). Their weights are the router's own, and the gradient flows through these.

The router's `topk` over the experts is replaced; scores, groups and normalization are each family's own code."""

import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lib.distributed import Max, Mean, Metric, add_metrics
from lib.model.attention import before_forward

ROUTES = "routed_experts"  # the column, and what a decoder takes: (tokens, layers with a router, experts of a token)
# model_type: class of its routers; tests/model/test_routing.py tests each
ROUTERS = {"mixtral": "MixtralTopKRouter", "olmoe": "OlmoeTopKRouter", "gpt_oss": "GptOssTopKRouter"}
ROUTERS |= {"deepseek_v3": "DeepseekV3TopkRouter", "glm4_moe": "Glm4MoeTopkRouter"}
ROUTERS |= {"qwen2_moe": "Qwen2MoeTopKRouter", "qwen3_moe": "Qwen3MoeTopKRouter", "qwen3_next": "Qwen3NextTopKRouter"}
ROUTERS["qwen3_5_moe_text"] = "Qwen3_5MoeTopKRouter"


def hook_routers(model: PreTrainedModel) -> None:
    """Lets the layers of a mixture take `routed_experts`. Sets model.routers, () for other models, and
    model.route_layers, the numbers of their layers. Call it before `shard_model`."""
    kind = ROUTERS.get(model.config.get_text_config().model_type)
    model.routers, model.route_layers = (), ()
    model.real_tokens = slice(None)  # the tokens of the last forward that are no padding: a slice or indices
    for name, router in list(model.named_modules()):
        if type(router).__name__ == kind:
            path, _, number = name.rpartition(".mlp.")[0].rpartition(".")  # ....layers.3.mlp.gate
            layer = model.get_submodule(f"{path}.{number}")
            router.number, router.routes, router.forward = len(model.routers), None, types.MethodType(_routed, router)
            layer.own_router = (router,)  # in a tuple it is no second name of its weights
            before_forward(layer, _give_routes)
            model.routers, model.route_layers = (*model.routers, router), (*model.route_layers, int(number))


def _give_routes(layer: Any, kwargs: dict) -> None:
    routes, [router] = kwargs.get(ROUTES), layer.own_router
    router.routes = None if routes is None else routes[:, router.number]


@torch.compiler.disable
def _routed(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The router's own forward, with the experts of router.routes (N, k) where they are known. Sets router.chosen, the
    experts that were taken, and what `RoutingMetrics` reads."""
    routes, router.routes = router.routes, None
    with _Selection(router.num_experts, router.top_k, routes) as selection:
        outputs = type(router).forward(router, hidden_states)
    router.chosen, router.differs = selection.chosen, selection.differs
    with torch.no_grad():
        log_p = outputs[0].detach().float().log_softmax(-1)  # (N, experts), of the router's logits
        router.entropies = -(log_p.exp() * log_p).sum(-1)  # (N,)
    return outputs


class _Selection(TorchFunctionMode):
    """In it, `topk` of k out of (N, experts) gives the routes (N, k), -1 where the scores decide."""

    def __init__(self, experts: int, k: int, routes: torch.Tensor | None):
        super().__init__()
        self.experts, self.k, self.routes = experts, k, routes
        self.chosen: torch.Tensor  # (N, k) int16
        self.differs: Mean | None = None  # rows whose scores would take other experts

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or (scores.shape[1], k) != (self.experts, self.k):  # of groups of experts
            return found
        values, experts = found
        if self.routes is not None:
            routes = self.routes.to(experts)
            known = routes >= 0  # (N, k)
            other = (routes.sort(-1).values != experts.sort(-1).values).any(-1) & known[:, 0]
            self.differs = Mean(other.sum(), known[:, 0].sum())
            experts = torch.where(known, routes, experts)
            values = scores.gather(-1, experts)
        self.chosen = experts.detach().to(torch.int16)
        return torch.return_types.topk((values, experts))


def chosen_experts(model: PreTrainedModel) -> torch.Tensor:
    """(N, layers, k) int16: the experts of the N tokens of the model's last forward."""
    return torch.stack([router.chosen for router in model.routers], 1)


# ---- the column ----------------------------------------------------------------------------------


def extended_routes(known: torch.Tensor | None, new: torch.Tensor | None, start: int = 0) -> torch.Tensor | None:
    """A row's routes (tokens, layers, k): the `known` ones, then the `new` ones, of the tokens from `start` on. A token
    keeps the experts of its first forward. -1 in a gap between the two; None: none known."""
    if new is None:
        return known
    known = new[:0] if known is None else known
    known = F.pad(known, (0, 0, 0, 0, 0, max(0, start - len(known))), value=-1)
    return torch.cat([known, new[len(known) - start :]])


def routes_column(rows: Sequence[torch.Tensor | None]) -> np.ndarray:
    """The column of these rows, (tokens, layers, k) each; None: unknown."""
    like = next(row for row in rows if row is not None)
    return np.fromiter((like[:0] if row is None else row for row in rows), dtype=object, count=len(rows))


def routes_of_tokens(rows: Sequence[torch.Tensor], attention_mask: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """(N, layers, k): the routes of the tokens at `token` (N,), indices into attention_mask (B, L), all on the CPU."""
    attended = attention_mask.sum(1).tolist()
    padded = [F.pad(row[:n], (0, 0, 0, 0, 0, n - len(row[:n])), value=-1) for row, n in zip(rows, attended)]
    return torch.cat(padded)[attention_mask.flatten().cumsum(0)[token] - 1]


def rows_of_routes(routes: torch.Tensor, attention_mask: torch.Tensor, place: torch.Tensor) -> list[torch.Tensor]:
    """The rows that `routes_of_tokens` takes, from a layout's routes (N, layers, k). place (B * L,): where a token is
    in the layout, -1 if it is left out."""
    found = torch.where((place >= 0)[:, None, None], routes[place], -1)
    rows = found.view(*attention_mask.shape, *routes.shape[1:])
    return [row[mask.bool()] for row, mask in zip(rows, attention_mask)]


# ---- metrics -------------------------------------------------------------------------------------


@dataclass
class RoutingMetrics:
    """Of all forwards of an update."""

    loads: torch.Tensor | float = 0.0  # (layers, experts)
    sums: dict[str, Metric] = field(default_factory=dict)

    @torch.no_grad()
    def watch(self, model: PreTrainedModel) -> None:
        """After a forward of a mixture."""
        for router in model.routers:
            entropies = router.entropies[model.real_tokens]
            add_metrics(self.sums, {"router/entropy": Mean(entropies.sum(), len(entropies))})
            if router.differs is not None:
                add_metrics(self.sums, {"router/differing_experts": router.differs})
        chosen = chosen_experts(model)[model.real_tokens].transpose(0, 1).flatten(1).long()  # (layers, N k)
        counts = chosen.new_zeros(len(chosen), model.routers[0].num_experts)
        self.loads = self.loads + counts.scatter_add(1, chosen, torch.ones_like(chosen)).double()

    def end(self) -> dict[str, Metric]:
        """A collective."""
        metrics, self.sums = self.sums, {}
        if isinstance(self.loads, torch.Tensor):
            dist.all_reduce(self.loads)
            most = self.loads.amax(1) / self.loads.mean(1)  # (layers,)
            metrics |= {"router/load_max": Max(most.max()), "router/load_mean": Mean(most.mean(), 1)}
            self.loads = 0.0
        return metrics
