"""Calibration text: named sources → tokenized rows → batches."""

from calibrate.corpus.batches import plan_batches
from calibrate.corpus.load import load_corpus
from calibrate.corpus.options import CorpusOptions
from calibrate.corpus.types import Batch, Corpus, Sample

__all__ = ["Batch", "Corpus", "CorpusOptions", "Sample", "load_corpus", "plan_batches"]
