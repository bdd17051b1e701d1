import pytest

from calibrate.engines.names import match_layers, split_scale_name


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("model.layers.0.self_attn.k_scale", ("model.layers.0.self_attn", "k")),
        ("transformer.h.11.attn.attn.q_scale", ("transformer.h.11.attn.attn", "q")),
        ("backbone.layers.7.mixer.v_proj.v_scale", ("backbone.layers.7.mixer", "v")),
        ("model.layers.0.self_attn.k_proj.weight_scale", None),
        ("model.layers.0.self_attn.k_proj.v_scale", None),
        ("k_scale", None),
    ],
)
def test_scale_names(name, split):
    assert split_scale_name(name) == split


@pytest.mark.parametrize(
    ("prefix", "module"),
    [
        ("model.layers.3.self_attn", "model.layers.3.self_attn.attn"),
        ("transformer.h.3.attn.attn", "transformer.h.3.attn.attn"),
        ("gpt_neox.layers.3.attention", "gpt_neox.layers.3.attention.attn"),
        ("model.language_model.layers.3.self_attn", "language_model.model.layers.3.self_attn.attn"),
        ("backbone.layers.3.mixer", "model.layers.3.mixer.attn"),
    ],
)
def test_layer_finds_its_module(prefix, module):
    others = [module.replace("3", number) for number in ("13", "2", "30")]
    assert match_layers([prefix], [*others, module]) == {prefix: module}


def test_suffix_decides_between_towers():
    modules = ["vision.encoder.layers.0.attn", "lm.model.layers.0.self_attn.attn"]
    assert match_layers(["model.layers.0.self_attn"], modules) == {"model.layers.0.self_attn": modules[1]}


def test_ambiguity_is_no_match():
    assert match_layers(["x.layers.0.self_attn"], ["a.layers.0.self_attn.attn", "b.layers.0.self_attn.attn"]) == {}
    assert match_layers(["a.layers.0.self_attn", "b.layers.0.self_attn"], ["c.layers.0.self_attn.attn"]) == {}


def test_another_index_never_matches():
    assert match_layers(["model.layers.1.self_attn"], ["model.layers.0.self_attn.attn"]) == {}
