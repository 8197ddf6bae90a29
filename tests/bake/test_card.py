"""The model card as a pure function: what it says to a YAML parser and to a Markdown parser, whatever names it is given."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from arctool.bake.account import Account, GroupSpent, Tried
from arctool.bake.card.markdown import code, sentence, table
from arctool.bake.card.page import card
from arctool.bake.card.subject import CardLayer, Subject
from arctool.uqff.container import BakeInfo, LayerDetails, LayerRecord, Quality
from arctool.uqff.inspect import FileRow, Inspection, Totals

INFO = BakeInfo(
    rung="qtip2",
    seed=7,
    recipe={
        "default": "qtip2",
        "fallback": "bf16",
        "vocabulary": "q8_0",
        "rules": [
            {"rung": "qtip4", "match": "*.v_proj", "first": 0, "end": 4},
            {"rung": "bf16", "match": "*.o_proj", "first": None, "end": 0},
        ],
    },
    base_model="org/Name-1.5",
    fingerprint="f00d",
    licence="apache-2.0",
    algorithm="feedback-rows-2",
    calibration={"text": "c0ffee", "tokens": 32768, "window": 1024, "sampled": 4096, "auto": True},
)
QUALITY = Quality("evaluation.txt", "abc0", "def1", 1024, 2048, 2046, 12.3456, 10.98765, 0.123456, 2.5, 0.8125)


def layer(module: str, rung: str, role: str, shape: tuple[int, int], bits: float, nbytes: int, **details: Any) -> CardLayer:
    stored = {"qtip2": "trellis-k4v2l16-f32", "qtip4": "trellis-k4v1l12-bf16"}.get(rung, rung)
    return CardLayer(LayerRecord(module, shape, stored, nbytes, bits, LayerDetails(rung, rung, **details)), rung, role)


LAYERS = (
    layer("model.embed_tokens", "q8_0", "embedding", (100, 10), 8.5, 1100, relative_error=2e-5),
    layer("a.q_proj", "qtip2", "linear", (10, 10), 2.5, 40, relative_error=0.25, proxy_error=0.0625),
    layer("a.k_proj", "qtip2", "linear", (10, 30), 2.1, 90, relative_error=0.05, proxy_error=0.125),
    layer("a.v_proj", "qtip4", "linear", (10, 20), 4.3, 110, relative_error=0.0078125, proxy_error=0.004),
)
FILES = (("model-0.uqff", 6000), ("residual.safetensors", 500), ("config.json", 70), ("LICENSE", 11), ("tokenizer.json", 900))
CONTENTS = Inspection(
    path="/home/somebody/secret", uqff_version="1.2.0", producer="arctool", producer_version="0.1.0", rung=None, seed=None, source=None,
    licence=None, layers=(), residual=(), files=tuple(FileRow(*file) for file in FILES), totals=Totals(7481, 1620, 1600, 6.0, 5.875, 4000),
)  # fmt: skip
SUBJECT = Subject(INFO, LAYERS, CONTENTS, QUALITY, ("LICENSE",), "0.1.0")


def front(text: str) -> dict[str, Any]:
    """The fields as a hub reads them: the YAML between the first two lines of dashes."""
    _, fields, _ = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)
    found: dict[str, Any] = yaml.safe_load(fields)
    return found


def inline(text: str) -> list[Token]:
    """All inline tokens of the body, as CommonMark with tables has them."""
    body = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)[2]
    blocks = MarkdownIt("commonmark").enable("table").parse(body)
    assert not [block for block in blocks if block.type == "html_block"]
    return [token for block in blocks for token in block.children or []]


def shown(text: str) -> list[str]:
    """What a reader sees, one line of the page each."""
    body = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)[2]
    blocks = MarkdownIt("commonmark").enable("table").parse(body)
    return ["".join(token.content for token in block.children or []) for block in blocks if block.type == "inline"]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, as a reader sees them."""
    body = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)[2]
    found: list[list[str]] = []
    for block in MarkdownIt("commonmark").enable("table").parse(body):
        if block.type == "tr_open":
            found.append([])
        elif block.type == "inline" and block.level == 4:
            found[-1].append("".join(token.content for token in block.children or []))
    return found


def test_the_front_matter_says_what_a_hub_asks_for() -> None:
    found = front(card(SUBJECT))
    assert found == {
        "license": "apache-2.0",
        "base_model": "org/Name-1.5",
        "base_model_relation": "quantized",
        "library_name": "arctool",
        "pipeline_tag": "text-generation",
        "tags": ["arctool", "uqff", "qtip", "quantized"],
    }


