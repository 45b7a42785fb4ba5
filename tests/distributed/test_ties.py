"""Warnings of build_parameter_groups about embeddings without their tie, and about models with few matrices."""

import re
import warnings

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from omn_dist import build_parameter_groups


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.body, self.lm_head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def _llama(tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def _warnings(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_parameter_groups(model)
    return [str(warning.message) for warning in caught]


def _shard_apart(kind: str, apart: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    model = Tied() if kind == "plain" else _llama(True)
    parts = [model.embed, model.lm_head] if kind == "plain" else [model.model.embed_tokens, model.lm_head]
    for part in parts if apart else ():
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _warnings(model)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "transformers"])
def test_an_embedding_and_a_head_that_are_sharded_apart_are_reported(kind: str) -> None:
    names = ("lm_head.weight", "embed.weight" if kind == "plain" else "model.embed_tokens.weight")
    why = "they have equal values" if kind == "plain" else "the model ties them"
    for found in run_ranks(2, _shard_apart, kind, True):
        assert len(found) == 1
        assert found[0].startswith(f"{names[0]} and {names[1]}: found two parameters though {why}, so they are trained apart")
    assert run_ranks(2, _shard_apart, kind, False) == [[], []]


def test_ties_that_hold_and_weights_that_were_never_tied_are_no_news() -> None:
    for model in (Tied(), Tied(tied=False), _llama(True), _llama(False)):
        assert _warnings(model) == []
    with torch.device("meta"):
        assert _warnings(Tied(tied=False)) == []
    zeros = Tied(tied=False)
    nn.init.zeros_(zeros.embed.weight)
    nn.init.zeros_(zeros.lm_head.weight)
    assert _warnings(zeros) == []


def test_a_tie_that_the_model_declares_is_missed_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        model = _llama(True)
        model.lm_head.weight = nn.Parameter(torch.empty(64, 16))
    (found,) = _warnings(model)
    assert "though the model ties them" in found
    del model.all_tied_weights_keys
    (found,) = _warnings(model)
    assert found.startswith("lm_head.weight and model.embed_tokens.weight: found two parameters")
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    assert _warnings(model) == []


def test_a_network_of_convolutions_is_told_how_to_get_muon() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(64, 10))
    (found,) = _warnings(model)
    assert "AdamW updates 96.8% of the elements of inner weights and Muon only 3.2%" in found
    rules = {"convolution": "muon"}
    assert found.endswith(f"to give convolution weights (19,296 elements) to Muon, use rules={rules}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = build_parameter_groups(model, rules=rules)
        build_parameter_groups(model, rules={"convolution": "adamw"})
    on_muon = [name for group in groups if group["algorithm"] == "muon" for name in group["param_names"]]
    assert sorted(on_muon) == ["0.weight", "2.weight", "4.weight"]
    (found,) = _warnings(model[:3])
    assert re.match(r"no matrix for Muon among 4 trainable parameters: all of them are on AdamW; to give convolution", found)


def test_linear_layers_of_a_plain_sequential_are_matrices() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    assert _warnings(model) == []
    muon = build_parameter_groups(model)[0]
    assert (muon["algorithm"], muon["param_names"]) == ("muon", ["0.weight", "2.weight", "4.weight"])
