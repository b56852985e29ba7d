"""Whatever is done to a document, in whatever order: its history is a chain without a gap, and tells what was saved."""

from uuid import UUID

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable_core import SaveIdReused, UnknownDocument, UnknownRevision, VersionConflict

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(-2, 1), st.sampled_from("abc"), st.one_of(st.none(), st.integers(1, 2))),
        st.tuples(st.just("restore"), st.integers(-2, 1), st.integers(0, 4), st.none()),
        st.tuples(st.sampled_from(["delete", "roll back"]), st.integers(-1, 0), st.none(), st.none()),
    ),
    max_size=12,
)


class Model:
    """What a document should be: all its versions, and what the last save was."""

    def __init__(self, keep):
        self.versions, self.deleted, self.keep = ["a"], False, keep
        self.last = None

    @property
    def version(self):
        return len(self.versions) - 1

    def kept(self):
        """The versions that can be read: the current one and `keep` before it."""
        return {number: self.versions[number] for number in range(max(0, self.version - self.keep), self.version + 1)}

    def save(self, expected, title, save_id):
        if self.deleted:
            return UnknownDocument
        this = (save_id, expected, title)
        if save_id is not None and self.last is not None and self.last[0] == save_id:
            return "repeated" if this == self.last else SaveIdReused
        if expected != self.version:
            return VersionConflict
        self.versions.append(title)
        self.last = this
        return "saved"


def came_of(act):
    try:
        done = act()
    except (VersionConflict, UnknownDocument, UnknownRevision) as refused:
        return type(refused)
    return "saved" if done is None or not done.repeated else "repeated"


@given(acts=ACTS, keep=st.integers(1, 3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_versions_of_a_document_are_a_chain_without_a_gap(desk, engine, acts, keep):
    of = desk.collection("chain", keep=keep)
    model = Model(keep)
    with engine.connect() as tx:
        made = of.create(tx, {"title": "a"}, owner="dana", by="dana")
        for act, off, what, number in acts:
            expected, save_id = max(0, model.version + off), None if number is None else UUID(int=number)
            if act == "save":
                came = came_of(
                    lambda e=expected, w=what, s=save_id: of.save(
                        tx, made.id, {"title": w}, expected_version=e, save_id=s, by="dana"
                    )
                )
                assert came == model.save(expected, what, save_id)
            elif act == "restore":
                came = came_of(
                    lambda e=expected, w=what: of.restore(tx, made.id, w, expected_version=e, by="dana")
                )  # fmt: skip
                if model.deleted or what in model.kept():
                    assert came == model.save(expected, model.versions[min(what, model.version)], None)
                else:
                    assert came is UnknownRevision
            elif act == "delete":
                came = came_of(lambda e=expected: of.delete(tx, made.id, expected_version=e, by="dana"))
                wanted = UnknownDocument if model.deleted else "saved" if expected == model.version else VersionConflict
                assert came == wanted
                model.deleted = model.deleted or wanted == "saved"
            else:
                with tx.begin_nested() as nested:
                    came_of(lambda: of.save(tx, made.id, {"title": "never"}, expected_version=model.version, by="eve"))
                    nested.rollback()
            if not model.deleted:
                history = of.history(tx, made.id, contents=True)
                assert {one.version: one.content["title"] for one in history} == model.kept()
                assert of.get(tx, made.id).version == model.version
        tx.rollback()
