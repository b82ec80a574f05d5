"""The latency model, fitted online to what the engine's steps took.

Weighted least squares with non-negative coefficients over the model's six terms, where errors count
relative to the step's time. Three things keep it sound on real data:

- Steps are counted by shape class (prefill, decode or both; size by powers of two), each with a
  memory of its own that fades only with newer steps of the class. So a flood of small decode steps
  does not wash out what is known of long prompts, and a worker that becomes slower is followed
  class by class. Classes that are not seen any more give way slowly to those that are.
- Huber's weights (Huber, Robust Estimation of a Location Parameter, 1964) bound what a slow step
  can do, by the class's own running median error; far outliers are left out. After a lasting change
  the median grows until the new times are let in, so that nothing is rejected for ever.
- A ridge ties the coefficients to the prior's proportions, scaled to the measured speed. What the
  steps do not tell apart (prompts of one length, batches of one) is divided as in the prior.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from baton.runtime.latency import LatencyModel
from baton.runtime.least_squares import non_negative
from baton.v1 import cluster_pb2

# How many steps the prior is worth, on each coefficient. Small: steps that differ in length by a
# few per cent only soon tell more than the prior.
_PRIOR_WEIGHT = 0.03
# Of one class's memory, in steps.
_WINDOW = 128
# A class unseen for so many steps of its kind counts half.
_HALF_LIFE = 1024
_LEAST_FRESHNESS = 1e-3
# In running median errors (about 2/3 of a standard deviation): where Huber's weight begins to
# fall, and where a step is left out if it is also off by more than _OUTLIER_FACTOR.
_HUBER = 4.0
_OUTLIER = 8.0
_OUTLIER_FACTOR = 2.0
# Of |log(measured / predicted)|: the model is far off.
_FAR = math.log(4)
_LEAST_SPREAD, _MOST_SPREAD = 0.01, 10.0
# A coefficient may claim so much of a typical step's time before the ridge holds it, whatever the
# prior says: a prior of 0 is no certainty.
_FREE_SHARE = 0.3
# Of each term, how large it is at least where it claims that: what a thousand tokens cost cannot be
# told from steps of ten, whose noise would be multiplied as their squares are.
_LEAST_TERMS = (1.0, 64.0, 512.0**2, 1.0, 1.0, 512.0)
# The worker has changed when the running mean of the errors' signs comes so close to 1: some 50
# steps in a row, which chance does not bring (6 standard deviations). Of older steps a little is
# kept.
_LEAN_WINDOW, _LEAN_LIMIT = 32, 0.8
_KEPT = 0.05
# Kinds of steps: of decodes, of prompt chunks, of both. Shape classes are numbered from 64 * kind.
_DECODE, _PREFILL, _MIXED = range(3)
# Steps between two fits, once there are many.
_MAX_FIT_INTERVAL = 64
_NUM_ERRORS = 256
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well the fit does.

    Attributes:
        num_samples: that the fit rests on, or has forgotten.
        num_rejected: outliers, and samples that cannot be.
        error_p50: of the latest steps' |predicted - measured| / measured; None before the first.
        error_p90: likewise.
    """

    num_samples: int
    num_rejected: int
    error_p50: float | None
    error_p90: float | None


def shape_class(step: cluster_pb2.StepSample) -> int:
    """Equal for steps of the same kind and, by powers of two, the same size."""
    if not step.num_prefill_tokens:
        return 64 * _DECODE + step.num_decodes.bit_length()
    kind = _MIXED if step.num_decodes else _PREFILL
    return 64 * kind + step.num_prefill_tokens.bit_length()


@dataclass(slots=True)
class _Class:
    """The memory of one shape class.

    Attributes:
        first: index of its first term: 0, or 3 for steps that only decode.
        moments: of (terms, time), upper triangle by rows, without time's own.
        weight: sum of the weights in it.
        spread: running median of |log(measured / predicted)|.
        seen_at: the fit's count of such steps when the latest came.
    """

    first: int
    moments: list[float]
    weight: float = 0.0
    spread: float = 1.0
    num_seen: int = 0
    seen_at: int = 0


