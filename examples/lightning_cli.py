"""Train the small language model from a configuration file that names the monitor.

``python examples/lightning_cli.py fit --config examples/config.yaml``; every value can be changed on the command line.
"""

from __future__ import annotations

import lightning.pytorch as pl
from character_lm import CharacterLM, DocumentationText
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader


class DocumentationData(pl.LightningDataModule):
    def __init__(self, length: int = 64, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.text = DocumentationText(length)
        self.characters = len(self.text.characters)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.text, self.batch_size, shuffle=True)


class CharacterCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.length", "model.length")
        parser.link_arguments("data.characters", "model.characters", apply_on="instantiate")


def main(arguments: ArgsType = None) -> CharacterCLI:
    return CharacterCLI(CharacterLM, DocumentationData, seed_everything_default=1, args=arguments)


if __name__ == "__main__":
    main()
