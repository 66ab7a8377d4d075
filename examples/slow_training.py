"""A small language model whose training is slow in two ways; docs/slow_model.md finds and mends both.

tilewright profile --stop -- python examples/slow_training.py
"""

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WORDS = 1024


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\W", text)


class Text(Dataset[Tensor]):
    """Pieces of a text as numbers of its words; the rare ones are 0."""

    def __init__(self, text: str, length: int) -> None:
        self.text, self.length = text, length
        frequent = Counter(words(text)).most_common(WORDS - 1)
        self.number = {word: number for number, (word, _) in enumerate(frequent, 1)}

    def __len__(self) -> int:
        return len(words(self.text)) - self.length - 1

    def __getitem__(self, start: int) -> Tensor:
        piece = words(self.text)[start : start + self.length + 1]
        return torch.tensor([self.number.get(word, 0) for word in piece])


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        seen = self.embedding(ids).cumsum(1)
        return self.head(self.blocks(seen))


def train() -> None:
    torch.manual_seed(0)
    data = Text(Path(torch.__file__).read_text(), length=256)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, ids in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())
        if step == 100:
            break


if __name__ == "__main__":
    train()