@pytest.mark.parametrize(
    ("licence", "name", "link", "files", "fields"),
    [
        ("mit", None, None, (), {"license": "mit"}),
        ("mit", None, None, ("LICENSE",), {"license": "mit"}),
        (None, None, None, (), {"license": "unknown"}),
        ("LICENSE", None, None, ("LICENSE", "NOTICE"), {"license": "other", "license_link": "LICENSE"}),
        ("license", None, None, ("license",), {"license": "other", "license_link": "license"}),
        ("Some Licence 2", None, None, (), {"license": "other", "license_name": "Some Licence 2"}),
        ("other", "qwen", "https://x.y/z", ("LICENSE",), {"license": "other", "license_name": "qwen", "license_link": "https://x.y/z"}),
        ("other", "qwen", None, ("LICENSE",), {"license": "other", "license_name": "qwen", "license_link": "LICENSE"}),
    ],
)
def test_the_licence_is_carried_over(
    licence: str | None, name: str | None, link: str | None, files: tuple[str, ...], fields: dict[str, str]
) -> None:
    info = replace(INFO, licence=licence, licence_name=name, licence_link=link)
    text = card(replace(SUBJECT, info=info, licence_files=files))
    found = front(text)
    assert {key: value for key, value in found.items() if key.startswith("license")} == fields
    section = text.split("## Licence")[1]
    assert all(code(part) in section for part in (name, link, *files) if part is not None)
    assert (licence is None) == ("declares none" in section)


@pytest.mark.parametrize(
    ("name", "base", "said"),
    [
        ("org/name@v1.0", "org/name", "at revision v1.0"),
        ("org/name", "org/name", "org/name"),
        ("local", "local", "local"),
        ("../up", "../up", "../up"),
    ],
)
def test_a_hub_name_is_a_link_and_its_revision_is_told_apart(name: str, base: str, said: str) -> None:
    text = card(replace(SUBJECT, info=replace(INFO, base_model=name)))
    assert front(text)["base_model"] == base
    assert any(said in row[1] for row in rows(text) if row[0] == "source")
    links = [token.attrs["href"] for token in inline(text) if token.type == "link_open"]
    assert links == ([f"https://huggingface.co/{base}"] if base == "org/name" else [])


def test_a_model_without_a_name_has_no_base_model() -> None:
    text = card(replace(SUBJECT, info=replace(INFO, base_model=None, fingerprint=None, algorithm=None)))
    assert "base_model" not in front(text)
    assert "a model without a name" in text


