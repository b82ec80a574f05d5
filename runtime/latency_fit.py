"""Fits the latency model online to measured engine steps.

The fit is weighted least squares with non-negative coefficients over the model's six terms; errors
count relative to the step's time. Three measures keep it sound on real data:

- Steps are grouped by shape class (prefill, decode or both; size by powers of two). Each class has
  its own memory, which fades only with newer steps of the class. A flood of small decode steps
  therefore does not displace what is known about long prompts, and the fit follows a worker that
  becomes slower class by class. Classes that no longer occur lose weight slowly.
- Huber's weights (Huber, Robust Estimation of a Location Parameter, 1964) bound the influence of a
  slow step by the class's running median error; far outliers are left out. After a lasting change
  the median grows until the new times are accepted, so no class rejects its steps permanently.
- A ridge ties the coefficients to the prior's proportions, scaled to the measured speed. Terms that
  the steps cannot tell apart (prompts of one length, batches of one) are divided as in the prior.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from baton.runtime.latency import LatencyModel
from baton.runtime.least_squares import non_negative
from baton.v1 import cluster_pb2

# Weight of the prior in steps, per coefficient. It is small, so that steps whose lengths differ by
# only a few percent outweigh the prior quickly.
_PRIOR_WEIGHT = 0.03
# Memory of one class, in steps.
_WINDOW = 128
# After this many steps of its kind, an unseen class counts half.
_HALF_LIFE = 1024
_LEAST_FRESHNESS = 1e-3
# In running median errors (about 2/3 of a standard deviation): the error at which Huber's weight
# starts to fall, and the error at which a step is an outlier if it is also off by _OUTLIER_FACTOR.
_HUBER = 4.0
_OUTLIER = 8.0
_OUTLIER_FACTOR = 2.0
# Bound on |log(measured / predicted)| above which the model counts as far off.
_FAR_OFF = math.log(4)
_LEAST_SPREAD, _MOST_SPREAD = 0.01, 10.0
# Share of a typical step's time that a coefficient may explain before the ridge holds it, whatever
# the prior says: a prior of 0 does not mean certainty.
_FREE_SHARE = 0.3
# Smallest size of each term at which it may explain that share. The cost of 1,000 tokens cannot be
# measured from steps of ten tokens: their noise would be multiplied by the square of the ratio.
_LEAST_TERMS = (1.0, 64.0, 512.0**2, 1.0, 1.0, 512.0)
# The worker has changed when the running mean of the error signs comes this close to 1. That takes
# about 50 steps of one sign in a row (6 standard deviations), so chance does not cause it. The
# older steps then keep only the share _KEPT_SHARE of their weight.
_SIGN_WINDOW, _SIGN_LIMIT = 32, 0.8
_KEPT_SHARE = 0.05
# Kinds of steps: decodes only, prompt chunks only, both. A shape class is 64 * kind + size.
_DECODE, _PREFILL, _MIXED = range(3)
# Largest number of steps between two fits.
_MAX_FIT_INTERVAL = 64
_NUM_ERRORS = 256
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Accuracy of the fit.

    Attributes:
        num_samples: Steps that the fit has used, including forgotten ones.
        num_rejected: Outliers and impossible samples.
        error_p50: Median of |predicted - measured| / measured over recent steps; None at first.
        error_p90: The same, 90th percentile.
    """

    num_samples: int
    num_rejected: int
    error_p50: float | None
    error_p90: float | None


def shape_class(step: cluster_pb2.StepSample) -> int:
    """Class number, equal for steps of the same kind and the same size by powers of two."""
    if not step.num_prefill_tokens:
        return 64 * _DECODE + step.num_decodes.bit_length()
    kind = _MIXED if step.num_decodes else _PREFILL
    return 64 * kind + step.num_prefill_tokens.bit_length()


@dataclass(slots=True)
class _Class:
    """Memory of one shape class.

    Attributes:
        first: Index of the class's first term: 0, or 3 for steps that only decode.
        moments: Sums of products of (terms, time), upper triangle by rows, without time squared.
        weight: Sum of the weights in `moments`.
        spread: Running median of |log(measured / predicted)|.
        num_seen: Number of steps seen since the worker last changed.
        seen_at: `LatencyFit._age` of the class at its latest step.
    """

    first: int
    moments: list[float]
    weight: float = 0.0
    spread: float = 1.0
    num_seen: int = 0
    seen_at: int = 0


