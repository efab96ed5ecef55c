"""Read different batches along the data axes, and the same batch along tp."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
kind = device = "cpu"
if torch.cuda.is_available():
    kind, device = "cuda", f"cuda:{os.environ['LOCAL_RANK']}"  # not rank: that is over all nodes
    torch.cuda.set_device(device)
mesh = init_device_mesh(kind, (2, world_size // 2), mesh_dim_names=("dp_shard", "tp"))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, use_cache=False,
)  # fmt: skip
network = LlamaForCausalLM(config).to(device)
dataset = TensorDataset(torch.randint(0, config.vocab_size, (32, 64)))

part, parts = sp_compiler.data_shard(mesh)  # not rank and world_size
sampler = DistributedSampler(dataset, num_replicas=parts, rank=part, seed=0, drop_last=True)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
print(f"rank {rank} reads part {part} of {parts}")

example = next(iter(loader))[0].to(device)
model = sp_compiler.compile(
    network, mesh=mesh, example_inputs=((), {"input_ids": example, "labels": example})
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)  # another order
    for (batch,) in loader:
        ids = batch.to(device)
        loss = model(input_ids=ids, labels=ids).loss  # of this rank's part
        loss.backward()  # averages gradients over the parts
        sp_compiler.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)  # ranks of one part have the same loss, so that this is the mean:
    if rank == 0:
        print(f"epoch {epoch}  loss {total.item() / world_size:.3f}")
dist.destroy_process_group()
