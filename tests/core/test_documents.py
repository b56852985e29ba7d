"""Documents: what a save writes, what it refuses, and that what it refuses is as if nobody had asked."""

import json
from uuid import UUID, uuid4

import pydantic
import pytest
from sqlalchemy import text

from durable_core import (
    ContentTooLarge,
    DefinitionError,
    Documents,
    InvalidArguments,
    InvalidContent,
    InvalidOption,
    SaveIdReused,
    UnknownDocument,
    UnknownRevision,
    VersionConflict,
)
from durable_core.documents import MOST_BYTES
from durable_core.documents.read import EVERYTHING
from tests.core.document_desk import Brief


def everything(engine):
    """All rows of both tables, as text: what a refusal must leave as it is."""
    with engine.connect() as tx:
        return [
            list(tx.scalars(text(f"select cast(t.* as text) from durable.{table} t order by 1")))
            for table in ("documents", "document_revisions")
        ]


def test_a_document_begins_at_version_0_and_is_read_as_it_was_written(desk, engine):
    with engine.begin() as tx:
        made = desk.briefs.create(tx, Brief(title="Q3", body="ä"), owner="dana", by="eve")
    with engine.connect() as tx:
        read = desk.briefs.get(tx, made.id)
    assert read == made
    assert (read.version, read.content, read.owner, read.saved_by) == (0, {"title": "Q3", "body": "ä"}, "dana", "eve")
    assert (read.collection, read.source, read.deleted_at, read.created_at) == ("brief", "user", None, read.saved_at)
    assert desk.briefs.loaded(read) == Brief(title="Q3", body="ä")
    assert "ä" not in repr(read), "a payload is in no repr"
    assert desk.revisions(made.id) == []


def test_a_save_makes_the_next_version_and_keeps_the_one_before(desk, engine, clock):
    clock.freeze()
    made = desk.brief()
    clock.advance(60)
    done = desk.save(made.id, "Q4", 0, by="eve", source="ai", why="the figures came")
    with engine.connect() as tx:
        read = desk.briefs.get(tx, made.id)
        first = desk.briefs.revision(tx, made.id, 0)
        now = desk.briefs.revision(tx, made.id, 1)
    assert (done.version, done.repeated, done.saved_at) == (1, False, read.saved_at)
    assert (read.saved_at - made.saved_at).total_seconds() == 60
    assert (read.version, read.content["title"], read.saved_by, read.source) == (1, "Q4", "eve", "ai")
    assert read.why == "the figures came"
    assert (first.content, first.saved_at, first.saved_by) == (made.content, made.saved_at, "dana")
    assert (first.source, first.reason, first.why) == ("user", "overwrite", None)
    assert (now.content, now.reason, now.saved_by, now.why) == (read.content, None, "eve", "the figures came")


@pytest.mark.spec("documents", 18)
def test_a_stale_save_writes_nothing_and_leaves_the_callers_transaction_alive(desk, engine):
    """What else the caller writes in the same transaction is the caller's to keep or to drop."""
    made = desk.brief(saves=2)
    before = everything(engine)
    with engine.begin() as tx:
        with pytest.raises(VersionConflict) as conflict:
            desk.briefs.save(tx, made.id, {"title": "mine", "body": "renamed"}, expected_version=1, by="eve")
        assert desk.briefs.get(tx, made.id) == made
    assert everything(engine) == before
    refused = conflict.value
    assert (refused.document_id, refused.expected, refused.current_version) == (made.id, 1, 2)
    assert (refused.saved_by, refused.saved_at, refused.reason) == ("dana", made.saved_at, "VERSION_CONFLICT")


@pytest.mark.parametrize("expected", [0, 1, 3, 2**63 - 1])
def test_no_version_but_the_current_one_is_saved_on(desk, engine, expected):
    made = desk.brief(saves=2)
    before = everything(engine)
    for act in (
        lambda tx: desk.briefs.save(tx, made.id, {"title": "x"}, expected_version=expected, by="eve"),
        lambda tx: desk.briefs.restore(tx, made.id, 0, expected_version=expected, by="eve"),
        lambda tx: desk.briefs.delete(tx, made.id, expected_version=expected, by="eve"),
    ):
        with engine.begin() as tx, pytest.raises(VersionConflict) as conflict:
            act(tx)
        assert conflict.value.current_version == 2
    assert everything(engine) == before


