"""Fine-tuning with `transformers`: the monitor sees both layers, and padding is in nothing that it says."""

from __future__ import annotations

from pathlib import Path

import hugging_face
import pytest
import torch
from transformers import BertConfig

from lightning_attn import AttentionObserver
from lightning_attn.statistics import known_statistics


@pytest.fixture
def tokenizer() -> hugging_face.Tokenizer:
    return hugging_face.Tokenizer([(["a", "dict", "is", "a", "mapping"], 5)], max_length=4)


def test_batches_are_padded_and_masked(tokenizer: hugging_face.Tokenizer) -> None:
    batch = tokenizer([(["a", "mapping"], 5), (["is", "a", "list", "a", "mapping"], 3)])
    assert batch["input_ids"].tolist() == [[2, 5, 0, 0], [4, 2, 1, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [5, 3]


def test_every_topic_has_paragraphs() -> None:
    paragraphs = hugging_face.paragraphs()
    assert {topic for _, topic in paragraphs} == set(range(len(hugging_face.TOPICS)))
    assert len(paragraphs) > 500


def test_it_trains_watched_and_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hugging_face, "paragraphs", lambda paragraphs=hugging_face.paragraphs: paragraphs()[::5])
    monitor = hugging_face.main(epochs=2)
    assert monitor.history.steps == [0, 20]
    snapshot = monitor.history[-1]
    assert snapshot.heads == {f"model.bert.encoder.layer.{layer}.attention.self": 4 for layer in range(2)}
    assert snapshot.summary("hidden_row_share").max == snapshot.summary("non_finite_share").max == 0
    entropy = snapshot.matrix("entropy")
    assert torch.all((entropy > 0) & (entropy <= 1))
    printed = capsys.readouterr().out
    assert "Attention at step 20: 2 sites, 8 heads" in printed
    assert "test_accuracy" in printed


def test_what_padding_holds_changes_nothing(tokenizer: hugging_face.Tokenizer) -> None:
    """The statistics of a padded batch are those of its paragraphs one by one."""
    config = BertConfig(
        vocab_size=6, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_labels=8
    )
    model = hugging_face.TopicClassifier(config, learning_rate=0.001).eval()
    alone = [name for name, statistic in known_statistics().items() if not statistic.compares_sequences]
    observer = AttentionObserver(model, statistics=alone, spectral_sequences=None)
    paragraphs = [(["a", "mapping"], 5), (["is", "a", "list", "a"], 3), (["a", "dict", "is"], 1)]
    with observer:
        model.model(**tokenizer(paragraphs))
    together = observer.snapshot()
    with observer:
        for paragraph in paragraphs:
            model.model(**tokenizer([paragraph]))
    torch.testing.assert_close(together.values, observer.snapshot().values, equal_nan=True, rtol=1e-5, atol=1e-6)
