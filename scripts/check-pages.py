#!/usr/bin/env python3
"""Checks the project's Markdown pages: every link to a file or a heading leads somewhere, every reference link is
defined and used, every source file that is named in code type exists (`autograd/token.rs` is in src), and no line of
prose is wider than 130 characters. Links to other sites are not followed."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH = 130
INLINE = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
REFERENCE = re.compile(r"\[([^\[\]]+)\](?:\[([^\[\]]*)\])?(?![(:\[])")
DEFINITION = re.compile(r"^(?://! )?\[([^\]]+)\]:\s+(\S+)")
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:rs|cu|cuh|hpp|cpp|sh|py|toml))`")
HISTORY = {"docs/performance-log.md", "CHANGELOG.md"}  # what they name may be gone


def prose(page: pathlib.Path):
    """The lines outside fenced blocks with their numbers, code spans cut out."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line, re.sub(r"`[^`]*`", "``", line)


def anchors(page: pathlib.Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    for _, line, _ in prose(page):
        if heading := re.match(r"#+ (.*)", line):
            text = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            found[text] = found.get(text, -1) + 1
    return {name if i == 0 else f"{name}-{i}" for name, last in found.items() for i in range(last + 1)}


def broken(page: pathlib.Path, target: str) -> str | None:
    """Why a link on a page leads nowhere."""
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return f"no file {path}"
    if anchor and anchor not in anchors(file):
        return f"{file.relative_to(ROOT)} has no heading #{anchor}"
    return None


def offences(page: pathlib.Path):
    defined: dict[str, int] = {}
    used: set[str] = set()
    for number, line, bare in prose(page):
        if definition := DEFINITION.match(line):
            defined[definition[1]] = number
            if why := broken(page, definition[2]):
                yield number, why
            continue
        for target in INLINE.findall(bare):
            if why := broken(page, target):
                yield number, why
        if str(page.relative_to(ROOT)) not in HISTORY:
            places = ROOT, ROOT / "src", page.parent
            for name in FILE.findall(line):
                if not any((place / name).exists() for place in places):
                    yield number, f"no file {name}"
        used |= {name or text for text, name in REFERENCE.findall(bare)}
        if len(line) > WIDTH and not line.startswith("|"):
            yield number, f"{len(line)} characters wide, of {WIDTH}"
    for name, number in defined.items():
        if name not in used:
            yield number, f"[{name}] is not used"
    for number, _, bare in prose(page):
        for text, name in REFERENCE.findall(bare):
            if (name or text).endswith(".md") and (name or text) not in defined:
                yield number, f"[{name or text}] is not defined"


def front_page():
    """What src/lib.rs redefines for docs.rs are the README's pages, all of them, and no link goes around that."""
    lib, readme = (ROOT / "src/lib.rs").read_text(), (ROOT / "README.md").read_text()
    at_docs_rs = {m[1] for line in lib.splitlines() if (m := DEFINITION.match(line)) and line.startswith("//!")}
    here = {m[1] for line in readme.splitlines() if (m := DEFINITION.match(line))}
    if at_docs_rs != here:
        yield f"src/lib.rs: pages of the README that it does not redefine, or more: {sorted(at_docs_rs ^ here)}"
    for number, line in enumerate(readme.splitlines(), 1):
        for target in INLINE.findall(line):
            if "://" not in target and not target.startswith("#"):
                yield f"README.md:{number}: ({target}) leads nowhere on docs.rs; write [text][page]"


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    found = [f"{page.relative_to(ROOT)}:{number}: {why}" for page in pages for number, why in offences(page)]
    found += front_page()
    print(*found, f"{len(pages)} pages, {len(found)} faults", sep="\n")
    sys.exit(bool(found) or not pages)


if __name__ == "__main__":
    main()
