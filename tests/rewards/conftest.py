import pytest

from lib.sandbox import client


@pytest.fixture(autouse=True)
def patience_with_sandboxes(monkeypatch):
    """Where much else runs, a sandbox may take longer than a run would wait for it."""
    monkeypatch.setattr(client, "GRACE", 300)
