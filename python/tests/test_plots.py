"""hae.plots: what a figure draws is what was measured, by the definitions and not by its code."""

import json

import h5py
import numpy as np
import pandas as pd
import pytest
import small_comparison as small

import hae
from hae import fates, plots


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("plots")
    return small.compare(small.write_trace(place / "trace.h5"), place / "results")


@pytest.fixture(scope="module")
def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def comparison(folder):
    return hae.read_comparison(folder)


def runs_of(result, policy):
    return [run for run in result["runs"] if run["policy"] == policy]


def trace_of(figure, policy, mode):
    (found,) = [t for t in figure.data if t.name == policy and (t.mode or "").startswith(mode)]
    return found


# ------------------------------------------------------------------------- a stored comparison


def test_a_folder_holds_what_the_comparison_measured(folder, comparison):
    trace = json.loads((folder / "result.json").read_text())["manifest"]["traces"][0]["path"]
    fresh = hae.compare(trace, small.POLICIES)
    assert comparison.missing == []
    assert comparison.summary.equals(fresh.summary)
    for stored, run in zip(comparison.raw, fresh.raw, strict=True):
        own = run.log
        assert stored.log.token.tolist() == own.token.tolist()
        assert stored.log.step.tolist() == own.step.tolist()
        assert stored.log.pending_since.equals(own.pending_since)
        np.testing.assert_array_equal(stored.log.score, own.score)
        assert stored.pending.token.tolist() == run.pending.token.tolist()
        np.testing.assert_array_equal(stored.decode["missed_mass"], run.decode["missed_mass"])
        np.testing.assert_array_equal(stored.attention_tokens, run.attention_tokens)


def test_a_figure_of_a_folder_is_that_of_the_comparison_in_memory(folder, comparison):
    trace = json.loads((folder / "result.json").read_text())["manifest"]["traces"][0]["path"]
    fresh = hae.compare(trace, small.POLICIES)
    for make in (plots.over_steps, plots.against_memory, plots.layers):
        assert make(folder).to_json() == make(fresh).to_json()
    first = plots.timeline(fresh, 0).to_json()
    assert plots.timeline(comparison, small.POLICIES[0]).to_json() == first


# ---------------------------------------------------------------------------- all policies


@pytest.mark.parametrize("figure", ["missed_mass", "missed_pull", "output_error_relative"])
def test_a_line_over_the_steps_averages_to_the_mean_of_the_result(comparison, result, figure):
    """All sequences have as many steps, and every row is in the population."""
    plot = plots.over_steps(comparison, figure)
    for line in result["summary"]:
        drawn = trace_of(plot, plots._short(line["policy"], 32), "lines")
        assert list(drawn.x) == [1, 2, 3, 4, 5, 6]
        expected = line[f"decode.{figure}.mean"]["mean"]
        assert np.mean(drawn.y) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_line_over_the_steps_of_one_sequence_is_the_mean_of_its_rows(comparison):
    (run,) = hae.replay(comparison.sequences[0], "greedy:budget=8")
    drawn = plots.over_steps(comparison, sequence=0).data[1]
    expected = [np.mean(run.decode["missed_mass"][:, :, step]) for step in range(6)]
    assert list(drawn.y) == pytest.approx(expected, rel=1e-12)


def test_sequences_that_have_ended_are_in_no_mean(tmp_path):
    """One sequence of two decode steps and one of four, where nothing but chance is evicted."""
    random = np.random.default_rng(5)
    sequences = [
        hae.sequence(
            prompt=6,
            **{name: random.standard_normal((1, 1, 6 + n, 4)) for name in ("q", "k", "v")},
            name=str(n),
        )
        for n in (2, 4)
    ]
    comparison = hae.compare(sequences, "window:recent=4")
    short, long = (run.decode["missed_mass"][0, 0] for run in comparison.raw)
    (drawn,) = plots.over_steps(comparison).data
    assert list(drawn.y) == pytest.approx([*(short + long[:2]) / 2, *long[2:]], rel=1e-12)
    assert list(drawn.customdata) == [2, 2, 1, 1]


