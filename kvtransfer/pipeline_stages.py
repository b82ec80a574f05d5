"""Which layers of a model the ranks of a pipeline stage hold.

A model's layers are divided among pipeline stages, and the heads of each layer among the
tensor-parallel ranks of its stage. A shard (head_ranges.py) is a range of heads in the layers of
all stages, and layers are numbered in the whole model, as in an engine with one stage. So staging
and frames do not depend on the number of stages: each rank fills, and loads, the layers that it
holds of the shards that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.runtime.kv.kv_groups import KvGroup


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A pipeline stage.

    Attributes:
        index: Index of the stage.
        layers: Indices in the whole model of the stage's layers, in the order of its caches.
    """

    index: int
    layers: Sequence[int]


def whole_model(stages: Sequence[Sequence[KvGroup]]) -> list[KvGroup]:
    """Returns the groups of layers of all stages, in the order that one stage would give them.

    Args:
        stages: For each stage, the groups of its layers in their order. An engine divides the
            layers of the whole model among block tables before it divides them among stages, so
            tables of the same index belong together.
    """
    of_stages = [group for groups in stages for group in groups]
    found: dict[KvGroup, int] = {}
    for group in sorted(of_stages, key=lambda one: (one.is_draft, one.table)):
        kind = _without_number(group)
        found[kind] = found.get(kind, 0) + group.num_layers
    return [replace(kind, num_layers=number) for kind, number in found.items()]


def stage_of(stages: Sequence[Sequence[KvGroup]], index: int) -> PipelineStage:
    """Returns a stage with the indices of its layers.

    Args:
        stages: See `whole_model`.
        index: Index of the stage.
    """
    # Index of the first layer of each group that no earlier stage holds.
    firsts: dict[KvGroup, int] = {}
    begin = 0
    for group in whole_model(stages):
        firsts[_without_number(group)] = begin
        begin += group.num_layers
    for group in (group for groups in stages[:index] for group in groups):
        firsts[_without_number(group)] += group.num_layers
    layers: list[int] = []
    for group in stages[index]:
        first = firsts[_without_number(group)]
        layers += range(first, first + group.num_layers)
    return PipelineStage(index, layers)


def _without_number(group: KvGroup) -> KvGroup:
    return replace(group, num_layers=0)
