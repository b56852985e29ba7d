"""Where the rows live: what is no engine and no sessionmaker is refused when it is named."""

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from durable_core import DefinitionError
from durable_core.database.connections import Database

ENGINE = create_engine("postgresql+psycopg://nobody@localhost/nothing")


@pytest.mark.parametrize("sessions", [lambda: Session(ENGINE), scoped_session(sessionmaker(ENGINE)), Session, "x"])
@pytest.mark.parametrize("engine", [ENGINE, None])
def test_sessions_that_are_no_sessionmaker_are_refused_and_not_ignored(engine, sessions):
    with pytest.raises(DefinitionError, match="sessions is a sessionmaker; got"):
        Database(engine, sessions=sessions)


def test_a_sessionmaker_brings_its_engine_along():
    maker = sessionmaker(ENGINE)
    assert (Database(sessions=maker).engine, Database(sessions=maker).sessions) == (ENGINE, maker)


def test_without_either_there_is_no_database():
    with pytest.raises(DefinitionError, match="set durable_engine"):
        Database(sessions=sessionmaker())
