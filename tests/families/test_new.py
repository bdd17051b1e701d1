"""`recipes new`: a file that is read back, says what its model is, and replaces nothing."""

import json

import pytest
from click.testing import CliRunner

from calibrate.cli import main
from calibrate.errors import UsageError
from calibrate.families.new import model_config, new_recipe
from calibrate.recipes import load_recipe
from calibrate.scales import PolicyOptions
from tests.tiny import tiny_checkpoint


def invoke(*words: str):
    return CliRunner().invoke(main, ["recipes", "new", *words])


def test_a_class_alone_gives_a_complete_recipe(tmp_path):
    target = tmp_path / "helium.yaml"
    done = invoke("my-helium", "--model-type", "helium", "-o", str(target))
    assert done.exit_code == 0, done.stderr
    recipe = load_recipe(target)
    assert (recipe.family, recipe.model_types, recipe.support) == ("my-helium", ("helium",), "vllm")
    assert recipe.description == "24 layers, 20 query and 20 KV heads of 128."
    assert recipe.scales == PolicyOptions()
    assert recipe.tiny["helium"]["num_hidden_layers"] == 2
    assert target.read_text().count("#") > 5  # a recipe is written to be read


def test_a_models_own_config_is_what_counts(tmp_path):
    """Its window, its layer types, its biases; the weights are not read."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 5, "sliding_window": 4096}
    (folder / "config.json").write_text(json.dumps(config | sizes | {"use_sliding_window": True}))
    (folder / "model.safetensors").unlink()
    recipe_file = tmp_path / "mine.yaml"
    done = invoke("mine", "--model", str(folder), "-o", str(recipe_file), "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {"output": str(recipe_file), "fault": ""}
    recipe = load_recipe(recipe_file)
    assert recipe.corpus.sequence_length == 8192
    assert recipe.tiny["qwen2"]["layer_types"] == ["full_attention"] * 3 + ["sliding_attention"]
    assert recipe.tiny["qwen2"]["use_sliding_window"] is True
    assert "windows of 4096 tokens" in recipe.description


def test_a_family_that_vllm_serves_without_scales_is_written_as_such():
    made = new_recipe("v3", model_config(None, "deepseek_v3"), "x")
    assert "support: collect-only" in made.text
    assert "reason: " in made.text


def test_nothing_is_replaced_without_force(tmp_path):
    target = tmp_path / "r.yaml"
    target.write_text("mine")
    done = invoke("r", "--model-type", "llama", "-o", str(target))
    assert (done.exit_code, target.read_text()) == (2, "mine")
    assert "--force" in done.stderr
    assert invoke("r", "--model-type", "llama", "-o", str(target), "--force").exit_code == 0
    assert load_recipe(target).family == "r"
    assert invoke("r", "--model-type", "llama", "-o", str(tmp_path), "--force").exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "one of them"),
        (("--model", "x", "--model-type", "llama"), "one of them"),
        (("--model-type", "no_such_type"), "no_such_type"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
    ],
)
def test_wrong_use_is_one_line(tmp_path, words, message):
    done = invoke("r", *words, "-o", str(tmp_path / "r.yaml"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "r.yaml").exists()


def test_a_model_that_the_rule_cannot_make_tiny_is_written_and_told(tmp_path):
    """dbrx keeps its sizes in a part that its class does not take back: the file is a start, exit 1 says that it is not more."""
    target = tmp_path / "dbrx.yaml"
    done = invoke("dbrx", "--model-type", "dbrx", "-o", str(target))
    assert done.exit_code == 1
    assert "set its fields under `tiny:`" in " ".join(done.stdout.split())
    assert load_recipe(target).family == "dbrx"


def test_remote_code_is_not_run(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match="its config cannot be read"):
        model_config(str(folder), None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["a/b", "../up", "/abs", "", " "])
def test_a_family_is_no_path(tmp_path, monkeypatch, family):
    monkeypatch.chdir(tmp_path)
    done = invoke("--model-type", "llama", "--", family)
    assert (done.exit_code, "no path" in done.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["é 😀", 'x"y', "null", "1", "- a: b", "# c"])
def test_any_other_name_is_read_back_as_it_was_given(tmp_path, family):
    assert invoke("--model-type", "llama", "-o", str(tmp_path / "r.yaml"), "--", family).exit_code == 0
    assert load_recipe(tmp_path / "r.yaml").family == family


def test_a_models_code_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    done = invoke("own", "--model", str(folder), "-o", str(tmp_path / "r.yaml"))
    assert done.exit_code == 2
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
