"""Tasks in folders, each episode in a sandbox."""
