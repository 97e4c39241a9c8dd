"""Adapters, handlers and providers against services that behave as the real ones do."""
