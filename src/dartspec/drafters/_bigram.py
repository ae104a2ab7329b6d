"""A learned continuity: how likely a token follows another, as a low-rank table trained beside a drafter.

`log g(v | u) = s(u) . o(v) - log sum over the draft vocabulary of exp(s(u) . o(.))`: s(u) is a projection of the
target's embedding of u to `rank` numbers and a constant (which gives o a bias), o(v) a row for each draft token. It is
taught what the drafter is taught, the target's distribution behind u, knowing u alone; so it is what the n-gram index
is to the tree search (DART, equation (10)), and replaces or joins it there.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

ROWS_AT_ONCE = 256  # normalisers made together
MOST_AT_LOAD = 32768  # draft tokens whose normalisers are all made at once; they cost the square of it


class Bigram(nn.Module):
    """The weights. size: of the target's embedding. num_draft: of the draft vocabulary."""

    def __init__(self, size: int, rank: int, num_draft: int) -> None:
        super().__init__()
        self.rank = rank
        self.inner = nn.Linear(size, rank, bias=False)
        self.outer = nn.Linear(rank + 1, num_draft, bias=False)

    def states(self, embeddings: Tensor) -> Tensor:
        """(n, H) the target's embeddings of the tokens before -> (n, rank + 1): s(u), to be taken times `outer`."""
        wide = embeddings.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-12)  # embeddings differ in length
        inner = self.inner(unit.to(embeddings.dtype))
        return torch.cat((inner, inner.new_full((len(inner), 1), self.rank**0.5)), dim=-1)

    def start(self, generator: torch.Generator) -> None:
        """Every state of length sqrt(rank), nothing known of what follows."""
        with torch.no_grad():
            self.inner.weight.normal_(0.0, self.inner.in_features**-0.5, generator=generator)
            self.outer.weight.normal_(0.0, 0.02, generator=generator)
            self.outer.weight[:, -1] = 0.0


class Continuity:
    """The same for decoding, in float32 on the CPU: g between the candidates of neighbouring positions.

    embeddings: (V, H) the target's embeddings of the draft tokens; their dtype is that of the products for normalisers.
    ids: (V,) int64 their ids, of `vocab_size`.
    """

    def __init__(self, bigram: Bigram, embeddings: Tensor, ids: Tensor, vocab_size: int) -> None:
        self._bigram = copy.deepcopy(bigram).float().cpu()
        with torch.no_grad():
            self._states = self._bigram.states(embeddings.float().cpu())
        self._outer = self._bigram.outer.weight.detach()
        self._place = torch.full((vocab_size,), -1)
        self._place[ids] = torch.arange(len(ids))
        self._log_norm = torch.full((len(ids),), float("nan"))  # of each token before
        self._narrow = self._states.to(embeddings.dtype), self._outer.T.to(embeddings.dtype)
        if len(ids) <= MOST_AT_LOAD:  # else each when it is first asked for
            self._norms(torch.arange(len(ids)))

    @torch.no_grad()
    def table(self, tokens: Tensor) -> Tensor:
        """(B, d, k) int32 candidates -> (B, d, k, k) float32: [b, l, i, j] is g of tokens[b, l, j] after
        tokens[b, l - 1, i]. 0 at level 0, where the search has no continuity term unless it is told to."""
        place = self._place[tokens.long()]
        before = place[:, :-1]
        logits = self._states[before] @ self._outer[place[:, 1:]].transpose(-1, -2)
        g = (logits - self._norms(before)[..., None]).exp_()
        return torch.cat(
            (torch.zeros_like(g[:, :1]) if g.shape[1] else g.new_zeros(*tokens.shape, tokens.shape[2]), g), 1
        )

    @torch.no_grad()
    def add_root(self, table: Tensor, embeddings: Tensor, tokens: Tensor) -> None:
        """Level 0 of `table`: what follows the roots, (B, H) their embeddings, which need not be draft tokens."""
        states = self._bigram.states(embeddings.float().cpu())
        log_probs = (states @ self._outer.T).log_softmax(-1)
        table[:, 0, 0] = log_probs.gather(1, self._place[tokens[:, 0].long()]).exp()

    @torch.no_grad()
    def _norms(self, place: Tensor) -> Tensor:
        """Log-normalisers of states by draft id."""
        missing = torch.unique(place[self._log_norm[place].isnan()])
        states, outer = self._narrow
        for some in torch.split(missing, ROWS_AT_ONCE):
            self._log_norm[some] = torch.logsumexp((states[some] @ outer).float(), -1)
        return self._log_norm[place]
