"""The whole stack on one machine: a local AWS, a small language model, and the shipped template deployed to
it.
"""