def test_points_against_memory_are_those_of_the_result(comparison, result):
    plot = plots.against_memory(comparison)
    for number, line in enumerate(result["summary"]):
        every, mean = [t for t in plot.data if t.legendgroup == str(number)]
        runs = runs_of(result, line["policy"])
        assert list(every.x) == [run["bytes"]["mean"] / 1024 for run in runs]
        assert list(every.y) == [run["decode"]["missed_mass"]["mean"] for run in runs]
        assert mean.x[0] == line["bytes.mean"]["mean"] / 1024
        assert mean.y[0] == line["decode.missed_mass.mean"]["mean"]
        low = line["decode.missed_mass.mean"]["interval95"][0]
        assert mean.y[0] - mean.error_y.array[0] == pytest.approx(low)


def test_no_policy_lies_below_optimal(comparison, result):
    plot = plots.against_memory(comparison)
    optimal = plot.data[-1]
    assert optimal.name.startswith("optimal")
    for line in result["summary"]:
        x, y = line["bytes.mean"]["mean"] / 1024, line["decode.missed_mass.mean"]["mean"]
        near = [bound for at, bound in zip(optimal.x, optimal.y, strict=True) if at <= 1.01 * x]
        assert y >= near[-1] - 1e-6
    assert min(optimal.y) == 0  # a full cache misses nothing


def test_cells_of_the_heat_map_are_means_of_the_result(comparison, result):
    (drawn,) = plots.layers(comparison, "missed_pull").data
    assert len(drawn.z) == len(small.POLICIES)
    for row, policy in zip(drawn.z, [line["policy"] for line in result["summary"]], strict=True):
        layers = [run["per_layer"]["decode"]["missed_pull"] for run in runs_of(result, policy)]
        assert list(row) == pytest.approx(np.mean(layers, axis=0).tolist(), rel=1e-12)


def test_without_values_there_is_no_output_error_and_the_figure_says_so():
    row = [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]
    one = hae.sequence(prompt=2, attention=np.array([[row]], np.float32))
    comparison = hae.compare(one, ["window:recent=1,sinks=0", "full"])
    with pytest.raises(plots.NothingToShow, match="output error"):
        plots.over_steps(comparison, "output_error")
    # Token 0 left after the prefill; token 1 is there while step 1 attends.
    assert plots.over_steps(comparison).data[0].y == (0.25,)


# --------------------------------------------------------------------------- attention to come


def test_what_an_evicted_token_would_still_have_received_by_hand():
    """Two heads, decode rows 1..3 over tokens 0..2. Token 0 left after step 1, so rows 2 and 3
    count: means (0.5 + 0.25)/2 = 0.375 and (0.125 + 0.375)/2 = 0.25, together 0.625. Token 1 left
    in the prefill: (1 + 0)/2 + (0.5 + 0.25)/2 + (0 + 0)/2 = 0.875. Token 2 stayed.
    """
    attention = np.array(
        [
            [[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.125, 0.0, 0.875]],
            [[1.0, 0.0, 0.0], [0.25, 0.25, 0.5], [0.375, 0.0, 0.625]],
        ],
        np.float32,
    )
    received = fates.still_received(attention, np.array([1, 0, fates.NEVER]), prompt=1)
    assert received[:2].tolist() == [0.625, 0.875]
    assert np.isnan(received[2])


def test_a_token_that_left_after_the_last_step_has_nothing_to_receive():
    received = fates.still_received(np.ones((1, 2, 1)), np.array([2]), prompt=1)
    assert received.tolist() == [0.0]


