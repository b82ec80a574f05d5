"""Samples the simulated engine's output: the next token, its text, and the end of the request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from baton.engine.base import EngineOutput, Finish, Logprob
from baton.engine.sim_scheduler import LiveRequest
from baton.engine.sim_tokens import Vocabulary
from baton.v1 import common_pb2

_HALF = math.log(0.5)


class Sampler:
    """Takes the next token of a request from its chain, and ends it where its parameters say so.

    Args:
        vocabulary: Vocabulary of the model.
        mean_output_tokens: Mean length at which answers end by themselves, in tokens; 0: answers
            end only at max_tokens or a stop condition.
    """

    def __init__(self, vocabulary: Vocabulary, mean_output_tokens: int) -> None:
        self._vocabulary, self._mean_output_tokens = vocabulary, mean_output_tokens

    def sample(self, live: LiveRequest) -> EngineOutput:
        """Adds one token to a request and describes it."""
        sampling, token = live.request.sampling, live.chain.next()
        live.tokens.append(token)
        live.chain.advance((token,))
        finish, stop = self._end(live, token)
        text_is_final = finish is not None and finish is not Finish.CUT
        return EngineOutput(
            engine_request_id=live.id,
            token_ids=(token,),
            text=live.text.take(finished=text_is_final),
            logprobs=self._logprobs([token], sampling, "logprobs"),
            finish=finish,
            stop=stop,
        )

    def prompt_logprobs(self, live: LiveRequest) -> Sequence[Sequence[Logprob]]:
        """Returns the prompt's log probabilities if the request returns them."""
        if not live.request.returns_prompt_logprobs:
            return ()
        prompt = live.request.prompt_token_ids
        return [(), *self._logprobs(prompt[1:], live.request.sampling, "prompt_logprobs")]

    def _end(self, live: LiveRequest, token: int) -> tuple[Finish | None, str]:
        """Adds a token's text and checks whether it ends the request.

        Returns:
            The finish reason or None, and the stop string or stop token ID, which may be empty.
        """
        sampling, count = live.request.sampling, live.num_output_tokens
        finish: Finish | None = None
        stop = ""
        is_stop_token = token in sampling.stop_token_ids and count >= sampling.min_tokens
        if is_stop_token:
            finish, stop = Finish.STOP, str(token)
        elif self._ends_by_itself(live):
            finish = Finish.STOP
        elif count >= live.max_output_tokens:
            finish = Finish.LENGTH
        if not is_stop_token or sampling.include_stop_str_in_output:
            matched = live.text.add(token, may_stop=count > sampling.min_tokens)
            if matched:
                finish, stop = Finish.STOP, matched
        if finish is None and live.request.prefill_only:
            finish = Finish.CUT
        return finish, stop

    def _ends_by_itself(self, live: LiveRequest) -> bool:
        """Returns whether the answer has its own length, as a model's answer ends with EOS."""
        sampling, count = live.request.sampling, live.num_output_tokens
        if sampling.ignore_eos or count < sampling.min_tokens:
            return False
        length = live.chain.answer_length(self._mean_output_tokens)
        return length is not None and count >= length

    def _logprobs(
        self, token_ids: Iterable[int], sampling: common_pb2.SamplingParams, field: str
    ) -> Sequence[Sequence[Logprob]]:
        """Returns made-up values: the chosen token has probability 1/2, the next 1/4, and so on.

        Args:
            token_ids: The chosen tokens.
            sampling: Sampling parameters of the request.
            field: Name of the parameter that holds the number of requested candidates.
        """
        if not sampling.HasField(field):  # type: ignore[arg-type]
            return ()
        vocabulary, count = self._vocabulary, getattr(sampling, field)
        found = []
        for token_id in token_ids:
            others = (other for other in vocabulary.printable if other != token_id)
            likeliest = [token_id, *itertools.islice(others, max(0, count - 1))]
            entries = [
                Logprob(one, _HALF * rank, rank, vocabulary.tokenizer.decode([one]))
                for rank, one in enumerate(likeliest, start=1)
            ]
            # The chosen token comes first, then the likeliest tokens, which begin with it.
            found.append(tuple(entries[:1] + entries[:count]))
        return found
