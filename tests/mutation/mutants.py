"""The list of mutants, mutants.toml, and how one is put into a source. Read by script/mutate and check_mutants."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

LIST = Path("tests/mutation/mutants.toml")  # below the root

KINDS = {"comparison", "factor", "extreme", "index", "tie", "term", "condition", "constant"}


class ListError(Exception):
    """A reason why the list does not fit the sources."""


@dataclass(frozen=True)
class Mutant:
    """One change, as the head of mutants.toml explains."""

    file: str
    name: str
    function: str
    kind: str
    old: str
    new: str
    occurrence: int = 0  # from 1; 0: `old` occurs once
    explained: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def mutated(mutant: Mutant, text: str) -> str:
    """A source with the mutant in it; ListError where `old` does not occur as the list says."""
    count = text.count(mutant.old)
    if count == 0:
        raise ListError(f"{mutant}: the file does not hold {mutant.old!r}; take what stands there now")
    if count > 1 and not mutant.occurrence:
        raise ListError(f"{mutant}: {mutant.old!r} occurs {count} times; take more of the line, or say which occurrence")
    if mutant.occurrence and not (mutant.occurrence <= count and count > 1):
        raise ListError(f"{mutant}: there is no choice of occurrence {mutant.occurrence}, {mutant.old!r} occurs "
                        f"{count} times")
    begin = -1
    for _ in range(mutant.occurrence or 1):
        begin = text.find(mutant.old, begin + 1)
    return text[:begin] + mutant.new + text[begin + len(mutant.old):]


def checked(file: str, table: dict) -> Mutant:
    name = f"{file}: {table.get('name', 'a mutant without a name')}"
    types = {field.name: field.type for field in fields(Mutant)}
    for key, value in table.items():
        if key == "file" or key not in types or not isinstance(value, types[key]):
            raise ListError(f"{name}: {key} = {value!r} is not known; the head of {LIST} names the keys")
    missing = {"name", "function", "kind", "old", "new"} - table.keys()
    if missing:
        raise ListError(f"{name}: lacks {', '.join(sorted(missing))}")
    mutant = Mutant(file, **table)
    if mutant.kind not in KINDS:
        raise ListError(f"{name}: kind is {mutant.kind!r}, not one of {', '.join(sorted(KINDS))}")
    if not mutant.old or mutant.old == mutant.new:
        raise ListError(f"{name}: changes nothing")
    return mutant


def read_mutants(root: Path) -> list[Mutant]:
    """All mutants, in the order of the list; ListError where one does not fit the sources below `root`."""
    try:
        tables = tomllib.loads((root / LIST).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ListError(f"{LIST}: {error}") from error
    mutants = [checked(file, table) for file, tables_of_file in tables.items() for table in tables_of_file]
    seen = set()
    for mutant in mutants:
        if str(mutant) in seen:
            raise ListError(f"{mutant}: is listed twice")
        seen.add(str(mutant))
        if not (root / mutant.file).is_file():
            raise ListError(f"{mutant}: there is no such file")
        mutated(mutant, (root / mutant.file).read_text(encoding="utf-8"))
    return mutants
