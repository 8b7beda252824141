"""Which axis of some logits holds keys, which queries and which heads, as far as that can be told."""

from __future__ import annotations

from torch import Tensor

from lightning_attn.capture.axes import KEY, LEFT, QUERY, RIGHT, SHARED, Axes
from lightning_attn.capture.composition import Division
from lightning_attn.capture.isolation import written_to
from lightning_attn.capture.refusals import (
    AS_MANY_HEADS_AS_TOKENS,
    HEADS_AS_QUERIES,
    KEYS_OF_EACH_QUERY,
    KEYS_OF_QUERIES,
    KEYS_OF_WINDOWS,
    OVER_CHANNELS,
    OVERLAPPING_WINDOWS,
    SEVERAL_AXES,
    TOKENS_AS_HEADS,
    UNEVEN_SHIFT,
    Refusal,
)
from lightning_attn.capture.softmax.open_trails import place_of
from lightning_attn.capture.softmax.operation import Operation
from lightning_attn.capture.softmax.trail import Logits, Softmax
from lightning_attn.capture.softmax.walk import Walk


def softmax_of(walk: Walk, call: Operation) -> Softmax | None:
    """The softmax that an operation takes of logits along its axis."""
    logits, history = call.logits()
    axis = call.axis()
    return None if history is None or axis is None else softmax_along(walk, logits, history, axis % logits.dim())


def softmax_along(walk: Walk, logits: Tensor, history: Logits, axis: int) -> Softmax | None:
    """The softmax of logits along an axis, with what each axis of them is.

    - The axis of the softmax holds the keys. It has to be one of the two that are compared, and data have to have gone
      into it: what compares itself with keys that are the same for all data is a router, or a codebook. (Where no data
      went into the queries either, as with learned queries that compare themselves with each other, it is attention.)
    - The queries are along another axis, of the other operand: see `_query_axes`.
    - Of the axes that both operands share, heads are those that are parts of the channels; the others are sequences.
    - Where an axis cannot be what it is taken for (`Contraction.doubts`), the softmax is refused.

    Returns:
        The softmax; ``None`` where it is none of an attention.
    """
    if history.place is not None:
        walk.open.end_logits(history.place)
    side = history.axes[axis]
    if side == SHARED or (side in history.without_data and len(history.without_data) == 1):
        return None
    beside_keys = [i for i, meaning in enumerate(history.axes) if meaning not in (SHARED, side)]
    queries, refusal = _query_axes(walk, logits, axis, beside_keys)
    axes = tuple(KEY if i == axis else QUERY if i in queries else SHARED for i in range(logits.dim()))
    heads = _heads(walk, logits, axes)
    if len(beside_keys) == 1:
        if _holds_heads(walk, logits, beside_keys[0]) and not _holds_heads(walk, logits, axis):
            refusal = refusal or HEADS_AS_QUERIES
        refusal = refusal or _doubt(history, side, axes, heads, logits.shape[beside_keys[0]], logits.shape[axis])
    if history.shift is not None and history.shift.shape[axis] != 1:
        refusal = UNEVEN_SHIFT
    if refusal is None or history.refusal is OVER_CHANNELS:
        refusal = history.refusal
    modules = walk.modules()
    walk.open.begin_weights(place_of(modules, logits.shape), axes)
    return Softmax(logits.detach(), axes, history, modules, written_to(logits), heads=heads, refusal=refusal)


def _query_axes(walk: Walk, logits: Tensor, keys: int, beside_keys: list[int]) -> tuple[list[int], Refusal | None]:
    """The axis of the queries, and why it cannot be told, where that is so. Pixels have two.

    It is not always the only one beside the keys. Where keys are the same for several heads, the axis of the heads is
    the queries' alone too, beside the one of the tokens. And where queries are the same for all sequences, as learned
    ones, the axis of the sequences is the keys' alone. So, in this order: the axis that is as long as the keys; the
    only one there is; the only one that is as long as something that the modules were given; all of them, where layers
    tell that they are places, as the rows and columns of an image are, and the sequences are in an axis of their own.

    Args:
        walk: the forward pass.
        logits: the logits.
        keys: the axis of the keys.
        beside_keys: the axes that the keys' operand did not have.
    """
    if not beside_keys:
        return [], KEYS_OF_QUERIES if logits.dim() > 2 else None
    alike = [i for i in beside_keys if logits.shape[i] == logits.shape[keys]]
    if len(alike) > 1:
        return beside_keys[-1:], AS_MANY_HEADS_AS_TOKENS
    if alike or len(beside_keys) == 1:
        return (alike or beside_keys)[:1], None
    given = {size for shape in walk.given() for size in shape[:2]}
    tokens = [i for i in beside_keys if logits.shape[i] in given]
    if len(tokens) == 1:
        return tokens, None
    has_sequences = len(beside_keys) < logits.dim() - 1
    if has_sequences and walk.channels.are_places(logits, [i - logits.dim() for i in beside_keys]):
        return beside_keys, None
    return beside_keys[-1:], SEVERAL_AXES


def _heads(walk: Walk, logits: Tensor, axes: Axes) -> Division | None:
    """Which parts of the shared axes of some logits are heads."""
    shared = [i - logits.dim() for i, axis in enumerate(axes) if axis == SHARED]
    return walk.channels.heads_among([logits], shared)


def _holds_heads(walk: Walk, logits: Tensor, axis: int) -> bool:
    """Whether an axis is known to hold tokens of several heads."""
    return walk.channels.heads_among_rows(logits, axis - logits.dim())


def _doubt(history: Logits, side: str, axes: Axes, heads: Division | None, queries: int, keys: int) -> Refusal | None:
    """Why the axes cannot be what they are taken for.

    What lies within one token is no queries, whatever it may be as keys; an axis that steps over tokens is no heads,
    unless layers tell which are; and keys were put together for each window, if there are windows or they overlap, with
    more keys than queries.
    """
    has_windows = heads is not None and heads.axes_of_sequences > 1
    applies = {
        HEADS_AS_QUERIES: {LEFT, RIGHT} - {side},
        TOKENS_AS_HEADS: {LEFT, RIGHT} if heads is None else set(),
        KEYS_OF_WINDOWS: {side} if has_windows and queries != keys else set(),
        OVERLAPPING_WINDOWS: {side} if queries != keys else set(),
    }
    found = next((doubt for of, doubt in history.doubts.items() if of in applies[doubt]), None)
    return KEYS_OF_EACH_QUERY if found is OVERLAPPING_WINDOWS and queries == 1 else found
