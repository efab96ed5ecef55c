"""A number looks wrong: find out whether the compiler made it, and which pass."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, use_cache=False,
)  # fmt: skip
network = LlamaForCausalLM(config)
ids = torch.randint(0, config.vocab_size, (2, 16))
example = ((), {"input_ids": ids, "labels": ids})

# 1. Is it the compiler? One process simulates the ranks, in float64.
report = sp_compiler.verify(network, example, tp=2)
print(f"ok: {report.ok}, largest error {report.worst:.0e}, first bad pass {report.first_bad_pass}")


# 2. A pass with a bug, which scales what it should not: verify names it.
def scales(graph: torch.fx.GraphModule) -> int:
    silu = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.silu.default)
    with graph.graph.inserting_after(silu):
        half = graph.graph.call_function(torch.ops.aten.mul.Tensor, (silu, 0.5))
    silu.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    return 1


report = sp_compiler.verify(network, example, tp=2, passes=[scales])
print(f"ok: {report.ok}, largest error {report.worst:.0e}, first bad pass {report.first_bad_pass}")

# 3. What did it change? Any two stages of a compiled module can be compared.
model = sp_compiler.compile(network, tp=1, example_inputs=example, passes=[scales])
print("stages:", ", ".join(model.stages))
print(model.diff("normalize", "scales"))