@pytest.mark.parametrize("expected", [-1, 2**63, "0", 0.0, True, None, [0]])
def test_what_is_no_version_is_refused_before_anything_is_looked_at(desk, engine, expected):
    made = desk.brief()
    before = everything(engine)
    for act in (
        lambda tx: desk.briefs.save(tx, made.id, {"title": "x"}, expected_version=expected, by="eve"),
        lambda tx: desk.briefs.delete(tx, made.id, expected_version=expected, by="eve"),
        lambda tx: desk.briefs.restore(tx, made.id, 0, expected_version=expected, by="eve"),
        lambda tx: desk.briefs.revision(tx, made.id, expected),
    ):
        with engine.begin() as tx, pytest.raises(InvalidArguments):
            act(tx)
    assert everything(engine) == before


@pytest.mark.spec("documents", 20)
def test_a_save_without_a_version_or_with_more_than_content_is_no_save(desk, engine):
    """The store's part: there is no way to leave the version out, nor to hand over anything beside the content."""
    made = desk.brief()
    before = everything(engine)
    with engine.begin() as tx:
        with pytest.raises(TypeError, match="expected_version"):
            desk.briefs.save(tx, made.id, {"title": "x"}, by="eve")
        with pytest.raises(InvalidContent) as refused:
            desk.briefs.save(tx, made.id, {"title": "x", "owner": "eve"}, expected_version=0, by="eve")
        with pytest.raises(TypeError, match="title"):
            desk.briefs.save(tx, made.id, {"title": "x"}, expected_version=0, by="eve", title="x")
    assert [issue.at for issue in refused.value.issues] == ["owner"]
    assert everything(engine) == before


@pytest.mark.spec("documents", 21)
def test_a_foreign_a_deleted_and_an_unknown_document_are_told_apart_by_nobody(desk, engine):
    mine, gone = desk.brief(owner="dana"), desk.brief(owner="eve")
    note = desk.brief(of=desk.collection("note"), owner="eve")
    with engine.begin() as tx:
        desk.briefs.delete(tx, gone.id, expected_version=0, by="eve")
    before = everything(engine)
    said = set()
    for document_id in (mine.id, gone.id, note.id, str(uuid4()), "no id", 7, None):
        for act in (
            lambda tx, id: desk.briefs.get(tx, id, owner="eve"),
            lambda tx, id: desk.briefs.save(tx, id, {"title": "x"}, expected_version=0, by="eve", owner="eve"),
            lambda tx, id: desk.briefs.history(tx, id, owner="eve"),
            lambda tx, id: desk.briefs.revision(tx, id, 0, owner="eve"),
            lambda tx, id: desk.briefs.restore(tx, id, 0, expected_version=0, by="eve", owner="eve"),
            lambda tx, id: desk.briefs.delete(tx, id, expected_version=0, by="eve", owner="eve"),
        ):
            with engine.begin() as tx, pytest.raises(UnknownDocument) as refused:
                act(tx, document_id)
            said.add(str(refused.value).replace(str(document_id), "ID"))
    assert len(said) == 1
    assert everything(engine) == before
    with engine.connect() as tx:
        assert desk.briefs.get(tx, mine.id, owner="dana") == desk.briefs.get(tx, mine.id) == mine


def test_equal_content_is_a_save_as_any(desk):
    made = desk.brief("same")
    assert desk.save(made.id, "same", 0).version == 1
    assert desk.revisions(made.id) == [(0, "same", "overwrite")]


# --- save ids --------------------------------------------------------------------------------------


@pytest.mark.spec("documents", 25)
def test_a_save_that_is_repeated_after_a_lost_answer_is_a_success_without_another_version(desk, engine):
    made, save_id = desk.brief(), uuid4()
    first = desk.save(made.id, "Q4", 0, save_id=save_id)
    before = everything(engine)
    for again in (save_id, str(save_id), str(save_id).upper()):
        repeat = desk.save(made.id, "Q4", 0, save_id=again, by="eve")
        assert (repeat.version, repeat.repeated, repeat.saved_at) == (1, True, first.saved_at)
    assert everything(engine) == before
    assert desk.revisions(made.id) == [(0, "Q3", "overwrite")]


