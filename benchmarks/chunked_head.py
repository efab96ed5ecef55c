"""Peak of a step of Llama-3-8B with its loss head in one chunk and in chunks, planned and measured.

    python -m benchmarks.chunked_head [--layers 32] [--tokens 8192] [--tp 8]

The measured value is what one rank's generated code holds at the real sizes: the step runs on
tensors without memory, and after every operator the bytes of all live storages are added up.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import memory_check
from benchmarks.measure import PeakRecorder
from sp_compiler.base.units import bytes_text
from sp_compiler.compiler import build
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.options import CompileOptions
from sp_compiler.runtime.parameter_gradients import local_tensor
from tests.helpers import parity
from tests.helpers.fake_group import fake_group


class MetaRecorder(PeakRecorder):
    """Counts storages without memory, which have no address."""

    def _remember(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None or self._made[known][0].expired():
            self._alive[storage._cdata] = len(self._made)
            self._made.append((StorageWeakRef(storage), storage._cdata, storage.nbytes()))

    def _numbers(self, tensors: object) -> set[int]:
        assert isinstance(tensors, list)
        keys = {local_tensor(tensor).untyped_storage()._cdata for tensor in tensors}
        return {number for number in self._now() if self._made[number][1] in keys}


class LossOnly(nn.Module):
    """Returns only the loss, so that the logits are not an output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def llama(layers: int) -> nn.Module:
    """Llama-3-8B in bfloat16, without memory for its parameters."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LossOnly(LlamaForCausalLM(config).to(torch.bfloat16))


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tp", type=int, default=8)
    options = parser.parse_args()
    model = llama(options.layers)
    ids = torch.zeros(1, options.tokens, dtype=torch.int64, device="meta")
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    print("| recompute | chunks | planned | measured | compute |\n| --- | --- | --- | --- | --- |")
    for recompute in ("selective", "full"):
        whole = None
        for chunks in (1, "auto"):
            wishes = CompileOptions(tp=options.tp, recompute=recompute, loss_chunks=chunks)  # type: ignore[arg-type]
            batch = {"input_ids": ids, "labels": ids}
            program = build(model, (), batch, wishes, keep="nothing")
            found = parity.Case(program.program, params, buffers, [ids, ids], [], {}, [])
            with (
                fake_group(options.tp),
                mock.patch.object(memory_check, "PeakRecorder", MetaRecorder),
            ):
                _, measured = memory_check.measure(found, program)
            work = program.plan.work
            now = step_memory(program).peak_bytes, measured, work.compute_us
            whole = whole or now
            peak, held, time = (
                f"{new / old - 1:+.1%}" for new, old in zip(now, whole, strict=True)
            )
            print(
                f"| {recompute} | {chunks} | {bytes_text(now[0])} ({peak}) "
                f"| {bytes_text(measured)} ({held}) | {time} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
