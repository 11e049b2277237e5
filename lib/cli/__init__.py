"""The command line: flags.py parses it, secrets.py keeps keys out of logs, user_code.py loads path/to/file.py:name."""
