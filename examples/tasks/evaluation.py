"""Metrics on logits that are sharded over the vocabulary, and a loss of your own."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler


class WithOwnLoss(nn.Module):
    """The loss belongs into the model: the logits then need not be gathered for it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(input_ids=ids).logits
        rows, labels = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        z_loss = torch.logsumexp(rows, dim=-1).square().mean()
        return F.cross_entropy(rows, labels, label_smoothing=0.1) + 1e-4 * z_loss, logits


dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"  # not rank, which counts over all nodes
    torch.cuda.set_device(device)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, use_cache=False,
)  # fmt: skip
network = WithOwnLoss(LlamaForCausalLM(config)).to(device)
ids = torch.randint(0, config.vocab_size, (4, 64), device=device)

model = sp_compiler.compile(network, tp=world_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(20):
    loss, _ = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.eval()
with torch.no_grad():
    loss, logits = model(ids)
# Collectives: on every rank, also where only one prints.
accuracy = (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
if rank == 0:
    print(f"logits: {logits.placements}, {tuple(logits.to_local().shape)} of {tuple(logits.shape)}")
    print(f"loss {loss.item():.3f}  accuracy {accuracy:.2f}")
dist.destroy_process_group()