@pytest.mark.parametrize(("title", "expected"), [("other", 0), ("Q4", 1), ("other", 1), ("Q4", 7)])
def test_a_save_id_names_one_save_and_no_other(desk, engine, title, expected):
    made, save_id = desk.brief(), uuid4()
    desk.save(made.id, "Q4", 0, save_id=save_id)
    before = everything(engine)
    with pytest.raises(SaveIdReused) as refused:
        desk.save(made.id, title, expected, save_id=save_id)
    assert (refused.value.current_version, refused.value.reason) == (1, "SAVE_ID_REUSED")
    assert isinstance(refused.value, VersionConflict)
    assert everything(engine) == before


def test_a_repeat_after_somebody_else_has_saved_is_a_conflict(desk):
    made, save_id = desk.brief(), uuid4()
    desk.save(made.id, "mine", 0, save_id=save_id)
    desk.save(made.id, "theirs", 1, by="eve", save_id=uuid4())
    with pytest.raises(VersionConflict) as conflict:
        desk.save(made.id, "mine", 0, save_id=save_id)
    assert (type(conflict.value), conflict.value.saved_by) == (VersionConflict, "eve")


def test_a_save_without_an_id_is_the_repeat_of_none(desk):
    made = desk.brief()
    desk.save(made.id, "Q4", 0)
    with pytest.raises(VersionConflict):
        desk.save(made.id, "Q4", 0)
    desk.save(made.id, "Q4", 1, save_id=uuid4())
    desk.save(made.id, "Q5", 2)
    assert desk.raw(made.id).save_id is None


@pytest.mark.parametrize("save_id", ["no id", 7, b"x", ""])
def test_what_is_no_save_id_is_refused(desk, save_id):
    made = desk.brief()
    with pytest.raises(InvalidArguments, match="save_id"):
        desk.save(made.id, "Q4", 0, save_id=save_id)


def test_a_restore_may_be_repeated_too(desk, engine):
    made, save_id = desk.brief(saves=1), uuid4()
    for repeated in (False, True):
        with engine.begin() as tx:
            done = desk.briefs.restore(tx, made.id, 0, expected_version=1, by="dana", save_id=save_id)
        assert (done.version, done.repeated) == (2, repeated)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_restore_may_be_repeated_where_it_let_go_the_version_that_it_restored(desk, engine, keep):
    few = desk.collection("few", Brief, keep=keep)
    made, save_id = desk.brief(saves=4, of=few), uuid4()
    oldest = 4 - keep

    def restored(version, save_id, expected=4, owner=None):
        with engine.begin() as tx:
            return few.restore(tx, made.id, version, expected_version=expected, by="dana", save_id=save_id, owner=owner)

    for repeated in (False, True):
        done = restored(oldest, save_id)
        assert (done.version, done.repeated) == (5, repeated)
    assert desk.raw(made.id).content["title"] == f"Q3 {oldest}"
    assert oldest not in [version for version, _, _ in desk.revisions(made.id)]
    # Under another id, from another version, or of a version that never was it is what it was before: unknown.
    for version, id_, expected in ((oldest, None, 4), (oldest, uuid4(), 4), (oldest, save_id, 5), (9, save_id, 4)):
        with pytest.raises(UnknownRevision):
            restored(version, id_, expected)
    with pytest.raises(UnknownDocument):
        restored(oldest, save_id, owner="eve")
    assert desk.raw(made.id).version == 5


# --- history ---------------------------------------------------------------------------------------


