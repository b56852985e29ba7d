"""The boards of notes: what one is, and an assistant that edits them beside the people."""

from __future__ import annotations

from pydantic import BaseModel

from durable_core import Documents, Step, VersionConflict, delivery

HOUSEHOLD = "household"


class Note(BaseModel):
    id: str
    text: str


class Board(BaseModel):
    title: str
    notes: list[Note] = []


boards = Documents("board", Board, keep=50)


@delivery("notes.suggest", queue="notes")
def suggest(step: Step, board_id: str, version: int) -> str:
    """
    Add a note to the board as it was at `version`, when the person asked.

    An assistant thinks for a while, and somebody may save meanwhile. Then the suggestion was made from what is no
    longer there: it is dropped, as everybody's stale save is.
    """
    board: Board = boards.loaded(boards.revision(step.session, board_id, version))
    count = len(board.notes)
    board.notes.append(Note(id=step.id, text=f"Suggestion: which of these {count} can wait?"))
    try:
        boards.save(step.session, board_id, board, expected_version=version, by="assistant", source="ai")
    except VersionConflict as newer:
        return f"dropped: the board is at version {newer.current_version} by now"
    return "suggested"
