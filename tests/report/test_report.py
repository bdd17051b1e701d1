"""The report: self-contained, complete, honest about what is missing, and deaf to hostile names."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from calibrate.cli import main
from calibrate.evaluate.results import FOLDER, CompareResult, Interval, NeedleResult, load, save
from calibrate.gate import Policy
from calibrate.gate.material import read_material
from calibrate.report.content import content_of
from calibrate.report.origin import command, public
from calibrate.report.write import render_html, render_markdown, write_report
from tests.gate.evidence import ENGINE, add_evidence, calibrated, cells_of, edit_scales, installed_vllm, needles_of, with_fidelity
from tests.tiny import tiny_checkpoint

POLICY = Policy(accept_versions=(installed_vllm(),))
SECTIONS = ["decision", "needles", "reasoning", "ranges", "fidelity", "ladder", "provenance", "untested"]
HOSTILE = '<script>alert("x")</script>|`[a](javascript:b)\n</table>'


VOID = {"meta", "img"}


class Page(HTMLParser):
    """What a browser would see: elements, ids in order, and the text of each section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.sections: list[str] = []
        self.text: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.sections.append(dict(attrs)["id"])

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.sections:
            self.text[self.sections[-1]] = self.text.get(self.sections[-1], "") + data


def page(checkpoint, policy=POLICY) -> tuple[Page, str]:
    html = render_html(content_of(read_material(checkpoint), policy, "default"))
    return Page(html), html


def test_all_sections_in_order_with_their_figures(passing):
    seen, _ = page(passing)
    assert seen.open == []
    assert seen.sections == SECTIONS
    assert "Release: 17 checks passed, 1 waived." in seen.text["decision"]
    for words in ("FP8 at scale 1.0", "30 of 30", "▼2", "single, en"):
        assert words in seen.text["needles"]
    for words in ("1.0020", "(0.0036 to 0.0044)", "Every layer with calibrated scales, the worst first (9 rows)", "builtin:code"):
        assert words in seen.text["fidelity"]
    assert "scale 1.0: loses" in seen.text["ladder"]
    assert seen.tags.count("svg") == 3
    assert json.loads((passing / "kv_calibration/provenance.json").read_text())["scales"] in seen.text["provenance"]
    assert "vLLM holds all 9 scales exactly on 1 rank" in seen.text["provenance"]


