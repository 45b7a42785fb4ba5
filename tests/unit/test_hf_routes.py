"""Routes of Hugging Face models: exact tables, and splits of fused weights checked by forward."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omn_dist import build_parameter_groups
from omn_dist.cli import main
from omn_dist.models.targets import hf_model, meta_model
from omn_dist.plan.geometry.layout import REPLICATE, Layout, Region
from omn_dist.plan.geometry.views import View
from omn_dist.roles import route_parameters

pytest.importorskip("transformers", reason="Hugging Face models need transformers: pip install 'omn-dist[hf]'")

# Norms and biases are left out: AdamW without decay, all of them. A star stands for a number.
TABLES: dict[str, str] = {
    "gpt2": """
        transformer.wte.weight: embedding adamw no decay
        transformer.wpe.weight: embedding adamw no decay
        transformer.h.*.attn.c_attn.weight: projection muon (192, 64) q 64, k 64, v 64; transposed
        transformer.h.*.attn.c_proj.weight: projection muon (64, 64); transposed
        transformer.h.*.mlp.c_fc.weight: projection muon (256, 64); transposed
        transformer.h.*.mlp.c_proj.weight: projection muon (64, 256); transposed
    """,
    "llama": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate_proj.weight: projection muon
        model.layers.*.mlp.up_proj.weight: projection muon
        model.layers.*.mlp.down_proj.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "mistral": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate_proj.weight: projection muon
        model.layers.*.mlp.up_proj.weight: projection muon
        model.layers.*.mlp.down_proj.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "qwen2": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate_proj.weight: projection muon
        model.layers.*.mlp.up_proj.weight: projection muon
        model.layers.*.mlp.down_proj.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "qwen3": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate_proj.weight: projection muon
        model.layers.*.mlp.up_proj.weight: projection muon
        model.layers.*.mlp.down_proj.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "qwen3_moe": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.experts.gate_up_proj: expert muon (4, 2, 32, 64)
        model.layers.*.mlp.experts.down_proj: expert muon (4, 64, 32)
        model.layers.*.mlp.gate.weight: router adamw
        lm_head.weight: head adamw no decay
    """,
    "qwen3_next": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.linear_attn.A_log: scalar adamw no decay
        model.layers.*.linear_attn.conv1d.weight: convolution adamw
        model.layers.*.linear_attn.in_proj_qkvz.weight: projection muon \
