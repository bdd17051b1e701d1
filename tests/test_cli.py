"""The command line in this process: flows, --json, exit codes, and what every unusable input gets."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from calibrate.cli import main
from calibrate.errors import UsageError
from calibrate.scales import Scales
from tests.checkpoint.conftest import add_foreign_scales, snapshot
from tests.planted import planted
from tests.tiny import edit_config, tiny_checkpoint, tiny_tokenizer

SHORT = ["--samples", "4", "--sequence-length", "32"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "rows.jsonl"
    rng = random.Random(0)
    lines = ["".join(rng.choices("abcdefgh ijklm nopq", k=60)) for _ in range(8)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture
def source(llama, tmp_path):
    """A copy of the tiny llama, to be damaged."""
    return shutil.copytree(llama, tmp_path / "model")


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def ok(*args):
    """The JSON that a command prints; no NaN or Infinity in it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr or result.exception
    return json.loads(result.stdout, parse_constant=refuse)


@pytest.fixture
def refused(tmp_path):
    """The one line that a command is refused with; nothing under tmp_path has changed."""

    def call(*args, code: int = 2) -> str:
        before = snapshot(tmp_path)
        result = invoke(*args)
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code == code
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert [line for line in lines if line.startswith("error:")] == [lines[-1]], result.stderr
        assert "Traceback" not in result.stderr
        assert snapshot(tmp_path) == before
        return lines[-1]

    return call


@pytest.fixture
def run_refused(refused, corpus, tmp_path):
    """`run` and `collect` on a model, both refused with the same line."""

    def call(model, *args, data=corpus) -> str:
        rest = (model, "--data", data, *SHORT, "--device", "cpu", *args)
        line = refused("run", *rest, "--output", tmp_path / "out", "--no-verify")
        assert refused("collect", *rest, "--output", tmp_path / "s.safetensors") == line
        return line

    return call


# ---- flows ----


def test_run_inspect_and_another_policy_by_the_steps(llama, corpus, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    job = ok("run", llama, "--data", corpus, *SHORT, "--output", out, "--no-verify")
    assert job["output"] == str(out)
    assert job["readback"] is None
    assert job["summary"]["k"]["layers"] == 3
    seen = ok("inspect", out)
    assert seen["counted"]["tokens"] == 4 * 32
    assert len(seen["rows"]) == 9
    assert job["options"] == seen["options"]
    kept = out / "kv_calibration" / "statistics.safetensors"
    solved = ok("solve", kept, "--output", tmp_path / "amax.safetensors", "--policy", "amax", "--granularity", "head", "--margin", "1.5")
    assert solved["options"]["policy"] == "amax"
    assert len(solved["layers"][0]["q"]) == 4
    written = ok("write", tmp_path / "amax.safetensors", "--model", llama, "--output", other, "--statistics", kept)
    assert len(written["scales"]) == 9
    assert ok("inspect", other)["options"]["policy"] == "amax"
    again = ok("inspect", kept, "--policy", "amax", "--margin", "1.5")
    assert [row["amax"] for row in again["rows"]] == [row["amax"] for row in seen["rows"]]


def test_the_steps_give_what_run_gives(llama, corpus, tmp_path):
    ok("run", llama, "--data", corpus, *SHORT, "--output", tmp_path / "whole", "--no-verify")
    ok("collect", llama, "--data", corpus, *SHORT, "--output", tmp_path / "s.safetensors")
    ok("solve", tmp_path / "s.safetensors", "--output", tmp_path / "scales.safetensors")
    ok("write", tmp_path / "scales.safetensors", "--model", llama, "--output", tmp_path / "steps", "--statistics", tmp_path / "s.safetensors")
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "steps")


def test_merging_two_collections_in_either_order_gives_the_same_bytes(llama, corpus, tmp_path):
    paths = [tmp_path / f"{seed}.safetensors" for seed in (1, 2)]
    for seed, path in enumerate(paths):
        ok("collect", llama, "--data", "random", *SHORT, "--seed", seed, "--output", path)
    merged = ok("merge", *paths, "--output", tmp_path / "ab.safetensors")
    assert merged["counted"]["tokens"] == 2 * 4 * 32
    ok("merge", *reversed(paths), "--output", tmp_path / "ba.safetensors")
    assert (tmp_path / "ab.safetensors").read_bytes() == (tmp_path / "ba.safetensors").read_bytes()


