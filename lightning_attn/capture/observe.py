"""Being told of attention by the model itself, where a kernel computes it that nothing can see into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_attn.capture.call import AttentionCall, Visibility
from lightning_attn.capture.head_share import HeadShare
from lightning_attn.capture.reader import Sampling, Sightings, intercepts
from lightning_attn.capture.refusals import UnreadableError
from lightning_attn.capture.spread import Part, held_by_rank

_WATCHING: list[Sightings] = []


@intercepts
@contextmanager
def told_of(sightings: Sightings) -> Iterator[None]:
    """Listen to `observe`."""
    _WATCHING.append(sightings)
    try:
        yield
    finally:
        _WATCHING.remove(sightings)


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
    first_head: int | None = None,
    all_heads: int | None = None,
) -> None:
    r"""Tell whoever is watching of an attention that is being computed here.

    One line before the call of a kernel that nothing can see into (a custom CUDA or Triton kernel, xformers, flash-attn
    called directly), or before an attention that is refused. Call it in the ``forward`` of the module that the
    attention belongs to. It describes :math:`\mathrm{softmax}(\text{scale} \cdot Q K^\top + \text{mask})\, V`, computes
    nothing, and takes less than a microsecond when nobody is watching. What it tells of is not counted again, and not
    refused, where it is seen after it.

    Args:
        query: (B, H, N, D), after rotary embedding and normalisation.
        key: (B, K, M, D), where K divides H: query head ``h`` reads key head ``h // (H / K)``. Where it reads another
            one, as in x-transformers, repeat the keys and values.
        value: (B, K, M, E), for the statistics that look at values; they are absent without it.
        attn_mask: broadcasts to (B, H, N, M): boolean, true where a key may be seen, or added to the logits.
        is_causal: query ``i`` sees the keys up to number ``i + M - N``: the last query sees all.
        scale: what the products are multiplied with; :math:`1 / \sqrt D` by default.
        soft_cap: ``c`` of ``c * tanh(logit / c)``.
        sink_logits: (H,), one more logit per head that takes weight and gives nothing.
        first_head: where ranks divide the heads of the attention among each other, and nothing else tells how: the
            number of the first one here, counted from 0.
        all_heads: and how many all ranks have together.

    What does not fit together is reported to the one who watches, as a warning; it never stops a forward pass.

    Example:
        >>> import torch
        >>> from lightning_attn import AttentionObserver, observe
        >>> class Layer(torch.nn.Module):
        ...     def forward(self, x):
        ...         observe(x, x, is_causal=True)
        ...         return x  # where a kernel of your own would be called
        >>> observer = AttentionObserver(model := Layer(), statistics="entropy")
        >>> with observer:
        ...     output = model(torch.zeros(1, 2, 5, 8))
        >>> observer.snapshot()["(root)", "entropy"]
        [1.0, 1.0]
    """
    if not _WATCHING or torch.compiler.is_dynamo_compiling():  # the graph would have the telling in it
        return

    operands = [tensor for tensor in (query, key, value) if isinstance(tensor, Tensor)]
    query, key, value, attn_mask, sink_logits = held_by_rank(query, key, value, attn_mask, sink_logits)

    def read(sampling: Sampling) -> AttentionCall:
        _check(query, key, value, attn_mask, sink_logits)
        numbers = _as_numbers(scale=scale, soft_cap=soft_cap)
        query_BHND, key_BKMD = query[: sampling.max_sequences], key[: sampling.max_sequences]
        mask = attn_mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask if mask.shape[0] == 1 else mask[: sampling.max_sequences]
        is_boolean = mask is not None and mask.dtype == torch.bool
        return AttentionCall(
            site=sampling.site,
            query=query_BHND,
            key=key_BKMD,
            value=value[: sampling.max_sequences] if value is not None and sampling.with_values else None,
            scale=1 / math.sqrt(query.shape[-1]) if numbers["scale"] is None else numbers["scale"],
            visibility=Visibility(
                causal_offset=key.shape[2] - query.shape[2] if is_causal else None,
                mask=mask if is_boolean else None,
                bias=None if is_boolean else mask,
            ),
            self_attention=query.shape[2] == key.shape[2],
            soft_cap=numbers["soft_cap"],
            sink_logits=sink_logits,
            share=_share(query.shape[1], first_head, all_heads),
        )

    device = query.device if isinstance(query, Tensor) else torch.device("cpu")  # refused where it is read
    for sightings in _WATCHING:
        sightings.tell(read, device, operands)


def _check(
    query: Tensor, key: Tensor, value: Tensor | None, attn_mask: Tensor | None, sink_logits: Tensor | None
) -> None:
    """Refuse what does not fit together, with a message that names the argument."""
    given = {"query": query, "key": key, "value": value, "sink_logits": sink_logits}
    for name, tensor in given.items():
        if tensor is None and name in ("value", "sink_logits"):
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
            raise UnreadableError(f"`{name}` given to `observe` must be a floating-point tensor, got {kind}")
    if attn_mask is not None and not (
        isinstance(attn_mask, Tensor) and (attn_mask.dtype == torch.bool or attn_mask.is_floating_point())
    ):
        kind = attn_mask.dtype if isinstance(attn_mask, Tensor) else repr(attn_mask)
        raise UnreadableError(
            f"`attn_mask` given to `observe` must be boolean, true where a key may be seen, or added to the logits and "
            f"floating-point, got {kind}"
        )
    shape = tuple(query.shape)
    if query.dim() != 4 or not shape[3]:
        raise UnreadableError(f"`query` given to `observe` must be (B, H, N, D), got {shape}")
    sequences, heads, queries, width = shape
    if key.dim() != 4 or (key.shape[0], key.shape[3]) != (sequences, width) or not key.shape[1] or heads % key.shape[1]:
        raise UnreadableError(
            f"`key` given to `observe` must be (B, K, M, D) with K dividing H, for a query {shape}, "
            f"got {tuple(key.shape)}"
        )
    if value is not None and (value.dim() != 4 or value.shape[:3] != key.shape[:3] or not value.shape[3]):
        raise UnreadableError(
            f"`value` given to `observe` must be (B, K, M, E) like the key {tuple(key.shape)}, got {tuple(value.shape)}"
        )
    target = (sequences, heads, queries, key.shape[2])
    if attn_mask is not None and not _broadcasts(tuple(attn_mask.shape), target):
        raise UnreadableError(
            f"`attn_mask` given to `observe` must broadcast to {target}, got {tuple(attn_mask.shape)}"
        )
    if sink_logits is not None and sink_logits.shape != (heads,):
        raise UnreadableError(
            f"`sink_logits` given to `observe` must have one entry for each of {heads} heads, "
            f"got {tuple(sink_logits.shape)}"
        )


def _share(heads: int, first_head: int | None, all_heads: int | None) -> HeadShare | None:
    """Which of a site's heads these are, where ranks divide them."""
    if first_head is None and all_heads is None:
        return None
    if type(first_head) is not int or type(all_heads) is not int or not 0 <= first_head <= all_heads - heads:
        raise UnreadableError(
            f"`first_head` and `all_heads` given to `observe` must both be integers, with the {heads} heads of this "
            f"rank within all of them, got {first_head!r} and {all_heads!r}"
        )
    return HeadShare.of(Part(first_head, heads, all_heads))


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _as_numbers(**given: float | None) -> dict[str, float | None]:
    """Positive numbers as floats; refuse others."""
    numbers: dict[str, float | None] = {}
    for name, number in given.items():
        try:
            numbers[name] = None if number is None else float(number)
        except (TypeError, ValueError, OverflowError):
            numbers[name] = math.nan
        value = numbers[name]
        if isinstance(number, bool) or (value is not None and not (math.isfinite(value) and value > 0)):
            raise UnreadableError(f"`{name}` given to `observe` must be a positive number or None, got {number!r}")
    return numbers
