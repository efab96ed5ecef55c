"""A training script for one GPU, on as many ranks as torchrun starts."""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

dist.init_process_group()  # new
rank, world_size = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():  # new
    device = f"cuda:{os.environ['LOCAL_RANK']}"  # not rank, which counts over all nodes
    torch.cuda.set_device(device)

torch.manual_seed(0)  # the same weights and the same batches on every rank
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, use_cache=False,
)  # fmt: skip
network = LlamaForCausalLM(config).to(device)
ids = torch.randint(0, config.vocab_size, (4, 64), device=device)

model = sp_compiler.compile(network, tp=world_size)  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {loss.item():.3f}  norm {norm.item():.3f}")

if rank == 0:
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    print(f"up_proj: {tuple(weight.shape)} in all, {tuple(weight.to_local().shape)} here")
dist.destroy_process_group()