def test_history_is_the_versions_newest_first_the_current_one_among_them(desk, engine):
    made = desk.brief(saves=4)
    with engine.connect() as tx:
        found = desk.briefs.history(tx, made.id)
        assert [(one.version, one.reason) for one in found] == [
            (4, None), (3, "overwrite"), (2, "overwrite"), (1, "overwrite"), (0, "overwrite"),
        ]  # fmt: skip
        assert {one.content for one in found} == {None}
        told = desk.briefs.history(tx, made.id, contents=True, limit=2)
        assert [one.content["title"] for one in told] == ["Q3 4", "Q3 3"]
        assert [one.version for one in desk.briefs.history(tx, made.id, before=3, limit=2)] == [2, 1]
        assert [one.version for one in desk.briefs.history(tx, made.id, before=9, limit=1)] == [4]
        assert desk.briefs.history(tx, made.id, before=0) == []
        for wrong in ({"limit": 0}, {"limit": 1001}, {"limit": True}, {"before": -1}, {"before": "3"}):
            with pytest.raises(InvalidArguments):
                desk.briefs.history(tx, made.id, **wrong)


@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (5, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])])
def test_so_many_revisions_are_kept_and_the_oldest_go(desk, engine, keep, kept):
    few = desk.collection("few", keep=keep)
    made = desk.brief(of=few, saves=5)
    assert [version for version, _, _ in desk.revisions(made.id)] == kept
    with engine.connect() as tx:
        assert [one.version for one in few.history(tx, made.id)] == [5, *reversed(kept)]
        for version in set(range(5)) - set(kept):
            with pytest.raises(UnknownRevision):
                few.revision(tx, made.id, version)
        with pytest.raises(UnknownRevision):
            few.revision(tx, made.id, 6)


def test_a_smaller_keep_takes_effect_with_the_next_save_and_with_a_deletion(desk, engine):
    made = desk.brief(of=desk.collection("few", keep=None), saves=9)
    desk.save(made.id, "Q4", 9, of=desk.collection("few", keep=3))
    assert [version for version, _, _ in desk.revisions(made.id)] == [7, 8, 9]
    with engine.begin() as tx:
        desk.collection("few", keep=2).delete(tx, made.id, expected_version=10, by="dana")
    assert [(version, reason) for version, _, reason in desk.revisions(made.id)] == [(9, "overwrite"), (10, "delete")]


def test_what_is_restored_is_a_new_version(desk, engine):
    made = desk.brief(saves=2)
    with engine.begin() as tx:
        done = desk.briefs.restore(tx, made.id, 0, expected_version=2, by="eve", why="the figures were wrong")
        read = desk.briefs.get(tx, made.id)
        assert (done.version, read.content["title"], read.why) == (3, "Q3", "the figures were wrong")
        with pytest.raises(UnknownRevision):
            desk.briefs.restore(tx, made.id, 4, expected_version=3, by="eve")
        assert desk.briefs.restore(tx, made.id, 3, expected_version=3, by="eve").version == 4
    assert [title for _, title, _ in desk.revisions(made.id)] == ["Q3", "Q3 1", "Q3 2", "Q3"]


def test_what_the_model_takes_no_longer_is_not_restored(desk, engine):
    class Longer(pydantic.BaseModel):
        title: str = pydantic.Field(min_length=4)
        body: str

    made = desk.brief(saves=1)
    longer = Documents("brief", Longer)
    with engine.begin() as tx, pytest.raises(InvalidContent, match="title"):
        longer.restore(tx, made.id, 0, expected_version=1, by="dana")
    with engine.connect() as tx, pytest.raises(InvalidContent, match="title"):
        longer.loaded(longer.revision(tx, made.id, 0))


def test_a_deleted_document_is_unknown_and_its_history_is_there_for_operators(desk, engine):
    from durable_core.database.transactions import carried
    from durable_core.documents import read

    made = desk.brief(saves=1)
    with engine.begin() as tx:
        desk.briefs.delete(tx, made.id, expected_version=1, by="eve", why="asked for")
    row = desk.raw(made.id)
    assert (row.deleted_by, row.why, row.version) == ("eve", "asked for", 1)
    assert desk.revisions(made.id) == [(0, "Q3", "overwrite"), (1, "Q3 1", "delete")]
    with engine.connect() as tx:
        assert carried(tx, read.got(EVERYTHING, made.id)).deleted_at == row.deleted_at
        found = carried(tx, read.past(EVERYTHING, made.id, 50, None, False))
        assert [(one.version, one.reason) for one in found] == [(1, "delete"), (0, "overwrite")]
        assert carried(tx, read.at_version(EVERYTHING, made.id, 1)).reason == "delete"
        assert desk.briefs.page(tx) == []


