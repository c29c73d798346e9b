"""Chooses the next token of each row from its logits, also where ranks have parts of the vocabulary.

    rank 0   logits of tokens  0 .. 22    its best     --.
    rank 1   logits of tokens 23 .. 44    its best     --+--> all_gather --> the same token on every rank
    rank 2   logits of tokens 45 .. 66    its best     --'

Logits are never gathered: ranks exchange a few numbers per row. To draw, each rank adds noise to the scores
of its tokens, and the best one is a draw from their softmax (Gumbel-max):

    argmax of score_v + g_v,    g_v = -log(-log u_v),    u_v = hash of seed, request, position and token v

The noise of a token does not depend on who computes it, so the text is the same on any ranks. What is kept is
decided by the lowest score that is: of top-k and top-p ranks exchange their highest scores, as many as
needed. Everything is computed in float64.

    bytes per row, n ranks    48 (n - 1), and if it is drawn  + 8 k (n - 1)      with top_k = k,
                                                              + 8 (c + 1)(n - 1) with c candidates of top_p,
                                                              + 8 (n - 1)        with min_p

Papers: Maddison et al. 2014, arXiv 1411.0030 (Gumbel-max); Fan et al. 2018, arXiv 1805.04833 (top-k);
Holtzman et al. 2020, arXiv 1904.09751 (top-p); Nguyen et al. 2024, arXiv 2407.01082 (min-p).
"""

from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.engine.generation.sampling_params import SamplingParams
from meshwright.model.loss.vocab_parallel_cross_entropy import VocabShard
from meshwright.model.tensors.counter_rng import derive_key, random_bits, signed64

FIRST_CANDIDATES = 64  # of top_p; four times as many if these do not have the probability together
ABSENT = -1  # in place of a token id, where a row is padded
NO_TOKEN = -2  # where the logits of a row are not finite


