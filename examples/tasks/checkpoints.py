"""Save a training, resume it with the same losses, and export the weights."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"  # not rank, which counts over all nodes
    torch.cuda.set_device(device)
folders = [tempfile.mkdtemp() if rank == 0 else ""]  # in your script: a shared file system
dist.broadcast_object_list(folders)
folder = Path(folders[0])
torch.manual_seed(0)
ids = torch.randint(0, 512, (4, 64), device=device)


def started(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A compiled model, of which a rank loads its part only, and an optimizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=8, use_cache=False,
    )  # fmt: skip
    example = ((), {"input_ids": ids, "labels": ids})
    network = LlamaForCausalLM(config).to(device)
    model = sp_compiler.compile(network, tp=world_size, example_inputs=example)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}")


model, optimizer = started(seed=0)
train(model, optimizer, range(3))
weights, moments = get_state_dict(model, optimizer)  # on every rank
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "step_3")
train(model, optimizer, range(3, 5))

model, optimizer = started(seed=1)  # a new process would start so, on any number of ranks
weights, moments = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "step_3")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
train(model, optimizer, range(3, 5))

state = model.full_state_dict()  # on every rank; empty on all but rank 0
if rank == 0:
    model.save_pretrained(folder / "export", state_dict=state)
    exported = LlamaForCausalLM.from_pretrained(folder / "export").to(device)
    print(f"exported  loss {exported(input_ids=ids, labels=ids).loss.item():.4f}")
dist.destroy_process_group()
