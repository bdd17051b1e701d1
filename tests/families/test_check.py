"""`recipes check` on real vLLM: families that load, families that are refused, families that it has never seen, and every way to fail."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from calibrate.artefact import SCALES_FILE
from calibrate.cli import main
from calibrate.errors import CheckFailed, UsageError
from calibrate.families import check
from calibrate.families.check import GRANULARITIES, check_recipes
from calibrate.families.new import model_config, new_recipe
from calibrate.model.support import NO_QUANT_CONFIG_REASON
from calibrate.recipes import Recipe, all_recipes, load_recipe

# A model type for each way in which names, heads or layers differ: plain; a module that is itself called attn; Falcon's own name and one KV head;
# vLLM's transformers backend; layers that read another's cache, head sizes of their own; attention in some layers only.
# tests/engines/test_architectures.py looks at more names, `make families` at all.
SAMPLE = ("llama", "gpt2", "falcon", "gpt_neox", "gemma4_text", "nemotron_h")
REFUSED = ("jamba", "deepseek_v3", "minicpm3", "mamba")
UNSEEN = ("cwm", "jais2", "vaultgemma")  # `recipes new` meets these for the first time


def recipe(family: str, kind: str, **changes) -> Recipe:
    """A one-type recipe with the shipped tiny model of that type."""
    shipped = next(one for one in all_recipes().values() if kind in one.tiny)
    return shipped.model_copy(update={"family": family, "model_types": (kind,), "tiny": {kind: shipped.tiny[kind]}, **changes})


def spoil_one_scale(output) -> None:
    tensors = load_file(output / SCALES_FILE)
    name = next(name for name in tensors if "layers.1." in name and name.endswith("k_scale"))
    tensors[name] = np.nextafter(tensors[name], np.float32(9))
    save_file(tensors, output / SCALES_FILE, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Every case of this module in one check, one vLLM child: family → granularity → row."""
    folder = tmp_path_factory.mktemp("recipes")
    recipes = [recipe(kind, kind) for kind in SAMPLE + REFUSED]
    for kind in UNSEEN:
        (folder / f"{kind}.yaml").write_text(new_recipe(f"new-{kind}", model_config(None, kind), kind).text)
        recipes.append(load_recipe(folder / f"{kind}.yaml"))
    recipes += [
        recipe("spoiled", "llama"),
        recipe("out-of-date", "llama", support="collect-only", reason=NO_QUANT_CONFIG_REASON),
        recipe("whole-keys", "minicpm3", support="vllm", reason=None),
        recipe("elsewhere", "llama", needs={"llama": "no_such_module"}),
        recipe("hopeful", "jamba", support="vllm", reason=None),
        recipe("other-reason", "jamba", reason="the moon is full"),
        recipe("not-refused", "llama", support="refused", reason="the moon is full"),
        recipe("no-cache", "mamba", support="vllm", reason=None),
        recipe("bad-tiny", "llama", tiny={"llama": {"hidden_size": "wide"}}),
        recipe("not-tiny", "llama", tiny={"llama": {}}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        write, refusal, calibrate, now = check._write, check._refusal, check._calibrate, []

        def following(recipe, *rest):
            now.append(recipe.family)
            return calibrate(recipe, *rest)

        def spoiling(source, scales, output):
            tensors = write(source, scales, output)
            if now[-1] == "spoiled":
                spoil_one_scale(output)
            return tensors

        patch.setattr(check, "_calibrate", following)
        patch.setattr(check, "_write", spoiling)
        told = {"out-of-date": NO_QUANT_CONFIG_REASON, "whole-keys": ""}
        patch.setattr(check, "_refusal", lambda source: told.get(now[-1], refusal(source)))
        found = check_recipes(recipes)
    assert [(row.family, row.granularity) for row in found] == [(one.family, each) for one in recipes for each in GRANULARITIES]
    return {one.family: {row.granularity: row for row in found if row.family == one.family} for one in recipes}


@pytest.mark.vllm
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", SAMPLE)
def test_vllm_holds_every_scale_of_a_family(rows, kind, granularity):
    row = rows[kind][granularity]
    assert (row.outcome, row.reason) == ("loads", "")
    assert row.scales >= 3


@pytest.mark.vllm
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_is_seen_on_real_vllm(rows, kind, granularity):
    row = rows[kind][granularity]
    assert (row.outcome, row.ok, row.scales) == ("refused", True, 0)
    assert row.reason == next(one.reason for one in all_recipes().values() if kind in one.tiny)


@pytest.mark.vllm
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", UNSEEN)
def test_a_new_recipe_of_an_unseen_family_passes(rows, kind, granularity):
    assert not any(kind in one.model_types for one in all_recipes().values())
    row = rows[f"new-{kind}"][granularity]
    assert (row.outcome, row.reason) == ("loads", "")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("spoiled", "model.layers.1.self_attn.k_scale"),
        ("out-of-date", "it is out of date"),
        ("hopeful", "but the tool refuses: jamba"),
        ("other-reason", "refuses for another reason: jamba"),
        ("not-refused", "but statistics were collected"),
        ("no-cache", "wrote nothing to a KV cache"),
        ("bad-tiny", "its config class refuses the fields"),
        ("not-tiny", "set the fields that make it large"),
    ],
)
def test_every_way_to_be_wrong_fails_and_says_why(rows, family, reason):
    for row in rows[family].values():
        assert (row.outcome, row.ok) == ("failed", False)
        assert reason in row.reason.replace(" (rank 0)", "")
        assert "\n" not in row.reason


