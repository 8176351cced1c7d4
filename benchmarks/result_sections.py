"""A page of results in sections, each of which another benchmark writes."""

from __future__ import annotations

from pathlib import Path


def write_section(page: Path, section: str) -> None:
    """In place of the section of `page` that has the same heading (`# `, its first line), or behind the others."""
    heading = section.splitlines()[0]
    before: list[str] = []
    after: list[str] = []
    part = before
    for line in page.read_text().splitlines() if page.exists() else []:
        if line == heading:
            part = None
        elif line.startswith("# ") and part is not before:
            part = after
        if part is not None:
            part.append(line)
    sections = ["\n".join(before).strip(), section.strip(), "\n".join(after).strip()]
    page.write_text("\n\n".join(text for text in sections if text) + "\n")
