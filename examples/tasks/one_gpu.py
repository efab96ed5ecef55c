"""Train GPT-2 on one device, keeping a fraction of the activations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


def saved_bytes(model: Callable[..., Any], ids: Tensor) -> int:
    """Run the forward; return the bytes that it keeps for backward, parameters aside."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    for parameter in network.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    loss.backward()
    return sum(storages.values())


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = GPT2Config(
    vocab_size=1024, n_embd=256, n_layer=4, n_head=4, use_cache=False, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip
network = GPT2LMHeadModel(config).to(device)
ids = torch.randint(0, config.vocab_size, (4, 128), device=device)
before = saved_bytes(network, ids)

model = torch.compile(network, backend="sp_compiler")
model(input_ids=ids, labels=ids)  # the first call compiles
after = saved_bytes(model, ids)
print(f"kept for backward: {before / 2**20:.1f} MiB eager, {after / 2**20:.1f} MiB compiled")

optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.3f}")
