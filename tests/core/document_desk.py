"""Collections of documents for tests, and what is in the tables."""

from __future__ import annotations

from typing import Any

import pydantic
from sqlalchemy import Engine, text

from durable_core import Document, Documents
from durable_core.plans.target import forget_reader


class Brief(pydantic.BaseModel):
    """What the documents of these tests are."""

    title: str
    body: str = ""


class Desk:
    """What a test of documents works with; made by the fixture `desk`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names: set[str] = set()
        self.briefs = self.collection("brief", Brief)

    def collection(self, name: str, model: Any = None, **how: Any) -> Documents:
        made = Documents(name, model, **how)
        self.names.add(name)
        return made

    def brief(self, title: str = "Q3", *, saves: int = 0, of: Documents | None = None, **how: Any) -> Document:
        """A document at version `saves`: its title says which."""
        of = of or self.briefs
        with self.engine.begin() as tx:
            made = of.create(tx, {"title": title, "body": ""}, **{"owner": "dana", "by": "dana", **how})
            for version in range(saves):
                content = {"title": f"{title} {version + 1}", "body": ""}
                of.save(tx, made.id, content, expected_version=version, by="dana")
            return of.get(tx, made.id)

    def save(self, document_id: str, title: str, expected: int, of: Documents | None = None, **how: Any) -> Any:
        with self.engine.begin() as tx:
            return (of or self.briefs).save(
                tx, document_id, {"title": title}, **{"expected_version": expected, "by": "dana", **how}
            )

    def raw(self, document_id: str) -> Any:
        with self.engine.connect() as tx:
            return tx.execute(text("select * from durable.documents where id = :id"), {"id": document_id}).one()

    def revisions(self, document_id: str) -> list[tuple[int, str, str]]:
        """Each version that was kept, oldest first: its title, and what ended it."""
        found = text(
            "select version, content ->> 'title', reason from durable.document_revisions"
            " where document_id = :id order by version"
        )
        with self.engine.connect() as tx:
            return [tuple(row) for row in tx.execute(found, {"id": document_id})]

    def close(self) -> None:
        for name in self.names:
            forget_reader(name)
