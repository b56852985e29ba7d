"""
Documents: JSON that people and programs edit at once, and nobody overwrites unseen.

`Documents(name, model, keep=...)` is a collection of them: `create, get, save, history, revision, restore, delete` and
`page`, each with the caller's transaction first; their async forms begin with an a.
"""

from durable_core.documents.declare import MOST_BYTES, Documents
from durable_core.documents.rows import Document, Revision, Saved

__all__ = ["MOST_BYTES", "Document", "Documents", "Revision", "Saved"]
