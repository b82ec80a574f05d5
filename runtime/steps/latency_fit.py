"""Fits the latency model online to measured engine steps.

The fit is weighted least squares with non-negative coefficients over the model's seven terms; each
kind of step has its own base. Errors count relative to the step's time. Four measures keep the fit
sound on real data:

- Steps are grouped by shape class (prefill, decode or both; size by powers of two). Each class has
  its own memory, which fades only with newer steps of the class. A flood of small decode steps
  therefore does not displace the measurements of long prompts, and the fit follows a worker that
  becomes slower class by class. Classes that no longer occur lose weight slowly.
- Huber's weights (Huber, Robust Estimation of a Location Parameter, 1964) bound the influence of a
  slow step by the class's running median error; far outliers are left out. After a lasting change
  the median grows until the new times are accepted, so no class rejects its steps permanently.
- A ridge ties the coefficients to the prior's proportions, scaled to the measured speed. Terms that
  the steps cannot tell apart (prompts of one length, batches of one) are divided as in the prior.
- The base of mixed steps is tied to the larger of the two other bases. A base that was never
  measured follows the measured ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.least_squares import non_negative
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
# Share of a typical step's time that a coefficient may explain before the ridge holds it, even if
# the prior of the coefficient is 0, because a prior of 0 does not mean certainty.
_FREE_SHARE = 0.3
# Share by which the mixed base may differ from the larger of the other bases before the tie between
# them holds it.
_TIED_SHARE = 0.5
# Smallest size of each term at which it may explain that share. The cost of 1,000 tokens cannot be
# measured from steps of ten tokens: their noise would be multiplied by the square of the ratio.
_LEAST_TERMS = (1.0, 64.0, 512.0**2, 1.0, 1.0, 512.0, 1.0)
# The worker has changed when the running mean of the error signs comes this close to 1. That takes
# about 50 steps of one sign in a row (6 standard deviations), so chance does not cause it. The
# older steps then keep only the share _KEPT_SHARE of their weight, rescaled to the new speed.
_SIGN_WINDOW, _SIGN_LIMIT = 32, 0.8
_KEPT_SHARE = 0.05
# A smaller median of the latest log(measured / predicted) is an error of the fit, not a change of
# the worker. Steps without noise give errors of one sign, however small these errors are.
_LEAST_CHANGE = 0.02
# Number of latest errors per kind that measure the change.
_NUM_RECENT = 9
# Kinds of steps: decodes only, prompt chunks only, both.
_DECODE, _PREFILL, _MIXED = range(3)
# A shape class is _NUM_SIZES * kind + size.
_NUM_SIZES = 64
# The coefficients that each kind of step has, as positions in LatencyModel.
_NUM_TERMS = 7
_TERMS_OF = {_DECODE: (3, 4, 5), _PREFILL: (0, 1, 2), _MIXED: (6, 1, 2, 4, 5)}
_PREFILL_BASE, _STEP_BASE, _MIXED_BASE = 0, 3, 6
# The bases of the steps that contain a coefficient's kind of work.
_BASES_OF = ((0, 6), (0, 6), (0, 6), (3, 6), (3, 6), (3, 6), (6,))
# The coefficients of prompts and of decodes; the mixed base counts to the latter.
_GROUPS = (range(3), range(3, 7))
# Largest number of steps between two fits.
_MAX_FIT_INTERVAL = 64
_NUM_ERRORS = 256
_LEAST_S = 1e-9
# Steps from which the costs of a kind of work count as measured.
_SOME = 16


class StepErrors(NamedTuple):
    """Percentiles of |predicted - measured| / measured over recent steps."""

    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Accuracy of the fit.

    Attributes:
        num_samples: Steps that the fit has used, including forgotten ones.
        num_rejected: Outliers and impossible samples.
        errors: Errors over all recent steps; None before the first step.
        prefill_errors: Errors of steps that only compute prompt chunks; None before such a step.
        decode_errors: Errors of steps that only decode.
        mixed_errors: Errors of steps that do both.
    """

    num_samples: int = 0
    num_rejected: int = 0
    errors: StepErrors | None = None
    prefill_errors: StepErrors | None = None
    decode_errors: StepErrors | None = None
    mixed_errors: StepErrors | None = None

    @property
    def error_p50(self) -> float | None:
        return self.errors.p50 if self.errors else None

    @property
    def error_p90(self) -> float | None:
        return self.errors.p90 if self.errors else None


