"""More models for `benchmarks/models.py`: each spells something as none of the first eighteen does.

They run where `--models` names them, or `wider` for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.model_zoo import (
    Build,
    Scored,
    Size,
    Workload,
    causal,
    classified,
    image_batch,
    installed,
    masked_encoder,
    of_pixels,
    token_ids,
)
from benchmarks.written_zoo import WRITTEN

Sizes = Any
"""Fields of a configuration; a pair is the full and the tiny value."""


def _config(n: Size, name: str, given: Mapping[str, Sizes]) -> Any:
    values = {field: n(*value) if isinstance(value, tuple) else value for field, value in given.items()}
    return getattr(installed("transformers"), name)(**values)


def _language(name: str, config: str, length: int = 1024, **sizes: Sizes) -> Build:
    """A causal language model of Transformers, three layers of width 1024."""
    common = {
        "hidden_size": (1024, 64), "intermediate_size": (2816, 128), "num_hidden_layers": (3, 2),
        "num_attention_heads": (16, 4), "max_position_embeddings": (2048, 128), "use_cache": False,
    }  # fmt: skip

    def build(n: Size) -> Workload:
        made = _config(n, config, common | sizes)
        model = getattr(installed("transformers"), name)(made)
        return causal(model, made.vocab_size, n(4, 2), n(length, 64))

    return build


def _encoder(name: str, config: str, **sizes: Sizes) -> Build:
    """A masked language model of Transformers, four layers of width 768."""
    common = {
        "hidden_size": (768, 64), "intermediate_size": (3072, 128), "num_hidden_layers": (4, 2),
        "num_attention_heads": (12, 4), "max_position_embeddings": (514, 130),
    }  # fmt: skip

    def build(n: Size) -> Workload:
        made = _config(n, config, common | sizes)
        return masked_encoder(getattr(installed("transformers"), name)(made), made.vocab_size, n)

    return build


def _image(name: str, config: str, **sizes: Sizes) -> Build:
    def build(n: Size) -> Workload:
        return of_pixels(getattr(installed("transformers"), name)(_config(n, config, {"num_labels": 1000} | sizes)), n)

    return build


def _mamba2(n: Size) -> Workload:
    """A state-space layer written as sums of broadcast products."""
    sizes = {
        "hidden_size": (768, 32), "num_hidden_layers": (3, 2), "state_size": (64, 8), "num_heads": (24, 8),
        "head_dim": (64, 8), "n_groups": 1, "chunk_size": (128, 16), "vocab_size": (50288, 512), "use_cache": False,
    }  # fmt: skip
    made = _config(n, "Mamba2Config", sizes)
    return causal(installed("transformers").Mamba2ForCausalLM(made), made.vocab_size, n(4, 2), n(512, 64))


def _bloom(n: Size) -> Workload:
    """Attention with a bias of distances (ALiBi), added by the product of queries and keys."""
    sizes = {"hidden_size": (1024, 64), "n_layer": (3, 2), "n_head": (16, 4), "vocab_size": (50880, 512)}
    made = _config(n, "BloomConfig", sizes | {"use_cache": False})
    return causal(installed("transformers").BloomForCausalLM(made), made.vocab_size, n(4, 2), n(1024, 64))


def _segformer(n: Size) -> Workload:
    """Classes of every pixel: upsampling, and cross entropy of images."""
    tiny: dict[str, Sizes] = {
        "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
    }  # fmt: skip
    made = _config(n, "SegformerConfig", {"num_labels": 150} | (tiny if n.tiny else {}))
    batch, size = n(8, 2), n(512, 64)
    inputs = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 150, (batch, size, size))}
    model = installed("transformers").SegformerForSemanticSegmentation(made)
    return Workload(model, inputs, f"B{batch} {size}")


class _Contrastive(nn.Module):
    """CLIP with the loss of its pairs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Scored:
        found = self.body(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)
        return Scored(found.loss, found.logits_per_image)


def _clip(n: Size) -> Workload:
    """An encoder of texts beside one of images."""
    layers = {"num_hidden_layers": n(4, 2)}
    text = layers | {
        "hidden_size": n(512, 64), "num_attention_heads": n(8, 4), "intermediate_size": n(2048, 128),
        "vocab_size": n(49408, 512), "max_position_embeddings": 77,
    }  # fmt: skip
    vision = layers | {
        "hidden_size": n(768, 64), "num_attention_heads": n(12, 4), "intermediate_size": n(3072, 128),
        "image_size": n(224, 64), "patch_size": 16,
    }  # fmt: skip
    hf, (given, _, shape) = installed("transformers"), image_batch(n)
    model = _Contrastive(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)))
    return Workload(model, {"input_ids": token_ids(n(49408, 512) - 2, len(given), 77), "pixel_values": given}, shape)


class _Layers(nn.Module):
    """PyTorch's own encoder layers, pre-norm, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor, labels: Tensor) -> Scored:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x.mean(1))
        return Scored(functional.cross_entropy(logits, labels), logits)


def _layers(n: Size) -> Workload:
    batch, width = n(16, 2), n(768, 64)
    inputs = {"x": torch.randn(batch, n(512, 32), width), "labels": torch.randint(0, 1000, (batch,))}
    return Workload(_Layers(width, n(12, 4)), inputs, f"B{batch}")


class _Speech(nn.Module):
    """Classes of whole recordings."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_values: Tensor, labels: Tensor) -> Scored:
        found = self.body(input_values=input_values, labels=labels)
        return Scored(found.loss, found.logits)


