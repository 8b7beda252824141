"""Statistics in words: tables of them, and the docstrings of the functions and metrics that are made of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from textwrap import indent

from lightning_attn.statistics.statistic import RowStatistic, Statistic

#: The headings under which statistics are listed, and what each group tells.
LENSES = {
    "Entropy and logits": "How sharp heads are, and how large what enters the softmax.",
    "Sinks": "Weight that is parked rather than used, and what makes it possible.",
    "Consensus": "How fast attention brings tokens together, and on whom they agree.",
    "Rank": "How many directions a head, or the states around it, really use.",
    "Position": "Where heads look, and whether by position or by content.",
    "Transport": "Attention as optimal transport: what it costs, and how far it is from balance.",
    "Critical scaling": "Whether the temperature keeps up with the number of keys.",
    "Coverage": "How much of what a model computed is in all the others.",
    "Others": "Statistics of your own.",
}


def function_name(statistic: type[Statistic]) -> str:
    """The name of a statistic's function in `lightning_attn.functional`.

    >>> from lightning_attn.statistics.registry import known_statistics
    >>> [function_name(known_statistics()[name]) for name in ("entropy", "attention_distance", "token_similarity")]
    ['attention_entropy', 'attention_distance', 'token_similarity']
    """
    is_named_so = statistic.per == "site" or statistic.name.startswith("attention_")
    return statistic.name if is_named_so else f"attention_{statistic.name}"


def metric_name(statistic: type[Statistic]) -> str:
    """The name of a statistic's metric in `lightning_attn.metrics`.

    >>> from lightning_attn.statistics.registry import known_statistics
    >>> [metric_name(known_statistics()[name]) for name in ("entropy", "attention_distance", "token_similarity")]
    ['AttentionEntropy', 'AttentionDistance', 'TokenSimilarity']
    """
    name = statistic.__name__.lstrip("_")
    return name if statistic.per == "site" or name.startswith("Attention") else f"Attention{name}"


def range_and_unit(statistic: type[Statistic]) -> str:
    """The range of a statistic in its unit."""
    return f"{statistic.range}{'' if statistic.unit == '1' else ' ' + statistic.unit}"


def table(statistics: Iterable[type[Statistic]]) -> str:
    """A table of statistics in Markdown: of the README, and of TensorBoard's text."""
    rows = [f"| `{s.name}` | {range_and_unit(s)} | {s.uniform} | {s.reading} |" for s in statistics]
    return "\n".join(["| name | range | uniform attention | how to read it |", "|---|---|---|---|", *rows])


def function_docstring(statistic: type[Statistic]) -> str:
    """What a statistic's function tells about itself."""
    return "\n\n".join(
        [
            definition(statistic),
            _reading(statistic),
            "Args:\n" + indent("\n".join(_arguments(statistic)), "    "),
            f"Returns:\n    {_value(statistic)}",
            "Raises:\n    ValueError: if an argument is missing, or of another shape, type or value than these.",
            *_example(statistic, f"{function_name(statistic)}({_given(statistic)})"),
        ]
    )


def metric_docstring(statistic: type[Statistic]) -> str:
    """What a statistic's metric tells about itself."""
    heads = [] if statistic.per == "site" else ["num_heads: how many heads the attention has, H."]
    chosen = [] if statistic.per == "site" else [_OVER_HEADS]
    name = metric_name(statistic)
    arguments = "" if statistic.per == "site" else "num_heads=1"
    return "\n\n".join(
        [
            definition(statistic),
            _reading(statistic),
            f"`update` and `forward` take what `lightning_attn.functional.{function_name(statistic)}` takes: "
            + ("hidden states." if statistic.per == "site" else "weights and a mask, or queries and keys.")
            + f"\n`compute` gives {_lowered(_value(statistic))}"
            + ("" if statistic.per == "site" else " Of a single head torchmetrics makes a scalar."),
            "Args:\n"
            + indent(
                "\n".join([*heads, *_parameters(statistic), *chosen, "kwargs: see `torchmetrics.Metric`."]), "    "
            ),
            "Raises:\n    ValueError: if an argument is missing, or of another shape, type or value than these.",
            *_example(statistic, f"{name}({arguments})({_given(statistic)})", place="metrics", name=name),
        ]
    )