(2, 96, 64) q 16, k 16, v 32, gate 32 on AdamW; axes 0 joined
        model.layers.*.linear_attn.in_proj_ba.weight: scalar adamw
        model.layers.*.linear_attn.out_proj.weight: projection muon
        model.layers.*.mlp.gate.weight: router adamw
        model.layers.*.mlp.experts.gate_up_proj: expert muon (4, 2, 32, 64)
        model.layers.*.mlp.experts.down_proj: expert muon (4, 64, 32)
        model.layers.*.mlp.shared_expert.gate_proj.weight: expert muon
        model.layers.*.mlp.shared_expert.up_proj.weight: expert muon
        model.layers.*.mlp.shared_expert.down_proj.weight: expert muon
        model.layers.*.mlp.shared_expert_gate.weight: gate adamw
        model.layers.*.self_attn.q_proj.weight: projection muon (4, 32, 64) q 16, gate 16 on AdamW; axes 0 joined
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "gemma": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate_proj.weight: projection muon
        model.layers.*.mlp.up_proj.weight: projection muon
        model.layers.*.mlp.down_proj.weight: projection muon
    """,
    "phi3": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.self_attn.qkv_proj.weight: projection muon (128, 64) q 64, k 32, v 32
        model.layers.*.mlp.gate_up_proj.weight: projection muon (2, 96, 64)
        model.layers.*.mlp.down_proj.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "gpt_neox": """
        gpt_neox.embed_in.weight: embedding adamw no decay
        gpt_neox.layers.*.attention.query_key_value.weight: projection muon (4, 48, 64) q 16, k 16, v 16; axes 0 joined
        gpt_neox.layers.*.attention.dense.weight: projection muon
        gpt_neox.layers.*.mlp.dense_h_to_4h.weight: projection muon
        gpt_neox.layers.*.mlp.dense_4h_to_h.weight: projection muon
        lm_head.weight: head adamw no decay
    """,
    "mixtral": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate.weight: router adamw
        model.layers.*.mlp.experts.gate_up_proj: expert muon (4, 2, 96, 64)
        model.layers.*.mlp.experts.down_proj: expert muon (4, 64, 96)
        lm_head.weight: head adamw no decay
    """,
    "deepseek_v3": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.q_a_proj.weight: projection muon
        model.layers.*.self_attn.q_b_proj.weight: projection muon (4, 24, 24)
        model.layers.*.self_attn.kv_a_proj_with_mqa.weight: projection muon (24, 64) latent 16, shared_key 8
        model.layers.*.self_attn.kv_b_proj.weight: projection muon (4, 28, 16) k 16, v 12
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.gate_proj.weight: projection muon
        model.layers.*.mlp.up_proj.weight: projection muon
        model.layers.*.mlp.down_proj.weight: projection muon
        model.layers.*.mlp.experts.gate_up_proj: expert muon (4, 2, 32, 64)
        model.layers.*.mlp.experts.down_proj: expert muon (4, 64, 32)
        model.layers.*.mlp.gate.weight: router adamw
        model.layers.*.mlp.shared_experts.gate_proj.weight: expert muon
        model.layers.*.mlp.shared_experts.up_proj.weight: expert muon
        model.layers.*.mlp.shared_experts.down_proj.weight: expert muon
        lm_head.weight: head adamw no decay
    """,
    "gpt_oss": """
        model.embed_tokens.weight: embedding adamw no decay
        model.layers.*.self_attn.sinks: scalar adamw no decay
        model.layers.*.self_attn.q_proj.weight: projection muon
        model.layers.*.self_attn.k_proj.weight: projection muon
        model.layers.*.self_attn.v_proj.weight: projection muon
        model.layers.*.self_attn.o_proj.weight: projection muon
        model.layers.*.mlp.router.weight: router adamw
        model.layers.*.mlp.experts.gate_up_proj: expert muon (4, 96, 2, 64) gate 1, up 1; axes 1 joined; transposed
        model.layers.*.mlp.experts.down_proj: expert muon (4, 64, 96); transposed
        lm_head.weight: head adamw no decay
    """,
    "mamba": """
        backbone.embeddings.weight: embedding adamw no decay
        backbone.layers.*.mixer.A_log: scalar adamw no decay
        backbone.layers.*.mixer.D: scalar adamw no decay
        backbone.layers.*.mixer.conv1d.weight: convolution adamw
        backbone.layers.*.mixer.in_proj.weight: projection muon (192, 64) x 96, gate 96 on AdamW
        backbone.layers.*.mixer.x_proj.weight: projection muon (22, 96) dt 6 on AdamW, B 8, C 8
        backbone.layers.*.mixer.dt_proj.weight: scalar adamw
        backbone.layers.*.mixer.out_proj.weight: projection muon
    """,
    "vit": """
        vit.embeddings.cls_token: vector adamw no decay
        vit.embeddings.position_embeddings: position adamw no decay
        vit.embeddings.patch_embeddings.projection.weight: convolution adamw
        vit.layers.*.attention.q_proj.weight: projection muon
        vit.layers.*.attention.k_proj.weight: projection muon
        vit.layers.*.attention.v_proj.weight: projection muon
        vit.layers.*.attention.o_proj.weight: projection muon
        vit.layers.*.mlp.fc1.weight: projection muon
        vit.layers.*.mlp.fc2.weight: projection muon
        classifier.weight: head adamw no decay
    """,
    "t5": """
        shared.weight: embedding adamw no decay
        encoder.block.*.layer.*.SelfAttention.q.weight: projection muon
        encoder.block.*.layer.*.SelfAttention.k.weight: projection muon
        encoder.block.*.layer.*.SelfAttention.v.weight: projection muon
        encoder.block.*.layer.*.SelfAttention.o.weight: projection muon
        encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight: embedding adamw no decay
        encoder.block.*.layer.*.DenseReluDense.wi.weight: projection muon
        encoder.block.*.layer.*.DenseReluDense.wo.weight: projection muon
        decoder.block.*.layer.*.SelfAttention.q.weight: projection muon
        decoder.block.*.layer.*.SelfAttention.k.weight: projection muon
        decoder.block.*.layer.*.SelfAttention.v.weight: projection muon
        decoder.block.*.layer.*.SelfAttention.o.weight: projection muon
        decoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight: embedding adamw no decay
        decoder.block.*.layer.*.EncDecAttention.q.weight: projection muon
        decoder.block.*.layer.*.EncDecAttention.k.weight: projection muon
        decoder.block.*.layer.*.EncDecAttention.v.weight: projection muon
        decoder.block.*.layer.*.EncDecAttention.o.weight: projection muon
        decoder.block.*.layer.*.DenseReluDense.wi.weight: projection muon
        decoder.block.*.layer.*.DenseReluDense.wo.weight: projection muon
    """,
    "whisper": """
        model.encoder.conv1.weight: convolution adamw
        model.encoder.conv2.weight: convolution adamw
        model.encoder.layers.*.self_attn.k_proj.weight: projection muon
        model.encoder.layers.*.self_attn.v_proj.weight: projection muon
        model.encoder.layers.*.self_attn.q_proj.weight: projection muon
        model.encoder.layers.*.self_attn.out_proj.weight: projection muon
        model.encoder.layers.*.fc1.weight: projection muon
        model.encoder.layers.*.fc2.weight: projection muon
        model.decoder.embed_tokens.weight: embedding adamw no decay
        model.decoder.embed_positions.weight: embedding adamw no decay
        model.decoder.layers.*.self_attn.k_proj.weight: projection muon
        model.decoder.layers.*.self_attn.v_proj.weight: projection muon
        model.decoder.layers.*.self_attn.q_proj.weight: projection muon
        model.decoder.layers.*.self_attn.out_proj.weight: projection muon
        model.decoder.layers.*.encoder_attn.k_proj.weight: projection muon
        model.decoder.layers.*.encoder_attn.v_proj.weight: projection muon
        model.decoder.layers.*.encoder_attn.q_proj.weight: projection muon
        model.decoder.layers.*.encoder_attn.out_proj.weight: projection muon
        model.decoder.layers.*.fc1.weight: projection muon
        model.decoder.layers.*.fc2.weight: projection muon
    """,
}


@pytest.mark.parametrize("model_type", TABLES)
def test_every_parameter_of_a_model_is_where_it_belongs(model_type: str) -> None:
    model = meta_model(f"hf:{model_type}")
    routes = route_parameters(model)
    found, left_out = [], 0
    for route in routes:
        assert route.reason
        decay, view = "" if route.has_decay else " no decay", "" if route.view is None else f" {route.view}"
        if route.role in ("norm", "bias"):
            assert (route.algorithm, decay) == ("adamw", " no decay")
            assert re.search(r"norm|ln_|bias", route.name), route.name
            left_out += 1
        else:
            found.append(re.sub(r"\b\d+\b", "*", route.name) + f": {route.role} {route.algorithm}{decay}{view}")
    assert list(dict.fromkeys(found)) == [line.strip() for line in TABLES[model_type].strip().splitlines()]
    assert (
        len(routes) == len(found) + left_out == len({id(parameter) for parameter in model.parameters() if parameter.requires_grad})
    )


@pytest.mark.parametrize("model_type", TABLES)
def test_groups_hold_every_parameter_once(model_type: str) -> None:
    model = meta_model(f"hf:{model_type}")
    groups = build_parameter_groups(model, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for group in groups:
        plain = {key: value for key, value in group.items() if key != "params"}
        assert json.loads(json.dumps(plain)).keys() == plain.keys()
        view = View.from_group(group)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if view is not None:
                view.check(name, parameter.shape)
                rows = sum(block.num_rows for block in view.row_sets)
                assert rows * view.shape[-1] == parameter.numel()


# --- what forward says ----------------------------------------------------------------------------

Change = Callable[[nn.Module], None]


def _regions(view: View, shape: tuple[int, ...]) -> dict[str, tuple[Region, ...]]:
    """Regions of a parameter by label; those that AdamW updates have the label ``adamw``."""
    layout = Layout(shape, (1,), (REPLICATE,))
    regions = {matrix.name: matrix.region for matrix in view.matrices("", layout)}
    return {**regions, "[adamw]": view.adamw_region(layout)}


def _zero(names: str, label: str) -> Change:
    """Zero the regions whose label matches, in all parameters whose names match."""

    @torch.no_grad()
    def change(model: nn.Module) -> None:
        count = 0
        parameters = dict(model.named_parameters())
        for route in route_parameters(model):
            if route.view is not None and re.search(names, route.name):
                stored: Tensor = parameters[route.name]
                flat = stored.view(-1, stored.shape[-1])
                for name, regions in _regions(route.view, route.shape).items():
                    if re.fullmatch(label, name.strip("[]")):
                        count += 1
                        for region in regions:
                            rows, columns = (region.row, region.num_rows), (region.column, region.num_columns)
                            flat.narrow(0, *rows).narrow(1, *columns).zero_()
        assert count, (names, label)

    return change


def _zero_whole(names: str) -> Change:
    @torch.no_grad()
    def change(model: nn.Module) -> None:
        found = [parameter for name, parameter in model.named_parameters() if re.search(names, name)]
        assert found, names
        for parameter in found:
            parameter.zero_()

    return change


_SPLITS = [
    # Without queries attention is uniform, as it is without keys; without values it adds nothing.
    ("gpt2", _zero("c_attn", "q"), _zero("c_attn", "k")),
    ("gpt2", _zero("c_attn", "v"), _zero_whole("attn.c_proj")),
    ("phi3", _zero("qkv", "q"), _zero("qkv", "k")),
    ("phi3", _zero("qkv", "v"), _zero_whole("o_proj")),
    ("phi3", _zero("gate_up", "0"), _zero("gate_up", "1")),
    ("gpt_neox", _zero("query_key_value", "q"), _zero("query_key_value", "k")),
    ("gpt_neox", _zero("query_key_value", "v"), _zero_whole("attention.dense.weight")),
    ("bloom", _zero("query_key_value", "q"), _zero("query_key_value", "k")),
    ("bloom", _zero("query_key_value", "v"), _zero_whole("attention.dense.weight")),
    ("qwen3_next", _zero("q_proj", r"q"), _zero_whole("k_proj")),
    # A gate of zero halves the output of attention (not tested here), and closes linear attention.
    ("qwen3_next", _zero("in_proj_qkvz", "adamw"), _zero("in_proj_qkvz", "v")),
    ("qwen3_next", _zero("in_proj_qkvz", "adamw"), _zero_whole("linear_attn.out_proj")),
    ("qwen3_moe", _zero("experts.gate_up", r"\d+\.0"), _zero("experts.gate_up", r"\d+\.1")),
    ("gpt_oss", _zero("experts.gate_up_proj$", r"\d+\.gate"), _zero_whole("experts.down_proj$")),
    ("llama4_text", _zero("experts.gate_up", r"\d+\.0"), _zero("experts.gate_up", r"\d+\.1")),
    ("deepseek_v3", _zero("kv_b_proj", r"\d+\.v"), _zero_whole("o_proj")),
    ("mamba", _zero("in_proj", "adamw"), _zero_whole("out_proj")),
    ("mamba", _zero("x_proj", "B"), _zero("x_proj", "C")),
]


@pytest.mark.parametrize(("model_type", "one", "other"), _SPLITS, ids=[f"{index}-{case[0]}" for index, case in enumerate(_SPLITS)])
def test_blocks_are_what_forward_makes_of_them(model_type: str, one: Change, other: Change) -> None:
    torch.set_num_threads(1)
    config: Any = meta_model(f"hf:{model_type}").config
    tokens = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1))
    outputs = []
    for change in (one, other, lambda model: None):
        torch.manual_seed(0)
        model = hf_model(config, "cpu").eval()
        with torch.no_grad():
            # Weights are large, so that every region matters. Biases would hide a missing region.
            for name, parameter in model.named_parameters():
                if re.search(r"bias$", name):
                    parameter.zero_()
                elif parameter.ndim > 1:
                    parameter.mul_(5)
            change(model)
            outputs.append(model(tokens).logits)
    scale = outputs[2].std()
    assert torch.allclose(outputs[0], outputs[1], atol=float(1e-4 * scale))
    assert not torch.allclose(outputs[0], outputs[2], atol=float(1e-2 * scale))


# --- the command ----------------------------------------------------------------------------------


def test_routes_as_json_of_a_model_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", "hf:qwen3", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(found) for found in objects] == [["name", "shape", "role", "algorithm", "view", "reason"]] * len(objects)
    by_name = {found["name"]: found for found in objects}
    assert by_name["model.embed_tokens.weight"]["algorithm"] == "adamw"
    assert by_name["model.layers.0.mlp.gate_proj.weight"]["algorithm"] == "muon"
    assert main(["routes", "hf:Phi3Config", "--json"]) == 0
    views = [json.loads(line)["view"] for line in capsys.readouterr().out.splitlines()]
    assert {"muon_shape": [2, 96, 64]} in views


def test_routes_of_a_config_file_in_full_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    meta_model("hf:llama").config.save_pretrained(tmp_path)
    for target in (tmp_path / "config.json", tmp_path):
        assert main(["routes", str(target), "--all", "--picture", str(tmp_path / "roles.svg")]) == 0
        output = capsys.readouterr().out
        assert re.search(r"lm_head\.weight +128 x 64 +head +AdamW +- +output head", output)
        assert re.search(r"projection +Muon +yes +28 +28 ", output)
    assert (tmp_path / "roles.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("target", "message"),
    [("hf:qwenn3", "did you mean 'qwen3'"), ("hf:NoneSuchConfig", "no such configuration class"), ("absent.json", "cannot read")],
)
def test_targets_that_are_not_there(capsys: pytest.CaptureFixture[str], target: str, message: str) -> None:
    assert main(["routes", target]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_fused_projection_of_unknown_order_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    model = meta_model("hf:codegen")
    with pytest.warns(UserWarning, match=r"4 of \d+ parameters hold several matrices.*attn.qkv_proj.weight.*declare_view"):
        build_parameter_groups(model)
    assert main(["routes", "hf:codegen"]) == 0
    assert "qkv_proj.weight is on AdamW" in capsys.readouterr().err
