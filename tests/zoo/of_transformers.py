"""The models of transformers and peft in the zoo: from small configurations, with random weights and dropout on."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from tests.zoo.samples import LENGTH, NUM_CLASSES, PADDING, WORDS

_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "attention_dropout": 0.1,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager", **_DECODER}
"""One expert after the other: torch's grouped product knows no float64."""
_ENCODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "num_labels": NUM_CLASSES,
    "pad_token_id": PADDING,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def gpt2(**values: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2, **values
    )
    return _trained(transformers.GPT2LMHeadModel(config))


def checkpointed_gpt2() -> nn.Module:
    """Activation checkpointing: backward runs the blocks again."""
    model: Any = gpt2(use_cache=False)
    model.activation_checkpointing_enable()
    return _trained(model)


def llama() -> nn.Module:
    return _trained(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER)))


def lora_llama() -> nn.Module:
    """Frozen weights with trainable low-rank adapters."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return _trained(peft.get_peft_model(llama(), config))


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.1, pad_token_id=PADDING, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return _trained(transformers.OPTForCausalLM(config))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(num_local_experts=4, **_EXPERTS)
    return _trained(transformers.MixtralForCausalLM(config))


def qwen2_moe() -> nn.Module:
    config = transformers.Qwen2MoeConfig(
        num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **_EXPERTS
    )
    return _trained(transformers.Qwen2MoeForCausalLM(config))


def bert() -> nn.Module:
    return _trained(transformers.BertForSequenceClassification(transformers.BertConfig(**_ENCODER)))


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=16,
        num_labels=NUM_CLASSES, pad_token_id=PADDING,
    )  # fmt: skip
    return _trained(transformers.DistilBertForSequenceClassification(config))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        pad_token_id=PADDING, decoder_start_token_id=1,
    )  # fmt: skip
    return _trained(transformers.T5ForConditionalGeneration(config))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=NUM_CLASSES, **_VISION
    )
    return _trained(transformers.ViTForImageClassification(config))


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=NUM_CLASSES
    )
    return _trained(transformers.ResNetForImageClassification(config))


def clip() -> nn.Module:
    text = {**_ENCODER, "attention_dropout": 0.1, "max_position_embeddings": LENGTH, "bos_token_id": 1}
    text |= {"eos_token_id": 2, "projection_dim": 8}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=_VISION | {"attention_dropout": 0.1, "projection_dim": 8}, projection_dim=8
    )
    return _trained(transformers.CLIPModel(config))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=12,
        max_target_positions=16, dropout=0.1, pad_token_id=PADDING, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return _trained(transformers.WhisperForConditionalGeneration(config))


def wav2vec2() -> nn.Module:
    """Skips whole layers at random (layerdrop) and masks time steps by NumPy's generator."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, layerdrop=0.3, mask_time_prob=0.3, mask_time_length=2, num_labels=NUM_CLASSES,
        classifier_proj_size=8, vocab_size=WORDS,
    )  # fmt: skip
    return _trained(transformers.Wav2Vec2ForSequenceClassification(config))


def _trained(model: Any) -> nn.Module:
    """In training mode, and telling apart what it was given by its arguments alone."""
    module: nn.Module = model.train()
    return module
