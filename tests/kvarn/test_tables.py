"""KVarN tables: against brute force over the tokens, in a file, in a checkpoint that vLLM and transformers still load."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, DynamicCache

from calibrate.checkpoint import write_checkpoint
from calibrate.checkpoint.kvarn_reference import TABLES_FILE, read_tables
from calibrate.cli import main
from calibrate.collect import collect
from calibrate.engines import load_scales
from calibrate.errors import UsageError
from calibrate.kvarn import KVarNTables
from calibrate.kvarn.solve import TARGET_STD, variance_tables
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import merge
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint

LONG = [200, 150, 140]


def _collect(path, seed=0, lengths=LONG):
    return collect(replace(collect_run(path, rows_corpus(lengths, seed=seed), tokens_per_batch=256), second_moments=True))


def _sylvester(size: int) -> np.ndarray:
    """Its entries by the parity of the common bits, which is no way anybody would compute it."""
    signs = [[(-1) ** bin(row & column).count("1") for column in range(size)] for row in range(size)]
    return np.array(signs) / size**0.5


@pytest.fixture(scope="module")
def statistics(llama):
    return _collect(llama)


@pytest.fixture(scope="module")
def tables(statistics):
    return variance_tables(statistics)


@pytest.fixture(scope="module")
def calibrated(llama, statistics, tmp_path_factory):
    output = tmp_path_factory.mktemp("kvarn") / "calibrated"
    return write_checkpoint(SourceCheckpoint.open(llama), solve(statistics, PolicyOptions()), output, statistics=statistics).path


def test_tables_are_what_a_slow_path_finds_token_by_token(llama, tables):
    run = collect_run(llama, rows_corpus(LONG), tokens_per_batch=256)
    layer = tables[1]
    caches = []
    for sample in run.corpus.samples:
        cache = DynamicCache()
        with torch.inference_mode():
            run.model(torch.from_numpy(sample.tokens.astype(np.int64))[None], past_key_values=cache, use_cache=True)
        caches.append(cache.layers[1])
    for table, name in ((layer.k, "keys"), (layer.v, "values")):
        tokens = torch.cat([getattr(cache, name)[0, :, 128:] for cache in caches], dim=1).to(torch.bfloat16).double().numpy()
        assert tokens.shape[1] == tables.tokens == 72 + 22 + 12
        rotated = tokens @ _sylvester(tokens.shape[2])
        scale = tokens.std()
        np.testing.assert_allclose(table.mean, tokens.mean(axis=1), atol=0.005 * scale)
        np.testing.assert_allclose(table.variance, tokens.var(axis=1), rtol=0.02)
        np.testing.assert_allclose(table.rotated_variance, rotated.var(axis=1), rtol=0.02)
        np.testing.assert_allclose(table.rotated_variance.sum(axis=1), table.variance.sum(axis=1), rtol=1e-12)  # a rotation
        prescaled = np.sqrt(table.rotated_variance.mean(axis=1)) * table.prescale
        assert ((prescaled >= TARGET_STD) & (prescaled < 2 * TARGET_STD)).all()
        assert (np.exp2(np.round(np.log2(table.prescale))) == table.prescale).all()


def test_sensitivity_is_what_noise_in_rotated_keys_does_to_real_queries(llama, tables):
    """Q and K of one layer caught by hand and rotated: each channel's noise as large as its deviation, times what queries have there."""
    from calibrate.model.attention import watched_attention

    run = collect_run(llama, rows_corpus(LONG), tokens_per_batch=256)
    module = run.model.get_submodule(run.layout[2].module)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(called, query, key):
        if called is module:
            seen.append((query[0, :, 128:].to(torch.bfloat16).double(), key[0, :, 128:].to(torch.bfloat16).double()))

    with torch.inference_mode(), watched_attention(run.model, look):
        for sample in run.corpus.samples:
            run.model(torch.from_numpy(sample.tokens.astype(np.int64))[None], use_cache=False)
    query, key = (torch.cat([pair[place] for pair in seen], dim=1) for place in (0, 1))
    rotation = torch.from_numpy(_sylvester(key.shape[2]))
    reach = (query @ rotation).square().unflatten(0, (len(key), -1)).mean(dim=(1, 2))  # [kv_heads, dim]
    noise = (reach * (key @ rotation).var(dim=1)).sum(dim=1) / key.shape[2]
    assert tables[2].sensitivity == pytest.approx(float(noise.max().sqrt()), rel=0.02)


