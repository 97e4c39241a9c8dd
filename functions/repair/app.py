"""Every minute: moves on what is overdue."""

from backburner import bootstrap

handler = (
    bootstrap.repair()
)  # built at import: Lambda gives the init phase a full CPU, the first request a share of one