def test_a_calibrated_checkpoint_is_observed_without_its_old_scales(llama, corpus, tmp_path):
    first = ok("run", llama, "--data", corpus, *SHORT, "--output", tmp_path / "first", "--no-verify")
    again = ok("run", tmp_path / "first", "--data", corpus, *SHORT, "--output", tmp_path / "again", "--no-verify")
    assert again["summary"] == first["summary"]


def test_tables_are_printed_for_people(llama, corpus, tmp_path):
    out = tmp_path / "out[/b]"  # looks like markup
    result = invoke("run", llama, "--data", corpus, *SHORT, "--output", out, "--no-verify")
    assert result.exit_code == 0, result.stderr
    assert "not verified" in result.stdout
    for command in (["inspect", out], ["solve", out / "kv_calibration/statistics.safetensors", "--output", tmp_path / "x.safetensors"]):
        result = invoke(*command)
        assert result.exit_code == 0, result.exception
        assert "E4M3" in result.stdout


@pytest.mark.parametrize("command", ["run", "collect", "solve", "write", "merge", "verify", "inspect", "doctor", "recipes"])
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {command}")


def test_doctor_and_recipes_speak_json():
    assert {stage["name"] for stage in ok("doctor")["stages"]} >= {"collect", "verify"}
    listed = ok("recipes", "list")
    assert {"default", "llama", "qwen2", "qwen3", "mistral", "gemma3"} <= set(listed)
    assert ok("recipes", "show", "qwen2") == listed["qwen2"]
    assert "# Qwen2" in invoke("recipes", "show", "qwen2").stdout


# ---- usage ----


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--bogus"], "No such option"),
        (["bogus"], "No such command"),
        (["run", "--margin", "0.5"], "--margin"),
        (["run", "--policy", "best"], "--policy"),
        (["run", "--tokens-per-batch", "0"], "--tokens-per-batch"),
        (["solve", "x"], "--output"),
        (["merge", "--output", "x"], "STATISTICS"),
        (["recipes", "show", "nothing"], "no recipe nothing"),
        (["solve", "no.safetensors", "--output", "x"], "no such file: no.safetensors"),
        (["inspect", "no.safetensors"], "no such file: no.safetensors"),
        (["inspect", "n" * 300], "File name too long"),
        (["run", "./no-model", "--output", "x"], "no model folder at no-model"),
    ],
)
def test_wrong_usage_is_one_line(refused, args, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*args)


@pytest.mark.parametrize("args", [["--margin", "nan"], ["--policy", "percentile", "--percentile", "nan"]])
def test_not_a_number_is_no_number(refused, llama, tmp_path, args):
    assert "nan" in refused("run", llama, "--output", tmp_path / "out", "--no-verify", *args)


def test_a_device_that_is_not_there_is_exit_3_and_one_that_is_none_exit_2(refused, llama, corpus, tmp_path):
    rest = ("run", llama, "--data", corpus, *SHORT, "--output", tmp_path / "out", "--no-verify", "--device")
    if not torch.cuda.is_available():
        assert "--device cpu works on any host" in refused(*rest, "cuda", code=3)
    assert "give cpu, cuda" in refused(*rest, "quantum")


def test_outputs_that_exist_are_kept_unless_forced(refused, llama, corpus, tmp_path):
    file, folder = tmp_path / "s.safetensors", tmp_path / "out"
    folder.mkdir()
    ok("collect", llama, "--data", corpus, *SHORT, "--output", file)
    assert "exists" in refused("collect", llama, "--data", corpus, *SHORT, "--output", file)
    assert "exists" in refused("run", llama, "--data", corpus, *SHORT, "--output", folder, "--no-verify")
    assert "exists" in refused("solve", file, "--output", file)
    assert "exists" in refused("merge", file, "--output", file)
    assert "is a folder" in refused("solve", file, "--output", folder, "--force")
    ok("collect", llama, "--data", corpus, *SHORT, "--output", file, "--force")
    ok("run", llama, "--data", corpus, *SHORT, "--output", folder, "--no-verify", "--force")


