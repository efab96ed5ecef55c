"""The plain GPT parallelised with DTensor's ``parallelize_module``: TP, or TP with SP.

Code as a user of torch's own API would write it for this model: one plan of column-wise and
row-wise linears, vocab-parallel embedding and loss and, with sequence parallelism, norms and the
residual stream on shards of the sequence. The model must have separate query, key and value
linears: DTensor cannot shard a fused one by heads. Dropouts run on local tensors and draw from
torch's generator, so seed every rank differently for independent masks.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from benchmarks.models import PlainGPT
from benchmarks.peers.recompute import Recompute, checkpoint_by_hand


def parallelize(
    model: PlainGPT,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = True,
    recompute: Recompute = "none",
) -> PlainGPT:
    """Parallelise ``model`` over ``group``, in place. Run it with :func:`train_step`.

    Raises:
        ValueError: the model has a fused qkv linear.
    """
    if model.config.fused_qkv:
        raise ValueError("fused_qkv=True: DTensor cannot shard a fused linear by heads")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    plan = _outer_plan(sequence_parallel)
    for index in range(model.config.num_layers):
        for name, style in _block_plan(sequence_parallel).items():
            plan[f"blocks.{index}.{name}"] = style
    parallelize_module(model, mesh, plan)
    if model.config.tied_head:
        model.head.weight = model.token_embedding.weight
    return checkpoint_by_hand(model, recompute)


def train_step(model: PlainGPT, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward; gradients that are still partial sums are reduced. Returns the loss."""
    with loss_parallel():
        loss = model(input_ids, labels=labels)[0]
        loss.backward()
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = grad.redistribute(placements=parameter.placements)
    return _whole(loss.detach())


def whole_gradients(model: PlainGPT) -> dict[str, Tensor]:
    """The gradients of the whole parameters by name."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: _whole(grad) for name, grad in grads.items()}


def _whole(x: Tensor) -> Tensor:
    whole: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return whole


def _outer_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence_parallel:
        plan["position_embedding"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0)
        )
        plan["final_norm"] = SequenceParallel()
    return plan


def _block_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        # One conversion before the linears: their input gradients are summed, then reduced once.
        name: PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
        for name in ("attention", "mlp")
    }
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        plan[name] = ColwiseParallel()
    for name in ("attention.projection", "mlp.down"):
        plan[name] = RowwiseParallel(output_layouts=stream)
    if sequence_parallel:
        plan["attention_norm"] = plan["mlp_norm"] = SequenceParallel()
    return plan
