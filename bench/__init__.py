"""Measurements that anyone can repeat. Figures are of the machine they are run on."""