def test_a_format_that_cannot_be_written_is_refused_before_the_model_is_loaded(refused, llama, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("calibrate.pipeline.load_model", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    assert "E5M2" in refused("run", llama, "--data", corpus, "--output", tmp_path / "out", "--format", "e5m2", "--no-verify")


# ---- models ----


def test_a_folder_without_what_a_checkpoint_has_is_refused(run_refused, source, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in run_refused(tmp_path / "empty")
    for path in source.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer in" in run_refused(source)
    tiny_tokenizer().save_pretrained(source)
    (source / "model.safetensors").unlink()
    assert "no safetensors weights" in run_refused(source)
    (source / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin is a pickle" in run_refused(source)


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, b"PK\x03\x04 a zip that says it is weights", b"\xff" * 8 + b"{}"])
def test_weights_that_are_no_safetensors_are_refused(run_refused, source, content):
    (source / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a safetensors file" in run_refused(source) or content[:8] == bytes(8)


def test_truncated_and_missing_shards_are_refused_by_name(run_refused, tmp_path):
    model = tiny_checkpoint(tmp_path / "sharded", shard="100KB")
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    content = (model / shard).read_bytes()
    (model / shard).write_bytes(content[:-10])
    assert f"{shard} is truncated or damaged" in run_refused(model)
    (model / shard).unlink()
    assert f"shard {shard} is listed" in run_refused(model)
    (model / shard).write_bytes(content)
    for weight_map, message in (
        ({**index["weight_map"], "model.layers.9.self_attn.q_proj.weight": shard}, "model.layers.9.self_attn.q_proj.weight"),
        ({"x": "../../etc/passwd"}, "outside the checkpoint folder"),
        (["x"], "no weight_map"),
        ({"x": 3}, "no weight_map"),
        ({}, "lists no weight file"),
    ):
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert message in run_refused(model)
    (model / "model.safetensors.index.json").unlink()
    assert "but no model.safetensors.index.json" in run_refused(model)


def test_a_lone_file_beside_an_index_that_does_not_list_it_is_refused(run_refused, tmp_path):
    model = tiny_checkpoint(tmp_path / "sharded", shard="100KB")
    shutil.copy(next(model.glob("model-*.safetensors")), model / "model.safetensors")
    assert "that its index does not list" in run_refused(model)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_instead_of_filled_with_random_numbers(run_refused, source):
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 tensors that its config asks for, first model.layers.1.self_attn.k_proj.weight" in run_refused(source)


def test_weights_that_do_not_fit_the_config_are_refused(run_refused, source):
    edit_config(source, num_key_value_heads=4)
    assert "cannot be loaded" in run_refused(source)


def test_nan_weights_are_found_with_layer_head_and_sample(run_refused, source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][40, 3] = float("nan")  # head 1 of 2, head_dim 32
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    line = run_refused(source)
    assert "V of layer 1 (model.layers.1.self_attn), head 1, is infinite or NaN on sample 0" in line
    assert "rows.jsonl" in line


@pytest.mark.parametrize("kind", ["bert", "bert-lm", "t5"])
def test_encoders_and_encoder_decoders_are_refused(run_refused, tmp_path, kind):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 256}
    if kind == "t5":
        model = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2, vocab_size=256))
    else:
        model = BertForMaskedLM(BertConfig(**small))
        model = model.bert if kind == "bert" else model
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert ("encoder-decoder" if kind == "t5" else "not a causal LM") in run_refused(tmp_path / "model")


def test_custom_code_is_not_run_unasked(run_refused, source):
    (source / "modeling_new.py").write_text("raise SystemExit('this code was run')")
    edit_config(source, model_type="brand-new", architectures=["BrandNewForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_new.M"})
    assert "pass --trust-remote-code" in run_refused(source)