class ChosenTokens(NamedTuple):
    """A token per row, with its log-probabilities (see GeneratedAnswer); tensors of shape (rows,).

    The id is NO_TOKEN for a row whose logits are not finite.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor


class TokenSampler:
    """Chooses tokens by `params`, of the vocabulary of which this rank has `vocab_shard`."""

    def __init__(self, params: SamplingParams, vocab_shard: VocabShard) -> None:
        self._params, self._shard = params, vocab_shard

    def choose(
        self,
        logits_BV: torch.Tensor,
        context_BL: torch.Tensor,
        requests: Sequence[int],
        positions: Sequence[int],
    ) -> ChosenTokens:
        """Returns the next token of each row, the same on all ranks.

        Args:
            logits_BV: (rows, size of the shard), of any floating dtype.
            context_BL: (rows, tokens), the ids of prompt and answer; ABSENT for padding.
            requests: the number of each row's request, for its random numbers.
            positions: the position of each row's next token, likewise.
        """
        logits_BV = logits_BV.double()
        keys_BV = scores_BV = self._penalized(logits_BV, context_BL)
        if self._params.do_sample:
            scores_BV = self._restricted(scores_BV / self._params.temperature)
            keys_BV = scores_BV + self._noise(requests, positions, logits_BV.device)
        key_B1, index_B1 = keys_BV.max(dim=1, keepdim=True)
        # a greedy token is drawn from nothing: what it needs of the logits once stands twice
        logit_B1, total_B1 = logits_BV.gather(1, index_B1), logits_BV.logsumexp(1, keepdim=True)
        score_B1, kept_B1 = logit_B1, total_B1
        if self._params.do_sample:
            score_B1, kept_B1 = scores_BV.gather(1, index_B1), scores_BV.logsumexp(1, keepdim=True)
        local = [key_B1, (index_B1 + self._shard.start).double(), logit_B1, score_B1, total_B1, kept_B1]
        key_RB, *of_best, total_RB, kept_RB = self._shard.all_gather(torch.cat(local, 1)).unbind(2)
        best_1B = key_RB.argmax(0, keepdim=True)  # the first rank's, so the lowest id of several
        id_B, logit_B, score_B = (each.gather(0, best_1B).squeeze(0) for each in of_best)
        total_B, kept_B = total_RB.logsumexp(0), kept_RB.logsumexp(0)
        sampling_B = score_B - kept_B if self._params.do_sample else torch.zeros_like(logit_B)
        ids_B = id_B.where(total_B.isfinite(), NO_TOKEN).long()
        return ChosenTokens(ids_B, logit_B - total_B, sampling_B)

    def _penalized(self, logits_BV: torch.Tensor, context_BL: torch.Tensor) -> torch.Tensor:
        penalty, size = self._params.repetition_penalty, self._shard.size
        if penalty == 1:
            return logits_BV
        index_BL = context_BL - self._shard.start
        is_here_BL = (context_BL != ABSENT) & (index_BL >= 0) & (index_BL < size)
        index_BL = torch.where(is_here_BL, index_BL, size)  # all others change a column that is cut off
        padded = F.pad(logits_BV, (0, 1))
        values = padded.gather(1, index_BL)
        values = torch.where(values < 0, values * penalty, values / penalty)
        return padded.scatter(1, index_BL, values)[:, :size]

    def _restricted(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """Returns the scores, -inf where a token is left out."""
        params = self._params
        if 0 < params.top_k < self._shard.vocab_size:
            scores_BV = _keep_from(scores_BV, self._highest(scores_BV, params.top_k)[:, -1:])
        if params.top_p < 1:
            scores_BV = _keep_from(scores_BV, self._lowest_of_nucleus(scores_BV))
        if params.min_p > 0:
            scores_BV = _keep_from(scores_BV, self._highest(scores_BV, 1) + log(params.min_p))
        return scores_BV

    def _lowest_of_nucleus(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """Returns the lowest score, (rows, 1), of the fewest tokens with a probability of `top_p`."""
        total_B1 = self._shard.all_gather(scores_BV.logsumexp(1, keepdim=True)).logsumexp(0)
        top_p, num_tokens, count = self._params.top_p, self._shard.vocab_size, FIRST_CANDIDATES
        while True:
            highest_BC = self._highest(scores_BV, min(count, num_tokens))
            reached_BC = (highest_BC - total_B1).exp().cumsum(1)
            if count >= num_tokens or bool((reached_BC[:, -1] >= top_p).all()):
                index_B1 = (reached_BC < top_p).sum(1, keepdim=True)
                return highest_BC.gather(1, index_B1.clamp(max=highest_BC.shape[1] - 1))
            count *= 4

    def _highest(self, scores_BV: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the `count` highest scores of all ranks, (rows, count), in descending order."""
        local_BC = scores_BV.topk(min(count, self._shard.size), dim=1).values
        local_BC = F.pad(local_BC, (0, count - local_BC.shape[1]), value=-inf)
        gathered_BC = self._shard.all_gather(local_BC).movedim(0, 1).flatten(1)
        return gathered_BC.sort(dim=1, descending=True).values[:, :count]

    def _noise(self, requests: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns the Gumbel noise of the tokens of this rank, (rows, size of the shard)."""
        pairs, seed = zip(requests, positions, strict=True), self._params.seed
        keys = [signed64(derive_key(seed, "generate", request, position)) for request, position in pairs]
        key_B1 = torch.tensor(keys, dtype=torch.int64, device=device).unsqueeze(1)
        first, end = self._shard.start, self._shard.start + self._shard.size
        bits = random_bits(key_B1, torch.arange(first, end, device=device).unsqueeze(0))
        # the middles of 2^52 parts of [0, 1], which float64 has exactly: never 0 or 1
        u = (bits >> 12).bitwise_and((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
        return u.log_().neg_().log_().neg_()


def full_vocabulary(size: int) -> VocabShard:
    """Returns the part of a rank that has the logits of all tokens."""
    return VocabShard(0, size, size, lambda numbers: numbers.unsqueeze(0))


def _keep_from(scores_BV: torch.Tensor, lowest_B1: torch.Tensor) -> torch.Tensor:
    return scores_BV.masked_fill(scores_BV < lowest_B1, -inf)
