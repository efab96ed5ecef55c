"""Notes about attention heads that are padded to a multiple of the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from sp_compiler.base.provenance import module_path
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.planning.fallbacks import activations_of, is_attention_core


def padding_notes(compiled: CompiledProgram) -> Iterator[str]:
    """Yield one line per distinct attention core that runs on padded heads."""
    world_size = compiled.world_size
    for region in compiled.program.regions:
        activations = activations_of(region)
        for node in region.module.graph.nodes:
            # From the values and not from the parameters: a weight may be sharded along its other
            # dim, while what it is multiplied with is padded.
            heads = compiled.paddable.get((region.name, node.meta.get("source", node.name)))
            placements = (x.meta.get("placement") for x in tensor_operands(node))
            is_padded = any(p is not None and p.padding(world_size) for p in placements)
            if heads and is_padded and is_attention_core(node, activations):
                yield (
                    f"attention in {module_path(node) or 'the model'} of {region.name} runs on "
                    f"{world_size * -(-heads // world_size)} heads: its {heads} do not divide by "
                    f"{world_size} ranks and are padded"
                )
