from collections.abc import AsyncIterator

import pytest

from tests.runtime.otlp_collector import OtlpCollector


@pytest.fixture
async def collector() -> AsyncIterator[OtlpCollector]:
    async with OtlpCollector() as collector:
        yield collector
