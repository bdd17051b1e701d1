"""Configs made tiny by rule: mechanisms stay, sizes go."""

import pytest
from transformers import AutoConfig

from calibrate.families.shrink import HEAD_DIM, HIDDEN, VOCAB, WINDOW, tiny_fields
from calibrate.families.tiny import tiny_config, tiny_model
from calibrate.model import probe_layout


def fields_of(kind: str, **changes) -> dict:
    return tiny_fields(AutoConfig.for_model(kind, **changes).to_dict(), AutoConfig.for_model(kind).to_dict())


def test_only_what_differs_from_the_classes_defaults_is_written():
    fields = fields_of("llama", attention_bias=True, num_key_value_heads=8)
    assert fields["attention_bias"] is True
    assert (fields["hidden_size"], fields["num_attention_heads"], fields["num_key_value_heads"]) == (HIDDEN, 4, 2)
    assert (fields["vocab_size"], fields["head_dim"], fields["num_hidden_layers"]) == (VOCAB, HEAD_DIM, 2)
    assert not {"rms_norm_eps", "hidden_act", "model_type", "transformers_version", "dtype", "rope_parameters"} & set(fields)


@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(32, 32, 4), (32, 8, 2), (32, 1, 1), (71, 71, 4)])
def test_grouped_and_single_kv_heads_stay_what_they_are(heads, kv_heads, expected):
    small = tiny_fields({"num_attention_heads": heads, "num_key_value_heads": kv_heads}, {})
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, expected)


def test_every_kind_of_layer_stays_and_lists_of_layers_are_cut_alike():
    fields = fields_of("gemma3_text")
    assert fields["num_hidden_layers"] == 6  # five sliding ones, then the first full one
    assert fields["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert fields["sliding_window"] == WINDOW
    layout = probe_layout(tiny_model(tiny_config("gemma3_text", fields)))
    assert [layer.sliding_window for layer in layout.layers] == [WINDOW] * 5 + [None]


def test_layers_that_share_a_cache_still_do():
    fields = fields_of("gemma3n_text")
    layout = probe_layout(tiny_model(tiny_config("gemma3n_text", fields)))
    readers = [layer for layer in layout.layers if not layer.writes]
    assert len(readers) == fields["num_kv_shared_layers"] == len(layout.layers) // 2


def test_latent_attention_stays_latent():
    assert all(layer.latent for layer in probe_layout(tiny_model(tiny_config("deepseek_v3", fields_of("deepseek_v3")))).layers)


def test_longrope_tables_go_and_yarn_stays():
    long = tiny_fields({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}}, {})
    assert long["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0}
    assert tiny_fields({"rope_parameters": yarn}, {})["rope_parameters"] == yarn


def test_token_ids_lie_in_the_vocabulary():
    small = tiny_fields({"bos_token_id": 151643, "eos_token_id": [151645, 151643], "image_token_id": 262144, "video_token_id": 262145}, {})
    assert (small["bos_token_id"], small["eos_token_id"]) == (1, 2)
    assert small["image_token_id"] != small["video_token_id"]
    assert all(0 <= small[name] < VOCAB for name in ("image_token_id", "video_token_id"))


def test_parts_of_multimodal_configs_are_shrunk_too():
    fields = fields_of("gemma3")
    assert fields["text_config"]["num_hidden_layers"] == 6
    assert fields["vision_config"]["hidden_size"] == HIDDEN
