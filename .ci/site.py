"""
What the site needs beside `docs/`: the files elsewhere in the project that its pages link to, as pages of their own.

In the repository such a link leads to the file itself. Loaded by mkdocs as a hook.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN = ("CHANGELOG.md", "SECURITY.md", "bench/README.md", "examples")
"""Files, and folders whose files are shown together."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files, config):
    for name in SHOWN:
        for path in [ROOT / name, *sorted((ROOT / name).rglob("*"))]:
            if "__pycache__" not in path.parts and text_of(path):
                files.append(File.generated(config, page_of(path), content=text_of(path)))
    files.append(File.generated(config, "decisions/index.md", content=decisions()))
    return files


def decisions():
    """The list that a folder is in the repository."""
    titles = [
        (path.name, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        for path in sorted((DOCS / "decisions").glob("*.md"))
    ]
    return "# Decisions\n\n" + "".join(f"- [{title}]({name})\n" for name, title in titles)


def page_of(path):
    """Where in the site a file or folder of the project is shown."""
    name = str(path.relative_to(ROOT))
    return f"project/{name.removesuffix('.md')}.md"


def text_of(path):
    """The page of a file; of a folder, that of all its files. Empty where there is nothing to show."""
    name = path.relative_to(ROOT)
    if path.suffix == ".md":
        return relinked(path.read_text(encoding="utf-8"), path.parent, DOCS / page_of(path))
    if path.is_dir():
        inside = [one for one in sorted(path.iterdir()) if one.is_file()]
        return f"# {name}\n\n" + "\n".join(f"## {one.name}\n\n{fenced(one)}" for one in inside)
    return f"# {name}\n\n{fenced(path)}"


def fenced(path):
    tag = {".py": "python", ".ini": "ini"}.get(path.suffix, "text")
    return f"```{tag}\n{path.read_text(encoding='utf-8')}```\n"


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by is not None:
        return markdown
    path = DOCS / page.file.src_uri
    return relinked(markdown, path.parent, path)


def relinked(markdown, folder, page):
    """The text with each link into the project leading to the page that shows that file."""

    def link(found):
        target = (folder / found[2]).resolve()
        if "://" in found[2] or not target.exists():
            return found[0]
        if not target.is_relative_to(DOCS):
            target = DOCS / page_of(target)
        elif target.is_dir():
            target = target / "index.md"
        return f"{found[1]}{os.path.relpath(target, page.parent)}{found[3]}"

    return LINK.sub(link, markdown)
