"""Finding the attention that a model writes out with a softmax, by following tensors.

Attention is a softmax whose input descends from a product of two activations, and whose result multiplies a third. So
every tensor that descends from such a product is followed, through whatever operations keep its layout (scale, bias,
mask, cast, slice), to a softmax; and the softmax's result through dropout, cast and slice to the product with the
values. No name of a module or of a model is needed, and what only looks like attention stays out: a router, a codebook
and a distributional head compare activations with weights; a contrastive loss never multiplies values.

One file for each part of the way:

- `follower`: every call of a torch function, and which of the others it concerns;
- `constants`: what no data went into, and is no activation;
- `products`: where a way begins, and where it may end;
- `logits`: what is done to them before their softmax, masks above all;
- `assembly`: logits and weights that are put together of several;
- `normalisation`: the ways to write a softmax;
- `roles`: which axis of the logits holds keys, queries, heads;
- `layout`, `rearranged`: what keeps the meaning of axes, and what loses it;
- `values`, `found`: what multiplies values, and telling of it;
- `unseen`, `ragged`, `lost`: functions into which nothing can see, nested tensors, and trails that are lost.

They share one `Walk`: what is known of tensors (`trail`) and of what was begun and not ended (`open_trails`). An
attention that was found is read in `written`; what only numbers can tell is in `by_numbers`.

Tensors are followed by weak references. From its softmax to its product with the values an attention's logits and masks
are held, and no longer.
"""

from lightning_attn.capture.softmax.follower import SoftmaxFollower
from lightning_attn.capture.softmax.normalisation import SOFTMAXES
from lightning_attn.capture.softmax.written import WrittenAttention

__all__ = ["SOFTMAXES", "SoftmaxFollower", "WrittenAttention"]
