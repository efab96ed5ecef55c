"""Train LoRA adapters of PEFT on a sharded model, and save them alone."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"  # not rank, which counts over all nodes
    torch.cuda.set_device(device)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, use_cache=False,
)  # fmt: skip
torch.manual_seed(0)
base = LlamaForCausalLM(config)
ids = torch.randint(0, config.vocab_size, (4, 64), device=device)

lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
network = get_peft_model(base, lora).to(device)
model = sp_compiler.compile(network, tp=world_size)  # after get_peft_model
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}  loss {loss.item():.3f}")

state = model.full_state_dict()  # on every rank; empty on all but rank 0
if rank == 0:
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder, state_dict=state)
    print(f"saved: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    torch.manual_seed(0)
    fresh = PeftModel.from_pretrained(LlamaForCausalLM(config), folder).to(device)
    print(f"loaded, one device: loss {fresh(input_ids=ids, labels=ids).loss.item():.3f}")
    print(f"compiled:           loss {loss.item():.3f} before the last step")
dist.destroy_process_group()
