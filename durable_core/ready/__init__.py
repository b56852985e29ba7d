"""Ready kinds of delivery: `email.send` and `webhook.post`. Importing declares nothing; call `declare(settings)`."""