@pytest.mark.parametrize("method", ["mxfp4", "bitsandbytes", "modelopt"])
def test_run_refuses_formats_that_cannot_carry_kv_scales(refused, source, corpus, tmp_path, method):
    edit_config(source, quantization_config={"quant_method": method})
    line = refused("run", source, "--data", corpus, *SHORT, "--output", tmp_path / "out", "--no-verify")
    assert method in line
    assert "compressed-tensors" in line


def test_latent_attention_is_collected_and_solved_but_not_written(refused, corpus, tmp_path):
    model = tiny_checkpoint(tmp_path / "mla", "deepseek_v3")
    line = refused("run", model, "--data", corpus, *SHORT, "--output", tmp_path / "out", "--no-verify")
    assert "multi-head latent attention" in line
    ok("collect", model, "--data", corpus, *SHORT, "--output", tmp_path / "s.safetensors")
    solved = ok("solve", tmp_path / "s.safetensors", "--output", tmp_path / "scales.safetensors")
    assert all(layer["k"] == layer["v"] for layer in solved["layers"])
    line = refused("write", tmp_path / "scales.safetensors", "--model", model, "--output", tmp_path / "out")
    assert "multi-head latent attention" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [1]),
        ("model_type", ["llama"]),
        ("model_type", "llame"),
        ("text_config", [1]),
        ("quantization_config", "fp8"),
        ("vocab_size", None),
        ("hidden_size", "wide"),
        ("num_attention_heads", 0),
        ("num_hidden_layers", -1),
        ("rope_parameters", {"rope_type": "none such"}),
        ("hidden_act", "none such"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(run_refused, source, key, value):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, key: value}))
    assert str(source) in run_refused(source)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_json_files_that_are_none_are_one_line(refused, source, corpus, tmp_path, name, content):
    (source / name).write_bytes(content)
    line = refused("run", source, "--data", corpus, *SHORT, "--output", tmp_path / "out", "--no-verify")
    assert str(source) in line


def test_randomly_damaged_files_give_a_checkpoint_or_one_line(llama, corpus, tmp_path):
    rng = random.Random(7)
    source = shutil.copytree(llama, tmp_path / "model")
    for attempt in range(24):
        name = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")[attempt % 4]
        content = bytearray((llama / name).read_bytes())
        limit = min(len(content), 3000)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(limit)] = rng.choice(b'{}[]",:0x \x00\xff')
        (source / name).write_bytes(content)
        result = invoke("run", source, "--data", corpus, *SHORT, "--output", tmp_path / f"out{attempt}", "--no-verify", "--json")
        assert result.exit_code in (0, 2), f"{name}: {result.exception!r}"
        assert (tmp_path / f"out{attempt}").exists() == (result.exit_code == 0)
        if result.exit_code == 2:
            assert sum(line.startswith("error:") for line in result.stderr.splitlines()) == 1
        shutil.copy(llama / name, source / name)


