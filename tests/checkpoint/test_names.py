"""Module paths of transformers → names under which vLLM looks scales up, in the spelling of the checkpoint."""

import pytest

from calibrate.checkpoint.names import tensor_prefixes
from calibrate.errors import UsageError


def prefixes(modules, tensors):
    return list(tensor_prefixes(modules, tensors).values())


@pytest.mark.parametrize(
    ("module", "tensor", "prefix"),
    [
        ("model.layers.3.self_attn", "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn"),
        ("transformer.h.0.attn", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.attn"),
        ("transformer.h.0.attn", "h.0.attn.c_attn.weight", "h.0.attn.attn"),
        ("transformer.h.0.self_attention", "transformer.h.0.self_attention.query_key_value.weight", "transformer.h.0.self_attention"),
        ("model.layers.3.self_attn", "model.language_model.layers.3.self_attn.q_proj.weight", "model.language_model.layers.3.self_attn"),
        (
            "model.language_model.layers.3.self_attn",
            "language_model.model.layers.3.self_attn.o_proj.weight",
            "language_model.model.layers.3.self_attn",
        ),
        ("model.layers.3.self_attn", "model.layers.3.self_attn.q_proj.weight_packed", "model.layers.3.self_attn"),
        ("gpt_neox.layers.0.attention", "gpt_neox.layers.0.attention.dense.weight", "gpt_neox.layers.0.attention"),
    ],
)
def test_the_name_is_the_checkpoints_own(module, tensor, prefix):
    assert prefixes([module], [tensor, "lm_head.weight"]) == [prefix]


def test_a_vision_tower_with_the_same_tail_is_not_chosen():
    tensors = [
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.vision_tower.layers.0.self_attn.q_proj.weight",
        "audio_tower.layers.0.self_attn.q_proj.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
    ]
    assert prefixes(["model.layers.0.self_attn"], tensors) == ["language_model.model.layers.0.self_attn"]
    assert prefixes(["model.language_model.layers.0.self_attn"], tensors) == ["language_model.model.layers.0.self_attn"]


def test_layer_1_is_not_layer_11():
    tensors = [f"model.layers.{index}.self_attn.q_proj.weight" for index in (1, 11, 21)]
    assert prefixes(["model.layers.1.self_attn"], tensors) == ["model.layers.1.self_attn"]


def test_an_unknown_module_and_an_ambiguous_one_are_errors():
    with pytest.raises(UsageError, match=r"no tensors of attention module model.layers.9.self_attn"):
        prefixes(["model.layers.9.self_attn"], ["model.layers.1.self_attn.q_proj.weight"])
    with pytest.raises(UsageError, match=r"could be any of a.layers.0.attn_x, b.layers.0.attn_x"):
        prefixes(["model.layers.0.attn_x"], ["a.layers.0.attn_x.q.weight", "b.layers.0.attn_x.q.weight"])
