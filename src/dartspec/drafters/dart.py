"""DART: one decoder layer reads the target's hidden states and guesses the next d tokens in one forward.

Source: arXiv 2601.19278, sections 3.1 to 3.3. Row j of the layer's input holds the features of the token at position j
(the target's hidden states at the taps, side by side) and the embedding of the token at j + 1; d - 1 identical mask
rows follow; the last clean row and the masks together give the distributions of the next d tokens ("shifted
prediction"). `DartNet` is the network, used by training and by decoding; `DartDrafter` keeps a key/value cache over
the prefix, so that a round runs only the newly committed rows. The tree is made elsewhere (`lattice.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from dartspec import _core
from dartspec.drafters._bigram import Bigram, Continuity
from dartspec.drafters._checkpoint import DraftNet, LayerConfig, NetConfig, checked_net
from dartspec.drafters._masks import attend_dense, attend_flex, layout
from dartspec.drafters._nn import (
    FusedLayer,
    Gated,
    Head,
    Norm,
    Prefix,
    Product,
    RMSNorm,
    attend_groups,
    attend_rows,
    head_rows,
    recomputed,
    rope_table,
    rotate,
    use_core,
)
from dartspec.drafters._recorded import RecordedDraft, RoomPrefix
from dartspec.drafters._train import Batch, Predicted, Start, copy_head, default_taps, draw, start_fused
from dartspec.errors import DartspecError
from dartspec.target.attention import attend
from dartspec.tree import root_only
from dartspec.types import Committed, TargetView, TokenTree

if TYPE_CHECKING:
    from dartspec.lattice import SearchConfig
    from dartspec.ngram import NgramIndex

FORMS = ("", "block", "dense", "flex")
HEADS = ("own", "target", "low_rank")
OPTIONS = ("shifted", "head", "head_rank", "continuity_rank", "attention")
PREFILL_ROWS = 512  # clean rows a chunk while a long prompt is read
ROWS_A_BLOCK = 512  # queries of the block form that attend at once: no more scores than that by the length live
FEW_ROWS = 32  # that many new rows go through one product together with the last one


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """A DART drafter's shape and what it was trained for; `config.json` beside its weights.

    mask:  "pair": a mask row is an embedding row (`mask_embedding`, H) and features before the projection
           (`mask_features`, n_taps * target H), treated like any clean row; exportable to vLLM's `peagle`.
           "official": a vector after the norms (`mask_rep`, 2H), whose first H values are also the residual.
    final_norm_twice: the official program applies the final norm twice; ours once.
    shifted: the last clean row predicts the next token and d - 1 masks the others (the paper's section 3.2); else d
           masks predict, and the last clean row nothing: what the paper compares with.
    head:  "own": a matrix of its own. "target": the target's rows of the draft vocabulary, neither trained nor stored.
           "low_rank": a matrix of its own, of rank `head_rank`.
    continuity_rank: of the learned continuity (`_bigram`), which then replaces or joins the n-gram index; 0: none.
    search: numbers of the tree search (`SearchConfig`) that were found best for it, where they are not the default.
    """

    title: ClassVar[str] = "DART"
    name: ClassVar[str] = "dart"

    mask: str = "pair"
    final_norm_twice: bool = False
    shifted: bool = True
    head: str = "own"
    head_rank: int = 0
    continuity_rank: int = 0
    search: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.searching()
        self.refuse_unless(self.mask in ("pair", "official"), f"mask is {self.mask!r}; must be 'pair' or 'official'")
        self.refuse_unless(isinstance(self.shifted, bool), f"shifted is {self.shifted!r}; must be true or false")
        self.refuse_unless(self.head in HEADS, f"head is {self.head!r}; must be one of {', '.join(HEADS)}")
        for name, least, most in (
            ("head_rank", int(self.head == "low_rank"), self.hidden_size if self.head == "low_rank" else 0),
            ("continuity_rank", 0, self.hidden_size),
        ):
            rank = getattr(self, name)
            good = type(rank) is int and least <= rank <= most
            self.refuse_unless(good, f"{name} is {rank!r}; must be {least} to {most} with the head {self.head!r}")
        self.refuse_unless(
            self.head != "target" or self.hidden_size == self.target_hidden_size,
            f"the target's head is for rows of {self.target_hidden_size}, not of hidden_size {self.hidden_size}",
        )

    def searching(self, **changes: Any) -> SearchConfig:
        """The tree search with its own numbers, and `changes` to them."""
        from dartspec.lattice import SearchConfig

        known = [f.name for f in fields(SearchConfig)]
        self.refuse_unless(isinstance(self.search, dict), f"search is {self.search!r}; must be an object")
        unknown = next((name for name in self.search if name not in known), None)
        self.refuse_unless(unknown is None, f"search has no {unknown!r}; there are: {', '.join(known)}")
        return SearchConfig(**{**self.search, **changes})

    @property
    def num_masks(self) -> int:
        """Behind a prefix; the last `d` rows of prefix and masks predict."""
        return self.d - 1 if self.shifted else self.d


class DartLayer(FusedLayer):
    """The layer, and in the official form the mask."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        if c.mask == "official":
            self.mask_rep = nn.Parameter(torch.zeros(2 * c.hidden_size))


class SharedRows(NamedTuple):
    """Clean rows of several sequences laid end to end, and what is predicted from them (method, section 3).

    features:   (N, n_taps * H_target) hidden states of the target; row j of a sequence belongs to its token j.
    embeddings: (N, H) embeddings of the tokens at j + 1.
    lengths:    clean rows of each sequence; they sum to N.
    first:      per sequence, (R,) int64 rows whose offset 1 is wanted.
    anchors:    per sequence, (A,) int64 rows that a group of masks follows, for offsets 2..d.
    """

    features: Tensor
    embeddings: Tensor
    lengths: Sequence[int]
    first: Sequence[Tensor]
    anchors: Sequence[Tensor]


class DartNet(DraftNet):
    """The network, with the tensor names of the official checkpoints (`layers.0.` for `midlayer.`)."""

    config_class = Config
    config: Config
    form = ""  # of the training pass: block, dense or flex; empty: flex on CUDA, block elsewhere
    recompute = False  # the block form's attention keeps no scores for the backward pass, but makes them again

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        width = len(c.taps) * c.target_hidden_size
        self.fc = nn.Linear(width, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([DartLayer(c)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.head != "target":
            self.lm_head = nn.Linear(c.head_rank or c.hidden_size, c.draft_vocab_size, bias=False)
        if c.head == "low_rank":
            self.head_in = nn.Linear(c.hidden_size, c.head_rank, bias=False)
        self.target_head: Tensor | None = None  # (V, H), where `head` is the target's; given, never saved
        if c.continuity_rank:
            self.continuity = Bigram(c.hidden_size, c.continuity_rank, c.draft_vocab_size)
        if c.mask == "pair":
            self.mask_embedding = nn.Parameter(torch.zeros(c.hidden_size))
            self.mask_features = nn.Parameter(torch.zeros(width))

    @property
    def layer(self) -> DartLayer:
        layer = self.layers[0]
        assert isinstance(layer, DartLayer)
        return layer

    @property
    def by_vocabulary(self) -> tuple[str, ...]:
        c = self.config
        names = {"lm_head.weight": c.head != "target", "continuity.outer.weight": c.continuity_rank > 0}
        return tuple(name for name, there in names.items() if there)

    @property
    def head_weight(self) -> Tensor:
        """(V, H), or (V, head_rank): the head of what `for_head` makes."""
        if self.config.head != "target":
            return self.lm_head.weight
        if self.target_head is None:
            raise DartspecError("this drafter has the target's head, and was not given it: load it with its target")
        return self.target_head

    def for_head(self, hidden: Tensor) -> Tensor:
        """(n, H) -> (n, H) or (n, head_rank)."""
        return self.head_in(hidden) if self.config.head == "low_rank" else hidden

    def whole_head(self) -> Tensor:
        """(V, H) one matrix, whichever the form."""
        weight = self.head_weight.detach()
        return weight @ self.head_in.weight.detach() if self.config.head == "low_rank" else weight

    def converted(self, dtype: torch.dtype, device: torch.device) -> Self:
        copy = super().converted(dtype, device)
        copy.target_head = None if self.target_head is None else self.target_head.to(device, dtype)
        return copy

    def clean_rows(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """(n, n_taps * H_target), (n, H) -> residual (n, H), attention input (n, 2H)."""
        residual = self.fc(features)
        return residual, self.layer.inputs(embeddings, residual)

    def mask_row(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Residual (1, H) and attention input (1, 2H) of a mask. All masks are alike but for their positions."""
        if self.config.mask == "pair":
            return self.clean_rows(self.mask_features[None].to(dtype), self.mask_embedding[None].to(dtype))
        row = self.layer.mask_rep[None].to(dtype)
        return row[:, : self.config.hidden_size], row

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """(n, H) residual, (n, heads * head_dim) attention output -> (n, H), final norm applied: ready for the head."""
        normed: Tensor = self.norm(self.layer.finish(residual, attended))
        return self.norm(normed) if self.config.final_norm_twice else normed

    @classmethod
    def from_tensors(cls, config: NetConfig, found: dict[str, Tensor], path: Path) -> DartNet:
        """`midlayer.` is read as `layers.0.`."""
        found = {n.replace("midlayer.", "layers.0.", 1): t for n, t in found.items()}
        return super().from_tensors(config, found, path)

    def shared_forward(self, rows: SharedRows) -> tuple[Tensor, Tensor]:
        """The prefix-shared pass: every group of masks sees its clean prefix and itself, nothing else (`_masks`).

        Returns `first` (sum R, H), the rows that predict offset 1, and `masks` (sum A, d - 1, H), final norm applied;
        both in the order of the sequences. Unshifted, a `first` row is followed by one mask, which predicts offset 1,
        and the first of an anchor's d masks is only seen by the others.
        """
        c, later = self.config, self.config.d - 1
        num_first, num_groups = sum(map(len, rows.first)), sum(map(len, rows.anchors))
        residual, x = self.clean_rows(rows.features, rows.embeddings)
        mask_residual, mask_x = self.mask_row(x.dtype)
        starts = torch.tensor([0, *rows.lengths]).cumsum(0)[:-1].tolist()
        flat_first = torch.cat([f + s for f, s in zip(rows.first, starts, strict=True)])
        form = self.form or ("flex" if x.is_cuda else "block")
        if form == "block":
            attended = self._in_blocks(rows, x, mask_x, starts, flat_first)
        else:
            attended = self._at_once(rows, x, mask_x, flat_first, attend_flex if form == "flex" else attend_dense)
        own = residual[flat_first] if c.shifted else mask_residual.expand(num_first, -1)
        hidden = self.finish(torch.cat((own, mask_residual.expand(num_groups * later, -1))), attended)
        return hidden[:num_first], hidden[num_first:].view(num_groups, later, c.hidden_size)

    def _at_once(
        self, rows: SharedRows, x: Tensor, mask_x: Tensor, flat_first: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """(sum R + sum A * (d - 1), heads * dim) attention output: all rows in one attention under the whole mask."""
        c, attn = self.config, self.layer.self_attn
        groups = [(rows.anchors, c.num_masks)] if c.shifted else [(rows.first, 1), (rows.anchors, c.num_masks)]
        place = layout(rows.lengths, groups)
        n = len(x)
        x = torch.cat((x, mask_x.expand(len(place.group) - n, -1)))
        cos, sin = rope_table(place.position, c.head_dim, c.rope_theta)
        q, k, v = (p(x).view(len(x), -1, c.head_dim) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = (rotate(t, cos[:, None], sin[:, None]) for t in (q, k))
        out = attend(q, k, v, place).flatten(1)
        num_first = len(flat_first)
        first = out[flat_first] if c.shifted else out[n : n + num_first]
        masks = out[n if c.shifted else n + num_first :].view(-1, c.num_masks, out.shape[1])
        return torch.cat((first, masks[:, c.num_masks - c.d + 1 :].flatten(0, 1)))

    def _in_blocks(
        self, rows: SharedRows, x: Tensor, mask_x: Tensor, starts: Sequence[int], flat_first: Tensor
    ) -> Tensor:
        """The same in block form: the softmax of a mask runs over [scores of the clean keys <= its anchor ; scores of
        its own group's masks].

        A clean row that predicts nothing costs its keys and values only; the projections of a mask are computed once.
        """
        c, attn = self.config, self.layer.self_attn
        heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        keys, values = attn.k_proj(x).view(-1, kv, dim), attn.v_proj(x).view(-1, kv, dim)
        queries = attn.q_proj(x[flat_first]).view(-1, heads, dim) if c.shifted else None
        mask_q, mask_k = attn.q_proj(mask_x).view(heads, dim), attn.k_proj(mask_x).view(kv, dim)
        mask_v = attn.v_proj(mask_x).view(kv, 1, 1, dim)
        in_groups = recomputed(attend_groups) if self.recompute else attend_groups
        in_rows = recomputed(attend_rows) if self.recompute else attend_rows
        # one table for all positions that occur: sequences start at 0, masks run on from their anchor
        cos, sin = rope_table(torch.arange(max(rows.lengths) + c.num_masks, device=x.device), dim, c.rope_theta)

        def behind(anchors: Tensor, k: Tensor, v: Tensor, num_masks: int, skipped: int) -> Tensor:
            """(A * (num_masks - skipped), heads * dim): the masks of each anchor but for its first ones."""
            end = int(anchors.max()) + 1
            here = torch.arange(end, device=x.device)
            at = anchors[:, None] + torch.arange(1, num_masks + 1, device=x.device)  # positions
            mc, ms, n = cos[at][:, :, None], sin[at][:, :, None], num_masks - skipped
            q = rotate(mask_q, mc[:, skipped:], ms[:, skipped:]).view(len(at), n, kv, heads // kv, dim)
            own_k = rotate(mask_k, mc, ms).permute(2, 0, 1, 3)  # (kv, A, num_masks, dim)
            own_v = mask_v.expand(kv, len(at), num_masks, dim)
            causal = torch.ones(n, num_masks, dtype=torch.bool, device=x.device).tril(skipped)
            q = q.permute(2, 3, 0, 1, 4)  # (kv, group, A, n, dim)
            out = in_groups(q, k[:, :end], v[:, :end], here <= anchors[:, None], own_k, own_v, causal)
            return out.permute(2, 3, 0, 1, 4).reshape(len(at) * n, heads * dim)

        out_first, out_masks, taken = [], [], 0
        for length, start, first, anchors in zip(rows.lengths, starts, rows.first, rows.anchors, strict=True):
            k = rotate(keys[start : start + length], cos[:length, None], sin[:length, None])  # (T, kv, dim)
            k, v = k.transpose(0, 1), values[start : start + length].transpose(0, 1)  # (kv, T, dim)
            for some in torch.split(first, ROWS_A_BLOCK) if len(first) else ():
                if queries is None:
                    out_first.append(behind(some, k, v, 1, 0))
                    continue
                end = int(some.max()) + 1  # rows ascend, so a block of them sees little of what comes later
                q = rotate(queries[taken : taken + len(some)], cos[some][:, None], sin[some][:, None])
                taken += len(some)
                q = q.view(len(some), kv, heads // kv, dim).permute(1, 2, 0, 3)  # (kv, group, R, dim)
                out = in_rows(q, k[:, :end], v[:, :end], torch.arange(end, device=x.device) <= some[:, None])
                out_first.append(out.permute(2, 0, 1, 3).reshape(len(some), heads * dim))
            for some in torch.split(anchors, max(1, ROWS_A_BLOCK // c.d)) if len(anchors) else ():
                out_masks.append(behind(some, k, v, c.num_masks, c.num_masks - c.d + 1))
        return torch.cat([x.new_zeros(0, heads * dim), *out_first, *out_masks])


# --- training -------------------------------------------------------------------------------------------------------


def start(s: Start) -> DartNet:
    """Fresh weights: the target's last layer where it fits, its head rows, masks as small noise, the rest at random.

    Options: those of `Config`, and `attention`, the form of the training pass.
    """
    own = {k: v for k, v in s.options.items() if k != "attention"}
    c = s._replace(options=own).config(Config, s.taps or default_taps(s.num_layers), OPTIONS)
    net = DartNet(c)
    net.form = s.options.get("attention", "")
    if net.form not in FORMS:
        raise DartspecError(f"DART: attention is {net.form!r}; must be {', '.join(FORMS[1:])}, or empty")
    generator = draw(net, s)
    start_fused(net.layer, net.fc, s)
    with torch.no_grad():
        for p in (net.mask_embedding, net.mask_features):
            p.normal_(0.0, 0.02, generator=generator)
        if c.head == "target":
            net.target_head = s.head
        elif c.head == "low_rank" and s.head.shape[1] == c.hidden_size:  # the nearest matrix of that rank
            _, vectors = torch.linalg.eigh(s.head.T @ s.head)
            net.head_in.weight.copy_(vectors[:, -c.head_rank :].T)
            net.lm_head.weight.copy_(s.head @ vectors[:, -c.head_rank :])
    if c.head == "own":
        copy_head(net.lm_head.weight, s)
    if c.continuity_rank:
        net.continuity.start(generator)
    return net


def read(folder: Path) -> DartNet:
    return DartNet.from_folder(folder)


def loss(net: DartNet, batch: Batch) -> Any:
    """Offset 1 at the `first` rows, offsets 2..d at a group of masks behind each anchor."""
    sequences, starts, d = batch.sequences, batch.starts, net.config.d
    embeddings = batch.embed(torch.cat([s.ids[1:] for s in sequences]))
    rows = SharedRows(
        torch.cat([s.features[:-1].flatten(1) for s in sequences]),
        embeddings,
        [len(s.ids) - 1 for s in sequences],
        [s.first for s in sequences],
        [s.anchors for s in sequences],
    )
    first, masks = net.shared_forward(rows)
    first_row = torch.cat([base + s.first for s, base in zip(sequences, starts, strict=True)])
    anchor = torch.cat([base + s.anchors for s, base in zip(sequences, starts, strict=True)])
    ones = torch.ones_like(first_row)
    later = torch.arange(2, d + 1, device=anchor.device).repeat(len(anchor))
    predicted = [
        Predicted(
            net.for_head(torch.cat((first, masks.flatten(0, 1)))),
            net.head_weight,
            torch.cat((first_row, anchor.repeat_interleave(d - 1))),
            torch.cat((ones, later)),
        )
    ]
    if net.config.continuity_rank:  # knows the token at j + 1 alone, and is taught what offset 1 of row j is taught
        known = torch.cat([s.first + base - i for i, (s, base) in enumerate(zip(sequences, starts, strict=True))])
        states = net.continuity.states(embeddings[known])
        predicted.append(Predicted(states, net.continuity.outer.weight, first_row, ones, continuity=True))
    return batch.loss(predicted)


# --- decoding -------------------------------------------------------------------------------------------------------


class DartDrafter:
    """Drafts for any number of sequences, one forward a round over their newly committed rows and the masks.

    net:    its weights are copied, in the target's dtype and on its device.
    index:  n-gram continuity, or None; a learned one joins it, and replaces it where there is none or
            `search.learned_weight` is 1.
    search: the numbers of the tree search; default: those of its config.
    text:   the n-grams of the text at hand beside those of the index, or None; set by `search.running_text`, and may
            be set at any time; another `search` later leaves it as it is.
    search_ms: milliseconds spent in the tree search so far; the engine shows it as a stage of its own.
    """

    def __init__(
        self,
        net: DartNet,
        view: TargetView,
        index: NgramIndex | None = None,
        search: SearchConfig | None = None,
    ) -> None:
        from dartspec.ngram.live import LiveText

        self.config = c = net.config
        self.taps = c.taps
        self.view, self.index = view, index
        self.search = search if search is not None else c.searching()
        self.text = LiveText() if self.search.running_text else None
        self.search_ms = 0.0
        self._prefixes: dict[int, Prefix] = {}
        dtype, device = view.dtype, view.device
        with torch.no_grad():
            net = net.converted(dtype, device)
            threads: int = getattr(view, "num_threads", torch.get_num_threads())
            packed = use_core(device, dtype)
            self._threads = threads
            attn, layer = net.layer.self_attn, net.layer
            self._fc = Product([net.fc.weight], packed, threads)
            self._qkv = Product([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight], packed, threads)
            self._kv = Product([attn.k_proj.weight, attn.v_proj.weight], packed, threads)
            self._o = Product([attn.o_proj.weight], packed, threads)
            self._mlp = Gated(layer.mlp, packed, threads)
            ids = net.target_ids().to(torch.int32)
            self._ids = ids.cpu()
            inner = Product([net.head_in.weight], packed, threads) if c.head == "low_rank" else None
            self._head = Head(net.head_weight, ids >= view.num_tokens, packed, threads, inner=inner)
            self._embedding_norm, self._feature_norm = (
                Norm(layer.input_layernorm, packed),
                Norm(layer.hidden_norm, packed),
            )
            self._mlp_norm, self._final_norm = Norm(layer.post_attention_layernorm, packed), Norm(net.norm, packed)
            # all masks are alike, and so are their queries, keys and values before rotation
            residual, x = net.mask_row(dtype)
            m = c.num_masks
            self._mask_residual = residual.expand(m, -1).contiguous()
            self._mask_qkv = self._qkv(x).expand(m, -1).contiguous()
            self.continuity: Continuity | None = None
            if c.continuity_rank:
                drafted = net.target_ids()
                self.continuity = Continuity(net.continuity, view.embed(drafted), drafted.cpu(), c.vocab_size)
        self._layer = self._in_one_call() if packed and c.shifted else None
        self._cos, self._sin = rope_table(torch.arange(0, device=device), c.head_dim, c.rope_theta)
        # where the target's forwards are recorded (CUDA), so are the drafter's
        recorder = getattr(view, "recorder", None) if c.shifted and not packed else None
        self._recorded = RecordedDraft(self, recorder, self.search.top_k) if recorder is not None else None

    def _in_one_call(self) -> _core.DraftLayer:
        """The layer as one call of the core, for a sequence alone: Python takes as long as so few rows' products."""
        c, mlp = self.config, self._mlp
        norms = self._embedding_norm, self._feature_norm, self._mlp_norm, self._final_norm
        parts = self._fc.packed, self._qkv.packed, self._o.packed, mlp.gate_up, mlp.down
        fc, qkv, out, gate_up, down = (part for part in parts if part is not None)
        return _core.DraftLayer(
            fc,
            qkv,
            out,
            gate_up,
            down,
            [(n.weight.data_ptr(), n.eps, 0) for n in norms],
            (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.num_masks),
            c.final_norm_twice,
            self._mask_residual.data_ptr(),
            self._mask_qkv.data_ptr(),
        )

    # -- the interface ---------------------------------------------------------------------------------------------

    def reset(self, slots: Sequence[int]) -> None:
        if self.text is not None:
            self.text.forget(slots)
        for slot in slots:
            prefix = self._prefixes.pop(slot, None)
            if isinstance(prefix, RoomPrefix):
                prefix.give_back()

    def fork(self, source: int, target: int, length: int) -> None:
        """See `types.Forks`: row p holds the features of position p and the token at p + 1."""
        prefix = self._prefixes[source]
        if length > prefix.length:
            raise DartspecError(f"slot {source} has read {prefix.length} rows, {length} of them were asked for")
        self._prefixes[target] = prefix.beginning(length)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        """One tree a sequence. `new[i].features` are the target's states at `taps`, unnormed, as hooks gave them."""
        from dartspec.lattice import MOST_CONTEXT, build_tree

        texts = None
        if self.text is not None:  # in a slot's first round the history is its prompt and one token more
            texts = [self.text.counts(one.slot, one.history.cpu().numpy(), len(one.history) - 1) for one in new]
        if not any(budget):
            self._read_all(new)
            return [root_only(int(one.history[-1])) for one in new]
        log_probs, tokens = self.lattice(new)
        began = time.perf_counter()
        learned = self._learned(new, tokens) if self.continuity is not None else None
        trees = []
        for i, one in enumerate(new):
            context = one.history[-MOST_CONTEXT:].tolist()
            trees.append(
                build_tree(
                    context[-1],
                    log_probs[i],
                    tokens[i],
                    context,
                    budget[i],
                    self.index,
                    self.search,
                    self.view.eos_token_ids,
                    None if texts is None else texts[i],
                    None if learned is None else learned[i],
                )
            )
        self.search_ms += 1e3 * (time.perf_counter() - began)
        return trees

    def _learned(self, new: Sequence[Committed], tokens: Tensor) -> Tensor:
        """(B, d, k, k) what the learned continuity says of the lattices' (B, d, k) tokens."""
        assert self.continuity is not None
        table = self.continuity.table(tokens)
        if self.search.ngram_at_level0:
            roots = torch.stack([one.history[-1] for one in new]).to(self.view.device)
            self.continuity.add_root(table, self.view.embed(roots), tokens)
        return table

    # -- the network, incrementally ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def lattice(self, new: Sequence[Committed]) -> tuple[Tensor, Tensor]:
        """The drafter's forward: per sequence and offset the `search.top_k` likeliest tokens.

        Returns natural log-probabilities over the draft vocabulary (B, d, k) float32 and target ids (B, d, k) int32,
        on the CPU, best first. The new rows enter the prefix; the masks leave nothing behind. Where a logit is not
        finite the whole row is -inf: it makes no node.
        """
        taken = [self._take(one) for one in new]  # all are looked at before any is changed
        rest = [self._read_beginning(*one) for one in taken]
        found = self._recorded.lattice(rest) if self._recorded is not None else None
        log_probs, index = found or self._head.likeliest(self._forward(rest), self.search.top_k)
        shape = (len(new), self.config.d, -1)
        return log_probs.view(shape), self._ids[index].view(shape)

    def _forward(self, rest: Sequence[tuple[Prefix, Tensor, Tensor]]) -> Tensor:
        """What `_read_beginning` left of each sequence -> (B * d, H) rows, final norm applied: the last clean row of
        each, then its masks."""
        c = self.config
        d = c.d
        if self._layer is not None and len(rest) == 1:
            return self._alone(*rest[0])
        width = c.num_attention_heads * c.head_dim
        attended = torch.empty(len(rest) * d, width, dtype=self.view.dtype, device=self.view.device)
        residual = torch.empty(len(rest) * d, c.hidden_size, dtype=self.view.dtype, device=self.view.device)
        for i, (prefix, features, ids) in enumerate(rest):
            span = slice(i * d, (i + 1) * d)
            self._last_rows(prefix, features, ids, residual[span], attended[span])
        return self._finish(residual, attended)

    def _alone(self, prefix: Prefix, features: Tensor, ids: Tensor) -> Tensor:
        """`_forward` of one sequence in one call."""
        assert self._layer is not None
        features = features.contiguous()
        embeddings = self.view.embed(ids).to(features.dtype).contiguous()
        y = torch.empty(self.config.d, self.config.hidden_size, dtype=features.dtype)
        keys, values, at = prefix.keys, prefix.values, prefix.length
        self._layer.run(
            features.data_ptr(),
            embeddings.data_ptr(),
            len(ids),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            at,
            y.data_ptr(),
            self._threads,
        )
        prefix.length = at + len(ids)  # the masks' entries lie behind it and will be overwritten
        return y

    def _read_beginning(self, prefix: Prefix, features: Tensor, ids: Tensor) -> tuple[Prefix, Tensor, Tensor]:
        """Reads all but a few of a sequence's new rows, and returns those left."""
        done = 0
        while (left := len(ids) - done) > FEW_ROWS:  # the last row stays: it is one of the d that predict
            chunk = slice(done, done + min(PREFILL_ROWS, left - 1))
            self._read(prefix, features[chunk], ids[chunk])
            done = chunk.stop
        return prefix, features[done:], ids[done:]

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """(n, H) residual, (n, heads * dim) attention output -> (n, H), final norm applied: ready for the head."""
        c = self.config
        x = residual + self._o(attended)
        x += self._mlp(self._mlp_norm(x))
        x = self._final_norm(x)
        return self._final_norm(x) if c.final_norm_twice else x

    @torch.inference_mode()
    def _read_all(self, new: Sequence[Committed]) -> None:
        """Reads what sequences learned, drafting nothing."""
        for one in new:
            prefix, features, ids = self._take(one)
            for at in range(0, len(ids), PREFILL_ROWS):
                self._read(prefix, features[at : at + PREFILL_ROWS], ids[at : at + PREFILL_ROWS])

    def _take(self, one: Committed) -> tuple[Prefix, Tensor, Tensor]:
        """The sequence's prefix, its new features (n, n_taps * H) and the tokens at one position further on (n,)."""
        c, length, n = self.config, len(one.history), one.n_new
        if one.features is None or tuple(one.features.shape) != (n, len(c.taps), c.target_hidden_size):
            found = None if one.features is None else list(one.features.shape)
            raise DartspecError(
                f"DART wants features of shape {[n, len(c.taps), c.target_hidden_size]} for {n} new tokens, "
                f"found {found}"
            )
        prefix = self._prefixes.get(one.slot)
        if prefix is None:
            if self._recorded is not None:
                prefix = RoomPrefix(self._recorded.room)
            else:
                prefix = Prefix(c.num_key_value_heads, c.head_dim, self.view.dtype, self.view.device)
            self._prefixes[one.slot] = prefix
        if n < 1 or prefix.length != length - 1 - n:
            raise DartspecError(
                f"slot {one.slot}: {n} new of {length} committed tokens, but the drafter has read {prefix.length} "
                "rows; reset the slot and give every position since the start"
            )
        prefix.reserve(length - 1 + c.num_masks)
        self._grow_table(length - 1 + c.num_masks)
        features = one.features.flatten(1).to(self.view.device, self.view.dtype)
        return prefix, features, one.history[length - n :]

    def _grow_table(self, length: int) -> None:
        if length > len(self._cos):
            c = self.config
            positions = torch.arange(max(length, 2 * len(self._cos), 512), device=self.view.device)
            self._cos, self._sin = rope_table(positions, c.head_dim, c.rope_theta)

    def _inputs(self, features: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Residual (n, H) and attention input (n, 2H) of clean rows."""
        H = self.config.hidden_size
        residual = self._fc(features)
        x = torch.empty(len(ids), 2 * H, dtype=residual.dtype, device=residual.device)
        ids = ids.to(self.view.device)
        self._embedding_norm(self.view.embed(ids).to(residual.dtype), out=x[:, :H])
        self._feature_norm(residual, out=x[:, H:])
        return residual, x

    def _read(self, prefix: Prefix, features: Tensor, ids: Tensor) -> None:
        """Clean rows that predict nothing: keys and values only."""
        c, n, at = self.config, len(ids), prefix.length
        _, x = self._inputs(features, ids)
        kv = self._kv(x).view(n, 2, c.num_key_value_heads, c.head_dim)
        span = slice(at, at + n)
        prefix.keys[:, span] = rotate(kv[:, 0], self._cos[span, None], self._sin[span, None]).transpose(0, 1)
        prefix.values[:, span] = kv[:, 1].transpose(0, 1)
        prefix.length += n

    def _last_rows(
        self, prefix: Prefix, features: Tensor, ids: Tensor, residual_out: Tensor, attended_out: Tensor
    ) -> None:
        """The remaining clean rows and the masks; the last d are attended, (d, heads * dim), into the outputs."""
        c, n, at = self.config, len(ids), prefix.length
        heads, kv, dim, m = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.num_masks
        residual, x = self._inputs(features, ids)
        residual_out[: c.d - m] = residual[-1]
        residual_out[c.d - m :] = self._mask_residual
        qkv = torch.cat((self._qkv(x), self._mask_qkv)).view(n + m, heads + 2 * kv, dim)
        end = at + n + m
        turned = rotate(qkv[:, : heads + kv], self._cos[at:end, None], self._sin[at:end, None])
        keys, values = prefix.keys[:, :end], prefix.values[:, :end]
        keys[:, at:] = turned[:, heads:].transpose(0, 1)
        values[:, at:] = qkv[:, heads + kv :].transpose(0, 1)
        prefix.length = at + n  # the masks' entries lie behind it and will be overwritten
        # the rows that predict are the last d keys too, so plain causal attention is what each may see
        q = turned[n + m - c.d :, :heads].transpose(0, 1)  # (heads, d, dim)
        out = attend(q[None], keys[None], values[None], None, causal=True, num_threads=self._threads)
        attended_out.copy_(out.view(c.d, heads * dim))


def load(
    source: Config | DartNet | Path | str,
    view: TargetView,
    index: NgramIndex | Path | str | None = None,
    search: SearchConfig | None = None,
) -> DartDrafter:
    """The drafter of a folder or of a network: see `checked_net`."""
    net = checked_net(source, DartNet, view)
    if net.config.head == "target":
        net.target_head = head_rows(view, net.target_ids())
    if isinstance(index, Path | str):
        from dartspec.ngram import NgramIndex

        index = NgramIndex.open(index, expect_fingerprint=getattr(view, "tokenizer_fingerprint", None))
    return DartDrafter(net, view, index, search)
