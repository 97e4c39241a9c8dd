"""Backburner: asynchronous LLM work on AWS serverless."""
