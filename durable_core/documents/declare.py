"""Declaring a collection of documents: its model, how much of its history is kept, and what can be done to it."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from durable_core.arguments import canonical
from durable_core.cases.schema import Misfits, Schema
from durable_core.database.transactions import (
    AsyncTransaction,
    Steps,
    Transaction,
    acarried,
    achecked,
    carried,
    checked,
)
from durable_core.document_refusals import ContentTooLarge, InvalidContent, UnknownRevision
from durable_core.documents import read, save
from durable_core.documents.read import Scope
from durable_core.documents.rows import Document, Revision, Saved, Source
from durable_core.errors import DefinitionError
from durable_core.kinds import checked_name
from durable_core.plans.target import reader_of, target_version
from durable_core.refusals import Misfit

MOST_BYTES = 500_000
"""Largest content, in bytes of its canonical text."""
DEFAULT_KEEP = 50


class Documents:
    """
    A collection of documents, each a JSON object that `model` describes (None: any), at a version that only goes up.

    Every change names the version that it was made from. Where that is not the current one, it is VersionConflict and
    nothing is written: no content, no revision. So nobody's work is overwritten unseen; the hole is a caller who reads
    the version anew just before saving what was made from an older one. `keep` versions before the current one stay as
    revisions, None keeps all of them.

    What is stored is what the model gives back, with its defaults; what it has no field for is refused, unless it keeps
    such (`extra="allow"`; then each model inside it says so, or `extra="forbid"`). A document of another collection, of
    another `owner` where one is said, and a deleted one are unknown alike. A plan's reviewed target may be
    `Target(name, document_id, version=...)`.

    Raises DefinitionError.
    """

    def __init__(self, name: str, model: Any = None, *, keep: int | None = DEFAULT_KEEP) -> None:
        self.name = checked_name(name)
        self.model = model
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < 2**31):
            raise DefinitionError(f"documents {name!r}: keep is a whole number of revisions from 1, or None for all.")
        self.keep = keep
        self._schema = Schema(model, f"documents {name!r}: the model", loses_nothing=True)
        _read_as_target(self.name)

    def create(
        self, tx: Transaction, content: object, *, owner: str, by: str, document_id: str | UUID | None = None,
        source: Source = "user", why: str | None = None,
    ) -> Document:  # fmt: skip
        """
        One document at version 0, in the caller's transaction: it commits or vanishes with the caller's rows.

        Raises InvalidContent, ContentTooLarge, InvalidOption without `by`, and InvalidArguments, also for a
        `document_id` that is taken: all write nothing.
        """
        return carried(checked(tx), self._created(content, document_id, owner, by, source, why))

    async def acreate(
        self, tx: AsyncTransaction, content: object, *, owner: str, by: str, document_id: str | UUID | None = None,
        source: Source = "user", why: str | None = None,
    ) -> Document:  # fmt: skip
        """As `create`, in an async transaction."""
        return await acarried(achecked(tx), self._created(content, document_id, owner, by, source, why))

    def get(self, tx: Transaction, document_id: str | UUID, *, owner: str | None = None) -> Document:
        """The document as this transaction sees it. Raises UnknownDocument."""
        return carried(checked(tx), read.got(Scope(self.name, owner), document_id))

    async def aget(self, tx: AsyncTransaction, document_id: str | UUID, *, owner: str | None = None) -> Document:
        """As `get`, in an async transaction."""
        return await acarried(achecked(tx), read.got(Scope(self.name, owner), document_id))

    def save(
        self, tx: Transaction, document_id: str | UUID, content: object, *, expected_version: int,
        save_id: str | UUID | None = None, by: str, source: Source = "user", owner: str | None = None,
        why: str | None = None,
    ) -> Saved:  # fmt: skip
        """
        Make the next version, from `expected_version`, in the caller's transaction; the one before becomes a revision.

        Content equal to what is there is a save as any. `save_id` names one intention to save: where the current
        version was saved under it, from the same version and with the same content, this is its repeat after a lost
        answer, and a success without another version. The hole: once somebody has saved after that, the repeat is a
        VersionConflict as any; only the last id is remembered.

        Refused, in this order: InvalidContent, ContentTooLarge, InvalidArguments and InvalidOption, before anything is
        locked; UnknownDocument; SaveIdReused, a VersionConflict; VersionConflict. All write nothing and leave the
        transaction alive. Another transaction that changed the document and is still open is waited for, as long as the
        caller's `lock_timeout` allows; a caller at REPEATABLE READ gets 40001 for what was saved after its snapshot.
        """
        return carried(
            checked(tx),
            self._saved(document_id, content, expected_version, save_id, by, source, owner, why),
        )

    async def asave(
        self, tx: AsyncTransaction, document_id: str | UUID, content: object, *, expected_version: int,
        save_id: str | UUID | None = None, by: str, source: Source = "user", owner: str | None = None,
        why: str | None = None,
    ) -> Saved:  # fmt: skip
        """As `save`, in an async transaction."""
        return await acarried(
            achecked(tx),
            self._saved(document_id, content, expected_version, save_id, by, source, owner, why),
        )

    def history(
        self, tx: Transaction, document_id: str | UUID, *, owner: str | None = None, limit: int = 50,
        before: int | None = None, contents: bool = False,
    ) -> list[Revision]:  # fmt: skip
        """
        The newest versions, the current one first, at most `limit` and those below `before`; content only if asked for.

        Raises UnknownDocument and InvalidArguments.
        """
        return carried(checked(tx), read.past(Scope(self.name, owner), document_id, limit, before, contents))

    async def ahistory(
        self, tx: AsyncTransaction, document_id: str | UUID, *, owner: str | None = None, limit: int = 50,
        before: int | None = None, contents: bool = False,
    ) -> list[Revision]:  # fmt: skip
        """As `history`, in an async transaction."""
        return await acarried(achecked(tx), read.past(Scope(self.name, owner), document_id, limit, before, contents))

    def revision(
        self, tx: Transaction, document_id: str | UUID, version: int, *, owner: str | None = None
    ) -> Revision:  # fmt: skip
        """
        The document as it was at this version, which may be the current one.

        Raises UnknownDocument; UnknownRevision for a version that never was or is no longer kept; InvalidArguments.
        """
        return carried(checked(tx), read.at_version(Scope(self.name, owner), document_id, version))

    async def arevision(
        self, tx: AsyncTransaction, document_id: str | UUID, version: int, *, owner: str | None = None
    ) -> Revision:  # fmt: skip
        """As `revision`, in an async transaction."""
        return await acarried(achecked(tx), read.at_version(Scope(self.name, owner), document_id, version))

    def restore(
        self, tx: Transaction, document_id: str | UUID, version: int, *, expected_version: int,
        save_id: str | UUID | None = None, by: str, source: Source = "user", owner: str | None = None,
        why: str | None = None,
    ) -> Saved:  # fmt: skip
        """
        Save what the document was at `version`, as a new version made from `expected_version`; history only grows.

        Refused as `save` is, InvalidContent included where the model has changed since, and with UnknownRevision. Under
        its `save_id` it may be repeated as a save may, also where it let go the version that it restored.
        """
        return carried(
            checked(tx), self._restored(document_id, version, expected_version, save_id, by, source, owner, why)
        )  # fmt: skip

    async def arestore(
        self, tx: AsyncTransaction, document_id: str | UUID, version: int, *, expected_version: int,
        save_id: str | UUID | None = None, by: str, source: Source = "user", owner: str | None = None,
        why: str | None = None,
    ) -> Saved:  # fmt: skip
        """As `restore`, in an async transaction."""
        return await acarried(
            achecked(tx), self._restored(document_id, version, expected_version, save_id, by, source, owner, why)
        )  # fmt: skip

    def delete(
        self, tx: Transaction, document_id: str | UUID, *, expected_version: int, by: str, owner: str | None = None,
        why: str | None = None,
    ) -> None:  # fmt: skip
        """
        End the document, for good, in the caller's transaction; what it was stays in its history, for operators.

        Refused as `save` is. A second deletion finds no document.
        """
        carried(
            checked(tx),
            save.deleted(Scope(self.name, owner), self.keep, document_id, expected_version, by, why),
        )

    async def adelete(
        self, tx: AsyncTransaction, document_id: str | UUID, *, expected_version: int, by: str,
        owner: str | None = None, why: str | None = None,
    ) -> None:  # fmt: skip
        """As `delete`, in an async transaction."""
        await acarried(
            achecked(tx),
            save.deleted(Scope(self.name, owner), self.keep, document_id, expected_version, by, why),
        )

    def page(
        self, tx: Transaction, *, owner: str | None = None, after: str | UUID | None = None, limit: int = 50
    ) -> list[Document]:  # fmt: skip
        """A page of the documents, newest first, without content; `after` is the last id of the page before."""
        return carried(checked(tx), read.listed(Scope(self.name, owner), after, limit))

    async def apage(
        self, tx: AsyncTransaction, *, owner: str | None = None, after: str | UUID | None = None, limit: int = 50
    ) -> list[Document]:  # fmt: skip
        """As `page`, in an async transaction."""
        return await acarried(achecked(tx), read.listed(Scope(self.name, owner), after, limit))

    def loaded(self, document: Document | Revision) -> Any:
        """The content as a value of the model. Raises InvalidContent where the model is another by now."""
        try:
            return self._schema.load(document.content)
        except Misfits as misfits:
            raise InvalidContent(self.name, misfits.issues) from None

    def _created(
        self, content: object, document_id: str | UUID | None, owner: str, by: str, source: Source, why: str | None
    ) -> Steps[Document]:  # fmt: skip
        return save.created(self.name, self._packed(content), document_id, owner, by, source, why)

    def _saved(
        self, document_id: str | UUID, content: object, expected_version: int, save_id: str | UUID | None, by: str,
        source: Source, owner: str | None, why: str | None,
    ) -> Steps[Saved]:  # fmt: skip
        return save.saved(
            Scope(self.name, owner), self.keep, document_id, self._packed(content), expected_version, save_id, by,
            source, why,
        )  # fmt: skip

    def _restored(
        self, document_id: str | UUID, version: int, expected_version: int, save_id: str | UUID | None, by: str,
        source: Source, owner: str | None, why: str | None,
    ) -> Steps[Saved]:  # fmt: skip
        # No lock is needed between the two: a version never changes, and the save is judged by itself.
        scope = Scope(self.name, owner)
        try:
            found = yield from read.at_version(scope, document_id, version)
        except UnknownRevision:
            # The oldest that is kept goes by its own restoring, and the repeat of that finds it no more.
            done = yield from save.let_go(scope, self.keep, document_id, version, expected_version, save_id)
            if done is None:
                raise
            return done
        return (
            yield from self._saved(document_id, found.content, expected_version, save_id, by, source, owner, why)
        )  # fmt: skip

    def _packed(self, content: object) -> str:
        """The canonical text of the content. Raises InvalidContent and ContentTooLarge."""
        try:
            kept = self._schema.dump(content)
        except Misfits as misfits:
            raise InvalidContent(self.name, misfits.issues) from None
        if not isinstance(kept, dict):
            raise InvalidContent(self.name, (Misfit("", f"it is a JSON object; got {type(kept).__name__}"),))
        text = canonical(kept)
        if (size := len(text.encode())) > MOST_BYTES:
            raise ContentTooLarge(self.name, size, MOST_BYTES)
        return text

    def __repr__(self) -> str:
        return f"<documents {self.name}>"


def _read_as_target(name: str) -> None:
    """Plans may review documents of this collection. Declared again, it is read by the same function."""
    reader = reader_of(name)
    if reader is None:
        target_version(name)(partial(read.version_for_change, name))
    elif getattr(reader, "func", None) is not read.version_for_change:
        raise DefinitionError(f"documents {name!r}: target_version({name!r}) is declared already; one reads it.")
