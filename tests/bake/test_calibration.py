"""The stream of hidden states that calibration measures: what the engine computes, what transformers' layers see, and bad numbers in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from arctool.bake.calibration import stream as room
from arctool.bake.calibration.hessian import damping
from arctool.bake.calibration.stream import Calibration, Measured, Stage, one_thread_per_call
from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.errors import SourceError, StorageError
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor
from arctool.run.kv.blocks import blocks_for
from arctool.run.models.spec import EMBEDDING_KEY, Role
from arctool.run.step import Span, build_step
from arctool.run.weights import load_model

IDS = np.random.default_rng(3).integers(3, 512, (5, 40)).astype(np.int32)
"""More windows than a batch holds; longer than the sliding window of the tiny Mistral; no multiple of the attention's tile."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with one_thread_per_call():
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def stream(checkpoint: Checkpoint, pool: ThreadPoolExecutor, ids: NDArray[np.int32] = IDS, scratch: Path | None = None) -> Calibration:
    """The unquantised model's, before its first layer."""
    norms = {spec.key: checkpoint.tensor(spec.name) for spec in checkpoint.specs if spec.role is Role.NORM}
    made = Calibration(checkpoint.config, norms, checkpoint.weight(EMBEDDING_KEY), ids, pool, scratch)
    made.embed()
    return made


def install(calibration: Calibration, checkpoint: Checkpoint, stage: Stage) -> None:
    for linear in stage.linears:
        calibration.install(linear.key, DenseTensor(checkpoint.tensor(f"{linear.key}.weight")), checkpoint.bias(linear.key))


def through(calibration: Calibration, checkpoint: Checkpoint, layer: int) -> list[Measured]:
    """Carry the stream through a decoder layer; what its stages saw."""
    seen = []
    for stage in calibration.stages(layer):
        measured, inputs, _ = calibration.measure(stage, True)
        assert measured is not None
        seen.append(measured)
        install(calibration, checkpoint, stage)
        calibration.advance(stage, inputs)
    calibration.release(layer)
    return seen


def engines_states(checkpoint: Checkpoint, ids: NDArray[np.int32]) -> list[NDArray[np.float32]]:
    """Hidden states f32 [tokens, hidden] after the embedding and after every layer, as the engine computes one window."""
    model = load_model(checkpoint, default_registry())
    count = blocks_for(len(ids), 16)
    step = build_step([Span(ids.tolist(), 0, range(count), 0)], 16)
    model.rope.reserve(len(ids))
    with torch.inference_mode():
        states = [model.embedding(torch.from_numpy(step.ids))]
        for block in model.blocks:
            states.append(block(states[-1], step, model.rope.at(torch.from_numpy(step.positions))))
    return [values.numpy() for values in states]


def test_the_hidden_states_are_the_engines_after_every_layer(tiny_checkpoint: Path, pool: ThreadPoolExecutor) -> None:
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        wanted = [engines_states(checkpoint, ids) for ids in IDS]
        calibration = stream(checkpoint, pool)
        assert calibration.layers == checkpoint.config.num_layers
        for layer in range(calibration.layers + 1):
            want = np.stack([states[layer] for states in wanted])
            np.testing.assert_allclose(calibration.states, want, rtol=0, atol=2e-5 * np.abs(want).max())
            if layer < calibration.layers:
                through(calibration, checkpoint, layer)
        assert np.abs(want[0] - want[1]).max() > 0.1 * np.abs(want).max(), "windows must not be alike"


@dataclass
class Seen:
    """What a linear layer of transformers read over all windows: E[x xᵀ] f64, and of how many rows."""

    hessian: NDArray[np.float64]
    rows: int


def moments(rows: torch.Tensor) -> Seen:
    x = rows.double().numpy()
    return Seen(x.T @ x / len(x), len(x))