HOSTILE = (
    "a\n---\nlicense: mit\n---\n# Owned",
    "<script>alert(1)</script>",
    "</code><img src=x onerror=alert(1)>",
    "[click](https://evil.example)",
    "![x](https://evil.example/track.png)",
    "`<b>`` x ```",
    "a | b \\| <i>c</i> | d\\",
    "https://evil.example www.evil.example a@evil.example",
    "| --- | --- |",
    "# heading",
    "'\"{}: &anchor *alias !!python/object:os.system [x]",
    "\u202eevil\u2028line\x1b[31m\x00",
    "`",
    "",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_ever_text(name: str) -> None:
    details = LayerDetails("qtip2", name, name, 0.5, 0.5, 3, name)
    info = replace(
        INFO, base_model=name, licence=name, licence_name=name, fingerprint=name, algorithm=name, rung=name,
        recipe={"default": name, "vocabulary": name, "fallback": name, "rules": [{"match": name, "rung": name, "first": None}]},
        calibration={"text": name, "tokens": 5, "window": 4, "auto": False},
    )  # fmt: skip
    worst = CardLayer(LayerRecord(name, (4, 4), "trellis", 9, 2.0, details), name, "linear")
    text = card(Subject(info, (*LAYERS, *[worst] * 40), CONTENTS, replace(QUALITY, text=name), (), "0.1.0"))
    printable = "".join(c if c.isprintable() else "\ufffd" for c in name)
    found = front(text)
    assert set(found) == {*front(card(SUBJECT)), "license_name"}
    assert (found["base_model"], found["license"], found["license_name"]) == (printable, "other", printable)
    kinds = {token.type for token in inline(text)}
    assert kinds <= {"text", "code_inline", "softbreak", "link_open", "link_close"}
    assert [token for token in inline(text) if token.type == "link_open"] == []
    spans = [token.content for token in inline(text) if token.type == "code_inline"]
    assert spans.count(printable or "\ufffd") >= 8
    headings = [line for line in card(SUBJECT).splitlines() if line.startswith("##")]
    assert [line for line in text.splitlines() if line.startswith("#")] == [f"# {code(name)} at {code(name)}", *headings]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_code_span_and_a_sentence_say_their_text_and_nothing_else(text: str) -> None:
    plain = "".join(c if c.isprintable() else "\ufffd" for c in text)
    parser = MarkdownIt("commonmark")
    (block,) = (token for token in parser.parse(f"x {code(text)} y") if token.type == "inline")
    assert [(token.type, token.content) for token in block.children or []] == [
        ("text", "x "),
        ("code_inline", plain or "\ufffd"),
        ("text", " y"),
    ]
    (block,) = (token for token in parser.parse(f"x {sentence(text)} y") if token.type == "inline")
    assert {token.type for token in block.children or []} == {"text"}
    assert "".join(token.content for token in block.children or []) == f"x {plain} y"


def test_addresses_in_a_sentence_are_no_links_to_a_hub_that_looks_for_them() -> None:
    """GitHub's Markdown links bare addresses; it looks at the text before escapes are taken away."""
    said = sentence("see https://a.b, WWW.c.d or e@f.g, $x$")
    assert not re.search(r"https?://|(?i:www)\.|[^\\]@|[^\\]\$", said)


def test_a_bar_in_a_cell_is_no_wall_of_the_table() -> None:
    text = table(("a", "b"), [("x|y", "z"), ("x\\|<b>y</b>", "z")])
    cells = [token for token in MarkdownIt("commonmark").enable("table").parse(text) if token.type == "inline"]
    assert [cell.content for cell in cells[:4]] == ["a", "b", "x|y", "z"]
    assert len(cells) == 6
    # Where backslashes are counted in pairs, an escaped one would leave the bar bare.
    assert "\\\\|" not in text


def test_bits_and_weights_are_counted_by_rung_and_part() -> None:
    text = card(SUBJECT)
    # linear: (100 · 2.5 + 300 · 2.1 + 200 · 4.3) / 600; the two at qtip2: (250 + 630) / 400
    assert ["bits a weight", "2.900 in linear layers, 5.875 in all"] in rows(text)
    assert ["weights", "1,620"] in rows(text)
    assert ["linear", "qtip2", "trellis-k4v2l16-f32", "2", "400", "2.200"] in rows(text)
    assert ["linear", "qtip4", "trellis-k4v1l12-bf16", "1", "200", "4.300"] in rows(text)
    assert ["embedding", "q8_0", "q8_0", "1", "1,000", "8.500"] in rows(text)


def test_the_rules_of_the_recipe_are_told_with_their_layers() -> None:
    said = shown(card(SUBJECT))
    assert "*.v_proj in layers 0 to 3: qtip4" in said
    assert "*.o_proj: bf16" in said
    assert "default of the linear layers: qtip2" in said
    assert "embedding and head: q8_0" in said
    many = [{"rung": "qtip4", "match": f"x{index}", "first": None} for index in range(70)]
    text = card(replace(SUBJECT, info=replace(INFO, recipe={"default": "qtip2", "rules": many})))
    assert "`x63`" in text
    assert "`x64`" not in text
    assert "and 6 rules more: `uqff_report.json` has all" in text


def test_the_sizes_of_the_parts_add_up_to_all() -> None:
    section = card(SUBJECT).split("## Size")[1].split("##")[0]
    found = {row[0]: int(row[1].replace(",", "")) for row in rows(f"---\n---\n{section}") if row[0] != "part"}
    whole = found.pop("all, without this page and the report")
    assert whole == sum(size for _, size in FILES) == 7481
    assert sum(found.values()) == whole
    assert found == {
        "embedding (1 layer)": 1100,
        "linear (3 layers)": 240,
        "tables of the rungs": 4000,
        "headers of the shards": 6000 - 4000 - 1340,
        "norms and other small tensors": 500,
        "configuration, tokenizer, licence": 981,
    }


def test_mean_and_worst_errors_are_told_by_rung() -> None:
    text = card(SUBJECT)
    # qtip2: relative (100 · 0.25 + 300 · 0.05) / 400, output (100 · 0.0625 + 300 · 0.125) / 400
    assert ["qtip2", "2", "0.1", "0.25 (a.q_proj)", "0.1094", "0.125 (a.k_proj)"] in rows(text)
    assert ["q8_0", "1", "2e-05", "2e-05 (model.embed_tokens)", "–", "–"] in rows(text)
    plain = (layer("a", "bf16", "linear", (2, 2), 16.0, 8),)
    assert "No layer is quantised." in card(replace(SUBJECT, layers=plain))


def test_what_was_measured_is_told_with_text_hash_and_count() -> None:
    text = card(SUBJECT)
    assert ["perplexity", "12.35, its source 10.99"] in rows(text)
    assert ["KL divergence from the source, mean", "0.1235 nats a token"] in rows(text)
    assert ["KL divergence, 99th percentile", "2.5 nats a token"] in rows(text)
    assert ["same likeliest token as the source", "81.2%"] in rows(text)
    (line,) = (line for line in shown(text) if line.startswith("Over "))
    assert line.startswith(
        "Over 2,046 predicted of the first 2,048 tokens of arctool's evaluation.txt (SHA-256 abc0), read in windows of at most 1,024; "
        "SHA-256 of the tokens: def1."
    )


def test_what_was_not_measured_is_told_with_the_reason_and_the_way() -> None:
    text = card(replace(SUBJECT, quality="it has *more* weights"))
    (line,) = (line for line in shown(text) if "not measured" in line)
    assert line.endswith("when it was baked: it has *more* weights.")
    assert "arctool eval DIRECTORY --against SOURCE" in text
    assert "perplexity" not in text.lower()
    assert any(row[:2] == ["qtip2", "2"] for row in rows(text))


@pytest.mark.parametrize(
    ("calibration", "said"),
    [
        (None, "without regard to what a layer sees"),
        (
            {"text": "c0ffee", "tokens": 32768, "window": 1024, "sampled": 4096, "auto": True},
            "32,768 tokens of the public-domain text that ships with arctool, 4,096 of them written by the model itself, in windows of "
            "1024; identity c0ffee. No row",
        ),
        (
            {"text": "c0ffee", "tokens": 999, "window": 64, "sampled": 0, "auto": False},
            "999 tokens of text that whoever baked it chose, in windows of 64; identity c0ffee. No row",
        ),
        ({}, "an unknown number of tokens of text that whoever baked it chose, in windows of unknown; identity unknown."),
    ],
)
def test_the_calibration_is_told(calibration: dict[str, Any] | None, said: str) -> None:
    text = card(replace(SUBJECT, info=replace(INFO, calibration=calibration)))
    (line,) = (line for line in shown(text) if said in line)
    assert "/home" not in line


def test_rows_that_were_dropped_are_counted_with_the_worst_layer() -> None:
    lossy = (
        *LAYERS,
        layer("b.q_proj", "qtip2", "linear", (2, 2), 2.0, 1, dropped_rows=3),
        layer("b.up_proj", "qtip2", "linear", (2, 2), 2.0, 1, dropped_rows=1200),
    )
    text = card(replace(SUBJECT, layers=lossy))
    assert "left out in 2 layers, at most 1,200 (`b.up_proj`)" in text
    assert "No row" not in text


def test_layers_that_fell_back_are_named_with_the_reason_up_to_a_number() -> None:
    assert "None: every layer got what the recipe says." in card(SUBJECT)
    fallen = layer("b.down_proj", "bf16", "linear", (2, 90), 16.0, 1, fallback_reason="90 inputs are not a multiple of V=4")
    fallen = replace(fallen, record=replace(fallen.record, details=replace(fallen.record.details, resolved_target="qtip2-v4")))
    noted = layer("b.up_proj", "qtip2", "linear", (2, 2), 2.0, 1, note="rounded without feedback: no rows")
    text = card(replace(SUBJECT, layers=(fallen, noted)))
    said = shown(text)
    assert "b.down_proj: bf16 instead of qtip2-v4: 90 inputs are not a multiple of V=4" in said
    assert "b.up_proj: rounded without feedback: no rows" in said
    many = tuple(layer(f"c{index}", "qtip2", "linear", (2, 2), 2.0, 1, note="why") for index in range(30))
    text = card(replace(SUBJECT, layers=many))
    assert text.count(": why") == 24
    assert "and 6 more: `uqff_report.json` has all" in text


def test_nothing_of_the_machine_is_in_it() -> None:
    text = card(SUBJECT)
    assert "/home" not in text
    assert "secret" not in text
    assert text.endswith(".\n")
    assert not re.search(r"\b20[2-9]\d\b", text)


def test_a_long_name_is_not_folded_by_the_yaml_writer() -> None:
    name = "x " * 3000
    text = card(replace(SUBJECT, info=replace(INFO, base_model=name)))
    assert front(text)["base_model"] == name
    assert text.index("\n---\n") - len(name) < 400
    assert text.count("\n") == card(SUBJECT).count("\n")


ACCOUNT = Account(
    algorithm="budget-1",
    question="q",
    asked=2.75,
    chosen="mixed",
    rung="qtip2-v4",
    uniform=Tried(2.05, 0.5),
    mixed=Tried(2.74321, 0.25),
    text_sha256="7e47",
    measured_tokens=1024,
    checked_tokens=8190,
    groups=(
        GroupSpent(("a.q_proj", "a.k_proj"), 400, 0.01, "qtip2-v4"),
        GroupSpent(("a.v|proj",), 200, 0.5, "q8_0"),
        GroupSpent(("b.q_proj", "b.k_proj", "b.o_proj"), 600, 0.125, "qtip2-v4"),
    ),
)


def test_how_a_budget_was_spent_is_told() -> None:
    text = card(replace(SUBJECT, info=replace(INFO, budget=ACCOUNT.to_json())))
    assert "## Budget" not in card(SUBJECT)
    assert "2.75 bits a weight of the linear layers were asked for, 2.743 were spent" in text
    assert "over 1,024 tokens" in text
    assert "checked on 8,190 other tokens" in text
    cells = rows(text)
    at = cells.index(["bake", "bits a weight", "mean KL, nats a token"])
    assert cells[at + 1 : at + 6] == [
        ["mixed", "2.743", "0.25"],
        ["uniform qtip2-v4", "2.050", "0.5"],
        ["rung", "layers", "of the weights that were allocated", "which, the costliest first"],
        ["q8_0", "1", "16.7%", "a.v|proj"],
        ["qtip2-v4", "5", "83.3%", "b.q_proj, b.k_proj, b.o_proj, a.q_proj and 1 more"],
    ]


def test_a_budget_that_the_uniform_bake_won_names_it_and_no_layers() -> None:
    kept = replace(ACCOUNT, chosen="uniform", mixed=Tried(2.74321, None))
    text = card(replace(SUBJECT, info=replace(INFO, budget=kept.to_json())))
    cells = rows(text)
    at = cells.index(["bake", "bits a weight", "mean KL, nats a token"])
    assert cells[at + 1 : at + 3] == [["mixed", "2.743", "not measured"], ["uniform qtip2-v4", "2.050", "0.5"]]
    assert "2.050 were spent" in text
    assert "**uniform `qtip2-v4`**" in text
    assert "costliest" not in text


def test_a_budget_that_moves_nothing_says_so() -> None:
    same = replace(ACCOUNT, chosen="uniform", uniform=Tried(2.05, None), mixed=Tried(2.05, None), checked_tokens=0)
    text = card(replace(SUBJECT, info=replace(INFO, budget=same.to_json())))
    assert "2.75 bits a weight of the linear layers were asked for, 2.050 were spent: uniform `qtip2`".replace("qtip2", "qtip2-v4") in text
    assert "checked" not in text
    assert "not measured" not in text


def test_a_mixed_model_is_called_by_its_rate() -> None:
    """Of three linear layers two have the rung that the artifact is named after; nine tenths would make it uniform."""
    assert "# `org/Name-1.5` at 2.900 bits a weight\n" in card(SUBJECT)
    many = (*(replace(LAYERS[1], record=replace(LAYERS[1].record, module=f"b{i}")) for i in range(20)), *LAYERS)
    assert "# `org/Name-1.5` at `qtip2`\n" in card(replace(SUBJECT, layers=many))


def test_rules_that_a_budget_made_are_not_listed_twice() -> None:
    rules = [{"rung": "q8_0", "match": "a.v|proj", "first": None, "end": None}, {"rung": "bf16", "match": "*.o_proj", "first": 0, "end": 2}]
    info = replace(INFO, budget=ACCOUNT.to_json(), recipe={**INFO.recipe, "rules": rules})
    lines = [line for line in card(replace(SUBJECT, info=info)).splitlines() if line.startswith("- ")]
    assert any("*.o_proj" in line for line in lines)
    assert not any("a.v|proj" in line for line in lines)
