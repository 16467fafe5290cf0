"""The site of the documentation: it builds, its links lead somewhere, and it asks nobody else."""

from __future__ import annotations

import html
import posixpath
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "docs" / "site"))

import headers  # noqa: E402
import reference  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, str]:
    """Path from the root of the site -> HTML."""
    found = site.rglob("*.html")
    return {page.relative_to(site).as_posix(): page.read_text(encoding="utf-8") for page in found}


def attributes(name: str, text: str) -> set[str]:
    return {html.unescape(value) for value in re.findall(rf'\s{name}="([^"]*)"', text)}


def test_nothing_is_fetched_from_elsewhere(site, pages):
    """Links may lead away; what a browser loads by itself may not."""
    for page, text in pages.items():
        loaded = re.findall(r"<(?:script|link|img|iframe|source|object|video|use)\b[^>]*>", text)
        for tag in loaded:
            assert not re.search(r'(?:src|href|srcset|data)="(?:[a-z]+:)?//', tag), (page, tag)
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"""(?:@import|url\()\s*["']?(?:https?:)?//""", text), sheet
    # The theme would fetch a program for such diagrams.
    assert not any(
        "mermaid" in value for text in pages.values() for value in attributes("class", text)
    )


def test_every_link_leads_to_a_page_and_a_place_in_it(site, pages):
    places = {page: attributes("id", text) for page, text in pages.items()}
    links = 0
    for page, text in pages.items():
        if page == "404.html":  # shown at any depth, so it links from the root
            continue
        for link in attributes("href", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, place = link.partition("#")
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            )
            assert (site / target).is_file(), (page, link)
            if place and target in places:
                assert place in places[target], (page, link)
            links += 1
    assert links > 1000


def test_every_page_has_a_title_and_a_heading(pages):
    for page, text in pages.items():
        (title,) = re.findall(r"<title>(.*?)</title>", text)
        assert title.strip()
        assert page == "404.html" or len(re.findall(r"<h1\b", text)) == 1, page


def test_the_commands_page_names_every_command(pages):
    commands = {command for command in reference.commands(REPOSITORY)}
    assert {"info", "compare", "certify", "validate"} <= commands
    places = attributes("id", pages["api/cli.html"])
    assert {f"hae-{command}" for command in commands} <= places


def test_the_policies_page_has_every_policy_and_option(pages):
    shown = subprocess.run(
        [*reference.program(REPOSITORY), "policies"], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r"^(\S+) {2,}\S", shown, re.MULTILINE)
    assert {"hae", "greedy", "full"} <= set(names)
    text = pages["api/policies.html"]
    assert {name.replace("/", "") for name in names} <= attributes("id", text)
    assert (
        "<code>max_evicted</code>" in text
        and "the newest residents, never evicted by score" in text
    )


@pytest.mark.parametrize("path", sorted(headers.public_headers(REPOSITORY)))
def test_a_header_page_loses_no_declaration_and_no_comment(path):
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    shown = headers.header_page(path, text).replace("\\", "")
    for line in text.replace("\\", "").splitlines():
        comment = re.match(r"(?:///?|/\*| \*)\s?(.*?)\s*(?:\*/)?$", line)
        if re.match(r"#|namespace |}  // namespace|extern|}$|$| \*/", line):
            continue
        assert (comment[1].strip() if comment else line) in shown, line


def test_the_pictures_are_those_that_the_page_shows(tmp_path):
    page = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\]\(pictures/(\S+\.svg)\)", page))
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "pictures" / "draw.py"))
    drawn["main"](tmp_path)
    assert {picture.name for picture in tmp_path.iterdir()} == shown
    assert {picture.name for picture in (REPOSITORY / "docs" / "pictures").glob("*.svg")} == shown
    for picture in shown:
        words = [
            re.findall(r"<text[^>]*>([^<]*)", (folder / picture).read_text(encoding="utf-8"))
            for folder in (tmp_path, REPOSITORY / "docs" / "pictures")
        ]
        assert words[0] == words[1] != []
