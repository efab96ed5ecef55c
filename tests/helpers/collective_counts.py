"""True numbers of collectives, for 4 sequences of 16 tokens on two ranks.

Region to (forward, backward). AG: all-gather, RS: reduce-scatter, AR: all-reduce, VL: a loss over a
sharded vocabulary, which all-reduces two small vectors inside.

Differences from two all-gathers and two reduce-scatters a block, 1 RS before the blocks, 1 AG and
the loss behind them, and from their duals and re-gathers backward:

* ``gpt2_logits``: the logits themselves are gathered, as nothing but them is returned;
* ``bert``: the embedding also gathers rows of the position table, which is sharded by its width;
* ``vit``: patches are embedded with sharded output channels, so they are gathered, not reduced; its
  four classes are not worth sharding;
* ``t5``: two embeddings; cross-attention is a third sublayer; the encoder's states are gathered
  once for all decoder blocks, and once more because the model returns them;
* ``plain_unfused``: both tables are sharded by their width, so the sum is gathered;
* ``lora``: the low-rank values of the last linear are reduced before its second factor, because its
  frozen bias comes between the two partial sums; frozen weights need no re-gathers for a gradient,
  and the first block no input gradient.

Without sequence parallelism a table sharded by width is gathered, one sharded by rows all-reduced.
``python -m tests.end_to_end.test_collectives`` prints these tables anew.
"""

from __future__ import annotations

