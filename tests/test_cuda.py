"""Tests that need a GPU; without one all are skipped, and say so."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sp_compiler
from benchmarks import gpu, inductor
from benchmarks.measure import loss_of
from benchmarks.models import GPTConfig, PlainGPT
from sp_compiler.ops.attention import dropout_attention, dropout_attention_backward
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.dropout import dropout, dropout_mask
from sp_compiler.runtime.cuda_graphs.device_graph import DeviceGraph, memory_pool
from tests.helpers import host_memory, parity
from tests.helpers.fake_group import fake_group
from tests.models import architectures, zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SEED = torch.tensor(-4_611_686_018_427_387_847)


def test_plans_of_memory_hold() -> None:
    for row in gpu.memory("cuda", gpu.SMALL):
        assert row.kept_recorded == row.kept_planned, row
        assert row.peak_recorded == pytest.approx(row.peak_planned, rel=0.03), row
        assert row.peak_allocated is not None
        # Workspaces of libraries come on top, and none of the operators' own is missing.
        assert row.peak_allocated >= row.peak_with_gradients, row


def test_tensors_on_the_host_change_no_bit() -> None:
    """Copies on a stream of their own, there and back, against a step that keeps everything."""
    kept, offloaded = (host_memory.step("cuda", offload) for offload in (False, True))
    assert kept.keys() == offloaded.keys()
    for name, grad in kept.items():
        assert torch.equal(grad, offloaded[name]), name


def test_numbers_are_those_of_the_cpu() -> None:
    for row in gpu.numbers("cuda", gpu.SMALL):
        assert max(row.loss_error, row.gradient_error) < 1e-4, row


@pytest.mark.parametrize(
    ("name", "backend"),
    [("gpt2", "eager"), ("llama", "eager"), ("plain", "eager"), ("plain", "inductor")],
)
def test_replayed_steps_have_the_same_bits(name: str, backend: str) -> None:
    """Losses and parameters after some steps, the recorder of tests/runtime put to the truth."""
    plain, replayed = (_train(name, cuda_graphs=on, backend=backend) for on in (False, True))
    assert replayed[0] == plain[0]
    for parameter, value in plain[1].items():
        assert torch.equal(replayed[1][parameter], value), parameter


def _train(name: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.build(name, layers=2, dropout=0.1, dtype=torch.float32).cuda()
    module: Any = sp_compiler.compile(model, tp=1, **options)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    # Backwards of the other kernels add in any order.
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(8):
            # Two batches a step, the last of another length.
            for seed, length in ((2 * step, 12), (2 * step + 1, 12 + 4 * (step == 7))):
                inputs = {
                    key: value.cuda() for key, value in zoo.inputs(name, 2, length, seed).items()
                }
                loss = loss_of(module(**inputs))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, {key: value.detach().clone() for key, value in module.named_parameters()}


def test_a_recording_that_fails_leaves_random_numbers_as_they_were() -> None:
    x = torch.ones(1000, device="cuda")
    graph = DeviceGraph(x.device, memory_pool())
    with pytest.raises(RuntimeError, match="captur"):
        graph.record(lambda: torch.nn.functional.dropout(x, 0.5).sum().item())
    assert 0 < int(torch.nn.functional.dropout(x, 0.5).count_nonzero()) < 1000


@pytest.mark.usefixtures("one_of_eight")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_steps_of_a_rank_are_recorded(backend: str) -> None:
    """With dropout, whose masks depend on the rank, which the host must not have to ask for."""
    ids = _ids()
    module: Any = sp_compiler.compile(_gpt().cuda(), tp=8, backend=backend, cuda_graphs=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*without CUDA graphs.*")
        _train_on(module, ids, ids, steps=4)
    (kind,) = module._sp_state.steps._kinds.values()
    assert kind.step is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_masks_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """By the Triton kernel there and by operators here, to the bit."""
    places = ((3, 0, 1, 0), (0, 0, 2, 1), (5, -1, 4, 3), (1, 1, 2, 0))
    shapes = ((3, 5, 70), (4, 1025), (2, 3, 8, 4097), (7, 64))
    for shape, (site, dim, world_size, rank) in itertools.product(shapes, places):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        tp = Communicator(None, rank, world_size)
        for draw in (dropout, dropout_mask):
            there = draw(tp, x.cuda(), SEED.cuda(), 0.3, site, dim, world_size)
            here = draw(tp, x, SEED, 0.3, site, dim, world_size)
            assert torch.equal(there.cpu(), here), (draw.__name__, shape, dim, world_size)
            assert 0 < int((here == 0).sum()) < here.numel()


def test_a_mask_of_more_than_32_bits_of_elements() -> None:
    rows, columns = (1 << 20) + 3, 4100
    tp = Communicator(None, 0, 1)
    x = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    mask = dropout_mask(tp, x, SEED.cuda(), 0.1, 2, 0, 1)
    for first in (0, rows // 2, rows - 5):
        here = dropout_mask(tp, torch.empty(5, columns), SEED, 0.1, 2, 0, 1, first)
        assert torch.equal(mask[first : first + 5].cpu(), here)


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "width"),
    [
        (torch.float32, 256, 256, 64),
        (torch.float32, 200, 333, 96),
        (torch.bfloat16, 1024, 1024, 128),
        (torch.bfloat16, 1100, 200, 64),
        (torch.bfloat16, 300, 500, 96),
        (torch.float16, 300, 300, 256),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_has_the_numbers_of_its_operators(
    dtype: torch.dtype, queries: int, keys: int, width: int, p: float
) -> None:
    """By FlexAttention's kernels there, and in float64 here."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, width), (keys, width), (keys, width), (queries, width))
    *factors, grad = [torch.randn(2, 3, *shape, generator=generator).to(dtype) for shape in shapes]
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()
    tp, place = Communicator(None, 1, 2), (width**-0.5, p, 3, 1, 2)
    rest: Any = (mask, SEED if p else None, *place)
    exact: Any = [x.double() for x in factors]
    context, logsumexp = dropout_attention(tp, *exact, *rest)
    given: Any = (*exact, context, logsumexp, *rest)
    expected = (context, logsumexp, *dropout_attention_backward(tp, grad.double(), *given))
    there: Any = [x.cuda() for x in factors]
    rest = [x.cuda() if isinstance(x, Tensor) else x for x in rest]
    with _no_fallback():
        results = dropout_attention(tp, *there, *rest)
        given = (*there, *results, *rest)
        made = dropout_attention_backward(tp, grad.cuda(), *given)
    tolerance = 2e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    for actual, true in zip((*results, *made), expected, strict=True):
        error = (actual.cpu().double() - true).abs().max() / true.abs().max()
        assert error < tolerance


