"""Pipeline stages: each layer has the same number, whatever the number of stages is."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.pipeline_stages import stage_of, whole_model
from baton.runtime.kv.kv_groups import KvGroup

KINDS = [
    KvGroup("full", 1, 2, 4, 64, table=0),
    # Layers of two sizes in one block table.
    KvGroup("full", 1, 1, 4, 32, table=0),
    KvGroup("window", 1, 2, 4, 64, window_tokens=10, table=1),
    KvGroup("state", 1, 0, 8, 96, table=2),
]


def groups_of(layers):
    """Returns the groups of layers, and the layers in their order, as the connector makes them."""
    found = {}
    for table in range(3):
        for number, kind in layers:
            if kind.table == table:
                found.setdefault(kind, []).append(number)
    groups = [replace(kind, num_layers=len(numbers)) for kind, numbers in found.items()]
    return groups, [number for numbers in found.values() for number in numbers]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=24), st.data())
def test_stages_number_the_layers_as_one_stage_does(kinds, data):
    layers = list(enumerate(kinds))
    ends = data.draw(st.lists(st.integers(0, len(layers)), max_size=4).map(sorted))
    bounds = itertools.pairwise([0, *ends, len(layers)])
    stages = [groups_of(layers[begin:end]) for begin, end in bounds]
    of_stages = [groups for groups, _ in stages]
    whole, order = groups_of(layers)
    assert whole_model(of_stages) == whole
    held = []
    for index, (_, own) in enumerate(stages):
        stage = stage_of(of_stages, index)
        assert stage.index == index
        assert [order[layer] for layer in stage.layers] == own
        held += stage.layers
    assert sorted(held) == list(range(len(layers)))