def test_a_page_is_of_one_collection_and_of_one_owner_newest_first(desk, engine):
    notes = desk.collection("note")
    made = [desk.brief(owner="dana"), desk.brief(owner="eve"), desk.brief(owner="dana")]
    desk.brief(of=notes)
    with engine.connect() as tx:
        found = desk.briefs.page(tx)
        assert [one.id for one in found] == [made[2].id, made[1].id, made[0].id]
        assert {one.content for one in found} == {None}
        assert [one.id for one in desk.briefs.page(tx, owner="dana", limit=1)] == [made[2].id]
        assert [one.id for one in desk.briefs.page(tx, owner="dana", after=made[2].id)] == [made[0].id]
        with pytest.raises(InvalidArguments, match="after"):
            desk.briefs.page(tx, after="no id")


# --- what may be in it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "at"),
    [
        ({}, "title"), ({"title": 7}, "title"), ({"title": "x", "body": None}, "body"), ({"title": "x", "x": 1}, "x"),
        ([], ""), ("text", ""), (None, ""), ({"title": "x\x00"}, ""), ({"title": float("nan")}, "title"),
        ({1: "x"}, "title"), ({"title": "\ud800"}, ""), ({"title": "x", "body": object()}, ""),
    ],
)  # fmt: skip
def test_content_that_does_not_fit_is_refused_with_the_field(desk, engine, content, at):
    made = desk.brief()
    before = everything(engine)
    for act in (
        lambda tx: desk.briefs.create(tx, content, owner="dana", by="dana"),
        lambda tx: desk.briefs.save(tx, made.id, content, expected_version=0, by="dana"),
    ):
        with engine.begin() as tx:
            with pytest.raises(InvalidContent) as refused:
                act(tx)
            assert tx.scalar(text("select 1")) == 1
        assert refused.value.issues[0].at == at
    assert everything(engine) == before


@pytest.mark.parametrize("content", [[], "text", None, 7, {"a": float("inf")}, {"a": 2**63}, {"a": {1, 2}}])
def test_without_a_model_any_json_object_will_do_and_nothing_else(desk, engine, content):
    with engine.begin() as tx, pytest.raises(InvalidContent):
        desk.collection("free").create(tx, content, owner="dana", by="dana")


def test_json_comes_back_as_it_went_in(desk, engine):
    content = {"b": [1, 2.5, {"x": None}], "a": {"": True}, "n": 2**63 - 1, "t": "\u2028 \U0001f600", "e": 1e300}
    free = desk.collection("free")
    with engine.begin() as tx:
        made = free.create(tx, content, owner="dana", by="dana")
        free.save(tx, made.id, content, expected_version=0, by="dana")
        assert json.dumps(free.get(tx, made.id).content, sort_keys=True) == json.dumps(content, sort_keys=True)
        assert free.revision(tx, made.id, 0).content == content


def test_a_model_may_keep_what_it_has_no_field_for(desk, engine):
    class Open(pydantic.BaseModel, extra="allow"):
        title: str

    open_ = desk.collection("open", Open)
    with engine.begin() as tx:
        assert open_.create(tx, {"title": "x", "more": 1}, owner="dana", by="dana").content == {"title": "x", "more": 1}


class Silent(pydantic.BaseModel):
    text: str


class Open(pydantic.BaseModel, extra="allow"):
    text: str


class Closed(pydantic.BaseModel, extra="forbid"):
    text: str


