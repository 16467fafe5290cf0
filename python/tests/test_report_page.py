"""The page of hae-report in a browser: what a reader sees and can do. `script/install python`
brings Debian's chromium; a browser of one's own is named by HAE_CHROMIUM.
"""

import json
import os
import re

import pytest
import small_comparison as small
from playwright.sync_api import sync_playwright

from hae.report.program import main

LAPTOP, PHONE = {"width": 1366, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    trace = small.write_trace(place / "trace.h5")
    small.compare(trace, place / "results")
    certificate, closed = place / "certificate.json", place / "closed.json"
    options = ("--policy", "hae:bin=2,budget=8", "--epsilon", "0.99", "--json", certificate)
    small.hae_program("certify", trace, *options)
    figure = {"mean": 0.5, "interval95": [0.25, 0.75], "groups": 2}
    summary = [{"policy": "greedy", "closed.kl": figure, "closed.token_accuracy": figure}]
    manifest = {"command": "hae-closed-loop", "model": "m"}
    result = {"manifest": manifest, "sequences": [{}], "runs": [], "summary": summary}
    closed.write_text(json.dumps({"schema": "hae.closed-loop/1", **result}))
    further = ("--certificate", str(certificate), "--closed-loop", str(closed))
    assert main([str(place / "results"), "-o", str(place / "report.html"), *further]) == 0
    return place


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = os.environ.get("HAE_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def watched(browser, path, faults, **options):
    """The report in a window of its own, when it is drawn."""
    page = browser.new_context(**({"viewport": LAPTOP} | options)).new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: note_request(request.url, faults))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    return page


def note_request(url, faults):
    if not url.startswith(("file:", "data:", "blob:")):
        faults.append(url)


@pytest.fixture
def open_page(place, browser):
    """Opens the report. At the end nothing was said on the console, nothing asked of a network."""
    pages, faults = [], []

    def opened(**options):
        pages.append(watched(browser, place / "report.html", faults, **options))
        return pages[-1]

    yield opened
    for page in pages:
        page.context.close()
    assert faults == []


@pytest.fixture(scope="module")
def one_window(place, browser):
    faults = []
    page = watched(browser, place / "report.html", faults)
    yield page, faults
    page.context.close()


@pytest.fixture
def page(one_window):
    """The same window for many tests, as it was at first."""
    page, faults = one_window
    page.evaluate(
        """() => {
          for (const select of document.querySelectorAll('select')) {
            select.selectedIndex = 0;
            select.dispatchEvent(new Event('change'));
          }
          for (const input of document.querySelectorAll('input[type=search]')) {
            input.value = '';
            input.dispatchEvent(new Event('input'));
          }
        }"""
    )
    yield page
    assert faults == []


def visible_rows(page, table):
    return page.locator(f"#{table} tbody tr:visible")


def column(page, table, number):
    cells = page.locator(f"#{table} tbody tr:visible > :nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


def is_dark(page):
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", back)[:3])) < 3 * 128


def colour_of_axes(page):
    return page.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")


# ------------------------------------------------------------------------------------- it is drawn


def test_every_figure_is_drawn(page):
    canvases = page.locator(".canvas")
    # Steps, errors, memory, layers, decay; the picture under each policy; tokens; closed loop.
    assert canvases.count() == 5 + len(small.POLICIES) + 1 + 2
    for i in range(canvases.count()):
        box = canvases.nth(i).locator(".main-svg").first.bounding_box()
        assert box["width"] > 100 and box["height"] > 100
    lines = page.locator("#plot-steps .scatterlayer .js-line")
    assert lines.count() == len(small.POLICIES)
    assert page.locator("#pictures image").count() >= len(small.POLICIES)


def test_nothing_is_wider_than_the_window(open_page):
    for viewport in (LAPTOP, PHONE):
        page = open_page(viewport=viewport)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= viewport["width"]
        for box in page.locator("section").all():
            right = box.bounding_box()["x"] + box.bounding_box()["width"]
            assert right <= viewport["width"]


def test_on_a_laptop_the_table_of_policies_needs_no_scrolling(page):
    inner, outer = page.evaluate(
        "(() => { const e = document.querySelector('#summary').parentNode;"
        " return [e.scrollWidth, e.clientWidth]; })()"
    )
    assert inner <= outer


def test_pointing_at_a_cell_shows_its_value(page, place):
    plot = page.locator("#plot-layers .canvas")
    plot.scroll_into_view_if_needed()
    cell = page.locator("#plot-layers .heatmaplayer").bounding_box()
    page.mouse.move(cell["x"] + 0.25 * cell["width"], cell["y"] + 0.1 * cell["height"])
    page.wait_for_selector("#plot-layers .hoverlayer .hovertext")
    said = page.locator("#plot-layers .hoverlayer").text_content()
    result = json.loads((place / "results/result.json").read_text())
    runs = [run for run in result["runs"] if run["policy"] == result["summary"][0]["policy"]]
    mean = sum(run["per_layer"]["decode"]["missed_mass"][0] for run in runs) / len(runs)
    assert f"layer 0: {mean:.4f}" in said


def test_pointing_at_a_token_shows_its_life(page):
    page.locator("#plot-timeline .canvas").scroll_into_view_if_needed()
    bar = page.locator("#plot-timeline .barlayer .point").first.bounding_box()
    page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
    page.wait_for_selector("#plot-timeline .hoverlayer .hovertext")
    said = page.locator("#plot-timeline .hoverlayer").text_content()
    assert "born in step" in said and "alert(1)" in said


# --------------------------------------------------------------------------------- what one can do


def test_runs_are_filtered_by_policy_and_sequence(page):
    assert visible_rows(page, "runs").count() == 2 * len(small.POLICIES)
    page.select_option("#run-policy", "1")
    assert set(column(page, "runs", 2)) == {"greedy:budget=8"}
    page.fill("#run-sequence", "PLAIN")
    assert visible_rows(page, "runs").count() == 1
    assert page.inner_text("#run-count") == "1 of 10 runs"
    page.fill("#run-sequence", "nowhere")
    assert visible_rows(page, "runs").count() == 0


def test_tables_are_sorted_and_say_so(page):
    header = page.locator("#runs th", has_text="missed mass")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    values = list(map(float, column(page, "runs", 3)))
    assert values == sorted(values) and values[0] < values[-1]
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert list(map(float, column(page, "runs", 3))) == sorted(values, reverse=True)


def test_another_figure_is_chosen(page):
    before = page.text_content("#plot-memory .ytitle")
    page.select_option("#plot-memory select", label="missed pull")
    page.wait_for_function(
        f"document.querySelector('#plot-memory .ytitle').textContent != '{before}'"
    )
    assert page.text_content("#plot-memory .ytitle") == "mean missed pull"


def test_tokens_are_searched_by_text(page):
    assert visible_rows(page, "tokens").count() == small.TOKENS
    page.fill("#token-search", "ALERT(1)")
    expected = [j for j in range(small.TOKENS) if j % len(small.HOSTILE) == 0]
    page.wait_for_function(
        f"document.querySelector('#token-count').textContent.startsWith('{len(expected)} ')"
    )
    assert list(map(int, column(page, "tokens", 1))) == expected
    assert set(column(page, "tokens", 2)) == {small.HOSTILE[0]}
    opacity = page.evaluate(
        "document.querySelector('#plot-timeline .canvas').data[1].marker.opacity"
    )
    assert [j for j, value in enumerate(opacity) if value == 1] == expected


def test_the_lane_and_the_policy_of_tokens_are_chosen(page):
    assert page.locator("#detail-lane option").all_inner_texts() == ["layer 0", "layer 1"]
    page.select_option("#detail-policy", "2")
    page.wait_for_function("document.querySelectorAll('#detail-lane option').length == 4")
    lanes = page.locator("#detail-lane option").all_inner_texts()
    assert lanes[3] == "layer 1, KV head 1"
    page.select_option("#detail-policy", "4")
    page.wait_for_function("document.querySelectorAll('#detail-lane option').length == 2")
    assert set(column(page, "tokens", 6)) == {"–"}  # a full cache evicts nothing


def test_the_step_of_the_pictures_is_chosen(page):
    veil = "document.querySelectorAll('#pictures .canvas')[3].data[0].z"
    page.select_option("#detail-picture", "1")  # the window has left it behind at the end
    page.wait_for_function("document.querySelector('#picture-note').textContent != ''")
    assert page.evaluate(veil) == [[1, 1], [1, 1]]
    page.locator("#picture-step").focus()
    page.keyboard.press("Home")
    page.wait_for_function("document.querySelector('#picture-at').textContent == '0'")
    assert page.evaluate(veil) == [[0, 0], [0, 0]]


def test_a_picture_that_is_not_as_its_grid_says_so(page):
    page.select_option("#detail-picture", "1")
    page.wait_for_function("document.querySelector('#picture-note').textContent != ''")
    assert "Where they lie in it the trace does not say" in page.inner_text("#picture-note")
    page.select_option("#detail-sequence", "1")
    page.wait_for_function(
        "document.querySelector('#picture-note').textContent.includes('no picture')"
    )
    assert not page.locator("#pictures").is_visible()


def test_it_is_used_by_keyboard(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.url.endswith("#comparison")
    reached = set()
    for _ in range(90):
        page.keyboard.press("Tab")
        found, outline = page.evaluate(
            "[document.activeElement.id || document.activeElement.textContent.trim(),"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(found)
        assert outline != "none", found
    assert {"missed mass", "run-policy", "run-sequence", "detail-sequence"} <= reached
    page.locator("#summary th button", has_text="missed pull").focus()
    page.keyboard.press("Enter")
    header = page.locator("#summary th", has_text="missed pull")
    assert header.get_attribute("aria-sort") == "ascending"


def test_every_control_has_a_name(page):
    for control in page.locator("select:visible, input:visible").all():
        assert control.evaluate("e => e.labels.length == 1 && e.labels[0].textContent.trim() != ''")
    for table in page.locator("table.sortable").all():
        assert table.locator("thead th[scope=col]").count() == table.locator("thead th").count()


# ------------------------------------------------------------------------- light, dark and paper


def test_it_is_light_or_dark_as_the_system_is(open_page):
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert not is_dark(light) and is_dark(dark)
    assert colour_of_axes(light) != colour_of_axes(dark)


def test_the_reader_changes_it(open_page):
    page = open_page(color_scheme="light")
    before = colour_of_axes(page)
    page.click("#theme")
    assert is_dark(page) and page.get_attribute("#theme", "aria-pressed") == "true"
    page.wait_for_function(
        f"getComputedStyle(document.querySelector('.xtick text')).fill != '{before}'"
    )
    page.click("#theme")
    assert not is_dark(page)


def test_paper_is_light_and_without_controls(open_page):
    page = open_page(color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert not is_dark(page)
    for control in ("nav", "#theme", "#runs", "#token-search", "#picture-step", "#copy"):
        assert not page.locator(control).is_visible(), control
    for canvas in page.locator(".canvas").all():
        assert canvas.locator(".main-svg").first.bounding_box()["width"] <= 700
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert is_dark(page) and page.locator("#runs").is_visible()


def test_it_prints(page):
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF") and paper.count(b"/Type /Page\n") >= 3
