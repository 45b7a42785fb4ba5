"""AdamW on local shards, with the bits of ``torch.optim.AdamW``. Needs no whole matrix.

Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization (2019).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from omn_dist.algorithms.adamw import AdamWCoefficients, AdamWShards
from omn_dist.optim.rules.rule import LocalShard, ShardRule, StateTensor, Tools
from omn_dist.settings import SettingsError

STEP, FIRST_MOMENT, SECOND_MOMENT = "step", "exp_avg", "exp_avg_sq"
"""State keys, as in ``torch.optim.AdamW``. ``step`` counts the gradients of the parameter."""


class AdamW(ShardRule):
    """AdamW: what is no matrix, and rows of a fused parameter that are none."""

    name = "adamw"
    label = "AdamW"
    fields = ("lr", "betas", "eps", "weight_decay")

    @override
    def defaults(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        return {field: recipe[f"adamw_{field}"] for field in self.fields}

    @override
    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if "betas" in group and not all(0 <= beta < 1 for beta in group["betas"]):
            raise SettingsError(f"betas: found {group['betas']!r}, expected two numbers in [0, 1)")

    @override
    def state(self, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
        return (
            StateTensor(STEP, "once"),
            StateTensor(FIRST_MOMENT, "elements"),
            StateTensor(SECOND_MOMENT, "elements"),
        )

    @override
    def settings(self, group: Mapping[str, Any]) -> AdamWCoefficients:
        first, second = group["betas"]
        return AdamWCoefficients(lr=float(group["lr"]), betas=(first, second), eps=group["eps"], weight_decay=group["weight_decay"])

    @override
    def update(self, shards: Sequence[LocalShard], settings: AdamWCoefficients, tools: Tools) -> None:
        lists = AdamWShards(
            [shard.parameter for shard in shards],
            [shard.gradient for shard in shards],
            [shard.state[FIRST_MOMENT] for shard in shards],
            [shard.state[SECOND_MOMENT] for shard in shards],
            [shard.state[STEP] for shard in shards],
        )
        tools.kernels.adamw(lists, settings, batch_invariant=tools.batch_invariant)
