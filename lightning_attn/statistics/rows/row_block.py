"""Some rows of an attention matrix, with everything about them that statistics ask for.

Shape suffixes as in `lightning_attn.capture.call`: B sequences, H query heads, K key heads, N queries, M keys, D width;
and R: rows of the block. The M of a block is the number of its leading keys that any of its rows can see.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lightning_attn.capture.call import LOG_OF_NO_WEIGHT
from lightning_attn.statistics.rows.workspace import Workspace

#: Stands for the logit of a hidden key: finite, so that zero weight times it is zero, and below every real logit.
_HIDDEN = -1e30
#: Smaller gaps are taken for this one. Its exponential is the smallest normal number: less than that is nothing beside
#: the row's largest weight, and computing it takes a CPU fifty times as long.
_SMALLEST_GAP = -87.0
#: What a row may give to other keys than one, at least, beside the 1 of its largest exponential: sums of exponentials
#: that were cut off tell nothing.
_SMALLEST_REST = 1e-30
#: What the exponentials beside the largest one sum to, at least, where those that were cut off are nothing beside them.
_EXACT_REST = 1e-26


class RowBlock:
    """Rows ``start:stop`` of the attention matrix of some sequences and heads.

    Everything is computed when it is first asked for. Logits, weights and what is derived from them are in float32. A
    row is *present* if it has a visible key and finite logits and is no padding; the values of other rows mean nothing.

    Args:
        logits_BHRM: what enters the softmax, anything where a key is hidden. Overwritten.
        visible: as `Visibility.rows` gives it.
        start: number of the first row.
        padding_BHR: rows that are no tokens; broadcasts. ``None`` where every row is one.
        sink_logits_H1: one more logit per head, whose weight goes nowhere.
        first_key: the first key that any query of the sequence sees: its number, or (B, H, 1); broadcasts.
        without_key_BH1: a key of each sequence and head that is hidden as well.
        are_weights: whether the logits are logarithms of weights, which are not to be divided by anything.
        workspace: what the logits were computed in.
    """

    def __init__(
        self,
        logits_BHRM: Tensor,
        visible: tuple[int, Tensor] | None,
        start: int,
        padding_BHR: Tensor | None,
        sink_logits_H1: Tensor | None,
        first_key: int | Tensor,
        without_key_BH1: Tensor | None,
        are_weights: bool,
        workspace: Workspace,
    ) -> None:
        self.start = start
        self.stop = start + logits_BHRM.shape[2]
        self.keys = logits_BHRM.shape[3]
        self._shape = tuple(logits_BHRM.shape)
        self._visible = visible
        self._padding_BHR = padding_BHR
        self._sink_logits_H1 = sink_logits_H1
        self.first_key = first_key
        self._without_key_BH1 = without_key_BH1
        self._are_weights = are_weights
        self._workspace = workspace
        self._kept = None if visible is None else visible[1].float()
        self._logits_BHRM = logits_BHRM
        self._hide()

    # Filling under a boolean mask takes ten times as long on a CPU as the arithmetic that does the same here.

    def _hide(self) -> None:
        """Give hidden keys the logit that stands for them, whatever theirs is.

        Logits that are not finite become infinity first: hidden keys lose it to the smaller value, and visible ones
        keep it and show that their row is not finite.
        """
        if self._visible is not None:
            unsure_BHRM = self._logits_BHRM[..., self._visible[0] :]
            unsure_BHRM.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        self._put_below(self._logits_BHRM)

    def _put_below(self, tensor_BHRM: Tensor) -> None:
        """Give hidden keys in a tensor of the block's size the number that stands for their logit."""
        if self._visible is not None:
            first, visible = self._visible
            unsure_BHRM = tensor_BHRM[..., first:]
            torch.minimum(unsure_BHRM, torch.where(visible, torch.inf, _HIDDEN), out=unsure_BHRM)
        self._overwrite_removed(tensor_BHRM, _HIDDEN)

    def _clear(self, tensor_BHRM: Tensor) -> Tensor:
        """Set a tensor of the block's size to zero where keys are hidden."""
        if self._visible is not None and self._kept is not None:
            tensor_BHRM[..., self._visible[0] :].mul_(self._kept)
        return self._overwrite_removed(tensor_BHRM, 0.0)

    def _overwrite_removed(self, tensor_BHRM: Tensor, value: float) -> Tensor:
        if self._without_key_BH1 is not None:
            self._overwrite(tensor_BHRM, self._without_key_BH1, value)
        return tensor_BHRM

    def _overwrite(self, tensor_BHRM: Tensor, key: int | Tensor, value: float) -> None:
        """Give one key of each row, if the block has it, another value."""
        if isinstance(key, Tensor):
            index_BHR1, within_BHR1 = self._index_of(key)
            kept_BHR1 = torch.where(within_BHR1, value, tensor_BHRM.gather(-1, index_BHR1))
            tensor_BHRM.scatter_(-1, index_BHR1, kept_BHR1)
        elif key < self._shape[3]:
            tensor_BHRM[..., key] = value

    def _index_of(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """A key for each row, given as (B, H, R or 1), as an index for `gather`, and where the block has it."""
        key_BHR1 = key.expand(self._shape[:3])[..., None]
        return key_BHR1.clamp(max=self._shape[3] - 1), key_BHR1 < self._shape[3]

    @cached_property
    def visible_count_BHR(self) -> Tensor:
        """Number of keys that each query sees, m_i."""
        *shape, keys = self._shape
        if self._visible is None or self._kept is None:
            count_BHR = self._logits_BHRM.new_full(shape, keys)
        else:
            first, _ = self._visible
            kept = self._kept.expand(*self._kept.shape[:-1], keys - first)  # it may have one value for every key
            count_BHR = (kept.sum(-1) + first).expand(shape)
        if self._without_key_BH1 is not None:
            count_BHR = count_BHR - self._sees(self._without_key_BH1).float()
        return count_BHR

    @cached_property
    def log_count_BHR(self) -> Tensor:
        """The largest entropy a row can have, ``log m_i``; something positive where there is no choice."""
        return self.visible_count_BHR.clamp(min=2).log()

    @cached_property
    def row_max_BHR(self) -> Tensor:
        """Largest visible logit of each row."""
        return self._logits_BHRM.amax(-1)

    @cached_property
    def gap_BHRM(self) -> Tensor:
        """Logit minus the row's largest one: 0 or less, and 0 where a key is hidden."""
        return self._gap_and_exponentials[0]

    @cached_property
    def exponentials_BHRM(self) -> Tensor:
        """``exp(gap)``, and 0 where a key is hidden. The weights are these over `total_BHR`."""
        return self._gap_and_exponentials[1]

    @cached_property
    def _gap_and_exponentials(self) -> tuple[Tensor, Tensor]:
        gap_BHRM = self._clear(self._logits_BHRM.sub_(self.row_max_BHR[..., None]))
        exponentials_BHRM = torch.clamp(gap_BHRM, min=_SMALLEST_GAP, out=self._workspace.buffer(1, self._shape)).exp_()
        return gap_BHRM, self._clear(exponentials_BHRM)

    @cached_property
    def exponential_sum_BHR(self) -> Tensor:
        """Sum of the exponentials of the visible keys; at least 1."""
        return self.exponentials_BHRM.sum(-1)

    @cached_property
    def total_BHR(self) -> Tensor:
        """What the exponentials are divided by: their sum, and the exponential of a learned sink logit."""
        if self._are_weights:
            return torch.exp(-self.row_max_BHR)
        if self._sink_logits_H1 is None:
            return self.exponential_sum_BHR
        return self.exponential_sum_BHR + torch.exp(self._sink_logits_H1 - self.row_max_BHR)

    @cached_property
    def _gap_sum_BHR(self) -> Tensor:
        return self.gap_BHRM.sum(-1)

    @cached_property
    def finite_BHR(self) -> Tensor:
        """Rows in which no visible logit is infinite or NaN."""
        return (self.row_max_BHR + self._gap_sum_BHR).isfinite()

    @cached_property
    def queries_BHR(self) -> Tensor:
        """Rows that belong to a token: all but padding."""
        if self._padding_BHR is None:
            return torch.ones_like(self.row_max_BHR, dtype=torch.bool)
        return (~self._padding_BHR).expand_as(self.row_max_BHR)

    @cached_property
    def present_BHR(self) -> Tensor:
        """Rows that have a distribution: a visible key, finite logits, no padding, weights that are not all zero."""
        present_BHR = self.finite_BHR & (self.visible_count_BHR >= 1)
        if self._are_weights:
            present_BHR = present_BHR & (self.row_max_BHR > LOG_OF_NO_WEIGHT)
        return present_BHR if self._padding_BHR is None else present_BHR & self.queries_BHR

    @cached_property
    def spread_out_BHR(self) -> Tensor:
        """Present rows with at least two visible keys: the others have no choice, so they tell nothing."""
        return self.present_BHR & (self.visible_count_BHR >= 2)

    @cached_property
    def entropy_BHR(self) -> Tensor:
        """Entropy of each row over its visible keys in nats.

        It is ``log(sum e^gap) - sum p gap``: two terms that are not negative, so that nothing cancels where rows are
        sharp.
        """
        entropy_BHR = self.log_sum_BHR - self.gap_mean_BHR
        return torch.minimum(entropy_BHR, self.log_count_BHR)  # rounding exceeds it where weights are uniform

    @cached_property
    def gap_mean_BHR(self) -> Tensor:
        """Mean gap of each row under its weights, of its visible keys alone: 0 or less."""
        return self._scratch(torch.mul, self.exponentials_BHRM, self.gap_BHRM).sum(-1) / self.exponential_sum_BHR

    @cached_property
    def log_sum_BHR(self) -> Tensor:
        """``log(sum e^gap)``, exact also where the sum is hardly more than the 1 of the largest logit."""
        return torch.where(self._is_sharp_BHR, self.rest_BHR.log1p(), self.exponential_sum_BHR.log())

    @cached_property
    def _is_sharp_BHR(self) -> Tensor:
        """Rows in which a single key has the largest logit, and the others together hardly more than nothing."""
        return self.exponential_sum_BHR < 1.1

    @cached_property
    def rest_BHR(self) -> Tensor:
        """Sum of the exponentials of all keys but one of the largest logit, exact also where it is nearly nothing."""
        rest_BHR = self.exponential_sum_BHR - 1
        if not self._has_any(self._is_sharp_BHR):
            return rest_BHR
        return torch.where(self._is_sharp_BHR, -self._others_BHRM.sum(-1), rest_BHR)

    @cached_property
    def rest_square_sum_BHR(self) -> Tensor:
        """Sum of the squared exponentials of all keys but one of the largest logit, as exact."""
        norm_BHR: Tensor = torch.linalg.vector_norm(self.exponentials_BHRM, dim=-1)
        rest_BHR = norm_BHR.square() - 1
        if not self._has_any(self._is_sharp_BHR):
            return rest_BHR
        of_others_BHR: Tensor = torch.linalg.vector_norm(self._others_BHRM, dim=-1)
        return torch.where(self._is_sharp_BHR, of_others_BHR.square(), rest_BHR)

    @property
    def _others_BHRM(self) -> Tensor:
        """The exponentials without those of the largest logit, negative; lost when the block is asked for more."""
        return self._scratch(torch.sign, self.gap_BHRM).mul_(self.exponentials_BHRM)

    @staticmethod
    def _has_any(is_special: Tensor) -> bool:
        """Whether rows may be of a kind that takes more work: to look costs nothing on a CPU, and a wait elsewhere."""
        return is_special.device.type != "cpu" or bool(is_special.any())

    def count_above(self, limit: float) -> Tensor:
        """How many visible logits of each row exceed a number, (B, H, R); anything in absent rows."""
        is_reached_BHR = self.row_max_BHR > limit
        if not self._has_any(is_reached_BHR):
            return torch.zeros_like(self.row_max_BHR)
        # A gap is exact where its logit is at least half the largest; others may be misjudged by the rounding of that.
        above_BHRM = self._scratch(torch.gt, self.gap_BHRM, (limit - self.row_max_BHR)[..., None])
        return self._clear(above_BHRM).sum(-1)

    @cached_property
    def logit_std_BHR(self) -> Tensor:
        """Population standard deviation of the visible logits of each row."""
        count_BHR = self.visible_count_BHR.clamp(min=1)
        centred_BHRM = self._scratch(torch.sub, self.gap_BHRM, (self._gap_sum_BHR / count_BHR)[..., None])
        self._clear(centred_BHRM)
        # `vector_norm` adds one after the other on a CPU, so that long rows lose digits; sums are taken in pairs.
        return (centred_BHRM.square_().sum(-1) / count_BHR).sqrt()

    @cached_property
    def weight_max_BHR(self) -> Tensor:
        """Largest weight of each row."""
        return 1 / self.total_BHR

    def _weight_on(self, key: Tensor) -> Tensor:
        """The weight that each row gives to a key of its own, (B, H, R); zero where the key is hidden from it."""
        index_BHR1, within_BHR1 = self._index_of(key)
        exponential_BHR1 = torch.where(within_BHR1, self.exponentials_BHRM.gather(-1, index_BHR1), 0.0)
        return exponential_BHR1[..., 0] / self.total_BHR

    def _sees(self, key: Tensor) -> Tensor:
        """Whether each row may see a key of its own, (B, H, R)."""
        index_BHR1, within_BHR1 = self._index_of(key)
        if self._visible is None:
            return within_BHR1[..., 0]
        first, visible = self._visible
        visible_BHRM = visible.expand(*self._shape[:3], self._shape[3] - first)
        told_BHR1 = visible_BHRM.gather(-1, (index_BHR1 - first).clamp(min=0))
        return (within_BHR1 & (told_BHR1 | (index_BHR1 < first)))[..., 0]

    @cached_property
    def first_key_weight_BHR(self) -> Tensor:
        """The weight that each row gives to the first key that is seen at all; zero where it does not see it."""
        if isinstance(self.first_key, int):
            return self.exponentials_BHRM[..., self.first_key] / self.total_BHR
        return self._weight_on(self.first_key)

    @cached_property
    def sees_first_key_BHR(self) -> Tensor:
        """Whether each row may see the first key that is seen at all."""
        if isinstance(self.first_key, int):
            if self._visible is None or self.first_key < self._visible[0]:
                return torch.ones_like(self.finite_BHR)
            return self._visible[1][..., self.first_key - self._visible[0]].expand(self._shape[:3])
        return self._sees(self.first_key)

    @cached_property
    def self_weight_BHR(self) -> Tensor:
        """The weight that each query gives to the key of its own number; zero where it does not see it."""
        if self.stop <= self._shape[3]:
            return self._of_self(self.exponentials_BHRM) / self.total_BHR
        return self._weight_on(self.number_R)

    def _of_self(self, tensor_BHRM: Tensor) -> Tensor:
        """The entry of each row at its own number; anything where the block does not have that key."""
        if self.stop <= self._shape[3]:
            return tensor_BHRM[..., self.start : self.stop].diagonal(dim1=-2, dim2=-1)
        return tensor_BHRM.gather(-1, self._index_of(self.number_R)[0])[..., 0]

    @cached_property
    def sees_self_BHR(self) -> Tensor:
        """Whether each query may see the key of its own number."""
        return self._sees(self.number_R)

    @cached_property
    def self_log_odds_BHR(self) -> Tensor:
        """Log of the weight on the key of the row's own number over the weight of all other keys.

        Anything where the row does not see it, or sees nothing else. It is the logit minus the ``logsumexp`` of the
        others, which holds all that weights are too small for.
        """
        own_gap_BHR = self._of_self(self.gap_BHRM)
        others_BHR = torch.where(
            own_gap_BHR < 0, self.exponential_sum_BHR - self._of_self(self.exponentials_BHRM), self.rest_BHR
        )
        log_odds_BHR = own_gap_BHR - others_BHR.log()
        is_cut_off_BHR = self.spread_out_BHR & (self.rest_BHR < _EXACT_REST)
        if not self._has_any(is_cut_off_BHR):
            return log_odds_BHR
        return torch.where(is_cut_off_BHR, own_gap_BHR - self._log_sum_of_others_BHR, log_odds_BHR)

    @property
    def _log_sum_of_others_BHR(self) -> Tensor:
        """The ``logsumexp`` of the gaps without the row's own key, relative to the largest of these."""
        gap_BHRM = self._workspace.buffer(2, self._shape).copy_(self.gap_BHRM)
        self._put_below(gap_BHRM)
        self._overwrite(gap_BHRM, self.number_R, _HIDDEN)
        largest_BHR = gap_BHRM.amax(-1)
        sum_BHR = gap_BHRM.sub_(largest_BHR[..., None]).clamp_(min=_SMALLEST_GAP).exp_().sum(-1)
        return largest_BHR + sum_BHR.log()

    @cached_property
    def number_R(self) -> Tensor:
        """The number of each row."""
        return torch.arange(self.start, self.stop, device=self._logits_BHRM.device)

    @cached_property
    def looks_ahead_BH(self) -> Tensor:
        """Whether a query of the block that is a token sees a key that comes after it."""
        batch, heads, _, keys = self._shape
        device = self._logits_BHRM.device
        if self._visible is None:
            return torch.full((batch, heads), keys > self.start + 1, device=device)
        first, visible = self._visible
        after_RM = torch.arange(first, keys, device=device) > self.number_R[:, None]
        ahead_BHR = (visible & after_RM).any(-1) | (first > self.number_R + 1)
        return (ahead_BHR & self.queries_BHR).any(-1)

    @cached_property
    def share_BHR(self) -> Tensor:
        """What the exponentials of a row are multiplied by to be its weights; zero in absent rows."""
        return torch.where(self.present_BHR, 1 / self.total_BHR, 0.0)

    @cached_property
    def uniform_share_BHR(self) -> Tensor:
        """The weight that uniform attention gives to each visible key, ``1 / m_i``; zero in absent rows."""
        return torch.where(self.present_BHR, 1 / self.visible_count_BHR, 0.0)

    @cached_property
    def mass_BHR(self) -> Tensor:
        """Sum of the weights of each row: 1, less where there is a learned sink, and zero in absent rows."""
        if self._sink_logits_H1 is None and not self._are_weights:
            return self.present_BHR.float()
        return torch.where(self.present_BHR, self.exponential_sum_BHR / self.total_BHR, 0.0)

    @cached_property
    def sink_share_BHR(self) -> Tensor:
        """What a learned sink logit takes of the softmax of each row: zero where there is none.

        It is not one minus the rest, so that it is exact where it is tiny, and finite however far the logit is above.
        """
        if self._sink_logits_H1 is None:
            return torch.zeros_like(self.row_max_BHR)
        return torch.sigmoid(self._sink_logits_H1 - self.row_max_BHR - self.exponential_sum_BHR.log())

    @cached_property
    def clean_exponentials_BHRM(self) -> Tensor:
        """The exponentials with numbers in absent rows too, because zero times NaN is NaN."""
        # To look whether there is any costs nothing on a CPU, and a wait elsewhere.
        if self.exponentials_BHRM.device.type == "cpu" and bool(self.finite_BHR.all()):
            return self.exponentials_BHRM
        return self.exponentials_BHRM.nan_to_num_()

    @cached_property
    def query_count_BHM(self) -> Tensor:
        """How many present rows of the block see each key."""
        return torch.einsum("bhr,bhrm->bhm", self.present_BHR.float(), self.visible_BHRM)

    @cached_property
    def visible_BHRM(self) -> Tensor:
        """1 where a query may see a key and 0 elsewhere, whatever key is removed; broadcasts."""
        keys = self._shape[3]
        if self._visible is None or self._kept is None:
            visible_BHRM = self._logits_BHRM.new_ones(1, 1, 1, keys)
        else:
            first, _ = self._visible
            kept = self._kept.expand(*self._kept.shape[:-1], keys - first)
            visible_BHRM = torch.cat([kept.new_ones(*kept.shape[:-1], first), kept], dim=-1) if first else kept
        return visible_BHRM

    @property
    def deviation_at_equal_mass_BHRM(self) -> Tensor:
        """Weights minus uniform ones of the same sum, zero in absent rows; lost when the block is asked for more.

        Beside a learned sink rows sum to less than one. Without it both are the same division where a row is uniform,
        so that nothing but zero is left.
        """
        even_BHR = self.uniform_share_BHR * self.mass_BHR
        deviation_BHRM = self._scratch(torch.mul, self.clean_exponentials_BHRM, self.share_BHR[..., None])
        return self._clear(deviation_BHRM.sub_(even_BHR[..., None]))

    @cached_property
    def is_other_key_BHM(self) -> Tensor:
        """1 for every key but the first that is seen at all, which has 0; broadcasts."""
        number_M = torch.arange(self.keys, device=self._logits_BHRM.device)
        is_other_BHM: Tensor = torch.ne(number_M[None, None], self.first_key)
        return is_other_BHM.float()

    def deviation_without_first_key(self, out_BHRM: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same without the first key that is seen at all, of rows that are renormalised.

        Args:
            out_BHRM: where to write it; without, it is lost when the block is asked for more.

        Returns:
            It, and the uniform weight of the keys that are left, (B, H, R): zero in rows without such a key, and where
            it is given less than single precision holds beside the first one.
        """
        if out_BHRM is None:
            out_BHRM = self._workspace.buffer(2, self._shape)
        # A sum of the others: to subtract the first key from the sum of all would leave nothing beside a sink.
        total_BHR = (self.clean_exponentials_BHRM @ self.is_other_key_BHM[..., None])[..., 0]
        count_BHR = self.visible_count_BHR - self.sees_first_key_BHR.float()
        is_left_BHR = self.present_BHR & (count_BHR >= 1) & (total_BHR > _SMALLEST_REST)
        uniform_BHR = torch.where(is_left_BHR, 1 / count_BHR, 0.0)
        share_BHR = torch.where(is_left_BHR, 1 / total_BHR, 0.0)
        torch.mul(self.clean_exponentials_BHRM, share_BHR[..., None], out=out_BHRM)
        self._overwrite(self._clear(out_BHRM.sub_(uniform_BHR[..., None])), self.first_key, 0.0)
        return out_BHRM, uniform_BHR

    def applied_to(self, value_BKME: Tensor) -> Tensor:
        """What the rows make of finite values, (B, H, R, E); zero in absent rows.

        Args:
            value_BKME: a value for each key, of all heads or of groups of them.
        """
        batch, heads, _, keys = self._shape
        weighted = torch.bmm(
            self.clean_exponentials_BHRM.view(batch * value_BKME.shape[1], -1, keys),
            value_BKME.flatten(0, 1)[:, :keys],
        )
        return weighted.view(batch, heads, -1, value_BKME.shape[-1]) * self.share_BHR[..., None]

    @cached_property
    def square_sum_BHR(self) -> Tensor:
        """Sum of the squared weights of each row."""
        norm_BHR: Tensor = torch.linalg.vector_norm(self.exponentials_BHRM, dim=-1)
        return (norm_BHR / self.total_BHR).square()

    @property
    def weights_BHRM(self) -> Tensor:
        """The attention weights themselves, zero in absent rows; lost when the block is asked for more."""
        return self._scratch(torch.mul, self.clean_exponentials_BHRM, self.share_BHR[..., None])

    def _scratch(self, function: object, *arguments: Tensor) -> Tensor:
        """Compute something of the block's size in the third buffer, where it lasts until the next such call."""
        buffer = self._workspace.buffer(2, self._shape)
        return function(*arguments, out=buffer)  # type: ignore[operator, no-any-return]