@pytest.mark.vllm
def test_a_cache_that_vllm_lays_out_otherwise_is_seen(rows):
    """Why minicpm3 is refused: vLLM would take the scales of its latent for keys and values that nobody observed."""
    for row in rows["whole-keys"].values():
        assert row.outcome == "failed"
        assert "caches 4 KV heads, 1 were observed" in row.reason


@pytest.mark.vllm
def test_a_class_that_cannot_be_imported_here_is_not_checked_and_says_so(rows):
    for row in rows["elsewhere"].values():
        assert (row.outcome, row.ok, row.scales) == ("not checked", True, 0)
        assert row.reason == "vLLM's class imports no_such_module, which is not installed here"


def test_a_child_that_dies_of_one_model_costs_only_that_model(monkeypatch, tmp_path):
    """Halves are loaded anew until the one is found."""
    tried = []

    def load(paths, *, expected):
        tried.append(len(paths))
        if any("phi3" in str(path) for path in paths):
            raise CheckFailed("vLLM ended with signal 11")
        return [f"loaded {path.parent.name}" for path in paths]

    monkeypatch.setattr(check, "load_scales", load)
    kinds = ("llama", "qwen2", "phi3", "gpt2")
    answers = check._load_all([job for kind in kinds for job in check._calibrate(recipe(kind, kind), kind, ("tensor",), tmp_path / kind)])
    assert answers == ["loaded llama", "loaded qwen2", "vLLM ended with signal 11", "loaded gpt2"]
    assert tried == [4, 2, 2, 1, 1]


def test_code_that_crashes_is_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "solve", lambda *_: 1 // 0)
    (row,) = check._calibrate(recipe("llama", "llama"), "llama", ("tensor",), tmp_path)
    assert (row.outcome, row.reason) == ("failed", "ZeroDivisionError: integer division or modulo by zero")


def test_a_recipe_without_a_tiny_model_is_refused():
    with pytest.raises(UsageError, match=r"no tiny model of llama: `recipes new` writes one"):
        check_recipes([recipe("llama", "llama", tiny={})])
    with pytest.raises(UsageError, match="nothing to check"):
        check_recipes([recipe("llama", "llama")], model_types=["gpt2"])


def invoke(*words: str):
    return CliRunner().invoke(main, ["recipes", "check", *words])


def test_the_command_exits_1_where_a_recipe_is_wrong(tmp_path):
    """No vLLM is needed to see this one."""
    file = tmp_path / "mine.yaml"
    file.write_text("family: mine\ndescription: d\nmodel_types: [llama]\ntiny: {llama: {hidden_size: wide}}\n")
    done = invoke(str(file), "--granularity", "head", "--json")
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert (result["ok"], [row["granularity"] for row in result["rows"]]) == (False, ["head"])
    assert "1 of 1 are not as their recipes say" in invoke(str(file), "--granularity", "head").stdout


def test_names_in_a_recipe_are_no_paths(tmp_path, monkeypatch):
    """Nor do two recipes of one name share a folder."""
    made = []
    monkeypatch.setattr(check, "_calibrate", lambda recipe, kind, granularities, folder: made.append(folder) or [])
    names = (str(tmp_path / "outside"), "../outside", "same", "same")
    assert check_recipes([recipe(name, "llama") for name in names]) == []
    assert len({folder.parent for folder in made}) == 1
    assert len({folder.resolve() for folder in made}) == len(names)
    assert not list(tmp_path.iterdir())


def test_wrong_use_of_the_command_is_one_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers")
    wrong = {
        ("nobody",): "no recipe nobody",
        ("default",): "no tiny model",
        ("llama", "--table", "x.md"): "whole library",
        ("--table", str(page)): "no place",
        ("--table", str(page / "below" / "x.md")): "cannot write",
    }
    for words, message in wrong.items():
        done = invoke(*words)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
