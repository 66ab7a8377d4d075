"""The models of `benchmarks/models.py`: random weights, inputs of one shape, and a loss.

Sizes are those of a GPU, or tiny ones that a CPU can take. Transformers, timm and torchvision are imported by the
models that come from them; `Missing` says which package is not here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.decoder import Decoder, DecoderConfig
from benchmarks.unet import UNet


class Missing(Exception):
    """A package that the model comes from is not installed."""


@dataclass(frozen=True)
class Size:
    """GPU sizes or tiny ones: `size(8, 2)` is 8 or 2."""

    tiny: bool

    def __call__(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Workload:
    """A model on the CPU in fp32, and the keyword arguments of its call: integers, and floats in fp32.

    The call returns an object whose `loss` is a scalar, or, for decoding, the logits.
    """

    model: nn.Module
    inputs: Mapping[str, Tensor]
    shape: str
    """The inputs' sizes, as in `B8 S1024`."""


Build = Callable[[Size], Workload]


def installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} is not installed") from error


def token_ids(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def causal(model: nn.Module, vocabulary: int, batch: int, length: int) -> Workload:
    ids = token_ids(vocabulary, batch, length)
    return Workload(model, {"input_ids": ids, "labels": ids}, f"B{batch} S{length}")


def gpt2(n: Size) -> Workload:
    """Learned positions, tied head over 50257 words."""
    hf = installed("transformers")
    config = hf.GPT2Config(n_layer=n(6, 2), n_embd=n(768, 64), n_head=n(12, 4), use_cache=False)
    return causal(hf.GPT2LMHeadModel(config), config.vocab_size, n(8, 2), n(1024, 64))


def llama(n: Size) -> Workload:
    """Rotary embedding, grouped heads, RMS norm, SwiGLU."""
    hf = installed("transformers")
    config = hf.LlamaConfig(
        hidden_size=n(2048, 64), intermediate_size=n(5632, 176), num_hidden_layers=n(4, 2), vocab_size=n(32000, 2000),
        num_attention_heads=n(32, 4), num_key_value_heads=n(8, 2), use_cache=False,
    )  # fmt: skip
    return causal(hf.LlamaForCausalLM(config), config.vocab_size, n(8, 2), n(1024, 64))


def mistral(n: Size) -> Workload:
    """A sliding window of a quarter of the sequence."""
    hf = installed("transformers")
    config = hf.MistralConfig(
        hidden_size=n(1024, 64), intermediate_size=n(3584, 224), num_hidden_layers=n(4, 2), vocab_size=n(32000, 2000),
        num_attention_heads=n(16, 4), num_key_value_heads=n(4, 2), sliding_window=n(512, 16), use_cache=False,
    )  # fmt: skip
    return causal(hf.MistralForCausalLM(config), config.vocab_size, n(4, 2), n(2048, 64))


def qwen(n: Size) -> Workload:
    """Norms of queries and keys, a head of 151936 words."""
    hf = installed("transformers")
    config = hf.Qwen3Config(
        hidden_size=n(1024, 64), intermediate_size=n(3072, 192), num_hidden_layers=n(4, 2), head_dim=n(128, 16),
        num_attention_heads=n(16, 4), num_key_value_heads=n(8, 2), vocab_size=n(151936, 2000), use_cache=False,
    )  # fmt: skip
    return causal(hf.Qwen3ForCausalLM(config), config.vocab_size, n(4, 2), n(512, 64))


def mixtral(n: Size) -> Workload:
    """Eight experts, two for each token."""
    hf = installed("transformers")
    config = hf.MixtralConfig(
        hidden_size=n(512, 64), intermediate_size=n(1792, 112), num_hidden_layers=n(2, 1), vocab_size=n(32000, 2000),
        num_attention_heads=n(8, 4), num_key_value_heads=n(4, 2), use_cache=False,
    )  # fmt: skip
    return causal(hf.MixtralForCausalLM(config), config.vocab_size, n(4, 2), n(512, 32))


def masked_encoder(model: nn.Module, vocabulary: int, n: Size) -> Workload:
    """Masked language modelling of sequences whose last tokens are padding."""
    batch, length = n(8, 2), n(512, 64)
    ids = token_ids(vocabulary, batch, length)
    mask = torch.ones_like(ids)
    mask[:, -7:] = 0
    return Workload(model, {"input_ids": ids, "attention_mask": mask, "labels": ids}, f"B{batch} S{length}")


def bert(n: Size) -> Workload:
    """Post-norm encoder, padded, 30522 words."""
    hf = installed("transformers")
    config = hf.BertConfig(
        num_hidden_layers=n(6, 2), hidden_size=n(768, 64), num_attention_heads=n(12, 4), intermediate_size=n(3072, 128)
    )
    return masked_encoder(hf.BertForMaskedLM(config), config.vocab_size, n)


def distilbert(n: Size) -> Workload:
    """BERT without token types, half as deep."""
    hf = installed("transformers")
    config = hf.DistilBertConfig(n_layers=n(6, 2), dim=n(768, 64), n_heads=n(12, 4), hidden_dim=n(3072, 128))
    return masked_encoder(hf.DistilBertForMaskedLM(config), config.vocab_size, n)


def deberta(n: Size) -> Workload:
    """Attention by relative positions, disentangled from contents."""
    hf = installed("transformers")
    config = hf.DebertaV2Config(
        num_hidden_layers=n(4, 2), hidden_size=n(768, 64), num_attention_heads=n(12, 4), vocab_size=n(128100, 2000),
        intermediate_size=n(3072, 128), relative_attention=True, position_buckets=n(256, 16),
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        max_position_embeddings=n(512, 64),
    )  # fmt: skip
    return masked_encoder(hf.DebertaV2ForMaskedLM(config), config.vocab_size, n)


def t5(n: Size) -> Workload:
    """Encoder and decoder with a bias of relative positions, RMS norm."""
    hf = installed("transformers")
    config = hf.T5Config(
        d_model=n(512, 64), d_kv=n(64, 16), d_ff=n(2048, 128), num_layers=n(4, 2), num_heads=n(8, 4), use_cache=False,
        decoder_start_token_id=0, vocab_size=n(32128, 2000),
    )  # fmt: skip
    batch, length, target = n(8, 2), n(512, 64), n(128, 16)
    ids = token_ids(config.vocab_size, batch, length)
    inputs = {"input_ids": ids, "labels": ids[:, :target].contiguous()}
    return Workload(hf.T5ForConditionalGeneration(config), inputs, f"B{batch} S{length}+{target}")


def bart(n: Size) -> Workload:
    """Encoder and decoder with learned positions, 50265 words."""
    hf = installed("transformers")
    config = hf.BartConfig(
        d_model=n(768, 64), encoder_layers=n(3, 1), decoder_layers=n(3, 1), encoder_attention_heads=n(12, 4),
        decoder_attention_heads=n(12, 4), encoder_ffn_dim=n(3072, 128), decoder_ffn_dim=n(3072, 128), use_cache=False,
    )  # fmt: skip
    batch, length, target = n(8, 2), n(512, 64), n(128, 16)
    ids = token_ids(config.vocab_size, batch, length)
    inputs = {"input_ids": ids, "labels": ids[:, :target].contiguous()}
    return Workload(hf.BartForConditionalGeneration(config), inputs, f"B{batch} S{length}+{target}")


def whisper(n: Size) -> Workload:
    """Speech: convolutions over a spectrogram, encoder and decoder."""
    hf = installed("transformers")
    config = hf.WhisperConfig(
        d_model=n(512, 64), encoder_layers=n(4, 1), decoder_layers=n(4, 1), encoder_attention_heads=n(8, 4),
        decoder_attention_heads=n(8, 4), encoder_ffn_dim=n(2048, 128), decoder_ffn_dim=n(2048, 128), use_cache=False,
        max_source_positions=n(1500, 100),
    )  # fmt: skip
    batch, target = n(8, 1), n(128, 16)
    spectrogram = torch.randn(batch, 80, 2 * config.max_source_positions)
    inputs = {"input_features": spectrogram, "labels": token_ids(50000, batch, target)}
    return Workload(hf.WhisperForConditionalGeneration(config), inputs, f"B{batch} S{spectrogram.shape[2]}+{target}")


def vit(n: Size) -> Workload:
    """Patches of 16 × 16 pixels."""
    hf = installed("transformers")
    config = hf.ViTConfig(
        num_hidden_layers=n(6, 2), hidden_size=n(768, 64), num_attention_heads=n(12, 4), image_size=n(224, 64),
        intermediate_size=n(3072, 128), num_labels=1000,
    )  # fmt: skip
    return of_pixels(hf.ViTForImageClassification(config), n)


def convnext(n: Size) -> Workload:
    """Depthwise convolutions of 7 × 7, layer norm over channels."""
    hf = installed("transformers")
    tiny = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1]} if n.tiny else {}
    return of_pixels(hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000, **tiny)), n)


