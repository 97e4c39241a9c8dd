"""One module for each queue: its worker, and a submitter that obeys lines of JSON. They run in their own environments.

A unit is one worker process (with what it starts), given `PEER_UNIT` and `PEER_THREADS`; the provider learns which unit
calls by the end of the API key. What a scenario changes comes by environment as well, see `common`.
"""
