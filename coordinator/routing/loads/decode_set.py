"""The decodes that are assigned to one worker, with their sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.coordinator.routing.loads.kv_forecast import KvForecast, KvForecasts
from baton.coordinator.state.requests import RequestKey

# Decodes count with the tokens that they hold if these are this many times as many as predicted:
# smaller differences come and go with the ages of the decodes.
_MORE = 1.1


@dataclass(slots=True)
class _Decode:
    """A request assigned to a decode worker.

    Attributes:
        num_kv_tokens: KV tokens that few requests like this one exceed.
        forecast: its KV tokens after further steps.
        is_interactive: whether it is known to be an interactive request, for which batch requests
            may be parked.
        can_be_parked: whether it is a batch request that may be parked for interactive ones.
        num_mean_tokens: KV tokens that the request has on average while it decodes.
        has_arrived: whether the request's prompt is computed.
        is_late: whether this worker computed the prompt after its first token was due.
        num_held_tokens: KV tokens that the request had when it last reported output; 0 before.
    """

    num_kv_tokens: int
    is_interactive: bool
    can_be_parked: bool
    num_mean_tokens: int
    forecast: KvForecast
    has_arrived: bool = False
    is_late: bool = False
    num_held_tokens: int = 0


@dataclass(slots=True, eq=False)
class DecodeSet:
    """Owns the decodes of one worker, by their requests' keys.

    A decode counts from its assignment, even while another worker still computes its prompt.

    Attributes:
        num_arrived: number of decodes whose prompts are computed.
        num_interactive: number of decodes that are known to be interactive.
        num_late: number of decodes whose prompts this worker computed too late.
        reserved_tokens: sum of the largest KV tokens that decodes are expected to reach. They reach
            them at different times; see `peak_tokens`.
        num_parkable: number of decodes that may be parked.
        mean_tokens: KV tokens that all decodes are predicted to have on average;
            `reserved_tokens` is the maximum.
        held_tokens: KV tokens that all decodes had when they last reported output.
    """

    num_arrived: int = 0
    num_interactive: int = 0
    num_late: int = 0
    reserved_tokens: int = 0
    num_parkable: int = 0
    mean_tokens: int = 0
    held_tokens: int = 0
    _decodes: dict[RequestKey, _Decode] = field(default_factory=dict)
    _forecasts: KvForecasts = field(default_factory=KvForecasts)
    # Those of the decodes that may not be parked.
    _staying: KvForecasts = field(default_factory=KvForecasts)

    def __len__(self) -> int:
        return len(self._decodes)

    def __contains__(self, name: object) -> bool:
        return name in self._decodes

    @property
    def peak_tokens(self) -> int:
        """KV tokens that the decodes need together at most."""
        return self._forecasts.peak_tokens

    @property
    def staying_tokens(self) -> int:
        """The same of the decodes that may not be parked."""
        return self._staying.peak_tokens

    @property
    def safe_tokens(self) -> int:
        """The same with a large margin."""
        return self._forecasts.safe_tokens

    @property
    def batch_may_join(self) -> bool:
        """Whether a batch decode may join regardless of the step time.

        It may if no decode is interactive, and also if all are: then no batch decode is there yet.
        """
        return not self.num_interactive or self.num_interactive == len(self._decodes)

    @property
    def step_tokens(self) -> int:
        """KV tokens that a decode step attends to, in the near future.

        The prediction is too small if outputs have become longer than those that have ended so far,
        and after many outputs have begun at the same time.
        """
        return _step_tokens(self.mean_tokens, self.held_tokens)

    def after_parking(self) -> tuple[int, int]:
        """Number of the decodes that may not be parked, and their `step_tokens`."""
        staying = [one for one in self._decodes.values() if not one.can_be_parked]
        mean_tokens = sum(one.num_mean_tokens for one in staying)
        held_tokens = sum(one.num_held_tokens for one in staying)
        return len(staying), _step_tokens(mean_tokens, held_tokens)

    def add(
        self,
        request: RequestKey,
        num_kv_tokens: int,
        *,
        is_interactive: bool = False,
        can_be_parked: bool = False,
        num_mean_tokens: int | None = None,
        forecast: KvForecast | None = None,
    ) -> None:
        """Adds a decode; see `FleetView.assign_decode` for the arguments."""
        assert request not in self._decodes
        if num_mean_tokens is None:
            num_mean_tokens = num_kv_tokens
        if forecast is None:
            forecast = KvForecast(num_kv_tokens)
        self._decodes[request] = _Decode(
            num_kv_tokens, is_interactive, can_be_parked, num_mean_tokens, forecast
        )
        self._add(self._decodes[request])
        self.mean_tokens += num_mean_tokens
        self.num_interactive += is_interactive
        self.num_parkable += can_be_parked
        self.reserved_tokens += num_kv_tokens

    def arrive(self, request: RequestKey) -> None:
        """Records that the prompt of a decode is computed; ignores unknown requests."""
        decode = self._decodes.get(request)
        if decode is not None and not decode.has_arrived:
            decode.has_arrived = True
            self.num_arrived += 1

    def mark_late(self, request: RequestKey) -> None:
        """Records that this worker computed a prompt too late; ignores unknown requests."""
        decode = self._decodes.get(request)
        if decode is not None and not decode.is_late:
            decode.is_late = True
            self.num_late += 1

    def room_of_parking(self, requests: Iterable[RequestKey]) -> Iterator[tuple[RequestKey, int]]:
        """Yields those of some requests that may be parked, with the KV tokens that this frees.

        The tokens are those that are free after this request and those before it were parked.
        """
        left = self._forecasts.copy()
        for request in requests:
            decode = self._decodes.get(request)
            if decode is not None and decode.can_be_parked:
                left.remove(decode.forecast)
                yield request, self.peak_tokens - left.peak_tokens

    def record_tokens(self, request: RequestKey, num_tokens: int) -> None:
        """Records the KV tokens that a decode has now; ignores unknown requests."""
        decode = self._decodes.get(request)
        if decode is not None:
            self.held_tokens += num_tokens - decode.num_held_tokens
            decode.num_held_tokens = num_tokens

    def outgrows(self, request: RequestKey, num_kv_tokens: int, *, is_tight: bool) -> bool:
        """Whether a decode has so many KV tokens that `grow` is due.

        Args:
            request: the decode.
            num_kv_tokens: its tokens.
            is_tight: whether forecasts are needed, and have to be renewed.
        """
        decode = self._decodes.get(request)
        return decode is not None and (
            num_kv_tokens > decode.num_kv_tokens
            or (is_tight and num_kv_tokens >= decode.forecast.renew_at)
        )

    def grow(
        self, request: RequestKey, num_kv_tokens: int, forecast: KvForecast | None = None
    ) -> None:
        """Expects at least this many KV tokens of a decode, and takes a new forecast of it.

        Args:
            request: the decode.
            num_kv_tokens: tokens that it will reach at least.
            forecast: the forecast; None: it always holds these tokens.
        """
        decode = self._decodes[request]
        if forecast is None:
            forecast = KvForecast(max(num_kv_tokens, decode.num_kv_tokens))
        self._remove(decode)
        decode.forecast = forecast
        self._add(decode)
        num_more = max(0, num_kv_tokens - decode.num_kv_tokens)
        decode.num_kv_tokens += num_more
        self.reserved_tokens += num_more

    def end(self, request: RequestKey) -> bool:
        """Removes a decode; idempotent. Returns whether it was interactive."""
        decode = self._decodes.pop(request, None)
        if decode is None:
            return False
        self.num_arrived -= decode.has_arrived
        self.num_interactive -= decode.is_interactive
        self.num_late -= decode.is_late
        self.mean_tokens -= decode.num_mean_tokens
        self.held_tokens -= decode.num_held_tokens
        self.num_parkable -= decode.can_be_parked
        self.reserved_tokens -= decode.num_kv_tokens
        self._remove(decode)
        return decode.is_interactive

    def _add(self, decode: _Decode) -> None:
        self._forecasts.add(decode.forecast)
        if not decode.can_be_parked:
            self._staying.add(decode.forecast)

    def _remove(self, decode: _Decode) -> None:
        self._forecasts.remove(decode.forecast)
        if not decode.can_be_parked:
            self._staying.remove(decode.forecast)

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum differs from its parts."""
        decodes = self._decodes.values()
        assert self.num_arrived == sum(one.has_arrived for one in decodes)
        assert self.num_interactive == sum(one.is_interactive for one in decodes)
        assert self.num_late == sum(one.is_late for one in decodes)
        assert self.reserved_tokens == sum(one.num_kv_tokens for one in decodes)
        assert self.mean_tokens == sum(one.num_mean_tokens for one in decodes)
        assert self.held_tokens == sum(one.num_held_tokens for one in decodes)
        assert self.num_parkable == sum(one.can_be_parked for one in decodes)
        forecasts, staying = KvForecasts(), KvForecasts()
        for one in decodes:
            forecasts.add(one.forecast)
            if not one.can_be_parked:
                staying.add(one.forecast)
        assert self.peak_tokens == forecasts.peak_tokens
        assert self.staying_tokens == staying.peak_tokens


def _step_tokens(predicted: int, held: int) -> int:
    return held if held > _MORE * predicted else predicted
