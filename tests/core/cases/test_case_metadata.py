"""The metadata of a correlation are those of the call, whatever a caller does with its own afterwards."""


def test_metadata_are_stored_as_they_were_when_a_handler_registered_them(world):
    kind = world.type()

    @kind.step("go")
    def go(state, ctx):
        metadata = {"parts": (1,)}
        ctx.correlate("carrier", "A1", metadata=metadata)
        metadata["parts"] = object()
        return state

    cases = world.cases(kind)
    cases.execute(world.create(cases, {}), "go")
    with world.begin() as tx:
        assert cases.correlation_of(tx, "carrier", "A1").metadata == {"parts": [1]}


def test_what_callers_do_with_their_metadata_changes_nothing_that_is_stored(world):
    cases = world.cases(world.type())
    case_id = world.create(cases, {})
    given = {"parts": [1]}
    with world.begin() as tx:
        made = cases.correlate(tx, case_id, "carrier", "A1", metadata=given)
        for metadata in (given, made.metadata):
            metadata["parts"].append(2)
        cases.correlation_of(tx, "carrier", "A1").metadata["parts"].append(3)
        cases.correlations(tx, case_id)[0].metadata["parts"].append(4)
    with world.begin() as tx:
        assert cases.correlation_of(tx, "carrier", "A1").metadata == {"parts": [1]}
        assert cases.correlations(tx, case_id)[0].metadata == {"parts": [1]}
