"""Fine-tune weights from safetensors files that no rank ever holds in full."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"  # not rank, which counts over all nodes
    torch.cuda.set_device(device)

# A folder as `huggingface-cli download` leaves it; here one rank makes a small one.
folders = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folders)
folder = Path(folders[0])
if rank == 0:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    small = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=8)
    LlamaForCausalLM(small).save_pretrained(folder)
dist.barrier()

config = LlamaConfig.from_pretrained(folder, use_cache=False)
with torch.device("meta"):  # no memory for weights
    network = LlamaForCausalLM(config)
model = sp_compiler.compile(network, tp=world_size)

torch.manual_seed(1)
ids = torch.randint(0, config.vocab_size, (4, 64), device=device)
model.prepare(input_ids=ids, labels=ids)  # decides which rank holds what
unused = model.load_pretrained(folder)  # reads that, and nothing else
held = sum(weight.to_local().nbytes for weight in model.parameters())
total = sum(weight.nbytes for weight in model.parameters())
print(f"rank {rank} holds {held / total:.0%} of the weights; tensors not used: {unused}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
