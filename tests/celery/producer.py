"""
A web process of its own: it enqueues one delivery and is held before its COMMIT (K0), or right after it (K1).

`python -m tests.celery.producer K0 <key>`. The gate's name is the key.
"""

import sys

from tests.celery import shop, shop_app


def main(point: str, key: str) -> None:
    with shop.sessions()() as session:
        shop_app.kinds.order.options(key=key).enqueue(session, "by a producer")
        if point == "K0":
            session.flush()
            shop.hold(key)
        else:
            # The host's own event, which comes before that of the hints.
            session.info["hold_after_commit"] = key
        session.commit()
    shop_app.durable.carrier.flush(20)


if __name__ == "__main__":
    main(*sys.argv[1:])