class LatencyFit:
    """Current latency model of one kind of worker.

    Args:
        prior: Model used before anything is measured.
    """

    def __init__(self, prior: LatencyModel) -> None:
        self._prior: tuple[float, ...] = astuple(prior)
        self._model = prior
        self._coefficients = list(self._prior)
        self._classes: dict[int, _Class] = {}
        # Number of steps with prompt chunks, and of steps with decodes.
        self._num_prefills = self._num_decodes = 0
        self._num_samples = self._num_rejected = 0
        self._next_fit = 1
        # Running mean of the error signs, per kind of step.
        self._mean_signs = [0.0, 0.0, 0.0]
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    @property
    def model(self) -> LatencyModel:
        """Latest fit, at most 64 samples old."""
        return self._model

    @property
    def quality(self) -> FitQuality:
        errors = sorted(self._errors)
        p50, p90 = (
            (errors[len(errors) // 2], errors[len(errors) * 9 // 10]) if errors else (None, None)
        )
        return FitQuality(self._num_samples, self._num_rejected, p50, p90)

    def observe(self, step: cluster_pb2.StepSample) -> None:
        """Adds one step to the fit; rejects a step that computed nothing or took no time."""
        num_prefill, num_decodes = step.num_prefill_tokens, step.num_decodes
        squares, measured_s = step.prefill_token_squares, step.duration_us * 1e-6
        # A chunk of n tokens has at least n squares.
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
        weight = _huber_weight(known, error)
        if not weight:
            self._num_rejected += 1
            return
        self._num_samples += 1
        self._num_prefills += num_prefill > 0
        self._num_decodes += num_decodes > 0
        known.seen_at = self._age(name)
        # Dividing by the measured time would favour fast steps. The maximum prevents that a far too
        # small prediction gives its step hundreds of times the weight.
        relative_to_s = max(predicted_s, measured_s) if error > _FAR_OFF else predicted_s
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
        """Discounts the memory when nearly all recent errors had the same sign."""
        mean_sign = (
            self._mean_signs[kind]
            + (math.copysign(1.0, log_ratio) - self._mean_signs[kind]) / _SIGN_WINDOW
        )
        if abs(mean_sign) < _SIGN_LIMIT:
            self._mean_signs[kind] = mean_sign
            return
        self._mean_signs[kind] = 0.0
        for name, known in self._classes.items():
            # Mixed steps share terms with both other kinds, so a change affects them too.
            if kind in (name // 64, _MIXED) or name // 64 == _MIXED:
                known.moments = [moment * _KEPT_SHARE for moment in known.moments]
                known.weight *= _KEPT_SHARE
                known.spread, known.num_seen = 1.0, 0

    def _age(self, name: int) -> int:
        """Number of steps so far that contain the kinds of work in this class."""
        kind = name // 64
        return self._num_prefills * (kind != _DECODE) + self._num_decodes * (kind != _PREFILL)

    def _fit(self) -> None:
        matrix = [[0.0] * 6 for _ in range(6)]
        vector = [0.0] * 6
        # Weight of steps with prompt chunks, and of steps with decodes.
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
        # Ridge unit: how far each coefficient may move away from the scaled prior.
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
        """Prior times the measured speed, separately for prefill and decode where data allows.

        The speed of a part that was never measured follows the other part: a machine that is slow
        at one is slow at the other.
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


def _huber_weight(known: _Class, error: float) -> float:
    """Weight of a step whose time is off by a factor of exp(error); 0 for an outlier."""
    spread = known.spread
    known.num_seen += 1
    # Equal numbers of steps up and down keep `spread` at the median; early steps move it fast.
    factor = 1 + max(0.05, 1 / known.num_seen)
    moved = spread * factor if error > spread else spread / factor
    known.spread = min(_MOST_SPREAD, max(_LEAST_SPREAD, moved))
    if error > max(math.log(_OUTLIER_FACTOR), _OUTLIER * spread):
        return 0.0
    return min(1.0, _HUBER * spread / error) if error else 1.0
