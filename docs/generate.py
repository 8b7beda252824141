"""Writes what is told of statistics and rules outside the code: `python docs/generate.py`.

Of the registry are made: the page docs/statistics.md, the table in the README, and the stubs of
`lightning_attn.functional` and `lightning_attn.metrics`, from which editors and type checkers know the functions and
metrics that are made when they are asked for. Of the built-in rules is made their part of docs/early-warning.md.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from types import ModuleType

from lightning_attn import functional, metrics
from lightning_attn.functional.statistic_function import function_of
from lightning_attn.statistics import Statistic, known_statistics
from lightning_attn.statistics.description import (
    LENSES,
    definition,
    function_name,
    metric_name,
    range_and_unit,
    table,
)
from lightning_attn.warning import Rule, built_in_rules

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
EARLY_WARNING = ROOT / "docs" / "early-warning.md"
HEADER = "| name | range | uniform attention | how to read it |\n"

#: Statistics of the package; those that somebody else has registered are not its to describe.
OWN = {
    name: statistic
    for name, statistic in known_statistics().items()
    if statistic.__module__.startswith("lightning_attn.")
}

#: Names of statistics by those of their classes.
NAMES = {statistic.__name__: name for name, statistic in OWN.items()}


def pages() -> dict[Path, str]:
    """What each file must hold."""
    package = ROOT / "lightning_attn"
    return {
        EARLY_WARNING: early_warning_page(EARLY_WARNING.read_text()),
        ROOT / "docs" / "statistics.md": statistics_page(),
        README: readme(README.read_text()),
        package / "functional" / "__init__.pyi": functional_stub(),
        package / "metrics" / "__init__.pyi": metrics_stub(),
    }


def readme(text: str) -> str:
    """The README with the table of the statistics that a monitor computes by default."""
    before, rest = text.split(HEADER)
    _, after = rest.split("\n\n", 1)
    by_default = [statistic for statistic in OWN.values() if statistic.by_default]
    return f"{before}{table(by_default)}\n\n{after}"


def statistics_page() -> str:
    """All statistics by lens."""
    parts = [
        "# Statistics",
        "<!-- Written by `make docs` from what is said in the files of lightning_attn/statistics/. -->",
        INTRODUCTION,
    ]
    for lens, about in LENSES.items():
        of_lens = [statistic for statistic in OWN.values() if statistic.lens == lens]
        if of_lens:
            parts += [f"## {lens}", about, *map(section, of_lens)]
    rows = [f"| `{one.__name__}` | {_in_a_cell(_first_line(one))} |" for one in functional.WRITTEN]
    parts += [
        "## Other functions",
        OTHER_FUNCTIONS,
        "\n".join(["| in `lightning_attn.functional` | |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


OTHER_FUNCTIONS = "What is no number per head, or of no head: their docstrings have shapes, sources and examples."


def early_warning_page(text: str) -> str:
    """The page of early warnings with what the built-in rules say of themselves."""
    before, rest = text.split("<!-- rules -->")
    _, after = rest.split("<!-- end of rules -->")
    sections = "\n\n".join(map(rule_section, built_in_rules()))
    return f"{before}<!-- rules -->\n\n{sections}\n\n<!-- end of rules -->{after}"


def rule_section(rule: Rule) -> str:
    """One rule: what it is, how it is set, what follows and what to try."""
    definition, _, _ = inspect.cleandoc(type(rule).__doc__ or "").partition("\n\nArgs:")
    settings = {name: one.default for name, one in inspect.signature(type(rule)).parameters.items()}
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    facts = [*(f"`{name}`" for name in rule.statistics), ", ".join(dict.fromkeys(rule.severities))]
    return "\n\n".join(
        [
            f"### `{rule.name}`",
            " · ".join([*facts, f"`{type(rule).__name__}({arguments})`"]),
            markdown(definition),
            f"**What follows:** {rule.meaning} **What to try:** {rule.remedy}.",
        ]
    )


def _in_a_cell(line: str) -> str:
    return markdown(line).replace("\\|", "\\Vert ")  # a bar would end the cell


def _first_line(function: Callable[..., object]) -> str:
    return inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]


INTRODUCTION = """\
Every statistic has a name, by which a monitor is asked for it (`AttentionMonitor(statistics=["entropy"])`), a function
of tensors in `lightning_attn.functional`, and a metric of torchmetrics in `lightning_attn.metrics`: three ways to one
implementation. Those marked with ● are computed where nobody names any; `statistics="all"` asks for every one. ◆ marks
those that walk many times over whole matrices: a monitor takes them of `spectral_sequences=1` sequence.

