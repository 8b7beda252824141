"""Train a classifier of Hugging Face's `transformers` with Lightning, watched: which topic a paragraph is about.

``python examples/hugging_face.py`` takes half a minute and downloads nothing: the model is made from a configuration,
and the text is Python's documentation. To fine-tune a model of the hub, one line and the tokenizer are other ones.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pydoc_data.topics import topics

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, random_split
from transformers import AutoModelForSequenceClassification, BertConfig

from lightning_attn import AttentionMonitor

TOPICS = ("compound", "types", "string-methods", "debugger", "typesseq", "typesmapping", "formatstrings", "assignment")
PADDING, UNKNOWN = 0, 1
Paragraph = tuple[list[str], int]


def paragraphs() -> list[Paragraph]:
    """Words of every paragraph of the topics, and the topic's number."""
    return [
        (words, topic)
        for topic, name in enumerate(TOPICS)
        for paragraph in re.split(r"\n\s*\n", topics[name])
        if len(words := re.findall(r"\w+|[^\w\s]", paragraph.lower())) >= 5
    ]


class Tokenizer:
    """Numbers for words; of a model of the hub, `AutoTokenizer` knows them."""

    def __init__(self, known: list[Paragraph], max_length: int) -> None:
        words = sorted({word for paragraph, _ in known for word in paragraph})
        self.number = {word: number for number, word in enumerate(words, start=UNKNOWN + 1)}
        self.vocabulary_size = len(words) + 2
        self.max_length = max_length

    def __call__(self, batch: list[Paragraph]) -> dict[str, Tensor]:
        """A batch with padding behind shorter paragraphs, and the mask that hides it."""
        numbers = [torch.tensor([self.number.get(word, UNKNOWN) for word in words]) for words, _ in batch]
        input_ids = pad_sequence([row[: self.max_length] for row in numbers], batch_first=True, padding_value=PADDING)
        labels = torch.tensor([topic for _, topic in batch])
        return {"input_ids": input_ids, "attention_mask": (input_ids != PADDING).long(), "labels": labels}


class TopicClassifier(pl.LightningModule):
    def __init__(self, config: BertConfig, learning_rate: float) -> None:
        super().__init__()
        # From the hub: .from_pretrained(name, num_labels=8, attn_implementation="sdpa").train(); without the last call
        # dropout stays off. "sdpa" is the default; the monitor sees "eager" as well.
        self.model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: dict[str, Tensor]) -> None:
        predicted = self.model(**batch).logits.argmax(dim=-1)
        self.log("test_accuracy", (predicted == batch["labels"]).float().mean(), batch_size=len(predicted))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main(epochs: int = 5, learning_rate: float = 0.001) -> AttentionMonitor:
    pl.seed_everything(1)
    train_data, test_data = random_split(paragraphs(), [0.8, 0.2])
    tokenizer = Tokenizer(list(train_data), max_length=64)
    config = BertConfig(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.max_length,
        num_labels=len(TOPICS),
    )
    monitor = AttentionMonitor(every_n_steps=20)
    trainer = pl.Trainer(
        callbacks=[monitor], accelerator="cpu", max_epochs=epochs, log_every_n_steps=10, enable_checkpointing=False
    )
    model = TopicClassifier(config, learning_rate)
    trainer.fit(model, DataLoader(train_data, 16, shuffle=True, collate_fn=tokenizer))
    trainer.test(model, DataLoader(test_data, 16, collate_fn=tokenizer))
    return monitor


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    main(**vars(parser.parse_args()))
