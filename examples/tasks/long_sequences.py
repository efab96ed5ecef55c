"""See what a long sequence needs, and what each setting saves."""

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import sp_compiler

LENGTH = 65536


def causal_attention(module, query, key, value, attention_mask, scaling=None, **unused):
    """Attention that needs no mask of LENGTH x LENGTH."""
    result = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return result.transpose(1, 2), None


class LossOnly(torch.nn.Module):
    """A model that returns no logits, so that they need not all exist at once."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, input_ids):
        return self.network(input_ids=input_ids, labels=input_ids).loss


AttentionInterface.register("causal", causal_attention)
config = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=LENGTH, use_cache=False,
    attn_implementation="causal",
)  # fmt: skip
with torch.device("meta"):  # a plan reads shapes alone
    model = LossOnly(LlamaForCausalLM(config).to(torch.bfloat16))
    ids = torch.empty(1, LENGTH, dtype=torch.long)

settings = {
    "tensor parallel alone": {"recompute": "none", "sequence_parallel": False, "loss_chunks": 1},
    "+ sequence parallel": {"recompute": "none", "loss_chunks": 1},
    "+ selective recomputation": {"loss_chunks": 1},
    "+ loss in chunks": {},
    "+ full recomputation": {"recompute": "full"},
}
for name, options in settings.items():
    plan = sp_compiler.plan(model, ((), {"input_ids": ids}), tp=8, **options)
    layer = plan.block("LlamaDecoderLayer").kept_bytes / 2**20
    peak = plan.activation_peak_bytes / 2**30
    print(f"{name}: a layer saves {layer:.0f} MiB, activations peak at {peak:.1f} GiB")