def of_pixels(model: nn.Module, n: Size) -> Workload:
    images, labels, shape = image_batch(n)
    return Workload(model, {"pixel_values": images, "labels": labels}, shape)


def image_batch(n: Size) -> tuple[Tensor, Tensor, str]:
    batch, size = n(64, 2), n(224, 64)
    return torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,)), f"B{batch} {size}x{size}"


class Scored(NamedTuple):
    """A loss and what it is of."""

    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """Cross entropy of an image model's 1000 classes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor, labels: Tensor) -> Scored:
        logits = self.body(images)
        return Scored(functional.cross_entropy(logits, labels), logits)


def classified(package: str, build: Callable[[Any, int], nn.Module]) -> Build:
    """`build` gets the package and the pixels along an edge of an image."""

    def workload(n: Size) -> Workload:
        images, labels, shape = image_batch(n)
        model = build(installed(package), images.shape[-1])
        return Workload(Classifier(model), {"images": images, "labels": labels}, shape)

    return workload


class Denoiser(nn.Module):
    """Mean squared error of the noise that a diffusion U-Net finds."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Scored:
        found = self.body(images, times)
        return Scored(functional.mse_loss(found, noise), found)


def unet(n: Size) -> Workload:
    """Diffusion: residual blocks with group norm and time, attention at low resolution."""
    batch, size = n(16, 1), n(64, 16)
    inputs = {
        "images": torch.randn(batch, 4, size, size),
        "times": torch.randint(0, 1000, (batch,)),
        "noise": torch.randn(batch, 4, size, size),
    }
    return Workload(Denoiser(UNet(4, n(128, 16), levels=3, heads=4)), inputs, f"B{batch} {size}x{size}")


