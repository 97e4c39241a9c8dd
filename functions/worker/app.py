"""The lane queues: runs jobs."""

from backburner import bootstrap

handler = (
    bootstrap.worker()
)  # built at import: Lambda gives the init phase a full CPU, the first request a share of one