def test_the_largest_of_all_is_what_the_certificate_measured(tmp_path):
    """`hae certify` finds in C++ what one token lost at most (R1, `safe.k.measured`)."""
    trace, policy = small.REPOSITORY / "traces/data/boards-test.h5", "hae:r=0.007,alpha=0.008"
    out = tmp_path / "certificate.json"
    small.hae_program("certify", trace, "--policy", policy, "--epsilon", "0.9", "--json", out)
    measured = json.loads(out.read_text())["safe"]["k"]["measured"]
    sequences = list(hae.open(trace))
    largest = max(
        fates.token_fates(run, sequence, layer).still_received.max()
        for sequence, run in zip(sequences, hae.replay(sequences, policy), strict=True)
        for layer in range(sequence.info.layers)
    )
    assert largest == pytest.approx(measured, rel=1e-12)


@pytest.mark.parametrize("lane", [0, 1])
def test_the_lane_of_a_kv_head_receives_from_its_own_query_heads(comparison, lane):
    run, sequence = comparison.raw[2], comparison.sequences[0]
    frame = fates.token_fates(run, sequence, layer=1, lane=lane)
    rows = sequence.attention(1)[2 * lane : 2 * lane + 2, small.PROMPT :].mean(axis=0)
    gone = frame[frame.evicted.notna()]
    assert len(gone) > 3
    for token, line in gone.iterrows():
        expected = rows[int(line.evicted) :, token].sum()
        assert line.still_received == pytest.approx(expected, rel=1e-6, abs=1e-12)


# ----------------------------------------------------------------------------------- timelines


def test_the_life_of_every_token_is_that_of_the_log(comparison):
    run, sequence = comparison.raw[0], comparison.sequences[0]
    frame = fates.token_fates(run, sequence, layer=1)
    assert frame.born.tolist() == [0] * 14 + [1, 2, 3, 4, 5, 6]
    events = [json.loads(line) for line in _native_log(sequence, "hae:bin=2,budget=8")]
    of_layer = {event["token"]: event for event in events if event["layer"] == 1}
    assert len(of_layer) > 3
    for token, line in frame.iterrows():
        event = of_layer.get(token)
        if event is None:
            assert pd.isna(line.evicted) and np.isnan(line.still_received)
            continue
        assert line.evicted == event["step"]
        assert line.within == event["within"]
        assert line.score == event["score"]
        if event["pending_since"] is None:
            assert pd.isna(line.marked)
        else:
            assert line.marked == event["pending_since"]


def _native_log(sequence, policy):
    (run,) = hae.replay(sequence, policy)
    return run.json_lines().splitlines()


def test_a_timeline_draws_a_bar_from_birth_to_eviction(comparison):
    frame = fates.token_fates(comparison.raw[1], comparison.sequences[0])
    plot = plots.timeline(comparison, 1)
    life, resident = plot.data[0], plot.data[1]
    assert list(resident.y) == list(range(small.TOKENS))
    for token, base, length in zip(resident.y, resident.base, resident.x, strict=True):
        line = frame.loc[token]
        last = 6 if pd.isna(line.evicted) else int(line.evicted)
        assert base == line.born - 0.5
        expected = 0 if line.within else last + 0.5 - base
        assert length == expected  # greedy marks nothing
    crosses = plot.data[-1]
    assert list(crosses.y) == frame.index[frame.evicted.notna()].tolist()
    sizes = np.array(crosses.marker.size)
    received = frame.still_received.dropna().to_numpy()
    assert np.argmax(sizes) == np.argmax(received)
    assert life.customdata[0][1] == "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;"


def test_a_token_without_text_is_a_dash_and_an_empty_text_is_named(comparison):
    texts = [row[1] for row in plots.timeline(comparison, 1, 0).data[0].customdata]
    assert texts[5] == "(empty)"  # as small.HOSTILE has it
    assert {row[1] for row in plots.timeline(comparison, 1, 1).data[0].customdata} == {"–"}


