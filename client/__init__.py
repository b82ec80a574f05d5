"""The gRPC clients: `BatonClient` (asyncio), `BlockingClient` (threads), `AdminClient`."""

from baton.client.admin import AdminClient
from baton.client.blocking import BlockingClient, BlockingStream
from baton.client.client import BatonClient
from baton.client.credentials import ApiKey, Tls
from baton.client.events import (
    Accepted,
    Completion,
    Event,
    Finished,
    LatencyBudget,
    StageTime,
    TokenLogprob,
    Tokens,
    Usage,
)
from baton.client.request import ChatMessage, Prompt, RequestOptions, SamplingOptions, Slo
from baton.client.stream import TokenStream

__all__ = [
    "Accepted",
    "AdminClient",
    "ApiKey",
    "BatonClient",
    "BlockingClient",
    "BlockingStream",
    "ChatMessage",
    "Completion",
    "Event",
    "Finished",
    "LatencyBudget",
    "Prompt",
    "RequestOptions",
    "SamplingOptions",
    "Slo",
    "StageTime",
    "TokenLogprob",
    "Tls",
    "TokenStream",
    "Tokens",
    "Usage",
]