# ---- corpora ----


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "empty.jsonl"),
        ("columns.jsonl", b'{"number": 1}\n', "columns.jsonl"),
        ("broken.jsonl", b'{"text": "a good line"}\n{"text": broken\n', "broken.jsonl:2"),
        ("latin.txt", "déjà vu, all over again. ".encode("latin-1") * 50, "UTF-8"),
        ("short.txt", b"short", "shorter than one sequence"),
    ],
)
def test_unusable_corpora_are_one_line(run_refused, llama, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in run_refused(llama, data=tmp_path / name)


def test_a_sequence_longer_than_the_context_is_refused_also_where_the_config_calls_it_otherwise(run_refused, llama, tmp_path):
    assert "more than the model's context of 512" in run_refused(llama, "--sequence-length", "513")
    gpt2 = tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    assert "more than the model's context of 512" in run_refused(gpt2, "--sequence-length", "513")


# ---- files between the steps ----


def test_files_of_another_kind_are_refused(refused, llama, corpus, tmp_path):
    statistics, scales = tmp_path / "s.safetensors", tmp_path / "scales.safetensors"
    ok("collect", llama, "--data", corpus, *SHORT, "--output", statistics)
    ok("solve", statistics, "--output", scales)
    weights = llama / "model.safetensors"
    for args in (["solve", scales], ["solve", weights], ["merge", statistics, scales], ["merge", statistics, statistics]):
        refused(*args, "--output", tmp_path / "new.safetensors")
    assert "without what they were solved from" in refused("inspect", scales)
    assert "no kv-calibrate data" in refused("inspect", weights)
    assert "was not calibrated by kv-calibrate" in refused("inspect", llama)
    refused("write", statistics, "--model", llama, "--output", tmp_path / "out")
    ok("collect", llama, "--data", "random", *SHORT, "--output", tmp_path / "other.safetensors")
    line = refused("write", scales, "--model", llama, "--output", tmp_path / "out", "--statistics", tmp_path / "other.safetensors")
    assert "digests differ" in line
    statistics.write_bytes(statistics.read_bytes()[:-7])
    assert "not a readable safetensors file" in refused("solve", statistics, "--output", tmp_path / "new.safetensors")


def test_a_checkpoint_of_another_tool_is_calibrated_with_its_scales_taken_out(source, corpus, tmp_path):
    add_foreign_scales(source)
    ok("run", source, "--data", corpus, *SHORT, "--output", tmp_path / "out", "--no-verify")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {file for name, file in index.items() if name.endswith("_scale")} == {"kv_scales.safetensors"}


# ---- recipes ----

RECIPE = "family: mine\ndescription: d\nmodel_types: [llama]\ncorpus: {samples: 3, sequence_length: 16}\nscales: {policy: pow2, margin: 2.0}\n"


def test_flags_win_over_the_recipe_file_which_wins_over_defaults(llama, corpus, tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    rest = ["run", llama, "--data", corpus, "--no-verify", "--recipe", tmp_path / "mine.yaml"]
    by_file = ok(*rest, "--output", tmp_path / "a")
    assert by_file["counted"]["tokens"] == 3 * 16
    assert (by_file["options"]["policy"], by_file["options"]["margin"], by_file["options"]["number_format"]) == ("pow2", 2.0, "e4m3")
    by_flag = ok(*rest, "--samples", 2, "--policy", "amax", "--output", tmp_path / "b")
    assert by_flag["counted"]["tokens"] == 2 * 16
    assert (by_flag["options"]["policy"], by_flag["options"]["margin"]) == ("amax", 2.0)
    scales = Scales.load(tmp_path / "a" / "kv_calibration" / "scales.safetensors")
    assert all(np.log2(scale) % 1 == 0 for layer in scales.layers for _, scale in layer.items())


def test_a_bad_recipe_is_one_line(refused, llama, corpus, tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE + "samplse: 3\n")
    line = refused("run", llama, "--data", corpus, "--output", tmp_path / "out", "--no-verify", "--recipe", tmp_path / "mine.yaml")
    assert "samplse" in line
    assert "no recipe mime" in refused("run", llama, "--data", corpus, "--output", tmp_path / "out", "--no-verify", "--recipe", "mime")


def test_outputs_that_would_destroy_their_inputs_are_refused(tmp_path):
    from calibrate.evaluate.evidence import check_target

    checkpoint = tmp_path / "c"
    (checkpoint / "kv_calibration").mkdir(parents=True)
    for allowed in (None, tmp_path / "r.html", checkpoint / "kv_calibration" / "report.html"):
        check_target(checkpoint, allowed)
    for refused in (checkpoint / "config.json", checkpoint / "README.md", checkpoint / "kv_calibration" / "provenance.json"):
        with pytest.raises(UsageError, match="could overwrite its files"):
            check_target(checkpoint, refused)


@pytest.mark.parametrize("command", [["solve", "S", "-o", "S", "--force"], ["merge", "S", "S", "-o", "S", "--force"]])
def test_an_output_that_is_an_input_is_refused(command, tmp_path):
    file = tmp_path / "s.safetensors"
    planted().save(file)
    before = file.read_bytes()
    result = CliRunner().invoke(main, [str(file) if word == "S" else word for word in command])
    assert result.exit_code == 2
    assert "is an input" in result.stderr
    assert file.read_bytes() == before
