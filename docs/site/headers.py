"""C++ headers as pages: what each declares in its namespace, with what is said of it."""

from __future__ import annotations

import re
from pathlib import Path

from docstrings import docstring_markdown

LISTED = re.compile(r"hae_add_library\(.*?HEADERS\s+(.*?)\s(?:SOURCES|PUBLIC|PRIVATE)\b", re.DOTALL)
NAMED = re.compile(
    r"^#define (\w+)"
    r"|^(?:template <.*> *\n)?(?:typedef )?(?:struct|class|enum class|enum|using|union) +(\w+)"
    r"|^(?:typedef .*[ *&](\w+);)"
    r"|\b(operator\S+?|~?\w+) ?\("
    r"|\b(\w+)(?: = |;|\{)",
    re.MULTILINE,
)


def public_headers(repository: Path) -> set[str]:
    """The headers that are installed: HEADERS of each hae_add_library."""
    found = set()
    for build in repository.glob("[a-z]*/CMakeLists.txt"):
        listed = LISTED.search(build.read_text(encoding="utf-8"))
        found |= {f"{build.parent.name}/{name}" for name in (listed[1].split() if listed else [])}
    return found


def header_page(path: str, text: str) -> str:
    """Introduction and declarations of a header whose lines clang-format has laid out."""
    introduction, declarations = [], []
    for said, declared in parts(text):
        if declared:
            declarations.append((said, declared))
        elif said:
            introduction.append(docstring_markdown(said))
    lines = [f"# {path}", *introduction]
    for said, declared in declarations:
        lines += [f"## {name_of(declared)}", docstring_markdown(said), f"```cpp\n{declared}\n```"]
    return "\n\n".join(lines) + "\n"


def parts(text: str) -> list[tuple[str, str]]:
    """(comment, declaration) of what stands at column 0; a comment may have no declaration."""
    found = []
    said: list[str] = []
    lines = iter(uncommented(text).splitlines())
    for line in lines:
        is_macro = line.startswith("#define") and said
        if line.startswith("///"):
            said.append(line[3:].removeprefix(" "))
            continue
        if not line or (line.startswith(("#", "namespace", "}", "extern", " ")) and not is_macro):
            if said and not line:
                found.append(("\n".join(said), ""))
            said = [] if not line else said
            continue
        found.append(("\n".join(said), declaration(line, lines)))
        said = []
    return found


def uncommented(text: str) -> str:
    """Comments of C and plain comments at column 0 in the form of docstrings."""
    text = re.sub(r"^/\* ?(.*?) *\*/$", docstring_of_c, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^//(?!/)", "///", text, flags=re.MULTILINE)


def docstring_of_c(comment: re.Match[str]) -> str:
    lines = [re.sub(r"^ [*] ?", "", line) for line in comment[1].split("\n")]
    return "\n".join(f"/// {line}".rstrip() for line in lines)


def declaration(first: str, lines) -> str:
    """From its first line to the one that ends it: `;` or `}` at column 0, or all on one line."""
    declared = [first]
    while not ends(declared):
        declared.append(next(lines))
    return "\n".join(declared)


def ends(declared: list[str]) -> bool:
    """Whether braces and parentheses are closed and the last line ends a declaration."""
    text = re.sub(r"//.*", "", "\n".join(declared)).rstrip()
    if text.startswith("#define"):
        return not text.endswith("\\")
    closed = text.count("{") == text.count("}") and text.count("(") == text.count(")")
    return closed and text.endswith((";", "}"))


def name_of(declared: str) -> str:
    found = NAMED.search(declared)
    return next(name for name in found.groups() if name) if found else declared.splitlines()[0]
