"""hae-report: what stands on the page, and what it does with input that is not as it should be."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import small_comparison as small

import hae
from hae.report import page
from hae.report.program import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with trace.h5, results, certificate.json and closed.json."""
    place = tmp_path_factory.mktemp("report")
    trace = small.write_trace(place / "trace.h5")
    small.compare(trace, place / "results")
    certificate = place / "certificate.json"
    options = ("--policy", "hae:bin=2,budget=8", "--epsilon", "0.99", "--json", certificate)
    small.hae_program("certify", trace, *options)
    figure = {"mean": 0.5, "interval95": [0.25, 0.75], "groups": 2}
    closed = {
        "schema": "hae.closed-loop/1",
        "manifest": {"command": "hae-closed-loop </script>", "model": "m<b>", "match": None},
        "sequences": [{}, {}],
        "runs": [],
        "summary": [{"policy": "greedy:budget=8", "sequences": 2, "closed.token_accuracy": figure}],
    }
    (place / "closed.json").write_text(json.dumps(closed))
    return place


def report(place, out, *options):
    return main([str(place / "results"), "-o", str(out), *map(str, options)])


@pytest.fixture(scope="module")
def text(place):
    out = place / "report.html"
    options = ("--certificate", place / "certificate.json", "--closed-loop", place / "closed.json")
    assert report(place, out, *options) == 0
    return out.read_text(encoding="utf-8")


def without_plotly(text):
    return text.replace(page.get_plotlyjs(), "")


def copy_of(place, tmp_path):
    """Its own results, to be spoilt; the trace stays where it is."""
    shutil.copytree(place / "results", tmp_path / "results")
    return tmp_path


def change(path, edit):
    result = json.loads(path.read_text())
    edit(result)
    path.write_text(json.dumps(result))


def cells(text, table):
    """[row][column] text of the body of a table."""
    body = re.search(rf'<table[^>]* id="{table}">.*?<tbody>(.*?)</tbody>', text, re.DOTALL).group(1)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    strip = re.compile(r"<[^>]*>")
    return [
        [html.unescape(strip.sub("", c)).strip() for c in re.findall(r"<t[hd].*?</t[hd]>", r, re.S)]
        for r in rows
    ]


# ---------------------------------------------------------------------------- what stands on it


def test_the_table_of_policies_has_the_figures_of_the_result(place, text):
    summary = json.loads((place / "results/result.json").read_text())["summary"]
    rows = cells(text, "summary")
    assert [row[0] for row in rows] == [line["policy"] for line in summary]
    for row, line in zip(rows, summary, strict=True):
        mass = line["decode.missed_mass.mean"]
        half = mass["interval95"][1] - mass["mean"]
        assert row[1] == f"{mass['mean']:.4f} ± {half:.4f}"
        assert row[2] == f"{line['optimal_mean']['mean']:.4f}"
        assert row[6] == f"{line['bytes.mean']['mean'] / 1024:.1f}"
        assert row[7] == f"{line['tokens.mean']['mean']:.1f}"


def test_the_table_of_runs_has_every_run(place, text):
    runs = json.loads((place / "results/result.json").read_text())["runs"]
    rows = cells(text, "runs")
    assert len(rows) == len(runs) == 10
    for row, run in zip(rows, runs, strict=True):
        assert row[1] == run["policy"]
        assert row[2] == f"{run['decode']['missed_mass']['mean']:.4f}"
        assert row[8] == str(run["evictions"])


def test_unequal_memory_is_marked_where_it_is(place, text):
    summary = json.loads((place / "results/result.json").read_text())["summary"]
    marks = {row[0]: row[-1] for row in cells(text, "summary")}
    unequal = {line["policy"]: line["unequal"] for line in summary}
    assert any(unequal.values()) and not all(unequal.values())
    for policy, mark in marks.items():
        assert ("unequal" in mark) == bool(unequal[policy]), policy
    assert "evicts nothing" in marks["full"]
    size = {line["policy"]: line["bytes.mean"]["mean"] for line in summary}
    assert (
        f"×{size['window:recent=6'] / size[summary[0]['policy']]:.2f}" in marks["window:recent=6"]
    )


