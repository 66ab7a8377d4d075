"""Models written by hand as users write them, for `benchmarks/models.py`: none comes from a package of models.

They run where `--models` names them, or `wider` for all of these and of `wider_zoo`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.model_zoo import Build, Scored, Size, Workload, installed, token_ids

Loss = Callable[[Tensor, Tensor], Tensor]


class _WithLoss(nn.Module):
    def __init__(self, body: nn.Module, loss: Loss = functional.cross_entropy) -> None:
        super().__init__()
        self.body = body
        self.loss = loss

    def forward(self, labels: Tensor, **inputs: Tensor) -> Scored:
        found = self.body(**inputs)
        scores = found.flatten(0, -2) if found.dim() > 2 else found
        return Scored(self.loss(scores, labels.flatten()), found)


class _Language(nn.Module):
    """Blocks between an embedding and a head, which share a weight where positions are learned."""

    def __init__(self, blocks: list[nn.Module], width: int, vocabulary: int, positions: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if positions:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Scored:
        x = self.words(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return Scored(functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1), logits)


def _language(model: nn.Module, vocabulary: int, batch: int, length: int) -> Workload:
    ids, labels = (token_ids(vocabulary, batch, length) for _ in range(2))
    return Workload(model, {"ids": ids, "labels": labels}, f"B{batch} S{length}")


def _in_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_in_heads(part, self.heads) for part in self.qkv(self.first(x)).chunk(3, -1))
        dropped = 0.1 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).contiguous().view(x.shape)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.second(x)))))


def _nanogpt(n: Size) -> Workload:
    """A small GPT: norms without biases, dropout in attention and behind products."""
    width, vocabulary, length = n(768, 64), n(50304, 512), n(1024, 64)
    blocks: list[nn.Module] = [_GptBlock(width, n(12, 4)) for _ in range(n(6, 2))]
    return _language(_Language(blocks, width, vocabulary, length), vocabulary, n(8, 2), length)


class _MlstmBlock(nn.Module):
    """xLSTM's matrix memory in its parallel form: products weighted by exponentials of gates, N² numbers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, 2 * width
        self.norm, self.groups = nn.LayerNorm(width), nn.GroupNorm(heads, inner)
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.q, self.k, self.v = (nn.Linear(inner, inner) for _ in range(3))
        self.enter, self.forget = nn.Linear(inner, heads), nn.Linear(inner, heads)
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        a, gate = self.up(self.norm(x)).chunk(2, -1)
        c = functional.silu(self.convolution(a.transpose(1, 2))[..., :length].transpose(1, 2))
        q, k, v = (_in_heads(part, self.heads) for part in (self.q(c), self.k(c), self.v(a)))
        kept = functional.logsigmoid(self.forget(a).transpose(1, 2).float()).cumsum(-1)
        weights = kept[..., :, None] - kept[..., None, :] + self.enter(a).transpose(1, 2).float()[..., None, :]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = weights.masked_fill(~seen, -math.inf)
        top = weights.amax(-1, keepdim=True)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) * torch.exp(weights - top)
        scores = scores / torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-top))
        y = (scores.to(v.dtype) @ v).transpose(1, 2).flatten(2)
        return x + self.down(self.groups(y.transpose(1, 2)).transpose(1, 2) * functional.silu(gate))


def _xlstm(n: Size) -> Workload:
    width, vocabulary = n(512, 64), n(32000, 512)
    blocks: list[nn.Module] = [_MlstmBlock(width, 4) for _ in range(n(3, 2))]
    return _language(_Language(blocks, width, vocabulary), vocabulary, n(4, 2), n(1024, 64))


def _neighbours(x: Tensor, count: int) -> Tensor:
    """For each point of x [batch, channels, points] its `count` nearest: differences and the point, [b, 2c, p, k]."""
    batch, channels, points = x.shape
    wide = x.float()
    squares = wide.square().sum(1, keepdim=True)
    nearest = (2 * wide.transpose(2, 1) @ wide - squares - squares.transpose(2, 1)).topk(count, dim=-1)[1]
    places = nearest + torch.arange(batch, device=x.device).view(-1, 1, 1) * points
    rows = x.transpose(2, 1).contiguous()
    near = rows.view(-1, channels)[places.view(-1)].view(batch, points, count, channels)
    own = rows.unsqueeze(2).repeat(1, 1, count, 1)
    return torch.cat((near - own, own), 3).permute(0, 3, 1, 2).contiguous()


