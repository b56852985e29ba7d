"""Documents that deliveries and plans save: by the same check as anybody, together with their receipts."""

import pytest
from sqlalchemy import text

from durable_core import DefinitionError, Documents, Step, Target, VersionConflict, deliveries, target_version
from durable_core.deliveries import attempt
from durable_core.deliveries.worker import Outcome
from durable_core.plans.target import forget_reader


@pytest.fixture
def revise(desk, shop):
    """A step that rewrites the title of a brief, as an assistant would, on the version that was reviewed."""

    def rewrite(step, document_id: str, *, title: str) -> int:
        return desk.briefs.save(
            step.session, document_id, {"title": title}, expected_version=step.target.version, by="assistant",
            source="ai",
        ).version  # fmt: skip

    return shop.step(rewrite, target=lambda arguments: ("brief", arguments["document_id"]))


def test_a_delivery_saves_on_its_base_version_and_meets_a_conflict_as_a_person_does(desk, engine, worker, declare):
    made, found = desk.brief(), []

    def rewrite(step: Step, document_id: str, version: int) -> str:
        try:
            desk.briefs.save(
                step.session, document_id, {"title": "by the assistant"}, expected_version=version, by="assistant",
                source="ai",
            )  # fmt: skip
        except VersionConflict as conflict:
            found.append(conflict.current_version)
            step.session.execute(text("insert into effects (row_id) values ('still alive')"))
            return "conflict"
        return "saved"

    kind = declare(rewrite)
    for title, outcome in ((None, "saved"), ("by dana", "conflict")):
        version = desk.raw(made.id).version
        with engine.begin() as tx:
            ref = kind.enqueue(tx, made.id, version)
        if title is not None:
            desk.save(made.id, title, version)
        assert attempt.perform(worker, kind, ref.id).outcome is Outcome.SENT
        with engine.connect() as tx:
            assert deliveries.get(tx, ref.id).result == outcome
    assert found == [2]
    assert desk.revisions(made.id) == [(0, "Q3", "overwrite"), (1, "by the assistant", "overwrite")]
    assert (desk.raw(made.id).content["title"], desk.raw(made.id).source) == ("by dana", "user")
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 1


def test_a_plans_reviewed_target_is_a_document(desk, shop, worker, revise):
    made = desk.brief(saves=2)
    plan = shop.approved(revise.planned(made.id, title="reviewed", version=2))
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert shop.get(plan.id).state == "executed"
    row = desk.raw(made.id)
    assert (row.version, row.content["title"], row.source, row.saved_by) == (3, "reviewed", "ai", "assistant")


@pytest.mark.parametrize("meanwhile", ["save", "delete"])
def test_a_document_that_moved_since_the_review_is_a_conflict(desk, engine, shop, worker, revise, meanwhile):
    made = desk.brief()
    plan = shop.approved(revise.planned(made.id, title="reviewed", target=Target("brief", made.id, version=0)))
    if meanwhile == "save":
        desk.save(made.id, "by dana", 0)
    else:
        with engine.begin() as tx:
            desk.briefs.delete(tx, made.id, expected_version=0, by="dana")
    shop.run(worker, plan)
    told = shop.get(plan.id)
    assert (told.state, told.reason) == ("failed", "conflict")
    assert shop.receipts(plan.id) == [(0, "conflict")]
    assert desk.raw(made.id).source == "user"
    assert len(desk.revisions(made.id)) == 1


def test_a_step_that_saves_on_a_stale_version_without_a_reviewed_target_is_a_conflict_too(desk, shop, worker):
    made = desk.brief(saves=1)

    def rewrite(step, document_id: str, version: int) -> None:
        step.session.execute(text("insert into effects (row_id) values ('with it')"))
        desk.briefs.save(step.session, document_id, {"title": "x"}, expected_version=version, by="assistant")

    plan = shop.approved(shop.step(rewrite).planned(made.id, 0))
    shop.run(worker, plan)
    told = shop.get(plan.id)
    assert (told.state, told.reason) == ("failed", "conflict")
    assert "version 1 was saved by dana" in told.receipts[0].error_message
    with shop.engine.connect() as tx:
        assert tx.scalar(text("select count(*) from effects")) == 0


def test_what_names_no_document_is_a_target_that_is_gone(desk, shop, worker, revise):
    for document_id in ("no id", "0198a4c4-0000-7000-8000-000000000000", desk.brief(of=desk.collection("note")).id):
        plan = shop.approved(revise.planned(document_id, title="x", version=0))
        shop.run(worker, plan)
        assert "is gone" in shop.get(plan.id).receipts[0].error_message


def test_the_reviewed_document_is_locked_until_the_step_has_committed(desk, engine, shop, worker):
    made, refused = desk.brief(), []

    def rewrite(step, document_id: str) -> None:
        with engine.connect() as other:
            other.execute(text("set local lock_timeout = '1ms'"))
            try:
                desk.briefs.save(other, document_id, {"title": "between"}, expected_version=0, by="eve")
            except Exception as error:
                refused.append(type(error).__name__)

    target = Target("brief", made.id, version=0)
    plan = shop.approved(shop.step(rewrite, target="brief").planned(made.id, target=target))
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert refused == ["OperationalError"]


def test_a_collection_is_declared_as_often_as_it_is_used_but_its_versions_are_read_by_one_function(desk):
    Documents("brief")
    with pytest.raises(DefinitionError, match="twice"):
        target_version("brief")(lambda session, id: 1)
    target_version("mine")(lambda session, id: 1)
    try:
        with pytest.raises(DefinitionError, match="already"):
            Documents("mine")
    finally:
        forget_reader("mine")
