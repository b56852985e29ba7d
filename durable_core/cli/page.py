"""
Renders the commands into `docs/reference/commands.md`, from what each says of itself.

`python -m durable_core.cli.page` writes it; a test keeps the two equal.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from durable_core.cli.main import main as durable
from durable_core.cli.where import options

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
PROGRAM = "durable"

HEAD = """\
# Commands

Written by `python -m durable_core.cli.page` from the commands themselves; a test keeps the two equal.
`durable COMMAND --help` says the same. [Exit codes](exit-codes.md) have a page, and so have the
[environment variables](environment.md).

## Where the database is

Every command takes these, before its name or after it; the later one wins.

"""


def commands_page() -> str:
    """`docs/reference/commands.md`: every command with its arguments and options."""
    everywhere = _parameters(click.command()(options(lambda: None)))
    shared = {name for parameter in everywhere for name in parameter.opts}
    parts = [HEAD + _table(everywhere)]
    parts += [_section(path, command, shared) for path, command in _walk(durable, (PROGRAM,))]
    return "\n".join(parts)


def _walk(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in sorted(group.commands):
        command = group.commands[name]
        if command.hidden:
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _walk(command, (*path, name))


def _section(path: tuple[str, ...], command: click.Command, shared: set[str]) -> str:
    name = " ".join(path)
    own = [parameter for parameter in _parameters(command) if not shared & set(parameter.opts)]
    arguments = [
        parameter.make_metavar(click.Context(command)) for parameter in own if parameter.param_type_name != "option"
    ]
    of_group = " COMMAND" if isinstance(command, click.Group) else ""
    usage = " ".join([name, *arguments]) + of_group
    text = _prose(command.help or command.short_help or "")
    return f"## {name}\n\n```text\n{usage}\n```\n\n{text}\n" + (f"\n{_table(own)}" if _options_of(own) else "")


def _parameters(command: click.Command) -> list[click.Parameter]:
    return [one for one in command.params if not getattr(one, "hidden", False)]


def _options_of(parameters: list[click.Parameter]) -> list[click.Option]:
    return [one for one in parameters if isinstance(one, click.Option)]


def _table(parameters: list[click.Parameter]) -> str:
    rows = [f"| {_names(option)} | {_cell(_says(option))} |" for option in _options_of(parameters)]
    return "\n".join(["| option | what |", "| --- | --- |", *rows]) + "\n"


def _names(option: click.Option) -> str:
    """All spellings of an option, and what it takes."""
    takes = "" if option.is_flag or option.count else f" {option.make_metavar(click.Context(durable))}"
    on, off = (", ".join(f"`{name}{takes}`" for name in names) for names in (option.opts, option.secondary_opts))
    return _cell(f"{on} / {off}" if off else on)


def _says(option: click.Option) -> str:
    said = [option.help or ""]
    if option.show_envvar and option.envvar:
        names = [option.envvar] if isinstance(option.envvar, str) else option.envvar
        said.append("Or " + ", ".join(f"`{name}`" for name in names) + ".")
    if option.show_default and option.default is not None:
        said.append(f"By default {option.default}.")
    if option.multiple:
        said.append("May be given several times.")
    if option.required:
        said.append("Required.")
    return " ".join(part for part in said if part)


def _prose(text: str) -> str:
    """A help text as Markdown: paragraphs that click is told to leave alone keep their lines."""
    paragraphs = inspect.cleandoc(text).replace("\f", "").split("\n\n")
    kept = [
        "```text\n" + part.removeprefix("\b\n") + "\n```" if part.startswith("\b") else _plain(part)
        for part in paragraphs
    ]
    return "\n\n".join(kept)


def _plain(text: str) -> str:
    return re.sub(r"([<\[*])", r"\\\1", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write() -> None:
    DOCS.write_text(commands_page(), encoding="utf-8")


if __name__ == "__main__":
    write()
