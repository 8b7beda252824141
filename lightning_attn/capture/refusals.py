"""Why an attention that was seen is not read, and the way out: what its owner is told, reason by reason."""

from __future__ import annotations

from dataclasses import dataclass

#: What helps where queries, keys or weights cannot be read off tensors, but the model knows them.
WAY_OUT = "`lightning_attn.observe(query, key, value)` in the line before it tells of it; or choose `sites` without it"


class UnreadableError(Exception):
    """A call that is attention but cannot be read; the message says why and names a way out."""


class UnreadablePieceError(UnreadableError):
    """A call that cannot be read and is a piece of an attention, so that without it the others are of no use."""


@dataclass(frozen=True)
class Refusal:
    """Why an attention is not read.

    Args:
        reason: why.
        way_out: what helps.
        is_piece: whether the call is a piece of an attention, of which then no part is taken.
    """

    reason: str
    way_out: str = WAY_OUT
    is_piece: bool = False

    def error(self) -> UnreadableError:
        """What is raised where the call should be read."""
        kind = UnreadablePieceError if self.is_piece else UnreadableError
        return kind(f"{self.reason}. {self.way_out}")


# Axes that are not what they would be taken for. A fused function is refused for the reason of the first two as well.

HEADS_AS_QUERIES = Refusal(
    "its queries lie beside each other within one token, as heads do; give queries an axis of their own beside the "
    "heads, (B, H, N, D)"
)
TOKENS_AS_HEADS = Refusal(
    "the axis that heads should have goes from token to token (windows, chunks, sequences); fold it into the "
    "sequences, (B, H, N, D)"
)
OVER_CHANNELS = Refusal(
    "it attends over channels: its queries and keys are multiplied along the tokens, as in cross-covariance or "
    "transposed attention, so that statistics of tokens do not apply",
    way_out="Choose `sites` without it to hear nothing of it",
)

# Axes whose meaning cannot be told.

SEVERAL_AXES = Refusal(
    "several of its axes may be the one of the queries, and the others those of heads",
    is_piece=True,
)
AS_MANY_HEADS_AS_TOKENS = Refusal("it has as many heads as tokens, and which axis holds the queries cannot be told")
UNKNOWN_HEADS = Refusal(
    "it has more than two axes beside queries and keys (windows, chunks), and which of them are heads cannot be told",
    way_out=f"{WAY_OUT}, with windows or chunks as sequences of their own",
    is_piece=True,
)

# No matrix of all queries and keys.

KEYS_OF_WINDOWS = Refusal(
    "every window or chunk of queries has keys of its own that were put together for it, so that there is no matrix of "
    "all queries and keys",
    is_piece=True,
)
OVERLAPPING_WINDOWS = Refusal(
    "its keys are in windows that overlap, so that there is no matrix of all queries and keys",
    is_piece=True,
)
KEYS_OF_QUERIES = Refusal(
    "each of its queries has keys of its own, and which axes are heads and queries cannot be told",
    is_piece=True,
)
KEYS_OF_EACH_QUERY = Refusal(
    "each query has keys of its own, so that there is no matrix of all queries and keys",
    way_out=f"{WAY_OUT}, with all keys and a mask",
    is_piece=True,
)
REARRANGED = Refusal(
    "its logits or weights are rearranged on their way to the values, as where windows overlap or blocks are put "
    "together, so that which keys they belong to cannot be told",
    is_piece=True,
)

# Attention that no rank computes alone.

KEYS_OF_OTHER_RANKS = Refusal(
    "its tokens are spread over ranks (context parallelism, ring attention), so that no rank holds all keys and "
    "queries of a sequence; tensor parallelism, which divides heads, is watched",
    way_out="Choose `sites` without it to hear nothing of it",
)
SUMS_OF_RANKS = Refusal("its queries, keys or logits are sums over ranks that were not added up yet")
HEADS_OF_OTHER_RANKS = Refusal(
    "its heads or tokens are divided among ranks, and which of them are computed here cannot be told",
    way_out=f"With `first_head` and `all_heads`, {WAY_OUT}",
)
OTHER_HEADS_OF_RANK = Refusal(
    "this rank computes other heads of it in one call than in another before one snapshot",
    way_out="Take a snapshot after each, or choose `sites` without it",
)
HEADS_IN_PIECES = Refusal("ranks divide its projections within a head, so that no rank computes whole heads")

# Trails that are lost.

# What else the module computes may be the rest of the same attention, as with the landmarks of Nyströmformer.
LOST_LOGITS = Refusal(
    "its logits cannot be followed from the product of queries and keys to their softmax",
    is_piece=True,
)
LOST_WEIGHTS = Refusal(
    "its weights cannot be followed from their softmax to their product with the values",
    is_piece=True,
)
OVERWRITTEN_LOGITS = Refusal("its logits are overwritten before its weights multiply the values")
OVERWRITTEN_BY_SOFTMAX = Refusal("its logits are overwritten by their softmax")
NESTED_OTHERWISE = Refusal(
    "its nested tensors are not (B, heads, tokens, width) or (B, tokens, width)",
    way_out="Padded tensors with a mask can be read, on the steps to be watched; or choose `sites` without it",
)
NESTED_DIFFERENTLY = Refusal(
    "its nested tensors differ from sequence to sequence in more than the number of tokens",
    way_out="Padded tensors with a mask can be read, on the steps to be watched; or choose `sites` without it",
)
NESTED = Refusal(
    "it is written out with nested tensors; `scaled_dot_product_attention` can be read with them, and so can padded "
    "tensors with a mask"
)

# Weights that are not the softmax of the logits.

NOT_THEIR_SOFTMAX = Refusal(
    "its weights are exponentials over something else than their sum (with a one added to the sum, it is a sink: "
    "`sink_logits=torch.zeros(heads)`)"
)
EXPONENTIALS_OF_VALUES = Refusal("its exponentials multiply the values before they are divided by their sum")
DRAWN_WEIGHTS = Refusal("its weights are drawn at random (gumbel_softmax)")
SEVERAL_FACTORS = Refusal(
    "an einsum multiplies its queries and keys, or its weights and values, with a third tensor",
    way_out=f"As two products it is seen. Or {WAY_OUT}",
)
SUMS_OVER_MORE_THAN_KEYS = Refusal("its values are summed over more than the keys of its softmax")
UNEVEN_SHIFT = Refusal("what was subtracted from its logits is not one number for each row")
SHIFTS_OF_SEVERAL = Refusal("its logits are put together from several of which a row maximum was subtracted")
NO_LEARNED_SINK = Refusal(
    "its softmax has columns without a value whose logits differ from row to row, so that they are no learned sink",
    way_out=f"With keys of their own for these, and values of zero, {WAY_OUT}",
    is_piece=True,
)


def changed_after_shift(operation: str) -> Refusal:
    """Logits that an operation changes once their row maximum was subtracted."""
    return Refusal(f"after the subtraction of its row maximum {operation!r} changes its logits")


# Functions into which nothing can see, by what is inside.


def products_inside(script: str) -> Refusal:
    """An attention that a script computes, whole."""
    return Refusal(f"it is computed in {script!r}, which `torch.jit` compiled; as it was before, it is seen")


def softmax_inside(function: str) -> Refusal:
    """Weights that a function may have made of logits."""
    return Refusal(f"its weights come out of {function!r}, into which nothing can see, perhaps as a softmax")


def values_inside(what: str, function: str) -> Refusal:
    """Logits or weights that a function multiplies with values."""
    return Refusal(f"its {what} and values enter {function!r}, into which nothing can see")
