"""POST /slack/…: takes in messages, buttons and slash commands."""

from backburner import bootstrap

handler = bootstrap.slack()  # built at import: Lambda gives the init phase a full CPU, the first request a share of one