class _Dgcnn(nn.Module):
    """Convolutions over graphs of nearest neighbours, made anew by each layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((6, 64), (128, 64), (128, 128), (256, 256))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(given, made, 1, bias=False), nn.BatchNorm2d(made), nn.LeakyReLU(0.2))
            for given, made in sizes
        )
        self.last = nn.Sequential(nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Linear(2048, 512, bias=False), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Dropout(), nn.Linear(512, 40)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(_neighbours(x, 20)).amax(-1)
            found.append(x)
        x = self.last(torch.cat(found, 1))
        pooled = functional.adaptive_max_pool1d(x, 1), functional.adaptive_avg_pool1d(x, 1)
        return self.head(torch.cat(pooled, 1).squeeze(2))


def _dgcnn(n: Size) -> Workload:
    batch, points = n(16, 2), n(1024, 64)
    inputs = {"x": torch.randn(batch, 3, points), "labels": torch.randint(0, 40, (batch,))}
    return Workload(_WithLoss(_Dgcnn()), inputs, f"B{batch} P{points}")


class _Perceiver(nn.Module):
    """Few latent vectors look at all pixels by one wide head."""

    def __init__(self, n: Size) -> None:
        super().__init__()
        width, channels = n(512, 64), 261
        self.places: Tensor
        self.latents = nn.Parameter(torch.randn(n(256, 16), width))
        self.register_buffer("places", torch.randn(n(56, 8) ** 2, channels - 3))
        self.of_pixels, self.of_latents = nn.LayerNorm(channels), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(channels, 2 * width), nn.Linear(width, width)
        self.blocks = nn.Sequential(*(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(n(4, 2))
        ))  # fmt: skip
        self.head = nn.Linear(width, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        batch = pixels.shape[0]
        given = torch.cat([pixels.flatten(2).transpose(1, 2), self.places.expand(batch, -1, -1)], -1)
        x = self.latents.expand(batch, -1, -1)
        k, v = self.kv(self.of_pixels(given)).chunk(2, -1)
        q, k, v = (_in_heads(part, 1) for part in (self.q(self.of_latents(x)), k, v))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(self.blocks(x).mean(1))


def _perceiver(n: Size) -> Workload:
    batch, size = n(32, 2), n(56, 8)
    inputs = {"pixels": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 1000, (batch,))}
    return Workload(_WithLoss(_Perceiver(n)), inputs, f"B{batch} {size}x{size}")


class _ArcFace(nn.Module):
    """Angles to the vectors of classes, that of the true class made wider by a margin."""

    def __init__(self, n: Size, margin: float = 0.5) -> None:
        super().__init__()
        self.body = installed("torchvision.models").resnet18(num_classes=512)
        self.weight = nn.Parameter(torch.randn(n(20000, 200), 512))
        self.margin = margin

    def forward(self, pixels: Tensor, labels: Tensor) -> Scored:
        found = functional.linear(functional.normalize(self.body(pixels)), functional.normalize(self.weight))
        cosine = found.float().clamp(-1 + 1e-7, 1 - 1e-7)
        wider = cosine * math.cos(self.margin) - torch.sqrt(1 - cosine * cosine) * math.sin(self.margin)
        beyond = cosine > math.cos(math.pi - self.margin)
        wider = torch.where(beyond, wider, cosine - math.sin(math.pi - self.margin) * self.margin)
        true = functional.one_hot(labels, self.weight.shape[0]).to(cosine.dtype)
        logits = 64.0 * (true * wider + (1 - true) * cosine)
        return Scored(functional.cross_entropy(logits, labels), logits)


def _arcface(n: Size) -> Workload:
    batch, size = n(128, 4), n(112, 32)
    inputs = {"pixels": torch.randn(batch, 3, size, size), "labels": torch.randint(0, n(20000, 200), (batch,))}
    return Workload(_ArcFace(n), inputs, f"B{batch} {size}x{size}")


def _layers(*sizes: int) -> nn.Sequential:
    """Linear layers, each but a last one of one number with a ReLU."""
    steps: list[nn.Module] = []
    for given, made in itertools.pairwise(sizes):
        steps += [nn.Linear(given, made)] + [nn.ReLU()] * (made > 1)
    return nn.Sequential(*steps)


class _Dlrm(nn.Module):
    """A recommender: the products of all pairs of 26 embeddings and what the dense features give."""

    def __init__(self, n: Size, width: int = 64, tables: int = 26) -> None:
        super().__init__()
        self.pairs: Tensor
        self.tables = nn.ModuleList(nn.Embedding(n(100_000, 500), width) for _ in range(tables))
        self.bottom = _layers(13, 512, 256, width)
        self.top = _layers(width + (tables + 1) * tables // 2, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (found @ found.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def _dlrm(n: Size) -> Workload:
    batch = n(8192, 16)
    inputs = {
        "dense": torch.randn(batch, 13), "sparse": torch.randint(0, n(100_000, 500), (batch, 26)),
        "labels": torch.rand(batch),
    }  # fmt: skip
    return Workload(_WithLoss(_Dlrm(n), functional.binary_cross_entropy_with_logits), inputs, f"B{batch}")


class _Translator(nn.Module):
    """`nn.Transformer`, encoder and decoder."""

    def __init__(self, n: Size, vocabulary: int) -> None:
        super().__init__()
        width = n(512, 64)
        self.words = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 8, 3, 3, 4 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        made = nn.Transformer.generate_square_subsequent_mask
        mask = made(target.shape[1], device=target.device, dtype=self.head.weight.dtype)
        found = self.body(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(found)


def _translator(n: Size) -> Workload:
    batch, length, vocabulary = n(16, 2), n(256, 16), n(32000, 512)
    inputs = {name: token_ids(vocabulary, batch, length) for name in ("source", "target", "labels")}
    return Workload(_WithLoss(_Translator(n, vocabulary)), inputs, f"B{batch} S{length}")


WRITTEN: Mapping[str, Build] = {
    "nanogpt": _nanogpt,
    "xlstm": _xlstm,
    "dgcnn": _dgcnn,
    "perceiver": _perceiver,
    "arcface": _arcface,
    "dlrm": _dlrm,
    "translator": _translator,
}
