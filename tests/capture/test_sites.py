"""Which module a call is said to belong to, and which sites a pattern chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from lightning_attn import AttentionObserver, AttentionWarning, record
from lightning_attn.capture.wrappers import canonical_names

WIDTH = 4
TOKENS = torch.zeros(2, 3, WIDTH)


class Attention(nn.Module):
    """A site: it has parameters, and calls the function."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.query(tokens), tokens, tokens)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


class Wrapper(nn.Module):
    """A module of one's own that holds another under the name of a wrapper's."""

    def __init__(self, name: str, wrapped: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, wrapped)

    def forward(self, tokens: Tensor) -> Tensor:
        return getattr(self, self.name)(tokens)


WRAPPERS = [AveragedModel, nn.DataParallel, checkpoint_wrapper]


def sites(model: nn.Module, run: Callable[[], object] | None = None, patterns: object = None) -> tuple[str, ...]:
    with record(model, patterns) as recording:
        (run or (lambda: model(TOKENS)))()
    return recording.sites


# Names


def test_a_site_has_the_name_that_named_modules_gives_it() -> None:
    model = Model()
    expected = tuple(name for name, module in model.named_modules() if isinstance(module, Attention))
    assert sites(model) == expected == ("blocks.0.attention", "blocks.1.attention")


def test_a_model_that_is_a_site_itself() -> None:
    assert sites(Attention()) == ("(root)",)


