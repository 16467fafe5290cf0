"""MkDocs hook: the Markdown files of the repository are the pages of the site, where they are.

A page has the path of its file, so a link between files works on a forge and on the site. What a
page links to comes along: a C++ header as a page of its declarations, other text as a page of
source, pictures and tables as they are.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
import shutil
from pathlib import Path

from headers import header_page, public_headers
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from reference import reference_pages

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs/*.md",
    "[a-z]*/README.md",
    "[a-z]*/[a-z]*/README.md",
    "analysis/claims/*.md",
    "traces/FORMAT.md",
)
ASSETS = ("docs/site/site.css", "docs/site/favicon.svg", "docs/site/iframe-worker.js")
SHOWN_AS_IS = {".svg", ".png", ".csv"}
LANGUAGES = {".hpp": "cpp", ".h": "c", ".cpp": "cpp", ".cu": "cpp", ".py": "python", ".v": "coq"}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_startup(**_: object) -> None:
    """Puts the package together for mkdocstrings, which looks for it as soon as it is set up: its
    sources, and beside them the stub of the compiled module, wherever that is installed.
    """
    package = REPOSITORY / "build" / "site-python" / "hae"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for source in (REPOSITORY / "python" / "hae").iterdir():
        if source.suffix == ".py" or (source / "__init__.py").is_file():
            (package / source.name).symlink_to(source)
    compiled = importlib.util.find_spec("hae._engine")
    (package / "_engine.pyi").symlink_to(Path(compiled.origin).with_name("_engine.pyi"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and ours instead of those that MkDocs found in docs_dir."""
    ours = Files([file for file in files if file.src_dir != config.docs_dir])
    texts = {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in pages()}
    for path in [*texts, *ASSETS]:
        ours.append(repository_file(path, config))
    for path, text in reference_pages(REPOSITORY).items():
        ours.append(File.generated(config, path, content=text))
    for path in sorted(public_headers(REPOSITORY) | linked_files(texts)):
        ours.append(shown_file(path, config))
    return ours


def pages() -> list[str]:
    found = {path for pattern in PAGES for path in REPOSITORY.glob(pattern)}
    return sorted(
        path.relative_to(REPOSITORY).as_posix()
        for path in found
        if path.relative_to(REPOSITORY).parts[0] != "build"
    )


def linked_files(texts: dict[str, str]) -> set[str]:
    """Files of the repository that pages link to and that are no pages."""
    targets = {
        target(page, link[2]) for page, text in texts.items() for link in LINK.finditer(text)
    }
    return {path for path in targets - set(texts) if (REPOSITORY / path).is_file()}


def target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def repository_file(path: str, config: MkDocsConfig) -> File:
    return File.generated(config, path, abs_src_path=str(REPOSITORY / path))


def shown_file(path: str, config: MkDocsConfig) -> File:
    suffix = Path(path).suffix
    if suffix in SHOWN_AS_IS:
        return repository_file(path, config)
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    shown = header_page(path, text) if suffix in {".hpp", ".h"} else source_page(path, text)
    return File.generated(config, f"{path}.md", content=shown, inclusion=InclusionLevel.NOT_IN_NAV)


def source_page(path: str, text: str) -> str:
    # A fence that no line of the file ends.
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"# {path}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n{fence}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to folders and source lead to the pages that show them."""

    def resolved(link: re.Match[str]) -> str:
        path = target(page.file.src_uri, link[2])
        if files.get_file_from_path(f"{path}.md"):
            return f"{link[1]}{link[2]}.md{link[3] or ''}{link[4]}"
        if files.get_file_from_path(f"{path}/README.md"):
            return f"{link[1]}{link[2].rstrip('/')}/README.md{link[3] or ''}{link[4]}"
        return link[0]

    return LINK.sub(resolved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas become MathML, which browsers draw without any script; in tables \\| is a bar."""
    html = re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)
    html = re.sub(
        r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>',
        lambda found: f'<div class="formula">{mathml(found[1], "block")}</div>',
        html,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda found: mathml(found[1], "inline"),
        html,
        flags=re.DOTALL,
    )


def mathml(latex: str, display: str) -> str:
    plain = latex.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    return convert(plain.strip(), display=display)