SEQUENCE_PARALLEL: dict[str, dict[str, tuple[str, str]]] = {
    "gpt2_logits": {
        "Prologue": ("1 RS", "1 AG"),
        "GPT2Block": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("2 AG", "1 AG 1 RS"),
    },
    "gpt2": {
        "Prologue": ("1 RS", "1 AG"),
        "GPT2Block": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "llama_gqa8": {
        "Prologue": ("1 RS", "1 AG"),
        "LlamaDecoderLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "llama": {
        "Prologue": ("1 RS", "1 AG"),
        "LlamaDecoderLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "bert": {
        "Prologue": ("1 AG 1 RS", "2 AG 1 RS"),
        "BertLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "vit": {
        "Prologue": ("1 AG", "1 AG"),
        "ViTLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG", "1 AG"),
    },
    "t5": {
        "Prologue": ("2 RS", "2 AG"),
        "T5Block": ("2 AG 2 RS", "4 AG 2 RS"),
        "T5Block2": ("2 AG 2 RS", "4 AG 2 RS"),
        "Glue": ("2 AG", "1 RS"),
        "T5Block3": ("3 AG 3 RS", "6 AG 3 RS"),
        "T5Block4": ("3 AG 3 RS", "6 AG 3 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "plain_unfused": {
        "Prologue": ("1 AG", "1 AG"),
        "Block": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "plain": {
        "Prologue": ("1 RS", "1 AG"),
        "Block": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "encoder_seqfirst": {
        "Prologue": ("1 RS", "1 AG"),
        "TransformerEncoderLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "encoder_causal": {
        "Prologue": ("1 RS", "1 AG"),
        "TransformerEncoderLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "encoder_prenorm": {
        "Prologue": ("1 RS", "1 AG"),
        "TransformerEncoderLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "encoder": {
        "Prologue": ("1 RS", "1 AG"),
        "TransformerEncoderLayer": ("2 AG 2 RS", "4 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "lora": {
        "Prologue": ("1 RS", ""),
        "LoraBlock": ("2 AG 3 RS", "5 AG 1 RS"),
        "LoraBlock2": ("2 AG 3 RS", "5 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 RS"),
    },
    "peft_gpt2": {
        "Prologue": ("1 RS", ""),
        "GPT2Block": ("2 AG 2 RS", "3 AG 1 RS"),
        "GPT2Block2": ("2 AG 2 RS", "3 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 RS"),
    },
    "peft_llama": {
        "Prologue": ("1 RS", ""),
        "LlamaDecoderLayer": ("2 AG 2 RS", "3 AG 1 RS"),
        "LlamaDecoderLayer2": ("2 AG 2 RS", "3 AG 2 RS"),
        "Epilogue": ("1 AG 1 VL", "1 RS"),
    },
}
"""With ``recompute`` "none", "attention" and "selective" alike."""

RECOMPUTED: dict[str, dict[str, str]] = {
    "gpt2": {"Prologue": "1 AG", "GPT2Block": "4 AG 3 RS", "Epilogue": "1 AG 1 RS"},
    "llama": {"Prologue": "1 AG", "LlamaDecoderLayer": "4 AG 3 RS", "Epilogue": "1 AG 1 RS"},
    "bert": {"Prologue": "2 AG 2 RS", "BertLayer": "4 AG 4 RS", "Epilogue": "1 AG 1 RS"},
    "vit": {"Prologue": "1 AG", "ViTLayer": "4 AG 3 RS", "Epilogue": "1 AG"},
    "t5": {
        "Prologue": "2 AG",
        "T5Block": "4 AG 3 RS",
        "T5Block2": "4 AG 3 RS",
        "Glue": "1 RS",
        "T5Block3": "6 AG 5 RS",
        "T5Block4": "6 AG 5 RS",
        "Epilogue": "1 AG 1 RS",
    },
    "plain_unfused": {"Prologue": "1 AG", "Block": "4 AG 3 RS", "Epilogue": "1 AG 1 RS"},
    "plain": {"Prologue": "1 AG", "Block": "4 AG 3 RS", "Epilogue": "1 AG 1 RS"},
    "encoder_seqfirst": {
        "Prologue": "1 AG",
        "TransformerEncoderLayer": "4 AG 4 RS",
        "Epilogue": "1 AG 1 RS",
    },
    "encoder": {
        "Prologue": "1 AG",
        "TransformerEncoderLayer": "4 AG 4 RS",
        "Epilogue": "1 AG 1 RS",
    },
    "lora": {
        "Prologue": "",
        "LoraBlock": "5 AG 3 RS",
        "LoraBlock2": "5 AG 4 RS",
        "Epilogue": "1 RS",
    },
    "peft_gpt2": {
        "Prologue": "",
        "GPT2Block": "4 AG 2 RS",
        "GPT2Block2": "4 AG 3 RS",
        "Epilogue": "1 RS",
    },
}
"""Backward of regions with ``recompute="full"``."""

TENSOR_PARALLEL: dict[str, dict[str, tuple[str, str]]] = {
    "gpt2": {"Prologue": ("1 AR", ""), "GPT2Block": ("2 AR", "2 AR"), "Epilogue": ("1 VL", "1 AR")},
    "llama": {
        "Prologue": ("1 AG", ""),
        "LlamaDecoderLayer": ("2 AR", "2 AR"),
        "Epilogue": ("1 VL", "1 AR"),
    },
    "bert": {
        "Prologue": ("1 AG 1 RS", "2 AG 1 RS"),
        "BertLayer": ("2 AR", "2 AR"),
        "Epilogue": ("1 AG 1 VL", "1 AG 1 RS"),
    },
    "vit": {"Prologue": ("2 AG", ""), "ViTLayer": ("2 AR", "2 AR"), "Epilogue": ("", "")},
    "t5": {
        "Prologue": ("2 AR", ""),
        "T5Block": ("2 AR", "2 AR"),
        "T5Block2": ("2 AR", "2 AR"),
        "Glue": ("", "1 AR"),
        "T5Block3": ("3 AR", "3 AR"),
        "T5Block4": ("3 AR", "3 AR"),
        "Epilogue": ("1 VL", "1 AR"),
    },
    "plain_unfused": {
        "Prologue": ("2 AG", "2 RS"),
        "Block": ("2 AR", "2 AR"),
        "Epilogue": ("1 VL", ""),
    },
    "plain": {"Prologue": ("1 AR", ""), "Block": ("2 AR", "2 AR"), "Epilogue": ("1 VL", "1 AR")},
    "encoder_seqfirst": {
        "Prologue": ("1 AG", "1 RS"),
        "TransformerEncoderLayer": ("2 AR", "2 AR"),
        "Epilogue": ("1 VL", ""),
    },
    "encoder": {
        "Prologue": ("1 AG", "1 RS"),
        "TransformerEncoderLayer": ("2 AR", "2 AR"),
        "Epilogue": ("1 VL", ""),
    },
    "lora": {
        "Prologue": ("1 AG", ""),
        "LoraBlock": ("3 AR", "1 AR"),
        "LoraBlock2": ("3 AR", "2 AR"),
        "Epilogue": ("1 VL", "1 AR"),
    },
    "peft_gpt2": {
        "Prologue": ("1 AR", ""),
        "GPT2Block": ("2 AR", "1 AR"),
        "GPT2Block2": ("2 AR", "2 AR"),
        "Epilogue": ("1 VL", "1 AR"),
    },
}
"""Without sequence parallelism."""

ELSEWHERE: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2_logits": {"Epilogue": ("S(2) -> I",)},
    "bert": {"Prologue": ("S(2) -> R", "P -> S(2)")},
    "vit": {"Prologue": ("S(2) -> I",)},
    "plain_unfused": {"Prologue": ("S(2) -> I",)},
}
"""Conversions that are not of rows of tokens."""
