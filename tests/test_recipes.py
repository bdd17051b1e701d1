"""The recipe library: what ships is sound, and a user's file is read or refused in one line."""

import pytest
from transformers import CONFIG_MAPPING

from calibrate.errors import UsageError
from calibrate.pipeline import JobOptions
from calibrate.recipes import FALLBACK, all_recipes, choose_recipe, load_recipe
from calibrate.resources import resource

GOOD = "family: mine\ndescription: d\nmodel_types: [x]\n"


def test_every_shipped_recipe_is_named_for_its_family_and_is_for_model_types_that_exist():
    recipes = all_recipes()
    assert FALLBACK in recipes
    for name, recipe in recipes.items():
        assert recipe.family == name
        assert set(recipe.model_types) <= set(CONFIG_MAPPING.keys())
        assert all(trap.source.startswith("https://") for trap in recipe.traps)


def test_no_model_type_has_two_recipes():
    types = [kind for recipe in all_recipes().values() for kind in recipe.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize("name", all_recipes())
def test_every_recipe_says_on_its_second_line_how_it_is_run(name):
    lines = resource("recipes", f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith("# kv-calibrate run ")


def test_the_models_type_chooses_unless_a_recipe_is_asked_for(tmp_path):
    assert choose_recipe("qwen2", None).family == "qwen2"
    assert choose_recipe("never heard of", None).family == FALLBACK
    assert choose_recipe("qwen2", "llama").family == "llama"
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert choose_recipe("qwen2", str(tmp_path / "mine.yaml")).family == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file"),
        (b"- a\n- b\n", "the file"),
        (b"family: [", "is not YAML"),
        (b"family: \xff\xfe", "is not YAML"),
        (b"family: mine\nwhen: 2024-99-99\n", "is not YAML"),
        (b"family: mine\ndescription: d\n", "model_types"),
        (GOOD.encode() + b"typo: 1\n", "typo"),
        (GOOD.encode() + b"scales: {policy: best}\n", "scales.policy"),
        (GOOD.encode() + b"scales: {margin: .nan}\n", "scales.margin"),
        (GOOD.encode() + b"corpus: {samples: 0}\n", "corpus.samples"),
    ],
)
def test_a_bad_file_is_refused_with_the_file_and_the_field(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load_recipe(tmp_path / "no.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        choose_recipe("x", str(tmp_path))


def test_what_is_asked_for_lies_on_top_of_the_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD + "corpus: {samples: 7, data: builtin}\nscales: {policy: pow2, margin: 3.0}\n")
    recipe = load_recipe(tmp_path / "mine.yaml")
    asked = JobOptions(samples=9, margin=1.5)
    assert (asked.corpus(recipe).samples, asked.corpus(recipe).data, asked.corpus(recipe).sequence_length) == (9, "builtin", 1024)
    assert (asked.scales(recipe).policy, asked.scales(recipe).margin) == ("pow2", 1.5)