def shape_class(step: cluster_pb2.StepSample) -> int:
    """Class number, equal for steps of the same kind and the same size by powers of two."""
    if not step.num_prefill_tokens:
        return _NUM_SIZES * _DECODE + step.num_decodes.bit_length()
    kind = _MIXED if step.num_decodes else _PREFILL
    return _NUM_SIZES * kind + step.num_prefill_tokens.bit_length()


class StepTerms(NamedTuple):
    """The numbers of a step; a StepSample would keep the whole message that it came in."""

    num_prefill_tokens: int
    prefill_token_squares: int
    num_decodes: int
    num_kv_tokens: int
    duration_us: int

    @classmethod
    def of(cls, step: cluster_pb2.StepSample) -> StepTerms:
        return cls(
            step.num_prefill_tokens,
            step.prefill_token_squares,
            step.num_decodes,
            step.num_kv_tokens,
            step.duration_us,
        )


def log_error(model: LatencyModel, step: StepTerms) -> float:
    """Returns log(measured / predicted) of a step."""
    predicted_s = model.mixed_step_s(
        step.num_prefill_tokens,
        step.prefill_token_squares,
        step.num_decodes,
        step.num_kv_tokens,
    )
    return math.log(max(_LEAST_S, step.duration_us * 1e-6) / max(_LEAST_S, predicted_s))


@dataclass(slots=True)
class _ClassMemory:
    """Memory of one shape class.

    Attributes:
        moments: Sums of products of (terms, time), upper triangle by rows, without time squared.
        weight: Sum of the weights in `moments`.
        spread: Running median of |log(measured / predicted)|.
        num_seen: Number of steps seen since the worker last changed.
        seen_at: `LatencyFit._age` of the class at its latest step.
    """

    moments: list[float]
    weight: float = 0.0
    spread: float = 1.0
    num_seen: int = 0
    seen_at: int = 0

    def discount(self, num_terms: int, slowdown: float) -> None:
        """Keeps a small share of the weight, as if these steps had run at the new speed.

        Args:
            num_terms: Number of terms in `moments`.
            slowdown: Measured divided by predicted time after the change.
        """
        # Terms and time are relative to the predicted time, which is `slowdown` times as long now.
        self.moments = [
            moment * _KEPT_SHARE / (slowdown if column == num_terms else slowdown * slowdown)
            for moment, column in zip(
                self.moments,
                (column for row in range(num_terms) for column in range(row, num_terms + 1)),
                strict=True,
            )
        ]
        self.weight *= _KEPT_SHARE
        self.spread, self.num_seen = 1.0, 0