@pytest.mark.parametrize("outer", ["allow", "forbid"])
@pytest.mark.parametrize("inner", [Open, Closed, list[Open], dict[str, Open | None]])
def test_each_part_of_a_model_keeps_what_it_has_no_field_for_or_refuses_it(desk, engine, outer, inner):
    notes = desk.collection("notes", pydantic.create_model("Notes", __config__={"extra": outer}, part=(inner, ...)))

    def create(part, **more):
        in_ = {"part": [part]} if inner == list[Open] else {"part": {"a": part} if "dict" in str(inner) else part}
        with engine.begin() as tx:
            return notes.create(tx, {**in_, **more}, owner="dana", by="dana").content == {**in_, **more}

    assert create({"text": "x"})
    if inner is Closed:
        with pytest.raises(InvalidContent, match="words"):
            create({"text": "x", "words": "nobody knows"})
    else:
        assert create({"text": "x", "words": "nobody knows"})
    if outer == "allow":
        assert create({"text": "x"}, more=1)
    else:
        with pytest.raises(InvalidContent, match="more"):
            create({"text": "x"}, more=1)


@pytest.mark.parametrize("part", [Silent, list[Silent], Silent | None, dict[str, Silent], Open | Silent])
def test_a_model_that_would_leave_out_a_part_of_what_it_was_given_is_a_definition_error(part):
    with pytest.raises(DefinitionError, match="Silent in it would leave that out"):
        Documents("notes", pydantic.create_model("Notes", __config__={"extra": "allow"}, part=(part, ...)))


def test_content_has_a_largest_size(desk, engine):
    free = desk.collection("free")
    room = MOST_BYTES - len('{"a":""}')
    with engine.begin() as tx:
        made = free.create(tx, {"a": "x" * room}, owner="dana", by="dana")
        for content in ({"a": "x" * (room + 1)}, {"a": "ä" * (room // 2 + 1)}):
            with pytest.raises(ContentTooLarge) as refused:
                free.save(tx, made.id, content, expected_version=0, by="dana")
            assert (refused.value.limit, refused.value.reason) == (500_000, "CONTENT_TOO_LARGE")
            assert refused.value.size > MOST_BYTES
        assert free.get(tx, made.id).version == 0


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"owner": ""}, InvalidArguments), ({"owner": "a\nb"}, InvalidArguments), ({"owner": None}, InvalidArguments),
        ({"owner": "x" * 201}, InvalidArguments), ({"by": ""}, InvalidOption), ({"by": None}, InvalidOption),
        ({"source": "robot"}, InvalidArguments), ({"why": " "}, InvalidOption),
        ({"document_id": "x"}, InvalidArguments),
    ],
)  # fmt: skip
def test_who_and_how_are_checked(desk, engine, how, error):
    with engine.begin() as tx, pytest.raises(error):
        desk.briefs.create(tx, {"title": "x"}, **{"owner": "dana", "by": "dana", **how})
    assert everything(engine) == [[], []]


def test_an_id_may_be_given_and_is_taken_once(desk, engine):
    document_id = UUID("0198a4c4-0000-7000-8000-000000000000")
    with engine.begin() as tx:
        made = desk.briefs.create(tx, {"title": "x"}, owner="dana", by="dana", document_id=document_id)
        assert made.id == str(document_id)
        with pytest.raises(InvalidArguments, match="already"):
            desk.briefs.create(tx, {"title": "y"}, owner="dana", by="dana", document_id=str(document_id))
        assert desk.briefs.get(tx, document_id).content["title"] == "x"


def test_the_refusals_come_in_order(desk, engine):
    """What the caller can mend without looking comes before what needs a look."""
    unknown = str(uuid4())
    with engine.begin() as tx:
        with pytest.raises(InvalidContent):
            desk.briefs.save(tx, unknown, {}, expected_version=-1, by="dana")
        with pytest.raises(InvalidArguments):
            desk.briefs.save(tx, unknown, {"title": "x"}, expected_version=-1, by="dana")
        with pytest.raises(UnknownDocument):
            desk.briefs.save(tx, unknown, {"title": "x"}, expected_version=0, by="dana")


@pytest.mark.parametrize("keep", [0, -1, True, "5", 2.0, 2**31])
def test_what_cannot_be_kept_is_a_definition_error(keep):
    with pytest.raises(DefinitionError, match="keep"):
        Documents("brief", keep=keep)


@pytest.mark.parametrize(("name", "model"), [("", None), ("durable.x", None), ("a b", None), ("brief", object())])
def test_a_collection_has_a_name_and_a_model(name, model):
    with pytest.raises(DefinitionError):
        Documents(name, model)