def seen_by_transformers(directory: Path) -> dict[str, Seen]:
    """By key; an expert's rows are those of its own tokens and of so many guests as half its input is wide."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    read: dict[str, list[tuple[torch.Tensor, ...]]] = {}

    def watch(name: str) -> Callable[..., None]:
        def look(module: torch.nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            rows = (given[0].reshape(-1, given[0].shape[-1]), *given[1:])
            read.setdefault(name, []).append(rows)

        return look

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith((".mlp.gate", ".mlp.experts")):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        for ids in IDS:
            model(torch.from_numpy(ids[None].astype(np.int64)))
    whole = {name: [torch.cat(parts) for parts in zip(*calls, strict=True)] for name, calls in read.items()}
    block, parts = ("block_sparse_moe", "w1 w3 w2") if directory.name == "mixtral" else ("mlp", "gate_proj up_proj down_proj")
    found = {}
    for name, (x, *routing) in whole.items():
        if not routing:
            found[name.replace("mlp.gate", f"{block}.gate") if name.endswith(".mlp.gate") else name] = moments(x)
            continue
        experts = model.get_submodule(name)
        for expert in range(experts.num_experts):
            own = (routing[0] == expert).any(-1).nonzero()[:, 0]
            gate, up, down = (f"{name.replace('mlp', block)}.{expert}.{part}" for part in parts.split())
            weights = experts.gate_up_proj[expert].detach()
            for keys, width in (((gate, up), 64), ((down,), weights.shape[0] // 2)):
                guests = torch.arange(width // 2) * IDS.size // (width // 2)
                rows = x[torch.cat((own, guests))]
                if keys == (down,):
                    left, right = (rows @ weights.T).chunk(2, -1)
                    rows = torch.nn.functional.silu(left) * right
                found |= dict.fromkeys(keys, moments(rows))
    return found


def test_every_stage_sees_what_transformers_layers_see(tiny_checkpoint: Path, pool: ThreadPoolExecutor) -> None:
    wanted = seen_by_transformers(tiny_checkpoint)
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        calibration = stream(checkpoint, pool)
        seen: set[str] = set()
        for layer in range(calibration.layers):
            names = [[linear.key for linear in stage.linears] for stage in calibration.stages(layer)]
            for keys, measured in zip(names, through(calibration, checkpoint, layer), strict=True):
                assert (measured.rows, measured.dropped, measured.doubt) == (wanted[keys[0]].rows, 0, None)
                for key in keys:
                    want = wanted[key].hessian
                    np.testing.assert_allclose(measured.hessian, want, rtol=0, atol=3e-5 * np.abs(want).max())
                seen.update(keys)
        if not checkpoint.config.tie_word_embeddings:
            (head,) = calibration.stages(calibration.layers)
            measured, inputs, _ = calibration.measure(head, True)
            assert measured is not None
            assert inputs is None
            want = wanted["lm_head"].hessian
            np.testing.assert_allclose(measured.hessian, want, rtol=0, atol=3e-5 * np.abs(want).max())
            seen.add("lm_head")
    assert seen | {"lm_head"} == set(wanted) | {"lm_head"}
    assert all(seen.rows == IDS.size for key, seen in wanted.items() if ".experts." not in key)


def test_what_is_not_wanted_is_not_measured(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        calibration, measuring = stream(checkpoint, pool), stream(checkpoint, pool)
        for stage in calibration.stages(0):
            seen, inputs, _ = calibration.measure(stage, False)
            assert seen is None
            assert (inputs is None) == (stage.adds is None)
            install(calibration, checkpoint, stage)
            calibration.advance(stage, inputs)
        through(measuring, checkpoint, 0)
    np.testing.assert_array_equal(calibration.states, measuring.states)


def test_states_too_many_for_memory_lie_in_a_file_without_a_name(
    tiny_llama: Path, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        usual = stream(checkpoint, pool, scratch=tmp_path)
        assert not isinstance(usual.states, np.memmap)
        monkeypatch.setattr(room, "IN_MEMORY", usual.states.nbytes - 1)
        mapped = stream(checkpoint, pool, scratch=tmp_path)
        assert isinstance(mapped.states, np.memmap)
        assert not isinstance(stream(checkpoint, pool).states, np.memmap)
        for found, wanted in zip(through(mapped, checkpoint, 0), through(usual, checkpoint, 0), strict=True):
            assert found.hessian.tobytes() == wanted.hessian.tobytes()
    np.testing.assert_array_equal(mapped.states, usual.states)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_layer_keeps_no_weights(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        calibration = stream(checkpoint, pool)
        through(calibration, checkpoint, 0)
        stages = calibration.stages(0)
        assert [len(stage.linears) for stage in stages] == [3, 1, 2, 1]
        assert {linear.weight for stage in stages for linear in stage.linears} == {None}
        with pytest.raises(AssertionError, match=r"model\.layers\.0\.self_attn\.q_proj is used before it is installed"):
            calibration.measure(stages[1], True)


@pytest.mark.parametrize("token", [512, -1, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_refused(tiny_llama: Path, pool: ThreadPoolExecutor, token: int) -> None:
    ids = IDS.copy()
    ids[1, 2] = token
    with open_checkpoint(str(tiny_llama)) as checkpoint, pytest.raises(SourceError, match=f"token {token} is not among the model's 512"):
        stream(checkpoint, pool, ids)


def test_rows_that_are_not_finite_are_dropped_and_counted(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        hurt, without = stream(checkpoint, pool), stream(checkpoint, pool, IDS[[0, 1, 2, 4]])
        hurt.states[3, 25:, 7] = np.nan
        first = through(hurt, checkpoint, 0)
        clean = through(without, checkpoint, 0)
    assert [(seen.rows, seen.dropped) for seen in first[:1]] == [(IDS.size - 15, 15)]
    # A number that is none spreads through its whole tile in the attention, though its weight there is 0.
    assert [(seen.rows, seen.dropped) for seen in first[1:]] == [(IDS.size - 40, 40)] * 3
    for seen, wanted in zip(first[1:], clean[1:], strict=True):
        np.testing.assert_allclose(seen.hessian, wanted.hessian, rtol=1e-4, atol=1e-5 * np.abs(wanted.hessian).max())


@pytest.mark.parametrize(
    ("rows", "dropped", "doubt"),
    [
        (100, 0, None),
        (90, 10, None),
        (89, 11, "11 of 100 calibration rows are not finite when they reach it"),
        (0, 100, "no calibration row reaches it with finite values"),
    ],
)
def test_moments_of_which_too_much_is_missing_are_doubted(rows: int, dropped: int, doubt: str | None) -> None:
    assert Measured(np.eye(2, dtype=np.float32), rows, dropped).doubt == doubt


def test_torch_gets_its_threads_back() -> None:
    torch.set_num_threads(2)

    def fail() -> None:
        with one_thread_per_call():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == 2


def test_beside_the_unquantised_stream_a_stage_knows_how_far_it_has_drifted(tiny_llama: Path, pool: ThreadPoolExecutor) -> None:
    """The change that it asks for, against least squares in f64 over the very rows that both streams read."""
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        stored, truth = stream(checkpoint, pool), stream(checkpoint, pool)
        stored.states += 0.1 * np.random.default_rng(1).standard_normal(stored.states.shape).astype(np.float32)
        for stage, beside in zip(stored.stages(0), truth.stages(0), strict=True):
            lag = (truth.states - stored.states).reshape(IDS.size, -1).astype(np.float64)
            measured, inputs, others = stored.measure(stage, True, (truth, beside))
            assert measured is not None
            assert measured.change is not None
            assert (measured.change.states is None) == (stage.adds is None)
            if inputs is not None and others is not None:
                x, z = (rows.reshape(IDS.size, -1).astype(np.float64) for rows in (inputs, others))
                damped = x.T @ x / IDS.size
                damped += damping(len(damped), IDS.size, 6.0) * np.eye(len(damped)) * np.diag(damped).mean()
                wanted = np.linalg.solve(damped, x.T @ np.concatenate([z - x, lag], axis=1) / IDS.size).T
                found = np.concatenate([measured.change.inputs, measured.change.states])  # type: ignore[list-item]
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())
                assert np.abs(z - x).max() > 0.01
            for calibration, part, rows in ((stored, stage, inputs), (truth, beside, others)):
                install(calibration, checkpoint, part)
                calibration.advance(part, rows)


def test_a_disk_without_room_for_the_states_is_named_before_they_are_mapped(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with holes would be mapped all the same, and kill the process where one cannot be filled."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(room, "IN_MEMORY", 0)
    with open_checkpoint(str(tiny_llama)) as checkpoint, ThreadPoolExecutor(1) as pool:
        mapped = stream(checkpoint, pool, scratch=tmp_path).states
        assert isinstance(mapped, np.memmap)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match=f"{tmp_path}: cannot write: No space left on device; .* bytes are free"):
            stream(checkpoint, pool, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
