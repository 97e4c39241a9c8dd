"""The LLM providers, one file each. All raise what `errors.py` names, and nothing else."""