def test_text_that_is_no_utf8_is_replaced(tmp_path):
    trace = small.write_trace(tmp_path / "t.h5")
    with h5py.File(trace, "r+") as file:
        group = file["sequences/000000"]
        del group["token"]
        stored = np.array([b"a\xff", b"b"] * 10).astype(h5py.string_dtype("utf-8", 2))
        group.create_dataset("token", data=stored)
    (run,), (sequence, _) = hae.replay(hae.open(trace)[0], "full"), hae.open(trace)
    assert fates.token_fates(run, sequence).token.tolist() == ["a\ufffd", "b"] * 10


def test_pictures_of_a_video_are_told_apart_by_frame(tmp_path):
    """Picture 0 in two frames: its first row of patches in frame 0, its second in frame 1."""
    trace = small.write_trace(tmp_path / "t.h5")
    frame = np.where(small.IMAGE == 0, small.PATCH[:, 0], np.where(small.IMAGE == 1, 0, -1))
    with h5py.File(trace, "r+") as file:
        file["sequences/000000/frame"] = frame
    comparison = hae.compare(trace, "window:recent=6")
    assert plots.pictures_of(comparison, 0) == [(0, 0), (0, 1), (1, 0)]
    second = plots.picture(comparison, 0, 0, 0, frame=1)
    veil = np.array(second.data[0].z, float)
    assert np.isnan(veil[0]).all() and np.isfinite(veil[1]).all()


def test_a_long_timeline_keeps_the_tokens_that_lost_most(comparison, monkeypatch):
    monkeypatch.setattr(plots, "MOST_TOKENS", 5)
    frame = fates.token_fates(comparison.raw[1], comparison.sequences[0])
    plot = plots.timeline(comparison, 1)
    expected = frame.still_received.sort_values(ascending=False).index[:5]
    assert list(plot.data[0].y) == sorted(expected)
    assert plot.layout.meta["note"].startswith(f"{small.TOKENS - 5} tokens are left out")


# ------------------------------------------------------------------------------------ pictures


def share_evicted(run, token, step):
    """By the log: of 2 layers, or 4 KV heads of them, how many have evicted it by then."""
    log = run.log[(run.log.token == token) & (run.log.step <= step)]
    return len(log) / (4 if run.lanes == "kv_head" else 2)


@pytest.mark.parametrize("policy", range(len(small.POLICIES)))
@pytest.mark.parametrize(("image", "first", "shape"), [(0, 1, (2, 3)), (1, 8, (2, 2))])
def test_a_patch_is_veiled_by_the_share_of_lanes_that_evicted_it(
    comparison, policy, image, first, shape
):
    plot = plots.picture(comparison, policy, 0, image)
    assert [frame.name for frame in plot.frames] == [str(step) for step in range(7)]
    for step, frame in enumerate(plot.frames):
        veil = np.array(frame.data[0].z, float)
        assert veil.shape == shape
        for row in range(shape[0]):
            for column in range(shape[1]):
                token = first + row * shape[1] + column
                expected = share_evicted(comparison.raw[policy], token, step)
                assert veil[row, column] == pytest.approx(expected, abs=1e-4)
    assert np.array(plot.data[0].z).tolist() == np.array(plot.frames[-1].data[0].z).tolist()


def test_a_picture_as_its_grid_is_drawn_and_another_is_not(comparison):
    """8 x 12 pixels are 2 x 3 patches of 4; 10 x 30 are no 2 x 2 squares: cropped, or squeezed?"""
    assert plots.pictures_of(comparison, 0) == [(0, -1), (1, -1)]
    drawn, other = (plots.picture(comparison, 0, 0, image) for image in (0, 1))
    assert drawn.layout.images[0].source.startswith("data:image/png;base64,")
    assert drawn.layout.meta["note"] == ""
    assert len(other.layout.images) == 0
    assert "30 × 10 pixels and its tokens 2 × 2 patches" in other.layout.meta["note"]


def test_without_pixels_the_patches_are_drawn_and_it_is_said(tmp_path):
    trace = small.write_trace(tmp_path / "t.h5", pictures=False)
    plot = plots.picture(hae.compare(trace, "window:recent=6"), 0)
    assert len(plot.layout.images) == 0
    assert "has no picture" in plot.layout.meta["note"]