def _decoding(config: Callable[[Size], DecoderConfig], batch: int) -> Build:
    """The next token, where the cache is full but for it."""

    def workload(n: Size) -> Workload:
        made = config(n)
        model = Decoder(made, batch)
        inputs = {"ids": token_ids(made.vocabulary, batch, 1), "position": torch.tensor([made.length - 1])}
        return Workload(model, inputs, f"B{batch} cache {made.length}")

    return workload


def _llama_decoder(n: Size) -> DecoderConfig:
    return DecoderConfig(n(2048, 64), n(5632, 176), n(8, 2), n(32, 4), n(8, 2), n(32000, 2000), n(4096, 128), True)


def _gpt2_decoder(n: Size) -> DecoderConfig:
    return DecoderConfig(n(768, 64), n(3072, 256), n(12, 2), n(12, 4), n(12, 4), n(50257, 2000), n(1024, 128), False)


MODELS: Mapping[str, Build] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "qwen": qwen,
    "mixtral": mixtral,
    "bert": bert,
    "distilbert": distilbert,
    "deberta": deberta,
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
    "vit": vit,
    "convnext": convnext,
    "swin": classified(
        "timm", lambda timm, size: timm.create_model("swin_tiny_patch4_window7_224", num_classes=1000, img_size=size)
    ),
    "efficientnet": classified("timm", lambda timm, size: timm.create_model("efficientnet_b0", num_classes=1000)),
    "resnet50": classified("torchvision.models", lambda models, size: models.resnet50()),
    "mobilenet": classified("torchvision.models", lambda models, size: models.mobilenet_v3_large()),
    "unet": unet,
}
"""Models that run inference and training."""

DECODERS: Mapping[str, Build] = {
    f"{name}-B{batch}": _decoding(config, batch)
    for name, config in (("llama", _llama_decoder), ("gpt2", _gpt2_decoder))
    for batch in (1, 32)
}
"""Models that decode one token with a static cache."""