def _wav2vec(n: Size) -> Workload:
    """Convolutions over raw sound, positions by a convolution of 128 taps, an encoder."""
    sizes = {
        "hidden_size": (768, 64), "num_hidden_layers": (4, 1), "num_attention_heads": (12, 4),
        "intermediate_size": (3072, 128), "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 12,
    }  # fmt: skip
    model = installed("transformers").Wav2Vec2ForSequenceClassification(_config(n, "Wav2Vec2Config", sizes))
    batch = n(8, 2)
    inputs = {"input_values": torch.randn(batch, n(160_000, 8000)), "labels": torch.randint(0, 12, (batch,))}
    return Workload(_Speech(model), inputs, f"B{batch} 10 s")


_WINDOW: dict[str, Any] = {
    "sliding_window": (512, 16),
    "head_dim": (128, 16),
    "num_attention_heads": (8, 4),
    "vocab_size": (64000, 512),
}
_PATCHES = {
    "num_hidden_layers": (6, 2), "hidden_size": (768, 64), "num_attention_heads": (12, 4), "image_size": (224, 64),
    "intermediate_size": (3072, 128),
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "vocab_size": (32000, 512)}
_LATENT = {
    "q_lora_rank": (384, 8), "kv_lora_rank": (256, 8), "qk_rope_head_dim": (64, 8), "qk_nope_head_dim": (128, 8),
    "v_head_dim": (128, 8), "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

WIDER: Mapping[str, Build] = {
    **WRITTEN,
    "wav2vec": _wav2vec,
    "densenet": classified("torchvision.models", lambda models, _: models.densenet121()),
    "olmo2": _language(
        "Olmo2ForCausalLM", "Olmo2Config", num_key_value_heads=(4, 2), vocab_size=(50304, 512), pad_token_id=0
    ),
    "gemma2": _language("Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=(8, 2), **_WINDOW),
    "gemma3": _language("Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=(4, 2), **_WINDOW),
    "phi3": _language(
        "Phi3ForCausalLM", "Phi3Config", num_key_value_heads=(4, 2), pad_token_id=0, vocab_size=(32064, 512)
    ),
    "opt": _language(
        "OPTForCausalLM", "OPTConfig", ffn_dim=(4096, 128), word_embed_proj_dim=(1024, 64), vocab_size=(50272, 512)
    ),
    "gptneox": _language(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", intermediate_size=(4096, 128), vocab_size=(50432, 512)
    ),
    "bloom": _bloom,
    "falcon": _language("FalconForCausalLM", "FalconConfig", vocab_size=(65024, 512)),
    "gptoss": _language(
        "GptOssForCausalLM", "GptOssConfig", 512, num_key_value_heads=(4, 2), head_dim=(64, 16),
        num_local_experts=(8, 4), sliding_window=(128, 16), **_EXPERTS,
    ),
    "deepseekv3": _language(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", 512, num_key_value_heads=(16, 4), n_routed_experts=(16, 4),
        moe_intermediate_size=(512, 16), **_LATENT, **_EXPERTS,
    ),
    "qwen2moe": _language(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", 512, num_key_value_heads=(4, 2), num_experts=(16, 4),
        moe_intermediate_size=(704, 32), shared_expert_intermediate_size=(704, 32), **_EXPERTS,
    ),
    "mamba2": _mamba2,
    "albert": _encoder("AlbertForMaskedLM", "AlbertConfig", embedding_size=(128, 16), vocab_size=(30000, 512)),
    "modernbert": _encoder(
        "ModernBertForMaskedLM", "ModernBertConfig", intermediate_size=(1152, 64), vocab_size=(50368, 512),
        pad_token_id=0, global_attn_every_n_layers=2, local_attention=(128, 16), reference_compile=False,
    ),
    "mpnet": _encoder("MPNetForMaskedLM", "MPNetConfig", vocab_size=(30527, 512)),
    "longformer": _encoder(
        "LongformerForMaskedLM", "LongformerConfig", attention_window=[64] * 4, num_hidden_layers=4,
        vocab_size=(50265, 512),
    ),
    "beit": _image("BeitForImageClassification", "BeitConfig", **_PATCHES),
    "convnextv2": _image("ConvNextV2ForImageClassification", "ConvNextV2Config", depths=[2, 2, 6, 2]),
    "segformer": _segformer,
    "clip": _clip,
    "layers": _layers,
    "resnext": classified("torchvision.models", lambda models, _: models.resnext50_32x4d()),
    "regnet": classified("torchvision.models", lambda models, _: models.regnet_y_1_6gf()),
    "vgg": classified("torchvision.models", lambda models, _: models.vgg16_bn()),
    "dinov2": _image("Dinov2ForImageClassification", "Dinov2Config", **_PATCHES, patch_size=16),
    "coatnet": classified(
        "timm", lambda timm, size: timm.create_model("coatnet_0_rw_224", num_classes=1000, img_size=size)
    ),
    "pvt": classified("timm", lambda timm, _: timm.create_model("pvt_v2_b1", num_classes=1000)),
    "mixer": classified(
        "timm", lambda timm, size: timm.create_model("mixer_b16_224", num_classes=1000, img_size=size)
    ),
}  # fmt: skip