def test_without_a_grid_nothing_is_guessed(tmp_path):
    comparison = hae.compare(small.write_trace(tmp_path / "t.h5", patches=False), "window:recent=6")
    with pytest.raises(plots.NothingToShow, match="does not say where the patches of picture 0"):
        plots.picture(comparison, 0)
    with pytest.raises(plots.NothingToShow, match="no picture 7"):
        plots.picture(comparison, 0, image=7)


def test_two_tokens_in_one_patch_are_not_drawn(tmp_path):
    trace = small.write_trace(tmp_path / "t.h5")
    with h5py.File(trace, "r+") as file:
        file["sequences/000000/patch"][2] = (0, 0)
    comparison = hae.compare(trace, "window:recent=6")
    with pytest.raises(plots.NothingToShow, match="several tokens have the same patch"):
        plots.picture(comparison, 0)


def test_a_sequence_without_pictures_has_none(comparison):
    assert plots.pictures_of(comparison, 1) == []


# ---------------------------------------------------------------------- certificates, closed loop


def test_an_envelope_is_drawn_as_it_is_defined():
    line = {"layer": 3, "envelope": {"initial": 0.5, "rate": 0.25}}
    none = {"layer": 4, "envelope": None}
    decay = {"layers": [line, none], "all_layers": line}
    plot = plots.decay_envelope({"decay": decay}, ages=3)
    assert [t.name for t in plot.data] == ["layer 3", "all layers"]
    assert list(plot.data[0].y) == pytest.approx([0.375, 0.28125, 0.2109375])


def test_closed_loop_figures_are_means_and_their_intervals():
    figure = {"mean": 0.5, "interval95": [0.25, 0.875], "groups": 3}
    alone = {"mean": 1.0, "interval95": None, "groups": 1}
    summary = [{"policy": "a", "closed.kl": figure}, {"policy": "b", "closed.kl": alone}]
    first, second = plots.closed_loop({"summary": summary}, "closed.kl").data
    assert (first.x, second.x) == ((0.5,), (1.0,))
    assert (first.error_x.array[0], first.error_x.arrayminus[0]) == (0.375, 0.25)
    assert (second.error_x.array[0], second.error_x.arrayminus[0]) == (0, 0)
    with pytest.raises(plots.NothingToShow, match="right answers"):
        plots.closed_loop({"summary": summary}, "closed.exact")


# ------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "(empty)"),
        ("a\nb", "a␊b"),
        ("\x1b[31m", "␛[31m"),
        ("\u202eabc", "⟨202E⟩abc"),
        ("\ud800", "⟨D800⟩"),
        ("\x7f", "⟨007F⟩"),
        ("é 漢 👩‍👩‍👧 שלום", "é 漢 👩‍👩‍👧 שלום"),
    ],
)
def test_what_is_invisible_becomes_visible(text, expected):
    assert plots.shown(text) == expected


def test_policies_of_one_colour_differ_by_dash():
    styles = [plots.policy_style(number) for number in range(30)]
    assert len({(style["colour"], style["dash"]) for style in styles}) == 30
    assert len({style["symbol"] for style in styles[:8]}) == 8


def test_traces_of_unlike_models_have_one_mean_a_layer():
    runs = [
        {"per_layer": {"decode": {"missed_mass": layers}}} for layers in ([0.5], [0.25, None, 1.0])
    ]
    mean = plots._mean_of_layers(runs, "missed_mass")
    assert mean[0] == 0.375 and np.isnan(mean[1]) and mean[2] == 1.0


def test_a_timeline_begins_with_the_first_lane(comparison):
    of_heads = next(i for i, policy in enumerate(small.POLICIES) if "kv_head" in policy)
    assert plots.timeline(comparison, of_heads) == plots.timeline(comparison, of_heads, lane=0)
