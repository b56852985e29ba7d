"""`durable documents`, and what `find` says of documents."""

import json

import pytest

from durable_core import Documents
from tests.cli.conftest import error_of, value_of

WHO = ("--by", "dana", "--reason", "asked for")


def refused(result):
    return result.exit_code, error_of(result)


@pytest.fixture
def brief(desk):
    return desk.brief(saves=3)


def test_documents_are_listed_without_their_content(desk, durable, brief):
    note = desk.brief(of=desk.collection("note"), owner="eve")
    shown = durable("documents", "list")
    assert shown.exit_code == 0
    assert brief.id in shown.output
    assert note.id in shown.output
    assert "Q3" not in shown.output
    for line, ids in (
        (("--collection", "note"), [note.id]),
        (("--owner", "dana"), [brief.id]),
        (("--limit", "1"), [note.id]),
        (("--after", note.id), [brief.id]),
    ):
        answer = value_of(durable("documents", "list", *line, "--json"))
        assert [one["id"] for one in answer["documents"]] == ids
        assert "content" not in answer["documents"][0]
    assert value_of(durable("documents", "list", "--limit", "1", "--json"))["next_after"] == note.id
    assert "--after" in durable("documents", "list", "--limit", "1").stderr


def test_one_document_is_shown_and_its_content_only_if_asked_for(durable, brief):
    shown = durable("documents", "show", brief.id)
    assert "dana (user)" in shown.output
    assert "Q3" not in shown.output
    assert '"title": "Q3 3"' in durable("documents", "show", brief.id, "--content").output
    assert '"title": "Q3 1"' in durable("documents", "show", brief.id, "--version", "1").output
    answer = value_of(durable("documents", "show", brief.id, "--content", "--json"))
    assert (answer["version"], answer["content"]["title"], answer["owner"]) == (3, "Q3 3", "dana")
    assert "content" not in value_of(durable("documents", "show", brief.id, "--json"))
    old = value_of(durable("documents", "show", brief.id, "--version", "0", "--json"))
    assert (old["version"], old["content"]["title"], old["collection"]) == (0, "Q3", "brief")
    assert refused(durable("documents", "show", brief.id, "--version", "9", "--json")) == (4, "NOT_FOUND")


def test_history_is_shown_and_two_versions_are_compared(durable, brief):
    answer = value_of(durable("documents", "history", brief.id, "--limit", "2", "--json"))
    assert [(one["version"], one["reason"]) for one in answer["versions"]] == [(3, None), (2, "overwrite")]
    assert answer["next_before"] == 2
    older = value_of(durable("documents", "history", brief.id, "--before", "2", "--json"))["versions"]
    assert [one["version"] for one in older] == [1, 0]
    assert "overwrite" in durable("documents", "history", brief.id).output
    shown = durable("documents", "diff", brief.id, "0", "2").output
    for line in ('-  "title": "Q3"', '+  "title": "Q3 2"', '   "body": ""'):
        assert line in shown
    assert value_of(durable("documents", "diff", brief.id, "1", "--json"))["versions"] == [1, 3]
    assert durable("documents", "diff", brief.id, "3").output == "no difference\n"


def test_restoring_asks_and_keeps_who_and_why(desk, durable, brief, engine):
    line = ("documents", "restore", brief.id, "1", *WHO)
    asked = durable(*line)
    assert asked.exit_code == 2
    assert "--yes" in asked.stderr
    assert desk.raw(brief.id).version == 3
    assert value_of(durable(*line, "--yes", "--json")) == {"id": brief.id, "outcome": "restored", "version": 4}
    row = desk.raw(brief.id)
    assert (row.content["title"], row.saved_by, row.why) == ("Q3 1", "dana", "asked for")
    assert "asked for" in durable("documents", "history", brief.id).output
    for wrong, code, reason in (
        (("restore", brief.id, "9", *WHO, "--yes"), 4, "NOT_FOUND"),
        (("restore", brief.id, "0", *WHO, "--yes", "--expected-version", "3"), 5, "VERSION_CONFLICT"),
        (("delete", brief.id, *WHO, "--yes", "--expected-version", "3"), 5, "VERSION_CONFLICT"),
        (("restore", brief.id, "0", "--by", " ", "--reason", "x", "--yes"), 2, "INVALID_OPTION"),
    ):
        assert refused(durable("documents", *wrong, "--json")) == (code, reason)
    assert desk.raw(brief.id).version == 4


def test_a_deleted_document_is_found_and_shown_and_nothing_more_is_done_to_it(desk, durable, brief):
    line = ("documents", "delete", brief.id, *WHO)
    assert durable(*line).exit_code == 2
    assert durable(*line, "--yes").output == f"{brief.id} deleted at version 3\n"
    assert desk.raw(brief.id).deleted_by == "dana"
    assert value_of(durable("documents", "list", "--json"))["documents"] == []
    (listed,) = value_of(durable("documents", "list", "--deleted", "--json"))["documents"]
    assert listed["id"] == brief.id
    answer = value_of(durable("documents", "show", brief.id, "--json"))
    assert answer["deleted_at"].endswith("Z")
    assert answer["why"] == "asked for"
    assert value_of(durable("documents", "history", brief.id, "--json"))["versions"][0]["reason"] == "delete"
    for act in (("restore", brief.id, "0"), ("delete", brief.id)):
        assert refused(durable("documents", *act, *WHO, "--yes", "--json")) == (4, "NOT_FOUND")
    (found,) = value_of(durable("find", brief.id, "--json"))["found"]
    assert (found["what"], found["kind"], found["state"]) == ("document", "brief", "deleted")


def test_find_knows_a_document_by_its_id_and_the_beginning_of_it(durable, brief, make):
    for text in (brief.id, brief.id.upper(), brief.id.replace("-", "")[:20]):
        (found,) = value_of(durable("find", text, "--json"))["found"]
        assert (found["what"], found["id"], found["state"]) == ("document", brief.id, None)
        assert found["look"] == f"durable documents show {brief.id}"
    delivery = make()
    assert refused(durable("documents", "show", delivery.id, "--json")) == (4, "NOT_FOUND")
    assert refused(durable("documents", "show", "0" * 32, "--json")) == (4, "NOT_FOUND")


def test_a_large_number_is_restored_as_it_was(durable, engine):
    free = Documents("free", keep=None)
    with engine.begin() as tx:
        made = free.create(tx, {"n": 1e300}, owner="dana", by="dana")
        free.save(tx, made.id, {"n": 0}, expected_version=0, by="dana")
    assert durable("documents", "restore", made.id, "0", *WHO, "--yes").exit_code == 0
    with engine.connect() as tx:
        assert json.dumps(free.get(tx, made.id).content) == '{"n": 1e+300}'
