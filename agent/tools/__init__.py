"""What an episode can call: tools, the built-in ones, parsers of calls."""