def test_the_claims_and_the_closed_loop_stand_on_it_when_given(place, text):
    claims = json.loads((place / "certificate.json").read_text())["claims"]
    rows = cells(text, "claims-table")
    assert [row[0].split()[0] for row in rows] == [claim["id"] for claim in claims]
    assert all(row[-1].startswith(c["verdict"]) for row, c in zip(rows, claims, strict=True))
    assert "Closed loop</h2>" in text and "hae-closed-loop &lt;/script&gt;" in text


def test_without_them_they_do_not(place, tmp_path):
    assert report(place, tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert 'id="claims"' not in text and 'id="closed"' not in text


def test_the_command_repeats_the_comparison(place, text, tmp_path):
    """Its words, read by a shell, compare to the same figures."""
    command = html.unescape(re.search(r'<pre id="command"[^>]*>(.*?)</pre>', text, re.S).group(1))
    words = shlex.split(command)
    assert words[:2] == ["hae", "compare"]
    out = tmp_path / "again.json"
    small.hae_program(*words[1:], "--allow-unequal", "--json", out)
    first = json.loads((place / "results/result.json").read_text())
    assert json.loads(out.read_text())["runs"] == first["runs"]


def test_a_path_that_a_shell_would_split_is_quoted(tmp_path):
    folder = tmp_path / "it's; rm -rf $HOME <b>"
    folder.mkdir()
    small.compare(small.write_trace(folder / "t.h5"), tmp_path / "results", policies=("full",))
    assert report(tmp_path, tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    command = html.unescape(re.search(r'<pre id="command"[^>]*>(.*?)</pre>', text, re.S).group(1))
    assert shlex.split(command)[2] == str(folder / "t.h5")


def test_the_page_is_alone(text):
    page_itself = without_plotly(text)
    assert len(page_itself) < len(text)
    page_itself = re.sub(
        r"(?<=<body>).*?(?=</main>)",
        lambda m: m[0].replace(html.escape(small.NAMES[0]), ""),
        page_itself,
        flags=re.S,
    )
    for reference in re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\'\s>)]+)', page_itself):
        assert reference.startswith(("#", "data:")), reference
    assert "default-src 'none'" in page_itself
    assert text.count(page.get_plotlyjs()) == 1


def test_the_same_input_gives_the_same_bytes(place, text):
    """In another process, with another hash seed."""
    options = ("--certificate", place / "certificate.json", "--closed-loop", place / "closed.json")
    words = [
        sys.executable,
        "-m",
        "hae.report",
        place / "results",
        "-o",
        place / "b.html",
        *options,
    ]
    subprocess.run([*map(str, words)], check=True, capture_output=True, timeout=120)
    assert (place / "b.html").read_bytes() == text.encode()


def test_hostile_names_stay_text(text):
    page_itself = without_plotly(text)
    assert "<img src=x" not in page_itself
    assert "alert(1)" in page_itself and "<script>alert(1)" not in page_itself
    assert "\u202e" not in page_itself and "⟨202E⟩" in page_itself


def test_what_is_no_number_reads_as_a_dash(place, tmp_path):
    copy = copy_of(place, tmp_path)
    path = copy / "results/result.json"

    def spoil(result):
        result["runs"][0]["decode"]["missed_mass"]["mean"] = float("nan")
        result["runs"][0]["optimal_mean"] = None
        result["summary"][0]["decode.missed_mass.mean"]["mean"] = None

    change(path, spoil)
    assert "NaN" in path.read_text()
    assert report(copy, tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert cells(text, "runs")[0][2:4] == ["–", "–"]
    assert cells(text, "summary")[0][1] == "–"
    body = without_plotly(text).split("<body>")[1].split("<script>")[0]
    assert "NaN" not in re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)


def test_a_comparison_without_decode_steps_has_a_page(tmp_path):
    one = hae.sequence(prompt=4, **dict.fromkeys("qkv", np.ones((1, 1, 4, 2))))
    hae.write(tmp_path / "t.h5", [one])
    small.compare(tmp_path / "t.h5", tmp_path / "results", policies=("window:recent=2", "full"))
    assert report(tmp_path, tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert "No decode row has a missed mass." in text
    assert cells(text, "runs")[0][2:6] == ["–"] * 4


def test_much_is_left_out_and_the_page_says_so(place, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_RUNS", 3)
    monkeypatch.setattr(page, "MOST_SEQUENCES", 1)
    monkeypatch.setattr(page, "MOST_TOKENS", 1)
    assert report(place, tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert len(cells(text, "runs")) == 3 and "The first 3 of 10 runs are listed" in text
    assert "1 of 2 sequences are shown in detail" in text
    assert "Not every lane fits on the page" in text


# ---------------------------------------------------------------------------- traces elsewhere


def test_a_trace_that_moved_is_known_by_its_bytes(place, tmp_path, monkeypatch):
    trace = small.write_trace(tmp_path / "t.h5")
    small.compare(trace, tmp_path / "results")
    moved = trace.rename(tmp_path / "moved.h5")
    assert report(tmp_path, tmp_path / "r.html") == 0
    assert "A trace is missing." in (tmp_path / "r.html").read_text()
    assert "name the right file with --trace" in (tmp_path / "r.html").read_text()
    assert report(tmp_path, tmp_path / "r.html", "--trace", moved) == 0
    text = (tmp_path / "r.html").read_text()
    assert "A trace is missing." not in text and 'id="plot-picture"' in text


def test_a_trace_that_changed_is_not_used(tmp_path):
    trace = small.write_trace(tmp_path / "t.h5")
    small.compare(trace, tmp_path / "results")
    with h5py.File(trace, "r+") as file:
        file["sequences/000000"].attrs["group"] = "another"
    assert report(tmp_path, tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert "has changed: its SHA-256 is" in text and 'id="plot-picture"' not in text
    assert len(cells(text, "runs")) == 10


def test_another_trace_is_refused(place, tmp_path, capsys):
    other = tmp_path / "other.h5"
    hae.write(other, [hae.sequence(prompt=2, **dict.fromkeys("qkv", np.ones((1, 1, 3, 2))))])
    assert report(place, tmp_path / "r.html", "--trace", other) == 2
    assert "was made from no such bytes" in one_line(capsys)
    assert report(place, tmp_path / "r.html", "--trace", tmp_path / "none.h5") == 2
    assert "none.h5: cannot be read" in one_line(capsys)
    assert not (tmp_path / "r.html").exists()


def test_sequences_are_chosen_by_name_or_number(place, tmp_path, capsys):
    assert report(place, tmp_path / "r.html", "--sequence", small.NAMES[1]) == 0
    by_name = (tmp_path / "r.html").read_text()
    assert report(place, tmp_path / "r.html", "--sequence", "1") == 0
    assert (tmp_path / "r.html").read_text() == by_name
    assert report(place, tmp_path / "r.html", "--sequence", "2") == 2
    assert "--sequence 2: no sequence of the result" in one_line(capsys)


# ------------------------------------------------------------------------------------- bad input


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("hae-report: ") and error.count("\n") == 1 and error.endswith("\n")
    assert "Traceback" not in error
    return error


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_json(text):
    return lambda folder: (folder / "result.json").write_text(text)


def edited(edit):
    return lambda folder: change(folder / "result.json", edit)


def no_run_file(folder):
    (folder / "runs.h5").write_text("text")


def of_another_run(folder):
    with h5py.File(folder / "runs.h5", "r+") as file:
        file["runs/000001"].attrs["policy"] = "window"


def unfinished(folder):
    with h5py.File(folder / "runs.h5", "r+") as file:
        file.attrs["complete"] = 0


def linked(folder):
    with h5py.File(folder / "runs.h5", "r+") as file:
        del file["runs/000000/attention_tokens"], file["runs/000000/log/step"]
        file["runs/000000/log/step"] = h5py.ExternalLink("/etc/passwd", "/x")


def bomb(folder):
    with h5py.File(folder / "runs.h5", "r+") as file:
        del file["runs/000000/decode/missed_mass"]
        file["runs/000000/decode"].create_dataset("missed_mass", (2**20, 2**20, 1), "f8")


def with_log(name, edit):
    def change_column(folder):
        with h5py.File(folder / "runs.h5", "r+") as file:
            log = file["runs/000001/log"]
            column = edit(log[name][()])
            del log[name]
            log[name] = column

    return change_column


def without_a_log(folder):
    with h5py.File(folder / "runs.h5", "r+") as file:
        del file["runs/000001/log"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "result.json").unlink(), "has no result.json"),
        (lambda folder: (folder / "runs.h5").unlink(), "runs.h5: cannot be opened"),
        (lambda folder: cut(folder / "result.json"), "is no JSON"),
        (lambda folder: cut(folder / "runs.h5"), "truncated"),
        (no_run_file, "cannot be opened as HDF5"),
        (unfinished, "incomplete"),
        (of_another_run, "are of different runs"),
        (linked, "log/step: cannot be read"),
        (bomb, "missed_mass: cannot be read: 0 bytes are stored"),
        (without_a_log, "cannot be read"),
        (with_log("token", lambda column: column + 1000), "tokens that are not there"),
        (with_log("token", lambda column: column * 0), "tokens that are not there"),
        (with_log("step", lambda column: -column - 1), "tokens that are not there"),
        (with_log("layer", lambda column: column + 0.5), "no column of whole numbers"),
        (with_log("token", lambda column: column[:-1]), "not equally long"),
        (
            with_json('{"schema":"hae.stats/1"}'),
            "is of schema 'hae.stats/1', expected hae.compare/1",
        ),
        (with_json("[]"), "has no schema"),
        (with_json("[" * 100_000), "is no JSON"),
        (with_json('{"schema":"hae.compare/1"}'), "is not as hae.compare/1 says"),
        (edited(lambda r: r["runs"].pop()), "are of different runs"),
        (edited(lambda r: r.update(manifest=3)), "is not as hae.compare/1 says"),
        (edited(lambda r: r["runs"][3].pop("bytes")), "is not as hae.compare/1 says"),
        (edited(lambda r: r["runs"][3].update(per_layer=[])), "runs[3].per_layer is list"),
        (
            edited(lambda r: r["summary"][1].update({"tokens.mean": "x"})),
            "summary[1].tokens.mean is str",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_bad_input(place, tmp_path, capsys, spoil, words):
    copy = copy_of(place, tmp_path)
    spoil(copy / "results")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert report(copy, tmp_path / "r.html") == 3
    assert words in one_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--certificate", "--closed-loop"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ('{"schema":"hae.compare/1"}', "is of schema"),
        ('{"schema":"SCHEMA","summary":3,"decay":4}', "says: "),
    ],
)
def test_a_further_file_that_is_not_whole_is_bad_input(
    place, tmp_path, capsys, option, content, words
):
    path = tmp_path / "further.json"
    schema = "hae.certify/1" if option == "--certificate" else "hae.closed-loop/1"
    if content is not None:
        path.write_text(content.replace("SCHEMA", schema))
    assert report(place, tmp_path / "r.html", option, path) == 3
    assert words in one_line(capsys)
    assert not (tmp_path / "r.html").exists()


def test_where_the_page_cannot_be_written_nothing_is_done(place, tmp_path, capsys):
    inputs = (place / "results" / "result.json", place / "trace.h5")
    before = [path.read_bytes() for path in inputs]
    too_long = tmp_path / ("x" * 300)
    for out in (tmp_path, tmp_path / "no" / "r.html", too_long, *inputs):
        assert report(place, out) == 2
        assert f"-o {out}" in one_line(capsys)
    assert [path.read_bytes() for path in inputs] == before
    assert list(tmp_path.iterdir()) == []


def test_what_is_absent_reads_as_null(place, tmp_path):
    copy = copy_of(place, tmp_path)

    def without(result):
        for run in result["runs"]:
            del run["optimal_mean"], run["tokens"]
        del result["summary"][0]["decode.missed_mass.mean"]["mean"]

    change(copy / "results" / "result.json", without)
    assert report(copy, tmp_path / "r.html") == 0


def test_a_small_number_does_not_read_as_none():
    assert page._number(2e-6) == "2.0e-06"
    assert page._number(0.0) == "0.0000"
    assert page._number(0.25) == "0.2500"


def test_an_earlier_page_stays_when_the_input_is_bad(place, tmp_path, capsys):
    copy = copy_of(place, tmp_path)
    (tmp_path / "r.html").write_text("earlier")
    cut(copy / "results" / "runs.h5")
    assert report(copy, tmp_path / "r.html") == 3
    assert (tmp_path / "r.html").read_text() == "earlier"


def test_usage_is_one_line(capsys):
    for words in ([], ["x"], ["x", "-o", "y", "--nonsense"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        one_line(capsys)


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(4, 9, [0, 1, 2, 3]), (4, 0, [0]), (9, 3, [0, 4, 8]), (1, 1, [0]), (32, 2, [0, 31])],
)
def test_layers_that_are_shown_are_spread(count, most, expected):
    assert page._spread(count, most) == expected
