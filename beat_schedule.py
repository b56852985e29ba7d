"""
The sweeps that beat drives, spelled out. Any number of beats may run; a test keeps this equal to `durable_core.sweeps`.

All go to a queue of their own, so that a backlog of work cannot starve the rescue.
"""

CONTROL = {"queue": "durable.control"}

beat_schedule = {
    # Tops up the queues with hints of due rows: a lost hint, or a flushed Redis, costs one interval.
    "durable-dispatch": {"task": "durable.dispatch", "schedule": 1.0, "options": CONTROL},
    # Takes back what lost workers hold.
    "durable-reap": {"task": "durable.reap", "schedule": 5.0, "options": CONTROL},
    # Writes the deliveries of the slots that are due: one row per slot, however many beats run.
    "durable-cron": {"task": "durable.cron", "schedule": 1.0, "options": CONTROL},
    # Has running operations polled: each when its poll is due.
    "durable-poll": {"task": "durable.poll", "schedule": 1.0, "options": CONTROL},
    # Ends waiting deliveries whose time to be useful is over.
    "durable-expire": {"task": "durable.expire", "schedule": 15.0, "options": CONTROL},
    # Has events of other systems brought to their end whose process was lost.
    "durable-ingest": {"task": "durable.ingest", "schedule": 15.0, "options": CONTROL},
    # Deletes finished rows past their retention: once an hour, and offered more often, for beat counts from its start.
    "durable-prune": {"task": "durable.prune", "schedule": 300.0, "options": CONTROL},
}
