"""POST /jobs: takes a request in."""

from backburner import bootstrap

handler = (
    bootstrap.ingest()
)  # built at import: Lambda gives the init phase a full CPU, the first request a share of one
