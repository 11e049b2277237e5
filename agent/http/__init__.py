"""Agents as programs: an endpoint with OpenAI's and Anthropic's API, and what it trains on."""