_OVER_HEADS = "over_heads: ``'none'`` for a value of each head; ``'mean'``, ``'min'`` or ``'max'`` for one of all."


def definition(statistic: type[Statistic]) -> str:
    """What a statistic is: its docstring, and that of a class that several statistics of a lens share."""
    shared = [
        base
        for base in statistic.__mro__[1:]
        if issubclass(base, Statistic) and hasattr(base, "range") and not hasattr(base, "name")
    ]
    return "\n\n".join(inspect.cleandoc(one.__doc__ or statistic.reading) for one in (statistic, *shared))


def _reading(statistic: type[Statistic]) -> str:
    facts = [
        f"Range: {range_and_unit(statistic)}.",
        f"Uniform attention: {statistic.uniform}.",
        f"Reading: {statistic.reading}",
    ]
    return "\n".join(facts + ([f"Source: {statistic.source}."] if statistic.source else []))


def _arguments(statistic: type[Statistic]) -> list[str]:
    if statistic.per == "site":
        given = [
            "entering: (B, N, L), the states of N tokens that enter a module.",
            "leaving: (B, N, E), the states of the same tokens that leave it, where they are needed.",
            "token_mask: (B, N), boolean, false where a token is padding.",
        ]
        return [*given, *_parameters(statistic)]
    given = [
        "weights: (B, H, N, M), or (N, M): attention weights of N queries on M keys; or an `AttentionCall`.",
        "mask: boolean, true where a key is visible; broadcasts to (B, H, N, M).",
        "query, key: (B, H, N, D) and (B, K, M, D), in the place of weights.",
        "value: (B, K, M, E), for statistics that need values.",
        "is_causal: whether query ``i`` sees the keys ``j <= i`` only.",
        "scale, soft_cap, sink_logits: what becomes of the products of queries and keys.",
        "self_attention: whether query ``i`` and key ``i`` are the same token; by default, where there are as many.",
        "validate_args: whether values are looked at, beside shapes and types.",
    ]
    return [*given, *_parameters(statistic), _OVER_HEADS]


def _parameters(statistic: type[Statistic]) -> list[str]:
    return [f"{name}: see above; {getattr(statistic, name)} by default." for name in statistic.parameters]


def _value(statistic: type[Statistic]) -> str:
    absent = "NaN where it is absent, because nothing defines it."
    return f"A scalar; {absent}" if statistic.per == "site" else f"The value of each head, (H,); {absent}"


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


# The example of a statistic of heads is uniform causal attention over 64 tokens, whose values are 64 unit vectors; of
# hidden states, that many unit vectors which have one more in common, and leave as they enter.


def _given(statistic: type[Statistic]) -> str:
    if statistic.per == "site":
        return "tokens, tokens"
    arguments = "query=uniform, key=uniform, is_causal=True"
    needs_values = issubclass(statistic, RowStatistic) and statistic.needs_values
    return f"{arguments}, value=eye(64)[None, None]" if needs_values else arguments


def _example(statistic: type[Statistic], call: str, place: str = "functional", name: str = "") -> list[str]:
    if statistic.example is None:
        return []
    needs_values = issubclass(statistic, RowStatistic) and statistic.needs_values
    of_states = statistic.per == "site"
    imports = "eye" if of_states else "eye, zeros" if needs_values else "zeros"
    given = "tokens = eye(64)[None] + 1" if of_states else "uniform = zeros(1, 1, 64, 8)"
    lines = [
        f">>> from torch import {imports}",
        f">>> from lightning_attn.{place} import {name or function_name(statistic)}",
        f">>> {given}",
        f">>> round({call}.item(), 4)",
        f"{round(statistic.example, 4)}",
    ]
    return ["Example:\n" + indent("\n".join(lines), "    ")]