@contextlib.contextmanager
def _no_fallback() -> Iterator[None]:
    """Context in which it is an error that kernels could not be compiled, or a step recorded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*with its scores in memory|.*without CUDA graphs")
        yield


def test_a_mask_of_attention_of_more_than_32_bits_of_elements() -> None:
    size, rows, tp = 46_500, 8, Communicator(None, 0, 1)
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, size, 64, generator=generator, device="cuda").half()
    mask = torch.ones(1, 1, size, size, dtype=torch.bool, device="cuda").tril_()
    with _no_fallback():
        context, _ = dropout_attention(tp, query, key, value, mask, None, 0.125, 0.0, 0, 0, 1)
    scores = 0.125 * query[..., -rows:, :].double() @ key.double().mT
    true = scores.masked_fill(~mask[..., -rows:, :], -torch.inf).softmax(-1) @ value.double()
    error = (context[..., -rows:, :] - true).abs().max() / true.abs().max()
    assert error < 4 * torch.finfo(torch.float16).eps


_OF_256 = GPTConfig(vocab_size=1024, num_positions=256, hidden_size=256, num_layers=2, num_heads=4)


def test_recorded_attention_has_the_same_bits() -> None:
    ids = torch.arange(512, device="cuda").view(2, 256)
    found: list[list[Tensor]] = []
    for recorded in (False, True):
        torch.manual_seed(0)
        module: Any = sp_compiler.compile(PlainGPT(_OF_256).cuda(), tp=1, cuda_graphs=recorded)
        torch.manual_seed(1)
        losses = []
        with _no_fallback():
            for _ in range(4):
                losses.append(module(ids, labels=ids)[0])
                losses[-1].backward()
        assert "dropout_attention" in module.code
        found.append([*losses, *(x.grad for x in module.parameters() if x.grad is not None)])
    for plain, replayed in zip(*found, strict=True):
        assert torch.equal(plain, replayed)


@torch.no_grad()
def test_a_forward_is_recorded_by_the_user() -> None:
    """Its ids are looked up, and nobody waits for what they are."""
    module: Any = sp_compiler.compile(_gpt().cuda().eval(), tp=1)
    ids = _ids()
    for _ in range(3):
        module(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(ids)[0]
    for shifted in (ids + 1, ids.flip(-1)):
        expected = module(shifted)[0].clone()
        ids.copy_(shifted)
        graph.replay()
        assert torch.equal(result, expected)


def test_attention_of_a_model_is_one_operator() -> None:
    """Its losses and gradients are those of the CPU, where its scores are in memory."""
    ids = torch.arange(512).view(2, 256)
    found: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        module: Any = sp_compiler.compile(PlainGPT(_OF_256).to(device), tp=1)
        torch.manual_seed(1)
        loss = module(ids.to(device), labels=ids.to(device))[0]
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in module.parameters() if x.grad is not None)])
        assert ("dropout_attention" in module.code) is (device == "cuda")
    for here, there in zip(*found, strict=True):
        assert (there.cpu() - here).abs().max() <= 1e-5 * here.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "mixtral"])
def test_simulated_ranks_have_the_gradients_of_one(name: str) -> None:
    size, seed = gpu.SMALL, parity.SEED.cuda()
    with architectures.float64():
        model = architectures.build(name, size).cuda()
        inputs = {key: value.cuda() for key, value in architectures.inputs(name, size).items()}
        found = parity.make_case(model, inputs, seed=seed)
        for tp in (1, 2, 4):
            step = parity.simulate(found, parity.compiled(found, tp=tp), seed)
            assert parity.output_error(step, found) < 1e-10
            assert parity.gradient_error(step.grads, found.grads) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_kernels_of_inductor_have_the_numbers_of_eager_code(name: str) -> None:
    found, exact = inductor.case(name, "cuda")
    for tp in (1, 2):
        record = inductor.measure(found, exact, tp, "cuda")
        assert record.passes, record
        assert record.functions
        assert not record.as_written


@pytest.fixture
def one_of_eight() -> Iterator[None]:
    with fake_group(8):
        yield


def _gpt() -> nn.Module:
    config = GPTConfig(
        vocab_size=1024, num_positions=64, hidden_size=1024, num_layers=2, num_heads=16
    )
    return PlainGPT(config)


def _ids() -> Tensor:
    return torch.arange(64, device="cuda").view(1, 64)


def _train_on(module: Any, ids: Tensor, labels: Tensor, steps: int) -> None:
    for _ in range(steps):
        module(ids, labels=labels)[0].backward()


@pytest.mark.usefixtures("one_of_eight")
@pytest.mark.parametrize(
    ("tp", "options"), [(8, {}), (1, {}), (1, {"backend": "inductor"}), (1, {"cuda_graphs": True})]
)
@pytest.mark.parametrize("wrong", [1024, -1])
def test_a_wrong_id_is_named_and_the_device_lives(
    wrong: int, tp: int, options: dict[str, Any]
) -> None:
    ids = _ids()
    call = (ids,), {"labels": ids}
    module: Any = sp_compiler.compile(_gpt().cuda(), tp=tp, example_inputs=call, **options)
    _train_on(module, ids, ids, steps=2)  # a recorded step is replayed
    bad = ids.clone()
    bad[0, 3] = wrong
    for wrong_call, place in (((bad, ids), "an embedding of 1024"), ((ids, bad), "a loss over")):
        with pytest.raises(IndexError, match=f"index {wrong} is out of range for {place}"):
            _train_on(module, *wrong_call, steps=3)
        torch.cuda.synchronize()
    _train_on(module, ids, ids, steps=1)
    torch.cuda.synchronize()


@pytest.mark.usefixtures("one_of_eight")
def test_weights_from_files_are_sharded_on_their_way(tmp_path: Path) -> None:
    """Of none is the whole on the device."""
    model: Any = _gpt()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    save_model(model, str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        empty = _gpt()
    ids = _ids()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module: Any = sp_compiler.compile(empty, tp=8, example_inputs=((ids,), {"labels": ids}))
    module.load_pretrained(tmp_path)
    for block, loaded in zip(module.blocks, model.blocks, strict=True):
        block.attention.causal_mask = loaded.attention.causal_mask.cuda()  # in no file
    held = sum(parameter.to_local().nbytes for parameter in module.parameters())
    assert held < whole / 4
    assert all(parameter.to_local().is_cuda for parameter in module.parameters())
    assert torch.cuda.max_memory_allocated() - before < held + largest / 4
    _train_on(module, ids, ids, steps=1)
    torch.cuda.synchronize()
