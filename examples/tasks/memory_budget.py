"""See what a step needs before it runs, and fit it into a budget."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

config = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=4,
    num_attention_heads=32, use_cache=False,
)  # fmt: skip
with torch.device("meta"):  # a plan reads shapes alone
    network = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.empty(2, 4096, dtype=torch.long)
example = ((), {"input_ids": ids, "labels": ids})

settings = [("none", None), ("full", None), ("auto", "0.6GiB"), ("selective", None)]
for recompute, budget in settings:
    plan = sp_compiler.plan(network, example, tp=8, recompute=recompute, memory_budget=budget)
    limit = f"{recompute}, within {budget}" if budget else recompute
    peak_gib = plan.activation_peak_bytes / 2**30
    print(
        f"{limit}: activations peak at {peak_gib:.2f} GiB, a step takes {plan.step_us / 1e3:.1f} ms"
    )
print(plan.activation_formula)
