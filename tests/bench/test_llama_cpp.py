"""The peer, played by a stand-in: its quantiser gets what it documents, its engine reads our windows, and what it refuses is said."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from llama_cpp_stand_in import StandIn
from numpy.typing import NDArray
from tiny_gguf import gguf_name, write_gguf

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bench import llama_cpp
from arctool.bench.importance import importance
from arctool.bench.llama_cpp import Peer, find_peer, opened, requantise
from arctool.errors import SourceError, StorageError, UsageError, VerificationError
from arctool.kernels.registry import default_registry
from arctool.run.divergence import compare, reference
from arctool.run.weights import load_model

WINDOWS = tuple(tuple(int(i) for i in np.random.default_rng(seed).integers(3, 512, 40)) for seed in range(3))


@pytest.fixture
def stand_in(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(tiny_llama)
    monkeypatch.setitem(sys.modules, "llama_cpp", made.module())
    return made


@pytest.fixture
def peer(stand_in: StandIn) -> Peer:
    found = find_peer(2)
    assert isinstance(found, Peer)
    return found


@pytest.fixture(scope="module")
def gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


@pytest.fixture(scope="module")
def measured(tiny_llama: Path) -> dict[str, NDArray[np.float32]]:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        return importance(checkpoint, np.array(WINDOWS, np.int32), jobs=2)


def test_importance_is_the_mean_square_of_what_every_layer_of_transformers_reads(
    tiny_llama: Path, measured: dict[str, NDArray[np.float32]]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].double()))
    with torch.inference_mode():
        model(torch.tensor(WINDOWS))
    wanted = {gguf_name(f"{name}.weight"): inputs.square().mean(dim=(0, 1)).numpy() for name, inputs in seen.items()}
    assert len(wanted) == 14
    assert measured.keys() == wanted.keys()
    for name, values in measured.items():
        assert values.max() > 2 * values.min()
        np.testing.assert_allclose(values, wanted[name], rtol=1e-4)


def test_importance_that_is_not_finite_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        read = checkpoint.tensor
        spoilt = "model.layers.0.mlp.up_proj.weight"
        monkeypatch.setattr(checkpoint, "tensor", lambda name: read(name) * np.float32(1e30 if name == spoilt else 1))
        with pytest.raises(VerificationError, match=r"layers\.0\.mlp\.down_proj: .*(not finite|no calibration row)"):
            importance(checkpoint, np.array(WINDOWS, np.int32), jobs=1)


def test_the_quantiser_reads_every_importance_up_to_the_nameless_end(
    stand_in: StandIn, peer: Peer, gguf: Path, measured: dict[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    requantise(peer, gguf, tmp_path / "out.gguf", "Q4_K_M", measured)
    assert stand_in.imatrix == {name: values.tolist() for name, values in measured.items()}
    assert stand_in.quantised == [(15, 2, True)]
    requantise(peer, gguf, tmp_path / "out.gguf", "Q2_K")
    assert stand_in.imatrix == {}
    assert stand_in.quantised[1:] == [(10, 2, True)]


def test_a_matrix_without_importance_is_refused_rather_than_quantised_without_it(
    stand_in: StandIn, peer: Peer, gguf: Path, measured: dict[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    lacking = {name: values for name, values in measured.items() if name != "blk.1.ffn_up.weight"}
    narrow = measured | {"blk.1.ffn_up.weight": measured["blk.1.ffn_up.weight"][:-1]}
    broken = measured | {"blk.1.ffn_up.weight": measured["blk.1.ffn_up.weight"] * np.float32(np.nan)}
    for given, words in ((lacking, "no importance"), (narrow, "importance of 64 inputs, found \\[63\\]"), (broken, "or not finite")):
        with pytest.raises(SourceError, match=rf"tiny\.gguf: blk\.1\.ffn_up\.weight: .*{words}"):
            requantise(peer, gguf, tmp_path / "out.gguf", "Q4_K_M", given)
    assert stand_in.quantised == []


def test_a_quantiser_that_fails_is_quoted(stand_in: StandIn, peer: Peer, gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Q9_X: no file type of llama\.cpp 0\.0\.stand-in"):
        requantise(peer, gguf, tmp_path / "out.gguf", "Q9_X")
    stand_in.code = 1
    with pytest.raises(SourceError, match=r"tiny\.gguf: .* failed at Q2_K with code 1; it said: .*failed to quantize: no such luck$"):
        requantise(peer, gguf, tmp_path / "out.gguf", "Q2_K")
    stand_in.code, stand_in.writes = 0, False
    with pytest.raises(StorageError, match=r"out\.gguf: .*left no file"):
        requantise(peer, gguf, tmp_path / "out.gguf", "Q2_K")


def test_its_engine_reads_every_window_from_an_empty_context(
    stand_in: StandIn, peer: Peer, gguf: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "CHUNK", 16)  # 39 rows come in blocks of 16, 16 and 7
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        base = reference(load_model(checkpoint, default_registry()), WINDOWS)
    with opened(peer, gguf, 64) as model:
        found = compare(base, model, WINDOWS)
        assert stand_in.open == 1
    assert (found.kl, found.same_top1, found.tokens) == (0.0, 1.0, 3 * 39)
    assert found.perplexity == found.base_perplexity
    assert model.ran == {"llama.cpp.tokens": 3 * 39}
    assert stand_in.open == 0
    wanted = {"n_ctx": 64, "logits_all": True, "type_k": 0, "type_v": 0, "n_threads": 2, "n_threads_batch": 2}
    assert wanted.items() <= stand_in.options.items()
    stand_in.shift = 3.0
    with opened(peer, gguf, 64) as model:
        assert compare(base, model, WINDOWS).kl > 1e-3


def test_a_model_is_closed_when_its_reader_fails(stand_in: StandIn, peer: Peer, gguf: Path) -> None:
    with pytest.raises(KeyError), opened(peer, gguf, 64):
        raise KeyError
    assert stand_in.open == 0


def test_a_file_that_its_engine_cannot_load_is_named(stand_in: StandIn, peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    stand_in.say("bad magic\n")
    with (
        pytest.raises(SourceError, match=r"bad\.gguf: llama\.cpp cannot load it: .*; it said: bad magic"),
        opened(peer, tmp_path / "bad.gguf", 64),
    ):
        pass


def test_what_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "llama_cpp" in str(find_peer())
    assert not isinstance(find_peer(), Peer)


def test_only_its_last_words_are_kept(stand_in: StandIn, peer: Peer) -> None:
    assert peer.last_words == "nothing"
    for number in range(1000):
        stand_in.say(f"line {number}\n")
    assert peer.last_words.endswith("line 998 line 999")
    assert len(peer.last_words) <= 200
    assert (peer.version, peer.system) == ("0.0.stand-in", "AVX = 1 |")