`n` is the number of tokens, `m_i` that of the keys that query `i` sees, `H_n` the n-th harmonic number, `σ` a singular
value. Unless it is said otherwise, means are over rows of all sequences, over the keys that a row may see, of weights
before dropout. Rows that see a single key have no choice, and are left out of the means of entropies, `kl_to_uniform`,
`max_weight`, `softmax_sensitivity`, `logit_std`, `selectivity`, `critical_scaling`, `transport_cost` and `free_energy`.
*Uniform* is the value of uniform attention: under any mask where a single one is given, and otherwise without a mask
and under the masks that are named; *n = 64* that of uniform causal attention over 64 tokens. A value that nothing
defines is absent: it has no weight in any mean, and is NaN as the result of a function or metric."""


def section(statistic: type[Statistic]) -> str:
    """One statistic."""
    marks = ("●" if statistic.by_default else "") + ("◆" if statistic.is_spectral else "")
    facts = [f"range {range_and_unit(statistic)}", f"uniform: {statistic.uniform}"]
    if statistic.example is not None and statistic.per == "head":
        facts.append(f"n = 64: {statistic.example:.4g}")
    needs = {"needs_values": "needs values", "needs_logits": "needs logits", "needs_leaving": "needs states that leave"}
    facts += [text for name, text in needs.items() if getattr(statistic, name, False)]
    facts += [f"`{name}={getattr(statistic, name)!r}`" for name in statistic.parameters]
    lines = [
        f"### `{statistic.name}` {marks}".rstrip(),
        " · ".join(facts),
        f"**{statistic.reading}**",
        markdown(definition(statistic)),
    ]
    if statistic.source:
        lines.append(f"Source: {statistic.source}. ")
    lines[-1] = lines[-1].rstrip() + f"  \n`functional.{function_name(statistic)}`, `metrics.{metric_name(statistic)}`"
    return "\n\n".join(lines)


def markdown(docstring: str) -> str:
    """A docstring with its formulas as Markdown has them, and statistics by their names."""
    text = re.sub(
        r"\.\. math::\s*(.*?)(?=\n\n|\Z)", lambda found: f"$$\n{_on_one_line(found[1])}\n$$", docstring, flags=re.S
    )
    text = re.sub(r":math:`(.*?)`", lambda found: f"${_on_one_line(found[1])}$", text, flags=re.S)
    text = re.sub(r"(?<!`)`(\w+)`(?!`)", lambda found: f"`{NAMES.get(found[1], found[1])}`", text)
    return text.replace("``", "`")


def _on_one_line(formula: str) -> str:
    return " ".join(formula.split())


def functional_stub() -> str:
    """The types of the functions."""
    lines = [
        '"""Attention\'s statistics as functions of tensors. Written by `make docs`."""',
        "from torch import Tensor",
        "from lightning_attn.capture.call import AttentionCall",
        "from lightning_attn.functional.statistic_function import OverHeads",
        *written(functional),
    ]
    for statistic in OWN.values():
        signature = (
            str(inspect.signature(function_of(statistic)))
            .replace("'", "")
            .replace("OverHeads = none", 'OverHeads = "none"')
        )
        lines.append(f"def {function_name(statistic)}{signature}:\n{summary(statistic)}")
    return formatted("\n".join(lines))


def metrics_stub() -> str:
    """The types of the metrics."""
    lines = [
        '"""Attention\'s statistics as metrics of torchmetrics. Written by `make docs`."""',
        "from typing import Any",
        "from lightning_attn.functional.statistic_function import OverHeads",
        "from lightning_attn.metrics.statistic_metric import StateStatisticMetric, StatisticMetric",
        *written(metrics),
    ]
    for statistic in OWN.values():
        base = "StateStatisticMetric" if statistic.per == "site" else "StatisticMetric"
        lines.append(f"class {metric_name(statistic)}({base}):\n{summary(statistic)}")
        if statistic.parameters:
            own = "".join(f", {name}: {type(value).__name__} = {value!r}" for name, value in values(statistic).items())
            heads = "" if statistic.per == "site" else ', num_heads: int, over_heads: OverHeads = "none"'
            lines.append(f"    def __init__(self{heads}, *{own}, **kwargs: Any) -> None: ...")
    return formatted("\n".join(lines))


def written(module: ModuleType) -> list[str]:
    """The imports of what is written by hand, by where it stands."""
    return [f"from {one.__module__} import {one.__name__} as {one.__name__}" for one in module.WRITTEN]


def values(statistic: type[Statistic]) -> dict[str, object]:
    """The parameters of a statistic."""
    return {name: getattr(statistic, name) for name in statistic.parameters}


def summary(statistic: type[Statistic]) -> str:
    """The first line of what a statistic tells about itself, as a docstring."""
    first = inspect.cleandoc(statistic.__doc__ or "").split("\n\n")[0]
    return indent(f'r"""{first}"""', "    ")


def formatted(code: str) -> str:
    """The code as the formatter of this project writes it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "stub.pyi", "-"]
    ordered = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "I",
        "--fix",
        "--quiet",
        "--stdin-filename",
        "stub.pyi",
        "-",
    ]
    return _run(command, _run(ordered, code))


def _run(command: list[str], text: str) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
