"""Writes king-james-bible.txt beside this file, from the `bible` command of Debian's package bible-kjv.

    sudo apt-get install bible-kjv
    python benchmarks/data/make_corpus.py

A document a chapter: a line with its title, then a line a verse, without numbers. Documents are separated by a line
`<|document|>`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).parent / "king-james-bible.txt"
SEPARATOR = "<|document|>"
MAX_BYTES = 1_000_000

# What `bible` calls the book, and what a chapter of it is called here. Of the four Gospels those that share the least.
BOOKS = {
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Ruth": "Ruth",
    "Est": "Esther",
    "Psa": "Psalm",
    "Prv": "Proverbs",
    "Eccl": "Ecclesiastes",
    "SSol": "Song of Solomon",
    "Jonah": "Jonah",
    "Mat": "Matthew",
    "John": "John",
}

_VERSE = re.compile(r"(?P<book>\S+?)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.*)")


def chapters_of(book: str) -> list[list[str]]:
    """The verses of every chapter of a book; a range that ends after its last verse is cut there by `bible`."""
    command = ["bible", "-f", f"{book}1:1-{book}999:999"]
    printed = subprocess.run(command, check=True, capture_output=True, encoding="ascii").stdout
    chapters: list[list[str]] = []
    for line in printed.splitlines():
        verse = _VERSE.fullmatch(line)
        if verse is None or verse["book"] != book:
            sys.exit(f"{' '.join(command)} printed a line that is no verse of {book}: {line!r}")
        if int(verse["verse"]) == 1:
            chapters.append([])
        if (int(verse["chapter"]), int(verse["verse"])) != (len(chapters), len(chapters[-1]) + 1):
            sys.exit(f"{' '.join(command)} left something out before {line!r}")
        chapters[-1].append(verse["text"].rstrip())
    return chapters


def main() -> None:
    documents = [
        "\n".join([f"{title} {number}", *verses])
        for book, title in BOOKS.items()
        for number, verses in enumerate(chapters_of(book), start=1)
    ]
    content = f"\n{SEPARATOR}\n".join(documents) + "\n"
    if len(content) > MAX_BYTES:
        sys.exit(f"{len(content)} bytes are more than {MAX_BYTES}: leave out a book")
    CORPUS.write_text(content, encoding="ascii", newline="\n")
    print(f"{CORPUS}: {len(documents)} documents, {len(content)} bytes")


if __name__ == "__main__":
    main()