class LatencyFit:
    """The current latency model of one kind of worker.

    Args:
        prior: what is believed before anything is measured.
    """

    def __init__(self, prior: LatencyModel) -> None:
        self._prior: tuple[float, ...] = astuple(prior)
        self._model = prior
        self._coefficients = list(self._prior)
        self._classes: dict[int, _Class] = {}
        # Steps with prompt chunks, and steps with decodes.
        self._num_prefills = self._num_decodes = 0
        self._num_samples = self._num_rejected = 0
        self._next_fit = 1
        # By kind of step: running mean of the errors' signs.
        self._leans = [0.0, 0.0, 0.0]
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    @property
    def model(self) -> LatencyModel:
        """As of the latest fit: at most 64 samples ago."""
        return self._model

    @property
    def quality(self) -> FitQuality:
        errors = sorted(self._errors)
        p50, p90 = (
            (errors[len(errors) // 2], errors[len(errors) * 9 // 10]) if errors else (None, None)
        )
        return FitQuality(self._num_samples, self._num_rejected, p50, p90)

    def observe(self, step: cluster_pb2.StepSample) -> None:
        """Takes one step into account; one that computed nothing, or took no time, is rejected."""
        num_prefill, num_decodes = step.num_prefill_tokens, step.num_decodes
        squares, measured_s = step.prefill_token_squares, step.duration_us * 1e-6
        # Every chunk of n tokens has at least n squares.
        if not measured_s or squares < num_prefill or not (num_prefill or num_decodes):
            self._num_rejected += 1
            return
        first = 0 if num_prefill else 3
        terms = [1.0, num_prefill, squares] if num_prefill else []
        if num_decodes:
            terms += (1.0, num_decodes, step.num_kv_tokens)
        predicted_s = max(
            _LEAST_S, sum(map(float.__mul__, self._coefficients[first:], map(float, terms)))
        )
        name = shape_class(step)
        known = self._classes.get(name)
        if known is None:
            size = len(terms)
            known = self._classes[name] = _Class(first, [0.0] * (size * (size + 3) // 2))
        self._errors.append(abs(predicted_s - measured_s) / measured_s)
        log_ratio = math.log(measured_s / predicted_s)
        self._notice_change(name // 64, log_ratio)
        error = abs(log_ratio)
        weight = _judge(known, error)
        if not weight:
            self._num_rejected += 1
            return
        self._num_samples += 1
        self._num_prefills += num_prefill > 0
        self._num_decodes += num_decodes > 0
        known.seen_at = self._age(name)
        # Errors relative to what was measured would favour the fast steps. But a prediction that is
        # far too small must not make its step count for hundreds.
        relative_to_s = max(predicted_s, measured_s) if error > _FAR else predicted_s
        scale = math.sqrt(weight) / relative_to_s
        row = [term * scale for term in terms]
        row.append(measured_s * scale)
        fade = 1 - 1 / _WINDOW
        products = [one * other for index, one in enumerate(row[:-1]) for other in row[index:]]
        known.moments = [old * fade + new for old, new in zip(known.moments, products, strict=True)]
        known.weight = known.weight * fade + weight
        if self._num_samples >= self._next_fit:
            self._next_fit = self._num_samples + min(
                _MAX_FIT_INTERVAL, max(1, self._num_samples // 4)
            )
            self._fit()

    def _notice_change(self, kind: int, log_ratio: float) -> None:
        """Lets go of most of what is remembered when nearly all errors have had one sign."""
        lean = (
            self._leans[kind] + (math.copysign(1.0, log_ratio) - self._leans[kind]) / _LEAN_WINDOW
        )
        if abs(lean) < _LEAN_LIMIT:
            self._leans[kind] = lean
            return
        self._leans[kind] = 0.0
        for name, known in self._classes.items():
            # What is known of mixed steps is also of their two halves, and the other way round.
            if kind in (name // 64, _MIXED) or name // 64 == _MIXED:
                known.moments = [moment * _KEPT for moment in known.moments]
                known.weight *= _KEPT
                known.spread, known.num_seen = 1.0, 0

    def _age(self, name: int) -> int:
        """How many steps have come that could have been of this class."""
        kind = name // 64
        return self._num_prefills * (kind != _DECODE) + self._num_decodes * (kind != _PREFILL)

    def _fit(self) -> None:
        matrix = [[0.0] * 6 for _ in range(6)]
        vector = [0.0] * 6
        # Of steps with prompt chunks, and of steps with decodes.
        weights = [0.0, 0.0]
        for name, known in self._classes.items():
            unseen = self._age(name) - known.seen_at
            freshness = max(_LEAST_FRESHNESS, 0.5 ** (unseen / _HALF_LIFE))
            moments = iter(known.moments)
            kind = name // 64
            end = 3 if kind == _PREFILL else 6
            for row in range(known.first, end):
                for column in range(row, end):
                    matrix[row][column] += freshness * next(moments)
                vector[row] += freshness * next(moments)
            weights[0] += freshness * known.weight * (kind != _DECODE)
            weights[1] += freshness * known.weight * (kind != _PREFILL)
        for row in range(6):
            for column in range(row):
                matrix[row][column] = matrix[column][row]
        centre = self._scaled_prior(matrix, vector)
        # How far each coefficient may go from there: the unit of the ridge.
        units = list(centre)
        for index, least in enumerate(_LEAST_TERMS):
            base = 3 * (index // 3)
            if matrix[index][index] > 0:
                typical_s = math.sqrt(weights[index // 3] / matrix[base][base])
                typical_term = math.sqrt(matrix[index][index] / matrix[base][base])
                share = _FREE_SHARE * typical_s / max(least, typical_term)
                units[index] = max(units[index], share)
        seen = [index for index in range(6) if matrix[index][index] > 0 and units[index] > 0]
        found = non_negative(
            [[matrix[row][column] * units[row] * units[column] for column in seen] for row in seen],
            [vector[row] * units[row] for row in seen],
            [centre[row] / units[row] for row in seen],
            _PRIOR_WEIGHT,
        )
        coefficients = list(centre)
        for index, value in zip(seen, found, strict=True):
            coefficients[index] = value * units[index]
        if all(map(math.isfinite, coefficients)):
            self._coefficients, self._model = coefficients, LatencyModel(*coefficients)

    def _scaled_prior(
        self, matrix: Sequence[Sequence[float]], vector: Sequence[float]
    ) -> list[float]:
        """The prior times the measured speed, prefill and decode apart as far as they can be told.

        What was never measured goes with the rest: a machine slow at one is slow at the other.
        """
        groups = (range(3), range(3, 6))
        prior = self._prior
        squares = [
            [
                sum(
                    prior[row] * matrix[row][column] * prior[column]
                    for row in one
                    for column in two
                )
                for two in groups
            ]
            for one in groups
        ]
        products = [sum(prior[row] * vector[row] for row in group) for group in groups]
        total = sum(map(sum, squares))
        if not total > 0:
            return list(prior)
        both = sum(products) / total
        if not both > 0:
            return list(prior)
        speeds = non_negative(
            [[value * both * both for value in row] for row in squares],
            [value * both for value in products],
            [1.0, 1.0],
            _PRIOR_WEIGHT,
        )
        return [
            value * both * max(speeds[index // 3], _LEAST_S) for index, value in enumerate(prior)
        ]


def _judge(known: _Class, error: float) -> float:
    """The weight of a step whose time is off by a factor of exp(error), 0 for an outlier."""
    spread = known.spread
    known.num_seen += 1
    # Steps up and down in equal numbers, so it stays at the median; quick to begin with.
    factor = 1 + max(0.05, 1 / known.num_seen)
    moved = spread * factor if error > spread else spread / factor
    known.spread = min(_MOST_SPREAD, max(_LEAST_SPREAD, moved))
    if error > max(math.log(_OUTLIER_FACTOR), _OUTLIER * spread):
        return 0.0
    return min(1.0, _HUBER * spread / error) if error else 1.0
