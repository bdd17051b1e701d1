"""Rows that are scored together have the scores they would have alone, whatever the cache; rows of other lengths go by themselves."""

import numpy as np
import pytest

from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine, _alike
from calibrate.kvarn.solve import variance_tables
from calibrate.lowbit import FORMATS, Offline, make_format
from calibrate.model import SourceCheckpoint
from tests.engines.test_transformers_engine import rows, scales_for
from tests.kvarn.test_tables import _collect
from tests.tiny import tiny_checkpoint

LENGTHS = [300, 200, 300, 300, 200]
NAMES = [name for name in FORMATS if name != "additive" and "+" not in name] + ["kvarn_k2v2_g64+mean", "kvarn_k2v2_g64+balanced"]


def open_engine(folder, family: str = "llama", **sizes) -> TransformersEngine:
    return TransformersEngine(SourceCheckpoint.open(tiny_checkpoint(folder / family, family, **sizes)), device="cpu", dtype="float32", block=64)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return open_engine(tmp_path_factory.mktemp("batches"), num_hidden_layers=6, head_dim=64)


@pytest.fixture(scope="module")
def offline(engine):
    return Offline(tables=variance_tables(_collect(engine.source.path)))


def assert_together_as_alone(engine, variant: Variant) -> None:
    given = rows(LENGTHS, seed=4)
    with engine.session(variant) as session:
        together = session.score(given)
        alone = [session.score([row])[0] for row in given]
    for one, other in zip(together, alone, strict=True):
        for name in ("logprob", "top_logprobs"):
            apart = np.abs(getattr(one, name) - getattr(other, name))
            assert apart.mean() < 5e-5, name  # matmuls of more rows round otherwise, by which now and then a value gets the next code
            assert apart.max() < 0.02, name


@pytest.mark.parametrize("name", NAMES)
def test_every_format(engine, offline, name):
    assert_together_as_alone(engine, Variant(name, None, make_format(name, offline)))


def test_the_16_bit_cache_and_fp8_with_queries(engine):
    assert_together_as_alone(engine, Variant("16-bit", None))
    assert_together_as_alone(engine, Variant("fp8", scales_for(engine, k=0.25, v=0.25, q=0.25)))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v3", "mixtral"])
def test_windows_states_latents_and_experts(tmp_path, family):
    engine = open_engine(tmp_path, family)
    assert_together_as_alone(engine, Variant("16-bit", None))
    name = "fp8_e5m2" if family == "deepseek_v3" else "int4_per_token_head"
    assert_together_as_alone(engine, Variant(name, None, make_format(name)))


def test_which_rows_go_together():
    """By length, in order, at most eight, as many rows as asked for and as many tokens."""
    assert list(_alike([[0] * length for length in (3, 2, 3, 3, 3)], 3, 1000)) == [[0, 2, 3], [4], [1]]
    assert [len(each) for each in _alike([[0] * 10] * 20, 100, 1000)] == [8, 8, 4]
    assert [len(each) for each in _alike([[0] * 400] * 3, 100, 1000)] == [2, 1]
    assert [len(each) for each in _alike([[0] * 2000] * 2, 100, 1000)] == [1, 1]
    assert list(_alike([], 8, 1000)) == []


def test_rows_do_go_through_the_model_together(engine, monkeypatch):
    with engine.session(Variant("16-bit", None)) as session:
        seen, forward = [], session._forward

        def watched(tokens, cache):
            seen.append(tuple(tokens.shape))
            return forward(tokens, cache)

        monkeypatch.setattr(session, "_forward", watched)
        session.score(rows(LENGTHS, seed=4))
    assert seen == [(3, 64)] * 4 + [(3, 43)] + [(2, 64)] * 3 + [(2, 7)]