def test_merged_statistics_give_the_same_tables_in_any_order(llama, statistics, tmp_path):
    other = _collect(llama, seed=7)
    for name, parts in (("a", [statistics, other]), ("b", [other, statistics])):
        variance_tables(merge(parts)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_layer_that_stands_out_is_proposed_and_a_head_that_never_varies_keeps_its_scale(llama, statistics):
    quiet = variance_tables(statistics)
    assert quiet.sixteen_bit_layers == ()
    loud = dict(statistics.layers)
    dead = statistics.layers[1]["v"].second.copy()
    dead[:, 0, 1:] = 0  # Σx and Σxxᵀ of head 0 are zero; the count stays
    loud[1] = loud[1] | {"v": replace(loud[1]["v"], second=dead)}
    covariance = statistics.layers[0]["q"].second.copy()
    covariance[:, :, 1:] <<= 6  # E[q qᵀ] times 64: logits times 8
    loud[0] = loud[0] | {"q": replace(loud[0]["q"], second=covariance)}
    changed = variance_tables(replace(statistics, layers=loud))
    assert changed.sixteen_bit_layers == (0,)
    assert changed[0].sensitivity == pytest.approx(8 * quiet[0].sensitivity)
    assert changed[1].v.prescale[0] == 1.0
    assert changed[1].v.prescale[1] == quiet[1].v.prescale[1]


def test_file_and_checkpoint_hold_the_same_tables(calibrated, tables, tmp_path):
    tables.save(tmp_path / "t.safetensors")
    assert (calibrated / TABLES_FILE).read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    read = read_tables(calibrated)
    assert read.sixteen_bit_layers == tables.sixteen_bit_layers
    for one, other in zip(read.layers, tables.layers, strict=True):
        assert (one.index, one.module, one.sensitivity) == (other.index, other.module, other.sensitivity)
        np.testing.assert_array_equal(one.v.rotated_variance, other.v.rotated_variance)
        for field in ("smooth", "balanced", "noise"):
            np.testing.assert_array_equal(getattr(one.basis, field), getattr(other.basis, field))


@pytest.mark.vllm
def test_vllm_and_transformers_still_load_the_checkpoint(calibrated):
    assert json.loads((calibrated / "config.json").read_text())["quantization_config"]["kvarn"]["tables"] == TABLES_FILE
    (readback,) = load_scales([calibrated])
    assert readback.ok, readback.error or readback.failures
    assert len(readback.rows) == 9
    model = AutoModelForCausalLM.from_pretrained(calibrated, dtype=torch.float32)
    with torch.inference_mode():
        assert model(torch.arange(3, 40)[None]).logits.isfinite().all()


def test_calibrating_again_without_them_takes_the_tables_away(calibrated, tmp_path):
    source = SourceCheckpoint.open(calibrated)
    plain = collect(collect_run(calibrated, rows_corpus([40, 30])))
    again = write_checkpoint(source, solve(plain, PolicyOptions()), tmp_path / "again", statistics=plain).path
    assert read_tables(again) is None
    assert not (again / TABLES_FILE).exists()


def _without(folder):
    (folder / TABLES_FILE).unlink()


def _elsewhere(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kvarn"]["tables"] = "../../etc/passwd"
    (folder / "config.json").write_text(json.dumps(config))


def _other_file(folder):
    (folder / TABLES_FILE).write_bytes((folder / "kv_scales.safetensors").read_bytes())


@pytest.mark.parametrize(("spoil", "message"), [(_without, "kvarn_tables"), (_elsewhere, "does not name"), (_other_file, "kvarn-tables")])
def test_a_reference_to_nothing_elsewhere_or_another_file_is_one_line(calibrated, tmp_path, spoil, message):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(calibrated, folder)
    spoil(folder)
    with pytest.raises(UsageError, match=message) as caught:
        read_tables(folder)
    assert "\n" not in str(caught.value)


def test_rows_too_short_for_tables_are_refused_before_they_are_collected(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("calibrate.pipeline.collect", None)
    words = ["run", str(llama), "--kvarn", "-o", str(tmp_path / "out"), "--data", "random", "--samples", "4", "--sequence-length", "128"]
    refused = CliRunner().invoke(main, [*words, "--no-verify", "--streaming", "never"])
    assert (refused.exit_code, "no document is longer than 128" in " ".join(refused.stderr.split())) == (2, True), refused.stderr


def test_what_cannot_have_tables_says_why(llama, llama_statistics, tmp_path):
    with pytest.raises(UsageError, match="--kvarn"):
        variance_tables(llama_statistics)
    with pytest.raises(UsageError, match="longer than 128"):
        variance_tables(_collect(llama, lengths=[60, 100]))
    latent = tiny_checkpoint(tmp_path / "mla", "deepseek_v3")
    with pytest.raises(UsageError, match="latents"):
        variance_tables(_collect(latent))


def test_commands(llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("abcdefgh " * 40 for _ in range(4)))
    stats, output = str(tmp_path / "s.safetensors"), tmp_path / "t.safetensors"
    done = CliRunner().invoke(main, ["collect", str(llama), "--data", str(text), "--kvarn", "--dtype", "float32", "-o", stats])
    assert done.exit_code == 0, done.stderr
    shown = CliRunner().invoke(main, ["kvarn", stats, "-o", str(output)])
    assert shown.exit_code == 0, shown.stderr
    assert "balanced" in shown.stdout
    assert len(KVarNTables.load(output).layers) == 3
    assert CliRunner().invoke(main, ["kvarn", stats, "-o", str(output)]).exit_code == 2  # it exists
    printed = json.loads(CliRunner().invoke(main, ["kvarn", stats, "--json"]).stdout)
    assert len(printed["layers"][0]["k"]["prescale"]) == 2
    assert [len(heads) for heads in printed["layers"][0]["logit_noise"].values()] == [2] * 4
