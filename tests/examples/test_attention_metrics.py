"""The example that measures attention over a whole test set."""

from __future__ import annotations

import attention_metrics
import pytest
import torch
from digits_vit import digits

from lightning_attn import record
from lightning_attn.functional import attention_effective_rank, attention_entropy


def test_it_prints_what_the_whole_test_set_has(capsys: pytest.CaptureFixture[str]) -> None:
    model = attention_metrics.train(epochs=1, learning_rate=0.001)
    last = capsys.readouterr().out.splitlines()[-attention_metrics.LAYERS :]
    _, test_set = digits()
    with torch.no_grad(), record(model.eval(), max_sequences=None) as recording:
        model(test_set.tensors[0])
    for layer, (line, call) in enumerate(zip(last, recording.calls, strict=True)):
        number, entropy, *_ = line.split()
        assert int(number) == layer
        assert float(entropy) == pytest.approx(attention_entropy(call, over_heads="min").item(), abs=1e-3)
        torch.testing.assert_close(model.ranks[layer], attention_effective_rank(call), rtol=1e-4, atol=0)
