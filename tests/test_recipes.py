"""The recipe library: what ships is sound, and a user's file is read or refused in one line."""

import re
import shlex

import pytest
from transformers import CONFIG_MAPPING

from calibrate.cli import main
from calibrate.errors import UsageError
from calibrate.families.tiny import tiny_config
from calibrate.model import SourceCheckpoint
from calibrate.model.support import WITHOUT_QUANT_CONFIG, unsupported
from calibrate.pipeline import JobOptions, recipe_for
from calibrate.recipes import FALLBACK, CorpusChoice, all_recipes, choose_recipe, load_recipe
from calibrate.resources import resource
from calibrate.scales import PolicyOptions
from tests.tiny import edit_config, tiny_checkpoint

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
    verb = {"vllm": "run", "collect-only": "collect", "refused": "recipes check"}[all_recipes()[name].support]
    assert lines[1].startswith(f"# kv-calibrate {verb} ")
    words = shlex.split(lines[1])[2:]
    context = main.make_context("kv-calibrate", words[:], resilient_parsing=True)
    command, chosen, rest = main.resolve_command(context, words)
    while hasattr(chosen, "commands"):
        command, chosen, rest = chosen.resolve_command(context, rest)
    chosen.make_context(command, rest, parent=context).close()


@pytest.mark.parametrize("name", all_recipes())
def test_every_value_that_is_not_the_default_has_a_comment_and_every_model_type_a_tiny_model(name):
    recipe = all_recipes()[name]
    text = resource("recipes", f"{name}.yaml").read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > 150]
    assert set(recipe.tiny) == set(recipe.model_types)
    for field, default in (("corpus", CorpusChoice()), ("scales", PolicyOptions()), ("skip_layers", ())):
        if getattr(recipe, field) != default:
            assert re.search(rf"^{field}:\n  # |^# .*\n{field}:", text, re.MULTILINE), f"{field} is not the default, and no comment says why"


def test_the_library_is_large_enough_and_agrees_with_what_the_tool_refuses():
    """The tool's refusals are by name (calibrate/model/support.py): a recipe must say the same, and give the same reason."""
    recipes = all_recipes()
    assert sum(recipe.support == "vllm" for recipe in recipes.values()) >= 25
    for recipe in recipes.values():
        for kind, fields in recipe.tiny.items():
            config = tiny_config(kind, fields)
            refusal = unsupported(config.to_dict())
            if recipe.support == "collect-only":
                assert recipe.reason in refusal, (kind, refusal)
            else:  # what is refused may be refused only when it is run
                assert not refusal or (recipe.support == "refused" and recipe.reason in refusal), (kind, refusal)
    known = {kind for recipe in recipes.values() if recipe.support == "collect-only" for kind in recipe.model_types}
    assert set(WITHOUT_QUANT_CONFIG) & set(CONFIG_MAPPING.keys()) <= known


def test_a_recipes_rows_are_cut_to_the_models_context_and_those_asked_for_are_not():
    recipe = choose_recipe("gemma2", None)
    assert recipe.corpus.sequence_length > 4096
    assert JobOptions().corpus(recipe, 2048).sequence_length == 2048
    assert JobOptions().corpus(recipe).sequence_length == recipe.corpus.sequence_length
    assert JobOptions(sequence_length=4096).corpus(recipe, 2048).sequence_length == 4096  # `load_corpus` refuses it, in one line


def test_a_multimodal_models_language_model_chooses_where_its_own_type_is_unknown(tmp_path):
    assert choose_recipe("some_vl_model", None, "qwen2").family == "qwen2"
    assert choose_recipe("gemma3", None, "qwen2").family == "gemma3"
    assert choose_recipe("some_vl_model", None, "unheard of").family == FALLBACK
    source = tiny_checkpoint(tmp_path / "vl")
    edit_config(source, model_type="some_vl_model", text_config={"model_type": "gemma2"})
    assert recipe_for(SourceCheckpoint.open(source), JobOptions()).family == "gemma2"
    assert recipe_for(SourceCheckpoint.open(source), JobOptions(recipe="llama")).family == "llama"


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
        (GOOD.encode() + b"support: refused\n", "reason"),
        (GOOD.encode() + b"reason: because\n", "reason"),
        (GOOD.encode() + b"skip_layers: [attention]\n", "skip_layers"),
        (GOOD.encode() + b"tiny: {y: {}}\n", "tiny has y"),
        (GOOD.encode() + b"needs: {y: os}\n", "needs has y"),
        (GOOD.encode() + b"needs: {x: os.path}\n", "needs has 'os.path'"),
        (GOOD.encode() + b"needs: {x: ''}\n", "needs has ''"),
        (GOOD.encode() + b"skip_layers: [true]\n", "skip_layers"),
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
