"""The ways of telling a target that a job has ended, one file each."""
