"""timm, where it can be imported."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

#: Declarations of torchvision's operators: they last as long as these do.
_DECLARED: list[Any] = []
_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def timm() -> Any:
    """The package timm. Tests that ask for it are skipped where it cannot be imported.

    It imports torchvision, whose builds on PyPI are for CUDA: beside a build of torch for the CPU its operators cannot
    be loaded, and its import fails because it looks for them. timm uses none of them, so it is enough to declare their
    names.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass  # timm says so itself
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for signature in _SIGNATURES:
            library.define(signature)
        _DECLARED.append(library)
    try:
        import timm as package
    except (ImportError, RuntimeError) as error:
        return pytest.skip(f"timm cannot be imported: {error}")
    return package