def test_nothing_is_loaded_and_nothing_runs(passing):
    seen, html = page(passing)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name in ("src", "href", "srcset", "action") or name.startswith("on")]
    assert not re.findall(r"https?://|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_the_same_evidence_gives_the_same_bytes(passing):
    assert page(passing)[1] == page(passing)[1]


def test_hostile_names_stay_text(checkpoint):
    engine = ENGINE.model_copy(update={"version": HOSTILE, "attention_backend": HOSTILE, "device": HOSTILE})
    add_evidence(checkpoint, engine)
    for name, kind in (("compare", CompareResult), ("niah", NeedleResult)):
        path = checkpoint / FOLDER / f"{name}-transformers.json"
        result = load(kind, path).model_copy(update={"model": HOSTILE})
        if kind is CompareResult:
            fidelity = (*result.fidelity, result.fidelity[1].model_copy(update={"variant": HOSTILE}))
            result = result.model_copy(update={"corpus": {"sources": [{"data": HOSTILE}]}, "fidelity": fidelity})
        else:
            cells = tuple(cell.model_copy(update={"language": HOSTILE}) for cell in cells_of())
            result = result.model_copy(update={"variants": tuple(one.model_copy(update={"cells": cells}) for one in result.variants)})
        save(result, path)
    seen, html = page(checkpoint)
    assert seen.open == []
    assert "script" not in seen.tags
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 5
    markdown = render_markdown(content_of(read_material(checkpoint), POLICY, HOSTILE))
    assert "<script" not in markdown
    assert not re.search(r"(?<!\\)[\[`]", markdown)  # no link and no code span
    table = [line for line in markdown.splitlines() if line.startswith("|") and "script" in line]
    assert table
    assert all(line.replace("\\|", "").count("|") == 5 for line in table)


def test_no_evidence_is_said_and_not_invented(checkpoint):
    shutil.rmtree(checkpoint / FOLDER)
    seen, _ = page(checkpoint)
    assert "Do not release" in seen.text["decision"]
    assert seen.text["needles"].split() == ["Needles", "in", "long", "prompts", "Not", "tested."]
    assert "Not tested." in seen.text["fidelity"]
    for words in ("vLLM was not asked", "nothing was compared", "no needle was searched", "no problems were put"):
        assert words in seen.text["untested"]


def test_results_of_another_checkpoint_are_not_shown(checkpoint):
    edit_scales(checkpoint, lambda tensors: tensors.popitem(), touch_digest=False)
    seen, _ = page(checkpoint)
    assert "12.2" not in seen.text["fidelity"]
    assert "compare-transformers.json is about another checkpoint: not shown" in seen.text["untested"]
    shared = next(line for line in seen.text["decision"].splitlines() if line.startswith("held_out_saturation"))
    assert "kl, perplexity, top1" in shared  # one reason, told once


def test_what_was_not_tested_follows_from_the_evidence(passing):
    seen, _ = page(passing)
    text = seen.text["untested"]
    for words in ("read back on one rank only", "multi-key, multi-value, variable-tracking not asked", "English only, not in Chinese"):
        assert words in text
    assert "old formula not measured" in text
    assert "vLLM was not run" in text
    assert "beyond" not in text  # the longest prompt is the whole context


def test_backends_and_lengths_left_out(checkpoint):
    engine = ENGINE.model_copy(update={"engine": "vllm", "version": installed_vllm(), "attention_backend": "FLASH_ATTN (FA3)"})
    add_evidence(checkpoint, engine)
    short = {"16-bit": (), "unit": (), "calibrated": ()}
    short = {name: tuple(cell for cell in cells_of() if cell.length < 512) for name in short}
    save(needles_of(checkpoint, engine, **short), checkpoint / FOLDER / "niah-vllm.json")
    (checkpoint / FOLDER / "niah-transformers.json").unlink()
    text = page(checkpoint)[0].text["untested"]
    assert "vLLM ran FLASH_ATTN (FA3), not TRITON_ATTN, FLASHINFER" in text
    assert "Prompts beyond 256 tokens: the model's context is 512, so 50% of it holds no needle." in text


def test_heatmaps_mark_what_was_lost(checkpoint):
    cells = cells_of(lambda length, depth, seed: (length, depth) != (256, 0.5))
    save(needles_of(checkpoint, calibrated=cells), checkpoint / FOLDER / "niah-transformers.json")
    _, html = page(checkpoint)
    squares = re.findall(r'<td class="square([^"]*)" style="background:(#[0-9a-f]{6});color:(#\w+)">([^<]*)</td>', html)
    assert ("worse", "#00224e", "#fff", "0/2 ▼2") in [(kind.strip(), *rest, text.strip()) for kind, *rest, text in squares]
    assert ("", "#fee838", "#000", "2/2") in squares


def test_kv_shared_layers_and_heads_are_drawn(tmp_path):
    out = calibrated(tiny_checkpoint(tmp_path / "source", "gemma3n_text"), tmp_path / "out", granularity="head")
    plots = content_of(read_material(out), POLICY, "default").ranges
    assert [(plot.kind, plot.svg.count("<title>")) for plot in plots] == [("K", 4), ("V", 4), ("Q", 6)]
    assert "of 4 layers beyond 448" in plots[0].summary


def test_without_statistics_the_plot_says_why(checkpoint):
    (checkpoint / "kv_calibration/statistics.safetensors").unlink()
    seen, _ = page(checkpoint)
    assert "svg" not in seen.tags
    assert "Not shown" in seen.text["ranges"]


def test_the_command_writes_both_files(passing, tmp_path):
    policy = tmp_path / "ours.yaml"
    policy.write_text(f"accept_versions: ['{installed_vllm()}']\n")
    html, card = tmp_path / "r.html", tmp_path / "card.md"
    done = CliRunner().invoke(main, ["report", str(passing), "-o", str(html), "--markdown", str(card), "--policy", str(policy), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verdict"]["passed"]
    assert "policy ours.yaml" in html.read_text()
    text = card.read_text()
    for words in ("**Release: 17 checks passed, 1 waived.**", "| FP8, calibrated | 1.0020", "30 of 30", "Not tested:", "kv-calibrate run MODEL"):
        assert words in text
    assert not re.search(r"\n\n\n\n", text)


def test_a_failing_verdict_is_still_a_report(checkpoint):
    with_fidelity(checkpoint, "calibrated", perplexity=99.0, kl_p99=Interval(value=7.0, low=6.0, high=8.0))
    (checkpoint / FOLDER / "niah-transformers.json").unlink()
    written = write_report(checkpoint)
    assert written.html == checkpoint / "kv_calibration/report.html"
    assert not written.verdict.passed
    assert "Do not release" in written.html.read_text()


@pytest.mark.parametrize("arguments", [["--policy", "nowhere.yaml"], ["-o", "."]])
def test_wrong_usage(passing, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["report", str(passing), *arguments])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_local_path_is_published(llama, passing):
    assert (public("/home/me/chats.jsonl"), public("~/x.txt"), public("HuggingFaceH4/ultrachat"), public("builtin:code")) == (
        "chats.jsonl",
        "x.txt",
        "HuggingFaceH4/ultrachat",
        "builtin:code",
    )
    assert command({"data": "/home/me/a b.jsonl", "seed": 3}, {"policy": "mse"}) == (
        "kv-calibrate run MODEL --data 'a b.jsonl' --seed 3 --policy mse"
    )
    html = page(passing)[1]
    assert str(passing.parent) not in html
    assert str(llama.parent) not in html