class LatencyFit:
    """Current latency model of one kind of worker.

    Args:
        prior: Model used before anything is measured.
    """

    def __init__(self, prior: LatencyModel) -> None:
        self._prior: tuple[float, ...] = astuple(prior)
        self._model = prior
        self._coefficients = list(self._prior)
        self._classes: dict[int, _ClassMemory] = {}
        # Number of steps with prompt chunks, and of steps with decodes.
        self._num_prefills = self._num_decodes = 0
        self._num_samples = self._num_rejected = 0
        self._next_fit = 1
        self._changed_at = 0
        # Running mean of the error signs, per kind of step.
        self._mean_signs = [0.0, 0.0, 0.0]
        # Latest log(measured / predicted), per kind of step.
        self._recent = [deque[float](maxlen=_NUM_RECENT) for _ in range(3)]
        # Latest |predicted - measured| / measured, over all steps and per kind of step.
        self._errors = deque[float](maxlen=_NUM_ERRORS)
        self._errors_of = [deque[float](maxlen=_NUM_ERRORS) for _ in range(3)]

    @property
    def model(self) -> LatencyModel:
        """Latest fit, at most 64 samples old."""
        return self._model

    @property
    def knows_both(self) -> bool:
        """Whether steps with prompts and steps with decodes were measured, some of each."""
        return min(self._num_prefills, self._num_decodes) >= _SOME

    @property
    def quality(self) -> FitQuality:
        return FitQuality(
            self._num_samples,
            self._num_rejected,
            _step_errors(self._errors),
            prefill_errors=_step_errors(self._errors_of[_PREFILL]),
            decode_errors=_step_errors(self._errors_of[_DECODE]),
            mixed_errors=_step_errors(self._errors_of[_MIXED]),
        )

    def observe(self, step: cluster_pb2.StepSample, slowdown: float = 1.0) -> None:
        """Adds one step to the fit; rejects a step that computed nothing or took no time.

        Args:
            step: The measured step.
            slowdown: How many times as long as others of its kind the worker's steps take.
        """
        num_prefill, num_decodes = step.num_prefill_tokens, step.num_decodes
        squares, measured_s = step.prefill_token_squares, step.duration_us * 1e-6 / slowdown
        # A chunk of n tokens has at least n squares.
        if not measured_s or squares < num_prefill or not (num_prefill or num_decodes):
            self._num_rejected += 1
            return
        terms = [1.0, num_prefill, squares] if num_prefill else [1.0]
        if num_decodes:
            terms += (num_decodes, step.num_kv_tokens)
        shape = shape_class(step)
        kind = shape // _NUM_SIZES
        coefficients = [self._coefficients[index] for index in _TERMS_OF[kind]]
        predicted_s = max(_LEAST_S, sum(map(float.__mul__, coefficients, map(float, terms))))
        memory = self._classes.get(shape)
        if memory is None:
            size = len(terms)
            memory = self._classes[shape] = _ClassMemory([0.0] * (size * (size + 3) // 2))
        relative_error = abs(predicted_s - measured_s) / measured_s
        self._errors.append(relative_error)
        self._errors_of[kind].append(relative_error)
        log_ratio = math.log(measured_s / predicted_s)
        self._notice_change(kind, log_ratio)
        error = abs(log_ratio)
        weight = _huber_weight(memory, error)
        if not weight:
            self._num_rejected += 1
            return
        self._num_samples += 1
        self._num_prefills += num_prefill > 0
        self._num_decodes += num_decodes > 0
        memory.seen_at = self._age(shape)
        # Errors are relative to the predicted time, because dividing by the measured time would
        # favour fast steps. If the prediction is far too small, the measured time replaces it, so
        # that the step does not get hundreds of times the weight.
        relative_to_s = max(predicted_s, measured_s) if error > _FAR_OFF else predicted_s
        scale = math.sqrt(weight) / relative_to_s
        row = [term * scale for term in terms]
        row.append(measured_s * scale)
        fade = 1 - 1 / _WINDOW
        products = [one * other for index, one in enumerate(row[:-1]) for other in row[index:]]
        memory.moments = [
            old * fade + new for old, new in zip(memory.moments, products, strict=True)
        ]
        memory.weight = memory.weight * fade + weight
        if self._num_samples >= self._next_fit:
            self._next_fit = self._num_samples + min(
                _MAX_FIT_INTERVAL, max(1, (self._num_samples - self._changed_at) // 4)
            )
            self._fit()

    def _notice_change(self, kind: int, log_ratio: float) -> None:
        """Discounts the memory when nearly all recent errors had the same sign."""
        recent = self._recent[kind]
        recent.append(log_ratio)
        sign = math.copysign(1.0, log_ratio)
        mean_sign = self._mean_signs[kind] + (sign - self._mean_signs[kind]) / _SIGN_WINDOW
        self._mean_signs[kind] = mean_sign
        if abs(mean_sign) < _SIGN_LIMIT or abs(_percentile(recent, 50)) < _LEAST_CHANGE:
            return
        # Mixed steps share terms with both other kinds, so a change affects them too. A kind whose
        # latest errors all have the same sign as this kind's errors has changed with this kind.
        changed = {kind, _MIXED} if kind != _MIXED else {_DECODE, _PREFILL, _MIXED}
        changed |= {
            other
            for other, errors in enumerate(self._recent)
            if len(errors) == _NUM_RECENT and all(error * mean_sign > 0 for error in errors)
        }
        # By kind of step; 1 if too few errors are known.
        slowdowns = [
            math.exp(_percentile(errors, 50)) if len(errors) == _NUM_RECENT else 1.0
            for errors in self._recent
        ]
        for shape, memory in self._classes.items():
            of_class = shape // _NUM_SIZES
            if of_class in changed:
                memory.discount(len(_TERMS_OF[of_class]), slowdowns[of_class])
        for other in changed:
            self._mean_signs[other] = 0.0
            self._recent[other].clear()
        self._changed_at = self._num_samples
        self._next_fit = min(self._next_fit, self._num_samples + 1)

    def _age(self, shape: int) -> int:
        """Number of steps so far that contain the kinds of work in this class."""
        kind = shape // _NUM_SIZES
        return self._num_prefills * (kind != _DECODE) + self._num_decodes * (kind != _PREFILL)

    def _fit(self) -> None:
        matrix = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        vector = [0.0] * _NUM_TERMS
        # Weight of the steps with each coefficient's kind of work.
        weights = [0.0] * _NUM_TERMS
        for shape, memory in self._classes.items():
            unseen = self._age(shape) - memory.seen_at
            freshness = max(_LEAST_FRESHNESS, 0.5 ** (unseen / _HALF_LIFE))
            moments = iter(memory.moments)
            terms = _TERMS_OF[shape // _NUM_SIZES]
            for position, row in enumerate(terms):
                for column in terms[position:]:
                    matrix[min(row, column)][max(row, column)] += freshness * next(moments)
                vector[row] += freshness * next(moments)
            for index, bases in enumerate(_BASES_OF):
                if terms[0] in bases:
                    weights[index] += freshness * memory.weight
        for row in range(_NUM_TERMS):
            for column in range(row):
                matrix[row][column] = matrix[column][row]
        centre = self._scaled_prior(matrix, vector)
        # Ridge unit: how far each coefficient may move away from the scaled prior.
        units = list(centre)
        for index, least in enumerate(_LEAST_TERMS):
            if matrix[index][index] > 0:
                num_steps = sum(matrix[base][base] for base in _BASES_OF[index])
                typical_s = math.sqrt(weights[index] / num_steps)
                typical_term = math.sqrt(matrix[index][index] / num_steps)
                share = _FREE_SHARE * typical_s / max(least, typical_term)
                units[index] = max(units[index], share)
        seen = [
            index for index in range(_NUM_TERMS) if matrix[index][index] > 0 and units[index] > 0
        ]
        scaled = [
            [matrix[row][column] * units[row] * units[column] for column in seen] for row in seen
        ]
        self._tie_mixed_base(scaled, units, seen)
        found = non_negative(
            scaled,
            [vector[row] * units[row] for row in seen],
            [centre[row] / units[row] for row in seen],
            _PRIOR_WEIGHT,
        )
        coefficients = list(centre)
        for index, value in zip(seen, found, strict=True):
            coefficients[index] = value * units[index]
        self._set_unseen_bases(coefficients, seen)
        # Every step takes some time, also where all the time seems to be that of the KV tokens.
        coefficients[_STEP_BASE] = max(coefficients[_STEP_BASE], _LEAST_S)
        if all(map(math.isfinite, coefficients)):
            self._coefficients, self._model = coefficients, LatencyModel(*coefficients)

    def _mixed_base_source(
        self, coefficients: Sequence[float], seen: Sequence[int]
    ) -> tuple[int, float] | None:
        """The measured base that the mixed base follows, and the factor between them.

        A forward pass pays its fixed costs once, so a mixed step's base is near the larger of the
        two other bases, times the factor between these bases in the prior.
        """
        measured = [index for index in (_PREFILL_BASE, _STEP_BASE) if index in seen]
        if not measured:
            return None
        largest = max(self._prior[index] for index in measured)
        if not largest > 0:
            return None
        source = max(measured, key=coefficients.__getitem__)
        return source, self._prior[_MIXED_BASE] / largest

    def _tie_mixed_base(
        self, matrix: list[list[float]], units: Sequence[float], seen: Sequence[int]
    ) -> None:
        """Adds to `matrix`, in `units`, the cost of a mixed base unlike its source.

        Without this tie, prompt chunks that all have the same length could not tell the bases from
        the time per token.
        """
        if _MIXED_BASE not in seen or not (
            tie := self._mixed_base_source(self._coefficients, seen)
        ):
            return
        source, factor = tie
        spread = _TIED_SHARE * factor * self._coefficients[source]
        if not spread > 0:
            return
        row, column = seen.index(_MIXED_BASE), seen.index(source)
        # Products of two factors: a power that is too large would raise an error.
        of_mixed, of_source = units[_MIXED_BASE] / spread, factor * units[source] / spread
        matrix[row][row] += _PRIOR_WEIGHT * of_mixed * of_mixed
        matrix[column][column] += _PRIOR_WEIGHT * of_source * of_source
        matrix[row][column] -= _PRIOR_WEIGHT * of_mixed * of_source
        matrix[column][row] = matrix[row][column]

    def _set_unseen_bases(self, coefficients: list[float], seen: Sequence[int]) -> None:
        """Sets the bases of kinds of steps that never ran from the measured bases."""
        if _MIXED_BASE not in seen:
            if tie := self._mixed_base_source(coefficients, seen):
                source, factor = tie
                coefficients[_MIXED_BASE] = factor * coefficients[source]
        elif self._prior[_MIXED_BASE] > 0:
            speed = coefficients[_MIXED_BASE] / self._prior[_MIXED_BASE]
            for base in (_PREFILL_BASE, _STEP_BASE):
                if base not in seen:
                    coefficients[base] = self._prior[base] * speed

    def _scaled_prior(
        self, matrix: Sequence[Sequence[float]], vector: Sequence[float]
    ) -> list[float]:
        """Prior times the measured speed, separately for prefill and decode where data allows.

        The speed of a part that was never measured follows the other part: a machine that is slow
        at one is slow at the other.
        """
        prior = self._prior
        squares = [
            [
                sum(
                    prior[row] * matrix[row][column] * prior[column]
                    for row in one
                    for column in two
                )
                for two in _GROUPS
            ]
            for one in _GROUPS
        ]
        products = [sum(prior[row] * vector[row] for row in group) for group in _GROUPS]
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
            value * both * max(speed, _LEAST_S)
            for group, speed in zip(_GROUPS, speeds, strict=True)
            for value in prior[group.start : group.stop]
        ]


def _huber_weight(memory: _ClassMemory, error: float) -> float:
    """Weight of a step whose time is off by a factor of exp(error); 0 for an outlier."""
    spread = memory.spread
    memory.num_seen += 1
    # Equal numbers of steps up and down keep `spread` at the median; early steps move it fast.
    factor = 1 + max(0.05, 1 / memory.num_seen)
    moved = spread * factor if error > spread else spread / factor
    memory.spread = min(_MOST_SPREAD, max(_LEAST_SPREAD, moved))
    if error > max(math.log(_OUTLIER_FACTOR), _OUTLIER * spread):
        return 0.0
    return min(1.0, _HUBER * spread / error) if error else 1.0


def _step_errors(errors: Sequence[float]) -> StepErrors | None:
    return StepErrors(_percentile(errors, 50), _percentile(errors, 90)) if errors else None


def _percentile(values: Iterable[float], percent: int) -> float:
    """The value that `percent` percent of at least one value do not exceed."""
    ordered = sorted(values)
    return ordered[len(ordered) * percent // 100]