def test_attention_computed_by_the_model_itself_beside_that_of_its_sites() -> None:
    class Pooled(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            tokens = super().forward(tokens)
            return functional.scaled_dot_product_attention(tokens[:, :1], tokens, tokens)

    assert sites(Pooled()) == ("blocks.0.attention", "blocks.1.attention", "(root)")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_around_the_model_leave_no_trace_in_names(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    assert sites(wrapper(Model())) == ("blocks.0.attention", "blocks.1.attention")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_around_a_part_leave_no_trace_in_names(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    model.blocks[0] = wrapper(model.blocks[0])
    model.blocks[1].attention = wrapper(model.blocks[1].attention)
    assert sites(model) == ("blocks.0.attention", "blocks.1.attention")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_that_is_a_site_itself(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    assert sites(wrapper(Attention())) == ("(root)",)


def test_wrappers_in_wrappers() -> None:
    model: nn.Module = Model()
    for wrapper in WRAPPERS:
        model = wrapper(model)
    assert sites(model) == ("blocks.0.attention", "blocks.1.attention")


def test_the_inner_model_is_found_when_its_wrapper_runs() -> None:
    """Lightning runs `strategy.model`, which may be the wrapped one."""
    inner = Model()
    wrapped = nn.DataParallel(inner)
    assert sites(inner, run=lambda: wrapped(TOKENS)) == ("blocks.0.attention", "blocks.1.attention")


@pytest.mark.parametrize("name", ["module", "_orig_mod", "model", "base_model", "module_list", "my_module"])
def test_a_part_that_is_called_as_a_wrappers_keeps_its_name(name: str) -> None:
    assert sites(Wrapper(name, Model())) == (f"{name}.blocks.0.attention", f"{name}.blocks.1.attention")


def test_names_are_those_of_named_modules_also_of_what_has_several() -> None:
    model = Model()
    model.blocks.append(model.blocks[0])
    model.first = model.blocks[0].attention
    assert canonical_names(model) == {module: name or "(root)" for name, module in model.named_modules()}


def test_listing_names_asks_nothing_of_the_model() -> None:
    """Some models change when their modules or parameters are listed."""

    class Asked(Block):
        def named_modules(self, *args: object, **kwargs: object) -> Iterator[object]:
            pytest.fail("a capture must not call methods of a model")

        named_parameters = named_buffers = parameters = buffers = modules = children = named_modules

    model = nn.ModuleDict({"asked": Asked()})
    assert sites(model, run=lambda: model["asked"](TOKENS)) == ("asked.attention",)
    observer = AttentionObserver(model)
    with observer:
        model["asked"](TOKENS)
    assert observer.snapshot().sites == ("asked.attention",)


# Which module it is


def test_a_module_without_parameters_stands_for_the_one_that_called_it() -> None:
    """torchtitan, timm and others put the call of the function into a small module of its own."""

    class Kernel(nn.Module):
        def forward(self, *tokens: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(*tokens)

    class Outer(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = Kernel()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.kernel(self.query(tokens), tokens, tokens)

    model = Model()
    model.blocks[1].attention = Outer()
    assert sites(model) == ("blocks.0.attention", "blocks.1.attention")


def test_in_a_model_without_any_parameter_the_innermost_module_is_the_site() -> None:
    class Bare(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(tokens, tokens, tokens)

    assert sites(nn.Sequential(nn.Identity(), Bare())) == ("1",)


def test_a_shared_module_is_one_site_that_makes_two_calls() -> None:
    shared = Attention()
    model = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared)
    with record(model) as recording:
        model(TOKENS)
    assert [call.site for call in recording.calls] == ["0", "0"]
    assert len(recording["0"]) == 2


def test_modules_that_share_a_parameter_are_two_sites() -> None:
    model = Model()
    model.blocks[1].attention.query = model.blocks[0].attention.query
    assert sites(model) == ("blocks.0.attention", "blocks.1.attention")


def test_forward_called_by_name() -> None:
    model = Model()
    assert sites(model, run=lambda: model.forward(TOKENS)) == ("blocks.0.attention", "blocks.1.attention")

    class ByName(Block):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.attention.forward(tokens)

    model.blocks[0] = ByName()
    assert sites(model) == ("blocks.0.attention", "blocks.1.attention")


def test_methods_other_than_forward() -> None:
    class Generating(Model):
        def generate(self, tokens: Tensor) -> Tensor:
            return self.blocks[1].attention(tokens)

    model = Generating()
    assert sites(model, run=lambda: model.generate(TOKENS)) == ("blocks.1.attention",)


def test_a_helper_function_and_a_closure_belong_to_the_module_that_calls_them() -> None:
    def attend(tokens: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(tokens, tokens, tokens)

    class Helped(Attention):
        def forward(self, tokens: Tensor) -> Tensor:
            return sum((lambda tokens: attend(tokens))(tokens) for _ in range(2))

    model = Model()
    model.blocks[0].attention = Helped()
    with record(model) as recording:
        model(TOKENS)
    assert [call.site for call in recording.calls] == ["blocks.0.attention"] * 2 + ["blocks.1.attention"]


def test_a_patched_forward() -> None:
    """As accelerate and others do it: a function in the place of the method, which calls the method."""
    model = Model()
    attention = model.blocks[0].attention
    original = attention.forward
    attention.forward = lambda *args: original(*args)
    assert sites(model) == ("blocks.0.attention", "blocks.1.attention")


def test_attention_in_a_forward_hook_belongs_to_the_module_that_runs_it() -> None:
    model = Model()
    model.blocks[0].register_forward_hook(
        lambda module, args, output: functional.scaled_dot_product_attention(output, output, output)
    )
    assert sites(model) == ("blocks.0.attention", "blocks.0", "blocks.1.attention")


def test_a_call_in_the_block_that_another_model_makes_is_not_the_models() -> None:
    """Distillation: the teacher runs beside the student, and is not a part of it."""
    student, teacher = Model(), Model()

    def run() -> None:
        teacher(TOKENS)
        student(TOKENS)

    assert sites(student, run=run) == ("blocks.0.attention", "blocks.1.attention")


def test_a_functional_call_of_the_model_is_the_models() -> None:
    model = Model()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run = lambda: torch.func.functional_call(model, parameters, (TOKENS,))  # noqa: E731
    assert sites(model, run=run) == ("blocks.0.attention", "blocks.1.attention")


# Patterns


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (None, ("blocks.0.attention", "blocks.1.attention")),
        ("*", ("blocks.0.attention", "blocks.1.attention")),
        ("blocks.1.attention", ("blocks.1.attention",)),
        ("blocks.1.*", ("blocks.1.attention",)),
        ("blocks.?.attention", ("blocks.0.attention", "blocks.1.attention")),
        ("*.[0]*.attention", ("blocks.0.attention",)),
        (["blocks.0.*", "blocks.1.*"], ("blocks.0.attention", "blocks.1.attention")),
        (("*.attention",), ("blocks.0.attention", "blocks.1.attention")),
        (["blocks.0.*", "blocks.0.attention"], ("blocks.0.attention",)),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_patterns_choose_sites_by_canonical_name(patterns: object, expected: tuple[str, ...], wrapped: bool) -> None:
    model = AveragedModel(Model()) if wrapped else Model()
    assert sites(model, patterns=patterns) == expected


def test_the_root_can_be_chosen() -> None:
    assert sites(Attention(), patterns="(root)") == ("(root)",)


def test_a_pattern_that_chooses_modules_without_attention_is_said_aloud() -> None:
    model = Model()
    with pytest.warns(AttentionWarning, match=r"No attention was seen.*\['blocks'\] of Model"):
        assert sites(model, patterns="blocks") == ()


@pytest.mark.parametrize("watch", [record, AttentionObserver])
class TestBadPatterns:
    """`record` and the observer refuse them alike, before anything runs."""

    def watch_with(self, watch: Callable[..., object], patterns: object) -> None:
        with watch(Model(), sites=patterns):
            pytest.fail("the block must not be entered")

    def test_an_unknown_name_is_quoted_beside_the_nearest_ones(self, watch: Callable[..., object]) -> None:
        with pytest.raises(ValueError, match=r"'blocks\.0\.atention'.*Did you mean.*'blocks\.0\.attention'"):
            self.watch_with(watch, "blocks.0.atention")

    def test_one_unknown_among_known_ones(self, watch: Callable[..., object]) -> None:
        with pytest.raises(ValueError, match=r"`sites` holds the pattern 'layers\.\*'"):
            self.watch_with(watch, ["blocks.*", "layers.*"])

    def test_a_name_far_from_all_has_no_suggestion(self, watch: Callable[..., object]) -> None:
        with pytest.raises(ValueError, match="'zzz', which matches none") as error:
            self.watch_with(watch, "zzz")
        assert "Did you mean" not in str(error.value)

    @pytest.mark.parametrize("patterns", [[], (), "", [""], [3], ["blocks.*", None], 3, 2.5, True, nn.Linear(1, 1)])
    def test_what_is_no_pattern(self, watch: Callable[..., object], patterns: object) -> None:
        with pytest.raises((ValueError, TypeError), match="`sites` must be a glob pattern or a non-empty list of them"):
            self.watch_with(watch, patterns)
