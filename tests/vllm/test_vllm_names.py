"""A vLLM that lacks private names is refused with these names."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

# Importing torch and vLLM warns of what they do.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@dataclass(slots=True)
class Base:
    inherited: int


class Known(Base):
    annotated: str

    def __init__(self) -> None:
        super().__init__(1)
        self.assigned: list[int] = []
        if self.not_assigned == 2:
            self.in_another = 1

    @property
    def not_assigned(self) -> int:
        return 1

    def hook(self, request: int, num_tokens: int) -> None: ...


def test_members_are_methods_properties_and_fields_of_all_bases() -> None:
    from baton.kvtransfer.connector.vllm_names import missing_members

    has = ("inherited", "annotated", "not_assigned", "hook")
    assert missing_members({Known: has}) == []
    assert missing_members({Known: (*has, "gone"), Base: ("annotated",)}) == [
        "Known.gone",
        "Base.annotated",
    ]


def test_assignments_are_found_in_the_code() -> None:
    from baton.kvtransfer.connector.vllm_names import missing_assignments

    names = ("assigned", "in_another", "not_assigned", "gone")
    assert missing_assignments({Known: names}) == ["Known.not_assigned", "Known.gone"]


def test_a_gpu_platform_that_lacks_the_choice_of_the_block_size_is_refused(monkeypatch) -> None:
    """vLLM's platform returns None for a name that it does not know."""
    from baton.engine import vllm_config
    from baton.engine.base import EngineDead

    class Platform:
        def is_cpu(self) -> bool:
            return False

        def __getattr__(self, name: str) -> None:
            return None

    monkeypatch.setattr(vllm_config, "Platform", Platform)
    monkeypatch.setattr(vllm_config, "current_platform", Platform())
    cache = SimpleNamespace(user_specified_block_size=False)
    with pytest.raises(EngineDead, match=r"lacks Platform\._preferred_block_size_for_backends"):
        vllm_config._fix_block_size(SimpleNamespace(cache_config=cache), [object()])


def test_attributes_of_instances_and_modules() -> None:
    from baton.kvtransfer.connector.vllm_names import missing_attributes

    assert missing_attributes(Known(), ["assigned", "gone"]) == ["Known.gone"]
    module = ModuleType("some.module")
    assert missing_attributes(module, ["__name__", "gone"]) == ["some.module.gone"]


def test_a_method_with_other_parameters_is_missing() -> None:
    from baton.kvtransfer.connector.vllm_names import changed_methods

    parameters = ["self", "request", "num_tokens"]
    assert changed_methods(Known, {"hook": parameters}) == []
    assert changed_methods(Known, {"hook": ["self", "request"], "gone": ["self"]}) == [
        "Known.hook(self, request)",
        "Known.gone(self)",
    ]


def test_the_error_names_the_version_the_names_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm

    from baton.kvtransfer.connector.vllm_names import require

    monkeypatch.setattr(vllm, "__version__", "9.9")
    require([], "handoffs use")
    with pytest.raises(KeyError) as told:
        require(["A.b", "C.d"], "handoffs use", or_else="set x to 0", error=KeyError)
    assert told.value.args == (
        "vLLM 9.9 lacks A.b, C.d, which handoffs use; install the version that Baton requires, "
        "or set x to 0",
    )
