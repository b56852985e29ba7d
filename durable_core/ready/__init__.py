"""
Ready kinds of delivery: `email.send`, `webhook.post` and `notify.send`.

Importing declares nothing; call `declare(...)` with your settings.
"""
