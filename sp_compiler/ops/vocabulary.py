"""Lookups in and losses over a vocabulary whose rows or classes are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from sp_compiler.base.placement import I, P, R, S
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.gpu.id_checks import require_in_range
from sp_compiler.ops.registry import Arguments, Collective, Gradient, Operator, Typing, register

_aten = torch.ops.aten
_sp = torch.ops.sp_compiler


def vocab_embedding(tp: Communicator, weight: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Look up rows of a table of v = ``num_rows`` rows, which may be padded.

    ``weight`` is S(0) (v/t, h), ``ids`` replicated; the result (*ids, h) is P: zeros for the rows
    of other ranks.
    """
    require_inside(tp, ids, num_rows, "an embedding of {} rows")
    local, is_elsewhere = local_ids(tp, ids, weight.shape[0])
    # Masked, not multiplied by 0: the row that replaces those of other ranks may hold inf or nan.
    return embedding(local, weight).masked_fill_(is_elsewhere.unsqueeze(-1), 0)


def vocab_embedding_backward(tp: Communicator, grad: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Gradient (num_rows, h), placed S(0), of this rank's part of the table."""
    local, is_elsewhere = local_ids(tp, ids, num_rows)
    # A row of another rank adds zeros to one of this rank: an index must be in range, and shapes
    # must not depend on how many ids are here.
    grad = grad.masked_fill(is_elsewhere.unsqueeze(-1), 0)
    # As in torch's own lookup: on a GPU, sums in 16 bits would be rounded at every token.
    return _aten.embedding_dense_backward(grad, local, num_rows, -1, False)


def vocab_nll(
    tp: Communicator, logits: Tensor, target: Tensor, ignore_index: int, classes: int
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of each row over v = ``classes`` classes.

    ``logits`` (n, v/t), which may be padded, is S(1), ``target`` (n,) replicated; returns the loss
    of each row (0 where the target is ``ignore_index``) and the logsumexp of each row, both (n,)
    and invariant. Costs two small all-reduces (the row maximum; the sum of exponentials with the
    target's logit).
    """
    is_ignored = target == ignore_index
    wanted = target.masked_fill(is_ignored, 0)
    require_inside(tp, wanted, classes, "a loss over {} classes, as target")
    local, is_elsewhere = local_ids(tp, target, logits.shape[-1])
    # Masked, not multiplied by 0: a logit of another class may be infinite.
    picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(is_elsewhere, 0)
    logsumexp, picked = log_total(tp, logits, classes, [picked])
    return (logsumexp - picked).masked_fill_(is_ignored, 0), logsumexp


def log_total(
    tp: Communicator, logits: Tensor, classes: int, others: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the logsumexp of each row over all ranks, and the sums of ``others`` over the
    ranks."""
    padding = padding_columns(tp, logits, classes)
    known = logits if padding is None else logits.masked_fill(padding, -torch.inf)
    # The maximum of all ranks, so that exponentials of different ranks can be added.
    peak = tp.reduce(known.amax(-1), "max")
    # As in torch.logsumexp: for a row that is all -inf the sum is 0, not inf - inf.
    peak = peak.nan_to_num(0.0, 0.0, 0.0)
    del known  # as large as the logits
    exponents = logits - peak.unsqueeze(-1)
    if padding is not None:
        exponents.masked_fill_(padding, -torch.inf)
    total = exponents.exp_().sum(-1)
    del exponents
    # One collective for all: at this size it costs only its latency.
    total, *sums = tp.reduce(torch.stack([total, *others]), "sum").unbind()
    return total.log() + peak, *sums


def vocab_nll_backward(
    tp: Communicator,
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    ignore_index: int,
    classes: int,
) -> Tensor:
    """Gradient of :func:`vocab_nll` for its logits: (softmax - onehot) * grad; no communication."""
    grad = grad.masked_fill(target == ignore_index, 0)
    local, is_elsewhere = local_ids(tp, target, logits.shape[-1])
    # The softmax is recomputed from one number per row; saved, it would be as large as the logits.
    result = (logits - logsumexp.unsqueeze(-1)).exp_().mul_(grad.unsqueeze(-1))
    padding = padding_columns(tp, logits, classes)
    if padding is not None:
        result.masked_fill_(padding, 0)
    own_share = -grad.masked_fill(is_elsewhere, 0)
    return result.scatter_add_(-1, local.unsqueeze(-1), own_share.unsqueeze(-1))


def require_inside(tp: Communicator, ids: Tensor, size: int, what: str) -> None:
    """Raise an error for ids on the host that are out of range.

    Raises:
        IndexError: an id is negative or not below ``size``.
    """
    # On a rank that has none of them, a wrong id would look like one of another rank: a row of
    # zeros instead of an error. On a device ``checked_ids`` has checked them, because reading a
    # value would make the host wait. Ids of simulated ranks are those of one rank, already checked.
    if is_on_host(ids) and isinstance(tp.rank, int) and ids.numel():
        low, high = ids.aminmax()
        require_in_range(int(low), int(high), size, what)


def is_on_host(ids: Tensor) -> bool:
    """Return whether the values can be read without waiting for a device."""
    return ids.device.type == "cpu"


def padding_columns(tp: Communicator, logits: Tensor, classes: int) -> Tensor | None:
    """Return which of this rank's columns are padding; ``None`` if no rank has any."""
    columns = logits.shape[-1]
    if columns * tp.world_size == classes:
        return None
    return torch.arange(columns, device=logits.device) + tp.rank * columns >= classes


def local_ids(tp: Communicator, ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return row numbers in this rank's part of the vocabulary, and which ids belong to another
    rank.

    The latter are clamped to the nearest row. There is no branch on the rank, which is a tensor
    under simulation.
    """
    distance = ids - tp.rank * num_rows
    local = distance.clamp(0, num_rows - 1)
    return local, local != distance


# What graphs need to know about them.


def _fake_rows(weight: Tensor, ids: Tensor, num_rows: int, world_size: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _fake_table(grad: Tensor, ids: Tensor, num_rows: int, world_size: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]))


def _save_ids(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, _, ctx.world_size = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward_of_embedding(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    table = _sp.vocab_embedding_backward(grad, ids, ctx.num_rows, ctx.world_size)
    return table, None, None, None


def _type_embedding(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((S(0), R), (P,))]


def _type_embedding_backward(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((R, R), (S(0),))]


def _scratch_of_embedding_backward(args: Arguments, result: Tensor) -> int:
    """Bytes of the gradient without the rows of other ranks."""
    grad = args["grad"].meta["val"]
    num_bytes: int = grad.numel() * grad.element_size()
    return num_bytes


def fake_losses(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Fake results: the loss and the logsumexp of each row."""
    return logits.new_empty(target.shape), logits.new_empty(target.shape)


def scratch_of_losses(args: Arguments, result: Any) -> int:
    """Bytes of the exponentials of all logits in :func:`log_total`."""
    logits = args["logits"].meta["val"]
    # Not as an int: that would fix a size that is open.
    num_bytes: int = logits.numel() * logits.element_size()
    return num_bytes


def fake_logits(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    """The gradient of the logits."""
    return torch.empty_like(logits)


def _save_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def _backward_of_nll(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    result = _sp.vocab_nll_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return result, None, None, None, None


def _type_nll(args: Arguments, world_size: int) -> Sequence[Typing]:
    # I although the target is R: every rank has the same gradient of the loss, and backward does
    # not sum it.
    return [((S(1), R), (I, I))]


def _type_nll_backward(args: Arguments, world_size: int) -> Sequence[Typing]:
    return [((R, S(1), R, R), (S(1),))]


def _collectives_of_nll(args: Arguments, result: Any) -> Sequence[Collective]:
    rows = result[0].numel() * result[0].element_size()
    # The maximum of each row; then its sum of exponentials with the target's logit.
    return [Collective("all_reduce", 2, rows + 2 * rows)]


VOCAB_EMBEDDING = register(
    Operator(
        name="vocab_embedding",
        schema="(Tensor weight, Tensor ids, SymInt num_rows, SymInt world_size) -> Tensor",
        kernel=vocab_embedding,
        fake=_fake_rows,
        typings=_type_embedding,
        gradient=Gradient(_save_ids, _backward_of_embedding),
        dims="vh,...->...h",
        checks_numbers=True,
    )
)
VOCAB_EMBEDDING_BACKWARD = register(
    Operator(
        name="vocab_embedding_backward",
        schema="(Tensor grad, Tensor ids, SymInt num_rows, SymInt world_size) -> Tensor",
        kernel=vocab_embedding_backward,
        fake=_fake_table,
        typings=_type_embedding_backward,
        scratch_bytes=_scratch_of_embedding_backward,
    )
)
VOCAB_NLL = register(
    Operator(
        name="vocab_nll",
        schema="(Tensor logits, Tensor target, SymInt ignore_index, SymInt classes, "
        "SymInt world_size) -> (Tensor, Tensor)",
        kernel=vocab_nll,
        fake=fake_losses,
        typings=_type_nll,
        gradient=Gradient(_save_logits, _backward_of_nll),
        result_names=("nll", "logsumexp"),
        dims="nv,n->n,n",
        collectives=_collectives_of_nll,
        scratch_bytes=scratch_of_losses,
    )
)
VOCAB_NLL_BACKWARD = register(
    Operator(
        name="vocab_nll_backward",
        schema="(Tensor grad, Tensor logits, Tensor target, Tensor logsumexp, SymInt ignore_index, "
        "SymInt classes, SymInt world_size) -> Tensor",
        kernel=vocab_nll_backward,
        fake=fake_logits,
        typings=_type_nll_backward,
        dims="n,nv,n,n->nv",
    )
)
